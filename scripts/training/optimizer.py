"""Muon for matrices and AdamW for the rest, as tensor operations that a CUDA graph can capture.

The learning rate is a device tensor that the caller overwrites; nothing here reads a value back
to the host. Source: Jordan et al., "Muon" (2024), with the update scaled to AdamW's size as in
Liu et al., arXiv:2502.16982, so that one learning rate serves both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
UPDATE_RMS = 0.2


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximate U V^T of each of the matrices [n, rows, columns], in bf16."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-1, -2) if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


class Optimizer:
    """One step updates every parameter of `model` in place from its gradient.

    Matrices inside layers use Muon (momentum 0.95, Nesterov), embeddings and vectors AdamW (0.9,
    0.95). Weight decay acts on matrices and the embedding, not on norms, convolutions, biases or
    the decay parameters A_log and dt_bias. Gradients are clipped to a global norm of 1 first.
    """

    def __init__(self, model: nn.Module, *, weight_decay: float = 0.05, vector_scale: float = 1.0):
        named = list(model.named_parameters())
        self.parameters = [p for _, p in named]
        device = self.parameters[0].device
        self.learning_rate = torch.zeros((), device=device)
        self._step = torch.zeros((), device=device)
        self._weight_decay = weight_decay
        self._vector_scale = vector_scale
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
        self._embeddings, self._vectors = [], []
        for name, p in named:
            if "embed" in name:
                self._embeddings.append(p)
            elif p.dim() == 2 and min(p.shape) >= 32:
                by_shape.setdefault(tuple(p.shape), []).append(p)
            else:
                self._vectors.append(p)
        self._matrices = list(by_shape.values())
        self._momentum = [
            torch.zeros(len(group), *group[0].shape, device=device) for group in self._matrices
        ]
        self._adam = [
            (torch.zeros_like(p), torch.zeros_like(p)) for p in self._embeddings + self._vectors
        ]

    @torch.no_grad()
    def step(self) -> Tensor:
        """Apply one update; returns the gradient norm before clipping (a device scalar)."""
        norm = torch.linalg.vector_norm(
            torch.stack(torch._foreach_norm([p.grad for p in self.parameters]))
        )
        scale = (1.0 / norm.clamp(min=1.0)).nan_to_num(
            0.0, posinf=0.0
        )  # a non-finite gradient changes nothing
        finite = torch.isfinite(norm)
        self._step += 1
        for group, momentum in zip(self._matrices, self._momentum, strict=True):
            grad = torch.where(finite, torch.stack([p.grad for p in group]) * scale, 0.0)
            momentum.lerp_(grad, 0.05)
            update = orthogonalize(grad.lerp(momentum, 0.95)).float()
            size = UPDATE_RMS * max(group[0].shape) ** 0.5
            for p, u in zip(group, update, strict=True):
                p.mul_(1.0 - self.learning_rate * self._weight_decay)
                p.sub_(self.learning_rate * size * u)
        correction1, correction2 = 1.0 - 0.9**self._step, 1.0 - 0.95**self._step
        for i, (p, (first, second)) in enumerate(
            zip(self._embeddings + self._vectors, self._adam, strict=True)
        ):
            grad = torch.where(finite, p.grad * scale, 0.0)
            first.lerp_(grad, 0.1)
            second.lerp_(grad.square(), 0.05)
            update = (first / correction1) / ((second / correction2).sqrt() + 1e-8)
            if i < len(self._embeddings):
                p.mul_(1.0 - self.learning_rate * self._weight_decay)
                p.sub_(self.learning_rate * update)
            else:
                p.sub_(self.learning_rate * self._vector_scale * update)
        return norm
