"""Weights of drafted positions: hand-made blocks, folding onto texts, the expected length."""

import itertools

import pytest
import torch

from distill.position_weights import (
    BlocksOfText,
    WeightScheme,
    WeightsConfig,
    d_pace,
    decayed,
    expected_accepted_share,
    first_rejection_anchored,
    mean_one,
    position_weights,
)


def test_decay_starts_at_one():
    torch.testing.assert_close(decayed(3, 0.8), torch.tensor([1.0, 0.8, 0.64]))


def test_the_decay_restarts_at_the_first_rejection():
    agrees = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    expected = torch.tensor([[1, 1, 1, 0.5], [1, 0.5, 0.25, 0.125], [1, 1, 1, 1]])
    torch.testing.assert_close(first_rejection_anchored(agrees, 0.5), expected)


def test_d_pace_is_what_is_still_expected_from_a_position_on():
    probs, valid = torch.tensor([[0.5, 0.4, 0.2]]), torch.ones(1, 3, dtype=torch.bool)
    expected = torch.tensor([[0.5 + 0.2 + 0.04, 0.2 + 0.04, 0.04]])
    torch.testing.assert_close(d_pace(probs, 0.0, valid), expected)
    torch.testing.assert_close(d_pace(probs, 1.0, valid), torch.tensor([[3.0, 2.0, 1.0]]))
    valid[0, 2] = False
    torch.testing.assert_close(d_pace(probs, 0.0, valid), torch.tensor([[0.7, 0.2, 0.0]]))


def test_the_expected_share_is_that_of_all_ways_a_round_can_go():
    """Enumerates accept and refuse at every position; positions are independent given the text."""
    overlap = torch.tensor([[0.9, 0.5, 0.7]], dtype=torch.float64)
    expected = 0.0
    for kept in itertools.product([True, False], repeat=3):
        chance = 1.0
        for accept, alpha in zip(kept, overlap[0].tolist(), strict=True):
            chance *= alpha if accept else 1 - alpha
        expected += chance * next((i for i, accept in enumerate(kept) if not accept), 3)
    share = expected_accepted_share(overlap, torch.ones(1, 3, dtype=torch.bool))
    assert share.item() == pytest.approx(expected / 3)


def test_blocks_lie_within_their_text_and_fold_back():
    blocks = BlocksOfText(torch.tensor([2, 3, 4, 9, 10]), 3)
    assert blocks.valid.tolist() == [
        [True, True, True],
        [True, True, False],
        [True, False, False],
        [True, True, False],
        [True, False, False],
    ]
    values = torch.arange(5.0)
    assert blocks.of(values)[0].tolist() == [0.0, 1.0, 2.0]
    # Uniform weights count in how many blocks a position is.
    assert blocks.folded(torch.ones(5, 3)).tolist() == [1.0, 2.0, 3.0, 1.0, 2.0]


@pytest.mark.parametrize("scheme", list(WeightScheme))
def test_every_scheme_weighs_what_is_in_the_text_and_nothing_else(scheme):
    blocks = BlocksOfText(torch.tensor([0, 1, 5]), 2)
    generator = torch.Generator().manual_seed(0)
    agrees = torch.rand(3, 2, generator=generator) < 0.5
    probs = torch.rand(3, 2, generator=generator)
    weights = position_weights(
        WeightsConfig(scheme=scheme), agrees=agrees, token_probs=probs, valid=blocks.valid
    )
    assert (weights[blocks.valid] > 0).all()
    assert (weights[~blocks.valid] == 0).all()


def test_scaled_weights_have_a_mean_of_one_and_no_weight_at_all_counts_all_alike():
    assert mean_one(torch.tensor([1.0, 3.0])).tolist() == [0.5, 1.5]
    assert mean_one(torch.zeros(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("setting", [{"block_tokens": 0}, {"decay": 1.5}, {"smoothing": -0.1}])
def test_a_setting_out_of_range_is_named_by_its_path(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=f"loss.weights.{name}"):
        WeightsConfig(**setting)
