"""What the built-in models can do: solved problems, recall by distance, bits per byte, decay
spectrum, samples.

Works on a model of this package with its weights rounded as they are exported; on a GPU the
one-token step is captured in a CUDA graph. Knows nothing of training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from replayssm.study import corpus

CHUNK = 64  # sequence lengths are padded to a multiple of this


def rounded(model: nn.Module) -> nn.Module:
    """`model` itself with every weight rounded to bf16 in place, as it is exported."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    return model


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: list[list[int]],
    new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Continue every prompt by up to `new_tokens` tokens, cut at the end mark (id 0, not included).

    All rows run in lockstep, one token at a time from position 0: a row reads its prompt, then
    its own predictions, so prompts of different lengths need no padding. Greedy, or sampled with
    `temperature`.
    """
    device = next(model.parameters()).device
    rows, lengths = len(prompts), [len(p) for p in prompts]
    capacity = max(lengths) + new_tokens
    tokens = torch.zeros(rows, capacity + 1, dtype=torch.long, device=device)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = torch.tensor(prompt, device=device)
    limit = torch.tensor(lengths, device=device)
    position = torch.zeros(1, dtype=torch.long, device=device)
    cache = model.new_cache(rows, capacity, device)
    generator = torch.Generator(device).manual_seed(seed) if temperature else None

    def advance() -> None:
        logits = model.step(tokens.index_select(1, position).squeeze(1), position, cache)
        if temperature:
            chosen = torch.multinomial(
                (logits / temperature).softmax(-1), 1, generator=generator
            ).squeeze(1)
        else:
            chosen = logits.argmax(-1)
        after = position + 1
        known = tokens.index_select(1, after).squeeze(1)
        tokens.index_copy_(1, after, torch.where(after < limit, known, chosen)[:, None])
        position.add_(1)

    step = (
        advance
        if temperature or device.type != "cuda"
        else captured(advance, [tokens, position, *_flat(cache)])
    )
    for i in range(capacity):
        step()
        if (
            i % 32 == 31
            and all(
                (row[length : i + 2] == 0).any()
                for row, length in zip(tokens, lengths, strict=True)
                if length < i + 2
            )
            and i >= max(lengths)
        ):
            break
    result = []
    for row, length in zip(tokens.tolist(), lengths, strict=True):
        new = row[length : length + new_tokens]
        result.append(new[: new.index(0)] if 0 in new else new)
    return result


def _flat(cache: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [t for pair in cache for t in pair]


def captured(work: Callable[[], None], touched: list[Tensor]) -> Callable[[], None]:
    """`work` as a CUDA graph; the tensors it changes in place are put back after the warm-up."""
    saved = [t.clone() for t in touched]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for t, s in zip(touched, saved, strict=True):
        t.copy_(s)
    return graph.replay


def final_number(text: str) -> float | None:
    """The number after the last ``####``, or None."""
    match = re.findall(r"####\s*([-+]?[\d,]*\.?\d+)", text)
    return float(match[-1].replace(",", "")) if match else None


def solve(
    model: nn.Module, tokenizer: Tokenizer, rows: list[dict[str, str]], new_tokens: int = 320
) -> dict:
    """Greedy worked solutions of held-out problems: accuracy, share without an answer, and the
    first texts."""
    prompts = [tokenizer.encode(corpus.problem_prompt(row["question"])).ids for row in rows]
    texts = [tokenizer.decode(ids) for ids in generate(model, prompts, new_tokens)]
    answers = [final_number(text) for text in texts]
    right = [
        a is not None and abs(a - float(r["answer"])) < 1e-6
        for a, r in zip(answers, rows, strict=True)
    ]
    return {
        "problems": len(rows),
        "accuracy": sum(right) / len(rows),
        "no_answer": sum(a is None for a in answers) / len(rows),
        "right": right,
        "texts": texts,
    }


@torch.no_grad()
def forward_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits [B, T, vocabulary] of ids [B, T] from zero states, under bf16 autocast on a GPU; T
    is padded inside."""
    length = ids.shape[1]
    padded = nn.functional.pad(ids, (0, -length % CHUNK))
    with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=ids.device.type == "cuda"):
        logits, _ = model(padded, model.new_states(len(ids), ids.device))
    return logits[:, :length]


def recall_by_distance(
    model: nn.Module,
    tokenizer: Tokenizer,
    distances: list[int],
    count: int,
    batch_tokens: int = 300_000,
) -> dict[int, dict[str, float]]:
    """Distance in tokens -> share of facts recalled exactly (every answer token is the model's
    first choice).

    Each test is a `corpus.recall_document` with four facts.
    """
    device = next(model.parameters()).device
    table = {}
    for distance in distances:
        tests = [
            corpus.recall_document(i, int(distance * corpus.CHARS_PER_TOKEN)) for i in range(count)
        ]
        contexts = tokenizer.encode_batch_fast([t.context for t in tests])
        encoded = [
            (c.ids, tokenizer.encode(t.answer).ids) for c, t in zip(contexts, tests, strict=True)
        ]
        right, true_distance = [], []
        size = max(1, batch_tokens // max(len(c) for c, _ in encoded))
        for start in range(0, count, size):
            part = encoded[start : start + size]
            longest = max(len(c) + len(a) for c, a in part)
            ids = torch.tensor(
                [c + a + [0] * (longest - len(c) - len(a)) for c, a in part], device=device
            )
            choice = forward_logits(model, ids).argmax(-1).tolist()
            right += [
                row[len(c) - 1 : len(c) - 1 + len(a)] == a
                for row, (c, a) in zip(choice, part, strict=True)
            ]
        for test in tests:
            true_distance.append(test.distance_chars / corpus.CHARS_PER_TOKEN)
        by_kind = {
            kind: [r for r, t in zip(right, tests, strict=True) if t.fact.kind == kind]
            for kind in corpus.KINDS
        }
        table[distance] = {
            "recalled": sum(right) / count,
            "tests": count,
            "mean_distance": round(sum(true_distance) / count),
            **{kind: sum(v) / max(1, len(v)) for kind, v in by_kind.items()},
        }
    return table


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Tokens of one mixed text and its questions: (position of the first answer token, answer
    length, distance)."""

    ids: list[int]
    questions: list[tuple[int, int, int]]


def stream(tokenizer: Tokenizer, seed: int, length: int) -> Stream:
    """The first `length` tokens of a study text, with all questions in it."""
    ids: list[int] = []
    questions, stated = [], {}
    for document in corpus.mixed_documents(seed):
        if document.kind == "filler":
            ids += tokenizer.encode(document.text).ids
        for i, fact in enumerate(document.facts):
            ids += tokenizer.encode("\n").ids if i else []
            if document.kind == "facts":
                stated[fact.key] = len(ids)
                ids += tokenizer.encode(fact.statement).ids
            else:
                answer = tokenizer.encode(fact.answer).ids
                at = len(ids) + len(tokenizer.encode(fact.prompt).ids)
                questions.append((at, len(answer), len(ids) - stated[fact.key]))
                ids += tokenizer.encode(fact.question).ids
        ids.append(0)
        if len(ids) >= length:
            return Stream(
                ids=ids[:length], questions=[q for q in questions if q[0] + q[1] <= length]
            )
    raise AssertionError("the stream of documents is endless")


def stream_report(
    model: nn.Module, tokenizer: Tokenizer, seeds: range, length: int, parts: int = 8
) -> dict:
    """Loss by position (nats per token over `parts` equal parts) and recall by distance over
    whole study texts."""
    device = next(model.parameters()).device
    losses = torch.zeros(parts, dtype=torch.float64)
    bins: dict[str, list[bool]] = {}
    for seed in seeds:
        text = stream(tokenizer, seed, length)
        ids = torch.tensor([text.ids], device=device)
        logits = forward_logits(model, ids)[0]
        choice = logits.argmax(-1).tolist()
        for i, (part, target) in enumerate(
            zip(logits[:-1].tensor_split(parts), ids[0, 1:].tensor_split(parts), strict=True)
        ):
            losses[i] += nn.functional.cross_entropy(part.float(), target).double().cpu() / len(
                seeds
            )
        for at, size, distance in text.questions:
            name = f"<{2 ** max(8, math.ceil(math.log2(distance + 1)))}"
            bins.setdefault(name, []).append(
                choice[at - 1 : at - 1 + size] == text.ids[at : at + size]
            )
    order = sorted(bins, key=lambda name: int(name[1:]))
    return {
        "length": length,
        "texts": len(seeds),
        "loss_by_position": [round(x, 4) for x in losses.tolist()],
        "recall": {
            name: [round(sum(bins[name]) / len(bins[name]), 4), len(bins[name])] for name in order
        },
        "recall_all": round(sum(map(sum, bins.values())) / max(1, sum(map(len, bins.values()))), 4),
    }


def bits_per_byte(model: nn.Module, tokenizer: Tokenizer, text: str, window: int = 4096) -> float:
    """Bits per byte of `text` in windows of `window` tokens, each from a zero state."""
    device = next(model.parameters()).device
    ids = tokenizer.encode(text).ids
    total, covered = 0.0, 0
    for start in range(0, len(ids) - window, window):
        row = torch.tensor([[0, *ids[start : start + window]]], device=device)
        loss = nn.functional.cross_entropy(
            forward_logits(model, row[:, :-1])[0].float(), row[0, 1:], reduction="sum"
        )
        total += loss.item()
        covered += len(tokenizer.decode(ids[start : start + window]).encode())
    return total / math.log(2) / covered


@torch.no_grad()
def memory_table(
    model: nn.Module, tokenizer: Tokenizer, length: int = 8192
) -> dict[int, list[float]]:
    """Layer -> sorted memory lengths of its heads in tokens: -1 / mean log decay on held-out
    mixed text."""
    device = next(model.parameters()).device
    rows = torch.tensor([stream(tokenizer, seed, length).ids for seed in (901, 902)], device=device)
    means = model.mean_log_decay(rows)
    return {
        i: sorted(round(-1.0 / v, 1) for v in mean.double().clamp(max=-1e-9).tolist())
        for i, mean in means.items()
    }


def samples(model: nn.Module, tokenizer: Tokenizer, seed: int = 0) -> list[str]:
    """Sampled continuations (temperature 0.7) of a few openings."""
    openings = ["ROMEO:\n", "And it came to pass", "Question: Maria has", "First Citizen:\nWe"]
    prompts = [tokenizer.encode(o).ids for o in openings]
    texts = generate(model, prompts, 120, temperature=0.7, seed=seed)
    return [o + tokenizer.decode(t) for o, t in zip(openings, texts, strict=True)]


def report(
    model: nn.Module, tokenizer: Tokenizer, *, quick: bool = False
) -> Iterator[tuple[str, object]]:
    """Everything above, part by part as (name, result), the most important first.

    `quick` is small enough for a CPU and a barely trained model.
    """
    problems = list(corpus.heldout_problems())
    held_problems = corpus.END_OF_DOCUMENT.join(
        corpus.solved_problem(r["question"], r["solution"])
        for r in problems[: 40 if quick else 400]
    )
    english = corpus.heldout_english()
    window = 512 if quick else 4096
    distances = [256] if quick else [256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768]
    yield "recall", recall_by_distance(model, tokenizer, distances, 4 if quick else 200)
    yield (
        "problems",
        solve(model, tokenizer, problems[: 8 if quick else 1000], 32 if quick else 320),
    )
    yield "memory", memory_table(model, tokenizer, 512 if quick else 8192)
    yield (
        "bits_per_byte_english",
        bits_per_byte(model, tokenizer, english[:4000] if quick else english, window),
    )
    yield "bits_per_byte_problems", bits_per_byte(model, tokenizer, held_problems, window)
    yield "samples", samples(model, tokenizer)
    yield (
        "stream",
        stream_report(
            model, tokenizer, range(500, 501 if quick else 508), 2048 if quick else 32_768
        ),
    )
    if not quick:
        yield "long_stream", stream_report(model, tokenizer, range(600, 602), 131_072)
