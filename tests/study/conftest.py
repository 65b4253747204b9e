"""Fixtures of the study's tests."""

import pytest

from replayssm.study import provenance


@pytest.fixture(autouse=True)
def _fixed_commit(monkeypatch):
    """The clone's commit may change while tests run, and is part of a run's provenance."""
    monkeypatch.setattr(provenance, "code_version", lambda: ("0" * 40, False))
