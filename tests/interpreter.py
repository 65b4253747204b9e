"""Where kernels run in a test: compiled on a GPU if there is one, or in Triton's interpreter.

Owns how such tests are marked, when one that needs the interpreter is skipped, and its pace. Knows
some of Triton's insides, and no kernel of ours.
"""

import inspect

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = "triton" if DEVICE == "cuda" else "triton (interpreted)"  # the backend in effect

# Of tests of kernels. The interpreter computes with NumPy, which warns where a GPU does not: x / 0,
# Inf - Inf.
KERNEL_MARKS = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]
if DEVICE == "cuda":
    KERNEL_MARKS.append(pytest.mark.gpu)


def needs_interpreter() -> None:
    """Skip unless Triton's interpreter runs here, and can loop up to a number in memory."""
    triton = pytest.importorskip("triton")
    if DEVICE == "cuda":
        pytest.skip("kernels are compiled for the GPU here")
    if triton.__version__.startswith("3.6"):
        pytest.skip("this interpreter loops over constants only (NumPy 2.4)")


def look_for_builtins_once() -> None:
    """Spare the interpreter a search through triton.language at every call of a device function.

    It replaces Triton's operations when a kernel starts, and looks for what is left to replace
    whenever the kernel calls a function: a third of the time of most tests, and there is never
    anything left. What is replaced, and by what, stays as it is. A Triton that does this otherwise
    is left alone.
    """
    try:
        from triton.language.core import is_builtin
        from triton.runtime import interpreter

        arguments = list(inspect.signature(interpreter._patch_builtin).parameters)
        replace = interpreter._patch_attr
    except (ImportError, AttributeError):
        return
    if arguments != ["pkg", "builder", "scope"]:
        return
    found: dict[object, list[str]] = {}

    def patch_builtin(pkg, builder, scope) -> None:
        if pkg not in found:
            found[pkg] = [name for name, value in inspect.getmembers(pkg) if is_builtin(value)]
        for name in found[pkg]:
            value = getattr(pkg, name)
            if not is_builtin(value):  # all are replaced together
                return
            replace(pkg, name, value, builder, scope)

    interpreter._patch_builtin = patch_builtin
