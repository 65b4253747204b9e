"""The state update of one recurrent layer: recurrence + precision policy + backend.

Owns when things are read, appended, folded and rounded. Arithmetic lives in `ops`, tensors in
`cache`, formats in `policy`; this is where they meet. Knows no model. `reference.py` is the torch
backend, `triton_kernels.py` the one for GPUs; a cache written by one can be read by the other.
`together.py` runs several policies in torch at once.

    prefill    chunks with an FP32 state, nothing rounded (torch, whatever the backend)
    load       hand-over: the prefill's state is rounded into checkpoint and read copy
    window     outputs of T tokens; appends them to the ring past the cursor, commits nothing
    commit     advances the cursor over the first n of them; the rest was a rejected draft
    rollback   moves the cursor back over committed tokens that are still in the ring
    flush      folds the ring into the checkpoint in FP32, rounds once, empties the ring
    step       window + commit + flush of full rings, for any number of tokens

Rounding happens at hand-over and flush (checkpoint and read copy, both from the same FP32 state)
and on append (ring), and nowhere else. Every product accumulates in FP32 from FP32 operands, unless
the policy's `operand` says otherwise: torch's float32 matmul precision must be "highest", as is
checked where torch multiplies.

With kernels, `window`, `commit`, `flush` and `step` of one token never wait for the GPU; `step` of
several tokens waits once if the host does not know the cursors, as after a commit of numbers that
only the GPU has. All can be captured in a CUDA graph, after a call outside of it. Capturing moves
no cursor; after each replay call `replayed`, so that the host knows where the rows stand. (How
`step` cuts many tokens into windows is fixed at capture; a window for which a row has no room
gives it NaN.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from replayssm.cache.replay import ReplayCache
from replayssm.formats.codec import NonFiniteStateError, Quantized
from replayssm.formats.rounding import NEAREST_EVEN
from replayssm.ops.capability import BACKENDS, RING_DTYPES, choose_backend
from replayssm.policy import PrecisionPolicy, Storage
from replayssm.state_update.inputs import RECURRENCES, InputCheck, Inputs, select_tokens
from replayssm.state_update.reference import Reference, check_precision, ring_parts

__all__ = [
    "BACKENDS",
    "PREFILL_BACKEND",
    "RECURRENCES",
    "Inputs",
    "StateUpdate",
    "select_tokens",
]

PREFILL_BACKEND = "reference"
"""The backend of `prefill`, whatever the update's is."""


class StateUpdate:
    """Window, commit and flush of one layer under one policy; holds no per-sequence state.

    Args:
        recurrence: "mamba2", "gated_delta" or "kimi_delta".
        policy: what is rounded where, and the ring length.
        layer: index of the layer, part of the key of random bits and of error messages.
        backend: "reference" (torch), "triton", or "auto": kernels where `device` is a GPU and
            there are some for the policy and the sizes (`ops/capability.py`), else torch.
        device: where caches and inputs live.
        geometry: fields of the recurrence's geometry.

    Attributes:
        effective_backend: "reference", "triton" or "triton (interpreted)".
        backend_reason: why "auto" did not take kernels on a GPU, or empty.

    Raises:
        ValueError: unknown names, impossible sizes, "triton" where it is not possible.
    """

    def __init__(
        self,
        recurrence: str,
        policy: PrecisionPolicy,
        *,
        layer: int,
        backend: str = "auto",
        device: torch.device | str = "cpu",
        **geometry: int,
    ) -> None:
        if recurrence not in RECURRENCES:
            raise ValueError(f"recurrence {recurrence!r}: allowed are {', '.join(RECURRENCES)}")
        self.recurrence, self.policy, self.layer = recurrence, policy, layer
        self.device = torch.device(device)
        self._ops, make_geometry = RECURRENCES[recurrence]
        self.geometry = make_geometry(**geometry)
        _, rows, cols = self.geometry.state_shape
        choice = choose_backend(
            backend, recurrence, policy, rows=rows, cols=cols, device=self.device
        )
        self.effective_backend, self.backend_reason = choice.backend, choice.reason
        # With one copy, what was read *is* the checkpoint, and u need not be computed again.
        self._recompute = policy.read_copy is not None and policy.update_source == "checkpoint"
        self._reference = Reference(
            self._ops, self.geometry, policy, layer=layer, recompute=self._recompute
        )
        self._check = InputCheck(
            self._ops,
            self.geometry,
            stored_as_given=policy.ring == "input",
            recompute=self._recompute,
            layer=layer,
        )
        self._kernels = None
        if choice.uses_kernels:
            from replayssm.state_update.triton_kernels import TritonKernels

            self._kernels = TritonKernels(recurrence, policy, layer=layer)
        self._backend = self._kernels or self._reference

    @torch.no_grad()
    def new_cache(
        self,
        batch: int,
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
        device = self.device
        sequence = torch.as_tensor(sequence, dtype=torch.int64, device=device).clone()
        seed = torch.as_tensor(seed, dtype=torch.int64, device=device)
        seed = seed.repeat(batch) if seed.dim() == 0 else seed.clone()
        for name, value in (("sequence", sequence), ("seed", seed)):
            if value.shape != (batch,):
                raise ValueError(f"{name} has shape {list(value.shape)}, expected [{batch}]")
        if self._kernels is not None and self.policy.ring == "input" and dtype not in RING_DTYPES:
            raise ValueError(
                f"layer {self.layer}: inputs of {dtype} have no kernels; allowed are "
                f"{', '.join(map(str, RING_DTYPES))}"
            )
        state = torch.zeros((batch, *self.geometry.state_shape), device=device)
        read_copy = self.policy.read_copy
        cache = ReplayCache(
            checkpoint=_zero(self.policy.checkpoint, state),
            read_copy=None if read_copy is None else _zero(read_copy, state),
            ring=self._new_ring(batch, dtype),
            sequence=sequence,
            seed=seed,
            layer=self.layer,
            ring_len=self.policy.ring_len,
            known=0,
            **{
                name: torch.zeros_like(seed)
                for name in ("pos", "flushes", "saturated", "not_finite")
            },
        )
        assert cache.kernel_arguments  # made now: not while a graph is captured
        return cache

    def _new_ring(self, batch: int, dtype: torch.dtype) -> dict[str, Tensor]:
        ring = {}
        layout = self._ops.ring_layout(self.geometry, recompute=self._recompute)
        for name, (heads, *width) in layout.items():
            shape = (batch, heads, self.policy.ring_len, *width)
            if name in self._ops.STORED and self.policy.ring != "input":
                zeros = torch.zeros(shape, device=self.device)
                ring |= ring_parts(name, self.policy.ring.write(zeros))
            else:
                exact = dtype if name in self._ops.STORED else torch.float32
                ring[name] = torch.zeros(shape, dtype=exact, device=self.device)
        return ring

    @torch.no_grad()
    def load(self, cache: ReplayCache, state: Tensor) -> None:
        """Hand-over: rounds an FP32 `state` [B, heads, rows, cols] in and empties the ring."""
        expected = (cache.batch, *self.geometry.state_shape)
        if state.shape != expected or state.dtype != torch.float32:
            raise ValueError(
                f"state is {state.dtype} {list(state.shape)}, expected float32 {list(expected)}"
            )
        self._reference.write(cache, state)
        cache.uncommitted, cache.may_be_full = 0, False

    @torch.no_grad()
    def window(self, cache: ReplayCache, inputs: Inputs) -> Tensor:
        """Outputs of T tokens, FP32 [B, T, heads, rows].

        Appends the tokens to the ring past the cursor, in place, and writes nothing else: without
        `commit` they leave no trace, and another window overwrites them. ValueError if a row has no
        room for them; where only the GPU knows that, the row's outputs are NaN.
        """
        tokens = self._check(inputs, cache)
        if self._kernels is None or (cache.known is not None and not _capturing(cache)):
            where = cache.cursor
            fits = cache.ring_len - (where if isinstance(where, int) else int(where.max()))
            if tokens > fits:
                raise ValueError(
                    f"layer {self.layer}: a window of {tokens} tokens does not fit, the ring of "
                    f"{cache.ring_len} has {fits} slots left: flush first, or use step()"
                )
        most = self._backend.most_tokens
        if most is not None and tokens > most:
            raise ValueError(
                f"layer {self.layer}: a window of {tokens} tokens is beyond the kernels' {most}: "
                "use step()"
            )
        return self._window(cache, inputs, tokens)[0]

    def _window(self, cache: ReplayCache, inputs: Inputs, tokens: int) -> tuple:
        """Outputs, and the FP32 values of the copy that was read where there are any."""
        result = self._backend.window(cache, inputs)
        self._note_parameters(cache, inputs)
        cache.uncommitted = tokens
        return result

    def _note_parameters(self, cache: ReplayCache, inputs: Inputs) -> None:
        # Layer constants do not change, and one that a graph computes has no value until replay.
        if not (cache.parameters and _capturing(cache)):
            cache.parameters = self._ops.parameters(inputs)

    @torch.no_grad()
    def commit(self, cache: ReplayCache, accepted: int | Tensor) -> None:
        """Keeps the first `accepted` (one number, or [B] of them) tokens of the last window.

        [B] on a GPU are checked there: one out of range ends the process's use of that GPU. A
        single number on a GPU is fetched from it.
        """
        if isinstance(accepted, Tensor) and accepted.dim() == 0:
            accepted = int(accepted)
        if isinstance(accepted, Tensor):
            if accepted.shape != cache.pos.shape:
                raise ValueError(
                    f"accepted has shape {list(accepted.shape)}, expected [{cache.batch}]"
                )
            accepted = accepted.to(torch.int64)
            in_range = ((accepted >= 0) & (accepted <= cache.uncommitted)).all()
            if accepted.device.type != "cpu":
                torch._assert_async(in_range, "accepted is not in 0 .. tokens of the window")
                in_range = True
        else:
            in_range = 0 <= accepted <= cache.uncommitted
        if not in_range:
            numbers = accepted.tolist() if isinstance(accepted, Tensor) else accepted
            raise ValueError(
                f"cannot commit {numbers}: the last window has {cache.uncommitted} tokens"
            )
        cache.advance(accepted)
        cache.uncommitted, cache.may_be_full = 0, True

    @torch.no_grad()
    def rollback(self, cache: ReplayCache, rejected: int | Tensor) -> None:
        """Takes back the last `rejected` (one number, or [B] on the CPU) committed tokens.

        Only while they are in the ring: ValueError where fewer have been committed since the last
        flush. Moves the cursor; state and ring stay as they are.
        """
        taken, where = torch.as_tensor(rejected), torch.as_tensor(cache.cursor)
        if bool((taken < 0).any()) or bool((taken > where).any()):
            raise ValueError(
                f"layer {self.layer}: cannot take back {taken.tolist()} tokens, the ring holds "
                f"{where.tolist()}"
            )
        cache.advance(-rejected)
        cache.uncommitted = 0

    @torch.no_grad()
    def flush(self, cache: ReplayCache, rows: Tensor | None = None) -> None:
        """Folds the committed records of `rows` (bool [B]; default all) and empties their rings.

        A row whose ring is empty is left as it is. Uncommitted tokens are dropped.
        """
        if rows is not None and (rows.shape != cache.pos.shape or rows.dtype != torch.bool):
            raise ValueError(
                f"rows is {rows.dtype} {list(rows.shape)}, expected bool [{cache.batch}]"
            )
        cache.uncommitted = 0
        self._backend.flush(cache, rows)

    @torch.no_grad()
    def step(self, cache: ReplayCache, inputs: Inputs) -> Tensor:
        """Outputs of any T tokens: windows that fit the ring, each committed, full rings flushed.

        A ring is flushed after its L-th token, whose output is read like every other token's.
        """
        total = self._check(inputs, cache)
        if self._kernels is not None and total == 1:
            return self._step_one(cache, inputs)
        outputs, done = [], 0
        for tokens, full in self._schedule(cache, total):
            read = None
            if tokens:
                part = select_tokens(inputs, done, done + tokens)
                output, read = self._window(cache, part, tokens)
                outputs.append(output)
                cache.advance(tokens)
                done += tokens
            if any(full):
                self._backend.flush_full(cache, torch.tensor(full).expand(cache.batch), read)
        cache.uncommitted, cache.may_be_full = 0, False
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _step_one(self, cache: ReplayCache, inputs: Inputs) -> Tensor:
        """One token in one operator, by the cursors on the device."""
        if cache.may_be_full:
            self._kernels.flush_full(cache)
        output = self._kernels.step(cache, inputs)
        self._note_parameters(cache, inputs)
        self.replayed(cache, 1)
        return output

    def replayed(self, cache: ReplayCache, tokens: int) -> None:
        """Tells the host that the GPU has done what `step` does with `tokens` tokens."""
        cache.uncommitted, cache.may_be_full = 0, False
        if cache.known is not None:
            cache.learn((cache.known + tokens) % cache.ring_len)

    def _schedule(self, cache: ReplayCache, total: int) -> Iterator[tuple[int, list[bool]]]:
        """How `step` proceeds: tokens of a window (0: none), and whose ring is full after it.

        One flag for all rows where they stand at the same slot.
        """
        if cache.known is None and _capturing(cache):
            raise RuntimeError(
                f"layer {self.layer}: only the GPU knows where the rows stand, and cannot be asked "
                "while a graph is captured: read `cache.cursor` before"
            )
        where, ring_len = cache.cursor, cache.ring_len
        at = [where] if isinstance(where, int) else where.tolist()
        most = self._backend.most_tokens or ring_len
        tokens = 0
        while True:
            yield tokens, [slot == ring_len for slot in at]
            if total == 0:
                return
            at = [slot % ring_len for slot in at]
            tokens = min(total, most, ring_len - max(at))
            at = [slot + tokens for slot in at]
            total -= tokens

    @torch.no_grad()
    def prefill(
        self, state: Tensor | None, inputs: Inputs, chunk: int = 64
    ) -> tuple[Tensor, Tensor]:
        """Outputs and final state of T tokens from an FP32 state (None: zero); nothing is rounded.

        Returns outputs FP32 [B, T, heads, rows] and the state FP32; changes nothing in place.
        """
        if chunk < 1:
            raise ValueError(f"chunk {chunk}: must be at least 1")
        total = self._check(inputs)
        parts = [
            select_tokens(inputs, start, min(start + chunk, total))
            for start in range(0, total, chunk)
        ]
        return self._reference.prefill(state, parts)

    @torch.no_grad()
    def state(self, cache: ReplayCache) -> Tensor:
        """The FP32 state that the next flush would round: checkpoint plus committed records.

        Computed in torch, whatever the backend.
        """
        check_precision(cache.seed.device)
        return self._reference.folded(cache)

    def check_finite(self, cache: ReplayCache) -> None:
        """Waits for the GPU; raises NonFiniteStateError if a state that kernels wrote had Inf or
        NaN. (The reference raises when it would write one.)"""
        counts = cache.not_finite.tolist()
        rows = [row for row, count in enumerate(counts) if count]
        if not rows:
            return
        error = NonFiniteStateError((rows[0],), self.policy.label)
        where = ", ".join(f"{row} (sequence {int(cache.sequence[row])})" for row in rows)
        error.args = (
            f"state is not finite in layer {self.layer}, row{'s' * (len(rows) > 1)} {where}: "
            f"{sum(counts)} elements so far under policy {self.policy.label}",
        )
        error.layer, error.row = self.layer, rows[0]
        raise error


def _zero(storage: Storage, state: Tensor) -> Quantized:
    """A zero state as stored; it needs no random bits."""
    return replace(storage, rounding=NEAREST_EVEN).write(state)


def _capturing(cache: ReplayCache) -> bool:
    """Whether a CUDA graph is being captured, in which case nothing happens now."""
    return cache.pos.is_cuda and torch.cuda.is_current_stream_capturing()
