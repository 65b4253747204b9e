"""Swapping functions under Hugging Face layers: per instance, reversible, never silent.

Owns the two kinds of replacement and their exact undoing: module-level functions (one dispatcher
per name, present while at least one patch is active anywhere in the process) and `forward` of
single module instances. Functions are recurrences, which a layer must reach exactly once, or side
functions, which a claimed layer may have in its own way. Must not know policies or caches.

transformers looks its recurrence functions up by name in the modeling module each time a layer
runs, so replacing the module attribute reaches every layer of every model of that architecture in
the process. The dispatcher therefore asks which layer instance is running, and runs the original
for every layer that no active patch claims. Whatever the library resolved the name to (its torch
code, or a kernel from fla, mamba_ssm or the hub) is bypassed for claimed layers and reported by
`resolved_implementation`.
"""

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from replayssm.models.errors import HookNotLiveError, UnsupportedInputError

# call(function name, args, kwargs) -> what the replaced function would have returned
Call = Callable[[str, tuple, dict], Any]

OPERATOR = "operator"  # what `reach_operator` calls; no function of a module has this name

_ABSENT = object()
_lock = threading.RLock()
# (module name, function name) -> [original, number of active patches, dispatcher]
_dispatchers: dict[tuple[str, str], list] = {}


class _Running(threading.local):
    """The claimed layer call that is executing in this thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_LayerCall] = []


class _LayerCall:
    """One execution of a claimed layer: where its recurrence goes, whether it got there, and what
    it has instead of side functions, by name.
    """

    def __init__(self, call: Call, aside: Mapping[str, Callable]):
        self.call, self.aside = call, aside
        self.reached = 0


_running = _Running()


def resolved_implementation(function: Callable) -> str:
    """Qualified name of what transformers would have run under a decorated module function.

    The decorator keeps its choice in a closure variable; a plain function is its own
    implementation.
    """
    chosen = function
    if inspect.isfunction(function):
        chosen = inspect.getclosurevars(function).nonlocals.get("implementation", function)
    module = getattr(chosen, "__module__", type(chosen).__module__)
    return f"{module}.{getattr(chosen, '__qualname__', type(chosen).__qualname__)}"


@contextmanager
def replaced_functions(module_name: str, names: tuple[str, ...], *, aside: bool = False):
    """While active, functions `names` of `module_name` go to the claimed layer that is running;
    with `aside` as side functions.

    Yields {name: what the library would have run}. Nested and overlapping uses share one
    dispatcher; the last to leave restores the original object.
    """
    make = _make_side_dispatcher if aside else _make_dispatcher
    module = importlib.import_module(module_name)
    held: list[str] = []
    try:
        with _lock:
            for name in names:
                _hold(module, name, make)
                held.append(name)
            originals = {name: _dispatchers[module_name, name][0] for name in names}
        yield {name: resolved_implementation(original) for name, original in originals.items()}
    finally:
        with _lock:
            for name in held:
                _release(module, name)


def _hold(module: Any, name: str, make: Callable[[str, Callable], Callable]) -> None:
    key = (module.__name__, name)
    if key not in _dispatchers:
        original = getattr(module, name)
        dispatcher = make(name, original)
        _dispatchers[key] = [original, 0, dispatcher]
        setattr(module, name, dispatcher)
    _dispatchers[key][1] += 1


def _release(module: Any, name: str) -> None:
    key = (module.__name__, name)
    original, count, dispatcher = _dispatchers[key]
    if count > 1:
        _dispatchers[key][1] = count - 1
        return
    del _dispatchers[key]
    # Someone who replaced the name after us, and is still there, is left alone: their wrapper ends
    # in our dispatcher, which runs the original when no layer is claimed.
    if getattr(module, name) is dispatcher:
        setattr(module, name, original)


def _make_dispatcher(name: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def dispatcher(*args: Any, **kwargs: Any) -> Any:
        if not _running.stack:
            return original(*args, **kwargs)
        running = _running.stack[-1]
        running.reached += 1
        return running.call(name, args, kwargs)

    return dispatcher


def reach_operator(inputs: Any, *, continued: bool) -> Tensor:
    """What the claimed layer that is running has for its recurrence, from inputs of the operator: a
    `body` (see `claimed_layer`) calls it once, as library code calls a replaced function.
    """
    running = _running.stack[-1]
    running.reached += 1
    return running.call(OPERATOR, (inputs,), {"continued": continued})


def _make_side_dispatcher(name: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def dispatcher(*args: Any, **kwargs: Any) -> Any:
        replacement = _running.stack[-1].aside.get(name) if _running.stack else None
        if replacement is None:
            return original(*args, **kwargs)
        return replacement(original, *args, **kwargs)

    return dispatcher


@contextmanager
def replaced_forward(module: nn.Module, make: Callable[[Callable], Callable]):
    """While active, `module.forward` is `make(forward)`; the instance attribute is restored
    exactly.

    `forward` is what the instance would run without any of our patches: a patch inside a patch on
    the same module replaces the outer one for its duration instead of running inside it.
    """
    before = module.__dict__.get("forward", _ABSENT)
    bare = getattr(before, "_replayssm_bare", module.forward)
    wrapper = make(bare)
    wrapper._replayssm_bare = bare
    module.__dict__["forward"] = wrapper
    try:
        yield
    finally:
        if module.__dict__.get("forward") is wrapper:
            if before is _ABSENT:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before


def never_one_token(forward: Callable) -> Callable:
    """A forward of (hidden, gate), both [B, T, W], that sees a single token as two and keeps one.

    For `replaced_forward` on a module that loses the token axis when T = 1.
    """

    @functools.wraps(forward)
    def wrapper(hidden: Tensor, gate: Tensor) -> Tensor:
        if hidden.shape[1] > 1:
            return forward(hidden, gate)
        return forward(hidden.repeat(1, 2, 1), gate.repeat(1, 2, 1))[:, :1]

    return wrapper


@contextmanager
def claimed_layer(
    mixer: nn.Module,
    call: Call,
    *,
    where: str,
    aside: Mapping[str, Callable] | None = None,
    body: Callable[[nn.Module, Callable], Callable] | None = None,
):
    """While active, the recurrence of this layer instance goes to `call`, and side functions to
    those of `aside`, by name, which get the original as their first argument. `body` makes what is
    run in place of its forward, from the layer and that; it calls `reach_operator`.

    Refuses what would make the numbers wrong without an error: padding inside a row and a layer
    that finishes without its recurrence having reached us (exactly once).
    """

    def make(forward: Callable) -> Callable:
        parameters = inspect.signature(forward).parameters
        if "attention_mask" not in parameters:
            raise HookNotLiveError(
                f"{where}: the layer's forward takes no attention_mask; unknown version"
            )
        mask_index = list(parameters).index("attention_mask")
        run = forward if body is None else body(mixer, forward)

        @functools.wraps(forward)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            mask = args[mask_index] if len(args) > mask_index else kwargs.get("attention_mask")
            if mask is not None:
                raise UnsupportedInputError(
                    f"{where} got a padding mask; padding would enter the recurrent state: run "
                    "prompts of equal length together, without padding"
                )
            running = _LayerCall(call, aside or {})
            _running.stack.append(running)
            try:
                out = run(*args, **kwargs)
            finally:
                _running.stack.pop()
            if running.reached != 1:
                raise HookNotLiveError(
                    f"{where} reached our state update {running.reached} times instead of once; a "
                    "replaced kernel or an unknown version of transformers is in the way"
                )
            return out

        return wrapper

    with replaced_forward(mixer, make):
        yield
