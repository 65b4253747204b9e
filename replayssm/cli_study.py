"""The commands that judge and explain drift runs: gate, recommend, attribute.

Owns their argument names and what they print; `cli` owns errors and exit codes. Imports are made
inside the commands, so that `gate` and `recommend` need no torch.
"""

import argparse
from collections.abc import Callable
from pathlib import Path


def add_commands(
    command: Callable, *, execution: Callable, names: Callable, measure: Callable
) -> None:
    """Add the commands. `command(name, function, text)` makes a parser, `execution` adds the
    options that decide where and how fast, `names` reads "A,B", `measure(spec, arguments)` runs a
    study and prints and draws it.
    """
    gate = command(
        "gate", _gate, "Check that every policy keeps limits: one line each, exit code 0 or 1."
    )
    _judged(gate)
    recommend = command(
        "recommend",
        _recommend,
        "Name the policy that moves the fewest bytes inside limits, with the table of all "
        "(exit code 1: none is inside). Without limits: those of the runs' configuration.",
    )
    _judged(recommend)
    attribute = command(
        "attribute",
        _attribute,
        "Measure which choice of a policy causes how much of its drift: each alone, each removed.",
    )
    attribute.add_argument("--model", required=True, type=names, metavar="A[,B]", dest="models")
    attribute.add_argument(
        "--policy", required=True, help="see `replayssm policies`; engine names are accepted"
    )
    attribute.add_argument("--tokens", type=int, help="tokens per prompt after the prefill")
    attribute.add_argument("--prompts", type=int)
    attribute.add_argument("--prefill", type=int, help="tokens read before the first measured one")
    attribute.add_argument("--text", help="builtin/mixed (default), file:PATH, or generate")
    attribute.add_argument("--ring-len", type=int, help="ring length L of the FP32 reference")
    attribute.add_argument("--stride", type=int, help="score every n-th position")
    attribute.add_argument(
        "--seeds",
        type=lambda text: [int(part) for part in names(text)],
        metavar="N,N",
        help="of stochastic rounding, averaged",
    )
    attribute.add_argument("--dtype", help="of weights and activations: float32 or bfloat16")
    attribute.add_argument(
        "--name", default="attribution", help="experiment name: the folder the run goes to"
    )
    execution(attribute)
    attribute.set_defaults(measure=measure)


def _judged(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results", type=Path, metavar="RESULTS", help="a run, an experiment, or a results folder"
    )
    parser.add_argument(
        "--max-mean-kl", type=float, metavar="NATS", help="mean KL from FP32, last quarter"
    )
    parser.add_argument(
        "--min-top1", type=float, metavar="SHARE", help="agreement with FP32's best token, 0 to 1"
    )
    parser.add_argument(
        "--max-accuracy-drop",
        type=float,
        metavar="SHARE",
        help="loss of accuracy that must be excluded, 0 to 1 (0.02: two points)",
    )


def _limits(arguments: argparse.Namespace):
    from replayssm.study.gate import GateLimits

    return GateLimits(
        max_mean_kl=arguments.max_mean_kl,
        min_top1=arguments.min_top1,
        max_accuracy_drop=arguments.max_accuracy_drop,
    )


def _gate(arguments: argparse.Namespace) -> int:
    from replayssm.study.gate import gate

    lines, good = gate(arguments.results, _limits(arguments))
    print("\n".join(lines))
    return 0 if good else 1


def _recommend(arguments: argparse.Namespace) -> int:
    from replayssm.study.recommend import recommend, recommendation_text

    answers = recommend(arguments.results, _limits(arguments))
    print("\n\n".join(recommendation_text(answer) for answer in answers))
    return 0 if all(answer.best is not None for answer in answers) else 1


def _attribute(arguments: argparse.Namespace) -> int:
    from replayssm.models import architecture_of
    from replayssm.study.attribution import needed_policies
    from replayssm.study.config import from_mapping, read_policy

    keys = ("tokens", "prompts", "prefill", "text", "ring_len", "seeds", "stride", "dtype")
    values = {key: getattr(arguments, key) for key in keys if getattr(arguments, key) is not None}
    ring_len = values.get("ring_len", 16)
    policy = read_policy(arguments.policy, ring_len).to_dict()
    exact = read_policy("fp32", ring_len).to_dict()
    worst = 0
    for model in arguments.models:
        family = architecture_of(model, trust_remote_code=arguments.trust_remote_code).family
        needed = needed_policies(policy, exact, delta_rule=family != "mamba2")
        if len(needed) < 3:
            raise ValueError(
                f"policy {arguments.policy!r} differs from FP32 in one choice at most on {model}: "
                "all of its drift comes from that; see `replayssm drift`"
            )
        asked = values | {"models": [model], "policies": needed}
        spec = from_mapping(asked, name=arguments.name, where="attribute")
        worst = max(worst, arguments.measure(spec, arguments))
    return worst
