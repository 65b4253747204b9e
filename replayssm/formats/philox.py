"""Random bits for stochastic rounding: the counter-based generator Philox-4x32.

Owns the generator and the addressing of its stream. A bit pattern belongs to an *element of a
request's state at a flush*, not to a memory slot: cache slot, batch neighbours, batch size and
launch shape cannot change it. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(SC'11). `numpy.random.Philox` is the 4x64-bit generator of that family, a different stream.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm.formats.rounding import PHILOX_ROUNDS

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW32 = 0xFFFFFFFF


def philox4x32(
    counter: Sequence[Tensor | int], key: Sequence[Tensor | int], rounds: int = 10
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit random words per (counter, key).

    Args:
        counter: four words, int64 tensors with values in [0, 2^32) (or ints) that broadcast
            together.
        key: two words, likewise.
        rounds: 5, 7 or 10.

    Returns:
        Four int64 tensors of the broadcast shape, values in [0, 2^32).
    """
    if rounds not in PHILOX_ROUNDS:
        raise ValueError(f"philox rounds {rounds!r} is not one of 5, 7, 10")
    c0, c1, c2, c3 = (torch.as_tensor(c, dtype=torch.int64) for c in counter)
    k0, k1 = key
    # Operands keep their own shapes, so the first rounds run on small tensors. int64 products
    # wrap, which leaves all 64 bits right; c1 and c3 carry garbage above bit 31 until the masks of
    # the next round.
    for _ in range(rounds):
        p0, p1 = c0 * _M0, c2 * _M1
        c0 = ((p1 >> 32) ^ (c1 ^ k0)).bitwise_and_(_LOW32)
        c2 = ((p0 >> 32) ^ (c3 ^ k1)).bitwise_and_(_LOW32)
        c1, c3 = p1, p0
        k0, k1 = (k0 + _W0) & _LOW32, (k1 + _W1) & _LOW32
    words = torch.broadcast_tensors(c0, c1 & _LOW32, c2, c3 & _LOW32)
    return words[0], words[1], words[2], words[3]


def random_bits(
    shape: Sequence[int],
    *,
    seed: Tensor,
    layer: int,
    stream: int,
    flush_index: Tensor,
    sequence: Tensor,
    bits: int,
    rounds: int = 10,
) -> Tensor:
    """Random bits for every element of a batch of states.

    Key = (seed, layer + stream * 2^24); counter = (flush index, sequence, head, group). The
    element at row * C + column of a head's state, number e, finds its bits so: up to 16 bits, a
    word serves two elements, low half first, and group = e // 8; beyond 16, a word serves one and
    group = e // 4. Of the half or the word the low `bits` bits are taken.

    Args:
        shape: (B, H, R, C) of the state.
        seed, flush_index, sequence: [B] int64, values in [0, 2^32).
        layer: 0 to 2^24 - 1.
        stream: 0 to 255; separates the storages of one layer that round at the same flush.
        bits: 1 to 32.
        rounds: Philox rounds, 5, 7 or 10.

    Returns:
        [B, H, R, C] with values in [0, 2^bits): int32 up to 16 bits, int64 beyond. Not to be
        changed in place: an equal request may get the same tensor.
    """
    if not 0 <= layer < 1 << 24:
        raise ValueError(f"layer {layer} is not in [0, 2^24)")
    if not 0 <= stream < 1 << 8:
        raise ValueError(f"stream {stream} is not in [0, 256)")
    if not 1 <= bits <= 32:
        raise ValueError(f"bits {bits} is not in [1, 32]")
    B = shape[0]
    words = {"seed": seed, "flush_index": flush_index, "sequence": sequence}
    for name, value in words.items():
        if value.shape != (B,) or value.dtype != torch.int64:
            raise ValueError(f"{name} must be int64 [{B}], not {value.dtype} {list(value.shape)}")
    device = seed.device
    # Arms of a study that share a seed ask for the same bits one after the other. What the answer
    # depends on is compared by value, so this changes nothing but time; not on a GPU, where
    # looking at values would wait for the device.
    request = None
    if device.type == "cpu":
        values = tuple(tuple(value.tolist()) for value in words.values())
        request = (tuple(shape), values, layer, stream, bits, rounds)
        if _last_drawn and _last_drawn[0] == request:
            return _last_drawn[1]
    for name, value in words.items():
        if B and (value.min() < 0 or value.max() > _LOW32):
            raise ValueError(f"{name} holds {value.tolist()}, outside [0, 2^32)")
    out = _draw(shape, seed, layer + (stream << 24), flush_index, sequence, bits, rounds)
    if request is not None:
        _last_drawn[:] = request, out
    return out


# The last request on the CPU and its answer, or nothing.
_last_drawn: list = []


def _draw(
    shape: Sequence[int],
    seed: Tensor,
    second_key: int,
    flush_index: Tensor,
    sequence: Tensor,
    bits: int,
    rounds: int,
) -> Tensor:
    B, H, R, C = shape
    per_group = 8 if bits <= 16 else 4
    groups = -(-R * C // per_group)
    device = seed.device
    words = philox4x32(
        (
            flush_index.view(B, 1, 1),
            sequence.view(B, 1, 1),
            torch.arange(H, device=device).view(1, H, 1),
            torch.arange(groups, device=device).view(1, 1, groups),
        ),
        (seed.view(B, 1, 1), second_key),
        rounds,
    )
    if bits <= 16:
        # As 16-bit halves, low half first; the signs that widening brings are masked off.
        patterns = torch.stack([word.to(torch.int32) for word in words], dim=-1)
        out = patterns.view(torch.int16).to(torch.int32)  # [B, H, groups, 8]
    else:
        out = torch.stack(words, dim=-1)
    out &= (1 << bits) - 1
    return out.view(B, H, groups * per_group)[..., : R * C].reshape(B, H, R, C)
