"""What tests of speculation share: drafts of a given text, answers, checks, rejected leftovers."""

import torch

from replayssm.engine import greedy_check
from replayssm.engine.decode import generate
from replayssm.engine.drafters import Drafts


class ScriptedDrafter:
    """Drafts of a given text: right up to a number of tokens that changes from round to round."""

    def __init__(self, answers, right):
        self.answers, self.right, self.rounds = answers, right, 0
        self.prompts = None

    def start(self, prompts, **about):
        self.prompts = [len(prompt) for prompt in prompts]

    def draft(self, texts, limits):
        rows, width = [], max(limits)
        for row, (text, limit) in enumerate(zip(texts, limits, strict=True)):
            at = max(0, len(text) - self.prompts[row])
            good = [*self.answers[row][at : at + limit], *[0] * width][:width]
            right = self.right[(self.rounds + row) % len(self.right)]
            rows.append([t if i < right else (t + 1) % 128 for i, t in enumerate(good)])
        self.rounds += 1
        tokens = torch.tensor(rows, dtype=torch.int64).view(len(rows), width)
        return Drafts(tokens=tokens, counts=list(limits))

    def keep(self, counts):
        pass

    def take(self, row):
        return self.prompts[row]

    def put(self, row, saved):
        self.prompts[row] = saved


def decoded(adapter, prompts, policy, tokens, **options):
    made = generate(adapter, torch.tensor(prompts), policy, max_new_tokens=tokens, **options)
    return [list(row.tokens) for row in made]


def tokens_of(results):
    return [list(result.generation.tokens) for result in results]


def check_greedy(adapter, prompts, policy, results):
    """Every token is the one that decoding chooses, or rounding explains it; those that are not."""
    found = greedy_check.check_greedy(adapter, prompts, tokens_of(results), policy)
    assert found.faults() == []
    return found.ties


@torch.inference_mode()
def poison_rejected(state):
    """NaN in what no row keeps: ring records past the cursor, keys past its end, tapes."""
    nan = float("nan")
    for layer in state.session.layer_indices:
        for _, cache in state.session.updates(layer):
            for row, filled in enumerate(cache.pos.tolist()):
                for record in cache.ring.values():
                    record[row, :, filled:] = nan
    for layer in state._cache.cache.layers:
        for storage in getattr(layer, "storage", ()):
            for row, position in enumerate(state.positions):
                storage[row, :, position:] = nan
    for convolution in state._tape._convolutions:
        convolution.tape.fill_(nan)
