"""The state update of one recurrent layer: recurrence + precision policy + backend.

Owns when things are read, appended, folded and rounded. Arithmetic lives in `ops`, tensors in
`cache`, formats in `policy`; this is where they meet. Knows no model.

    prefill    chunks with an FP32 state, nothing rounded
    load       hand-over: the prefill's state is rounded into checkpoint and read copy
    window     outputs of T tokens; appends them to the ring past the cursor, commits nothing
    commit     advances the cursor over the first n of them; the rest was a rejected draft
    flush      folds the ring into the checkpoint in FP32, rounds once, empties the ring
    step       window + commit + flush of full rings, for any number of tokens

Rounding happens at hand-over and flush (checkpoint and read copy, both from the same FP32 state)
and on append (ring), and nowhere else. Every product accumulates in FP32 from FP32 operands, unless
the policy's `operand` says otherwise: torch's float32 matmul precision must be "highest", as is
checked.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from replayssm.cache.replay import ReplayCache
from replayssm.formats.codec import NonFiniteStateError, Quantized
from replayssm.ops.gated_delta import reference as gated_delta
from replayssm.ops.kimi_delta import reference as kimi_delta
from replayssm.ops.mamba2 import reference as mamba2
from replayssm.ops.ring import append
from replayssm.policy import CHECKPOINT_STREAM, READ_COPY_STREAM, PrecisionPolicy, Storage

Inputs = mamba2.Mamba2Inputs | gated_delta.GatedDeltaInputs | kimi_delta.KimiDeltaInputs

RECURRENCES: dict[str, tuple[ModuleType, type]] = {
    "mamba2": (mamba2, mamba2.Mamba2Geometry),
    "gated_delta": (gated_delta, gated_delta.GatedDeltaGeometry),
    "kimi_delta": (kimi_delta, kimi_delta.KimiDeltaGeometry),
}
BACKENDS = ("auto", "reference", "triton")


class StateUpdate:
    """Window, commit and flush of one layer under one policy; holds no per-sequence state.

    Args:
        recurrence: "mamba2" or "gated_delta".
        policy: what is rounded where, and the ring length.
        layer: index of the layer, part of the key of random bits and of error messages.
        backend: "reference" (torch), "triton", or "auto".
        geometry: fields of `Mamba2Geometry` or `GatedDeltaGeometry`.
    """

    def __init__(
        self,
        recurrence: str,
        policy: PrecisionPolicy,
        *,
        layer: int,
        backend: str = "auto",
        **geometry: int,
    ) -> None:
        if recurrence not in RECURRENCES:
            raise ValueError(f"recurrence {recurrence!r}: allowed are {', '.join(RECURRENCES)}")
        if backend not in BACKENDS:
            raise ValueError(f"backend {backend!r}: allowed are {', '.join(BACKENDS)}")
        if backend == "triton":
            raise ValueError("backend 'triton': the kernels are not in this build; use 'reference'")
        self.recurrence, self.policy, self.layer = recurrence, policy, layer
        self.effective_backend = "reference"
        self._ops, make_geometry = RECURRENCES[recurrence]
        self.geometry = make_geometry(**geometry)
        self._ring_storage = None if policy.ring == "input" else policy.ring
        # With one copy, what was read *is* the checkpoint, and u need not be computed again.
        self._recompute = policy.read_copy is not None and policy.update_source == "checkpoint"

    @torch.no_grad()
    def new_cache(
        self,
        batch: int,
        device: torch.device | str = "cpu",
        *,
        sequence: Tensor | list[int],
        seed: Tensor | list[int] | int,
        dtype: torch.dtype = torch.float32,
    ) -> ReplayCache:
        """A cache of `batch` rows at the zero state with empty rings.

        Args:
            sequence: [B] ids of the requests. A row's random bits depend on its id and seed, not on
                its place in the batch.
            seed: [B], or one for all rows.
            dtype: of ring records where the policy's ring is "input": the dtype of the inputs.
        """
        sequence = torch.as_tensor(sequence, dtype=torch.int64, device=device)
        seed = torch.as_tensor(seed, dtype=torch.int64, device=device)
        seed = seed.repeat(batch) if seed.dim() == 0 else seed.clone()
        for name, value in (("sequence", sequence), ("seed", seed)):
            if value.shape != (batch,):
                raise ValueError(f"{name} has shape {list(value.shape)}, expected [{batch}]")
        ring, ring_len = {}, self.policy.ring_len
        layout = self._ops.ring_layout(self.geometry, recompute=self._recompute)
        for name, (heads, *width) in layout.items():
            shape = (batch, heads, ring_len, *width)
            if name in self._ops.STORED and self._ring_storage is not None:
                ring |= _parts(name, self._ring_storage.write(torch.zeros(shape, device=device)))
            else:
                exact = dtype if name in self._ops.STORED else torch.float32
                ring[name] = torch.zeros(shape, dtype=exact, device=device)
        cache = ReplayCache(
            checkpoint=None,
            read_copy=None,
            ring=ring,
            pos=torch.zeros(batch, dtype=torch.int64),
            flushes=torch.zeros_like(seed),
            sequence=sequence.clone(),
            seed=seed,
            saturated=torch.zeros_like(seed),
            layer=self.layer,
            ring_len=ring_len,
        )
        self._write(cache, torch.zeros((batch, *self.geometry.state_shape), device=device))
        cache.flushes.zero_()  # a zero state draws no bits: the hand-over is write 0
        return cache

    @torch.no_grad()
    def load(self, cache: ReplayCache, state: Tensor) -> None:
        """Hand-over: rounds an FP32 `state` [B, heads, rows, cols] in and empties the ring."""
        expected = (cache.batch, *self.geometry.state_shape)
        if state.shape != expected or state.dtype != torch.float32:
            raise ValueError(
                f"state is {state.dtype} {list(state.shape)}, expected float32 {list(expected)}"
            )
        self._write(cache, state)

    @torch.no_grad()
    def window(self, cache: ReplayCache, inputs: Inputs) -> Tensor:
        """Outputs of T tokens, FP32 [B, T, heads, rows].

        Appends the tokens to the ring past the cursor, in place, and writes nothing else: without
        `commit` they leave no trace, and another window overwrites them.
        """
        return self._window(cache, inputs)[0]

    def _window(self, cache: ReplayCache, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Outputs, and the FP32 values of the copy that was read."""
        _check_precision(cache.seed.device)
        tokens = self._check_inputs(cache, inputs)
        fits = cache.ring_len - int(cache.pos.max())
        if tokens > fits:
            raise ValueError(
                f"layer {self.layer}: a window of {tokens} tokens does not fit, the ring of "
                f"{cache.ring_len} has {fits} slots left: flush first, or use step()"
            )
        cursor = cache.cursor
        append(cache.ring, cursor, self._encode(inputs, cache))
        stored = cache.checkpoint if cache.read_copy is None else cache.read_copy
        state = self.policy.read_storage.read(stored)
        outputs, computed = self._ops.window(
            state,
            self._decoded_ring(cache),
            cursor,
            inputs,
            operand=self.policy.operand,
        )
        append(cache.ring, cursor, computed)
        cache.parameters = self._ops.parameters(inputs)
        cache.uncommitted = tokens
        return outputs, state

    def commit(self, cache: ReplayCache, accepted: int | Tensor) -> None:
        """Keeps the first `accepted` (one number, or [B]) tokens of the last window."""
        accepted = torch.as_tensor(accepted, dtype=torch.int64).cpu()
        if accepted.dim() > 1 or (accepted.dim() == 1 and accepted.shape != cache.pos.shape):
            raise ValueError(f"accepted has shape {list(accepted.shape)}, expected [{cache.batch}]")
        if int(accepted.min()) < 0 or int(accepted.max()) > cache.uncommitted:
            raise ValueError(
                f"cannot commit {accepted.tolist()}: the last window has {cache.uncommitted} tokens"
            )
        cache.pos = cache.pos + accepted
        cache.uncommitted = 0

    @torch.no_grad()
    def flush(self, cache: ReplayCache, rows: Tensor | None = None) -> None:
        """Folds the committed records of `rows` (bool [B]; default all) and empties their rings.

        A row whose ring is empty is left as it is. Uncommitted tokens are dropped.
        """
        _check_precision(cache.seed.device)
        full = cache.pos > 0
        if rows is not None:
            if rows.shape != full.shape or rows.dtype != torch.bool:
                raise ValueError(
                    f"rows is {rows.dtype} {list(rows.shape)}, expected bool [{cache.batch}]"
                )
            full &= rows.cpu()
        self._flush(cache, full)

    def _flush(self, cache: ReplayCache, rows: Tensor, checkpoint: Tensor | None = None) -> None:
        """Flush of `rows`; `checkpoint` are the checkpoint's FP32 values where they are at hand."""
        cache.uncommitted = 0
        if bool(rows.all()):
            self._write(cache, self._folded(cache, checkpoint))
        elif bool(rows.any()):
            index = rows.nonzero()[:, 0]
            part = cache.select(index)
            if checkpoint is not None:
                checkpoint = checkpoint.index_select(0, index.to(checkpoint.device))
            self._write(part, self._folded(part, checkpoint), rows=index)
            cache.assign(index, part)

    @torch.no_grad()
    def step(self, cache: ReplayCache, inputs: Inputs) -> Tensor:
        """Outputs of any T tokens: windows that fit the ring, each committed, full rings flushed.

        A ring is flushed after its L-th token, whose output is read like every other token's.
        """
        total = self._check_inputs(cache, inputs)
        outputs, done = [], 0
        self.flush(cache, cache.pos == cache.ring_len)
        while done < total:
            tokens = min(total - done, cache.ring_len - int(cache.pos.max()))
            output, read = self._window(cache, _tokens(inputs, done, done + tokens))
            outputs.append(output)
            self.commit(cache, tokens)
            # With one copy, what outputs read is the checkpoint: it need not be decoded twice.
            checkpoint = read if self.policy.read_copy is None else None
            self._flush(cache, cache.pos == cache.ring_len, checkpoint)
            done += tokens
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    @torch.no_grad()
    def prefill(
        self, state: Tensor | None, inputs: Inputs, chunk: int = 64
    ) -> tuple[Tensor, Tensor]:
        """Outputs and final state of T tokens from an FP32 state (None: zero); nothing is rounded.

        Returns outputs FP32 [B, T, heads, rows] and the state FP32; changes nothing in place.
        """
        if chunk < 1:
            raise ValueError(f"chunk {chunk}: must be at least 1")
        first = inputs[0]
        _check_precision(first.device)
        total = self._check_inputs(None, inputs)
        if state is None:
            state = torch.zeros((first.shape[0], *self.geometry.state_shape), device=first.device)
        outputs = []
        for start in range(0, total, chunk):
            part = _tokens(inputs, start, min(start + chunk, total))
            ring = self._ops.records(part)
            out, computed = self._ops.window(state, ring, 0, part)
            tokens = out.shape[1]
            state = self._ops.fold(state, ring | computed, tokens, self._ops.parameters(part))
            outputs.append(out)
        return torch.cat(outputs, dim=1), state

    @torch.no_grad()
    def state(self, cache: ReplayCache) -> Tensor:
        """The FP32 state that the next flush would round: checkpoint plus committed records."""
        _check_precision(cache.seed.device)
        return self._folded(cache)

    def _folded(self, cache: ReplayCache, checkpoint: Tensor | None = None) -> Tensor:
        if checkpoint is None:
            checkpoint = self.policy.checkpoint.read(cache.checkpoint)
        if not bool(cache.pos.any()):
            return checkpoint
        return self._ops.fold(
            checkpoint,
            self._decoded_ring(cache),
            cache.cursor,
            cache.parameters,
            operand=self.policy.operand,
        )

    def _write(self, cache: ReplayCache, state: Tensor, rows: Tensor | None = None) -> None:
        """Rounds an FP32 state into checkpoint and read copy, empties the ring, counts the write.

        `rows` names the rows of the caller's cache that these are, for error messages only.
        """
        self._refuse_non_finite(cache, state, rows)
        cache.checkpoint = self._store(cache, self.policy.checkpoint, state, CHECKPOINT_STREAM)
        cache.saturated = cache.saturated + cache.checkpoint.saturated
        if self.policy.read_copy is not None:
            cache.read_copy = self._store(cache, self.policy.read_copy, state, READ_COPY_STREAM)
            cache.saturated = cache.saturated + cache.read_copy.saturated
        cache.pos = torch.zeros_like(cache.pos)
        cache.flushes = cache.flushes + 1
        cache.uncommitted = 0

    def _store(self, cache: ReplayCache, storage: Storage, state: Tensor, stream: int) -> Quantized:
        bits = storage.draw_bits(
            state.shape,
            seed=cache.seed,
            layer=self.layer,
            stream=stream,
            flush_index=cache.flushes,
            sequence=cache.sequence,
        )
        return storage.write(state, bits)

    def _encode(self, inputs: Inputs, cache: ReplayCache) -> dict[str, Tensor]:
        """Ring tensors of new tokens, stored records in the ring's format."""
        encoded = {}
        for name, record in self._ops.records(inputs, recompute=self._recompute).items():
            if name in self._ops.STORED and self._ring_storage is not None:
                encoded |= _parts(name, self._ring_storage.write(record.float()))
                continue
            held = cache.ring[name].dtype
            if torch.promote_types(record.dtype, held) != held:
                raise ValueError(
                    f"layer {self.layer}: {name} arrives as {record.dtype}, the ring holds {held}: "
                    "give new_cache the dtype of the inputs"
                )
            encoded[name] = record
        return encoded

    def _decoded_ring(self, cache: ReplayCache) -> dict[str, Tensor]:
        if self._ring_storage is None:
            return cache.ring
        fmt = self._ring_storage.format
        decoded = {}
        for name, tensor in cache.ring.items():
            if name in self._ops.STORED:
                heads, width = self._ops.ring_layout(self.geometry, recompute=True)[name]
                tensor = self._ring_storage.read(
                    Quantized(
                        format=fmt,
                        shape=(heads, cache.ring_len, width),
                        data=tensor,
                        scale=cache.ring.get(f"{name}.scale"),
                        saturated=cache.saturated,
                    )
                )
            decoded[name] = tensor
        return decoded

    def _check_inputs(self, cache: ReplayCache | None, inputs: Inputs) -> int:
        """Number of tokens; raises ValueError for other shapes or a narrow gate."""
        batch, tokens = inputs[0].shape[:2]
        if cache is not None and batch != cache.batch:
            raise ValueError(f"inputs have {batch} rows, the cache has {cache.batch}")
        if tokens == 0:
            raise ValueError("inputs hold no token")
        for name, shape in self.geometry.input_shapes.items():
            value = getattr(inputs, name)
            if value.shape != (batch, tokens, *shape):
                raise ValueError(
                    f"layer {self.layer}: {name} has shape {list(value.shape)}, "
                    f"expected {[batch, tokens, *shape]}"
                )
        for name in self._ops.EXACT_INPUTS:
            dtype = getattr(inputs, name).dtype
            if dtype != torch.float32:
                raise ValueError(f"layer {self.layer}: {name} is {dtype}, must be torch.float32")
        return tokens

    def _refuse_non_finite(self, cache: ReplayCache, state: Tensor, rows: Tensor | None) -> None:
        # One pass without a temporary; a sum that overflowed, too, is looked at closely.
        if bool(state.sum().isfinite()) or bool(state.isfinite().all()):
            return
        row, head = (~state.isfinite()).flatten(2).any(-1).nonzero()[0].tolist()
        sequence, write = int(cache.sequence[row]), int(cache.flushes[row])
        row = row if rows is None else int(rows[row])
        error = NonFiniteStateError((row, head), self.policy.label)
        error.args = (
            f"state is not finite in layer {self.layer}, row {row} (sequence {sequence}), "
            f"head {head}, at state write {write} under policy {self.policy.label}",
        )
        error.layer, error.row, error.head, error.write = self.layer, row, head, write
        raise error


def _parts(name: str, quantized: Quantized) -> dict[str, Tensor]:
    """Ring tensors of an encoded record."""
    stored = quantized.tensors()
    data = {name: stored.pop("data")}
    return data | {f"{name}.{part}": tensor for part, tensor in stored.items()}


def _tokens(inputs: Inputs, start: int, stop: int) -> Inputs:
    """Tokens start .. stop-1; layer constants (at most two axes) stay whole."""
    return type(inputs)(*(t if t is None or t.dim() < 3 else t[:, start:stop] for t in inputs))


def _check_precision(device: torch.device) -> None:
    """Raises RuntimeError where torch would silently narrow FP32 products on this device."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    precision = backend.matmul.fp32_precision
    if precision not in ("none", "ieee"):
        raise RuntimeError(
            f"float32 products are set to {precision!r} on {device.type}; the state update needs "
            'them exact: torch.set_float32_matmul_precision("highest")'
        )
    if torch.is_autocast_enabled(device.type):
        raise RuntimeError(f"the state update cannot run under torch.autocast({device.type!r})")
