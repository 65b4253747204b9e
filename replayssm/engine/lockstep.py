"""Many policies on one text, in one batch: teacher-forced windows with FP32 logits of every arm.

Owns the batch layout (rows = arms x prompts, arm after arm, padding rows last), prefill and
hand-over, the order of windows, and the reference's own generation. Must not know how KL is
computed or stored: `study/` takes the logits of a window and drops them before the next.

All arms see the same tokens. Only recurrent layers tell rows apart; everything else is one forward
pass over all rows, so two rows with the same policy agree bit for bit. On CPU that holds only when
rows x window is a multiple of 8: rows in the tail of a matrix product take another summation order
(differences of 1e-6). Padding rows (copies of the reference) make it so. Layers of experts are the
exception on the CPU: how many rows an expert gets is up to the text, so rows of such models may
differ at that level; what the noise-floor row measures is then the floor.

A refreshed arm starts anew, every so many tokens, from the reference's exact recurrent state,
rounded once by its policy: its errors are never older than that, so what it still shows is not
accumulation. Attention keys and convolution inputs stay its own.

Positions count tokens of the whole text from 0; the logits at position i predict token i + 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from replayssm.engine.arms import Arm, check_arms
from replayssm.engine.memory import keep_freed_memory
from replayssm.engine.probe import LayerStates, StateProbe
from replayssm.engine.sampling import Sampler
from replayssm.engine.stream import Stream
from replayssm.models.adapter import Adapter
from replayssm.state_update import PREFILL_BACKEND

ROW_MULTIPLE = 8
UNKNOWN_TOKEN = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """One window of all arms.

    start: position of the first token of the window.
    tokens: [prompts, T] the tokens that were read.
    targets: [prompts, T] the tokens that follow; UNKNOWN_TOKEN where the text ends.
    logits: [arms, prompts, T, vocabulary] FP32, valid until the next window.
    """

    start: int
    tokens: Tensor
    targets: Tensor
    logits: Tensor

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.tokens.shape[1])


class Lockstep:
    """Arms in lockstep on one model (see module docstring).

    probe: also keep what `measure_states` needs.
    graphs: whether windows are replayed from CUDA graphs: "auto", "on" or "off" (`graphs.py`).

    `start(prompts)` begins a text and forgets the one before; then iterate `read(tokens)`
    (teacher-forced on a given text) or `generate(n)` (on tokens the FP32 reference chooses).
    """

    def __init__(
        self,
        adapter: Adapter,
        arms: Sequence[Arm],
        *,
        window: int = 16,
        backend: str = "auto",
        probe: bool = False,
        graphs: str = "auto",
    ):
        check_arms(arms, window)
        self.adapter = adapter
        self.arms = tuple(arms)
        self.window = window
        self.backend = backend
        self.graphs = graphs
        self._with_probe = probe
        self._probe: StateProbe | None = None

    # -- a text begins -----------------------------------------------------------------------------

    @torch.inference_mode()
    def start(
        self, prompts: Tensor, *, tokens: int, prompt_ids: Sequence[int] | None = None
    ) -> None:
        """Prefill `prompts` [P, T0 >= 1] (int64, equal lengths) and hand over to every arm.

        tokens: how many more tokens will be read or generated; sizes storage and padding rows.
        prompt_ids: one id per prompt, the sequence number of random bits and sampling (default 0,
            1, ..).

        One row per prompt is run: prefill rounds nothing, so its state is the same for every arm.
        """
        self._prepare(prompts.shape, tokens, prompt_ids)
        # The generator's stream runs the prompt; the arms' stream continues it. Whether the
        # generator itself goes on is known when the first window is asked for.
        self._last_logits = self._generator.prefill(prompts)
        self._stream.continue_from(self._generator)
        self._choice: Tensor | None = None

    def _prepare(self, shape: Sequence[int], tokens: int, prompt_ids: Sequence[int] | None) -> None:
        if self.adapter.device.type == "cpu":
            keep_freed_memory()
        if len(shape) != 2 or shape[0] < 1 or shape[1] < 1:
            raise ValueError(f"prompts must be [prompts >= 1, tokens >= 1], got {tuple(shape)}")
        if tokens < 1:
            raise ValueError(f"at least one token must follow the prompt, got {tokens}")
        prompts, prompt_length = shape
        self.prompt_ids = tuple(range(prompts)) if prompt_ids is None else tuple(prompt_ids)
        if len(self.prompt_ids) != prompts:
            raise ValueError(f"{len(self.prompt_ids)} prompt ids for {prompts} prompts")
        self.prompt_length = prompt_length
        self.tokens = tokens
        capacity = prompt_length + tokens
        self.adapter.check_length(capacity)
        groups = [arm.rows(self.prompt_ids) for arm in self.arms]
        rows = len(self.arms) * prompts
        padding = -rows % self._row_multiple(tokens)
        if padding:
            copies = [self.prompt_ids[row % prompts] for row in range(padding)]
            groups.append(self.arms[0].rows(copies))
        self.padding_rows = padding
        self._stream = Stream(
            self.adapter,
            groups,
            source=[row % prompts for row in range(rows + padding)],
            capacity=capacity,
            backend=self.backend,
            graphs=self.graphs,
        )
        self._source = torch.tensor(self._stream.source, device=self.adapter.device)
        self._generator = Stream(
            self.adapter,
            [self.arms[0].rows(self.prompt_ids)],
            source=range(prompts),
            capacity=capacity,
            backend=self.backend,
            graphs=self.graphs,
        )
        if self._with_probe:
            self._probe = StateProbe(
                self._stream.session,
                prompts=prompts,
                schedules=[(arm.policy.ring_len, arm.refresh) for arm in self.arms],
            )

    def _row_multiple(self, tokens: int) -> int:
        """What rows must be a multiple of, for rows x T to be one of ROW_MULTIPLE throughout."""
        lengths = {min(self.window, tokens), tokens % self.window} - {0}
        return max(ROW_MULTIPLE // gcd(ROW_MULTIPLE, length) for length in lengths)

    # -- windows -----------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Tokens read so far, prompt included."""
        return self._stream.position

    def read(self, text: Tensor) -> Iterator[Window]:
        """Teacher-forced windows over `text` [P, N], the tokens that follow what was read so far.

        The target of the last token is unknown. Stopping early leaves the engine after the last
        window.
        """
        text = text.to(self.adapter.device)
        self._check_remaining(text.shape)
        unknown = text.new_full((text.shape[0], 1), UNKNOWN_TOKEN)
        targets = torch.cat([text[:, 1:], unknown], dim=1)
        for at in range(0, text.shape[1], self.window):
            span = slice(at, at + self.window)
            yield self._run(text[:, span], targets[:, span])

    def generate(self, tokens: int, sampler: Sampler | None = None) -> Iterator[Window]:
        """Windows over `tokens` tokens that the reference chooses as it goes (default: greedy).

        The reference generates a window token by token; then every arm, the reference row included,
        reads it.
        """
        sampler = sampler or Sampler()
        self._check_remaining((len(self.prompt_ids), tokens))
        if self._generator.position != self.position:
            raise ValueError("generate() cannot go on from a text that was read; start() anew")
        for at in range(0, tokens, self.window):
            chosen = self._generate_window(min(self.window, tokens - at), sampler)
            yield self._run(chosen[:, :-1], chosen[:, 1:])

    def _check_remaining(self, shape: Sequence[int]) -> None:
        remaining = self.prompt_length + self.tokens - self.position
        if len(shape) != 2 or shape[0] != len(self.prompt_ids) or not 1 <= shape[1] <= remaining:
            raise ValueError(
                f"the text must be [{len(self.prompt_ids)} prompts, 1 to {remaining} tokens], "
                f"got {tuple(shape)}"
            )
        # Rows are padded for whole windows and for the remainder announced to start().
        if shape[1] % self.window and shape[1] != remaining:
            raise ValueError(
                f"{shape[1]} tokens are not whole windows of {self.window} and not the rest of "
                "the text"
            )

    @torch.inference_mode()
    def _generate_window(self, length: int, sampler: Sampler) -> Tensor:
        """The next `length` tokens and the one after them, [P, length + 1]."""
        if self._choice is None:
            self._generator.hand_over()
            self._choice = self._choose(self._last_logits, sampler)
        chosen = [self._choice]
        for _ in range(length):
            logits = self._generator.step(chosen[-1][:, None])
            chosen.append(self._choose(logits[:, -1], sampler))
        self._choice = chosen[-1]
        return torch.stack(chosen, dim=1)

    def _choose(self, logits: Tensor, sampler: Sampler) -> Tensor:
        position = self._generator.position - 1
        return sampler.choose(logits, prompts=self.prompt_ids, position=position)

    @torch.inference_mode()
    def _run(self, tokens: Tensor, targets: Tensor) -> Window:
        arms, prompts = len(self.arms), len(self.prompt_ids)
        start = self.position
        self._refresh(start - self.prompt_length)
        logits = self._stream.step(tokens[self._source])
        if self._probe is not None:
            self._probe.advance(tokens.shape[1])
        logits = logits[: arms * prompts].view(arms, prompts, *logits.shape[1:])
        return Window(start=start, tokens=tokens, targets=targets, logits=logits)

    def _refresh(self, tokens: int) -> None:
        """Replace the states of arms that are due after `tokens` tokens."""
        due = [
            group
            for group, arm in enumerate(self.arms)
            if arm.refresh is not None and tokens and tokens % arm.refresh == 0
        ]
        if not due:
            return
        for layer in self.layers:
            pairs = self._stream.session.updates(layer)
            update, cache = pairs[0]
            exact = update.state(cache)
            for group in due:
                update, cache = pairs[group]
                update.load(cache, exact)

    # -- looking inside, and resuming --------------------------------------------------------------

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the recurrent layers."""
        return self._stream.session.layer_indices

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends in effect, never "auto"; only after `start` or `load_engine_state`."""
        return self._stream.session.backends

    @torch.inference_mode()
    def states(self, layer: int) -> Tensor:
        """Effective recurrent state of every arm, FP32 [arms, prompts, *state shape]."""
        return torch.stack(self._stream.session.states(layer)[: len(self.arms)])

    @torch.inference_mode()
    def measure_states(self) -> list[LayerStates]:
        """Errors of every recurrent layer and head against the reference, after the last window.

        Only with `probe`, where every arm has just flushed. An arm that is due for a refresh has
        not been refreshed yet.
        """
        assert self._probe is not None, "this lockstep was made without a probe"
        return self._probe.measure()

    def saturated(self) -> Tensor:
        """Elements that saturated when written so far, of all layers: int64 [arms, prompts]."""
        counts = (self._stream.session.saturated(layer)[: len(self.arms)] for layer in self.layers)
        return sum(torch.stack(count).to(self.adapter.device) for count in counts)

    def effective(self) -> dict:
        """What is really in effect, read back: for provenance, never for a label.

        "replaced": per function of the library, what would have run in its place otherwise;
        "dtypes": per arm, the dtype of every stored tensor of the first recurrent layer;
        "cache": dtypes of the library's own cache (attention, convolution inputs); "backends": per
        arm; "prefill": the backend of prefill, whatever the arms' is; "graphs": whether windows
        are replayed from CUDA graphs, and why not.
        """
        session, first = self._stream.session, self.layers[0]
        dtypes = {}
        for name, tensor in self._stream.tensors().items():
            dtypes[name] = str(tensor.dtype).removeprefix("torch.")
        cache = {name.split(".")[2]: dtypes[name] for name in dtypes if name.startswith("cache.")}
        stored = {}
        for group, arm in enumerate(self.arms):
            prefix = f"session.{first}.{group}."
            stored[arm.label] = {
                name.removeprefix(prefix): dtype
                for name, dtype in dtypes.items()
                if name.startswith(prefix)
            }
        return {
            "replaced": dict(session.replaced),
            "dtypes": stored,
            "cache": cache,
            "backends": {
                arm.label: list(session.group_backends(group))
                for group, arm in enumerate(self.arms)
            },
            "prefill": PREFILL_BACKEND,
            "graphs": self._stream.graphs.describe(self._stream.cache),
        }

    def engine_state(self) -> dict[str, Tensor]:
        """Everything needed to go on from here in another process, as named tensors (copies).

        Only after the first window.
        """
        assert self.position > self.prompt_length, "nothing has been read since start()"
        tensors = {"shape": torch.tensor([len(self.prompt_ids), self.prompt_length, self.tokens])}
        tensors["prompt_ids"] = torch.tensor(self.prompt_ids)
        tensors["last_logits"] = self._last_logits
        if self._choice is not None:
            tensors["choice"] = self._choice
        streams = {"stream": self._stream}
        if self._generator.session.decoding:
            streams["generator"] = self._generator
        for name, stream in streams.items():
            tensors |= {f"{name}.{key}": value for key, value in stream.tensors().items()}
        if self._probe is not None:
            tensors |= {f"probe.{key}": value for key, value in self._probe.tensors().items()}
        return {key: value.detach().clone() for key, value in tensors.items()}

    @torch.inference_mode()
    def load_engine_state(self, tensors: dict[str, Tensor]) -> None:
        """Go on where `engine_state` was taken: same model, arms, window and backend."""
        prompts, prompt_length, following = tensors["shape"].tolist()
        self._prepare((prompts, prompt_length), following, tensors["prompt_ids"].tolist())
        device = self.adapter.device
        self._last_logits = tensors["last_logits"].to(device)
        self._choice = tensors["choice"].to(device) if "choice" in tensors else None
        parts = {"stream": self._stream, "generator": self._generator, "probe": self._probe}
        for name, part in parts.items():
            prefix = f"{name}."
            mine = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            if mine:  # a text that is read has no generator
                part.load_tensors(mine)
