"""Draft length policies: obeyed exactly, blind to the token they decide about, forgotten after."""

import random

import pytest

from specdec_runtime.draft_length import (
    ConfidenceThreshold,
    CostAware,
    FixedLength,
    LengthRound,
    as_draft_length,
)


def draft_one_round(session, confidences, *, limits=None):
    """Lengths of a round whose rows would be drawn with these confidences, one list per row."""
    rows = list(range(len(confidences)))
    length_round = LengthRound(session, rows, limits or [99] * len(rows))
    while members := length_round.ask():
        drawn = [confidences[member][length_round.num_drafted[member] - 1] for member in members]
        length_round.tell(drawn)
    return length_round


def test_fixed_length_is_obeyed_up_to_each_rows_limit():
    session = FixedLength(4).begin(3)
    drafted = draft_one_round(session, [[0.0] * 9] * 3, limits=[99, 2, 0]).num_drafted
    assert drafted == [4, 2, 0]


def test_a_number_is_a_fixed_length():
    assert as_draft_length(5) == FixedLength(5)
    policy = ConfidenceThreshold(0.3, 4)
    assert as_draft_length(policy) is policy


def test_a_cap_known_beforehand_is_obeyed():
    length_round = LengthRound(FixedLength(4).begin(2), [0, 1], [9, 9])
    length_round.cap(1, 1)
    assert length_round.ask() == [0, 1]
    length_round.tell(None)
    assert length_round.ask() == [0]
    with pytest.raises(AssertionError):
        length_round.cap(0, 1)  # after a draw it could depend on the token


def test_the_token_below_the_threshold_is_still_drafted():
    session = ConfidenceThreshold(0.5, 6).begin(4)
    confidences = [[0.9, 0.6, 0.4, 0.9, 0.9, 0.9], [0.1] * 6, [0.5] * 6, [0.9] * 6]
    drafted = draft_one_round(session, confidences, limits=[99, 99, 99, 3]).num_drafted
    assert drafted == [3, 1, 6, 3]


def test_a_policy_is_asked_before_the_token_and_sees_the_ones_in_front_only():
    seen = []

    class Recorder:
        def wants_more(self, row, confidences):
            seen.append((row, list(confidences)))
            return len(confidences) < 2

        def end_round(self, row, confidences, num_accepted):
            seen.append((row, list(confidences), num_accepted))

    length_round = draft_one_round(Recorder(), [[0.1, 0.2, 0.3], [0.7, 0.8, 0.9]])
    length_round.finish([1, 2])
    assert seen == [
        *[(0, []), (1, [])],
        *[(0, [0.1]), (1, [0.7])],
        *[(0, [0.1, 0.2]), (1, [0.7, 0.8])],
        *[(0, [0.1, 0.2], 1), (1, [0.7, 0.8], 2)],
    ]


def test_a_granted_position_counts_before_its_token_is_known():
    length_round = LengthRound(FixedLength(2).begin(1), [0], [9])
    length_round.ask()
    assert length_round.num_drafted == [1]
    with pytest.raises(AssertionError, match="not told"):
        length_round.ask()
    with pytest.raises(ValueError, match="shorter"):
        length_round.tell([])  # a token that was asked for cannot be left out


@pytest.mark.parametrize(
    ("acceptance", "draft_cost", "best_speedup"),
    # Best fixed length and its speedup for i.i.d. acceptance, from the closed form
    # (1 - a^(k+1)) / ((1 - a)(1 + k c)).
    [(0.8, 0.1, 2.47), (0.6, 0.05, 1.92), (0.9, 0.02, 6.37), (0.7, 0.2, 1.58)],
)
def test_cost_aware_drafting_finds_the_best_length_by_itself(acceptance, draft_cost, best_speedup):
    policy = CostAware(draft_cost, (1.0,) * 31)
    assert _speedup(policy, acceptance, draft_cost) > 0.97 * best_speedup


def test_cost_aware_drafting_stops_when_no_draft_is_kept_and_tries_again_later():
    session = CostAware(0.3, (1.0,) * 9).begin(1)
    lengths = []
    for _ in range(200):
        length_round = draft_one_round(session, [[None] * 9])
        length_round.finish([0])
        lengths.append(length_round.num_drafted[0])
    assert lengths[0] > 0
    assert sum(length > 0 for length in lengths[50:]) < 0.2 * len(lengths[50:])
    assert any(lengths[100:])


# A drafting layer and a small target on two cores (docs/performance.md).
REAL_COSTS = CostAware(
    draft_cost=0.03,
    draft_start=0.09,
    verify_cost=(1.0, 1.11, 1.2, 1.21, 1.25, 1.32, 1.4, 1.5, 1.6),
)


@pytest.mark.parametrize(("num_tokens", "most"), [(64, 0.035), (256, 0.01), (2048, 0.004)])
@pytest.mark.parametrize(("confidence", "factor"), [(None, 1.0), (0.05, 1.0), (0.95, 1.5)])
def test_a_useless_drafter_costs_little(num_tokens, most, confidence, factor):
    """Half as much again where it is always sure of itself."""
    session, time = REAL_COSTS.begin(1), 0.0
    for _ in range(num_tokens):
        length_round = draft_one_round(session, [[confidence] * 9])
        length_round.finish([0])
        time += REAL_COSTS.round_cost(length_round.num_drafted[0])
    assert 1.0 < time / num_tokens < 1.0 + factor * most


def test_a_drafter_that_becomes_useful_is_noticed():
    session, lengths = REAL_COSTS.begin(1), []
    for turn in range(600):
        length_round = draft_one_round(session, [[None] * 9])
        length_round.finish([length_round.num_drafted[0] if turn >= 300 else 0])
        lengths.append(length_round.num_drafted[0])
    assert sum(length > 0 for length in lengths[100:300]) < 5
    assert min(lengths[500:]) >= 4


def test_a_draft_that_cannot_pay_is_not_even_looked_at():
    session = CostAware(2.0, (1.0,) * 4).begin(1)
    for _ in range(1000):
        length_round = draft_one_round(session, [[None] * 9])
        length_round.finish([0])
        assert not any(length_round.num_drafted)


def test_cost_aware_drafting_stops_earlier_where_verification_gets_dearer():
    flat = CostAware(0.05, (1.0,) * 13, acceptance=0.8).begin(1)
    steep = CostAware(0.05, tuple(1.0 + 0.2 * k for k in range(13)), acceptance=0.8).begin(1)
    lengths = [draft_one_round(session, [[None] * 12]).num_drafted[0] for session in (flat, steep)]
    assert lengths[0] > lengths[1] > 0


def test_cost_aware_drafting_learns_what_a_confidence_is_worth():
    # A drafter whose confidence means the opposite: .9 is always refused, .1 always kept.
    session = CostAware(0.2, (1.0,) * 7).begin(1)
    for turn in range(60):
        length_round = draft_one_round(session, [[0.9 if turn % 2 else 0.1] * 6])
        kept = 0 if turn % 2 else length_round.num_drafted[0]
        length_round.finish([kept])
    sure = draft_one_round(session, [[0.9] * 6]).num_drafted[0]
    unsure = draft_one_round(session, [[0.1] * 6]).num_drafted[0]
    assert unsure > sure


def test_rows_are_judged_by_themselves():
    policy = CostAware(0.2, (1.0,) * 6)
    together, alone = policy.begin(2), policy.begin(1)
    for _ in range(10):
        pair = draft_one_round(together, [[0.5] * 6, [0.8] * 6])
        pair.finish([0, pair.num_drafted[1]])
        single = draft_one_round(alone, [[0.5] * 6])
        single.finish([0])
        assert pair.num_drafted[0] == single.num_drafted[0]


@pytest.mark.parametrize(
    "policy", [FixedLength(3), ConfidenceThreshold(0.4, 5), CostAware(0.2, (1.0,) * 6)]
)
def test_nothing_is_remembered_between_calls(policy):
    def lengths():
        session = policy.begin(1)
        found = []
        for kept in (0, 0, 1, 0, 0):
            length_round = draft_one_round(session, [[0.6, 0.5, 0.3, 0.9, 0.9, 0.9]])
            found.append(length_round.num_drafted[0])
            length_round.finish([min(kept, found[-1])])
        return found

    assert lengths() == lengths()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedLength(-1), "num_draft_tokens is -1, expected 0"),
        (lambda: as_draft_length(-2), "num_draft_tokens is -2"),
        (lambda: ConfidenceThreshold(0.5, 0), "num_draft_tokens is 0, expected 1"),
        (lambda: ConfidenceThreshold(1.5, 3), "threshold is 1.5"),
        (lambda: CostAware(-0.1, (1.0, 1.0)), "draft_cost is -0.1"),
        (lambda: CostAware(0.1, (1.0,)), "num_draft_tokens is 0"),
        (lambda: CostAware(0.1, (1.0, 0.0)), "verify_cost is"),
        (lambda: CostAware(0.1, (1.0, 1.0), acceptance=1.0), "acceptance is 1.0"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def _speedup(policy, acceptance, draft_cost, num_rounds=1500):
    """Tokens per unit of time for i.i.d. acceptance, past the first 200 rounds."""
    source = random.Random(0)
    session = policy.begin(1)
    tokens = time = 0.0
    for turn in range(num_rounds):
        length_round = draft_one_round(session, [[None] * 31])
        num_drafted, kept = length_round.num_drafted[0], 0
        while kept < num_drafted and source.random() < acceptance:
            kept += 1
        length_round.finish([kept])
        if turn >= 200:
            tokens += kept + 1
            time += 1.0 + draft_cost * num_drafted
    return tokens / time
