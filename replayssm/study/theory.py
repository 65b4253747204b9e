"""What a stored state's rounding error should be: lines to lay over what was measured.

Owns the scalar theory of a state that decays by a per token and is rounded every L tokens: error of
one write, growth, plateau, stagnation, and how a state error shows in KL. Pure numpy; imports no
torch, reads no files and knows no figure.

One write of a format with unit roundoff u (half a spacing over the value) has a relative L2 error
of rho u for values spread over binades: rho = .425 to nearest (the error is uniform in a spacing),
.60 stochastically (variance twice that). A write's error decays with the state and the errors of
different writes are independent, so their squares add up to a geometric series:

    E(t) = rho u sqrt[(1 - a^2t) / (1 - a^2L)]        early    rho u sqrt(t / L)
                                                      plateau  rho u / sqrt(1 - a^2L)

and for gates that change from token to token to the sum `writes` = sum over writes j of
prod_{s > j} a_s^2 of `states.parquet`, E = rho u sqrt(writes), which counts the hand-over as a
write. A separate read copy is rewritten from the checkpoint at every flush and feeds back into
nothing: its error is that of one write, whatever t. Rounding to nearest *stagnates* where a window
changes the state by less than half a spacing, sqrt(1 - a^2L) < u: the changes are rounded away,
errors stop being independent, and the lines do not hold (they are then far too low).

These are lines, not bounds: inputs are taken as independent, and the delta rule contracts along its
keys beyond its gate, so its errors may stay below. Derivation: Higham & Mary (2019), Connolly,
Higham & Mary (2021) for the growth of independent errors; tests check the lines by simulation.

Shapes broadcast; log decays are natural, per token, <= 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

RHO_NEAREST, RHO_STOCHASTIC = 0.425, 0.60
_SQRT2, _SQRT3 = 2.0**0.5, 3.0**0.5

# Explicit significand bits of the formats whose spacing follows the value.
_MANTISSA_BITS = {"fp32": 23, "fp16": 10, "bf16": 7, "e4m3": 3, "e5m2": 2, "mxfp8": 3}
# Relative error of one write to nearest where spacing does not follow the value: even grids, and
# four-bit elements with too few levels for the rule. Gaussian matrices of 64 x 128, one draw; tests
# measure them again. INT8 depends on the largest element of its row of 128.
_GAUSSIAN_ERROR = {"int8": 6.6e-3, "nvfp4": 9.4e-2, "nvfp4-46": 8.6e-2, "mxfp4": 1.15e-1}


@dataclass(frozen=True, kw_only=True)
class WriteError:
    """What one write of a format does.

    error: relative L2 error, rho * u.
    half_spacing: u, half a spacing relative to a typical element; what a change must exceed.
    stochastic: whether rounding draws random bits: it then cannot stagnate.
    """

    error: float
    half_spacing: float
    stochastic: bool


def write_error(storage: Mapping) -> WriteError:
    """Error of one write of a storage as `Storage.to_dict` describes it.

    Raises ValueError for a format that the theory does not know (a block format spelled out).
    """
    name = storage["format"]
    name = name["name"] if isinstance(name, Mapping) else name
    stochastic = storage["rounding"] == "stochastic"
    if name in _MANTISSA_BITS:
        u = 2.0 ** -(_MANTISSA_BITS[name] + 1)
        rho = RHO_STOCHASTIC if stochastic else RHO_NEAREST
        return WriteError(error=rho * u, half_spacing=u, stochastic=stochastic)
    if name in _GAUSSIAN_ERROR:
        nearest = _GAUSSIAN_ERROR[name]
        # An error uniform in a spacing h has standard deviation h / sqrt(12).
        return WriteError(
            error=nearest * (_SQRT2 if stochastic else 1.0),
            half_spacing=_SQRT3 * nearest,
            stochastic=stochastic,
        )
    known = ", ".join([*_MANTISSA_BITS, *_GAUSSIAN_ERROR])
    raise ValueError(f"no theory for the format {name!r}; there is one for {known}")


# -- state error -----------------------------------------------------------------------------------
def predicted_error(write: WriteError, writes: ArrayLike) -> np.ndarray:
    """Relative error of a shared state after `writes` effective writes (see module docstring)."""
    return write.error * np.sqrt(np.asarray(writes, dtype=np.float64))


def shared_error(
    write: WriteError, tokens: ArrayLike, *, log_decay: ArrayLike, ring_len: int
) -> np.ndarray:
    """E(t): relative error of a shared state `tokens` after an exact one, at a constant decay."""
    return write.error * np.sqrt(_series(tokens, log_decay, ring_len))


def plateau_error(write: WriteError, *, log_decay: ArrayLike, ring_len: int) -> np.ndarray:
    """Where E(t) ends; infinite without decay."""
    return write.error * np.sqrt(_series(np.inf, log_decay, ring_len))


def read_copy_error(write: WriteError, tokens: ArrayLike) -> np.ndarray:
    """Error that a read copy adds to what is read: one write's, at any position."""
    return np.full(np.shape(tokens), write.error)


def _series(tokens: ArrayLike, log_decay: ArrayLike, ring_len: int) -> np.ndarray:
    """(1 - a^2t) / (1 - a^2L), which is t / L without decay."""
    t, g = np.broadcast_arrays(np.asarray(tokens, np.float64), np.asarray(log_decay, np.float64))
    if (g > 0).any():
        raise ValueError(f"log decays must be <= 0, the largest is {g.max()}")
    decays = g < 0
    safe = np.where(decays, g, -1.0)
    with np.errstate(invalid="ignore"):
        return np.where(
            decays, np.expm1(2.0 * t * safe) / np.expm1(2.0 * ring_len * safe), t / ring_len
        )


# -- heads -----------------------------------------------------------------------------------------
def memory_length(log_decay: ArrayLike) -> np.ndarray:
    """Tokens after which a contribution has fallen to 1/e; infinite without decay."""
    with np.errstate(divide="ignore"):
        return 1.0 / np.abs(np.asarray(log_decay, dtype=np.float64))


def change_per_window(log_decay: ArrayLike, ring_len: int) -> np.ndarray:
    """sqrt(1 - a^2L): relative change of a stationary state over one window."""
    return np.sqrt(-np.expm1(2.0 * ring_len * np.asarray(log_decay, dtype=np.float64)))


def stagnates(write: WriteError, *, log_decay: ArrayLike, ring_len: int) -> np.ndarray:
    """Whether rounding to nearest rounds a window's change away; never for stochastic rounding."""
    slow = change_per_window(log_decay, ring_len) < write.half_spacing
    return slow & (not write.stochastic)


def residual(measured: ArrayLike, predicted: ArrayLike) -> np.ndarray:
    """measured / predicted, NaN where nothing is predicted (an exact format).

    Above 1: stagnation, or errors fed back through the model's own inputs. Below: a contraction the
    gate does not show, such as the delta rule's along its keys.
    """
    m, p = np.asarray(measured, np.float64), np.asarray(predicted, np.float64)
    return np.divide(m, p, out=np.full(np.broadcast_shapes(m.shape, p.shape), np.nan), where=p > 0)


# -- KL --------------------------------------------------------------------------------------------
# A small change d of the logits gives KL = d' (diag p - p p') d / 2, quadratic in the state error.
# So KL(t) = KL of the read copy (flat) + c * E(t)^2, and its slope in a log-log plot is 0 on a
# plateau, 1 for a random walk, 2 for a bias.
def kl_shape(
    tokens: ArrayLike, *, log_decay: ArrayLike, ring_len: int, weights: ArrayLike | None = None
) -> np.ndarray:
    """E(t)^2 / (rho u)^2 averaged over heads [H] with `weights` [H] (default equal), [tokens].

    A mixture of time constants looks like a power law over a decade or two without being one.
    """
    heads = np.asarray(log_decay, np.float64).ravel()
    shares = np.ones_like(heads) if weights is None else np.asarray(weights, np.float64).ravel()
    series = _series(np.asarray(tokens, np.float64)[..., None], heads, ring_len)
    return (series * shares).sum(-1) / shares.sum()


def fitted_scale(kl: ArrayLike, shape: ArrayLike) -> float | None:
    """c of kl = c * shape in the least squares of logarithms; None without positive values."""
    kl, shape = np.asarray(kl, np.float64), np.asarray(shape, np.float64)
    usable = np.isfinite(kl) & (kl > 0) & (shape > 0)
    if not usable.any():
        return None
    return float(np.exp(np.mean(np.log(kl[usable]) - np.log(shape[usable]))))


def kl_line(shape: ArrayLike, *, scale: float, read_copy: float = 0.0) -> np.ndarray:
    """KL(t): `read_copy` (the flat KL of a read copy over an exact state) plus scale * shape."""
    return read_copy + scale * np.asarray(shape, np.float64)
