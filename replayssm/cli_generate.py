"""The commands about text and speculation: generate, speculation.

Owns their argument names, how tokens become text on a terminal, and the line of numbers after it;
`cli` owns errors and exit codes. Imports are made inside the commands, so that `--help` does not
wait for torch, and `speculation --redraw` needs no model. `generate` puts text on stdout, numbers
on stderr.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from os.path import commonprefix
from pathlib import Path

NGRAM, HEAD = "ngram", "mtp"
BUILTIN = ("builtin/gdn", "builtin/mamba2")
_CONTEXT = 8  # tokens that may decide how the next is spelled, as about spaces


def add_commands(command: Callable, *, names: Callable, integers: Callable) -> None:
    """Add the commands. `command(name, function, text)` makes a parser; `names` and `integers` read
    "A,B".
    """
    _add_speculation(command, names=names, integers=integers)
    generate = command(
        "generate",
        _generate,
        "Continue a prompt under a policy, as a server decodes it, with or without speculation; "
        "prints tokens per second, accepted drafts, and bytes of recurrent state.",
    )
    generate.add_argument("--model", required=True, help="builtin/NAME, a folder, or a hub id")
    generate.add_argument(
        "--policy", default="fp32", help="see `replayssm policies` (default: fp32)"
    )
    given = generate.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", metavar="TEXT")
    given.add_argument("--prompt-file", type=Path, metavar="FILE", help="- is standard input")
    generate.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    generate.add_argument(
        "--seed", type=int, default=0, help="of sampling and of stochastic rounding"
    )
    generate.add_argument(
        "--speculate", type=int, default=0, metavar="N", help="drafts a round, 0 (default) to 16"
    )
    generate.add_argument(
        "--drafter",
        default=NGRAM,
        help="ngram (default: what followed the same tokens before), mtp (the checkpoint's trained "
        "multi-token head), or a smaller model with the same tokens",
    )
    generate.add_argument(
        "--undo",
        default="cursor",
        help="how rejected drafts are undone: cursor (default), or snapshots (a state per draft)",
    )
    generate.add_argument(
        "--flush",
        default="aligned",
        metavar="WHEN",
        help="aligned (default: after as many tokens as without speculation), or early (before a "
        "window that does not fit the ring)",
    )
    generate.add_argument(
        "--conventional",
        action="store_true",
        help="for comparison: read and write the state for every token, by kernels; needs a GPU, "
        "and --policy fp32@1, fp16@1 or bf16@1",
    )
    generate.add_argument(
        "--fast",
        action="store_true",
        help="what surrounds the recurrences as servers compute it: norms, convolutions and gates "
        "in one kernel each, the last projection in the dtype of the weights; needs a GPU",
    )
    generate.add_argument("--ignore-stop", action="store_true", help="go on after a stop token")
    generate.add_argument("--dtype", default="float32", help="of weights: float32, bfloat16, ...")
    generate.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    generate.add_argument(
        "--backend", default="auto", help="of the state update: auto, triton, reference"
    )
    generate.add_argument(
        "--trust-remote-code", action="store_true", help="allow code shipped with a model"
    )


def _add_speculation(command: Callable, *, names: Callable, integers: Callable) -> None:
    study = command(
        "speculation",
        _speculation,
        "Measure which drafts a model accepts under each policy, and how far it is from FP32 while "
        "it does; a gain that comes with drift or repetition is flagged.",
    )
    study.add_argument("--models", type=names, metavar="A,B", help="default: both built-in models")
    study.add_argument("--policies", type=names, metavar="A,B", help="fp32 first")
    study.add_argument(
        "--drafters",
        type=names,
        metavar="A,B",
        help="ngram and names of models (default: ngram, for a built-in model also the other one)",
    )
    study.add_argument("--drafts", type=integers, metavar="N,N", help="default: 0,4,8")
    study.add_argument("--prompts", type=int, help="ten or more give intervals (10)")
    study.add_argument("--prompt-tokens", type=int, metavar="N", help="tokens of a prompt (96)")
    study.add_argument("--tokens", type=int, help="tokens after each prompt (64)")
    study.add_argument("--temperature", type=float, help="0 (default) is greedy")
    study.add_argument("--seed", type=int, help="of sampling and of stochastic rounding")
    study.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    study.add_argument(
        "--backend", default="auto", help="of the state update: auto, triton, reference"
    )
    study.add_argument(
        "--out",
        type=Path,
        default=Path("results/speculation"),
        help="folder of records, tables and figures (default: results/speculation)",
    )
    study.add_argument(
        "--redraw", action="store_true", help="only redraw from the records in --out"
    )


@dataclass(kw_only=True)
class _Numbers:
    """What is printed after a text; `seconds` from the first new token to the last."""

    tokens: int = 0
    seconds: float = 0.0
    state_bytes: dict[str, int] | None = None
    backends: tuple[str, ...] = ()
    acceptance: object = None


def _generate(arguments: argparse.Namespace) -> int:
    import torch

    from replayssm.models.adapter import Adapter
    from replayssm.models.loading import load
    from replayssm.policy import parse_policy
    from replayssm.study.subject import stop_tokens

    policy = parse_policy(arguments.policy)
    if arguments.conventional and arguments.speculate:
        raise ValueError("--conventional decodes token by token: leave out --speculate")
    if arguments.speculate < 0:
        raise ValueError(f"--speculate must be 0 to 16, is {arguments.speculate}")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = {
        "dtype": arguments.dtype,
        "device": device,
        "trust_remote_code": arguments.trust_remote_code,
    }
    loaded = load(arguments.model, **options)
    if arguments.conventional:
        _check_conventional(policy, loaded.device)
    if arguments.fast:
        loaded = replace(loaded, adapter=Adapter(loaded.model, name=loaded.name, fast=True))
    prompt = loaded.tokenizer(_prompt(arguments))["input_ids"]
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token")
    stops = frozenset() if arguments.ignore_stop else stop_tokens(loaded)
    numbers = _Numbers()
    write = _speculated if arguments.speculate else _decoded
    tokens = write(arguments, loaded, policy, prompt, stops, numbers, options)
    for piece in text_pieces(tokens, loaded.tokenizer):
        print(piece, end="", flush=True)
    print()
    print(_line(numbers, policy.label, str(loaded.device)), file=sys.stderr)
    return 0


def _check_conventional(policy, device) -> None:
    """Before any text is written, what `ConventionalReader` would say after the first token."""
    from replayssm.ops.capability import no_device
    from replayssm.state_update.triton_conventional import check_conventional

    check_conventional(policy)
    reason = no_device(device)
    if reason is not None:
        raise ValueError(f"--conventional is not possible: {reason}")


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt is not None:
        return arguments.prompt
    if str(arguments.prompt_file) == "-":
        return sys.stdin.read()
    return arguments.prompt_file.read_text(encoding="utf-8")


def _sampler(arguments: argparse.Namespace):
    from replayssm.engine.sampling import Sampler

    return Sampler(temperature=arguments.temperature, seed=arguments.seed)


def _decoded(arguments, loaded, policy, prompt, stops, numbers: _Numbers, options) -> Iterator[int]:
    """Tokens one by one, without speculation."""
    import torch

    from replayssm.engine.decode import decode, open_stream

    del options
    common = {"max_new_tokens": arguments.max_new_tokens, "prompt_ids": (0,)}
    stream, logits = open_stream(
        loaded.adapter,
        torch.tensor([prompt]),
        policy,
        seed=arguments.seed,
        backend=arguments.backend,
        **common,
    )
    numbers.state_bytes = stream.session.state_bytes()
    numbers.backends = stream.session.group_backends(0)
    if arguments.conventional:
        from replayssm.state_update.triton_conventional import ConventionalReader

        stream.session.reader, numbers.backends = ConventionalReader(), ("conventional",)
        # It has neither ring nor cursor.
        numbers.state_bytes = {"checkpoint": numbers.state_bytes["checkpoint"]}
    chosen = decode(stream, logits, stop_tokens=stops, sampler=_sampler(arguments), **common)
    start = None
    for (token,) in map(torch.Tensor.tolist, chosen):
        if start is None:
            start = time.perf_counter()
        else:
            numbers.tokens, numbers.seconds = numbers.tokens + 1, time.perf_counter() - start
        if token in stops:
            break
        yield token
    stream.session.check_finite()


def _speculated(
    arguments, loaded, policy, prompt, stops, numbers: _Numbers, options
) -> Iterator[int]:
    """Tokens round by round, with speculation."""
    from replayssm.engine.speculative import SpeculativeDecoder

    decoder = SpeculativeDecoder(
        loaded.adapter,
        policy,
        _drafter(arguments, loaded, options),
        drafts=arguments.speculate,
        stop_tokens=stops,
        sampler=_sampler(arguments),
        seed=arguments.seed,
        schedule=arguments.flush,
        undo=arguments.undo,
        backend=arguments.backend,
    )
    (first,) = decoder.start([prompt], max_new_tokens=arguments.max_new_tokens)
    numbers.state_bytes, numbers.backends = decoder.state_bytes(), decoder.backends
    numbers.acceptance = decoder.rows[0].acceptance
    start = time.perf_counter()
    yield from first
    while decoder.running:
        (new,) = decoder.round()
        numbers.tokens += len(new)
        numbers.seconds = time.perf_counter() - start
        yield from new
    decoder.finish()


def _drafter(arguments, loaded, options: dict):
    from replayssm.engine import drafters
    from replayssm.models.loading import load

    if arguments.drafter == NGRAM:
        return drafters.NGramDrafter()
    if arguments.drafter == HEAD:
        return drafters.multi_token_head(loaded.adapter)
    smaller = load(arguments.drafter, **options)
    drafters.check_vocabulary(loaded.adapter, smaller.adapter)
    if loaded.tokenizer.get_vocab() != smaller.tokenizer.get_vocab():
        raise ValueError(
            f"{arguments.drafter!r} and {arguments.model!r} have different tokenizers: a drafter "
            "needs the same"
        )
    return drafters.ModelDrafter(smaller.adapter, backend=arguments.backend)


def text_pieces(tokens: Iterator[int], tokenizer) -> Iterator[str]:
    """Text of `tokens` as it becomes final: a character whose bytes are still incomplete waits."""
    ids: list[int] = []
    shown = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if text.endswith("\ufffd"):
            continue
        yield _addition(shown, text)
        ids = ids[-_CONTEXT:]
        shown = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if ids:
        yield _addition(shown, tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _addition(shown: str, text: str) -> str:
    """What `text` has beyond `shown`, which is on the terminal and stays there."""
    return text[len(commonprefix([shown, text])) :]


def _line(numbers: _Numbers, policy: str, device: str) -> str:
    """The numbers of a text on one line."""
    parts = [f"policy {policy} on {device} ({'; '.join(numbers.backends)})"]
    if numbers.seconds:
        parts.append(f"{numbers.tokens / numbers.seconds:.1f} tokens/s")
    acceptance = numbers.acceptance
    if acceptance is not None and acceptance.rounds:
        rate = "no draft" if acceptance.rate is None else f"{100 * acceptance.rate:.0f} % of drafts"
        parts.append(
            f"accepted {acceptance.num_accepted} of {acceptance.drafted} drafts ({rate}) in "
            f"{acceptance.rounds} rounds, {acceptance.tokens_per_round:.2f} tokens a round"
        )
    sizes = dict(numbers.state_bytes or {})
    draft = sizes.pop("draft", None)
    state = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
    parts.append(f"state of a sequence {sum(sizes.values()):,} bytes ({state})")
    if draft is not None:
        parts.append(f"{draft:,} bytes of state more for each draft (ring slots are included)")
    return "replayssm: " + "; ".join(parts)


def _speculation(arguments: argparse.Namespace) -> int:
    from replayssm.study import speculation_summary as summary

    if not arguments.redraw:
        for model in arguments.models or BUILTIN:
            _measure_speculation(model, arguments)
    records = summary.load_records(arguments.out)
    for path in summary.write_report(records, arguments.out):
        print(f"Wrote {path}")
    flagged = [
        f"{record.model}: {line}"
        for record in records
        for line in summary.unhealthy(summary.summarise(record))
    ]
    for line in flagged:
        print(f"replayssm: flagged: {line}", file=sys.stderr)
    return 0


def _measure_speculation(model: str, arguments: argparse.Namespace) -> None:
    import torch

    from replayssm.study.speculation import SpeculationStudy, run_speculation
    from replayssm.study.speculation_summary import Cell, write_record

    keys = ("policies", "drafters", "drafts", "prompts", "prompt_tokens", "tokens")
    given = {key: getattr(arguments, key) for key in (*keys, "temperature", "seed")}
    given = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in given.items()
        if value is not None
    }
    if model in BUILTIN:
        (other,) = (name for name in BUILTIN if name != model)
        given.setdefault("drafters", (other, NGRAM))

    def show(cell: Cell) -> None:
        rounds = sum(cell.rounds)
        print(
            f"{model}  {cell.policy:16} {cell.drafter or 'no drafter':16} {cell.drafts} drafts: "
            f"{1 + sum(cell.accepted) / rounds:.3f} tokens a round, KL "
            f"{sum(cell.kl) / len(cell.kl):.2e}"
            + (f", {cell.tokens_per_second:.0f} tokens/s" if cell.tokens_per_second else ""),
            flush=True,
        )

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    study = SpeculationStudy(model=model, **given)
    record = run_speculation(study, device=device, backend=arguments.backend, emit=show)
    print(f"Wrote {write_record(record, arguments.out)}")
