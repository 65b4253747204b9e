"""Provenance: code and machine class, and nothing that changes between equal runs."""

import json
import subprocess

import pytest
import torch

import replayssm
from replayssm.study import provenance


@pytest.fixture(autouse=True)
def _fixed_commit():
    """Here the real commit is asked for: takes the place of the fixture in conftest.py."""


def git(folder, *arguments):
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A small repository that the package pretends to run from."""
    package = tmp_path / "clone" / "replayssm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(replayssm, "__file__", str(package / "__init__.py"))
    return package


def test_a_clone_names_its_commit_and_whether_the_package_was_changed(clone):
    root = clone.parent
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "one")
    commit, dirty = provenance.code_version()
    assert len(commit) == 40 and dirty is False
    (root / "results").mkdir()
    (root / "results" / "new.json").write_text("{}")
    assert provenance.code_version() == (commit, False), "results are not code"
    (clone / "new.py").write_text("")
    assert provenance.code_version() == (commit, True)


def test_an_installed_package_has_no_commit_even_inside_another_clone(clone, monkeypatch):
    monkeypatch.delenv("REPLAYSSM_COMMIT", raising=False)
    root = clone.parent
    assert provenance.code_version() == ("unknown", None)
    git(root, "init", "-q")
    (root / "README").write_text("")
    git(root, "add", "README")
    git(root, "commit", "-q", "-m", "one")
    assert provenance.code_version() == ("unknown", None)
    monkeypatch.setenv("REPLAYSSM_COMMIT", "a" * 40)
    assert provenance.code_version() == ("a" * 40, None), "told from outside"


def test_equal_environments_are_described_equally():
    here = provenance.environment(torch.device("cpu"))
    assert here == provenance.environment(torch.device("cpu"))
    assert here["packages"]["torch"] == torch.__version__
    assert here["threads"] == torch.get_num_threads()
    json.dumps(here)
