"""The Hugging Face architectures whose recurrence we run: their recurrent layer and its family.

Owns the table from `config.model_type` to the facts an adapter needs. Facts only: no torch, no
transformers import, so that `replayssm models` answers at once. How a family's functions are called
is in `families/`; how they are replaced is in `patching.py`.

All facts were read from transformers 5.17 and 5.24 and are tested on tiny random models of both.
"""

from dataclasses import dataclass, replace

from replayssm.models.errors import UnsupportedModelError

GATED_DELTA = "gated_delta"
KIMI_DELTA = "kimi_delta"
MAMBA2 = "mamba2"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One row of the table.

    name: the name used in messages and in `replayssm models`.
    model_types: every `config.model_type` that loads as this architecture (the text model, and the
        multimodal wrapper where transformers maps it to the text model).
    family: "gated_delta", "kimi_delta" or "mamba2": which functions are replaced and how they are
        called.
    module: the modeling module, relative to `transformers.models`.
    mixer: class name of the recurrent layer inside that module.
    one_token_fault: submodule of the mixer that mixes up the rows of a batch when it sees a single
        token (in some version of transformers), and is therefore never shown one.
    note: what differs from the other members of the family.
    """

    name: str
    model_types: tuple[str, ...]
    family: str
    module: str
    mixer: str
    note: str = ""
    one_token_fault: str | None = None


def _row(name: str, family: str, mixer: str, note: str = "", *extra_types: str) -> Architecture:
    return Architecture(
        name=name,
        model_types=(name, *extra_types),
        family=family,
        module=f"{name}.modeling_{name}",
        mixer=mixer,
        note=note,
    )


_DT_MIN = "step size clamped to [time_step_min, inf) at every token (transformers: only in prefill)"

ARCHITECTURES: tuple[Architecture, ...] = (
    _row(
        "qwen3_5",
        GATED_DELTA,
        "Qwen3_5GatedDeltaNet",
        "text model; a multimodal checkpoint loads its text model",
        "qwen3_5_text",
    ),
    _row(
        "qwen3_5_moe",
        GATED_DELTA,
        "Qwen3_5MoeGatedDeltaNet",
        "text model; a multimodal checkpoint loads its text model",
        "qwen3_5_moe_text",
    ),
    _row("qwen3_next", GATED_DELTA, "Qwen3NextGatedDeltaNet"),
    _row(
        "olmo_hybrid",
        GATED_DELTA,
        "OlmoHybridGatedDeltaNet",
        "beta in (0, 2): negative eigenvalues",
    ),
    _row(
        "kimi_linear",
        KIMI_DELTA,
        "KimiLinearDeltaAttention",
        "the class in transformers, not the one in a model's repository",
    ),
    _row("mamba2", MAMBA2, "Mamba2Mixer", "step size clamped to time_step_limit at every token"),
    _row("nemotron_h", MAMBA2, "NemotronHMamba2Mixer", _DT_MIN),
    _row("bamba", MAMBA2, "BambaMixer", "step size clamped to time_step_limit at every token"),
    replace(
        _row("falcon_h1", MAMBA2, "FalconH1Mixer", "one-token call gates inside without its norm"),
        one_token_fault="norm",  # 5.17: the product with the gate broadcasts rows against rows
    ),
    _row("granitemoehybrid", MAMBA2, "GraniteMoeHybridMambaLayer"),
    _row("zamba2", MAMBA2, "Zamba2MambaMixer", _DT_MIN),
)

# Recurrent models that transformers can load and we cannot run, with the reason a person gets.
UNSUPPORTED_RECURRENT: dict[str, str] = {
    "mamba": "Mamba-1 (a state per channel)",
    "falcon_mamba": "Mamba-1 (a state per channel)",
    "jamba": "Mamba-1 (a state per channel)",
    "zamba": "Mamba-1 (a state per channel)",
    "bailing_hybrid": "Kimi Delta Attention, in a model that transformers 5.17 does not have",
    "glm5_next": "Kimi Delta Attention, beside sparse attention that caches an index",
    "glm5_next_text": "Kimi Delta Attention, beside sparse attention that caches an index",
    "minimax": "lightning attention",
    "lfm2": "short convolutions without a state matrix",
    "lfm2_moe": "short convolutions without a state matrix",
    "recurrent_gemma": "RG-LRU",
    "rwkv": "RWKV",
    "xlstm": "xLSTM",
}


def find_architecture(model_type: str, *, where: str) -> Architecture:
    """The architecture of `config.model_type`; `where` names the model in the error."""
    for architecture in ARCHITECTURES:
        if model_type in architecture.model_types:
            return architecture
    supported = ", ".join(a.name for a in ARCHITECTURES)
    family = UNSUPPORTED_RECURRENT.get(model_type)
    if family is not None:
        raise UnsupportedModelError(
            f"{where} (model type {model_type!r}) has recurrent layers of an unsupported family: "
            f"{family}; supported model types: {supported}"
        )
    raise UnsupportedModelError(
        f"{where} (model type {model_type!r}) has no recurrent layer that replayssm can run; "
        f"supported model types: {supported}"
    )
