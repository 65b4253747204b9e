"""Trainable Mamba-2 language model whose parameters carry the names of Hugging Face's
Mamba2ForCausalLM.

Owns a chunk-parallel form for training and a one-token form for fast evaluation; both are tested
equal to transformers' own module. Shape legend: B batch, T time, H heads, P head size, G groups,
N state size, C chunks, L chunk length. Source: Dao and Gu, "Transformers are SSMs"
(arXiv:2405.21060), section 6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.blocks import (
    DecayScan,
    causal_conv_silu,
    conv_step,
    init_linear,
    inverse_softplus,
    memory_lengths,
    rms_norm,
)

EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    """Sizes of the model; no attention anywhere."""

    vocab_size: int = 2048
    hidden_size: int = 320
    layers: int = 10
    expand: int = 2
    head_dim: int = 64
    state_size: int = 128
    groups: int = 1
    conv_width: int = 4
    max_positions: int = 1_048_576  # of the tokenizer's notice only; the model knows no positions
    shortest_memory: float = 4.0
    longest_memory: float = 60_000.0

    @property
    def inner_size(self) -> int:
        """H * P."""
        return self.expand * self.hidden_size

    @property
    def heads(self) -> int:
        """H."""
        return self.inner_size // self.head_dim

    def hugging_face(self) -> dict:
        """The config.json of the exported model."""
        return {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "expand": self.expand,
            "num_heads": self.heads,
            "head_dim": self.head_dim,
            "state_size": self.state_size,
            "n_groups": self.groups,
            "conv_kernel": self.conv_width,
            "use_conv_bias": True,
            "use_bias": False,
            "hidden_act": "silu",
            "layer_norm_epsilon": EPS,
            "residual_in_fp32": True,
            "chunk_size": 64,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 0,
        }


def chunk_scan(
    x: Tensor, dt: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, start: Tensor, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """State-space scan over a sequence, parallel within chunks.

    x [B, T, H, P]; dt (after softplus) and log_decay (dt * A) [B, T, H] FP32; b, c [B, T, G, N];
    start [B, H, P, N]. T must be a multiple of `chunk`. Returns outputs without the skip term,
    [B, T, H, P] FP32, and the final state.
    """
    near, added, c_groups, total = _chunk_terms(x, dt, log_decay, b, c, chunk)
    with torch.autocast(x.device.type, enabled=False):
        states, final = DecayScan.apply(total[:, :, -1].exp(), added, start)
        states = states.unflatten(2, (b.shape[2], -1)).flatten(3, 4)  # [C, B, G, (H / G) P, N]
        far = c_groups @ states.transpose(-1, -2)  # [C, B, G, L, (H / G) P]
    return _chunk_output(near, far, total), final


def _chunk_terms(
    x: Tensor, dt: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs without the start state [C, B, H, L, P], what each chunk adds to the state [C, B,
    H, P, N], c by group [C, B, G, L, N], and the cumulative log decay [C, B, L, H]."""

    def split(t: Tensor) -> Tensor:  # [B, T, ...] -> [C, B, L, ...]
        return t.float().unflatten(1, (-1, chunk)).transpose(0, 1)

    heads, groups = x.shape[2], b.shape[2]
    b, c = split(b).transpose(2, 3), split(c).transpose(2, 3)  # [C, B, G, L, N]
    scores = (c @ b.transpose(-1, -2))[:, :, :, None]
    total = split(log_decay).cumsum(2)
    by_head = total.transpose(2, 3)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    decay = torch.where(lower, by_head[..., :, None] - by_head[..., None, :], float("-inf")).exp()
    weights = (scores * decay.unflatten(2, (groups, -1))).flatten(2, 3)
    x = split(x) * split(dt)[..., None]  # [C, B, L, H, P]
    near = weights @ x.transpose(2, 3)
    with torch.autocast(x.device.type, enabled=False):
        at_end = x * (total[:, :, -1:] - total).exp()[..., None]
        grouped = (
            at_end.unflatten(3, (groups, -1)).flatten(4).transpose(2, 3)
        )  # [C, B, G, L, (H / G) P]
        added = grouped.transpose(-1, -2) @ b
    return near, added.flatten(2, 3).unflatten(2, (heads, -1)), c, total


def _chunk_output(near: Tensor, far: Tensor, total: Tensor) -> Tensor:
    """[B, T, H, P] outputs, FP32, of the part within chunks and the part from chunk starts."""
    far = far.transpose(2, 3).flatten(3).unflatten(3, (total.shape[-1], -1))  # [C, B, L, H, P]
    out = near.transpose(2, 3).float() + far * total.exp()[..., None]
    return out.transpose(0, 1).flatten(1, 2)


class Mixer(nn.Module):
    """The Mamba-2 mixer."""

    def __init__(self, config: Mamba2Config, layer: int):
        super().__init__()
        self.config = config
        conv_dim = config.inner_size + 2 * config.groups * config.state_size
        self.in_proj = nn.Linear(
            config.hidden_size, config.inner_size + conv_dim + config.heads, bias=False
        )
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, config.conv_width, groups=conv_dim)
        # Steps differ by head independently of memory: a permuted log-spaced set.
        order = (torch.arange(config.heads) * 7 + layer) % config.heads
        step = 0.01 * 10.0 ** ((order + 0.5) / config.heads)
        memory = memory_lengths(
            config.heads, layer, config.layers, config.shortest_memory, config.longest_memory
        )
        self.A_log = nn.Parameter(-(memory * step).log())
        self.dt_bias = nn.Parameter(inverse_softplus(step))
        self.D = nn.Parameter(torch.ones(config.heads))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(config.inner_size))
        self.out_proj = nn.Linear(config.inner_size, config.hidden_size, bias=False)
        init_linear(self.in_proj)
        init_linear(self.out_proj, 1.0 / (config.inner_size * config.layers) ** 0.5)
        nn.init.zeros_(self.conv1d.bias)

    def state_shape(self) -> tuple[int, ...]:
        """Shape of one row's recurrent state."""
        return self.config.heads, self.config.head_dim, self.config.state_size

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gate z, convolution input, dt after softplus (FP32)."""
        c = self.config
        z, xbc, dt = projected.split([c.inner_size, self.conv1d.weight.shape[0], c.heads], dim=-1)
        return z, xbc, F.softplus(dt.float() + self.dt_bias)

    def _split_conv(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        x, b, cc = xbc.split(
            [c.inner_size, c.groups * c.state_size, c.groups * c.state_size], dim=-1
        )
        groups = (c.groups, c.state_size)
        return (
            x.unflatten(-1, (c.heads, c.head_dim)),
            b.unflatten(-1, groups),
            cc.unflatten(-1, groups),
        )

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """z, dt, log decay, x, B, C of a sequence. x [B, T, hidden]."""
        z, xbc, dt = self._split(self.in_proj(x))
        return (
            z,
            dt,
            -self.A_log.float().exp() * dt,
            *self._split_conv(causal_conv_silu(xbc, self.conv1d.weight, self.conv1d.bias)),
        )

    def combine(self, out: Tensor, x: Tensor, z: Tensor) -> Tensor:
        """Skip term, gated norm (one norm per group), output projection. out and x [.., H, P]."""
        y = (out + self.D[:, None] * x.float()).flatten(-2) * F.silu(z.float())
        groups = (self.config.groups, -1)
        y = rms_norm(y.unflatten(-1, groups), None, EPS).flatten(-2) * self.norm.weight
        return self.out_proj(y)

    def step(self, x: Tensor, state: Tensor, history: Tensor) -> Tensor:
        """One token. x [B, hidden]; state [B, H, P, N] and history [B, W, D] are updated in
        place."""
        z, xbc, dt = self._split(self.in_proj(x))
        xs, b, c = self._split_conv(conv_step(xbc, history, self.conv1d.weight, self.conv1d.bias))
        repeat = self.config.heads // self.config.groups
        b, c = (
            b.float().repeat_interleave(repeat, dim=1),
            c.float().repeat_interleave(repeat, dim=1),
        )
        decay = (-self.A_log.float().exp() * dt).exp()
        state.copy_(
            state * decay[..., None, None]
            + (xs.float() * dt[..., None])[..., None] * b[..., None, :]
        )
        return self.combine(torch.einsum("bhpn,bhn->bhp", state, c), xs, z)


class Layer(nn.Module):
    """Norm, mixer, residual."""

    def __init__(self, config: Mamba2Config, layer: int):
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=EPS)
        self.mixer = Mixer(config, layer)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, hidden] and the state at its start -> the same at its end."""
        z, dt, log_decay, xs, b, c = self.mixer.project(self.norm(x))
        out, final = chunk_scan(xs, dt, log_decay, b, c, state)
        return x + self.mixer.combine(out, xs, z), final


class _Backbone(nn.Module):
    def __init__(self, config: Mamba2Config):
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm_f = nn.RMSNorm(config.hidden_size, eps=EPS)
        nn.init.normal_(self.embeddings.weight, std=0.02)


class Mamba2LM(nn.Module):
    """The Mamba-2 language model. Parameter names are those of Mamba2ForCausalLM with tied
    embeddings."""

    def __init__(self, config: Mamba2Config):
        super().__init__()
        self.config = config
        self.backbone = _Backbone(config)

    def new_states(self, batch: int, device: torch.device | str) -> list[Tensor]:
        """Zero recurrent states, one per layer."""
        return [
            torch.zeros(batch, *layer.mixer.state_shape(), device=device)
            for layer in self.backbone.layers
        ]

    def _head(self, x: Tensor) -> Tensor:
        return F.linear(self.backbone.norm_f(x), self.backbone.embeddings.weight)

    def forward(self, ids: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """ids [B, T] (T a multiple of 64) -> logits [B, T, vocabulary], states at the end."""
        x = self.backbone.embeddings(ids)
        finals = []
        for layer, state in zip(self.backbone.layers, states, strict=True):
            x, final = layer(x, state)
            finals.append(final)
        return self._head(x), finals

    def new_cache(
        self, batch: int, capacity: int, device: torch.device | str
    ) -> list[tuple[Tensor, Tensor]]:
        """Buffers for `step`: (state, convolution history) per layer. `capacity` does not matter
        here."""
        return [
            (
                state,
                torch.zeros(
                    batch, self.config.conv_width, layer.mixer.conv1d.weight.shape[0], device=device
                ),
            )
            for layer, state in zip(
                self.backbone.layers, self.new_states(batch, device), strict=True
            )
        ]

    def step(self, ids: Tensor, position: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One token of every row. ids [B] -> logits [B, vocabulary]; `cache` is updated in
        place."""
        x = self.backbone.embeddings(ids)
        for layer, (state, history) in zip(self.backbone.layers, cache, strict=True):
            x = x + layer.mixer.step(layer.norm(x), state, history)
        return self._head(x)

    def mean_log_decay(self, ids: Tensor) -> dict[int, Tensor]:
        """Layer -> [H] mean log decay over the tokens of ids [B, T]."""
        x = self.backbone.embeddings(ids)
        means = {}
        for i, (layer, state) in enumerate(
            zip(self.backbone.layers, self.new_states(len(ids), ids.device), strict=True)
        ):
            means[i] = layer.mixer.project(layer.norm(x))[2].mean((0, 1))
            x, _ = layer(x, state)
        return means
