"""Train a built-in model (``gdn`` or ``mamba2``) and write a Hugging Face folder.

    python scripts/train_builtin.py tokenizer --text TEXT --out TOKENIZER
    python scripts/train_builtin.py rows --text TEXT --tokenizer TOKENIZER --out ROWS
    python scripts/train_builtin.py train gdn --minutes 9 --rows ROWS --tokenizer TOKENIZER \\
        --out OUT
    python scripts/train_builtin.py evaluate gdn --init OUT --tokenizer TOKENIZER --out RESULTS

``heldout`` writes the held-out text that the package carries, ``card`` a model card. TEXT holds
gsm8k_train.jsonl (openai/grade-school-math), tinyshakespeare.txt (karpathy/char-rnn), kjv.txt
(King James Bible, a verse a line; Debian package bible-kjv-text) and any further English as .txt
files. Worked problems come from ``pip install reasoning-gym``, or from a folder given by
``--gsm-symbolic``. One GPU; on a CPU only the sizes of a test are practical.

Owns the training loop and its schedule: the whole step (forward, backward, optimiser) is one CUDA
graph, the learning rate and the recall curriculum follow the clock and end with ``--minutes``.
Everything else is in the package ``training``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from tokenizers import Tokenizer  # noqa: E402
from training import (  # noqa: E402
    card,
    data,
    evaluate,
    export,
    gated_delta,
    hybrid,
    mamba2,
    sources,
)
from training.optimizer import Optimizer  # noqa: E402


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("heldout", "tokenizer", "rows", "train", "evaluate", "card"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True, help="folder to write")
        if name in ("heldout", "tokenizer", "rows"):
            command.add_argument("--text", type=Path, required=True, help="folder with the texts")
            command.add_argument(
                "--gsm-symbolic",
                help="folder that holds the package reasoning_gym, if not installed",
            )
        if name in ("rows", "train", "evaluate"):
            command.add_argument(
                "--tokenizer", type=Path, required=True, help="folder with tokenizer.json"
            )
        if name in ("train", "evaluate"):
            command.add_argument("model", choices=sorted(export.ARCHITECTURES))
            command.add_argument(
                "--init", type=Path, help="folder whose model.safetensors to start from"
            )
            command.add_argument("--device", default="cuda")
            command.add_argument("--quick", action="store_true", help="small evaluation")
            command.add_argument(
                "--sizes", type=json.loads, default={}, help="JSON: overrides of the model's sizes"
            )
    commands.choices["heldout"].add_argument("--count", type=int, default=2000)
    card_options = commands.choices["card"]
    card_options.add_argument(
        "--runs", type=Path, nargs="+", required=True, help="folders written by train, in order"
    )
    card_options.add_argument("--notes", type=Path, required=True, help="Markdown about the data")
    rows = commands.choices["rows"]
    rows.add_argument("--count", type=int, default=36_000, help=f"rows of {data.ROW} tokens")
    rows.add_argument("--problems", type=int, default=1_000_000)
    rows.add_argument(
        "--curriculum", type=float, nargs=2, default=(0.0, 1.0), metavar=("FROM", "TO")
    )
    rows.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    rows.add_argument("--seed", default="0")
    train = commands.choices["train"]
    train.add_argument(
        "--rows", type=Path, required=True, help="folder written by the command rows; waited for"
    )
    train.add_argument(
        "--minutes", type=float, required=True, help="from the start of the process to lr 0"
    )
    train.add_argument("--max-steps", type=int, default=10**9)
    train.add_argument("--batch", type=int, default=8, help="rows of a step")
    train.add_argument(
        "--row-tokens", type=int, default=data.ROW, help="tokens of a row that are used"
    )
    train.add_argument("--lr", type=float, default=3e-3)
    train.add_argument("--warmup", type=int, default=150)
    train.add_argument(
        "--compile", action="store_true", help="torch.compile the parts between the scans"
    )
    train.add_argument("--no-evaluation", action="store_true")
    return parser.parse_args(argv)


def compile_parts() -> Callable[[], None]:
    """Compile the pure parts of both models, once for all layers; the scans over chunks stay as
    they are.

    Returns a function that undoes it (evaluation uses many shapes, each of which would be
    compiled).
    """
    parts = [
        (hybrid.Layer, "_begin"),
        (hybrid.Layer, "_finish"),
        (gated_delta.GatedDeltaNet, "combine"),
        (gated_delta, "_chunk_terms"),
        (mamba2.Mixer, "project"),
        (mamba2.Mixer, "combine"),
        (mamba2, "_chunk_terms"),
        (mamba2, "_chunk_output"),
        (sys.modules[__name__], "weighted_loss"),
    ]
    originals = [getattr(owner, name) for owner, name in parts]
    for (owner, name), original in zip(parts, originals, strict=True):
        setattr(owner, name, torch.compile(original, dynamic=False))

    def undo() -> None:
        for (owner, name), original in zip(parts, originals, strict=True):
            setattr(owner, name, original)

    return undo


def weighted_loss(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Mean cross entropy by weight. logits [N, vocabulary], targets [N], weights [N]."""
    loss = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    return (loss * weights).sum() / weights.sum()


class TrainStep:
    """One training step on static buffers: `ids` and `weights` [B, T + 1] are filled by the
    caller before each `run`.

    The first half of the rows starts every step from the state that the row above left, without
    end: the model meets states as old as those of a very long text. The other half starts from
    zero. Nothing is differentiated through the start state.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, batch: int, length: int):
        device = next(model.parameters()).device
        self.model, self.optimizer = model, optimizer
        self.ids = torch.zeros(batch, length + 1, dtype=torch.int16, device=device)
        self.weights = torch.ones(batch, length + 1, dtype=torch.uint8, device=device)
        self.loss = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)
        self._states = model.new_states(batch, device)
        self._carried = torch.arange(batch, device=device) < batch // 2
        self._autocast = device.type == "cuda"
        self.run = self._work

    def _work(self) -> None:
        ids = self.ids.long()
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=self._autocast):
            logits, finals = self.model(ids[:, :-1], self._states)
        loss = weighted_loss(
            logits.flatten(0, 1), ids[:, 1:].flatten(), self.weights[:, 1:].flatten().float()
        )
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        self.norm.copy_(self.optimizer.step())
        self.loss.copy_(loss.detach())
        with torch.no_grad():
            for state, final in zip(self._states, finals, strict=True):
                if state is not None:
                    kept = self._carried.view(-1, *[1] * (final.dim() - 1)) & final.isfinite()
                    state.copy_(torch.where(kept, final, 0.0))

    def capture(self) -> None:
        """Warm up with learning rate 0 and make `run` a CUDA graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._work()
        self.run = graph.replay


def learning_rate(progress: float, step: int, peak: float, warmup: int) -> float:
    """Linear warm-up over `warmup` steps, then linear decay to 0 at progress 1."""
    return peak * min(1.0, (step + 1) / warmup) * max(0.0, 1.0 - progress)


def train(args: argparse.Namespace) -> None:
    """The subcommand ``train``."""
    begun = time.monotonic()
    log: list[dict] = []

    def say(**values) -> None:
        values = {"seconds": round(time.monotonic() - begun, 1), **values}
        log.append(values)
        print(args.model, json.dumps(values), flush=True)

    device = torch.device(args.device)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = export.build(args.model, **args.sizes).to(device)
    if args.init:
        export.load_weights(model, args.init)
    optimizer = Optimizer(model)
    undo_compile = compile_parts() if args.compile else lambda: None
    step = TrainStep(model, optimizer, args.batch, args.row_tokens)
    if device.type == "cuda":
        step.ids.random_(0, model.config.vocab_size)
        step.capture()
        torch.cuda.synchronize()
        say(event="captured", memory_gb=round(torch.cuda.max_memory_allocated() / 2**30, 1))
    tokens, weights = (
        torch.from_numpy(array[:, : args.row_tokens + 1]).to(device)
        for array in load_rows(args.rows)
    )
    say(event="rows", tokens=tokens.numel())

    started, count, saved = time.monotonic(), 0, time.monotonic()
    limit = begun + 60 * args.minutes - started
    pending: deque = deque()
    since = 0
    while count < args.max_steps:
        progress = min(1.0, (time.monotonic() - started) / limit)
        if progress >= 1.0:
            break
        at = int(progress * (len(tokens) - args.batch))
        step.ids.copy_(tokens[at : at + args.batch])
        step.weights.copy_(weights[at : at + args.batch])
        optimizer.learning_rate.fill_(learning_rate(progress, count, args.lr, args.warmup))
        step.run()
        count += 1
        if (
            device.type == "cuda"
        ):  # the host stays at most two steps ahead, so that the clock means something
            event = torch.cuda.Event()
            event.record()
            pending.append(event)
            if len(pending) > 2:
                pending.popleft().synchronize()
        if count % 50 == 0:
            rate = (count - since) * args.batch * args.row_tokens / (time.monotonic() - saved)
            since, saved = count, time.monotonic()
            say(
                step=count,
                loss=round(step.loss.item(), 4),
                norm=round(step.norm.item(), 3),
                tok_s=round(rate),
            )
        if count % 1000 == 0:
            export.save(model, args.out)
    undo_compile()
    evaluate.rounded(model)
    export.save(model, args.out)
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    summary = {
        "model": args.model,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": count,
        "tokens": count * args.batch * args.row_tokens,
        "seconds": round(time.monotonic() - started, 1),
        "arguments": {k: str(v) for k, v in vars(args).items()},
    }
    write_results(args.out, summary, log, {})
    if not args.no_evaluation:
        run_evaluation(model, tokenizer, args, summary, log, say)


def make_rows(args: argparse.Namespace) -> None:
    """The subcommand ``rows``: tokens.npy and weights.npy, the latter renamed into place when
    both are whole."""
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    tokens, weights = data.prepare(
        text_folder=args.text,
        tokenizer=tokenizer,
        seed=args.seed,
        n_problems=args.problems,
        n_rows=args.count,
        progress=tuple(args.curriculum),
        workers=args.workers,
        gsm_symbolic=args.gsm_symbolic,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    np.save(args.out / "tokens.npy", tokens.astype(np.int16))
    np.save(args.out / "part.npy", weights)
    (args.out / "part.npy").rename(args.out / "weights.npy")


def load_rows(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (int16) and weights (uint8) of all rows; waits until the command ``rows`` has
    written them."""
    while not (folder / "weights.npy").exists():
        time.sleep(0.2)
    return np.load(folder / "tokens.npy"), np.load(folder / "weights.npy")


def run_evaluation(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    args: argparse.Namespace,
    summary: dict,
    log: list[dict],
    say,
) -> None:
    """Evaluate with full FP32 products where not under autocast; every part is on disk as soon
    as it is known."""
    torch.backends.cuda.matmul.allow_tf32 = False
    results: dict = {}
    for name, result in evaluate.report(model, tokenizer, quick=args.quick):
        results[name] = result
        short = (
            {k: v for k, v in result.items() if k not in ("right", "texts")}
            if isinstance(result, dict)
            else result
        )
        say(part=name, result=short)
        write_results(args.out, summary, log, results)


def write_results(folder: Path, summary: dict, log: list[dict], results: dict) -> None:
    """One JSON file beside the weights: what was run, its log, what was measured."""
    text = json.dumps({"summary": summary, "results": results, "log": log}, indent=1)
    (folder / "training.json").write_text(text + "\n")


def make_tokenizer(args: argparse.Namespace) -> None:
    """The subcommand ``tokenizer``."""
    gsm = sources.gsm_symbolic_rows("tokenizer", 20_000, args.gsm_symbolic)
    english = sources.english_training_texts(args.text)
    english = "\n\n".join(english[name] for name in (sources.TINY_SHAKESPEARE, "kjv.txt"))
    texts = sources.tokenizer_corpus(
        gsm, sources.gsm8k_rows(args.text / "gsm8k_train.jsonl"), english
    )
    sources.save_tokenizer(sources.train_tokenizer(texts), args.out, 1_048_576)


def make_heldout(args: argparse.Namespace) -> None:
    """The subcommand ``heldout``."""
    sources.write_heldout(args.text, args.out, args.count, args.gsm_symbolic)


def make_card(args: argparse.Namespace) -> None:
    """The subcommand ``card``."""
    card.write(args.runs, args.notes, args.out)


def evaluate_folder(args: argparse.Namespace) -> None:
    """The subcommand ``evaluate``."""
    model = export.build(args.model, **args.sizes).to(args.device)
    export.load_weights(model, args.init)
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    args.out.mkdir(parents=True, exist_ok=True)
    run_evaluation(
        model,
        tokenizer,
        args,
        {"model": args.model},
        [],
        lambda **v: print(json.dumps(v), flush=True),
    )


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    args = parse_args(argv)
    commands = {
        "heldout": make_heldout,
        "tokenizer": make_tokenizer,
        "rows": make_rows,
        "train": train,
        "evaluate": evaluate_folder,
        "card": make_card,
    }
    commands[args.command](args)


if __name__ == "__main__":
    main()
