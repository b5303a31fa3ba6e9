"""What an objective is: one batch in, sums and counts out; the kinds live in `objectives/`.

`objectives/<kind>.py` has the same name as the drafter kind in `specdec_runtime/drafters`. A trainer
only sees `Objective` and `Terms`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distill.batches import Batch
from distill.chunked_head import HeadSums


class Terms(NamedTuple):
    """Sums over the loss positions of a batch; means are taken over all ranks and micro-batches.

    counts: name -> (numerator, denominator).
    """

    loss_sum: Tensor
    num_tokens: int
    counts: dict[str, tuple[Tensor, Tensor]]


Objective = Callable[[nn.Module, Batch], Terms]


def terms_of(sums: HeadSums, num_tokens: int) -> Terms:
    """overlap and kept_mass are over the positions where the target's distribution was computed; where
    it is known in part, overlap is the lower end of its bracket and overlap_upper the upper end."""
    total = torch.full_like(sums.num_compared, num_tokens)  # a copied number would be waited for
    counts = {
        "greedy_agreement": (sums.agreement, total),
        "overlap": (sums.overlap, sums.num_compared),
        "kept_mass": (sums.kept_mass, sums.num_compared),
    }
    if sums.overlap_slack is not None:
        counts["overlap_upper"] = (sums.overlap + sums.overlap_slack, sums.num_compared)
    return Terms(loss_sum=sums.loss, num_tokens=num_tokens, counts=counts)
