"""The cost model: Leviathan's numbers, exact decomposition, no clipping of useless drafters."""

import pytest

from eval.cost_model import (
    RoundCosts,
    best_length,
    break_even_acceptance,
    constant_acceptance_length,
    constant_rate_of,
    decomposition,
    deviation,
    expected_acceptance_length,
    free_drafting_ceiling,
    length_to_use,
    mean_round_cost,
    perfect_drafter_speedup,
    predicted_speedup,
    round_cost,
    whole_generation_speedup,
)
from eval.intervals import Interval
from eval.prediction import predict
from eval.results import CostResult, ReplayedLength


def flat_costs(draft_cost: float, longest: int = 20, **changes: float) -> RoundCosts:
    return RoundCosts(
        target_s=0.02,
        verify=(1.0,) * (longest + 1),
        draft_cost=draft_cost,
        overhead=changes.get("overhead", 0.0),
        plain_overhead=changes.get("plain_overhead", 0.0),
    )


def speedup_of(rate: float, costs: RoundCosts, k: int) -> float:
    return predicted_speedup(constant_acceptance_length(rate, k), costs, {k: 1})


@pytest.mark.parametrize(
    ("draft_cost", "rate", "best_k", "speedup"),
    [  # v = 1, o = 0: best length and speedup, to two digits
        (0.02, 0.6, 6, 2.17),
        (0.05, 0.7, 6, 2.35),
        (0.10, 0.8, 6, 2.47),
        (0.20, 0.9, 7, 2.37),
        (0.50, 0.6, 1, 1.07),
        (0.50, 0.9, 3, 1.38),
    ],
)
def test_best_length_of_a_constant_acceptance(draft_cost, rate, best_k, speedup):
    costs = flat_costs(draft_cost)
    best = best_length({k: speedup_of(rate, costs, k) for k in range(1, 21)})
    assert best.num_draft_tokens == best_k
    assert best.speedup == pytest.approx(speedup, abs=0.006)


def test_one_drafted_token_gains_one_plus_rate_over_one_plus_cost():
    assert speedup_of(0.37, flat_costs(0.1), 1) == pytest.approx(1.37 / 1.1)


def test_useless_drafter_is_below_one_and_not_clipped():
    assert speedup_of(0.0, flat_costs(0.2), 4) == pytest.approx(1 / 1.8)


def test_nothing_drafted_by_a_free_drafter_is_exactly_one():
    costs = flat_costs(0.0, overhead=0.04, plain_overhead=0.04)
    assert predicted_speedup(1.0, costs, {0: 7}) == pytest.approx(1.0)


def test_no_length_above_one_means_do_not_draft():
    assert best_length({1: 0.9, 2: 0.8}).num_draft_tokens == 0
    assert best_length({1: 0.9, 2: 0.8}).speedup == 1.0


def test_the_shortest_length_that_cannot_be_told_from_the_best_is_used():
    assert length_to_use({1: 1.20, 2: 1.29, 3: 1.30, 4: 1.1}) == 2
    assert length_to_use({1: 0.995, 2: 1.01}) == 2  # the shorter one does not gain
    assert length_to_use({1: 0.9, 2: 0.8}) == 1


@pytest.mark.parametrize("k", [1, 3, 6])
def test_break_even_acceptance_breaks_even(k):
    costs = flat_costs(0.13, overhead=0.05, plain_overhead=0.02)
    rate = break_even_acceptance(costs, k)
    assert speedup_of(rate, costs, k) == pytest.approx(1.0)


def test_break_even_does_not_exist_where_even_a_perfect_drafter_loses():
    assert break_even_acceptance(flat_costs(1.2), 3) is None
    assert break_even_acceptance(flat_costs(0.0), 3) == 0.0


def test_constant_rate_of_inverts_constant_acceptance_length():
    for rate in (0.0, 0.31, 0.8, 1.0):
        assert constant_rate_of(constant_acceptance_length(rate, 4), 4) == pytest.approx(
            rate, abs=1e-6
        )
    assert constant_rate_of(1.0, 0) is None


def test_decomposition_starts_at_the_acceptance_length_and_ends_at_the_prediction():
    costs = RoundCosts(
        target_s=0.02,
        verify=(1.0, 1.1, 1.2, 1.3),
        draft_cost=0.1,
        overhead=0.07,
        plain_overhead=0.03,
    )
    steps = decomposition(2.2, costs, {3: 10, 1: 2})
    assert steps[0].speedup == pytest.approx(2.2)
    assert steps[-1].speedup == pytest.approx(predicted_speedup(2.2, costs, {3: 10, 1: 2}))
    assert [step.speedup for step in steps] == sorted(
        (step.speedup for step in steps), reverse=True
    )


def test_round_cost_is_averaged_over_what_was_really_drafted():
    costs = flat_costs(0.1)
    assert mean_round_cost(costs, {0: 1, 4: 1}) == pytest.approx(1.2)
    with pytest.raises(ValueError, match="was not measured"):
        round_cost(costs, 21)


def test_ceilings():
    assert free_drafting_ceiling(0.8) == pytest.approx(5.0)
    assert free_drafting_ceiling(1.0) is None
    assert perfect_drafter_speedup(flat_costs(0.05), 8) == pytest.approx(6.4, abs=0.05)


def test_prefill_dilutes_the_speedup():
    assert whole_generation_speedup(2.0, prefill_s=1.0, plain_decode_s=9.0) == pytest.approx(
        10 / 5.5
    )
    assert deviation(1.1, 1.0) == pytest.approx(0.1)


def lengths_of(rate: float, longest: int = 6) -> dict[int, ReplayedLength]:
    return {
        k: ReplayedLength(
            num_draft_tokens=k,
            num_rounds=100,
            num_accepted=0,
            acceptance_length=Interval(constant_acceptance_length(rate, k)),
            rounds_by_drafted={k: 100},
        )
        for k in range(1, longest + 1)
    }


def test_prediction_recommends_the_best_length_and_states_its_break_even():
    costs = CostResult(
        drafter="draft",
        context_tokens=10,
        verify_s=[0.02],
        draft_token_s=0.002,
        draft_start_s=0.0,
        outside_s=0.0,
        costs=flat_costs(0.1, longest=6),
    )
    prediction = predict("draft", "prompts", list(lengths_of(0.6).values()), costs, None)
    assert prediction.best_num_draft_tokens == 3
    assert prediction.mean_acceptance == pytest.approx(0.6)
    assert prediction.deviation is None
    at_best = prediction.lengths[prediction.best_num_draft_tokens - 1]
    assert at_best.speedup == pytest.approx(prediction.best_speedup)
    assert at_best.break_even_acceptance < 0.6


def test_expected_length_is_one_more_than_what_is_kept():
    assert expected_acceptance_length([0.6, 0.4, 0.2]) == pytest.approx(2.2)
