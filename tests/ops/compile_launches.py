"""Compile what the launchers launch, without a GPU; run as a program, not a test.

    python compile_launches.py ARCH [ARCH ...]

Launches go through the launchers themselves, so that signatures, specialisation and options are the
real ones, but a stand-in driver names the target and nothing runs. Needs TRITON_INTERPRET unset.
Prints one line per kernel: architecture, kernel, policy, warps, shared memory, and what the assembler
says of registers and spills; exits with an error if anything fails or spills.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from replayssm.ops.mamba2 import triton_decode, triton_flush, triton_window
from replayssm.ops.mamba2.reference import Mamba2Geometry, Mamba2Inputs, ring_layout
from replayssm.ops.triton_common import new_cursors
from replayssm.policy import parse_policy

SUPER = Mamba2Geometry(num_heads=128, head_dim=64, n_groups=8, d_state=128)
NANO_4B = Mamba2Geometry(num_heads=96, head_dim=80, n_groups=8, d_state=128)
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

    def __init__(self, kernel):
        self.kernel, self.results = kernel, []

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.results.append(self.kernel.warmup(*args, grid=grid, **kwargs))

        return launch


def mamba2_launches(geometry: Mamba2Geometry, label: str, dtype: torch.dtype):
    """Runs every launcher for one policy; yields (name, compiled kernel)."""
    policy = parse_policy(label)
    H, P, N = geometry.state_shape
    G, zeros = geometry.n_groups, torch.zeros(1, dtype=torch.int64)
    state = torch.zeros(1, H, P, N)
    key = {"seed": zeros, "layer": 0, "stream": 0, "flush_index": zeros, "sequence": zeros}
    checkpoint, read_copy = (
        storage and storage.write(state, storage.draw_bits(state.shape, **key))
        for storage in (policy.checkpoint, policy.read_copy)
    )
    ring = {
        name: torch.zeros(
            (1, heads, policy.ring_len, *width), dtype=torch.float32 if name == "dt" else dtype
        )
        for name, (heads, *width) in ring_layout(geometry, recompute=False).items()
    }
    cursors = new_cursors(zeros.clone(), sequence=zeros, seed=zeros)

    def inputs(tokens):
        return Mamba2Inputs(
            x=torch.zeros(1, tokens, H, P, dtype=dtype),
            dt=torch.zeros(1, tokens, H),
            A=torch.zeros(H),
            B_=torch.zeros(1, tokens, G, N, dtype=dtype),
            C=torch.zeros(1, tokens, G, N, dtype=dtype),
            D=torch.zeros(H),
        )

    read, both = read_copy or checkpoint, (checkpoint, read_copy)
    layer, A = {"layer": 3}, {"A": torch.zeros(H)}
    for name, module, kernel, call in (
        ("decode", triton_decode, "decode_kernel",
         lambda: triton_decode.decode(read, ring, policy, cursors, inputs(1))),
        ("step", triton_decode, "decode_kernel",
         lambda: triton_decode.step(*both, ring, policy, cursors, inputs(1), **layer)),
        ("window", triton_window, "window_kernel",
         lambda: triton_window.window(read, ring, policy, cursors, inputs(policy.ring_len))),
        ("flush", triton_flush, "flush_kernel",
         lambda: triton_flush.flush(*both, ring, policy, cursors, A, **layer)),
    ):  # fmt: skip
        original = getattr(module, kernel)
        compiled = Compiled(original)
        setattr(module, kernel, compiled)
        try:
            call()
        finally:
            setattr(module, kernel, original)
        yield name, compiled.results[0]


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local memory per thread of a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    return dict(zip(("registers", "stack", "local"), map(int, found.groups()), strict=True))


# (geometry, policy, activation dtype): every reader and writer once, real sizes.
CASES = [
    (SUPER, "fp32", torch.bfloat16),
    (SUPER, "fp16-sr+nvfp4", torch.bfloat16),
    (SUPER, "bf16+mxfp4", torch.float16),
    (SUPER, "fp8-sr+mxfp8", torch.bfloat16),
    (SUPER, "int8-sr@32", torch.bfloat16),
    (SUPER, "fp8-e5m2@1", torch.float32),
    (NANO_4B, "fp32+nvfp4-46@5", torch.bfloat16),
]
CASES_OF_OTHER_ARCHITECTURES = CASES[1:2]


def main(architectures: list[int]) -> None:
    spilled = []
    for arch in architectures:
        driver.set_active(Device(arch))
        for geometry, label, dtype in CASES if arch == 90 else CASES_OF_OTHER_ARCHITECTURES:
            for name, kernel in mamba2_launches(geometry, label, dtype):
                used = resources(kernel.asm["cubin"])
                line = f"sm_{arch} mamba2 {name} {label} {dtype} P{geometry.head_dim}: " + ", ".join(
                    f"{v} {k}" for k, v in (used | {
                        "warps": kernel.metadata.num_warps, "shared": kernel.metadata.shared
                    }).items()
                )  # fmt: skip
                print(line, flush=True)
                if used["stack"] or used["local"]:
                    spilled.append(line)
    if spilled:
        sys.exit("spills to local memory:\n" + "\n".join(spilled))


if __name__ == "__main__":
    main([int(arch) for arch in sys.argv[1:]])
