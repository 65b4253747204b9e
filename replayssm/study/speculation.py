"""Does low precision change what speculation accepts? Measured on texts that a policy writes.

Owns the measurement: texts by policy, drafter and number of drafts; what became of the drafts; and
how far the logits that chose the tokens are from FP32's on the same text. Numbers and figures are
made of its record by `speculation_summary` and `speculation_figures`, without a model.

The target is run under a policy, the drafter (prompt lookup, or another model) always as it is. A
greedy text does not depend on the drafter, but for near ties; so what a policy changes is whether
the drafter foresees it. Without drafts (0) the same is measured of token-by-token decoding.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from replayssm.engine.drafters import Drafter, ModelDrafter, NGramDrafter, check_vocabulary
from replayssm.engine.sampling import Sampler
from replayssm.engine.speculative import MAX_DRAFTS, SpeculativeDecoder
from replayssm.engine.stream import Stream
from replayssm.models.adapter import Adapter
from replayssm.models.loading import LoadedModel, load
from replayssm.models.session import RowGroup
from replayssm.policy import parse_policy
from replayssm.study import drift
from replayssm.study.generations import repeated_share
from replayssm.study.provenance import environment
from replayssm.study.speculation_summary import Cell, SpeculationRecord
from replayssm.study.texts import read_tokens

NGRAM = "ngram"
_WINDOW = 16


@dataclass(frozen=True, kw_only=True)
class SpeculationStudy:
    """What is measured of one model.

    drafters: "ngram", or names of models with the same tokens. prompts: texts of `prompt_tokens`
    held-out tokens, each continued by `tokens`. temperature: 0 is greedy. The first policy is what
    the others are compared with.
    """

    model: str
    policies: tuple[str, ...] = ("fp32", "nvfp4", "fp16-sr+nvfp4", "fp8-sr+nvfp4")
    drafters: tuple[str, ...] = (NGRAM,)
    drafts: tuple[int, ...] = (0, 4, 8)
    prompts: int = 10
    prompt_tokens: int = 96
    tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for label in self.policies:
            parse_policy(label)
        if not self.policies or parse_policy(self.policies[0]).label != "fp32":
            raise ValueError(f"the first policy must be fp32, to compare with: {self.policies}")
        if not self.drafters:
            raise ValueError("there must be a drafter: ngram, or a model")
        if not self.drafts or not all(0 <= n <= MAX_DRAFTS for n in self.drafts):
            raise ValueError(f"drafts must be 0 to {MAX_DRAFTS}, got {self.drafts}")
        for name, least in (("prompts", 1), ("prompt_tokens", 1), ("tokens", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


def run_speculation(
    study: SpeculationStudy,
    *,
    device: str,
    backend: str = "auto",
    emit: Callable[[Cell], None] = lambda cell: None,
) -> SpeculationRecord:
    """Measure `study`; `emit` gets every cell as it is done."""
    loaded = load(study.model, device=device)
    prompts = read_tokens(
        "builtin/mixed",
        encode=lambda text: loaded.tokenizer.encode(text, add_special_tokens=False),
        prompts=study.prompts,
        length=study.prompt_tokens,
    ).tolist()
    # Once for nothing: what the first texts wait for is not theirs.
    warm = replace(study, tokens=4, policies=study.policies[:1], drafters=study.drafters[:1])
    for _ in _cells(warm, loaded, prompts, device, backend):
        pass
    cells = []
    for cell in _cells(study, loaded, prompts, device, backend):
        cells.append(cell)
        emit(cell)
    return SpeculationRecord(
        environment=environment(loaded.device, backend=cells[0].backend),
        settings=asdict(study),
        weights=loaded.weights_digest,
        cells=cells,
    )


def _cells(
    study: SpeculationStudy, loaded: LoadedModel, prompts: list[list[int]], device: str, backend
) -> Iterator[Cell]:
    for name in study.drafters:
        drafter = _open_drafter(name, loaded, device, backend)
        for policy in study.policies:
            for drafts in study.drafts:
                if drafts == 0 and name != study.drafters[0]:
                    continue  # no drafter is asked
                yield _measure(
                    study, loaded.adapter, prompts, policy, None if drafts == 0 else name,
                    drafter, drafts, backend,
                )  # fmt: skip


def _open_drafter(name: str, loaded: LoadedModel, device: str, backend: str) -> Drafter:
    if name == NGRAM:
        return NGramDrafter()
    smaller = load(name, device=device)
    check_vocabulary(loaded.adapter, smaller.adapter)
    return ModelDrafter(smaller.adapter, backend=backend)


@torch.inference_mode()
def _measure(
    study: SpeculationStudy,
    adapter: Adapter,
    prompts: list[list[int]],
    policy: str,
    name: str | None,
    drafter: Drafter,
    drafts: int,
    backend: str,
) -> Cell:
    decoder = SpeculativeDecoder(
        adapter,
        parse_policy(policy),
        drafter,
        drafts=drafts,
        sampler=Sampler(temperature=study.temperature, seed=study.seed),
        seed=study.seed,
        backend=backend,
    )
    seen: list[list[Tensor]] = [[] for _ in prompts]
    decoder.observer = lambda row, logits: seen[row].append(logits.clone())
    decoder.start(prompts, max_new_tokens=study.tokens)
    start = time.perf_counter()
    while decoder.running:
        decoder.round()
    decoder.finish()
    seconds = time.perf_counter() - start
    answers = [row.tokens for row in decoder.rows]
    logits = torch.stack([torch.cat(parts) for parts in seen])
    accepted = [row.acceptance for row in decoder.rows]
    return Cell(
        policy=policy,
        drafter=name,
        drafts=drafts,
        rounds=[row.rounds for row in accepted],
        drafted=[row.drafted for row in accepted],
        accepted=[row.num_accepted for row in accepted],
        kl=_divergence(adapter, prompts, answers, logits, backend),
        repeated=[repeated_share(answer) for answer in answers],
        tokens_per_second=_speed(len(prompts) * (study.tokens - 1), seconds, adapter),
        backend=" and ".join(decoder.backends),
    )


def _speed(tokens: int, seconds: float, adapter: Adapter) -> float | None:
    """Tokens per second on a GPU; a CPU is shared with whatever else runs there."""
    return round(tokens / seconds, 1) if adapter.device.type == "cuda" else None


def _divergence(
    adapter: Adapter,
    prompts: list[list[int]],
    answers: list[list[int]],
    logits: Tensor,  # [P, N - 1, V]: what chose the second token of each answer, and so on
    backend: str,
) -> list[float]:
    """Mean KL(FP32 ‖ policy) of each answer, in nats per token."""
    rows = len(prompts)
    stream = Stream(
        adapter,
        [RowGroup(policy=parse_policy("fp32"), sequences=tuple(range(rows)), seeds=(0,) * rows)],
        source=range(rows),
        capacity=len(prompts[0]) + len(answers[0]),
        backend=backend,
    )
    stream.prefill(torch.tensor(prompts))
    stream.hand_over()
    text = torch.tensor(answers, device=adapter.device)
    sums = torch.zeros(rows, dtype=torch.float64)
    last = text.shape[1] - 1
    for start in range(0, last, _WINDOW):
        span = slice(start, min(start + _WINDOW, last))
        reference = stream.step(text[:, span])
        following = text[:, span.start + 1 : span.stop + 1]
        found = drift.window_drift(
            reference.flatten(0, 1), logits[:, span].flatten(0, 1)[None], following.flatten()
        )
        sums += found.kl[0].view(rows, -1).sum(dim=1).cpu()
    return (sums / last).tolist()
