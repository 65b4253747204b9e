"""Kimi Delta Attention layers: kimi_linear.

Owns where this family differs from `gated_delta.py`: names, sizes, and a gate with an entry per key
channel. Must not know sessions, policies or caches.

Shapes: B rows, T tokens, H heads (of keys and of values), D dimension (of keys and of values).

Facts of both transformers versions, and what we make of them:

* `recurrent_kimi_delta_attention` and `chunk_kimi_delta_attention` take the arguments of the gated
  delta rule in the same order and mean the same operator; q and k arrive raw, as there.
* The gate [B, T, H, D] is the log decay in FP32, -exp(A_log) softplus(f + dt_bias), computed by the
  layer's `forget_gate` module; nothing bounds how strong it gets, and nothing here needs a bound.
* beta is the sigmoid in the dtype of the model, as in the gated delta rule.
* The published checkpoint names its weights as the code in its own repository does (a convolution
  each for q, k and v, the forget gate's weights in the layer itself, one tensor per expert);
  transformers renames and stacks them when it loads its own class. That class is the one supported:
  the repository's code is not run for the model, only, if allowed, for its tokenizer.
* The attention layers cache compressed latents, which they expand after the cache has been updated:
  `../lanes.py` expands a lane's own.
"""

from torch import Tensor, nn

from replayssm.models.families.gated_delta import GatedDelta
from replayssm.ops.kimi_delta.reference import KimiDeltaInputs


class KimiDelta(GatedDelta):
    """The Kimi Delta Attention family (see module docstring)."""

    recurrence = "kimi_delta"
    functions = ("recurrent_kimi_delta_attention", "chunk_kimi_delta_attention")
    inputs = KimiDeltaInputs

    def shapes(self, mixer: nn.Module) -> dict[str, int]:
        return {
            "num_k_heads": mixer.num_heads,
            "num_v_heads": mixer.num_heads,
            "head_v_dim": mixer.head_dim,
            "head_k_dim": mixer.head_dim,
        }

    def log_decay(self, inputs: KimiDeltaInputs) -> Tensor:
        """Mean over a head's key channels, each of which has a decay of its own."""
        return inputs.g.mean(-1)
