"""`replayssm bench decode` and `bench speculate`: what a step of a whole model costs.

Owns how a measurement becomes a row. Settings are `bench_step_settings`, what is timed is
`bench_arms`, what is checked first `bench_layer`, files and tables are `bench_step_records`. An arm
whose outputs are wrong gets no time, and a measurement that fails does not stop the others.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from replayssm.engine.stream import Stream
from replayssm.models.adapter import Adapter
from replayssm.models.loading import DTYPES, architecture_of, as_device, load
from replayssm.models.random_weights import RANDOM_PREFIX, configuration_of, random_model
from replayssm.models.session import ReplaySession
from replayssm.state_update import StateUpdate
from replayssm.study import bench_arms
from replayssm.study.bench_arms import Arm, Stage, conventional_reader
from replayssm.study.bench_cases import refused
from replayssm.study.bench_layer import DISTINCT, Probe, observe, one_by_one
from replayssm.study.bench_step_records import CONVENTIONAL, StepRecord, StepRow
from replayssm.study.bench_step_settings import StepBench, cases
from replayssm.study.bench_timing import Timing, captured, clocks, cycle_time
from replayssm.study.provenance import environment

_COMPILE_THREADS = 8  # each holds a layer's states
_SWEEP_SECONDS = 0.004
_SWEEP_BYTES = 1 << 30
_FINALISTS = 3
_FEW_TOKENS = 3
_WARM_UP = 3  # steps until kernels are compiled and a pass is captured


def run_step_bench(
    bench: StepBench, *, device: str, emit: Callable[[StepRecord], object] = lambda record: None
) -> StepRecord:
    """Measures on `device`; `emit` gets the record so far whenever it has a new last row.

    Raises:
        ValueError: a model or a device that cannot be had.
    """
    for name in bench.models:  # said before time is spent on the others
        (configuration_of if name.startswith(RANDOM_PREFIX) else architecture_of)(name)
    before = clocks() if device.startswith("cuda") else None
    record = StepRecord(
        kind=bench.kind,
        environment=environment(as_device(device)),
        settings={
            name: list(value) if isinstance(value, tuple | list) else value
            for name, value in asdict(bench).items()
        },
        clocks={"before": before, "after": None},
        rows=[],
    )
    for name in bench.models:
        adapter = open_model(name, dtype=bench.dtype, device=device)
        for row in measure(bench, adapter):
            record.rows.append(row)
            emit(record)
        del adapter
        _free(device)
    after = clocks() if device.startswith("cuda") else None
    return replace(record, clocks={"before": before, "after": after})


def open_model(name: str, *, dtype: str, device: str) -> Adapter:
    """A model that is run as servers do on a GPU (`Adapter.fast`), by the library on a CPU."""
    fast = device.startswith("cuda")
    if name.startswith(RANDOM_PREFIX):
        return random_model(name, dtype=DTYPES[dtype], device=device, fast=fast)
    loaded = load(name, dtype=dtype, device=device)
    return Adapter(loaded.model, name=name, fast=fast)


def _free(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


# -- measuring -------------------------------------------------------------------------------------
@torch.inference_mode()
def measure(bench: StepBench, adapter: Adapter) -> Iterator[StepRow]:
    """Rows of one model, as they are measured."""
    probe = observe(adapter, bench.most_tokens)
    errors, alone = check_all(bench, probe), {}
    for context in bench.contexts:
        for batch in bench.batches:
            yield from relative(_at(bench, probe, errors, alone, batch, context))


Case = tuple[Arm, int, int]  # with the tokens of a pass, and the batch
Checks = dict[Case, float | Exception]


@dataclass(frozen=True, kw_only=True)
class Alone:
    """The recurrent layers by themselves, which no context changes: measured at the first one.

    launch: of the conventional kernel, as it was fastest; None of a replay. error: of the check,
    after that.
    """

    launch: Any
    error: float
    timing: Timing


def check_all(bench: StepBench, probe: Probe) -> Checks:
    """Error of every arm at every number of tokens and batch, or why there is none.

    In threads, because this compiles most of what is timed, most of which does not hold Python's
    lock.
    """

    @torch.inference_mode()
    def check(case: Case) -> float | Exception:
        try:
            return _check(bench, probe, *case)
        except Exception as error:
            return error.with_traceback(None)  # which would keep its tensors

    all_cases = [(*case, batch) for case in cases(bench) for batch in bench.batches]
    # Of conventional arms a few rows are checked now (see `_check`).
    few = {case: (*case[:2], _checked_rows(case[0], case[2])) for case in all_cases}
    different = list(dict.fromkeys(few.values()))
    threads = _COMPILE_THREADS if probe.state.is_cuda else 1
    with ThreadPoolExecutor(threads) as pool:
        found = dict(zip(different, pool.map(check, different), strict=True))
    return {case: found[few[case]] for case in all_cases}


def _checked_rows(arm: Arm, batch: int) -> int:
    return min(batch, DISTINCT) if arm.kind == CONVENTIONAL else batch


def _check(bench: StepBench, probe: Probe, arm: Arm, tokens: int, batch: int) -> float:
    if arm.kind == CONVENTIONAL:
        # The launch that turns out to be fastest is checked again, with all rows.
        return max(
            _check_conventional(probe, arm, launch, tokens, _checked_rows(arm, batch))
            for launch in sweep(probe.adapter.device)
        )
    policy, read, total = arm.policy, one_by_one(StateUpdate.step), bench.ring_len + 2
    if tokens > 1:
        policy, total = arm.verifying(probe.adapter.family.recurrence, tokens), tokens

        def read(update, cache, inputs):
            outputs = update.window(cache, inputs)
            update.commit(cache, min(tokens, bench.ring_len))
            update.flush(cache)
            return outputs

    return probe.check(policy, read, batch=batch, tokens=total, backend=bench.backend)


def _check_conventional(probe: Probe, arm: Arm, launch, tokens: int, batch: int) -> float:
    def read(update, cache, inputs):
        if tokens == 1:
            return one_by_one(conventional_reader(launch))(update, cache, inputs)
        snapshots = bench_arms.new_snapshots(update, cache, tokens)
        return conventional_reader(launch, snapshots)(update, cache, inputs)

    total = _FEW_TOKENS if tokens == 1 else tokens
    return probe.check(arm.policy, read, batch=batch, tokens=total, backend="reference")


def sweep(device: torch.device) -> Sequence:
    """Launches of the conventional kernel that are tried; off a GPU they say nothing about speed,
    and one will do.
    """
    from replayssm.ops.triton_conventional import SWEEP

    return SWEEP if device.type == "cuda" else SWEEP[-1:]


def _at(
    bench: StepBench,
    probe: Probe,
    errors: Checks,
    alone: dict[Case, Alone],
    batch: int,
    context: int,
) -> Iterator[StepRow]:
    """All arms at one batch and context; `alone` gets what other contexts need not measure."""
    adapter = probe.adapter
    device = adapter.device
    # Room for the passes of the longest cycle, and for those before anything is timed.
    room = 64 + 4 * bench.most_tokens
    common = {"model": adapter.name, "batch": batch, "context": context}
    stage: Stage | Exception
    try:
        stage = Stage(probe, batch=batch, context=context, room=room, backend=bench.backend)
    except RuntimeError as error:  # no memory
        stage = RuntimeError(str(error))
    for arm, tokens in cases(bench):
        row = StepRow(**common, drafts=tokens - 1, arm=arm.kind, policy=arm.label)
        error = errors[arm, tokens, batch]
        try:
            for problem in (stage, error):
                if isinstance(problem, Exception):
                    raise problem
            timed = timed_row(bench, stage, row, arm, tokens, error, alone)
        except Exception as problem:
            timed = refused(row, problem)
        _free(device.type)
        yield timed


def timed_row(
    bench: StepBench,
    stage: Stage,
    row: StepRow,
    arm: Arm,
    tokens: int,
    error: float,
    alone: dict[Case, Alone],
) -> StepRow:
    """The row with its times; `alone` as in `_at`."""
    known = alone.get((arm, tokens, stage.batch))
    recurrence, launch = stage.probe.adapter.family.recurrence, None
    if arm.kind == CONVENTIONAL:
        stream = stage.open(arm.policy, StateUpdate.step)
        launch, stream.session.reader = _fastest_reader(stage, stream, tokens, known)
        if known is None:
            again = _check_conventional(stage.probe, arm, launch, tokens, stage.batch)
            error = max(error, again)
    elif tokens == 1:
        stream = stage.open(arm.policy, StateUpdate.step)
    else:
        stream = stage.open(arm.verifying(recurrence, tokens), StateUpdate.window)
    time = _time_decoding if tokens == 1 else _time_verification
    whole, graphs = time(bench, stage, stream, arm, tokens)
    if known is None:
        timing = _time_recurrence(bench, stage, stream, arm, tokens)
        known = alone[arm, tokens, stage.batch] = Alone(launch=launch, error=error, timing=timing)
    state, draft = bench_arms.state_bytes(arm, stream.session, tokens - 1)
    return replace(
        row,
        backend=_conventional_backend() if launch else "+".join(stream.session.backends),
        graphs=graphs,
        ms=round(whole.us / 1e3, 5),
        ms_low=round(whole.low / 1e3, 5),
        ms_high=round(whole.high / 1e3, 5),
        cycles=whole.replays,
        recurrent_ms=round(known.timing.us / 1e3, 5),
        tokens_per_second=round(1e6 * row.batch * tokens / whole.us, 1),
        state_bytes=state,
        draft_bytes=draft,
        sequence_bytes=stage.sequence_bytes(stream),
        error=float(f"{known.error:.2e}"),
        launch=launch.label if launch else "",
        status="ok",
        note="" if launch else _without_kernels(stream.session),
    )


def _without_kernels(session: ReplaySession) -> str:
    """Why layers that were to take kernels took torch; empty if they did not."""
    reasons = {update.backend_reason for update, _ in bench_arms.layers(session)} - {""}
    return f"computed by torch: {'; '.join(sorted(reasons))}" if reasons else ""


def _conventional_backend() -> str:
    from replayssm.ops.triton_common import interpreted

    return "triton (interpreted)" if interpreted() else "triton"


def _fastest_reader(stage: Stage, stream: Stream, tokens: int, known: Alone | None):
    """(launch, reader): the conventional kernel as it is fastest in all recurrent layers here."""
    session, device = stream.session, stream.adapter.device
    inputs = stage.probe.inputs_of(stage.batch, tokens)
    snapshots = None
    if tokens > 1:
        snapshots = bench_arms.new_snapshots(*next(bench_arms.layers(session)), tokens)
    if known is not None:
        return known.launch, conventional_reader(known.launch, snapshots)

    def fastest(launches: Sequence, best: int, most_layers: int | None) -> list:
        ranked = []
        for launch in launches:
            session.reader = conventional_reader(launch, snapshots)
            alone = bench_arms.recurrence_alone(session, inputs, 0, most_layers=most_layers)
            call = captured(alone, device)
            ranked.append(cycle_time([call], device=device, seconds=_SWEEP_SECONDS).us)
        order = sorted(range(len(launches)), key=ranked.__getitem__)
        return [launches[index] for index in order[:best]]

    # All in a few layers first, whose states are far more than a cache holds, or else in all.
    _, cache = next(bench_arms.layers(session))
    few = max(1, -(-_SWEEP_BYTES // cache.checkpoint.data.nbytes))
    (launch,) = fastest(fastest(sweep(device), _FINALISTS, few), 1, None)
    return launch, conventional_reader(launch, snapshots)


def _time_decoding(
    bench: StepBench, stage: Stage, stream: Stream, arm: Arm, tokens: int
) -> tuple[Timing, str]:
    """Times of a decode step, by the engine's own loop; graphs in effect."""
    device = stream.adapter.device
    steps = bench_arms.decoding(stream, steps=1 << 30)
    for _ in range(_WARM_UP):
        next(steps)

    def restart() -> None:
        bench_arms.seek(stream, stage.context)

    cycle = [restart, *[lambda: next(steps)] * bench.ring_len]
    whole = cycle_time(cycle, device=device, seconds=bench.seconds, per=len(cycle) - 1)
    graphs = stream.graphs.describe(stream.cache)
    steps.close()
    return whole, graphs


def _time_verification(
    bench: StepBench, stage: Stage, stream: Stream, arm: Arm, tokens: int
) -> tuple[Timing, str]:
    """Times of a verification over a cycle of a ring; graphs in effect."""
    device, kept = stream.adapter.device, bench_arms.kept_in_a_cycle(arm, tokens)
    text = torch.randint(
        stream.adapter.vocab_size,
        (stage.batch, tokens),
        generator=torch.Generator().manual_seed(1),
    ).to(device)
    read = captured(bench_arms.verification(stream, text), device)
    commits, flushes = {}, []
    if arm.kind != CONVENTIONAL:
        for keep in dict.fromkeys(kept):
            commits[keep] = captured(bench_arms.committing(stream.session, tokens, keep), device)
        flushes = _flushes(stream, arm)

    def restart() -> None:
        bench_arms.seek(stream, stage.context)

    rounds = [call for keep in kept for call in (read, commits.get(keep)) if call is not None]
    cycle = [restart, *rounds, *flushes]
    whole = cycle_time(cycle, device=device, seconds=bench.seconds, per=len(kept))
    return whole, "graphs" if device.type == "cuda" else "eager (the model is on cpu)"


def _flushes(stream: Stream, arm: Arm) -> list[Callable[[], object]]:
    """The flush that ends a cycle of windows; it leaves every ring empty."""
    if arm.kind == CONVENTIONAL or stream.session.reader is StateUpdate.step:
        return []
    return [captured(bench_arms.flushing(stream.session), stream.adapter.device)]


def _time_recurrence(
    bench: StepBench, stage: Stage, stream: Stream, arm: Arm, tokens: int
) -> Timing:
    """Times of what the recurrent layers do, alone, over a cycle of a ring; it ends empty."""
    session, device = stream.session, stream.adapter.device
    inputs = stage.probe.inputs_of(stage.batch, tokens)
    one = [tokens] * bench.ring_len
    kept = one if tokens == 1 else bench_arms.kept_in_a_cycle(arm, tokens)
    calls = {
        keep: captured(bench_arms.recurrence_alone(session, inputs, keep), device)
        for keep in dict.fromkeys(kept)
    }
    flushes = _flushes(stream, arm)
    for flush in flushes:
        flush()
    cycle = [*(calls[keep] for keep in kept), *flushes]
    return cycle_time(cycle, device=device, seconds=bench.seconds / 4, per=len(kept))


def relative(rows: Iterable[StepRow]) -> Iterator[StepRow]:
    """Rows of one batch and context with their ratios to conventional FP32, which comes first."""
    base: dict[int, StepRow] = {}  # by drafts
    for row in rows:
        if row.ms is None:
            yield row
            continue
        if row.arm == CONVENTIONAL and row.policy == "fp32":
            base[row.drafts] = row
        same, step = base.get(row.drafts), base.get(0)
        yield replace(
            row,
            speedup=same and round(same.ms / row.ms, 4),
            recurrent_speedup=same and round(same.recurrent_ms / row.recurrent_ms, 4),
            steps=step and round(row.ms / step.ms, 4),
            recurrent_steps=step and round(row.recurrent_ms / step.recurrent_ms, 4),
        )
