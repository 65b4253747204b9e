"""One batch of rows moving through a text: a session, the library's cache, and the position.

Owns that these three move together. Must not know what the rows stand for: `lockstep.py` and
`decode.py` give them meaning.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm.engine.graphs import StepGraphs
from replayssm.models.adapter import Adapter
from replayssm.models.kv_cache import Cache, cache_tensors, filled_cache
from replayssm.models.session import ReplaySession, RowGroup

# Tokens a prefill pass reads at once: a long prompt must not need all its activations together.
PREFILL_CHUNK = 512

# On a GPU, Inf or NaN in a written state is counted there, and looked at after so many tokens: a
# look waits for the GPU, as whoever reads logits does anyway, but single tokens should not.
FINITE_CHECK_TOKENS = 512

# A pass is captured as a graph if at least so many like it may follow.
_WORTH_A_GRAPH = 32


class Stream:
    """Rows that are prefilled, handed over, and stepped. Callers use inference mode.

    `cache` is the library's own: attention and convolution inputs.

    source: for each decode row, the prefill row whose text it continues.
    capacity: tokens of attention storage set aside at the hand-over (it grows when needed).
    graphs: "auto", "on" or "off": whether steps are replayed from CUDA graphs (`graphs.py`). With
        graphs, logits are overwritten by the next step.
    """

    def __init__(
        self,
        adapter: Adapter,
        groups: Sequence[RowGroup],
        *,
        source: Sequence[int],
        capacity: int,
        backend: str = "auto",
        graphs: str = "auto",
    ):
        self.adapter = adapter
        self.session = ReplaySession(adapter, groups, backend=backend)
        self.graphs = StepGraphs(self.session, mode=graphs)
        self.source = list(source)
        self.capacity = capacity
        self.position = 0
        self._unchecked = 0
        self.cache = adapter.new_cache()

    def prefill(self, prompts: Tensor) -> Tensor:
        """Run `prompts` [P, T] with FP32 state; returns FP32 logits of the last token, [P, V]."""
        chunks = prompts.to(self.adapter.device).split(PREFILL_CHUNK, dim=1)
        with self.session:
            for chunk in chunks:
                logits = self.adapter.forward(
                    chunk, self.cache, start=self.position, last_only=True
                )
                self.position += chunk.shape[1]
        return logits[:, -1]

    def adopt(self, cache: Cache, prefilled: list[tuple[int, Tensor]]) -> None:
        """Go on in prefill as rows that others have read: their `cache`, and (tokens, FP32 state)
        of each recurrent layer; both by reference.
        """
        self.session.load_prefill(prefilled)
        self.cache, self.position = cache, prefilled[0][0]

    def hand_over(self) -> None:
        """End prefill: every row goes on under its own policy."""
        self.continue_from(self)

    def continue_from(self, other: "Stream") -> None:
        """Continue the prefill of `other` (which must still be in prefill, and is left so)."""
        tensors = cache_tensors(other.cache)
        self.session.hand_over(other.session.prefill_states(), source=self.source)
        self.cache = filled_cache(
            self.adapter.config, tensors, rows=self.source, capacity=self.capacity
        )
        self.position = other.position

    def step(self, tokens: Tensor) -> Tensor:
        """Read `tokens` [rows, T] under the policies; returns FP32 logits [rows, T, V].

        Raises NonFiniteStateError if a state that is written is not finite: with kernels, at most
        FINITE_CHECK_TOKENS tokens later (or T, if that is more), and by the end of `capacity`.
        """
        assert self.session.decoding, "hand_over() first"
        if tokens.shape[0] != len(self.source):
            raise ValueError(f"this stream decodes {len(self.source)} rows, got {tokens.shape[0]}")
        follow = (self.capacity - self.position) // tokens.shape[1]
        logits = self.graphs.step(
            tokens,
            self.cache,
            self._forward,
            cursor=self.cache.row_cursor,
            worthwhile=follow >= _WORTH_A_GRAPH,
        )
        self.position += tokens.shape[1]
        self._unchecked += tokens.shape[1]
        if self._unchecked >= FINITE_CHECK_TOKENS or self.position >= self.capacity:
            self.session.check_finite()
            self._unchecked = 0
        return logits

    def _forward(self, tokens: Tensor) -> Tensor:
        with self.session:
            return self.adapter.forward(tokens, self.cache, start=self.position)

    def tensors(self) -> dict[str, Tensor]:
        """Everything needed to go on from here, by name, as views. Only after the hand-over."""
        tensors = {"position": torch.tensor(self.position)}
        tensors |= {f"cache.{k}": v for k, v in cache_tensors(self.cache).items()}
        return tensors | {f"session.{k}": v for k, v in self.session.tensors().items()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Go on where `tensors` were taken, in a new stream with the same rows."""
        self.position = int(tensors["position"])
        device = self.adapter.device
        cache = {
            key.removeprefix("cache."): value.to(device)
            for key, value in tensors.items()
            if key.startswith("cache.")
        }
        self.cache = filled_cache(
            self.adapter.config, cache, rows=range(len(self.source)), capacity=self.capacity
        )
        self.session.load_tensors(
            {k.removeprefix("session."): v for k, v in tensors.items() if k.startswith("session.")},
            tokens=self.position,
        )
