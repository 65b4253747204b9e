"""A model as a study sees it: tokens, digests, costs of a policy, and a lockstep of a study's arms.

Owns the translation between `spec` and `models`/`engine`, and reading back what is in effect. Knows
no files of a study and no statistics.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from replayssm import models
from replayssm.engine.free_run import free_run
from replayssm.engine.lockstep import Arm as EngineArm
from replayssm.engine.lockstep import Lockstep
from replayssm.engine.sampling import Sampler
from replayssm.models.families import Family
from replayssm.models.loading import LoadedModel
from replayssm.models.session import describe_backends
from replayssm.policy import StateGeometry
from replayssm.study.spec import Arm, StudySpec
from replayssm.study.store import file_digest

_ENGINE_KINDS = {
    None: "policy",
    "second_fp32": "control",
    "other_ring_len": "floor",
    "fault": "fault",
    "refresh": "control",
}


class ModelSubject:
    """A loaded model on a device. Raises ValueError (one line) if it cannot be loaded or run.

    backend: of the state update, "auto", "triton" or "reference".
    """

    def __init__(
        self,
        name: str,
        *,
        dtype: str,
        device: str,
        trust_remote_code: bool = False,
        device_map: str | None = None,
        backend: str = "auto",
    ):
        self._loaded = models.load(
            name,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            device_map=device_map,
        )
        self.backend = backend
        self.device = self._loaded.device
        self.max_positions = self._loaded.adapter.max_positions
        self.stop_tokens = stop_tokens(self._loaded)

    def digests(self) -> dict[str, str]:
        """Digests of the files the model was loaded from."""
        return {
            "weights": self._loaded.weights_digest,
            "config": file_digest(self._loaded.folder / "config.json"),
            "tokenizer": self._loaded.tokenizer_digest,
        }

    def encode(self, text: str) -> list[int]:
        tokens = self._loaded.tokenizer.encode(text, add_special_tokens=False)
        size = self._loaded.adapter.vocab_size
        if tokens and max(tokens) >= size:
            raise ValueError(
                f"the tokenizer gives token {max(tokens)}, and the model's vocabulary has {size}"
            )
        return tokens

    def costs(self, arm: Arm) -> dict[str, float]:
        """Bytes per state element (mean of all layers), and per token and sequence (sum of all)."""
        adapter = self._loaded.adapter
        layers = [state_geometry(adapter.family, layer.mixer) for layer in adapter.layers]
        elements = [layer.heads * layer.rows * layer.cols for layer in layers]
        stored = [
            arm.policy.bytes_per_state_element(layer) * count
            for layer, count in zip(layers, elements, strict=True)
        ]
        return {
            "bytes_per_state_element": sum(stored) / sum(elements),
            "bytes_per_token": sum(arm.policy.bytes_per_token(layer) for layer in layers),
        }

    def lockstep(self, spec: StudySpec) -> Lockstep:
        return Lockstep(
            self._loaded.adapter,
            _engine_arms(spec, spec.arms()),
            window=spec.window,
            probe=bool(spec.state_positions),
            backend=self.backend,
        )

    def backends(self, spec: StudySpec) -> str:
        """One line: on which backend the arms of `spec` run. ValueError if that is not possible."""
        policies = {"reference": spec.reference} | {arm.label: arm.policy for arm in spec.arms()}
        return describe_backends(self._loaded.adapter, policies, backend=self.backend)

    def free_run(self, spec: StudySpec, prompts: Tensor, prompt_ids: Sequence[int]) -> Tensor:
        """What the reference and `spec.free_arms()` write after `prompts` (`engine.free_run`)."""
        free = spec.free_running
        return free_run(
            self._loaded.adapter,
            _engine_arms(spec, spec.free_arms()),
            prompts,
            tokens=free.tokens,
            stop_tokens=self.stop_tokens,
            sampler=Sampler(temperature=free.temperature, seed=free.seed),
            prompt_ids=prompt_ids,
            backend=self.backend,
        )

    def effective(self, engine: Lockstep) -> dict:
        """What really runs and is stored, read back: backends, the library functions that were
        replaced, dtypes of each arm's stored tensors (first layer) and of the library's own cache.
        """
        found = engine.effective()
        stored = {
            arm: {part: dtype for part, dtype in dtypes.items() if part.startswith(_STORED)}
            for arm, dtypes in found["dtypes"].items()
        }
        return {
            "backends": list(engine.backends),
            "backend_by_arm": found["backends"],
            "prefill": found["prefill"],
            "graphs": found["graphs"],
            "replaced": found["replaced"],
            "stored": stored,
            "cache": found["cache"],
        }


def _engine_arms(spec: StudySpec, arms: Sequence[Arm]) -> list[EngineArm]:
    """The reference, then `arms`."""
    reference = EngineArm(label="reference", policy=spec.reference, kind="reference")
    return [reference] + [
        EngineArm(
            label=arm.label,
            policy=arm.policy,
            seed=arm.seed,
            kind=_ENGINE_KINDS[arm.control],
            fault=None if arm.fault is None else 1.0 + arm.fault,
            refresh=arm.refresh,
        )
        for arm in arms
    ]


def state_geometry(family: Family, mixer: nn.Module) -> StateGeometry:
    """Sizes of a recurrent layer as the byte model of `policy` wants them."""
    shapes = family.shapes(mixer)
    names = _GEOMETRY[family.recurrence]
    heads, rows, cols, key_groups = (shapes[name] for name in names)
    return StateGeometry(
        recurrence=family.recurrence,
        heads=heads,
        rows=rows,
        cols=cols,
        key_groups=key_groups,
        input_bytes=family.ring_dtype(mixer).itemsize,
    )


def stop_tokens(loaded: LoadedModel) -> frozenset[int]:
    """Ids that end a text, from the model's generation settings, tokenizer and configuration."""
    found: set[int] = set()
    for source in (loaded.model.generation_config, loaded.tokenizer, loaded.model.config):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else () if ids is None else (ids,))
    return frozenset(found)


# What an arm's cache stores, beside its cursors and counters.
_STORED = (
    *(f"checkpoint.{part}" for part in ("data", "scale", "tensor_scale")),
    *(f"read_copy.{part}" for part in ("data", "scale", "tensor_scale")),
    "ring.",
)

_GEOMETRY = {
    "mamba2": ("num_heads", "head_dim", "d_state", "n_groups"),
    "gated_delta": ("num_v_heads", "head_v_dim", "head_k_dim", "num_k_heads"),
    "kimi_delta": ("num_v_heads", "head_v_dim", "head_k_dim", "num_k_heads"),
}
