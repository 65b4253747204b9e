"""Trainable Gated DeltaNet / attention hybrid whose parameters carry the names of Hugging Face's
Qwen3.5 text model.

Owns a chunk-parallel form for training and a one-token form for fast evaluation; both are tested
equal to transformers' own module. Shape legend: B batch, T time, HK key heads, HV value heads, K
and V head sizes, C chunks, L chunk length. Source of the chunk form: Yang et al., "Gated Delta
Networks" (arXiv:2412.06464), section 3.3, rewritten so that the only sequential part is S' = M S
+ N over chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.blocks import (
    AffineScan,
    UnitLowerInverse,
    causal_conv_silu,
    conv_step,
    init_linear,
    inverse_softplus,
    memory_lengths,
    rms_norm,
)

EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """Sizes of the hybrid; every fourth layer is full attention."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 832
    layers: int = 8
    attention_heads: int = 4
    kv_heads: int = 1
    attention_head_dim: int = 64
    num_k_heads: int = 2
    num_v_heads: int = 4
    head_k_dim: int = 64
    head_v_dim: int = 64
    conv_width: int = 4
    # Small, so that every rotary angle comes round within the trained length: positions far
    # beyond it bring no new angle.
    rope_theta: float = 1000.0
    rotary_fraction: float = 0.25
    max_positions: int = 1_048_576
    shortest_memory: float = 4.0
    longest_memory: float = 60_000.0

    def hugging_face(self) -> dict:
        """The config.json of the exported model."""
        third = int(self.attention_head_dim * self.rotary_fraction) // 2 // 3
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "layer_types": [
                "full_attention" if self.is_attention(i) else "linear_attention"
                for i in range(self.layers)
            ],
            "num_attention_heads": self.attention_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.attention_head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
            "max_position_embeddings": self.max_positions,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary_fraction,
                "mrope_section": [third + 1, third + 1, third],
                "mrope_interleaved": True,
            },
            "partial_rotary_factor": self.rotary_fraction,
            "linear_conv_kernel_dim": self.conv_width,
            "linear_key_head_dim": self.head_k_dim,
            "linear_value_head_dim": self.head_v_dim,
            "linear_num_key_heads": self.num_k_heads,
            "linear_num_value_heads": self.num_v_heads,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 0,
        }

    def is_attention(self, layer: int) -> bool:
        """Whether this layer is full attention."""
        return layer % 4 == 3


def chunk_gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, start: Tensor, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """Gated delta rule over a sequence, parallel within chunks.

    q, k [B, T, HK, K] normalised, q scaled; v [B, T, HV, V]; g (log decay) and beta [B, T, HV],
    FP32; start [B, HV, K, V]. T must be a multiple of `chunk`. Returns outputs [B, T, HV, V]
    FP32 and the final state.
    """
    with torch.autocast(q.device.type, enabled=False):
        m, n, read, near = _chunk_terms(q, k, v, g, beta, chunk)
        states, final = AffineScan.apply(m.flatten(1, 2), n.flatten(1, 2), start.flatten(0, 1))
        out = near + read @ states.unflatten(1, start.shape[:2])  # [C, B, HV, L, V]
    return out.permute(1, 0, 3, 2, 4).flatten(1, 2), final.unflatten(0, start.shape[:2])


def _chunk_terms(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the scan over chunks needs: transition M, input N, how the start state is read, and
    the outputs without it."""

    def split(x: Tensor, repeat: int = 1) -> Tensor:  # [B, T, H, ...] -> [C, B, H * repeat, L, ...]
        x = x.float().unflatten(1, (-1, chunk)).movedim((1, 3), (0, 2))
        return x if repeat == 1 else x.repeat_interleave(repeat, dim=2)

    repeat = v.shape[2] // k.shape[2]
    keys = split(k)
    gram = keys @ keys.transpose(-1, -2)
    scores = split(q) @ keys.transpose(-1, -2)
    if repeat > 1:
        gram, scores = (
            gram.repeat_interleave(repeat, dim=2),
            scores.repeat_interleave(repeat, dim=2),
        )
    q, k, v, g, beta = split(q, repeat), split(k, repeat), split(v), split(g), split(beta)
    total = g.cumsum(-1)  # [C, B, HV, L]
    difference = total[..., :, None] - total[..., None, :]
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = torch.where(lower, difference, float("-inf")).exp()
    strictly = lower.tril(-1)
    inverse = UnitLowerInverse.apply(torch.where(strictly, -beta[..., None] * gram * decay, 0.0))
    u = inverse @ (beta[..., None] * v)
    w = inverse @ ((beta * total.exp())[..., None] * k)
    near_weights = scores * decay
    last = total[..., -1:]
    k_out = (k * (last - total).exp()[..., None]).transpose(-1, -2)  # [C, B, HV, K, L]
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    m = last.exp()[..., None] * identity - k_out @ w
    read = q * total.exp()[..., None] - near_weights @ w
    return m, k_out @ u, read, near_weights @ u


class GatedDeltaNet(nn.Module):
    """The recurrent mixer."""

    def __init__(self, config: GatedDeltaConfig, layer: int):
        super().__init__()
        self.config = config
        key_dim, value_dim = (
            config.num_k_heads * config.head_k_dim,
            config.num_v_heads * config.head_v_dim,
        )
        self.in_proj_qkv = nn.Linear(config.hidden_size, 2 * key_dim + value_dim, bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, value_dim, bias=False)
        self.in_proj_b = nn.Linear(config.hidden_size, config.num_v_heads, bias=False)
        self.in_proj_a = nn.Linear(config.hidden_size, config.num_v_heads, bias=False)
        channels = 2 * key_dim + value_dim
        self.conv1d = nn.Conv1d(channels, channels, config.conv_width, groups=channels, bias=False)
        step = torch.full((config.num_v_heads,), 0.1)
        memory = memory_lengths(
            config.num_v_heads, layer, config.layers, config.shortest_memory, config.longest_memory
        )
        self.A_log = nn.Parameter(-(memory * step).log())
        self.dt_bias = nn.Parameter(inverse_softplus(step))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(config.head_v_dim))
        self.out_proj = nn.Linear(value_dim, config.hidden_size, bias=False)
        for linear in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b):
            init_linear(linear)
        init_linear(self.in_proj_a, 0.3 / config.hidden_size**0.5)
        init_linear(self.out_proj, 1.0 / (value_dim * 2 * config.layers) ** 0.5)

    def state_shape(self) -> tuple[int, ...]:
        """Shape of one row's recurrent state."""
        return self.config.num_v_heads, self.config.head_k_dim, self.config.head_v_dim

    def log_decay(self, x: Tensor) -> Tensor:
        """[.., HV] log decay of each token, FP32. x [.., hidden]."""
        return -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        key_dim = c.num_k_heads * c.head_k_dim
        q, k, v = qkv.split([key_dim, key_dim, c.num_v_heads * c.head_v_dim], dim=-1)
        q = q.unflatten(-1, (c.num_k_heads, c.head_k_dim)).float()
        k = k.unflatten(-1, (c.num_k_heads, c.head_k_dim)).float()
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + EPS) * c.head_k_dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + EPS)
        return q, k, v.unflatten(-1, (c.num_v_heads, c.head_v_dim)).float()

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, g, beta and output gate z of a sequence. x [B, T, hidden]."""
        q, k, v = self._split(causal_conv_silu(self.in_proj_qkv(x), self.conv1d.weight, None))
        return q, k, v, self.log_decay(x), self.in_proj_b(x).float().sigmoid(), self.in_proj_z(x)

    def combine(self, out: Tensor, z: Tensor) -> Tensor:
        """Gated norm and output projection. out [.., HV, V]."""
        gated = rms_norm(out, self.norm.weight, EPS) * F.silu(
            z.unflatten(-1, out.shape[-2:]).float()
        )
        return self.out_proj(gated.flatten(-2))

    def step(self, x: Tensor, state: Tensor, history: Tensor) -> Tensor:
        """One token. x [B, hidden]; state [B, HV, K, V] and history [B, W, D] are updated in
        place."""
        q, k, v = self._split(conv_step(self.in_proj_qkv(x), history, self.conv1d.weight, None))
        repeat = self.config.num_v_heads // self.config.num_k_heads
        q, k = q.repeat_interleave(repeat, dim=1), k.repeat_interleave(repeat, dim=1)
        decayed = state * self.log_decay(x).exp()[..., None, None]
        beta = self.in_proj_b(x).float().sigmoid()
        correction = beta[..., None] * (v - torch.einsum("bhkv,bhk->bhv", decayed, k))
        state.copy_(decayed + k[..., None] * correction[..., None, :])
        return self.combine(torch.einsum("bhkv,bhk->bhv", state, q), self.in_proj_z(x))
