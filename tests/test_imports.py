"""Who may import whom, read from the source with `ast`: nothing is imported to find out."""

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "replayssm"

# Each layer may import itself and those before it; cache and ops stand beside each other.
LAYERS = (
    ("formats", "presets"),
    ("policy",),
    ("cache", "ops"),
    ("state_update",),
    ("models",),
    ("engine",),
    ("study",),
    ("cli_bench", "cli_generate", "cli_tasks", "cli_study"),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

CONFINED = {
    "triton": lambda path: path.name.startswith("triton_") or path.parts[:2] == ("ops", "quantize"),
    "transformers": lambda path: path.parts[0] in ("models", "engine"),
    "lm_eval": lambda path: (
        path.parts[:2]
        in (("study", "tasks.py"), ("study", "lm_eval_model.py"), ("study", "lm_eval_plugin.py"))
    ),
    "matplotlib": lambda path: path.parts[:2] == ("study", "figures.py"),
}
LIGHT = (
    *("study/tables.py", "study/figures.py", "study/stats.py", "study/store.py"),
    *("study/answers.py", "study/compare.py", "study/samples.py", "study/task_results.py"),
    *("study/task_tables.py", "study/task_figures.py", "study/task_report.py"),
    *("study/bench_records.py", "study/bench_figures.py", "study/bench_files.py"),
    *("study/bench_step_records.py", "study/bench_step_figures.py"),
    *("study/speculation_summary.py", "study/speculation_figures.py"),
    *("study/gate.py", "study/recommend.py", "study/report.py", "study/attribution.py"),
    *("study/state_figures.py", "study/comparison_figures.py", "study/findings.py"),
)


def sources():
    return sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(("replayssm", *(parts[:-1] if parts[-1] == "__init__" else parts)))


@cache
def imports(path: Path, *, at_import_only: bool = False) -> frozenset[str]:
    """Absolute names of the modules a file imports; optionally only what importing it runs."""
    tree = ast.parse((PACKAGE / path).read_text())
    found = set()

    def visit(node):
        if at_import_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module_name(path).split(".")
                keep = len(parents) - node.level + (path.name == "__init__.py")
                base = ".".join([*parents[:keep], *([node.module] if node.module else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return frozenset(found)


def layer_of(name: str) -> str | None:
    """Layer of a module of this package, None for others and for the package itself."""
    parts = name.split(".")
    return parts[1] if parts[0] == "replayssm" and len(parts) > 1 else None


@pytest.mark.parametrize("path", sources(), ids=str)
def test_imports_point_one_way(path):
    mine = layer_of(module_name(path))
    if mine is None:  # replayssm/__init__.py: a version, and nothing that costs an import
        assert not any(layer_of(name) for name in imports(path))
        return
    assert mine in RANK, f"{mine} has no place among the layers {LAYERS}"
    for name in imports(path):
        theirs = layer_of(name)
        if theirs is None or theirs == mine or theirs not in RANK and name.count(".") == 1:
            continue
        assert RANK[theirs] < RANK[mine], f"{path} imports {name}, which comes after or beside it"


@pytest.mark.parametrize("path", sources(), ids=str)
def test_heavy_packages_stay_where_they_belong(path):
    for name in imports(path):
        allowed = CONFINED.get(name.split(".")[0])
        assert allowed is None or allowed(path), f"{path} imports {name}"


def test_triton_kernels_are_not_needed_to_import_the_rest():
    """On a machine without triton everything but the kernels imports."""
    for path in sources():
        if not CONFINED["triton"](path):
            for name in imports(path, at_import_only=True):
                file = _file_of(name)
                assert file is None or not CONFINED["triton"](file), f"{path} imports {name}"


@pytest.mark.parametrize("light", LIGHT)
def test_redrawing_needs_no_torch(light):
    """Tables, figures and statistics reach neither torch nor transformers, through any module."""
    start = Path(light)
    if not (PACKAGE / start).exists():
        pytest.fail(f"{light} is missing: the laptop half of the instrument has moved")
    reached, todo = {}, [(start, (light,))]
    while todo:
        path, route = todo.pop()
        if path in reached:
            continue
        reached[path] = route
        for name in imports(path, at_import_only=True):
            assert name.split(".")[0] not in ("torch", "transformers"), (
                f"{' -> '.join(route)} -> {name}"
            )
            for file in _files_run_by(name):
                todo.append((file, (*route, str(file))))


def _file_of(name: str) -> Path | None:
    """The file of a module of this package, or None."""
    package, *parts = name.split(".")
    candidates = [Path(*parts, "__init__.py")]
    if parts:
        candidates.append(Path(*parts[:-1], f"{parts[-1]}.py"))
    existing = [path for path in candidates if (PACKAGE / path).is_file()]
    return existing[0] if package == "replayssm" and existing else None


def _files_run_by(name: str) -> list[Path]:
    """Files that run when `name` is imported: its module and every package above it."""
    parts = name.split(".")
    above = (_file_of(".".join(parts[:depth])) for depth in range(1, len(parts) + 1))
    return [file for file in above if file is not None]
