"""Gated DeltaNet: the token recurrence, the window over a ring, and the fold into a state."""

from replayssm.ops.gated_delta.reference import (
    GatedDeltaGeometry,
    GatedDeltaInputs,
    fold,
    recurrence,
    window,
)

__all__ = ["GatedDeltaGeometry", "GatedDeltaInputs", "fold", "recurrence", "window"]
