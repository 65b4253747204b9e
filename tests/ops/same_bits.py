"""Equality of tensors bit for bit, with what differs: for tests of stored codes."""

import torch


def pattern(t: torch.Tensor) -> torch.Tensor:
    """Integer pattern of a tensor of any dtype, on the CPU."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.cpu().contiguous().view(sizes[t.element_size()])


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: str = "") -> None:
    """Fails with the first place, in both tensors, where they differ."""
    got, want = pattern(got), pattern(want)
    differs = (got != want).flatten().nonzero().flatten()
    assert not len(differs), (
        f"{what}: {len(differs)} of {got.numel()} differ, first at {int(differs[0])}: "
        f"{got.flatten()[differs[0]]:#x}, expected {want.flatten()[differs[0]]:#x}"
    )
