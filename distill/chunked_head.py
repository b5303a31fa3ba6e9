"""The draft head and the loss, a chunk of tokens at a time.

The logits of a batch are its largest tensor by far: 2,048 positions of a 150k vocabulary take
1.2 GB, several times over inside a loss. Here the gradient of the head's input is computed together
with the loss, chunk by chunk, so that only one chunk of logits ever exists; small chunks also stay
in the CPU's cache, where elementwise work on them costs next to nothing. Value and gradient are
those of the unchunked loss. The idea of gradients within the forward pass: Liger kernels,
arXiv:2410.10989, section 3.

Shapes: N loss positions, D hidden size, n draft vocabulary, P parts of the loss.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.losses import (
    LOSSES,
    TARGET_FREE,
    LossConfig,
    LossName,
    greedy_agreement,
    hard_labels,
    lk_mix,
)
from distill.signals import Compared, SignalRows, TargetHead


class HeadSums(NamedTuple):
    """Sums over the positions of a batch; only the loss carries a gradient."""

    loss: Tensor  # scalar
    agreement: Tensor  # scalar: positions where both say the same token first
    overlap: Tensor  # scalar: sum of min(target, draft), or of what is known of it
    overlap_slack: Tensor | None  # scalar: how much more it may be; None if it is exact
    kept_mass: Tensor  # scalar: target probability that was compared with the draft's
    num_compared: Tensor  # scalar: positions behind the three sums above


class _Chunk(NamedTuple):
    parts: Tensor  # [P] sums of the parts of the loss
    counts: Tensor  # [5] agreement, overlap, its slack, kept mass, positions compared


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    target: TargetHead,
    rows: SignalRows,
    labels: Tensor,
    config: LossConfig,
) -> HeadSums:
    """The summed loss of N positions, differentiable in `hidden` and, if it is trained, `weight`.

    Args:
        hidden: [N, D] what the draft model's head reads.
        weight: [n, D] the draft model's head.
        target: the target's head over the same draft vocabulary.
        rows: the target's signal at the same positions.
        labels: [N] int64 target ids of the tokens that follow in the text.
        config: which loss; `chunk_tokens` bounds the memory.
    """
    slices = [slice(i, i + config.chunk_tokens) for i in range(0, len(hidden), config.chunk_tokens)]
    # The weights of this loss follow from the whole batch: its two parts are kept apart until then.
    is_split = config.name is LossName.lk_hybrid and len(slices) > 1
    run = _ChunkLoss(target, rows, labels, config, is_split=is_split)
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    parts, counts = _GradientInForward.apply(hidden, weight, run, slices, wants_gradient)
    agreement, accepted, slack, kept_mass, num_compared = counts
    loss = _combined(parts, accepted / num_compared, config)
    known = slack if rows.is_truncated else None
    return HeadSums(loss, agreement, accepted, known, kept_mass, num_compared)


class _ChunkLoss:
    """The loss and the counts of one chunk of draft logits."""

    def __init__(
        self,
        target: TargetHead,
        rows: SignalRows,
        labels: Tensor,
        config: LossConfig,
        *,
        is_split: bool,
    ) -> None:
        self.target, self.rows, self.config, self.is_split = target, rows, config, is_split
        self.labels = target.vocab.to_draft(labels)
        self.argmax = target.vocab.to_draft(rows.argmax)

    def __call__(self, logits: Tensor, part: slice) -> _Chunk:
        temperature = self.config.temperature
        logits = logits if temperature == 1.0 else logits / temperature
        agreement = greedy_agreement(logits.detach(), self.argmax[part]).sum()
        if self.config.name in TARGET_FREE and part.start > 0:
            # One chunk tells the overlap; the baseline does not pay for the target's head again.
            counts = torch.zeros(5, device=logits.device)
            counts[0] = agreement
            return _Chunk(hard_labels(logits, self.labels[part]).sum()[None], counts)
        compared = self.rows.comparison(logits, self.target, part, temperature=temperature)
        found = compared.overlap.detach(), compared.slack, compared.mass
        sums = agreement, *(value.sum() for value in found)
        counts = torch.stack([*(value.float() for value in sums), logits.new_tensor(len(logits))])
        return _Chunk(self._parts(compared, self.labels[part]), counts)

    def _parts(self, compared: Compared, labels: Tensor) -> Tensor:
        """[P] sums that `_combined` makes the loss of."""
        if self.is_split:
            return torch.stack([compared.kl.sum(), (1 - compared.overlap).sum()])
        return LOSSES[self.config.name](compared, labels, self.config).sum()[None]


def _combined(parts: Tensor, mean_overlap: Tensor, config: LossConfig) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return lk_mix(parts[0], parts[1], mean_overlap, config.eta)


class _GradientInForward(torch.autograd.Function):
    """(hidden, weight) -> (parts [P], counts [5]); the gradient of each part is kept, not logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        run: Callable[[Tensor, slice], _Chunk],
        slices: list[slice],
        wants_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        train_head = wants_gradient and weight.requires_grad
        head = weight.detach().requires_grad_(train_head)
        chunks: list[_Chunk] = []
        hidden_grads: list[Tensor] = []  # each [P, c, D]
        head_grad: Tensor | None = None  # [P, n, D]
        for part in slices:
            states = hidden[part].detach().requires_grad_(wants_gradient)
            with torch.set_grad_enabled(wants_gradient):
                chunk = run(F.linear(states, head), part)
                inputs = [states, head] if train_head else [states]
                grads = _gradients_of_each(chunk.parts, inputs) if wants_gradient else []
            chunks.append(_Chunk(chunk.parts.detach(), chunk.counts))
            hidden_grads += grads[:1]
            for grad in grads[1:]:
                head_grad = grad if head_grad is None else head_grad.add_(grad)
        ctx.hidden_grad = torch.cat(hidden_grads, 1) if hidden_grads else None
        ctx.head_grad = head_grad
        counts = torch.stack([chunk.counts for chunk in chunks]).sum(0)
        ctx.mark_non_differentiable(counts)
        return torch.stack([chunk.parts for chunk in chunks]).sum(0), counts

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = outputs[0]  # [P]
        found = (ctx.hidden_grad, ctx.head_grad)
        hidden, head = (
            None if grad is None else torch.einsum("p,pij->ij", scale.to(grad.dtype), grad)
            for grad in found
        )
        return hidden, head, None, None, None


def _gradients_of_each(parts: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """For each input, the gradients of all parts stacked in front: [P, *input.shape]."""
    last = len(parts) - 1
    grads = [
        torch.autograd.grad(part, inputs, retain_graph=index < last)
        for index, part in enumerate(parts)
    ]
    return [torch.stack(of_input) for of_input in zip(*grads, strict=True)]
