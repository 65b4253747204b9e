"""A test double for a model under the lockstep engine: the same interface, made-up logits, no
weights.

Arm a's logits are the reference's plus noise whose size depends on the policy and grows along the
text through an accumulated state, so that a run resumed with a wrong or stale state gives other
numbers. The FP32 arm equals the reference exactly, other ring lengths differ at rounding level.
"""

from types import SimpleNamespace

import torch

from replayssm.engine.probe import LayerStates

VOCABULARY = 61
SIZES = {
    "fp32": 0.0,
    "bf16": 8e-3,
    "fp16": 1e-3,
    "fp16-sr": 1.4e-3,
    "fp8": 3e-2,
    "fp8-sr": 4e-2,
    "nvfp4": 0.3,
}


class FakeLockstep:
    def __init__(self, spec, subject):
        self.spec, self.arms, self.poison, self.subject = spec, spec.arms(), subject.poison, subject

    def start(self, prompts, *, tokens, prompt_ids):
        self.ids = torch.tensor(prompt_ids)
        self.state = torch.zeros(len(self.arms), len(prompt_ids), dtype=torch.float64)
        self.position = 0
        self.last = prompts[:, -1].clone()

    def read(self, text):
        for window in text.split(self.spec.window, dim=1):
            yield self._window(window, torch.roll(window, -1, 1))

    def generate(self, tokens, sampler):
        for at in range(0, tokens, self.spec.window):
            width = min(self.spec.window, tokens - at)
            chosen = [self.last]
            for _ in range(width):
                chosen.append((chosen[-1] * 7 + self.position + sampler.seed) % VOCABULARY)
            text = torch.stack(chosen, 1)
            self.last = text[:, -1]
            yield self._window(text[:, :-1], text[:, 1:])

    def _window(self, tokens, targets):
        prompts, width = tokens.shape
        where = torch.arange(self.position, self.position + width)
        words = torch.arange(VOCABULARY)
        angle = (
            tokens[..., None] * 1.7 + where[:, None] * 0.37 + self.ids[:, None, None] + words * 2.1
        )
        reference = (3.0 * torch.sin(angle)).float()  # [P, T, V]
        rows = [reference]
        for index, arm in enumerate(self.arms):
            size = self.size(arm)
            walk = self.state[index][:, None] + torch.cumsum(torch.cos(tokens * 1.0 + index), 1)
            self.state[index] = walk[:, -1]
            growth = size * (1.0 + 0.05 * walk.abs())[..., None]
            noise = torch.cos(angle * (1.3 + 0.1 * index) + where[:, None] % arm.policy.ring_len)
            rows.append(reference + (growth * noise).float() if size else reference.clone())
        logits = torch.stack(rows)
        for row, prompt, position, value in self.poison:
            at = position - self.position
            if prompt in self.ids.tolist() and 0 <= at < width:
                logits[row, self.ids.tolist().index(prompt), at, 5] = value
        self.position += width
        return SimpleNamespace(logits=logits, targets=targets, tokens=tokens)

    def size(self, arm):
        if not self.subject.live:
            return 0.0 if self.subject.live is None else 1e-3
        if arm.fault:
            return 5.0 * arm.fault
        parts = (arm.policy.checkpoint, arm.policy.read_copy)
        total = sum(SIZES[p.label] for p in parts if p is not None)
        return total + (1e-6 if arm.control == "other_ring_len" else 0.0)

    def measure_states(self):
        """Two heads a layer; errors grow with the walk, the reference's are zero."""
        sizes = torch.tensor([0.0] + [self.size(arm) for arm in self.arms])
        walk = torch.cat([torch.zeros(1, len(self.ids)), self.state.float().abs()])
        error = (sizes[:, None] * (1.0 + walk))[..., None].expand(-1, -1, 2).contiguous()
        copies = [False] + [arm.policy.read_copy is not None for arm in self.arms]
        missing = ~torch.tensor(copies)[:, None, None]
        decay = torch.tensor([-0.1, -0.0001], dtype=torch.float64).expand(len(self.ids), 2)
        return [
            LayerStates(
                layer=layer,
                checkpoint_error=error * (layer + 1),
                read_error=error.masked_fill(missing, torch.nan),
                output_error=error / 2,
                state_norm=torch.ones_like(error),
                underflowed=torch.zeros_like(error),
                saturated=self._saturated_at(layer),
                log_decay=decay,
                writes=torch.full_like(error, 1.0 + self.position / 16).double(),
            )
            for layer in self.layers
        ]

    layers = (0, 1)

    def saturated(self):
        return sum(self._saturated_at(layer) for layer in self.layers)

    def _saturated_at(self, layer):
        """Grows along the text for FP16 arms only."""
        fp16 = [False] + [arm.policy.checkpoint.label == "fp16" for arm in self.arms]
        counts = torch.tensor(fp16) * (self.position // 32 + layer)
        return counts[:, None].expand(-1, len(self.ids))

    def engine_state(self):
        return {
            "state": self.state,
            "ids": self.ids,
            "last": self.last,
            "at": torch.tensor(self.position),
        }

    def load_engine_state(self, saved):
        self.state, self.ids, self.last = saved["state"].clone(), saved["ids"], saved["last"]
        self.position = int(saved["at"])


class FakeSubject:
    """`poison`: (arm + 1, prompt, position, value) logits to spoil. `live`: False or None: policies
    ignored.
    """

    device = torch.device("cpu")
    stop_tokens = frozenset({7})

    def __init__(self, name="fake", *, max_positions=None, poison=(), live=True):
        self.name, self.max_positions, self.poison, self.live = name, max_positions, poison, live

    def digests(self):
        return {"weights": f"fake {self.name}", "tokenizer": "fake"}

    def encode(self, text):
        return [byte % VOCABULARY for byte in text.encode()]

    def costs(self, arm):
        bits = {
            "fp32": 4.0,
            "fp16": 2.0,
            "fp16-sr": 2.0,
            "bf16": 2.0,
            "fp8": 1.03,
            "fp8-sr": 1.03,
            "nvfp4": 0.56,
        }
        sizes = [bits[p.label] for p in (arm.policy.checkpoint, arm.policy.read_copy) if p]
        return {
            "bytes_per_state_element": sum(sizes),
            "bytes_per_token": 4096 * (sizes[-1] + sizes[0] / arm.policy.ring_len),
        }

    def lockstep(self, spec):
        return FakeLockstep(spec, self)

    def free_run(self, spec, prompts, prompt_ids):
        """Every arm writes the same, but coarse ones another token at a place of their own."""
        free = spec.free_running
        ids = torch.tensor(prompt_ids)[:, None]
        text = (prompts[:, -1:] + 11 * torch.arange(free.tokens) + ids * 3) % VOCABULARY
        rows = [text]
        for index, arm in enumerate(spec.free_arms()):
            row = text.clone()
            if FakeLockstep(spec, self).size(arm) > 1e-2:
                row[:, index + 1 :] = (row[:, index + 1 :] + 5) % 6
            rows.append(row)
        return torch.stack(rows)

    def backends(self, spec):
        return "fake"

    def effective(self, engine):
        return {"backends": ["fake"]}
