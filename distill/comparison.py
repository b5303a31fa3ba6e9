"""KL divergence, overlap and kept mass of two distributions, in as few passes as they take.

Most losses are functions of these three, and on a CPU each pass over [N, n] numbers costs more than
the arithmetic in it. So they are computed together, with the gradient written out:

    KL = sum p log(p / q)             d KL / d logits      = m q - p          (m = sum of p)
    overlap = sum min(p, q)           d overlap / d logits = q (I - sum q I)  (I = 1 where q < p)

p target, q = softmax of the draft logits. With a reduced draft vocabulary m < 1, and the KL is that
of p / m, weighted by m (losses.py says why): sum p log p - m log m - sum p log q.

Shapes: N positions, n tokens of the draft vocabulary.
"""

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Below the log of every float64: exp of it is exactly zero, and zero times it is no NaN.
_LOG_ZERO = -1e4


class Measures(NamedTuple):
    """Per position, all [N]."""

    kl: Tensor
    overlap: Tensor
    mass: Tensor  # without gradient


class Comparison:
    """What a draft model predicts next to what the target says.

    Args:
        draft_logits: [N, n], any float type.
        target_log_probs: [N, n], log p of the kept tokens under the full softmax; no gradient.
    """

    def __init__(self, draft_logits: Tensor, target_log_probs: Tensor) -> None:
        self.draft_logits = precise(draft_logits)
        self.target_log_probs = precise(target_log_probs)

    @cached_property
    def measures(self) -> Measures:
        return Measures(*_KlAndOverlap.apply(self.draft_logits, self.target_log_probs))

    @property
    def kl(self) -> Tensor:
        return self.measures.kl

    @property
    def overlap(self) -> Tensor:
        return self.measures.overlap

    @property
    def mass(self) -> Tensor:
        return self.measures.mass

    @property
    def slack(self) -> Tensor:
        """[N] zeros: the whole distribution is known."""
        return torch.zeros_like(self.measures.mass)


def precise(values: Tensor) -> Tensor:
    """float32, or float64 where it is given (for gradcheck)."""
    return values if values.dtype == torch.float64 else values.float()


class _KlAndOverlap(torch.autograd.Function):
    """(draft_logits, target_log_probs) -> (kl, overlap, mass), each [N]."""

    @staticmethod
    def forward(
        ctx: Any, draft_logits: Tensor, target_log_probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_p = target_log_probs.clamp_min(_LOG_ZERO)
        p = log_p.exp()
        mass = p.sum(-1)
        log_q = draft_logits.log_softmax(-1)
        kl = torch.linalg.vecdot(p, log_p.sub_(log_q)) - torch.xlogy(mass, mass)
        q = log_q.exp_()
        overlap = torch.minimum(p, q, out=log_p).sum(-1)
        ctx.save_for_backward(p, q, mass)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mass)
        return kl, overlap, mass

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor | None) -> tuple[Tensor | None, None]:
        p, q, mass = ctx.saved_tensors
        kl_scale, overlap_scale = outputs[:2]
        q_scale = torch.zeros_like(mass)
        if kl_scale is not None:
            q_scale = q_scale + kl_scale * mass
        below = None
        if overlap_scale is not None:
            below = torch.sub(p, q).sign_().relu_().mul_(q)  # in place: half the time of a mask
            q_scale = q_scale - overlap_scale * below.sum(-1)
        gradient = q * q_scale[:, None]
        if below is not None and overlap_scale is not None:
            gradient.addcmul_(below, overlap_scale[:, None])
        if kl_scale is not None:
            gradient.addcmul_(p, kl_scale[:, None], value=-1.0)
        return gradient, None
