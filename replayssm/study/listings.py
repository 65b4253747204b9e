"""Lists for the command line: runs and how far they are, policies and their cost, models.

Owns the text of `replayssm status`, `policies` (engine presets included) and `models`. Imports
neither torch nor transformers until policies are asked for.
"""

from pathlib import Path

from replayssm.models.architectures import ARCHITECTURES
from replayssm.study.store import find_runs, read_json
from replayssm.study.tables import markdown_table

BUILTIN_MODELS = {
    "builtin/gdn": "Gated DeltaNet with attention (qwen3_5), packaged",
    "builtin/mamba2": "Mamba-2 without attention (mamba2), packaged",
}

# Layers that costs are shown for: sizes of current 4B to 48B hybrids.
_EXAMPLE_LAYERS = {
    "Mamba-2 128 x 64 x 128": ("mamba2", 128, 64, 128, 8),
    "Gated DeltaNet 32 x 128 x 128": ("gated_delta", 32, 128, 128, 16),
    "Kimi Delta 32 x 128 x 128": ("kimi_delta", 32, 128, 128, 32),
}


def status_table(where: Path) -> str:
    """One line per run folder at or under `where`: experiment, model, status, progress, error."""
    rows = []
    for folder in find_runs(where):
        identity = read_json(folder.spec_path)["identity"]
        status = folder.status()
        state = status["status"]
        if state == "started":
            state = "running" if folder.in_use() else "interrupted"
        total = identity["prompts"] * identity["tokens"]
        if state == "complete":
            done = total
        else:
            stretches = [folder.finished(prompt) for prompt in range(identity["prompts"])]
            done = sum(stop - start for prompt in stretches for start, stop in prompt)
        rows.append(
            [
                identity["experiment"],
                folder.path.name,
                identity["model"],
                state,
                f"{100 * done / total:.0f} % of {identity['prompts']} x {identity['tokens']:,}",
                status.get("error", ""),
            ]
        )
    if not rows:
        raise ValueError(f"no run under {where}")
    return markdown_table(("experiment", "run", "model", "status", "tokens", "error"), rows)


def policies_text(names: list[str], *, ring_len: int, device: str = "cuda") -> str:
    """Every named policy (or `names`): bytes at ring length `ring_len`, the backend that "auto"
    takes on `device` ("cuda" or "cpu") with the reason, then what rounds where.
    """
    from dataclasses import replace

    import torch

    from replayssm.ops.capability import no_device
    from replayssm.policy import PRESETS, StateGeometry, parse_policy
    from replayssm.presets import ENGINE_PRESETS

    if device not in ("cuda", "cpu"):
        raise ValueError(f"device {device!r} is not one of cuda, cpu")
    layers = {
        title: StateGeometry(recurrence=kind, heads=heads, rows=rows, cols=cols, key_groups=groups)
        for title, (kind, heads, rows, cols, groups) in _EXAMPLE_LAYERS.items()
    }
    chosen = {
        name: policy if "@" in name else replace(policy, ring_len=ring_len)
        for name, policy in ({n: parse_policy(n) for n in names} or PRESETS).items()
    }
    table = []
    for name, policy in chosen.items():
        sizes = [f"{policy.bytes_per_state_element(layer):.4g}" for layer in layers.values()]
        moved = [f"{policy.bytes_per_token(layer) / 1e3:,.0f}" for layer in layers.values()]
        backend = _backend_text(policy, layers, device)
        size = sizes[0] if len(set(sizes)) == 1 else " / ".join(sizes)
        table.append([name, size, *moved, backend])
    moved = (f"kB / token, {title}" for title in layers)
    header = ("policy", "bytes / state element", *moved, f"backend on {device}")
    here = no_device(torch.device(device)) if device == "cuda" else None
    details = [
        f"{name}\n" + "\n".join(f"  {line}" for line in policy.describe())
        for name, policy in chosen.items()
    ]
    engines = [engine_text(name) for name in names or ENGINE_PRESETS if name in ENGINE_PRESETS]
    if engines and not names:
        engines.insert(0, "Serving engines: the policy that is nearest to what each rounds today.")
    return "\n\n".join(
        [
            markdown_table(header, table),
            "kB / token: state and ring bytes that one layer reads and writes per token of one "
            f"sequence, averaged over a ring of L = {ring_len} tokens (policies may say @L).",
            *([f"On this machine there are no kernels for {device}: {here}."] if here else []),
            *details,
            *engines,
        ]
    )


def _backend_text(policy, layers: dict, device: str) -> str:
    """What "auto" takes for `policy` on a CPU, or on a GPU that can run kernels."""
    from replayssm.ops.capability import no_kernel

    if device == "cpu":
        return "reference"
    missing: dict[str, list[str]] = {}
    for layer in layers.values():
        reason = no_kernel(layer.recurrence, policy, rows=layer.rows, cols=layer.cols)
        if reason is not None:
            missing.setdefault(reason, []).append(layer.recurrence)
    if len(layers) in map(len, missing.values()):  # one reason for all
        return f"reference ({next(iter(missing))})"
    told = ["triton"] if sum(map(len, missing.values())) < len(layers) else []
    told += [f"{', '.join(named)}: reference ({reason})" for reason, named in missing.items()]
    return "; ".join(told)


def engine_text(name: str) -> str:
    """What the preset `name` stands for: where it was read, what it rounds, what differs."""
    from replayssm.presets import ENGINE_PRESETS

    preset = ENGINE_PRESETS[name]
    return "\n".join(
        [
            f"{name} = {preset.policy}",
            f"  {preset.engine}; layers: {preset.recurrence}",
            f"  read in {preset.source}",
            *(f"  rounds {line}" for line in preset.rounds),
            *(f"  differs: {line}" for line in preset.differs),
        ]
    )


def models_text() -> str:
    """Built-in models, then architectures that load from a folder or a hub id."""
    builtin = markdown_table(
        ("built-in model", "what it is"), [list(i) for i in BUILTIN_MODELS.items()]
    )
    rows = [[a.name, a.family, ", ".join(a.model_types), a.note] for a in ARCHITECTURES]
    table = markdown_table(("architecture", "recurrence", "model_type", "note"), rows)
    also = "Any folder or hub id with safetensors weights of these architectures:"
    return f"{builtin}\n\n{also}\n\n{table}"
