"""Kimi Delta Attention: the token recurrence, the window over a ring, and the fold into a state."""

from replayssm.ops.kimi_delta.reference import (
    KimiDeltaGeometry,
    KimiDeltaInputs,
    fold,
    recurrence,
    window,
)

__all__ = ["KimiDeltaGeometry", "KimiDeltaInputs", "fold", "recurrence", "window"]
