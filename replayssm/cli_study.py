"""The commands that judge and explain stored or new drift runs: gate, recommend, attribute.

Owns their argument names and what they print; `cli` owns errors and exit codes. Imports are made
inside the commands, so that `gate` and `recommend` need no torch.
"""

import argparse
from collections.abc import Callable
from pathlib import Path


def add_commands(command: Callable) -> None:
    """Add the commands; `command(name, function, text)` makes a parser."""
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
