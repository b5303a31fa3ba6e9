"""Noise: known vectors, independence of the batch, and draws that never hit a zero."""

import pytest
import torch

from specdec_runtime import noise
from specdec_runtime.noise import UniformStreams, draw_by_inversion
from tests.toy_models import chi_squared, chi_squared_limit


def test_generator_gives_the_published_splitmix64_sequence():
    # Seed 1234567, as in the reference implementation by Sebastiano Vigna.
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = [noise._signed(1234567 + step * noise._GOLDEN) for step in range(1, 6)]
    assert [word % 2**64 for word in noise._mix(torch.tensor(states)).tolist()] == published


def test_a_rows_numbers_do_not_depend_on_the_other_rows_or_on_portions():
    together = UniformStreams([7, 8, 9], purpose=1)
    together.take([0, 2], 3)
    together.take([1], 1)
    alone = UniformStreams([8], purpose=1)
    expected = alone.take([0], 6)
    found = torch.cat([together.take([1], 2), together.take([0, 1], 3)[1:]], dim=1)
    assert torch.equal(expected[:, 1:], found)


def test_numbers_are_uniform_over_rows_and_over_time():
    streams = UniformStreams(range(1000), purpose=1)
    numbers = streams.take(range(1000), 200)
    for slices in (numbers.flatten(), numbers[:, 0], numbers[3]):
        counts = torch.histc(slices, bins=16, min=0.0, max=1.0)
        assert chi_squared(counts, [1 / 16] * 16) < chi_squared_limit(16)


@pytest.mark.parametrize(
    ("first", "second"),
    [((5, 1), (5, 2)), ((5, 1), (6, 1)), ((0, 1), (0, 2)), ((2, 1), (1, 2))],
    ids=["purposes", "seeds", "purposes of seed 0", "both"],
)
def test_streams_of_other_seeds_or_purposes_are_independent(first, second):
    pair = [
        UniformStreams([seed], purpose=purpose).take([0], 50_000)[0]
        for seed, purpose in (first, second)
    ]
    assert abs(torch.corrcoef(torch.stack(pair))[0, 1]) < 5 / 50_000**0.5
    # No number of one stream occurs in the other, so neither is the other one shifted.
    assert len(torch.unique(torch.cat(pair))) == 100_000


def test_a_row_cannot_take_the_same_noise_twice_in_one_call():
    with pytest.raises(AssertionError):
        UniformStreams([1, 2], purpose=1).take([0, 0], 1)


def test_inversion_returns_each_index_on_exactly_its_share_of_the_unit_interval():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).repeat(5, 1)
    uniforms = torch.tensor([0.0, 0.25 - 1e-12, 0.25, 0.75, 1.0 - 2.0**-53], dtype=torch.float64)
    assert draw_by_inversion(probs, uniforms).tolist() == [1, 1, 3, 4, 4]


@pytest.mark.parametrize("total", [1e-30, 0.5, 1.0 - 1e-7, 1.0, 3.0])
def test_inversion_never_returns_an_index_without_probability(total):
    probs = torch.zeros(1, 1000, dtype=torch.float64)
    probs[0, 17] = total
    for uniform in (0.0, 0.5, 1.0 - 2.0**-53):
        assert draw_by_inversion(probs, torch.tensor([uniform]).double()).item() == 17


def test_inversion_keeps_the_tail_of_a_large_vocabulary():
    probs = torch.full((1, 50_000), 0.5 / 49_999)  # half of the mass on 49,999 rare tokens
    probs[0, 0] = 0.5
    uniforms = UniformStreams([3], purpose=1).take([0], 1000).T
    drawn = torch.cat([draw_by_inversion(probs, uniform) for uniform in uniforms])
    counts = torch.histc(drawn[drawn > 0].double(), bins=8, min=0, max=50_000)
    assert chi_squared(counts, [1 / 8] * 8) < chi_squared_limit(8)
