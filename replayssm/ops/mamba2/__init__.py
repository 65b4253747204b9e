"""Mamba-2: the token recurrence, the window over a ring, and the fold into a state."""

from replayssm.ops.mamba2.reference import Mamba2Geometry, Mamba2Inputs, fold, recurrence, window

__all__ = ["Mamba2Geometry", "Mamba2Inputs", "fold", "recurrence", "window"]
