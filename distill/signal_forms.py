"""Which form of the target's signal a run learns from, and what each loss can have of it.

| form   | bytes a position                | kept                                      | exact for |
|--------|---------------------------------|-------------------------------------------|-----------|
| hidden | 2 D + 8                         | last hidden state, head re-applied        | any loss  |
| sparse | 4 k + 2 m + 12 (6 k + 4 m + 12) | top-k log-probabilities, m draws, entropy | see below |
| live   | none                            | the target runs beside the drafter        | any loss  |

(D hidden size; the second size of sparse is for vocabularies above 65,536 tokens.)

The sparse form gives the forward KL an unbiased estimate from the draws, and the losses on the
overlap the lower end of a bracket from the top-k, whose width is logged. Losses that look at the
whole target distribution where the *draft* is (reverse KL, JSD, TVD++), and any loss at another
temperature than 1, have neither and are refused.
"""

from dataclasses import dataclass
from enum import Enum

from distill.answers.config import HiddenDtype
from distill.losses import LossConfig, LossName


class SignalForm(Enum):
    """What a drafter learns from, besides the text."""

    hidden = "hidden"
    sparse = "sparse"
    live = "live"


@dataclass(kw_only=True)
class SignalsConfig:
    """How the target's signal is kept.

    Attributes:
        form: hidden, sparse or live; see the table above.
        top_k: most probable tokens of each position (sparse); as many as hold about all of the
            target's probability, which `kept_mass` shows in the metrics.
        draws: tokens drawn from the target at each position (sparse); more for little data, as
            the same draws come back every epoch.
        dtype: of stored numbers; sums are made in float32 before they are rounded to it.
        seed: of the draws.
    """

    form: SignalForm = SignalForm.hidden
    top_k: int = 64
    draws: int = 50
    dtype: HiddenDtype = HiddenDtype.float16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("top_k", "draws"):
            if getattr(self, name) < 0:
                raise ValueError(f"signals.{name} must be 0 or more, got {getattr(self, name)}")
        if self.form is SignalForm.sparse and self.top_k == self.draws == 0:
            raise ValueError("signals.form=sparse keeps nothing: raise signals.top_k or draws")


class _Need(Enum):
    draws = "draws"
    top_k = "top_k"
    everything = "everything"


# What of the sparse form a loss uses; one that is not listed needs the whole distribution.
_NEEDS: dict[LossName, frozenset[_Need]] = {
    LossName.forward_kl: frozenset({_Need.draws}),
    LossName.total_variation: frozenset({_Need.top_k}),
    LossName.neg_log_overlap: frozenset({_Need.top_k}),
    LossName.lk_hybrid: frozenset({_Need.draws, _Need.top_k}),
    LossName.ce_tv: frozenset({_Need.top_k}),
    LossName.expected_length: frozenset({_Need.top_k}),
    LossName.hard_labels: frozenset(),
}


def require_form(signals: SignalsConfig, loss: LossConfig) -> None:
    """Whether the loss is exact, bracketed or unbiased on this form.

    Raises:
        ValueError: if it is neither; the message says why and what to choose.
    """
    if signals.form is not SignalForm.sparse or loss.name is LossName.hard_labels:
        return
    if loss.softmax_temperature != 1.0:
        raise ValueError(
            f"loss.temperature={loss.softmax_temperature} with signals.form=sparse: the kept "
            "probabilities are those of temperature 1 and can not be renormalised; use "
            "signals.form=hidden or live, or loss.temperature=1"
        )
    needs = _NEEDS.get(loss.name, frozenset({_Need.everything}))
    if loss.name is LossName.jsd and loss.beta == 0:
        needs = _NEEDS[LossName.forward_kl]
    if _Need.everything in needs:
        raise ValueError(
            f"loss.name={loss.name.value} with signals.form=sparse: it asks for the target's "
            "probability of every token that the draft may say, which a top-k and draws do not "
            "hold; use signals.form=hidden or live, or another loss"
        )
    for need in sorted(needs, key=lambda need: need.value):
        if getattr(signals, need.value) == 0:
            raise ValueError(
                f"loss.name={loss.name.value} needs signals.{need.value} above 0: it is "
                + (
                    "biased on truncated probabilities"
                    if need is _Need.draws
                    else "biased on draws"
                )
            )
