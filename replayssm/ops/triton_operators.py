"""The kernels as registered operators, so that torch.compile and graph capture see them.

Owns the operators `replayssm::{recurrence}_{decode, step, window, flush}`: their schemas (what each
writes in place), fake implementations, and how lists of tensors become launcher arguments. Knows no
cache. What an operator computes is said at its launcher, `<recurrence>/triton_*.py`.

Arguments, the same for every recurrence:

    checkpoint, read_copy, read   tensors of a `Quantized`, in the order of `Quantized.tensors()`;
                                  an empty list where there is no read copy
    ring                          records in the order of `reference.ring_layout`
    cursors                       in the order of `triton_common.Cursors`
    inputs                        in the order of the recurrence's inputs
    policy                        `spelled(policy)`

Legend: S slots, B rows, T tokens, H heads, state [S, H, R, C], L ring slots.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from replayssm.formats.quantized import Quantized
from replayssm.formats.scaling import scale_type
from replayssm.formats.storage import Storage
from replayssm.ops.gated_delta import triton_decode as delta_decode
from replayssm.ops.gated_delta import triton_flush as delta_flush
from replayssm.ops.gated_delta import triton_window as delta_window
from replayssm.ops.gated_delta.reference import GatedDeltaInputs
from replayssm.ops.kimi_delta import triton_decode as kimi_decode
from replayssm.ops.kimi_delta import triton_flush as kimi_flush
from replayssm.ops.kimi_delta import triton_window as kimi_window
from replayssm.ops.kimi_delta.reference import KimiDeltaInputs
from replayssm.ops.mamba2 import triton_decode as mamba2_decode
from replayssm.ops.mamba2 import triton_flush as mamba2_flush
from replayssm.ops.mamba2 import triton_window as mamba2_window
from replayssm.ops.mamba2.reference import Mamba2Inputs
from replayssm.ops.triton_common import Cursors
from replayssm.policy import PrecisionPolicy

# Ring records in order, with those that give a state's rows and columns.
_RINGS = {
    "mamba2": (("x", "B", "dt"), "x", "B"),
    "gated_delta": (("k", "g", "u", "v", "beta"), "u", "k"),
    "kimi_delta": (("k", "g", "u", "v", "beta"), "u", "k"),
}


def spelled(policy: PrecisionPolicy) -> str:
    """A policy as an operator takes it: every field, canonical JSON."""
    return json.dumps(policy.to_dict(), sort_keys=True)


@cache
def _policy(text: str) -> PrecisionPolicy:
    return PrecisionPolicy.from_dict(json.loads(text))


def _register(recurrence: str, make_inputs: type, launchers: SimpleNamespace) -> SimpleNamespace:
    """Define the four operators of a recurrence; returns them by kernel name."""
    names, value, key = _RINGS[recurrence]

    def quantized(storage: Storage | None, tensors: list[Tensor], ring: dict[str, Tensor]):
        """A stored copy; what it counts as saturated is the cursors' business, so not here."""
        if not tensors:
            return None
        (heads, _, rows), cols = ring[value].shape[1:], ring[key].shape[3]
        named = dict(zip(_stored_names(storage), tensors, strict=True))
        per_matrix = named.pop("tensor_scale", None)
        if per_matrix is not None:
            per_matrix = scale_type(storage.format)(per_matrix)
        return Quantized(
            format=storage.format,
            shape=(heads, rows, cols),
            tensor_scale=per_matrix,
            saturated=tensors[0],
            **named,
        )

    def outputs(ring: list[Tensor], inputs: list[Tensor | None]) -> Tensor:
        records = ring[names.index(value)]
        shape = (*inputs[0].shape[:2], records.shape[1], records.shape[3])
        return records.new_empty(shape, dtype=torch.float32)

    def define(name: str, mutates: tuple[str, ...], function: Callable, fake: Callable):
        operator = torch.library.custom_op(
            f"replayssm::{recurrence}_{name}", function, mutates_args=mutates
        )
        operator.register_fake(fake)
        return operator

    def reading(launcher: Callable) -> Callable:
        def function(
            read: list[Tensor],
            ring: list[Tensor],
            cursors: list[Tensor],
            inputs: list[Tensor | None],
            policy: str,
        ) -> Tensor:
            with _device_of(read[0]):
                parsed, named = _policy(policy), dict(zip(names, ring, strict=False))
                return launcher(
                    quantized(parsed.read_storage, read, named),
                    named,
                    parsed,
                    Cursors(*cursors),
                    make_inputs(*map(_dense_constant, inputs)),
                )

        return function

    def step(
        checkpoint: list[Tensor],
        read_copy: list[Tensor],
        ring: list[Tensor],
        cursors: list[Tensor],
        inputs: list[Tensor | None],
        policy: str,
        layer: int,
    ) -> Tensor:
        with _device_of(checkpoint[0]):
            parsed, named = _policy(policy), dict(zip(names, ring, strict=False))
            return launchers.step(
                quantized(parsed.checkpoint, checkpoint, named),
                quantized(parsed.read_copy, read_copy, named),
                named,
                parsed,
                Cursors(*cursors),
                make_inputs(*map(_dense_constant, inputs)),
                layer=layer,
            )

    def flush(
        checkpoint: list[Tensor],
        read_copy: list[Tensor],
        ring: list[Tensor],
        cursors: list[Tensor],
        A: Tensor | None,
        rows: Tensor | None,
        policy: str,
        layer: int,
    ) -> None:
        with _device_of(checkpoint[0]):
            parsed, named = _policy(policy), dict(zip(names, ring, strict=False))
            launchers.flush(
                quantized(parsed.checkpoint, checkpoint, named),
                quantized(parsed.read_copy, read_copy, named),
                named,
                parsed,
                Cursors(*cursors),
                {} if A is None else {"A": A.contiguous()},
                layer=layer,
                rows=rows,
            )

    def read_fake(read, ring, cursors, inputs, policy):
        return outputs(ring, inputs)

    def step_fake(checkpoint, read_copy, ring, cursors, inputs, policy, layer):
        return outputs(ring, inputs)

    def flush_fake(checkpoint, read_copy, ring, cursors, A, rows, policy, layer):
        return None

    written = ("checkpoint", "read_copy", "cursors")
    return SimpleNamespace(
        decode=define("decode", ("ring",), reading(launchers.decode), read_fake),
        window=define("window", ("ring",), reading(launchers.window), read_fake),
        step=define("step", (*written, "ring"), step, step_fake),
        flush=define("flush", written, flush, flush_fake),
    )


def _stored_names(storage: Storage) -> tuple[str, ...]:
    """Names of the tensors that `Quantized.tensors()` of this storage has."""
    per_matrix = getattr(storage.format, "tensor_scale", False)
    scaled = hasattr(storage.format, "block_size") or storage.scale != "none"
    return ("data",) + ("scale",) * scaled + ("tensor_scale",) * bool(per_matrix)


def _dense_constant(tensor: Tensor | None) -> Tensor | None:
    """Layer constants, which have at most two axes, without gaps: kernels know no strides of them,
    and models like to expand and slice them."""
    return tensor if tensor is None or tensor.dim() > 2 else tensor.contiguous()


def _device_of(tensor: Tensor):
    """Triton launches on the current device: make it the tensor's, where it is another one."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


OPERATORS = {
    "mamba2": _register(
        "mamba2",
        Mamba2Inputs,
        SimpleNamespace(
            decode=mamba2_decode.decode,
            step=mamba2_decode.step,
            window=mamba2_window.window,
            flush=mamba2_flush.flush,
        ),
    ),
    "gated_delta": _register(
        "gated_delta",
        GatedDeltaInputs,
        SimpleNamespace(
            decode=delta_decode.decode,
            step=delta_decode.step,
            window=delta_window.window,
            flush=delta_flush.flush,
        ),
    ),
    "kimi_delta": _register(
        "kimi_delta",
        KimiDeltaInputs,
        SimpleNamespace(
            decode=kimi_decode.decode,
            step=kimi_decode.step,
            window=kimi_window.window,
            flush=kimi_flush.flush,
        ),
    ),
}
