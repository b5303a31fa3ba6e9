"""Matrices whose rows are whole numbers of at most 127 in size times a power of two.

int8 with a scale a row is half of bfloat16's bytes. With a power of two as the scale nothing else
changes: bfloat16 (8 significant bits) holds such a weight exactly, and a product with the whole
numbers, scaled afterwards, has the bits of the product with the weights themselves. So a drafter is
rounded once, when it is written; its folder stays a bfloat16 folder that every program reads, all of
them compute with the same weights, and the C++ engine stores the whole numbers where it finds them.

Shapes: [outputs, inputs] as in nn.Linear.weight.
"""

import torch
from torch import Tensor, nn

LARGEST = 127
# Far from float32's denormal numbers, which would be rounded once more.
_SMALLEST_STEP = 2.0**-100


@torch.no_grad()
def round_matrices(module: nn.Module) -> None:
    """Rounds the weights of all linear layers of `module` in place."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight.copy_(rounded(part.weight))


def rounded(matrix: Tensor) -> Tensor:
    """The nearest matrix of this form, in the dtype of `matrix` (float32 or bfloat16).

    Half the step that holds a row's largest number is finer for all others; it is taken where the
    squared error is smaller in spite of what it cuts off.
    """
    exact = matrix.float()
    wide = steps_of(exact)
    candidates = [_to_steps(exact, step) * step for step in (wide, wide / 2)]
    errors = [(candidate - exact).square().sum(1, keepdim=True) for candidate in candidates]
    return torch.where(errors[1] < errors[0], candidates[1], candidates[0]).to(matrix.dtype)


def is_rounded(matrix: Tensor) -> bool:
    """Whether `whole_numbers` loses nothing."""
    exact = matrix.float()
    steps = steps_of(exact)
    return torch.equal(_to_steps(exact, steps) * steps, exact)


def whole_numbers(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [outputs, inputs] and float32 [outputs], whose product is the matrix if `is_rounded`."""
    exact = matrix.float()
    steps = steps_of(exact)
    return _to_steps(exact, steps).to(torch.int8), steps[:, 0]


def steps_of(matrix: Tensor) -> Tensor:
    """[outputs, 1] the smallest power of two of which a row's largest number is 127 at most."""
    largest = matrix.abs().amax(1, keepdim=True) / LARGEST
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1), or 0
    above = exponent - (mantissa == 0.5).int()
    return torch.ldexp(torch.ones_like(largest), above).clamp_min(_SMALLEST_STEP)


def _to_steps(matrix: Tensor, steps: Tensor) -> Tensor:
    return (matrix / steps).round().clamp(-LARGEST, LARGEST)
