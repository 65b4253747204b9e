"""From FP32 logits to per-position drift: KL in both directions, in float64, full vocabulary.

Owns the arithmetic of one window of positions. Knows no model, no file and no statistics. Logits
are reduced here and never stored: 131,072 positions of a 248k vocabulary would be 127 GB for every
prompt.

With reference logits z, candidate logits z' and the reference's probabilities p = softmax(z), let
d = z' - z, formed in float64 from two FP32 numbers and therefore exact. Then, with S = sum p e^d,

    KL(reference || candidate) = log S - sum p d
    KL(candidate || reference) = sum p e^d d / S - log S
    log p'(x) - log p(x)       = d_x - log S

and log S = log1p(sum p expm1(d)). Subtracting two float64 log-softmaxes gives the same number with
an absolute error of about 1e-15; this form has a *relative* error near 1e-16 of |d|, so that a
divergence of 1e-13, which is what an FP32 noise floor looks like, is measured instead of guessed,
equal logits give exactly 0, and the candidates cost one exponential each. FP32 sums are out of the
question: their errors, about 1e-6, are larger than the drift of an FP16 state. Nothing is ever
clamped.

On a GPU two kernels do this (`triton_drift`): nothing is copied to float64, and nothing waits, so
that a window's results can stay on the device until many are fetched together.

Rows with an infinite or NaN logit, or with |d| so large that e^d could overflow, take
`exact_divergence`: log-softmax per row with the conventions 0 log 0 = 0 and p log(p / 0) = +inf.
"""

from typing import NamedTuple

import torch

# Above this |d| the exponentials of the quick form are not safe in float64.
_LARGEST_DIFFERENCE = 200.0
# Elements of float64 work held at once: fits a CPU's cache.
_CHUNK_ELEMENTS = 1 << 19


class ReferenceTerms(NamedTuple):
    """Per reference row, float64 [R]: entropy (nats), top-1 probability, log-probability margin,
    finite.
    """

    entropy: torch.Tensor
    top1_prob: torch.Tensor
    top2_margin: torch.Tensor
    finite: torch.Tensor


class Drift(NamedTuple):
    """What a window of positions measured. R = rows (prompts x positions), A = candidate arms.

    `kl`, `kl_reverse`, `delta_logp` [A, R] float64 (NaN where nonfinite); `top1_match`, `nonfinite`
    [A, R] bool; `reference` holds [R] tensors.
    """

    kl: torch.Tensor
    kl_reverse: torch.Tensor
    delta_logp: torch.Tensor
    top1_match: torch.Tensor
    nonfinite: torch.Tensor
    reference: ReferenceTerms


def uses_kernels(device: torch.device) -> bool:
    """Whether logits on this device are reduced by kernels."""
    return device.type == "cuda"


def window_drift(reference: torch.Tensor, candidates: torch.Tensor, tokens: torch.Tensor) -> Drift:
    """Compare candidates with the reference at R positions.

    Args:
        reference: logits [R, V], float32.
        candidates: logits [A, R, V], float32.
        tokens: forced next tokens [R], int64.

    A row whose logits contain NaN or +inf, or nothing but -inf, is `nonfinite` (-inf alone is a
    suppressed token); a non-finite reference row makes every arm's row non-finite. Raises
    ValueError for logits that are not float32: a narrower last projection fakes a divergence of up
    to 5e-4.
    """
    if reference.dtype != torch.float32 or candidates.dtype != torch.float32:
        raise ValueError(
            f"logits must be float32, are {reference.dtype} and {candidates.dtype}: "
            "the last projection has to be computed in FP32"
        )
    rows, vocab = reference.shape
    if uses_kernels(reference.device):
        from replayssm.study.triton_drift import drift_of_rows

        *found, entropy, top1_prob, margin, finite = drift_of_rows(
            reference, candidates, tokens, _LARGEST_DIFFERENCE
        )
        return Drift(*found, ReferenceTerms(entropy, top1_prob, margin, finite))
    step = max(1, _CHUNK_ELEMENTS // (vocab * max(1, candidates.shape[0])))
    parts = [
        _drift_of_rows(reference[i : i + step], candidates[:, i : i + step], tokens[i : i + step])
        for i in range(0, rows, step)
    ]
    joined = [torch.cat([part[k] for part in parts], -1) for k in range(5)]
    terms = [torch.cat([part.reference[k] for part in parts]) for k in range(4)]
    return Drift(*joined, ReferenceTerms(*terms))


def _drift_of_rows(z: torch.Tensor, zc: torch.Tensor, tokens: torch.Tensor) -> Drift:
    best, best_index = z.max(-1)  # the first of equal maxima
    z64 = z.double()
    shifted = z64 - best.double()[:, None]
    p = shifted.exp()
    total = p.sum(-1)
    p /= total[:, None]
    log_total = total.log()
    finite = _usable(z, best)
    top2 = z.topk(min(2, z.shape[-1]), -1).values.double()
    # p log p -> 0 for suppressed tokens: -inf * 0 is replaced before the sum.
    entropy = log_total - (p * shifted.masked_fill(shifted == -torch.inf, 0.0)).sum(-1)
    reference = ReferenceTerms(entropy, 1.0 / total, top2[:, 0] - top2[:, -1], finite)

    d = zc.double() - z64  # [A, R, V]
    quick = d.abs().amax(-1) < _LARGEST_DIFFERENCE  # false for NaN and inf
    candidate_best = zc.amax(-1)
    nonfinite = ~(_usable(zc, candidate_best) & finite)

    # [R, A, V] @ [R, V, 1] -> [R, A, 1]: weighted sums over the vocabulary.
    weights = p[:, :, None]
    mean_d = (d.transpose(0, 1) @ weights).squeeze(-1).T
    e = torch.expm1(d)
    s = (e.transpose(0, 1) @ weights).squeeze(-1).T
    e *= d
    mean_ed = (e.transpose(0, 1) @ weights).squeeze(-1).T
    log_s = torch.log1p(s)
    kl = log_s - mean_d
    kl_reverse = (mean_d + mean_ed) / (1.0 + s) - log_s
    index = tokens.expand(d.shape[0], -1)[..., None]
    delta = d.gather(-1, index).squeeze(-1) - log_s

    for arm, row in (~quick & ~nonfinite).nonzero().tolist():
        kl[arm, row], kl_reverse[arm, row], log_p, log_q = exact_divergence(z[row], zc[arm, row])
        delta[arm, row] = log_q[tokens[row]] - log_p[tokens[row]]
    for values in (kl, kl_reverse, delta):
        values.masked_fill_(nonfinite, torch.nan)
    # Not argmax: where the candidate ties, the reference's best token still counts as its best.
    match = (
        zc.gather(-1, best_index.expand(d.shape[0], -1)[..., None]).squeeze(-1) == candidate_best
    )
    return Drift(kl, kl_reverse, delta, match & ~nonfinite, nonfinite, reference)


def _usable(z: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """True where a row of logits defines a distribution: no NaN, no +inf, not all -inf."""
    return best.isfinite() & ~z.isnan().any(-1)


def exact_divergence(z: torch.Tensor, zc: torch.Tensor):
    """(KL(p || q), KL(q || p), log p, log q) of two rows of logits [V], in float64, by definition.

    A token that is impossible in both contributes 0; one that only the second distribution excludes
    makes the divergence +inf. Needs rows that define distributions (see `window_drift`).
    """
    log_p, log_q = z.double().log_softmax(-1), zc.double().log_softmax(-1)
    return _divergence(log_p, log_q), _divergence(log_q, log_p), log_p, log_q


def _divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    ratio = torch.where(log_p > -torch.inf, log_p - log_q, 0.0)
    # The probability may underflow to 0 where the ratio is infinite: select, do not multiply.
    terms = torch.where(ratio == torch.inf, torch.inf, log_p.exp() * ratio)
    return terms.sum(-1)
