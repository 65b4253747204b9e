"""Memory that nobody wrote, as NaN: what a test imports so that no kernel gets away with it."""

import math

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Fills what `torch.empty` makes, such as the outputs of launchers, with NaN."""
    empty = torch.empty

    def poisoned(*size, **options):
        tensor = empty(*size, **options)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
