"""Rounding matrices to whole numbers times a power of two: exact to store, small in what it changes."""

import torch
from torch import nn

from specdec_runtime.int8_grid import (
    LARGEST,
    is_rounded,
    round_matrices,
    rounded,
    steps_of,
    whole_numbers,
)


def random_matrix(outputs=200, inputs=64):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(outputs, inputs, generator=generator)
    scales = torch.randn(outputs, 1, generator=generator).exp()  # steps of many sizes
    rows[:20] *= torch.randn(20, inputs, generator=generator) ** 4  # rows with outliers
    rows[20] = 0.0
    return rows * scales


def test_a_rounded_matrix_is_stored_without_loss_in_bfloat16_and_in_int8():
    matrix = rounded(random_matrix())
    assert torch.equal(matrix.bfloat16().float(), matrix)
    for stored in (matrix, matrix.bfloat16()):
        assert is_rounded(stored)
        numbers, steps = whole_numbers(stored)
        assert numbers.dtype == torch.int8
        assert numbers.abs().max() <= LARGEST
        assert torch.equal(numbers.float() * steps[:, None], matrix)
        assert torch.equal(torch.frexp(steps)[0], torch.full_like(steps, 0.5))  # powers of two
    assert torch.equal(rounded(matrix), matrix)


def test_any_other_matrix_is_not_taken_for_one():
    matrix = random_matrix()
    assert not is_rounded(matrix)
    assert not is_rounded(matrix.bfloat16())
    almost = rounded(matrix).bfloat16()
    almost[7, 3] = almost[7].abs().max() * (1 + 2**-7)  # the next number in bfloat16
    assert not is_rounded(almost)


def test_no_number_moves_by_more_than_half_a_step_unless_the_row_gains_by_cutting_it_off():
    matrix = random_matrix()
    step, change = steps_of(matrix), (rounded(matrix) - matrix).abs()
    uncut = (change <= step / 2).all(1)
    coarse = (torch.round(matrix / step) * step - matrix).square().sum(1)
    assert (change.square().sum(1) <= coarse * (1 + 1e-6)).all()
    assert not uncut.all()  # some rows are cut off, or the second step would be of no use
    assert uncut.float().mean() > 0.5


def test_the_largest_number_decides_the_step():
    # 127 steps of 1; one more bit, and the step is 2.
    rows = torch.tensor([[127.0, 1.0], [127.5, 1.0], [63.5, 1.0], [63.0, 1.0]])
    assert steps_of(rows)[:, 0].tolist() == [1.0, 2.0, 0.5, 0.5]


def test_modules_keep_everything_but_their_linear_layers():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 5))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    round_matrices(module)
    changed = {name for name, value in module.state_dict().items() if not value.equal(before[name])}
    assert changed == {"2.weight"}
    assert is_rounded(module[2].weight)
