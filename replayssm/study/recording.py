"""Windows of logits into records: reduced on the device, brought over once per stretch.

Owns the columns of positions.parquet. Knows no files and no order of things; divergence itself is
`drift`'s.
"""

import numpy as np
import torch

from replayssm.study.drift import Drift, window_drift
from replayssm.study.spec import StudySpec


class Stretch:
    """Consecutive windows of one batch of prompts, from position `start` on.

    Results stay on the device until `columns`: a window costs no wait for it. Legend: A arms, P
    prompts, T positions of a window, S scored ones.
    """

    def __init__(self, spec: StudySpec, prompts: range, start: int):
        self.spec, self.prompts = spec, prompts
        self.start = self.stop = start
        self._parts: list[tuple[list[int], Drift, torch.Tensor, torch.Tensor]] = []

    def add(self, logits: torch.Tensor, targets: torch.Tensor, saturated: torch.Tensor) -> None:
        """One window: `logits` [1 + A, P, T, V] with the reference first, `targets` [P, T],
        `saturated` [A, P] counts at its end.
        """
        width, first = logits.shape[2], self.stop
        self.stop += width
        scored = [i for i in range(width) if (first + i) % self.spec.stride == 0]
        if not scored:
            return
        if len(scored) < width:
            logits, targets = logits[:, :, scored], targets[:, scored]
        reference, candidates = logits[0].flatten(0, 1), logits[1:].flatten(1, 2)
        # A copy: the engine may use the same memory for its next window.
        tokens = targets.reshape(-1).to(reference.device, copy=True)
        drift = window_drift(reference, candidates, tokens)
        self._parts.append(([first + i for i in scored], drift, tokens, saturated))

    @property
    def scored(self) -> bool:
        """Whether there is anything to record."""
        return bool(self._parts)

    def columns(self) -> list[dict[str, np.ndarray]]:
        """Columns of `records.SCHEMA`, flat (position-major, arm-minor), a dict for each prompt.

        Raises ValueError naming the first position where the reference's logits are not finite.
        """
        arms, prompts = self.spec.arms(), len(self.prompts)
        positions = [at for part in self._parts for at in part[0]]
        assert positions, "no position of this stretch was scored"

        def joined(pick, rows: bool = False) -> np.ndarray:
            """[P, S, A] of what `pick` takes from each part: [A, P * S], or `rows`: [P * S]."""
            parts = [pick(*part[1:]) for part in self._parts]
            shape = (prompts, -1) if rows else (len(arms), prompts, -1)
            values = torch.cat([part.reshape(shape) for part in parts], dim=-1).cpu().numpy()
            if rows:
                return np.repeat(values[:, :, None], len(arms), axis=2)
            return values.transpose(1, 2, 0)

        finite = joined(lambda drift, *_: drift.reference.finite, rows=True)[:, :, 0]
        if not finite.all():
            at, prompt = np.argwhere(~finite.T)[0]
            raise ValueError(
                f"logits of the FP32 reference are not finite at prompt {self.prompts[prompt]}, "
                f"position {positions[at]}: there is nothing to compare with"
            )
        saturated = torch.cat(
            [part[3][:, :, None].expand(-1, -1, len(part[0])) for part in self._parts], dim=-1
        )
        cubes = {
            "token": joined(lambda drift, tokens, _: tokens, rows=True),
            "kl": joined(lambda drift, *_: drift.kl),
            "kl_reverse": joined(lambda drift, *_: drift.kl_reverse),
            "delta_logp": joined(lambda drift, *_: drift.delta_logp),
            "ref_entropy": joined(lambda drift, *_: drift.reference.entropy, rows=True),
            "ref_top1_prob": joined(lambda drift, *_: drift.reference.top1_prob, rows=True),
            "top1_match": joined(lambda drift, *_: drift.top1_match),
            "top2_margin": joined(lambda drift, *_: drift.reference.top2_margin, rows=True),
            "nonfinite": joined(lambda drift, *_: drift.nonfinite),
            "saturated": saturated.cpu().numpy().transpose(1, 2, 0),
        }
        where = np.array(positions, dtype=np.int64)
        ring_lens = np.array([arm.policy.ring_len for arm in arms])
        tables = []
        for index, prompt in enumerate(self.prompts):
            columns = {name: cube[index].reshape(-1) for name, cube in cubes.items()}
            columns["prompt"] = np.full(columns["kl"].shape, prompt)
            columns["position"] = np.repeat(where, len(arms))
            columns["phase"] = (where[:, None] % ring_lens).reshape(-1)
            columns["arm"] = np.tile(np.arange(len(arms)), len(where))
            tables.append(columns)
        return tables
