"""Looking at recurrent states while arms run: their errors, and the gates the reference has seen.

Owns what is read from caches at a chosen position, and the running sums over gates in between. Must
not know how errors are stored or what theory says of them. Reads only; a run with a probe computes
the same numbers as one without.

Between measurements a window costs one copy of each layer's outputs and a few operations on
[prompts, heads of all layers] numbers. The copies go to memory that stays where it is, so that they
are part of a captured graph like everything else in a forward pass; whichever graph is replayed,
they hold the newest window of that many tokens.

Legend: A arms, P prompts, T tokens of a window, H heads of a layer, R x C one state matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replayssm.models.session import ReplaySession


@dataclass(frozen=True, kw_only=True)
class LayerStates:
    """One recurrent layer at one position, every arm, the reference first; on the CPU.

    Errors are ||arm - reference|| / ||reference|| per head (NaN where the reference is zero).

    layer: index in the model.
    checkpoint_error: [A, P, H], the checkpoint as stored against the reference's FP32 state.
    read_error: [A, P, H], the separate read copy likewise; NaN for arms that have none.
    output_error: [A, P, H], outputs of the last window.
    state_norm: [A, P, H], Frobenius norm of the checkpoint.
    underflowed: [A, P, H], share of elements read as 0 whose reference is not 0.
    saturated: [A, P] int64, elements of the layer that saturated when written, so far.
    log_decay: [P, H] float64, mean per token since the hand-over.
    writes: [A, P, H] float64, sum over the writes of the squared decay since each.
    """

    layer: int
    checkpoint_error: Tensor
    read_error: Tensor
    output_error: Tensor
    state_norm: Tensor
    underflowed: Tensor
    saturated: Tensor
    log_decay: Tensor
    writes: Tensor


class StateProbe:
    """Watches the decode passes of `session`, whose first groups are the arms.

    schedules: for each arm (ring length, refresh interval or None): when its state is written, and
        when it is replaced by the reference's. Both count tokens since the hand-over.
    """

    def __init__(
        self, session: ReplaySession, *, prompts: int, schedules: Sequence[tuple[int, int | None]]
    ):
        self._session, self._family = session, session.adapter.family
        self._prompts, self._schedules = prompts, list(schedules)
        # By layer and tokens of a window; never replaced: graphs write to them.
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._decays: dict[tuple[int, int], Tensor] = {}
        self._tokens = self._window = 0
        self._sums: dict[str, Tensor] = {}
        session.observer = self._observe

    def _observe(self, layer: int, inputs: Any, out: Tensor) -> None:
        reference = self._family.select_rows(inputs, slice(0, self._prompts))
        key = (layer, out.shape[1])
        for kept, new in (
            (self._decays, self._family.log_decay(reference)),
            (self._outputs, out[: len(self._schedules) * self._prompts]),
        ):
            if key in kept:
                kept[key].copy_(new)
            else:
                kept[key] = new.clone()

    # -- gates -------------------------------------------------------------------------------------
    def advance(self, tokens: int) -> None:
        """Count the window of `tokens` tokens that was just run."""
        layers, device = self._session.layer_indices, self._session.adapter.device
        decays = [self._decays[layer, tokens].to(device) for layer in layers]  # of several devices
        decays = torch.cat(decays, dim=-1).double()
        self._window = tokens
        if not self._sums:
            self._sums = self._empty(decays[:, 0])
        self._sums["log_decay"] += decays.sum(1)
        for ring_len, every in dict.fromkeys(self._schedules):
            writes, pending = (self._sums[_name(part, ring_len, every)] for part in _PARTS)
            at, done = self._tokens, 0
            while done < decays.shape[1]:
                if every is not None and at % every == 0 and at > 0:
                    writes.fill_(1.0)  # replaced by the exact state, rounded once
                    pending.zero_()
                step = min(ring_len - at % ring_len, decays.shape[1] - done)
                pending += decays[:, done : done + step].sum(1)
                at, done = at + step, done + step
                if at % ring_len == 0:
                    writes.mul_(torch.exp(2.0 * pending)).add_(1.0)
                    pending.zero_()
        self._tokens += decays.shape[1]

    def _empty(self, like: Tensor) -> dict[str, Tensor]:
        sums = {"log_decay": torch.zeros_like(like)}
        for ring_len, every in dict.fromkeys(self._schedules):
            sums[_name("writes", ring_len, every)] = torch.ones_like(like)  # the hand-over
            sums[_name("pending", ring_len, every)] = torch.zeros_like(like)
        return sums

    def tensors(self) -> dict[str, Tensor]:
        """The running sums, by name, by reference: what a resumed run goes on from."""
        return self._sums | {"tokens": torch.tensor(self._tokens)}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Go on where `tensors` were taken."""
        tensors = dict(tensors)
        self._tokens = int(tensors.pop("tokens"))
        device = self._session.adapter.device
        self._sums = {name: tensor.to(device).clone() for name, tensor in tensors.items()}

    # -- states ------------------------------------------------------------------------------------
    def measure(self) -> list[LayerStates]:
        """Every recurrent layer, now; every ring must be empty. Waits for the device."""
        assert self._window > 0, "nothing has been read yet"
        found, first = [], 0
        for layer in self._session.layer_indices:
            heads = self._decays[layer, self._window].shape[-1]
            found.append(self._measure_layer(layer, slice(first, first + heads)))
            first += heads
        return found

    def _measure_layer(self, layer: int, heads: slice) -> LayerStates:
        pairs = self._session.updates(layer)[: len(self._schedules)]
        update, cache = pairs[0]
        exact = update.state(cache)  # [P, H, R, C]
        norm = _norm(exact)
        outputs = self._outputs[layer, self._window]
        outputs = outputs.unflatten(0, (len(pairs), self._prompts))  # [A, P, T, H, R]
        output_norm = outputs[0].square().sum((1, 3)).sqrt()
        rows = []
        for arm, (update, cache) in enumerate(pairs):
            assert not bool(cache.pos.any()), f"arm {arm} holds tokens that are not folded yet"
            stored = update.policy.checkpoint.read(cache.checkpoint)
            read, read_error = stored, torch.full_like(norm, torch.nan)
            if cache.read_copy is not None:
                read = update.policy.read_storage.read(cache.read_copy)
                read_error = _norm(read - exact) / norm
            rows.append(
                torch.stack(
                    [
                        _norm(stored - exact) / norm,
                        read_error,
                        (outputs[arm] - outputs[0]).square().sum((1, 3)).sqrt() / output_norm,
                        _norm(stored),
                        ((read == 0) & (exact != 0)).float().mean((-2, -1)),
                    ]
                )
            )
        columns = torch.stack(rows, dim=1).cpu()  # [5, A, P, H]
        writes = [self._sums[_name("writes", *schedule)][:, heads] for schedule in self._schedules]
        return LayerStates(
            layer=layer,
            checkpoint_error=columns[0],
            read_error=columns[1],
            output_error=columns[2],
            state_norm=columns[3],
            underflowed=columns[4],
            saturated=torch.stack([cache.saturated for _, cache in pairs]).cpu(),
            log_decay=(self._sums["log_decay"][:, heads] / self._tokens).cpu(),
            writes=torch.stack(writes).cpu(),
        )


_PARTS = ("writes", "pending")


def _name(part: str, ring_len: int, every: int | None) -> str:
    return f"{part} every {ring_len}" + ("" if every is None else f", refreshed every {every}")


def _norm(states: Tensor) -> Tensor:
    """Frobenius norm of each matrix [.., R, C]."""
    return torch.linalg.matrix_norm(states)
