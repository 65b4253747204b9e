"""One token per row in one launch, for few rows, where time is latency and not bytes.

Owns the kernel. Each of a head's programs finds what they have in common, with all its warps.
Knows no launch.

Legend: triton_tiles.py.
"""

import triton
import triton.language as tl

from replayssm.ops.gated_delta.triton_tiles import as_held, load_rows
from replayssm.ops.kimi_delta.triton_past import (
    load_past,
    load_token,
    only_past,
    store_token,
    weigh,
)
from replayssm.ops.kimi_delta.triton_state import (
    decayed,
    load_readers,
    load_state,
    state_times,
)
from replayssm.ops.triton_rows import no_token


@triton.jit
def decode_few_kernel(
    slots,  # [B], of `cursors`: what is loaded first
    tokens,  # Tokens
    read,  # Stored
    ring,  # Ring
    out,  # [B, HV, V] FP32
    cursors,  # Cursors
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    READ: tl.constexpr,
    SUMS: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    BL: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Grid (tiles of V, HV, B). Constants: `weigh`, `load_state`, `state_times`.

    Two trips to memory: for the token and the slot, then for all that lies at the slot. All slots
    of the ring are read while the cursor is on its way, and those past it left out afterwards.
    """
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    value, event = tile * BV + tl.arange(0, BV), tl.arange(0, BL)
    in_v = value < V
    token = load_token(tokens, row, head, HK, HV, K, BK)
    readers = load_readers(tokens, row, head, HK, HV, K, BK, READ)
    beta = tl.load(tokens.beta + row * tokens.beta_row + head)
    v = tl.load(tokens.v + row * tokens.v_row + head * V + value, mask=in_v, other=0.0)
    tl.debug_barrier()  # the compiler would ask for the token behind the branch
    if slot < 0:
        no_token(out, row, tile, head, HV, V, BV)
        return

    count = tl.load(cursors.pos + slot).to(tl.int32)
    state = load_state(read, slot, head, tile * BV, V, K, BV, BK, COLUMNS, WARPS, READ)
    # A token needs a slot of its own, so L - 1 may hold records.
    past = load_past(tokens, ring, row, slot, head, L - 1, HK, HV, K, L, BL)
    first = (slot * HV + head) * L  # this head's oldest record
    asked = (event > 0) & (event < L)
    u_past = load_rows(ring.u + first * V, event - 1, V, asked, value, in_v)  # [BL, BV]
    tl.debug_barrier()
    v = v.to(tl.float32) if ring.v is None else as_held(v, tokens.v, ring.v)
    here = first + count
    if count < L:  # what is known already: nobody waits for it at the end
        if ring.v is not None:
            tl.store(ring.v + here * V + value, v.to(ring.v.dtype.element_ty), mask=in_v)
        if tile == 0:
            store_token(token, tokens, ring, slot, head, count, HK, HV, K, L, BK)
            if ring.beta is not None:
                tl.store(ring.beta + here, beta)

    u_past = tl.where((event <= count)[:, None], u_past, 0.0)
    w_k, w_q, decay = weigh(only_past(past, count), token, tokens, ring, K, SUMS)
    readers = decayed(readers, tokens.k, ring.k, decay, K, COLUMNS, READ)
    both = state_times(state, readers, K, BK, COLUMNS, READ, PRODUCTS)  # [BV, 2]
    both += tl.sum(tl.join(u_past * w_k[:, None], u_past * w_q[:, None]), 0)
    predicted, answer = tl.split(both)
    u = beta * (v - predicted)  # [BV]
    answer += u * tl.sum(tl.where(event == 0, w_q, 0.0), 0)
    # A ring without room is a caller's mistake; no number may come of it.
    answer = tl.where(count < L, answer, float("nan"))
    tl.store(out + (row * HV + head) * V + value, answer, mask=in_v)
    if count < L:
        tl.store(ring.u + here * V + value, u, mask=in_v)
