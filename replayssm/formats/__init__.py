"""Number formats: what a state can be stored in, and how it gets there bit for bit.

Leaf of the package: torch and the standard library only, no knowledge of recurrences, caches or
models. Read in this order: `number` (formats as data), `rounding` (FP32 to a grid), `philox`
(random bits for stochastic rounding), `block` (scaled blocks as data), `codec` (tensors in and
out), `storage` (a format with its rounding, named).
"""
