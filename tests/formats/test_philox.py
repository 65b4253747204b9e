"""The random stream: known answers, addressing, independence of batch and neighbours."""

import pytest
import torch

from replayssm.formats.philox import philox4x32, random_bits

# 7 and 10 rounds are Random123's published vectors; the 5-round row has no outside source.
KNOWN = {
    (5, 0): "f10446c0 c841128b 23f43d26 6cb9f044",
    (7, 0): "5f6fb709 0d893f64 4f121f81 4f730a48",
    (10, 0): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    (5, 0xFFFFFFFF): "426f04bd 7fb64153 e8b29022 07ae0473",
    (7, 0xFFFFFFFF): "5207ddc2 45165e59 4d8ee751 8c52f662",
    (10, 0xFFFFFFFF): "408f276d 41c83b0e a20bc7c6 6d5451fd",
}


@pytest.mark.parametrize(("rounds", "word"), KNOWN)
def test_known_answers(rounds, word):
    words = philox4x32((word,) * 4, (word,) * 2, rounds)
    assert " ".join(f"{int(w):08x}" for w in words) == KNOWN[rounds, word]


def test_known_answer_with_distinct_words():
    """Random123's third vector: digits of pi as counter and key."""
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    words = philox4x32(counter, (0xA4093822, 0x299F31D0))
    assert " ".join(f"{int(w):08x}" for w in words) == "d16cfe09 94fdcceb 5001e420 24126ea1"


def draw(rows, shape=(3, 6, 10), *, bits=16, rounds=10, layer=5, stream=0):
    """Bits for rows given as (seed, flush index, sequence)."""
    seed, flush, sequence = torch.tensor(rows, dtype=torch.int64).unbind(1)
    return random_bits(
        (len(rows), *shape),
        seed=seed,
        layer=layer,
        stream=stream,
        flush_index=flush,
        sequence=sequence,
        bits=bits,
        rounds=rounds,
    )


@pytest.mark.parametrize(("bits", "rounds"), [(1, 5), (13, 7), (16, 10), (17, 10), (32, 10)])
def test_addressing_is_as_documented(bits, rounds):
    """Element by element from scalar Philox calls, at a size that is no multiple of the group."""
    H, R, C = shape = (2, 3, 7)
    rows = [(11, 0, 7), (0xFFFFFFFF, 3, 0xFFFFFFFE)]
    drawn = draw(rows, shape, bits=bits, rounds=rounds, layer=9, stream=2)
    assert drawn.dtype == (torch.int32 if bits <= 16 else torch.int64)
    for b, (seed, flush, sequence) in enumerate(rows):
        for h in range(H):
            for e in range(R * C):
                group, i = divmod(e, 8 if bits <= 16 else 4)
                words = philox4x32((flush, sequence, h, group), (seed, 9 + (2 << 24)), rounds)
                if bits <= 16:
                    word = int(words[i // 2]) >> (16 * (i % 2)) & 0xFFFF
                else:
                    word = int(words[i])
                assert int(drawn[b, h, e // C, e % C]) == word & (2**bits - 1)


def test_bits_follow_the_request_not_the_batch():
    rows = [(1, 4, 10), (1, 4, 11), (2, 0, 10), (1, 5, 10)]
    together = draw(rows)
    for order in ([3, 1, 0, 2], [2], [0, 0, 3]):
        assert draw([rows[i] for i in order]).equal(together[order])
    assert draw(rows, (5, 6, 10))[:, :3].equal(together), "more heads change no head's bits"


def test_every_part_of_the_address_changes_the_bits():
    base = draw([(1, 4, 10)])
    others = [
        draw([(2, 4, 10)]),
        draw([(1, 5, 10)]),
        draw([(1, 4, 11)]),
        draw([(1, 4, 10)], layer=6),
        draw([(1, 4, 10)], stream=1),
        draw([(1, 4, 10)], rounds=7),
    ]
    for other in others:
        assert (other == base).float().mean() < 0.02


def test_bits_are_uniform_and_uncorrelated():
    """Sizes chosen so that each bound is 5 standard errors; the stream is fixed, so this is too."""
    u = draw([(s, 0, 0) for s in range(8)], (4, 64, 64)).double().flatten() / 2**16
    n = u.numel()
    assert abs(u.mean() - (0.5 - 2.0**-17)) < 5 / (12 * n) ** 0.5
    z = (u - u.mean()) / u.std()
    for lag in (1, 2, 4, 7, 8, 64, 4096):
        assert abs((z[lag:] * z[:-lag]).mean()) < 5 / n**0.5
    counts = torch.bincount((u * 256).long(), minlength=256).double()
    chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert abs(chi2 - 255) < 5 * (2 * 255) ** 0.5


def test_wrong_requests_are_named():
    for kwargs, message in (
        (dict(layer=1 << 24), "layer 16777216"),
        (dict(stream=256), "stream 256"),
        (dict(bits=0), "bits 0"),
        (dict(bits=33), "bits 33"),
        (dict(rounds=6), "rounds 6"),
    ):
        with pytest.raises(ValueError, match=message):
            draw([(1, 1, 1)], **kwargs)
    with pytest.raises(ValueError, match=r"seed holds \[-1\]"):
        draw([(-1, 1, 1)])
    with pytest.raises(ValueError, match="sequence holds"):
        draw([(1, 1, 1 << 32)])
    ok = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"flush_index must be int64 \[2\]"):
        random_bits(
            (2, 1, 1, 1), seed=ok, layer=0, stream=0, flush_index=ok[:1], sequence=ok, bits=16
        )
