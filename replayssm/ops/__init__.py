"""Recurrences as pure functions on tensors, one folder per recurrence.

Owns the mathematics of decoding from an old state and a ring of recent records. Knows no cache, no
model and no storage format of the state: states arrive and leave as FP32 (or float64, for oracles).
Start with `ring.py`, then one `reference.py`.
"""
