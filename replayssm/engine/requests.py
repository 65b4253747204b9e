"""A sequence that is continued in a batch: what is asked, where it stands, what comes back.

Owns these four records and what a request may ask for. Must not know how any of them is computed
(`batching`).

V: vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from replayssm.models.kv_cache import Cache


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One sequence to be continued.

    prompt: token ids, at least one.
    max_new_tokens: it is cut after that many.
    sequence: its number in random bits, of sampling and of stochastic rounding, in [0, 2^32).
    stop: called with the new tokens after each of them (stop tokens excepted); true ends it.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sequence: int = 0
    stop: Callable[[Sequence[int]], bool] | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt needs at least one token")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.sequence < 1 << 32:
            raise ValueError(f"sequence must be in [0, 2^32), got {self.sequence}")

    @property
    def room(self) -> int:
        """Tokens it may become long."""
        return len(self.prompt) + self.max_new_tokens


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a request generated: its place among the requests, the new ids, and why it ended.

    tokens: without the stop token. finish: "stop_token", "stop" (the request's own `stop`), or
    "length".
    """

    index: int
    tokens: tuple[int, ...]
    finish: str


@dataclass(kw_only=True)
class Lane:
    """A request that is being answered: how far it has been read, and what came of it."""

    index: int
    request: Request
    position: int  # tokens read so far, prompt included
    unread: list[int] = field(default_factory=list)  # of the prompt
    tokens: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class Row:
    """A sequence on its way into a lane, with its attention cache.

    Its recurrent state is either FP32, one tensor a layer (`states`), from a prefill, of which
    `logits` [V] are the last; or as stored under the policy, by name (`tensors`).
    """

    lane: Lane
    cache: Cache
    states: list[Tensor] | None = None
    logits: Tensor | None = None
    tensors: dict[str, Tensor] | None = None
