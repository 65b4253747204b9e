"""`replayssm bench kernels`: what a step costs under each policy, against conventional kernels.

Owns what is measured in which order and how a measurement becomes a row. Launches and checks are
`bench_cases`, times `bench_timing`, files and tables `bench_records`. A kernel whose results are
not those of the recurrence gets no time, and a measurement that fails does not stop the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import torch

from replayssm.ops.capability import no_kernel
from replayssm.policy import PrecisionPolicy, parse_policy
from replayssm.study import bench_timing
from replayssm.study.bench_cases import (
    REPLAY_KERNELS,
    Case,
    conventional_case,
    conventional_states,
    kernels_of,
    refused,
    replay_case,
    replay_launches,
    replay_pool,
    sweep_updates,
)
from replayssm.study.bench_public import Update, public_updates
from replayssm.study.bench_records import KernelRecord, KernelRow
from replayssm.study.bench_timing import Timing
from replayssm.study.bench_workload import LAYERS, BenchLayer, Pool, Sequences, make_pool
from replayssm.study.bench_workload import make_sequences as sequences_of
from replayssm.study.provenance import environment

DEFAULT_POLICIES = ("fp32", "fp16-sr", "fp32+nvfp4", "fp16-sr+nvfp4")
DEFAULT_BATCHES = (1, 4, 16, 64, 256, 512)
STATE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_COMPILE_THREADS = 16
_SWEEP_SECONDS = 0.01
# How many of the FP32 sweep's fastest launches are tried with a narrower state.
_NARROW_LAUNCHES = 3

Timer = Callable[..., Timing]  # as bench_timing.graph_time


@dataclass(frozen=True, kw_only=True)
class KernelBench:
    """What to measure.

    Attributes:
        layers: names out of `bench_workload.LAYERS`.
        batches: rows of a launch.
        ring_lens: L, for every policy.
        policies: labels, without a ring length.
        states: formats of conventional states; speed-ups are against "fp32", which is required.
        window: T of the window, at most L.
        seconds: of replays for a time.
    """

    layers: Sequence[str] = tuple(LAYERS)
    batches: Sequence[int] = DEFAULT_BATCHES
    ring_lens: Sequence[int] = (16,)
    policies: Sequence[str] = DEFAULT_POLICIES
    states: Sequence[str] = ("fp32", "fp16")
    window: int = 8
    seconds: float = 0.1

    def __post_init__(self):
        for what, given, allowed in (
            ("layer", self.layers, LAYERS),
            ("state", self.states, STATE_DTYPES),
        ):
            for name in given:
                if name not in allowed:
                    raise ValueError(f"{what} {name!r} is not one of {', '.join(allowed)}")
        for what, numbers in (
            ("batch", self.batches),
            ("ring length", self.ring_lens),
            ("window", (self.window,)),
        ):
            for number in numbers:
                if type(number) is not int or number < 1:
                    raise ValueError(f"{what} {number!r} is not an integer of at least 1")
        if not (self.layers and self.batches and self.ring_lens and self.policies):
            raise ValueError("nothing to measure: give a layer, a batch, a ring length, a policy")
        if "fp32" not in self.states:
            raise ValueError("states must include fp32, which speed-ups are against")
        if not self.seconds > 0:
            raise ValueError(f"seconds {self.seconds!r} is not positive")
        for label in self.policies:
            if "@" in label:
                raise ValueError(f"policy {label!r}: ring lengths are given for all policies")
            parse_policy(label)

    @classmethod
    def quick(cls, **options) -> KernelBench:
        """Batches 256 and 1, FP32 conventional states, short times."""
        return cls(**{"batches": (1, 256), "states": ("fp32",), "seconds": 0.04} | options)


def run_kernel_bench(
    bench: KernelBench, *, emit: Callable[[KernelRecord], object] = lambda record: None
) -> KernelRecord:
    """Measures on the current CUDA device; `emit` gets the record so far whenever it has a new last
    row.

    Raises:
        ValueError: there is no CUDA device, or kernels are interpreted.
    """
    if not torch.cuda.is_available():
        raise ValueError("kernels are timed on a CUDA GPU, and there is none here")
    from replayssm.ops.triton_common import interpreted

    if interpreted():
        raise ValueError("TRITON_INTERPRET is set: interpreted kernels are not worth timing")
    before = bench_timing.clocks()
    compile_ahead(bench, "cuda")
    torch.cuda.synchronize()
    cache = bench_timing.cache_bytes()
    bandwidth = bench_timing.copy_bandwidth()
    record = KernelRecord(
        titles={name: LAYERS[name].title for name in bench.layers},
        environment=environment(torch.device("cuda")),
        settings={
            name: list(value) if isinstance(value, tuple | list) else value
            for name, value in asdict(bench).items()
        },
        copy_gb_per_s=round(bandwidth, 1),
        cache_mb=round(cache / 1e6, 1),
        clocks={"before": before, "after": None},
        missing=[line for name in _recurrences(bench) for line in public_updates(name)[1]],
        rows=[],
    )
    for row in measure(bench, timer=bench_timing.graph_time, device="cuda", cache=cache):
        record.rows.append(_with_bandwidth(row, bandwidth))
        emit(record)
    return replace(record, clocks={"before": before, "after": bench_timing.clocks()})


def _recurrences(bench: KernelBench) -> list[str]:
    return list(dict.fromkeys(LAYERS[name].recurrence for name in bench.layers))


def _with_bandwidth(row: KernelRow, gb_per_s: float) -> KernelRow:
    if row.us is None or row.megabytes is None:
        return row
    return replace(row, bandwidth_share=round(1e3 * row.megabytes / row.us / gb_per_s, 4))


def compile_ahead(bench: KernelBench, device: str) -> None:
    """Compiles in threads what `measure` will launch: most of it does not hold Python's lock.

    A launch that fails here fails again when it is measured, and is reported then.
    """

    def compile_one(call: Callable[[], object]) -> None:
        with suppress(Exception):
            call()

    with ThreadPoolExecutor(_COMPILE_THREADS) as threads:
        for name in bench.layers:
            list(threads.map(compile_one, single_row_launches(bench, LAYERS[name], device)))


def single_row_launches(bench: KernelBench, layer: BenchLayer, device: str) -> list[Callable]:
    """A launch of everything that will be launched, all but one of its rows being padding, so that
    launch parameters are chosen as for the whole batch; different kernels first."""
    kernels = kernels_of(layer.recurrence)
    pools, calls = [], []
    for sequences, _, policy in _policies(bench, layer, device):
        with suppress(ValueError):
            pools.append(make_pool(sequences, policy).repeated(1))
    for batch in bench.batches:
        for pool in pools:
            L = pool.policy.ring_len
            for kernel in REPLAY_KERNELS:
                plan = [(0, 0), (0, L - 1)] if kernel == "cycle" else [(0, 0)]
                tokens = _tokens(bench, kernel, L)
                launches = replay_launches(
                    kernels, kernel, pool, plan, batch, tokens=tokens, padded=True
                )
                calls += [launch.call for launch in launches]
    for state in bench.states:
        states = conventional_states(sequences, STATE_DTYPES[state], 1, 0)
        for update in sweep_updates(kernels):
            calls += conventional_case(update, sequences, states, 1).launches[:1]
    return calls


def _tokens(bench: KernelBench, kernel: str, ring_len: int) -> int:
    return min(bench.window, ring_len) if kernel == "window" else 1


def _policies(
    bench: KernelBench, layer: BenchLayer, device: str
) -> Iterator[tuple[Sequences, str, PrecisionPolicy]]:
    for ring_len in bench.ring_lens:
        sequences = sequences_of(layer, ring_len, device)
        for label in bench.policies:
            yield sequences, label, replace(parse_policy(label), ring_len=ring_len)


# -- measuring -------------------------------------------------------------------------------------
def measure(
    bench: KernelBench,
    *,
    timer: Timer,
    device: str,
    cache: int,
) -> Iterator[KernelRow]:
    """Rows of all measurements, without bandwidth shares.

    Args:
        timer: takes launches, `reset` and `seconds`, see `bench_timing.graph_time`.
        cache: bytes of second-level cache, which working sets exceed.
    """
    for name in bench.layers:
        layer = LAYERS[name]
        templates = [
            (label, policy, _template(sequences, policy))
            for sequences, label, policy in _policies(bench, layer, device)
        ]
        sequences = sequences_of(layer, 1, device)
        for batch in bench.batches:
            best = None
            for row in _conventional(bench, sequences, batch, timer, cache):
                yield row
                if row.policy == "fp32" and row.us is not None:
                    best = min(best or row.us, row.us)
            for label, policy, template in templates:
                for row in _replay(bench, layer, label, policy, template, batch, timer, cache):
                    speedup = best and row.us and round(row.tokens * best / row.us, 3)
                    yield replace(row, speedup=speedup)


def _template(sequences: Sequences, policy: PrecisionPolicy) -> Pool | Exception:
    layer = sequences.layer
    reason = no_kernel(layer.recurrence, policy, rows=layer.sizes.rows, cols=layer.sizes.cols)
    if reason is not None:  # as the library would not use them, whatever they may do here
        return ValueError(reason)
    try:
        return make_pool(sequences, policy)
    except (ValueError, RuntimeError) as error:
        return error


def _conventional(
    bench: KernelBench, sequences: Sequences, batch: int, timer: Timer, cache: int
) -> Iterator[KernelRow]:
    """Our kernel, the fastest launch of a sweep, for each state format; public ones with FP32."""
    layer = sequences.layer
    common = {
        "layer": layer.name,
        "recurrence": layer.recurrence,
        "batch": batch,
        "kernel": "conventional",
    }
    updates = sweep_updates(kernels_of(layer.recurrence))
    for state in sorted(bench.states, key=lambda name: name != "fp32"):
        row = KernelRow(**common, policy=state, megabytes=_conventional_bytes(layer, state, batch))
        try:
            states = conventional_states(sequences, STATE_DTYPES[state], batch, cache)
            quick = [
                (timed.us, update)
                for update in updates
                if (timed := _sweep_time(update, sequences, states, batch, timer))
            ]
            ranked = [update for _, update in sorted(quick, key=lambda pair: pair[0])]
            if not ranked:
                ranked = updates[:1]  # say what is wrong with it
            best, updates = ranked[0], ranked[:_NARROW_LAUNCHES]
            case = conventional_case(best, sequences, states, batch)
            yield _timed(row, case, timer, bench.seconds, launch=best.detail)
        except Exception as error:
            yield refused(row, error)
        states = case = None
    for update in public_updates(layer.recurrence)[0]:
        row = KernelRow(
            **common,
            policy="fp32",
            source=update.source,
            megabytes=_conventional_bytes(layer, "fp32", batch),
        )
        try:
            states = conventional_states(
                sequences, torch.float32, batch, cache, transposed=update.transposed
            )
            case = conventional_case(update, sequences, states, batch)
            yield _timed(row, case, timer, bench.seconds)
        except Exception as error:
            yield refused(row, error)
        states = case = None


def _sweep_time(
    update: Update, sequences: Sequences, states: torch.Tensor, batch: int, timer: Timer
) -> Timing | None:
    """A rough time of a checked launch, or None for one that is wrong or does not run."""
    with suppress(Exception):
        case = conventional_case(update, sequences, states, batch)
        case.check()
        return timer(case.launches, reset=case.reset, seconds=_SWEEP_SECONDS)
    return None


def _conventional_bytes(layer: BenchLayer, state: str, batch: int) -> float:
    """1e6 bytes: the state, read and written."""
    sizes = layer.sizes
    stored = parse_policy(state).checkpoint.bytes_per_matrix(sizes.rows, sizes.cols)
    return batch * 2 * sizes.heads * stored / 1e6


def _replay(
    bench: KernelBench,
    layer: BenchLayer,
    label: str,
    policy: PrecisionPolicy,
    template: Pool | Exception,
    batch: int,
    timer: Timer,
    cache: int,
) -> Iterator[KernelRow]:
    """The three replay kernels of a policy."""
    kernels = kernels_of(layer.recurrence)
    pool = plan = None
    for kernel in REPLAY_KERNELS:
        tokens = _tokens(bench, kernel, policy.ring_len)
        row = KernelRow(
            layer=layer.name,
            recurrence=layer.recurrence,
            batch=batch,
            ring_len=policy.ring_len,
            policy=label,
            kernel=kernel,
            tokens=tokens,
            megabytes=None
            if kernel == "window"
            else batch * policy.bytes_per_token(layer.sizes) / 1e6,
        )
        case = None
        try:
            if isinstance(template, Exception):
                raise template
            if pool is None:
                pool, plan = replay_pool(template, batch, cache)
            case = replay_case(kernels, kernel, template, pool, plan, batch, tokens=tokens)
            yield _timed(row, case, timer, bench.seconds)
        except Exception as error:
            yield refused(row, error)


def _timed(row: KernelRow, case: Case, timer: Timer, seconds: float, **more) -> KernelRow:
    """The row with its time; a case that fails its check is not timed."""
    error = case.check()
    timing = timer(case.launches, reset=case.reset, seconds=seconds)
    return replace(
        row,
        us=round(timing.us, 3),
        us_low=round(timing.low, 3),
        us_high=round(timing.high, 3),
        replays=timing.replays,
        launches=len(case.launches),
        working_set_mb=round(case.working_set / 1e6, 3),
        error=float(f"{error:.2e}"),
        status="ok",
        **more,
    )
