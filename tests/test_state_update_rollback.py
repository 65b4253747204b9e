"""Taking committed tokens back: a cursor moves, nothing else does, and decoding goes on exactly."""

import pytest
import torch
from recurrence_cases import PLAIN, make_cache, make_inputs, make_update, take_tokens

RECURRENCE = pytest.mark.parametrize("recurrence", PLAIN)


@RECURRENCE
@pytest.mark.parametrize("policy", ["fp32@12", "fp16-sr+nvfp4@12", "nvfp4@12:ring=fp16"])
def test_rows_go_on_as_if_they_had_never_read_what_is_taken_back(recurrence, policy):
    update = make_update(recurrence, policy)
    inputs = make_inputs(recurrence, PLAIN[recurrence], 3, 12)
    cache, clean = make_cache(update, 3), make_cache(update, 3)
    for one in (cache, clean):
        update.window(one, take_tokens(inputs, 0, 4))
        update.commit(one, 4)
    stored = {k: v.clone() for k, v in cache.state_dict().items() if "checkpoint" in k}
    for t in range(4, 8):  # one by one, each seeing those before it
        update.window(cache, take_tokens(inputs, t, t + 1))
        update.commit(cache, 1)
    update.rollback(cache, torch.tensor([4, 1, 0]))
    assert cache.pos.tolist() == [4, 7, 8]
    assert all(torch.equal(cache.state_dict()[k], v) for k, v in stored.items())
    for row, kept in enumerate((0, 3, 4)):
        again = clean.clone()
        if kept:
            update.window(again, take_tokens(inputs, 4, 4 + kept))
            update.commit(again, kept)
        following = take_tokens(inputs, 8, 11)
        mine = update.window(cache.clone(), following)[row]
        torch.testing.assert_close(mine, update.window(again, following)[row], rtol=0, atol=2e-5)
    update.rollback(cache, 0)
    assert cache.pos.tolist() == [4, 7, 8]


def test_what_is_folded_cannot_be_taken_back():
    update = make_update("mamba2", "fp32@6")
    inputs = make_inputs("mamba2", PLAIN["mamba2"], 2, 8)
    cache = make_cache(update, 2)
    update.step(cache, take_tokens(inputs, 0, 8))  # flushed after six
    with pytest.raises(ValueError, match=r"layer 3: cannot take back 3 tokens, the ring holds 2"):
        update.rollback(cache, 3)
    with pytest.raises(ValueError, match=r"cannot take back \[0, -1\] tokens"):
        update.rollback(cache, torch.tensor([0, -1]))
    assert cache.pos.tolist() == [2, 2]
    update.rollback(cache, 2)
    assert cache.pos.tolist() == [0, 0]
