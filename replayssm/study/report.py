"""From run folders to tables and figures on disk, and the check that they still belong together.

Owns file names under `tables/` and `figures/` and the manifest that ties each file to the data it
was drawn from. Computes nothing; imports neither torch nor transformers.
"""

import hashlib
from collections import defaultdict
from pathlib import Path

from replayssm.study import comparison_figures, figures, state_figures, tables
from replayssm.study.store import (
    RunRecord,
    atomic_path,
    digest,
    file_digest,
    find_runs,
    load_run,
    read_json,
    write_json,
)

MANIFEST = "manifest.json"


def load_records(where: Path) -> list[RunRecord]:
    """Complete runs at or under `where` (others are left out); ValueError if there is none."""
    folders = find_runs(where)
    records = [load_run(folder) for folder in folders if folder.status()["status"] == "complete"]
    if not records:
        raise ValueError(f"no complete run under {where} ({len(folders)} unfinished or failed)")
    return records


def default_output(where: Path) -> Path:
    """The results root a run folder lies in: what is above the nearest folder named `runs`."""
    for folder in [where.resolve(), *where.resolve().parents]:
        if folder.name == "runs":
            return folder.parent
    raise ValueError(
        f"{where} does not lie in a folder named 'runs': say where to write with --out"
    )


def data_digest(record: RunRecord) -> str:
    """What the outputs of one run depend on: specification, provenance and summary."""
    return digest([record.document, record.provenance, record.summary])


def _slug(text: str) -> str:
    kept = "".join(c if c.isalnum() or c in ".-" else "-" for c in text)
    return "-".join(part for part in kept.split("-") if part)


def _names(records: list[RunRecord]) -> dict[str, str]:
    """Run path -> file stem: experiment and model, with the run id where that is not unique."""
    stems = defaultdict(list)
    for record in records:
        model = record.model.removeprefix("builtin/").rstrip("/").split("/")[-1]
        stems[_slug(f"{record.experiment}-{model}")].append(record)
    return {
        str(record.path): stem if len(group) == 1 else f"{stem}-{record.run_id}"
        for stem, group in stems.items()
        for record in group
    }


def outputs(records: list[RunRecord]) -> dict[str, tuple[list[RunRecord], bytes]]:
    """Relative path -> (runs it shows, content) of every table and figure of `records`.

    In the order of names, not of the list: a run and a later redrawing write the same bytes.
    """
    records = sorted(records, key=lambda r: (r.experiment, r.model, r.run_id))
    files: dict[str, tuple[list[RunRecord], bytes]] = {}
    experiments = defaultdict(list)
    for record in records:
        experiments[record.experiment].append(record)
    for experiment, group in sorted(experiments.items()):
        stem = f"tables/{_slug(experiment)}"
        text = f"# {experiment}\n\n" + "\n".join(tables.summary_markdown(r) for r in group)
        files[f"{stem}.md"] = (group, text.encode())
        files[f"{stem}.csv"] = (group, tables.summary_csv(group).encode())
        files[f"{stem}-by-position.csv"] = (group, tables.position_csv(group).encode())
        files[f"{stem}-by-phase.csv"] = (group, tables.phase_csv(group).encode())
        files[f"{stem}-attribution.csv"] = (group, tables.attribution_csv(group).encode())
        for kind, content in (comparison_figures.published_comparison(group) or {}).items():
            files[f"figures/{_slug(experiment)}-published-comparison.{kind}"] = (group, content)
    for path, stem in _names(records).items():
        record = next(r for r in records if str(r.path) == path)
        for name, draw in (
            figures.FIGURES | state_figures.FIGURES | comparison_figures.FIGURES
        ).items():
            for kind, content in (draw(record) or {}).items():
                files[f"figures/{stem}-{name}.{kind}"] = ([record], content)
    return files


def write_report(records: list[RunRecord], out: Path) -> list[Path]:
    """Write all tables and figures of `records` under `out` and note in the manifest where from.

    Entries of other experiments in the manifest are kept; files of these experiments that are no
    longer produced are deleted.
    """
    files = outputs(records)
    experiments = {record.experiment for record in records}
    for folder in ("tables", "figures"):
        (out / folder).mkdir(parents=True, exist_ok=True)
        manifest = _manifest(out / folder)
        for name in [n for n, entry in manifest.items() if entry["experiment"] in experiments]:
            if f"{folder}/{name}" not in files:
                (out / folder / name).unlink(missing_ok=True)
            del manifest[name]
        for name, (shown, content) in files.items():
            if not name.startswith(f"{folder}/"):
                continue
            with atomic_path(out / name) as temporary:
                temporary.write_bytes(content)
            manifest[name.split("/", 1)[1]] = {
                "experiment": shown[0].experiment,
                "runs": [record.run_id for record in shown],
                "data_sha256": digest([data_digest(record) for record in shown]),
                "file_sha256": hashlib.sha256(content).hexdigest(),
            }
        write_json(out / folder / MANIFEST, dict(sorted(manifest.items())))
    return [out / name for name in files]


def check_report(records: list[RunRecord], out: Path) -> list[str]:
    """Reasons why the tables and figures under `out` do not show `records`; empty if they do."""
    problems = []
    by_id = {record.run_id: record for record in records}
    shown: set[str] = set()
    for folder in ("tables", "figures"):
        for name, entry in _manifest(out / folder).items():
            if not set(entry["runs"]) & set(by_id):
                continue
            path = out / folder / name
            shown.update(entry["runs"])
            missing = [run for run in entry["runs"] if run not in by_id]
            if missing:
                problems.append(f"{path} shows run {missing[0]}, which is not there")
            elif entry["data_sha256"] != digest([data_digest(by_id[run]) for run in entry["runs"]]):
                problems.append(f"{path} is stale: its data changed since it was drawn")
            if not path.exists():
                problems.append(f"{path} is missing")
            elif file_digest(path) != entry["file_sha256"]:
                problems.append(f"{path} was edited after it was drawn")
    problems += [
        f"run {run} has no table or figure under {out}" for run in by_id if run not in shown
    ]
    return problems


def _manifest(folder: Path) -> dict[str, dict]:
    path = folder / MANIFEST
    return read_json(path) if path.exists() else {}
