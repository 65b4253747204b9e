"""Fixtures shared by all tests."""

import copy
import os

# Tests run in two processes; each computing with two threads would make both many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from interpreter import look_for_builtins_once  # noqa: E402
from tiny_models import tiny_model as shared_tiny_model  # noqa: E402

# Without a GPU kernels run in Triton's interpreter, which is chosen when triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    look_for_builtins_once()


@pytest.fixture
def tiny_model():
    """Function name -> tiny model, FP32, eval mode; a fresh copy that a test may change."""
    return lambda name: copy.deepcopy(shared_tiny_model(name))


@pytest.fixture(autouse=True)
def _seed_everything():
    torch.manual_seed(0)
