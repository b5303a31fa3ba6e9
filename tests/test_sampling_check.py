"""The part of the certificate that is about sampling."""

import pytest

from eval.sampling_check import (
    CONTROL_TOY,
    RULES,
    SMALLEST_P_VALUE,
    draws,
    p_value,
    sampling_checks,
    toys,
)


def test_the_rules_pass_and_their_controls_fail():
    for check in sampling_checks(num_draws=40_000):
        assert check.passed
        assert check.smallest_p_value > SMALLEST_P_VALUE
        assert check.control_p_value < 1e-30


@pytest.mark.parametrize("rule", RULES)
def test_a_wrong_target_is_told_from_the_right_one(rule):
    target, draft = toys()[CONTROL_TOY]
    found = draws(rule, target, draft, num_draws=40_000, seed=1)
    assert p_value(found, target) > SMALLEST_P_VALUE
    tilted = target**1.1 / (target**1.1).sum()
    assert p_value(found, tilted) < SMALLEST_P_VALUE


def test_two_tokens_that_depend_on_each_other_are_noticed():
    target, draft = toys()[CONTROL_TOY]
    found = draws("block", target, draft, num_draws=40_000, seed=2)
    found[:, 1] = found[:, 0]  # each token alone still follows the target
    assert p_value(found, target) < SMALLEST_P_VALUE


def test_a_token_of_probability_zero_fails_outright():
    target, draft = toys()["zeros in both"]
    found = draws("token by token", target, draft, num_draws=1000, seed=3)
    assert set(found.unique().tolist()) <= set(range(0, 16, 2))
