"""Acceptance counts: the definitions, and that they add."""

import math

import pytest

from specdec_runtime.stats import AcceptanceStats


def stats_of(*rounds):
    stats = AcceptanceStats()
    for drafted, accepted in rounds:
        stats.add_round(drafted, accepted)
    return stats


def test_rates_follow_their_definitions():
    stats = stats_of((4, 4), (4, 0), (4, 2), (2, 2))
    assert stats.acceptance_rate == 8 / 14
    assert stats.acceptance_length == 1 + 8 / 4
    assert stats.acceptance_by_position == [3 / 4, 3 / 4, 1 / 4, 1 / 4]
    # Position 2 was drafted with both before it kept in two rounds, kept in one.
    assert stats.conditional_acceptance_by_position == [3 / 4, 1.0, 1 / 2, 1.0]


def test_a_ratio_of_nothing_is_nan_and_never_zero():
    assert math.isnan(AcceptanceStats().acceptance_rate)
    assert math.isnan(AcceptanceStats().acceptance_length)
    plain = stats_of((0, 0), (0, 0))
    assert math.isnan(plain.acceptance_rate)
    assert plain.acceptance_length == 1.0
    assert plain.acceptance_by_position == []


def test_counts_add_over_rows_of_different_draft_lengths():
    rounds = [(1, 1), (4, 2), (0, 0), (8, 8)]
    assert stats_of(*rounds[:1]) + stats_of(*rounds[1:]) == stats_of(*rounds)
    assert sum([stats_of(entry) for entry in rounds], AcceptanceStats()) == stats_of(*rounds)


def test_more_accepted_than_drafted_is_our_bug():
    with pytest.raises(AssertionError):
        AcceptanceStats().add_round(2, 3)
