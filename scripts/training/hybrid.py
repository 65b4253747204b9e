"""The hybrid language model around the recurrent mixer: attention, MLP, layers, cache.

Parameter names are those of Hugging Face's Qwen3_5ForCausalLM. The recurrence itself is
`training.gated_delta`'s. Shape legend: B batch, T time, H heads, HKV key/value heads, HV, K, V as
there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.blocks import init_linear, rms_norm
from training.gated_delta import EPS, GatedDeltaConfig, GatedDeltaNet, chunk_gated_delta


class Attention(nn.Module):
    """Gated grouped-query attention with partial rotary positions."""

    def __init__(self, config: GatedDeltaConfig):
        super().__init__()
        self.config = config
        heads, size = config.attention_heads, config.attention_head_dim
        self.q_proj = nn.Linear(config.hidden_size, 2 * heads * size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = nn.Module(), nn.Module()
        self.q_norm.weight = nn.Parameter(torch.zeros(size))
        self.k_norm.weight = nn.Parameter(torch.zeros(size))
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            init_linear(linear)
        init_linear(self.o_proj, 1.0 / (heads * size * 2 * config.layers) ** 0.5)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of the first dimensions. x [B, T, H, size], positions [T]."""
        size = int(self.config.attention_head_dim * self.config.rotary_fraction)
        exponent = torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size
        angle = positions.float()[:, None] * self.config.rope_theta**-exponent  # [T, size / 2]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b, rest = x.split([size // 2, size // 2, x.shape[-1] - size], dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [B, H, T, size], k and v [B, HKV, T, size] and gate [B, T, H * size]."""
        c = self.config
        q, gate = (
            self.q_proj(x)
            .unflatten(-1, (c.attention_heads, 2 * c.attention_head_dim))
            .chunk(2, dim=-1)
        )
        k = self.k_proj(x).unflatten(-1, (c.kv_heads, c.attention_head_dim))
        v = self.v_proj(x).unflatten(-1, (c.kv_heads, c.attention_head_dim))
        q = self._rotate(rms_norm(q, 1.0 + self.q_norm.weight, EPS), positions)
        k = self._rotate(rms_norm(k, 1.0 + self.k_norm.weight, EPS), positions)
        q, k = q.transpose(1, 2).to(v.dtype), k.transpose(1, 2).to(v.dtype)
        return q, k, v.transpose(1, 2), gate.flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, hidden]: causal attention from position 0."""
        q, k, v, gate = self._project(x, torch.arange(x.shape[1], device=x.device))
        repeat = self.config.attention_heads // self.config.kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2) * gate.sigmoid())

    def step(self, x: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One token. position [1]; keys, values [B, HKV, capacity, size] are written at
        `position`."""
        q, k, v, gate = self._project(x[:, None], position)
        keys.index_copy_(2, position, k.to(keys.dtype))
        values.index_copy_(2, position, v.to(values.dtype))
        repeat = self.config.attention_heads // self.config.kv_heads
        visible = torch.arange(keys.shape[2], device=x.device) <= position
        out = F.scaled_dot_product_attention(
            q.to(keys.dtype),
            keys.repeat_interleave(repeat, dim=1),
            values.repeat_interleave(repeat, dim=1),
            attn_mask=visible[None, None, None],
        )
        return self.o_proj(out[:, :, 0].flatten(-2) * gate[:, 0].sigmoid())


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: GatedDeltaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        init_linear(self.gate_proj)
        init_linear(self.up_proj)
        init_linear(self.down_proj, 1.0 / (config.intermediate_size * 2 * config.layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ZeroCentredNorm(nn.Module):
    """RMS norm whose weight is stored minus one."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """x [.., size]."""
        return rms_norm(x, 1.0 + self.weight, EPS)


class Layer(nn.Module):
    """Mixer and MLP, each after a norm, each added to the residual stream."""

    def __init__(self, config: GatedDeltaConfig, layer: int):
        super().__init__()
        self.input_layernorm = ZeroCentredNorm(config.hidden_size)
        self.post_attention_layernorm = ZeroCentredNorm(config.hidden_size)
        if config.is_attention(layer):
            self.self_attn = Attention(config)
        else:
            self.linear_attn = GatedDeltaNet(config, layer)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [B, T, hidden] and the state at its start (None for attention) -> the same at its
        end."""
        if state is None:
            return self._finish(x + self.self_attn(self.input_layernorm(x))), None
        q, k, v, g, beta, z = self._begin(x)
        out, final = chunk_gated_delta(q, k, v, g, beta, state)
        return self._finish(x + self.linear_attn.combine(out, z)), final

    def _begin(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear_attn.project(self.input_layernorm(x))

    def _finish(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))


class _Decoder(nn.Module):
    def __init__(self, config: GatedDeltaConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = ZeroCentredNorm(config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)


class GatedDeltaLM(nn.Module):
    """The hybrid language model. Parameter names are those of Qwen3_5ForCausalLM with tied
    embeddings."""

    def __init__(self, config: GatedDeltaConfig):
        super().__init__()
        self.config = config
        self.model = _Decoder(config)

    def new_states(self, batch: int, device: torch.device | str) -> list[Tensor | None]:
        """Zero recurrent states, one per layer (None for attention)."""
        return [
            torch.zeros(batch, *layer.linear_attn.state_shape(), device=device)
            if hasattr(layer, "linear_attn")
            else None
            for layer in self.model.layers
        ]

    def forward(
        self, ids: Tensor, states: list[Tensor | None]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """ids [B, T] (T a multiple of 64) -> logits [B, T, vocabulary], states at the end."""
        x = self.model.embed_tokens(ids)
        finals = []
        for layer, state in zip(self.model.layers, states, strict=True):
            x, final = layer(x, state)
            finals.append(final)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight), finals

    def new_cache(
        self, batch: int, capacity: int, device: torch.device | str
    ) -> list[tuple[Tensor, Tensor]]:
        """Buffers for `step`: (state, convolution history) or (keys, values) per layer."""
        c = self.config
        cache = []
        for layer, state in zip(self.model.layers, self.new_states(batch, device), strict=True):
            if state is None:
                shape = (batch, c.kv_heads, capacity, c.attention_head_dim)
                cache.append((torch.zeros(shape, device=device), torch.zeros(shape, device=device)))
            else:
                channels = layer.linear_attn.conv1d.weight.shape[0]
                cache.append((state, torch.zeros(batch, c.conv_width, channels, device=device)))
        return cache

    def step(self, ids: Tensor, position: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One token of every row. ids [B], position [1] -> logits [B, vocabulary]; `cache` is
        updated in place."""
        x = self.model.embed_tokens(ids)
        for layer, (first, second) in zip(self.model.layers, cache, strict=True):
            normed = layer.input_layernorm(x)
            if hasattr(layer, "linear_attn"):
                x = x + layer.linear_attn.step(normed, first, second)
            else:
                x = x + layer.self_attn.step(normed, position, first, second)
            x = layer._finish(x)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def mean_log_decay(self, ids: Tensor) -> dict[int, Tensor]:
        """Layer -> [HV] mean log decay over the tokens of ids [B, T]."""
        x = self.model.embed_tokens(ids)
        means = {}
        for i, (layer, state) in enumerate(
            zip(self.model.layers, self.new_states(len(ids), ids.device), strict=True)
        ):
            if state is not None:
                means[i] = layer.linear_attn.log_decay(layer.input_layernorm(x)).mean((0, 1))
            x, _ = layer(x, state)
        return means
