"""Losses between what the draft model predicts and what the target model would say.

Pure functions of one row per loss position; what runs the models, which positions count and how
sums become a gradient step is elsewhere (`chunked_head.py`, `objective.py`).

Shapes: N loss positions, n tokens of the draft vocabulary (n = V without a reduced vocabulary).
Notation of the formulas: p target, q draft, m = sum of p over the draft vocabulary (kept mass).

A reduced draft vocabulary keeps n < V tokens. `target_log_probs` are then the n kept columns of the
*full* log-softmax, so that `exp` of a row sums to m <= 1 and nothing is lost by the cut:
- KL, reverse KL and JSD compare with p / m and weight the position by m. For the forward KL that is
  exactly the gradient of the truncated cross-entropy, m q - p: where the target wants a token that
  the draft can not say, the position teaches little, and where m = 0 it teaches nothing.
- total variation and the losses on the overlap need no care: a token that q lacks adds
  min(p, 0) = 0 to the overlap.
- labels outside the draft vocabulary are -1 and carry no loss.

Everything is natural logarithms, float32 (float64 in, float64 out, for gradcheck).
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.comparison import Comparison, precise
from distill.position_weights import WeightScheme, WeightsConfig

OUTSIDE = -1  # label or argmax that the draft vocabulary does not hold
# JSD is about beta (1 - beta) times a KL near its ends: below this its gradient all but vanishes.
_NARROW_BETA = 0.01
# Variance of the reward below which tvd_plus_plus does not divide any further.
_LEAST_VARIANCE = 1e-4


class LossName(Enum):
    """What the draft model is trained to minimise."""

    forward_kl = "forward_kl"
    reverse_kl = "reverse_kl"
    jsd = "jsd"
    total_variation = "total_variation"
    neg_log_overlap = "neg_log_overlap"
    tvd_plus_plus = "tvd_plus_plus"
    lk_hybrid = "lk_hybrid"
    ce_tv = "ce_tv"
    expected_length = "expected_length"
    hard_labels = "hard_labels"


@dataclass(kw_only=True)
class SelectionConfig:
    """loss.selection.*: learn from the positions where most can be learnt.

    share: of the positions of a batch that are learnt from, those with the largest gap between what
        a trained reference is accepted and what the drafter is now; 1 = all.
    reference: folder of that reference, a trained drafter of the same kind and draft vocabulary.
    """

    share: float = 1.0
    reference: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"loss.selection.share must be in (0, 1], got {self.share}")
        if (self.share < 1) != (self.reference is not None):
            raise ValueError(
                f"loss.selection.share={self.share} and reference={self.reference} do not go "
                "together: a share below 1 needs a reference folder, and only that"
            )


@dataclass(kw_only=True)
class LossConfig:
    """Which loss, and its constants.

    temperature divides the logits of both models before the softmax; the loss is *not* multiplied
    by temperature squared (Hinton et al. 2015 do, to keep gradients equal over temperatures). null =
    the temperature at which the target is decoded (a drafter learns most for the temperature it is
    used at: TempSpec, arXiv:2410.10141), and 1 where that is greedy or unknown.
    """

    name: LossName = LossName.lk_hybrid
    temperature: float | None = None
    beta: float = 0.5  # jsd: 0 is the forward KL, 1 the reverse KL
    eta: float = 3.0  # lk_hybrid: how fast growing overlap moves weight from KL to total variation
    ce_weight: float = 0.1  # ce_tv: weight of the cross-entropy, the rest is total variation
    chunk_tokens: int = 1024  # most loss positions whose logits are held at once
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)

    @property
    def softmax_temperature(self) -> float:
        """What the logits are divided by."""
        return 1.0 if self.temperature is None else self.temperature

    def __post_init__(self) -> None:
        for name, low, high in (("beta", 0.0, 1.0), ("ce_weight", 0.0, 1.0)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"loss.{name} must be between {low:g} and {high:g}, got {value}")
        temperature = self.softmax_temperature
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(
                f"loss.temperature must be positive, got {self.temperature}; "
                "to learn the target's argmax use loss.name=hard_labels on temperature-0 answers"
            )
        if not (self.eta >= 0 and math.isfinite(self.eta)):
            raise ValueError(f"loss.eta must be zero or positive, got {self.eta}")
        if self.chunk_tokens < 1:
            raise ValueError(f"loss.chunk_tokens must be at least 1, got {self.chunk_tokens}")
        if self.name is LossName.expected_length and (
            self.weights.scheme is not WeightScheme.uniform or self.selection.share < 1
        ):
            raise ValueError(
                "loss.name=expected_length weighs the positions by itself: leave loss.weights.scheme "
                "uniform and loss.selection.share 1"
            )
        near_end = 0 < self.beta < _NARROW_BETA or 1 - _NARROW_BETA < self.beta < 1
        if self.name is LossName.jsd and near_end:
            warnings.warn(
                f"loss.beta={self.beta}: this close to 0 or 1 the JSD is almost zero everywhere; "
                "use exactly 0 (forward KL) or 1 (reverse KL)",
                stacklevel=2,
            )


def forward_kl(draft_logits: Tensor, target_log_probs: Tensor) -> Tensor:
    """KL(p || q) = sum_v p log(p / q): the draft has to cover all that the target may say.

    Gradient in the draft logits: m q - p. Source: DistillSpec, arXiv:2310.08461.

    Args:
        draft_logits: [N, n].
        target_log_probs: [N, n], log p of the kept tokens under the full softmax.

    Returns:
        [N], weighted by the kept mass.
    """
    return Comparison(draft_logits, target_log_probs).kl


def reverse_kl(draft_logits: Tensor, target_log_probs: Tensor) -> Tensor:
    """KL(q || p) = sum_v q log(q / p): the draft may settle on some of what the target says.

    Source: DistillSpec, arXiv:2310.08461; MiniLLM, arXiv:2306.08543. Same shapes as `forward_kl`.
    """
    draft_log_probs = _log_softmax(draft_logits)
    target, mass = _renormalised(target_log_probs)
    return mass * _kl(draft_log_probs, target)


def jsd(draft_logits: Tensor, target_log_probs: Tensor, *, beta: float = 0.5) -> Tensor:
    """beta KL(p || r) + (1 - beta) KL(q || r) with r = beta p + (1 - beta) q.

    Source: GKD, arXiv:2306.13649, eq. 1. The formula itself is 0 at both ends; as in GKD, beta = 0
    means the forward and beta = 1 the reverse KL, which are the limits of JSD / beta and
    JSD / (1 - beta). Between, the formula is used as printed: at 0.999 it is 0.001 times a KL.
    """
    if beta == 0:
        return forward_kl(draft_logits, target_log_probs)
    if beta == 1:
        return reverse_kl(draft_logits, target_log_probs)
    draft_log_probs = _log_softmax(draft_logits)
    target, mass = _renormalised(target_log_probs)
    mixture = torch.logaddexp(target + math.log(beta), draft_log_probs + math.log1p(-beta))
    divergence = beta * _kl(target, mixture) + (1 - beta) * _kl(draft_log_probs, mixture)
    return mass * divergence


def overlap(draft_logits: Tensor, target_log_probs: Tensor) -> Tensor:
    """sum_v min(p, q) [N]: the chance that speculative sampling accepts a drafted token.

    Source: Leviathan et al. 2023, arXiv:2211.17192, corollary 3.6.
    """
    return Comparison(draft_logits, target_log_probs).overlap


def total_variation(draft_logits: Tensor, target_log_probs: Tensor) -> Tensor:
    """1 - overlap = (sum_v |p - q|) / 2 over the full vocabulary: the chance of a rejection.

    Its gradient vanishes where q has little mass on p's tokens, so that it needs a warm start.
    Source: arXiv:2310.08461; the vanishing gradient: arXiv:2602.23881, section 3.
    """
    return 1.0 - overlap(draft_logits, target_log_probs)


def neg_log_overlap(draft_logits: Tensor, target_log_probs: Tensor) -> Tensor:
    """-log sum_v min(p, q): the total variation's gradient divided by the overlap.

    Equals the cross-entropy where p is one-hot. Source: LK losses, arXiv:2602.23881, L_alpha.
    """
    return _neg_log(overlap(draft_logits, target_log_probs))


def tvd_plus_plus(draft_logits: Tensor, target_log_probs: Tensor) -> Tensor:
    """TV / std of the acceptance under the draft: the total variation with normalised advantages.

    The gradient of the total variation is a policy gradient, -E_{x ~ q}[(r - E r) grad log q] with
    the reward r = 1 where p > q; dividing the advantage by its standard deviation, here exactly
    sqrt(b (1 - b)) with b = E_q r, keeps it from vanishing where q misses nearly all of p. The
    standard deviation has no gradient of its own.

    Source: TVD++, arXiv:2403.00858, there with the mean and deviation of a batch of samples; here
    with those over the vocabulary, position by position. Same shapes as `forward_kl`.
    """
    return _tvd_plus_plus(Comparison(draft_logits, target_log_probs))


def _tvd_plus_plus(compared: Comparison) -> Tensor:
    draft_log_probs = compared.draft_logits.detach().log_softmax(-1)
    rewarded = (compared.target_log_probs > draft_log_probs).to(draft_log_probs.dtype)
    share = torch.linalg.vecdot(draft_log_probs.exp(), rewarded)
    deviation = (share * (1 - share)).clamp_min(_LEAST_VARIANCE).sqrt()
    return (1 - compared.overlap) / deviation


def lk_hybrid(draft_logits: Tensor, target_log_probs: Tensor, *, eta: float = 3.0) -> Tensor:
    """w KL(p || q) + (1 - w) TV(p, q), w = exp(-eta * mean overlap): KL starts, TV finishes.

    Source: LK losses, arXiv:2602.23881, L_lambda: one weight for the whole batch (not one per
    position), without a gradient of its own. The rows given are taken for the whole batch.
    """
    compared = Comparison(draft_logits, target_log_probs)
    return lk_mix(compared.kl, 1 - compared.overlap, compared.overlap.mean(), eta)


def lk_mix(kl: Tensor, variation: Tensor, mean_overlap: Tensor, eta: float) -> Tensor:
    """`lk_hybrid` of a KL and a total variation (or sums of them), given the mean overlap."""
    kl_weight = torch.exp(-eta * mean_overlap.detach())
    return kl_weight * kl + (1 - kl_weight) * variation


def hard_labels(draft_logits: Tensor, labels: Tensor) -> Tensor:
    """-log q(label): cross-entropy on the text's own tokens; the target's distribution is unused.

    Args:
        labels: [N] int64 draft-vocabulary ids; -1 (outside of it) carries no loss.
    """
    logits = precise(draft_logits)
    return F.cross_entropy(logits, labels, ignore_index=OUTSIDE, reduction="none")


def greedy_agreement(draft_logits: Tensor, target_argmax: Tensor) -> Tensor:
    """[N] bool: where the draft's first choice is the target's; never where that is -1."""
    return draft_logits.argmax(-1) == target_argmax


# (comparison, labels [N], config) -> [N]. The comparison may be one of a signal that is kept in part
# (sparse_signals.py); signal_forms.py says of which loss that is enough.
LossFunction = Callable[[Any, Tensor, LossConfig], Tensor]

LOSSES: dict[LossName, LossFunction] = {
    LossName.forward_kl: lambda c, labels, config: c.kl,
    LossName.reverse_kl: lambda c, labels, config: reverse_kl(c.draft_logits, c.target_log_probs),
    LossName.jsd: lambda c, labels, config: jsd(
        c.draft_logits, c.target_log_probs, beta=config.beta
    ),
    LossName.total_variation: lambda c, labels, config: 1 - c.overlap,
    LossName.neg_log_overlap: lambda c, labels, config: _neg_log(c.overlap),
    LossName.lk_hybrid: lambda c, labels, config: lk_mix(
        c.kl, 1 - c.overlap, c.overlap.mean(), config.eta
    ),
    LossName.tvd_plus_plus: lambda c, labels, config: _tvd_plus_plus(c),
    # The expected accepted length is a total variation whose weights follow from the overlaps of
    # the whole text: weighing.py.
    LossName.expected_length: lambda c, labels, config: 1 - c.overlap,
    # The cross-entropy carries the start from scratch. Source: DSpark, arXiv:2607.05147 (there .1 and
    # .9 on ||q - p||_1, which is twice the total variation).
    LossName.ce_tv: lambda c, labels, config: (
        config.ce_weight * hard_labels(c.draft_logits, labels)
        + (1 - config.ce_weight) * (1 - c.overlap)
    ),
    LossName.hard_labels: lambda c, labels, config: hard_labels(c.draft_logits, labels),
}


# Losses of the text alone: for these the target's distribution is not even computed.
TARGET_FREE = frozenset({LossName.hard_labels})


def _neg_log(accepted: Tensor) -> Tensor:
    return -accepted.clamp_min(torch.finfo(accepted.dtype).tiny).log()


def _log_softmax(logits: Tensor) -> Tensor:
    return precise(logits).log_softmax(-1)


def _renormalised(target_log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """(log p / m [N, n], m [N]) of the kept columns."""
    kept = precise(target_log_probs)
    log_mass = kept.logsumexp(-1, keepdim=True)
    # Rounding can lift the mass of a full vocabulary a little over one.
    return kept - log_mass, log_mass.squeeze(-1).exp().clamp_max(1.0)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b) over the last dimension; a token with a = 0 adds nothing, whatever b is."""
    a = log_a.exp()
    terms = a * (log_a - log_b)
    return torch.where(a > 0, terms, 0.0).sum(-1)
