"""When a test that forces kernels onto CPU tensors can run."""

import pytest
import torch


def needs_interpreter() -> None:
    """Skip unless Triton's interpreter runs here, and can loop up to a number in memory."""
    triton = pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    if triton.__version__.startswith("3.6"):
        pytest.skip("this interpreter loops over constants only (NumPy 2.4)")
