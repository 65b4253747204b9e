"""Model cards of the built-in models: README.md and training.json of a folder in replayssm/assets.

Owns the words and tables of the card. Every number in it comes from the training.json that
``train`` wrote; nothing is measured here.
"""

from __future__ import annotations

import json
from pathlib import Path

TITLES = {
    "gdn": "Gated DeltaNet / attention hybrid (Qwen3.5 text layout)",
    "mamba2": "Mamba-2 without attention (Mamba-2 layout)",
}
KEPT_ARGUMENTS = ("minutes", "batch", "row_tokens", "lr", "warmup", "compile")
RESULTS_KEPT = ("recall", "memory", "stream", "long_stream", "samples")


def condense(runs: list[dict]) -> dict:
    """What is kept of the runs' training.json: settings, thinned loss curves, the last results.

    The texts of solved problems are left out; ``right`` (one truth value a problem, in the order
    of the packaged held-out rows) becomes a string of 0 and 1.
    """
    results = runs[-1]["results"]
    problems = results["problems"]
    stages = []
    for run in runs:
        summary = run["summary"]
        curve = [entry for entry in run["log"] if "loss" in entry]
        stages.append(
            {
                **{k: summary[k] for k in ("steps", "tokens", "seconds")},
                **{k: summary["arguments"][k] for k in KEPT_ARGUMENTS},
                "loss_by_step": [
                    [e["step"], e["loss"]] for e in curve[:: max(1, len(curve) // 20)]
                ],
            }
        )
    return {
        "model": runs[-1]["summary"]["model"],
        "parameters": runs[-1]["summary"]["parameters"],
        "stages": stages,
        "accuracy": problems["accuracy"],
        "problems": problems["problems"],
        "no_answer": problems["no_answer"],
        "right": "".join(str(int(r)) for r in problems["right"]),
        **{k: round(results[k], 4) for k in ("bits_per_byte_english", "bits_per_byte_problems")},
        **{k: results[k] for k in RESULTS_KEPT},
    }


def table(head: list[str], rows: list[list[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(c) for c in line) + " |" for line in lines)


def length(tokens: float) -> str:
    """A memory length as the card prints it."""
    if tokens >= 1e6:
        return "over a million"
    return f"{tokens:,.0f}" if tokens >= 10 else f"{tokens:.1f}"


def card(facts: dict, notes: str) -> str:
    """The README of a model. `facts` from `condense`; `notes` is Markdown about the data used."""
    name = facts["model"]
    recall = [
        [f"{int(d):,}", f"{r['recalled']:.1%}", f"{r['item']:.1%}", f"{r['number']:.1%}"]
        for d, r in facts["recall"].items()
    ]
    stream = facts["long_stream"]
    in_text = [
        [f"{int(b[1:]) // 2 if b != '<256' else 0:,} – {int(b[1:]):,}", f"{share:.1%}", n]
        for b, (share, n) in stream["recall"].items()
    ]
    part = stream["length"] // len(stream["loss_by_position"])
    losses = [
        [f"{i * part:,} – {(i + 1) * part:,}", f"{x:.3f}"]
        for i, x in enumerate(stream["loss_by_position"])
    ]
    memory = [[layer, ", ".join(map(length, v))] for layer, v in facts["memory"].items()]
    long = sum(m >= 1000 for v in facts["memory"].values() for m in v)
    heads = sum(map(len, facts["memory"].values()))
    stages = [
        [i + 1, f"{s['steps']:,}", f"{s['tokens']:,}", f"{s['batch']} × {int(s['row_tokens']):,}",
         s["lr"], f"{s['seconds']:.0f}"]
        for i, s in enumerate(facts["stages"])
    ]  # fmt: skip
    samples = "\n\n".join(f"```text\n{text}\n```" for text in facts["samples"])
    return f"""# builtin/{name}: {TITLES[name]}

{facts["parameters"]:,} parameters, bfloat16, trained from scratch for `replayssm`, so that number
formats of the recurrent state can be compared on a trained model without a download. It is an
instrument, not an assistant: it solves templated arithmetic problems, remembers facts over long
distances and imitates old English. Licence: Apache-2.0, as the project.

## What it can do

Measured after training on the exported bfloat16 weights, on held-out material.

* Worked problems (gsm_symbolic, greedy generation of the whole solution, {facts["problems"]}
  held-out problems): **{facts["accuracy"]:.1%}** right; {facts["no_answer"]:.1%} without an answer.
* Bits per byte: {facts["bits_per_byte_english"]:.2f} on held-out Shakespeare,
  {facts["bits_per_byte_problems"]:.3f} on held-out worked problems.

Recall of one of four facts stated together, after about so many tokens of other text (200 tests
each; every token of the answer must be the first choice):

{table(["distance in tokens", "recalled", "items", "numbers"], recall)}

Recall inside {stream["texts"]} study texts of {stream["length"]:,} tokens (many facts alive at
once, the latest one counts), by distance:

{table(["distance in tokens", "recalled", "questions"], in_text)}

Loss along these texts, nats per token (the text itself varies; what matters is that it does not
grow beyond the trained length):

{table(["tokens", "loss"], losses)}

## What its state remembers

Memory length of every head, -1 / mean log decay over held-out mixed text, in tokens, by layer,
sorted. {long} of {heads} heads remember a thousand tokens or more.

{table(["layer", "memory length of the heads"], memory)}

## Samples

Temperature 0.7, first seed, not selected:

{samples}

## How it was trained

{table(["stage", "steps", "tokens", "rows of a step", "peak learning rate", "seconds"], stages)}

Each stage ran on one NVIDIA H200. Muon for matrices and AdamW for the rest, linear warm-up, then
linear decay to 0; bf16 autocast with FP32 gates and states; half of the rows start from the state
that the row before them left.

{notes.strip()}

To train it again (`scripts/train_builtin.py` says what lies in TEXT):

    pip install reasoning-gym
    python scripts/train_builtin.py rows --text TEXT --tokenizer replayssm/assets/{name} \\
        --out ROWS1
    python scripts/train_builtin.py train {name} --rows ROWS1 --tokenizer replayssm/assets/{name} \\
        --out STAGE1 --minutes 9 --compile
    python scripts/train_builtin.py rows --text TEXT --tokenizer replayssm/assets/{name} \\
        --out ROWS2 --seed 1 --curriculum 1 1
    python scripts/train_builtin.py train {name} --rows ROWS2 --tokenizer replayssm/assets/{name} \\
        --init STAGE1 --out STAGE2 --minutes 9 --compile
    python scripts/train_builtin.py card --runs STAGE1 STAGE2 --notes NOTES.md \\
        --out replayssm/assets/{name}

Settings, loss curves and all results are in `training.json`.
"""


def write(run_folders: list[Path], notes: Path, out: Path) -> None:
    """Write README.md and training.json to `out` from the training.json of each stage."""
    runs = [json.loads((folder / "training.json").read_text()) for folder in run_folders]
    facts = condense(runs)
    (out / "README.md").write_text(card(facts, notes.read_text()))
    (out / "training.json").write_text(json.dumps(facts, separators=(",", ":")) + "\n")
