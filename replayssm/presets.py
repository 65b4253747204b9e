"""Where public serving engines round today, as named policies.

Owns the names, what each stands for, where that was read, and what a policy cannot express about
it. Data only: knows neither formats nor policies (`policy` gives the spellings a meaning) and
imports nothing of the package. A name is accepted wherever a policy is, with `@L` for another ring
length: `vllm-gdn@32`.

Facts were read in the engines' public sources in 2026; engines change. Every preset is a policy
that is *nearest* to the engine: what differs is in `differs` and is shown with it, never silently.
What holds for all of them:

* Ring records are stored in BF16 (the activations' type there) whatever dtype a study runs in.
* `operand=bf16` rounds all operands of replay products; engines round the decayed records, and some
  of them read the state more precisely.
* Here the output of the L-th token is read like every other's, then the ring is folded; engines
  read the output of that token from the state they are about to write.
* Prefill hands over one rounding of an exact state.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EnginePreset:
    """One engine's rounding.

    policy: its nearest policy in the grammar of `policy`; engine: what it is, in words; recurrence:
    the layers it serves, "mamba2" or "gated_delta"; source: repository and file it was read in;
    rounds: what the engine rounds and this policy does, too; differs: what this policy does
    otherwise.
    """

    policy: str
    engine: str
    recurrence: str
    source: str
    rounds: tuple[str, ...]
    differs: tuple[str, ...] = ()


_DECAYED = "decayed records and their partners to BF16 before the tensor-core product"
_RING = "ring of x and B in BF16, step sizes in FP32"
_KEYS = "ring of normalised keys in BF16, gates in FP32"
_U_FP32 = "the corrected value u is kept in FP32 here, in BF16 there"
_COARSE_READ = "outputs read the state through BF16 operands here, in FP32 or 3 x TF32 there"
_OVERFLOW = (
    "beyond 65,504 the engine stores Inf; here the value saturates and is counted: a count above 0 "
    "means the engine would have broken down"
)

ENGINE_PRESETS: dict[str, EnginePreset] = {
    "flashinfer-mamba2": EnginePreset(
        policy="fp16-sr:operand=bf16:ring=bf16",
        engine="FlashInfer checkpointing_ssu, FP16 state with a seed (stochastic rounding)",
        recurrence="mamba2",
        source="flashinfer-ai/flashinfer flashinfer/mamba/checkpointing_ssu.py",
        rounds=("state to FP16, stochastically, once a flush", _RING, _DECAYED),
        differs=(
            "13 random bits there, 16 here: equal odds for normal numbers; the software path there "
            "flushes subnormals to 0",
            "random bits depend on the cache slot there, on the sequence here",
            _OVERFLOW,
        ),
    ),
    "flashinfer-mamba2-fp16": EnginePreset(
        policy="fp16:operand=bf16:ring=bf16",
        engine="FlashInfer checkpointing_ssu, FP16 state without a seed",
        recurrence="mamba2",
        source="flashinfer-ai/flashinfer flashinfer/mamba/checkpointing_ssu.py",
        rounds=("state to FP16, to nearest, once a flush", _RING, _DECAYED),
        differs=(_OVERFLOW,),
    ),
    "flashinfer-mamba2-fp8": EnginePreset(
        policy="fp8-sr:operand=bf16:ring=bf16",
        engine="FlashInfer checkpointing_ssu, FP8 state with a seed",
        recurrence="mamba2",
        source="flashinfer-ai/flashinfer flashinfer/mamba/checkpointing_ssu.py",
        rounds=(
            "state to E4M3 with an FP32 scale per row, stochastically, once a flush",
            _RING,
            _DECAYED,
        ),
        differs=("two neighbours share their 16 random bits (one reversed) there",),
    ),
    "flashinfer-mamba2-int8": EnginePreset(
        policy="int8-sr:operand=bf16:ring=bf16",
        engine="FlashInfer checkpointing_ssu, INT8 state with a seed",
        recurrence="mamba2",
        source="flashinfer-ai/flashinfer flashinfer/mamba/checkpointing_ssu.py",
        rounds=(
            "state to INT8 with an FP32 scale per row, stochastically, once a flush",
            _RING,
            _DECAYED,
        ),
        differs=("two neighbours share their random bits there",),
    ),
    "flashinfer-gdn": EnginePreset(
        policy="bf16:operand=bf16:ring=bf16",
        engine="FlashInfer Gated DeltaNet verify with a u-cache, default BF16 state",
        recurrence="gated_delta",
        source="flashinfer-ai/flashinfer flashinfer/gdn_kernels/gdn_decode_bf16_wy_ucache_flush.py",
        rounds=("state to BF16, to nearest, once a flush", _KEYS, _DECAYED),
        differs=(_U_FP32, "A_log and dt_bias are rounded to BF16 there, FP32 here"),
    ),
    "vllm-mamba2": EnginePreset(
        policy="fp32:operand=bf16:ring=bf16",
        engine="vLLM ReplaySSM, standard decode of Mamba-2",
        recurrence="mamba2",
        source="vllm-project/vllm vllm/model_executor/layers/mamba/ops/"
        "selective_state_update_replayssm_output_only.py",
        rounds=("state in FP32", _RING, "decayed B to BF16 before the product of a flush"),
        differs=(_COARSE_READ,),
    ),
    "vllm-mamba2-spec": EnginePreset(
        policy="fp32:operand=tf32:ring=bf16",
        engine="vLLM ReplaySSM, speculative decode of Mamba-2",
        recurrence="mamba2",
        source="Johnny-Liou/ReplaySSM vllm/model_executor/layers/mamba/ops/"
        "selective_state_update_replayssm_spec.py",
        rounds=("state in FP32, read through TF32 operands", _RING),
        differs=("the ring holds raw step sizes there, step sizes after softplus here",),
    ),
    "vllm-gdn": EnginePreset(
        policy="fp32:operand=bf16:ring=bf16",
        engine="vLLM ReplaySSM, standard decode of Gated DeltaNet",
        recurrence="gated_delta",
        source="Johnny-Liou/ReplaySSM vllm/model_executor/layers/fla/ops/"
        "fused_recurrent_replayssm.py",
        rounds=("state in FP32", _KEYS, _DECAYED),
        differs=(_U_FP32, _COARSE_READ, "beta passes through BF16 there, FP32 here"),
    ),
    "vllm-gdn-spec": EnginePreset(
        policy="bf16:operand=bf16:ring=bf16",
        engine="vLLM ReplaySSM, speculative decode of Gated DeltaNet (FP32 declared, BF16 in fact)",
        recurrence="gated_delta",
        source="Johnny-Liou/ReplaySSM vllm/model_executor/layers/fla/ops/"
        "gdn_replayssm_spec_decode.py",
        rounds=(
            "state to BF16 at every flush, although stored in an FP32 tensor",
            _KEYS,
            _DECAYED,
        ),
        differs=(_U_FP32,),
    ),
    "sglang-gdn": EnginePreset(
        policy="fp32:operand=bf16:ring=bf16",
        engine="SGLang --enable-linear-replayssm, standard decode of Gated DeltaNet",
        recurrence="gated_delta",
        source="sgl-project/sglang python/sglang/srt/layers/attention/fla/"
        "fused_recurrent_gdn_replayssm.py",
        rounds=("state in FP32", _KEYS, _DECAYED),
        differs=(
            _U_FP32,
            _COARSE_READ,
            "beta passes through BF16 there, FP32 here",
            "prefix-cache boundaries force extra flushes there",
        ),
    ),
    "sglang-gdn-exact": EnginePreset(
        policy="fp32:ring=bf16",
        engine="SGLang --enable-linear-replayssm-spec: folds raw inputs exactly at every commit",
        recurrence="gated_delta",
        source="sgl-project/sglang python/sglang/srt/layers/attention/fla/"
        "gdn_replayssm_spec_decode.py",
        rounds=("state in FP32", "ring of raw keys and values in BF16, gates and beta in FP32"),
        differs=(
            "keys are rounded before normalisation there, after it here",
            "one copy needs no values in the ring here: u is folded as it was computed, in FP32",
        ),
    ),
    "tensorrt-llm-gdn": EnginePreset(
        policy="fp32:ring=bf16",
        engine="TensorRT-LLM cached replay of Gated DeltaNet: FP32 state as BF16 high + low parts",
        recurrence="gated_delta",
        source="NVIDIA/TensorRT-LLM tensorrt_llm/_torch/modules/fla/cached_replay.py",
        rounds=("state in FP32", _KEYS),
        differs=(
            "products read the state and fold u as a sum of two BF16 numbers there (16 bits of "
            "significand), in FP32 here",
            "u and the weights of history are rounded to BF16 there, so this policy understates it",
        ),
    ),
    "tensorrt-llm-mamba2": EnginePreset(
        policy="fp16-sr:operand=bf16:ring=bf16",
        engine="TensorRT-LLM, Mamba-2 with mamba_ssm_stochastic_rounding (FP16, Philox 5)",
        recurrence="mamba2",
        source="flashinfer-ai/flashinfer flashinfer/mamba/checkpointing_ssu.py",
        rounds=("state to FP16, stochastically, once a flush", _RING, _DECAYED),
        differs=(
            "5 Philox rounds and 13 bits there, 10 and 16 here: the same odds, other draws",
            "prefill hands over a state rounded to nearest there, stochastically here",
            _OVERFLOW,
        ),
    ),
}

# What engines offer and no policy comes near: name -> reason. Asking for one says why.
REFUSED_PRESETS: dict[str, str] = {
    "flashinfer-mamba2-int16": "INT16 with a scale per row is not a format here",
    "vllm-int8-error-feedback": "a stored residual (error feedback) is not a storage here",
    "sglang-gdn-int8-prefix": "an INT8 prefix cache is rounded when a prefix is stored, not when "
    "the recurrence writes its state, which is what a policy describes",
}


def spelled(text: str) -> str:
    """`text` with an engine's name replaced by its policy; text of the grammar is left as it is.

    Raises:
        ValueError: the engine's rounding cannot be expressed, with the reason.
    """
    head, colon, options = text.partition(":")
    name, at, length = head.partition("@")
    if name in REFUSED_PRESETS:
        raise ValueError(f"no policy does what {name} does: {REFUSED_PRESETS[name]}")
    if name not in ENGINE_PRESETS:
        return text
    storages, _, own = ENGINE_PRESETS[name].policy.partition(":")
    return f"{storages}{at}{length}" + (f":{own}" if own else "") + colon + options


def presets_of(policy: str) -> dict[str, EnginePreset]:
    """Engines that a policy in the grammar stands for, whatever its ring length."""
    head, colon, options = policy.partition(":")
    bare = head.partition("@")[0] + colon + options
    return {name: preset for name, preset in ENGINE_PRESETS.items() if preset.policy == bare}
