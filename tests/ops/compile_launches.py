"""Compile what the launchers launch, without a GPU; run as a program, not a test.

    python compile_launches.py ARCH [all]       all: every policy of CASES, not the usual ones

Launches go through the launchers themselves, so that signatures, specialisation and options are the
real ones, but a stand-in driver names the target and nothing runs. Needs TRITON_INTERPRET unset.
Prints one line per kernel: architecture, kernel, policy, warps, shared memory, and what the
assembler says of registers and spills; exits with an error if anything fails, spills, or reduces
what this compiler would reduce wrongly.
"""

import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from replayssm.ops import gated_delta, kimi_delta, mamba2, triton_common
from replayssm.ops.gated_delta import triton_apply
from replayssm.ops.gated_delta import triton_conventional as gated_delta_conventional
from replayssm.ops.gated_delta import triton_decode as gated_delta_decode
from replayssm.ops.gated_delta import triton_flush as gated_delta_flush
from replayssm.ops.gated_delta import triton_launch as gated_delta_launch
from replayssm.ops.gated_delta import triton_window as gated_delta_window
from replayssm.ops.gated_delta.reference import GatedDeltaGeometry, GatedDeltaInputs
from replayssm.ops.glue import triton_gates, triton_glue, triton_layers
from replayssm.ops.kimi_delta import triton_decode as kimi_delta_decode
from replayssm.ops.kimi_delta import triton_flush as kimi_delta_flush
from replayssm.ops.kimi_delta import triton_launch as kimi_delta_launch
from replayssm.ops.kimi_delta import triton_window as kimi_delta_window
from replayssm.ops.kimi_delta.reference import KimiDeltaGeometry, KimiDeltaInputs
from replayssm.ops.mamba2 import triton_conventional as mamba2_conventional
from replayssm.ops.mamba2 import triton_decode as mamba2_decode
from replayssm.ops.mamba2 import triton_flush as mamba2_flush
from replayssm.ops.mamba2 import triton_launch as mamba2_launch
from replayssm.ops.mamba2 import triton_window as mamba2_window
from replayssm.ops.mamba2.reference import Mamba2Geometry, Mamba2Inputs
from replayssm.ops.triton_common import new_cursors
from replayssm.ops.triton_conventional import SWEEP
from replayssm.policy import parse_policy

ROWS, MANY_ROWS = 4, 256
SUPER = Mamba2Geometry(num_heads=128, head_dim=64, n_groups=8, d_state=128)
NANO_4B = Mamba2Geometry(num_heads=96, head_dim=80, n_groups=8, d_state=128)
QWEN_4B = GatedDeltaGeometry(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128)
ODD = GatedDeltaGeometry(num_k_heads=4, num_v_heads=12, head_k_dim=96, head_v_dim=80)
KIMI_48B = KimiDeltaGeometry(num_k_heads=32, num_v_heads=32, head_k_dim=128, head_v_dim=128)
KIMI_ODD = KimiDeltaGeometry(num_k_heads=4, num_v_heads=12, head_k_dim=96, head_v_dim=80)
Geometry = Mamba2Geometry | GatedDeltaGeometry | KimiDeltaGeometry
MODULES = {
    Mamba2Geometry: (mamba2.reference, mamba2_decode, mamba2_window, mamba2_flush),
    GatedDeltaGeometry: (
        gated_delta.reference, gated_delta_decode, gated_delta_window, gated_delta_flush,
    ),
    KimiDeltaGeometry: (
        kimi_delta.reference, kimi_delta_decode, kimi_delta_window, kimi_delta_flush,
    ),
}  # fmt: skip
CONVENTIONAL = {
    Mamba2Geometry: mamba2_conventional,
    GatedDeltaGeometry: gated_delta_conventional,
    KimiDeltaGeometry: gated_delta_conventional,
}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Device:
    """A driver of a device that is not there."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return self.arch

    def get_current_stream(self, device):
        return 0


class Compiled:
    """Stands for a kernel: a launch compiles it and keeps the result."""

    def __init__(self, kernel, results: list):
        self.kernel, self.results = kernel, results

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.results.append(self.kernel.warmup(*args, grid=grid, **kwargs))

        return launch


@contextmanager
def compiling(modules):
    """Inside, launches of these modules' kernels are compiled and collected."""
    results = []
    kernels = [
        (module, name, kernel)
        for module in modules
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    ]
    for module, name, kernel in kernels:
        setattr(module, name, Compiled(kernel, results))
    try:
        yield results
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


def mamba2_inputs(geometry: Mamba2Geometry, tokens: int, dtype: torch.dtype) -> Mamba2Inputs:
    H, P, N = geometry.state_shape
    G = geometry.n_groups
    return Mamba2Inputs(
        x=torch.zeros(ROWS, tokens, H, P, dtype=dtype),
        dt=torch.zeros(ROWS, tokens, H),
        A=torch.zeros(H),
        B_=torch.zeros(ROWS, tokens, G, N, dtype=dtype),
        C=torch.zeros(ROWS, tokens, G, N, dtype=dtype),
        D=torch.zeros(H),
    )


def delta_inputs(
    geometry: GatedDeltaGeometry | KimiDeltaGeometry, tokens: int, dtype: torch.dtype
) -> GatedDeltaInputs | KimiDeltaInputs:
    kimi = isinstance(geometry, KimiDeltaGeometry)
    return (KimiDeltaInputs if kimi else GatedDeltaInputs)(
        **{
            name: torch.zeros(
                ROWS, tokens, *shape, dtype=dtype if name in ("q", "k", "v") else torch.float32
            )
            for name, shape in geometry.input_shapes.items()
        }
    )


def launches(geometry: Geometry, label: str, dtype: torch.dtype):
    """Runs every launcher for one policy; yields (launcher, compiled kernel)."""
    reference, decode, window, flush = MODULES[type(geometry)]
    policy = parse_policy(label)
    slots = torch.arange(ROWS)
    state = torch.zeros(ROWS, *geometry.state_shape)
    key = {"seed": slots, "layer": 0, "stream": 0, "flush_index": slots, "sequence": slots}
    checkpoint, read_copy = (
        storage and storage.write(state, storage.draw_bits(state.shape, **key))
        for storage in (policy.checkpoint, policy.read_copy)
    )
    recompute = read_copy is not None and policy.update_source == "checkpoint"
    ring = {
        name: torch.zeros(
            (ROWS, heads, policy.ring_len, *width), dtype=dtype if name in reference.STORED
            else torch.float32,
        )
        for name, (heads, *width) in reference.ring_layout(geometry, recompute=recompute).items()
    }  # fmt: skip
    cursors = new_cursors(slots, sequence=slots, seed=slots)
    make_inputs = mamba2_inputs if reference is mamba2.reference else delta_inputs
    one = make_inputs(geometry, 1, dtype)
    all_slots = make_inputs(geometry, min(policy.ring_len, 32), dtype)
    read, both = read_copy or checkpoint, (checkpoint, read_copy)
    layer, parameters = {"layer": 3}, reference.parameters(one)
    calls = [
        ("decode", lambda: decode.decode(read, ring, policy, cursors, one)),
        ("step", lambda: decode.step(*both, ring, policy, cursors, one, **layer)),
        ("window", lambda: window.window(read, ring, policy, cursors, all_slots)),
        ("flush", lambda: flush.flush(*both, ring, policy, cursors, parameters, **layer)),
        (
            "flush",
            lambda: flush.flush(
                *both, ring, policy, cursors, parameters, **layer, rows=torch.ones(ROWS).bool()
            ),
        ),
    ]
    if flush is gated_delta_flush:  # as for many rows: other kernels, or other tiles
        constants = gated_delta_launch.sizes(gated_delta_launch.ring_argument(ring), policy)
        large, full, token = (
            gated_delta_launch.default_launch(kernel, policy, constants, MANY_ROWS)
            for kernel in ("decode", "flush", "window")
        )
        calls += [
            ("decode", lambda: decode.decode(read, ring, policy, cursors, one, launch=large)),
            ("window", lambda: window.window(read, ring, policy, cursors, all_slots, launch=token)),
            (
                "flush",
                lambda: flush.flush(*both, ring, policy, cursors, parameters, **layer, launch=full),
            ),
            (
                "step",
                lambda: decode.step(
                    *both, ring, policy, cursors, one, **layer, single=False, flush_launch=full
                ),
            ),
        ]
    if flush is kimi_delta_flush:
        constants = gated_delta_launch.sizes(gated_delta_launch.ring_argument(ring), policy)
        few, many = (
            kimi_delta_launch.default_launch("decode", policy, constants, rows)
            for rows in (1, MANY_ROWS)
        )
        calls += [
            ("decode", lambda: decode.decode(read, ring, policy, cursors, one, launch=few)),
            ("decode", lambda: decode.decode(read, ring, policy, cursors, one, launch=many)),
        ]
    if flush is mamba2_flush:
        sizes = mamba2_launch.sizes(checkpoint, ring, cursors)
        large = mamba2_launch.default_launch("decode", policy, sizes, MANY_ROWS)
        full = None
        if read_copy is None:
            full = mamba2_launch.default_launch("step", policy, sizes, MANY_ROWS)
        several = layer | {"single": False, "flush_launch": full}
        without_D = one._replace(D=None)
        calls += [
            ("decode", lambda: decode.decode(read, ring, policy, cursors, one, launch=large)),
            ("step", lambda: decode.step(*both, ring, policy, cursors, one, **several)),
            ("step", lambda: decode.step(*both, ring, policy, cursors, without_D, **layer)),
        ]
    for name, call in calls:
        modules = {decode, window, triton_apply, flush, gated_delta_flush, triton_common}
        with compiling(modules) as results:
            call()
        for kernel in results:
            yield name, kernel


def conventional_launches(geometry: Geometry, sweep):
    """The conventional kernel with the launches of `sweep`, the first also for many tokens; yields
    as `launches`."""
    module = CONVENTIONAL[type(geometry)]
    make_inputs = mamba2_inputs if module is mamba2_conventional else delta_inputs
    state = torch.zeros(ROWS, *geometry.state_shape)
    for launch in sweep:
        for tokens in (1, 9) if launch is sweep[0] else (1,):
            snapshots = torch.zeros(ROWS, tokens, *geometry.state_shape) if tokens > 1 else None
            inputs = make_inputs(geometry, tokens, torch.bfloat16)
            with compiling((module,)) as results:
                module.conventional(
                    state, torch.arange(ROWS), inputs, launch=launch, snapshots=snapshots
                )
            for kernel in results:
                yield f"conventional, {tokens} tokens, {launch.label}", kernel


def glue_launches():
    """What surrounds the recurrences of two models of 4B; yields as `launches`."""

    def narrow(*shape):
        return torch.zeros(shape, dtype=torch.bfloat16)

    qkv, xBC = narrow(ROWS, 1, 8192).mT, narrow(ROWS, 1, 9728).mT
    gate, weight = {"gate": narrow(ROWS, 7680), "rounds": True}, narrow(8192)
    scan, dt = torch.zeros(ROWS, 7680), narrow(ROWS, 1, 96, 1).expand(-1, -1, -1, 80)[..., 0]
    limits = {"softplus": True, "low": 0.001, "high": float("inf")}
    calls = {
        "norm": lambda: triton_glue.rms_norm(narrow(ROWS, 2560), weight[:2560], 1e-6, centred=True),
        "gate after a norm": lambda: triton_glue.rms_norm(
            narrow(ROWS, 7680), weight[:7680], 1e-6, gated="after", **gate
        ),
        "gate before norms": lambda: triton_glue.rms_norm(
            scan, weight[:7680], 1e-5, group=960, **gate
        ),
        "convolution step": lambda: triton_glue.convolution_step(
            qkv, narrow(ROWS, 8192, 4), narrow(8192, 4), None, silu=True
        ),
        "convolution": lambda: triton_glue.convolution(
            xBC.expand(-1, -1, 9), narrow(9728, 4), narrow(9728), silu=True
        ),
        "unit vectors": lambda: triton_glue.unit_vectors(narrow(ROWS, 1, 16, 128), 1e-6),
        "gate": lambda: triton_gates.gated(narrow(ROWS, 9216), narrow(ROWS, 9216)),
        "step sizes": lambda: triton_gates.step_size(dt, narrow(96), **limits),
        "gate of heads": lambda: triton_gates.gated(
            narrow(ROWS, 16, 512)[..., 256:], narrow(ROWS, 16, 256), sigmoid=True
        ),
        "squared ReLU": lambda: triton_gates.squared_relu(narrow(ROWS, 12544)),
        "rotated heads": lambda: triton_layers.rotated_heads(
            narrow(ROWS, 1, 16, 512)[..., :256],
            narrow(ROWS, 1, 4, 256),
            (narrow(256), narrow(256)),
            (narrow(1, 1, 64), narrow(1, 1, 64)),
            1e-6,
        ),
    }
    for tokens in (1, 9):
        calls |= {
            f"before a delta rule, {tokens} tokens": lambda tokens=tokens: (
                triton_layers.delta_inputs(
                    narrow(ROWS, tokens, 12352)[..., :8192],
                    narrow(ROWS, 8192, 4),
                    narrow(8192, 4),
                    None,
                    (narrow(ROWS, tokens, 32), narrow(ROWS, tokens, 32)),
                    (narrow(32), narrow(32)),
                    key_heads=16,
                    value_width=128,
                    eps=1e-6,
                    scale=0.1,
                )
            ),
            f"before a scan, {tokens} tokens": lambda tokens=tokens: triton_layers.scan_inputs(
                narrow(ROWS, tokens, 9728),
                narrow(ROWS, 9728, 4),
                narrow(9728, 4),
                narrow(9728),
                narrow(ROWS, tokens, 96),
                (narrow(96), narrow(96), narrow(96)),
                low=0.001,
                high=float("inf"),
            ),
        }
    for name, call in calls.items():
        with compiling((triton_gates, triton_glue, triton_layers)) as results:
            call()
        for kernel in results:
            yield name, kernel


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local memory per thread of a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    return dict(zip(("registers", "stack", "local"), map(int, found.groups()), strict=True))


def reductions_with_gaps(ttgir: str) -> list[str]:
    """Reductions of a kernel over lanes that do not follow each other.

    Triton 3.6 takes such lanes for neighbours and leaves some out. A reshape makes them, that joins
    an axis with one that has fewer elements than lanes.
    """
    linear = re.compile(r"(#linear\d*) = #ttg\.linear<.*lane = \[(.*?)\], warp")
    lanes = {
        name: [[int(x) for x in basis.split(",")] for basis in re.findall(r"\[(.*?)\]", bases)]
        for name, bases in linear.findall(ttgir)
    }
    found, axis = [], 0
    for line in ttgir.splitlines():
        if start := re.search(r'"tt\.reduce".*axis = (\d+)', line):
            axis = int(start[1])
        elif (end := re.search(r"^ *\}\) : \(tensor<([^)]*?)\) ->", line)) and "#linear" in end[1]:
            bases = lanes[re.search(r"#linear\d*", end[1])[0]]
            for dim in reversed([int(d) for d in re.findall(r"dim = (\d+)", end[1])]):
                bases = [basis[:dim] + basis[dim + 1 :] for basis in bases]
            used = [lane for lane, basis in enumerate(bases) if basis[axis]]
            if used and used[-1] - used[0] >= len(used):
                found.append(f"axis {axis} of {end[1]}")
    return found


# (geometry, policy, activation dtype): every reader and writer once, real sizes.
CASES = [
    (SUPER, "fp32", torch.bfloat16),
    (SUPER, "fp16-sr+nvfp4", torch.bfloat16),
    (SUPER, "bf16+mxfp4", torch.float16),
    (SUPER, "fp8-sr+mxfp8", torch.bfloat16),
    (SUPER, "fp16-sr", torch.bfloat16),
    (SUPER, "int8-sr@32", torch.bfloat16),
    (SUPER, "fp8-e5m2@1", torch.float32),
    (NANO_4B, "fp32+nvfp4-46@5", torch.bfloat16),
    (QWEN_4B, "fp32", torch.bfloat16),
    (QWEN_4B, "fp16-sr+nvfp4", torch.bfloat16),
    (QWEN_4B, "int8-sr@32", torch.float16),
    (ODD, "fp32+mxfp4@5", torch.float32),
    (KIMI_48B, "fp32", torch.bfloat16),
    (KIMI_48B, "fp16-sr+nvfp4", torch.bfloat16),
    (KIMI_48B, "int8-sr@32", torch.float16),
    (KIMI_ODD, "fp32+mxfp4@5", torch.float32),
]
USUAL = {
    80: ("fp16-sr+nvfp4",),
    90: ("fp32", "fp16-sr+nvfp4", "fp32+mxfp4@5"),
    100: ("fp16-sr+nvfp4",),
}
CONVENTIONAL_CASES = (SUPER, NANO_4B, QWEN_4B, KIMI_48B)


def compiled(arch: int, everything: bool):
    """What is compiled for an architecture: (geometry, policy, dtype, name, kernel)."""
    for geometry, label, dtype in CASES:
        if everything or label in USUAL[arch]:
            for name, kernel in launches(geometry, label, dtype):
                yield geometry, label, dtype, name, kernel
    sweep = SWEEP if everything else SWEEP[:1]
    for geometry in CONVENTIONAL_CASES:
        for name, kernel in conventional_launches(geometry, sweep):
            yield geometry, "fp32", torch.bfloat16, name, kernel


def main(arch: int, everything: bool) -> None:
    spilled, gaps = [], []
    driver.set_active(Device(arch))
    for geometry, label, dtype, name, kernel in compiled(arch, everything):
        family = MODULES[type(geometry)][0].__name__.split(".")[-2]
        used = resources(kernel.asm["cubin"])
        used |= {"warps": kernel.metadata.num_warps, "shared": kernel.metadata.shared}
        shape = "x".join(map(str, geometry.state_shape))
        line = f"sm_{arch} {family} {name} {label} {dtype} {shape}: "
        line += ", ".join(f"{value} {what}" for what, value in used.items())
        print(line, flush=True)
        gaps += [f"{line}: {found}" for found in reductions_with_gaps(kernel.asm["ttgir"])]
        # Some invariants of a loop over tiles, read back once a tile, cost nothing.
        if arch == 90 and (used["stack"] > 256 or used["local"]):
            spilled.append(line)
    for name, kernel in glue_launches():
        used = resources(kernel.asm["cubin"])
        print(f"sm_{arch} glue {name}: {used['registers']} registers", flush=True)
        gaps += [f"{name}: {found}" for found in reductions_with_gaps(kernel.asm["ttgir"])]
        if used["stack"] or used["local"]:
            spilled.append(name)
    if gaps:
        sys.exit("reductions over lanes with gaps:\n" + "\n".join(gaps))
    if spilled:
        sys.exit("spills to local memory:\n" + "\n".join(spilled))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] == ["all"])
