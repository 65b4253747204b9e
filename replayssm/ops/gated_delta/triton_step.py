"""A step of the rows whose rings it fills: their token answered and their rings folded in one pass.

Owns that kernel, for many rows (few: triton_few.py). Knows no launch. Legend: triton_tiles.py.
"""

import triton
import triton.language as tl

from replayssm.ops.gated_delta.triton_fold import fold_and_write
from replayssm.ops.gated_delta.triton_token import one_token
from replayssm.ops.triton_common import bound, load_ticket


@triton.jit(do_not_specialize=["layer"])
def step_due_kernel(
    out,
    tokens,
    ring,
    cursors,
    state,  # Stored, read and written
    layer,
    due,  # from `list_due`: rows whose ring the token fills
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    READ: tl.constexpr,
    PRODUCTS: tl.constexpr,
    CHECKPOINT: tl.constexpr,
    WHOLE: tl.constexpr,
    FULL: tl.constexpr,
    EXACT: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    BV: tl.constexpr,
    FOLDED: tl.constexpr,
    ROUNDED: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid of any size: programs share the tiles of the rows that are due, whose cursors `due` has
    moved. Each answers the token and folds the ring into the tile, which is in the cache by then.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    end = tl.load(due).to(tl.int32) * (HV * TILES)
    first_work, programs = tl.program_id(0), tl.num_programs(0)
    for work in tl.range(bound(first_work), bound(end), bound(programs), disable_licm=True):
        ticket = load_ticket(due, work // (HV * TILES))
        head, tile = work // TILES % HV, work % TILES
        one_token(
            out, tokens, ring, state, ticket.row.to(tl.int64), ticket.slot, L - 1, tile, head,
            HK, HV, K, V, L, READ, PRODUCTS, True, BV, BK, BL, COLUMNS, KEY_COLUMNS,
        )  # fmt: skip
        tl.debug_barrier()  # the record is in memory
        fold_and_write(
            state, None, layer, ring, cursors, None, None, ticket, head, tile,
            HK, HV, K, V, L, CHECKPOINT, None, WHOLE, FULL, EXACT,
            PIECES, PIECE, BV, FOLDED, ROUNDED, BK, BL,
        )  # fmt: skip
