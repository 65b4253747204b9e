"""Random bits on the device: `formats/philox.py` for the tile that a program holds.

Owns the generator and its addressing; which storages draw is the caller's. One call of the
generator serves eight neighbouring columns (four above 16 bits) and stays in the thread that
needs them.
"""

import triton
import triton.language as tl


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1, ROUNDS: tl.constexpr):
    """Four uint32 words per counter (c0..c3) and key (k0, k1), uint32 tensors that broadcast."""
    for _ in tl.static_range(ROUNDS):
        # One wide product gives both halves.
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def random_bits(
    key,
    row,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """BITS random bits for each element of a tile, uint32 [R, WIDTH].

    Args:
        key: (seed, layer + stream * 2^24, flush index, sequence), integer scalars.
        row: [R] rows of a slot: row r of head h is h * ROWS + r.
        ROWS, COLS: of one head's matrix; WIDTH: columns of the tile, a power of two >= 8.
    """
    R: tl.constexpr = row.shape[0]
    PER_GROUP: tl.constexpr = 8 if BITS <= 16 else 4
    k0, k1 = key[0].to(tl.uint32), key[1].to(tl.uint32)
    flush, sequence = key[2].to(tl.uint32), key[3].to(tl.uint32)
    head = (row // ROWS).to(tl.uint32)[:, None]
    element = (row % ROWS)[:, None] * COLS
    if COLS % PER_GROUP == 0:
        group = element // PER_GROUP + tl.arange(0, WIDTH // PER_GROUP)[None, :]
        w0, w1, w2, w3 = philox4x32(flush, sequence, head, group.to(tl.uint32), k0, k1, ROUNDS)
        # [R, groups, 2, 2]: the four words of a group in order along the last two axes.
        bits = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        if BITS <= 16:
            bits = tl.join(bits.to(tl.uint16), (bits >> 16).to(tl.uint16))
        bits = tl.reshape(bits, [R, WIDTH]).to(tl.uint32)
    else:
        # A group crosses rows: every element calls for itself and keeps its own share.
        element += tl.arange(0, WIDTH)[None, :]
        group = (element // PER_GROUP).to(tl.uint32)
        w0, w1, w2, w3 = philox4x32(flush, sequence, head, group, k0, k1, ROUNDS)
        share = element % PER_GROUP
        word = share // (PER_GROUP // 4)
        bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
        if BITS <= 16:
            bits = tl.where(share % 2 == 1, bits >> 16, bits)
    return bits & ((1 << BITS) - 1)
