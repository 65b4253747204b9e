"""Device functions for number formats: rounding, random bits, scales, packing, tiles of a state.

Owns what every kernel shares of `formats/`, as `triton.jit` functions that repeat its operations
one for one, so that a stored code has the same bits whoever wrote it. A kernel is specialised on a
`Storage`, passed as a constexpr: every fact of a format comes from there, none is repeated here.
Knows no recurrence. Start with `tiles.py` (reads) and `store.py`.

Bit equality and compilers: `round_to_format` works on bit patterns and cannot be contracted into a
fused multiply-add with its surroundings. The errors that four-over-six compares could be: a kernel
that calls `store_tile` is launched with `enable_fp_fusion=False`. Division is `tl.div_rn`
everywhere. Subnormals are kept: Triton sets no flush-to-zero mode.
"""
