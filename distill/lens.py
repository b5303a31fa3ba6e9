"""A drafter that is useful before its first training step: the best linear read-out, solved for.

A few of the target's layers leave a hidden state that the target's head was never made for. One
D x D matrix, the "lens", maps it to the state that the target itself ends with; least squares finds
it from a few ten thousand positions in seconds, where gradient steps take minutes. Folded into the
head it costs nothing when drafting: (h A) W^T = h (W A^T)^T.

Source: tuned lens, Belrose et al. 2023, arXiv:2303.08112; here in closed form (ridge regression)
and fitted to the final state instead of to the logits.

Shapes: N positions, D hidden size, V vocabulary.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.ridge import Ridge

LENS_POSITIONS = 30_000  # enough for the D x D numbers of a small target; more changes little


def fit_lens(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The matrix A [D, D] that minimises |h A - y|^2, and a little of A, over all positions.

    Args:
        pairs: (h, y), both [N, D]: the drafter's and the target's state in front of the head, at
            the same positions. Sums are kept in float64, so any number of pairs will do.

    Raises:
        ValueError: if there is no position, or a state is not finite.
    """
    fit = Ridge()
    for states, wanted in pairs:
        fit.add(states.float(), wanted.float())
    return fit.solve()


@torch.no_grad()
def fold_lens(module: PreTrainedModel, lens: Tensor) -> None:
    """Give `module` the head W A^T of its own [V, D] instead of W, untied from its embeddings."""
    head = module.get_output_embeddings()
    folded = head.weight.float() @ lens.T.to(head.weight.device)
    head.weight = nn.Parameter(folded.to(head.weight.dtype), requires_grad=False)
    module.config.tie_word_embeddings = False
