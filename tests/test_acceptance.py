"""Acceptance: four figures under their right names, honest intervals, n/a where nothing drafted."""

import math

import numpy as np
import pytest
import torch

from eval.acceptance import (
    MeasuredAcceptance,
    acceptance_result,
    by_category,
    conditional_intervals,
    length_interval,
    measure_acceptance,
    position_intervals,
    rate_interval,
)
from eval.cost_model import constant_acceptance_length
from eval.definitions import other_numbers
from eval.intervals import Interval, mean_interval, ratio_difference_interval, ratio_interval
from eval.looping import distinct_ngrams, is_looping
from eval.suites import EvalPrompt
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.stats import AcceptanceStats
from specdec_runtime.target import as_target
from specdec_runtime.verification import verify_speculative
from tests.conftest import tiny_model

TOY_ROUNDS = 20_000
# Standard errors at 20,000 rounds: rate 0.003, length 0.012; four of them.
RATE_TOLERANCE, LENGTH_TOLERANCE = 0.012, 0.05


def toy_stats(num_rounds: int, num_draft_tokens: int, seed: int = 0) -> AcceptanceStats:
    """Rounds of p=[.6, .4], q=[.8, .2] at every position, verified by the runtime's own rule."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.tensor([0.6, 0.4]).expand(num_rounds, num_draft_tokens + 1, 2)
    draft = torch.tensor([0.8, 0.2]).expand(num_rounds, num_draft_tokens, 2)
    flat = draft.reshape(-1, 2)
    ids = torch.multinomial(flat, 1, generator=generator).view(num_rounds, num_draft_tokens)
    noise = torch.rand(num_rounds, num_draft_tokens + 1, generator=generator)
    drafted = torch.full((num_rounds,), num_draft_tokens)
    verdict = verify_speculative(ids, draft, target, drafted, noise)
    stats = AcceptanceStats()
    for accepted in verdict.num_accepted.tolist():
        stats.add_round(num_draft_tokens, accepted)
    return stats


def test_toy_pair_gives_the_four_figures_under_their_names():
    stats = toy_stats(TOY_ROUNDS, 4)
    conditional = stats.conditional_acceptance_by_position
    assert conditional[0] == pytest.approx(0.800, abs=RATE_TOLERANCE)  # overlap, per token
    accepted_per_round = stats.num_accepted / stats.num_rounds
    assert accepted_per_round == pytest.approx(2.362, abs=LENGTH_TOLERANCE)
    assert stats.acceptance_length == pytest.approx(3.362, abs=LENGTH_TOLERANCE)
    assert stats.acceptance_rate == pytest.approx(0.590, abs=RATE_TOLERANCE)
    assert stats.acceptance_by_position == pytest.approx(
        [0.800, 0.640, 0.512, 0.410], abs=RATE_TOLERANCE
    )
    assert constant_acceptance_length(0.8, 4) == pytest.approx(3.3616)


def test_other_programs_numbers_follow_from_the_same_counts():
    stats = toy_stats(2000, 4)
    measured = MeasuredAcceptance(stats, [stats], [[1] * 5], ["length"], 1.0, [["bonus"] * 5])
    result = record(measured, 4)
    found = {number.name + " | " + number.program: number.value for number in other_numbers(result)}
    assert found["draft acceptance rate | vLLM, llama.cpp"] == pytest.approx(stats.acceptance_rate)
    assert found["mean acceptance length | vLLM, DSpark papers"] == pytest.approx(
        stats.acceptance_length
    )
    assert found["mean accepted | gpt-fast"] == pytest.approx(stats.acceptance_length - 1)
    verify_rate = (stats.num_accepted + stats.num_rounds) / (stats.num_drafted + stats.num_rounds)
    assert found["verify rate | AIPerf, DeepSpec"] == pytest.approx(verify_rate)


def record(measured: MeasuredAcceptance, num_draft_tokens: int):
    prompts = [EvalPrompt(str(i), [1]) for i in range(len(measured.prompts))]
    return acceptance_result(
        measured,
        prompts,
        drafter="draft",
        suite="prompts",
        temperature=0.0,
        num_draft_tokens=num_draft_tokens,
        num_resamples=200,
    )


def test_categories_divide_the_prompts_that_name_one_and_nothing_else():
    rows = [toy_stats(50, 3, seed) for seed in range(5)]
    measured = MeasuredAcceptance(
        stats=sum(rows, AcceptanceStats()), prompts=rows, token_ids=[[1, 2]] * 5,
        finish_reasons=["length"] * 5, seconds=1.0, kinds=[[]] * 5,
    )  # fmt: skip
    result = record(measured, 3)
    named = ["a", "b", "a", None, "b"]
    prompts = [EvalPrompt(str(i), [1], category) for i, category in enumerate(named)]
    a, b = by_category(result, prompts, num_resamples=100)
    assert [(one.category, one.num_prompts) for one in (a, b)] == [("a", 2), ("b", 2)]
    kept = rows[0].num_accepted + rows[2].num_accepted
    assert (a.num_accepted, a.acceptance_length.value) == (kept, 1 + kept / 100)
    assert a.acceptance_length.low < a.acceptance_length.high
    assert by_category(result, [EvalPrompt(str(i), [1]) for i in range(5)]) == []


def test_bootstrap_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        rates = rng.beta(4, 3, size=24)  # prompts differ; the mean is 4/7
        accepted = rng.binomial(60, rates)
        interval = ratio_interval(accepted, [60] * 24, num_resamples=400, seed=trial)
        covered += interval.low <= 4 / 7 <= interval.high
    # 95 % nominal; percentile intervals of 24 clusters run a little short.
    assert 0.88 <= covered / 200 <= 0.99


def test_interval_ignoring_prompts_would_be_too_narrow():
    rng = np.random.default_rng(1)
    rates = rng.beta(1, 1, size=20)
    accepted = rng.binomial(500, rates)
    clustered = ratio_interval(accepted, [500] * 20)
    naive = 2 * 1.96 * math.sqrt(0.25 / (20 * 500))
    assert clustered.high - clustered.low > 5 * naive


def test_equal_seeds_give_equal_intervals():
    counts = [3, 5, 2, 7], [9, 9, 9, 9]
    assert ratio_interval(*counts, seed=4) == ratio_interval(*counts, seed=4)


def test_one_prompt_has_a_value_but_no_interval():
    assert ratio_interval([3], [6]) == Interval(0.5, None, None)
    assert mean_interval([0.25]) == Interval(0.25, None, None)


def test_what_one_prompt_alone_has_has_no_interval():
    assert ratio_interval([3, 0, 0], [4, 0, 0]) == Interval(0.75)
    assert ratio_interval([3, 1, 0], [4, 2, 0]).low is not None


def test_nothing_drafted_is_undefined_and_not_zero():
    rows = [AcceptanceStats(num_tokens=5)]
    assert rate_interval(rows) == Interval(None)
    assert length_interval(rows) == Interval(None)
    assert position_intervals(rows) == []
    assert mean_interval([None, None]) == Interval(None)


def test_paired_difference_is_narrower_than_the_difference_of_independent_intervals():
    rng = np.random.default_rng(2)
    rates = rng.uniform(0.2, 0.9, size=30)
    first = [200 * rate for rate in rates]
    second = [200 * (rate + 0.05) for rate in rates]
    counts = [200.0] * 30
    paired = ratio_difference_interval((first, counts), (second, counts))
    assert paired.value == pytest.approx(0.05)
    assert paired.high - paired.low < 0.01
    alone = ratio_interval(first, counts)
    assert alone.high - alone.low > 0.1


def test_conditional_acceptance_divides_by_rounds_that_got_there():
    stats = AcceptanceStats()
    for accepted in (0, 1, 3, 3):
        stats.add_round(3, accepted)
    values = [interval.value for interval in conditional_intervals([stats, stats])]
    assert values == pytest.approx([3 / 4, 2 / 3, 1.0])


@pytest.fixture(scope="module")
def target():
    return as_target(tiny_model(0))


PROMPTS = [[1, *range(5 + i, 12 + 2 * i)] for i in range(4)]


def measure(target, drafter, **settings):
    options = {"num_draft_tokens": 3, "max_new_tokens": 14, **settings}
    return measure_acceptance(target, drafter, PROMPTS, **options)


def test_perfect_drafter_keeps_everything_and_useless_one_nothing(target):
    perfect = measure(target, CausalLMDrafter(tiny_model(0)))
    assert perfect.acceptance_rate == 1.0
    useless = measure(target, CausalLMDrafter(tiny_model(7)))
    assert useless.acceptance_length < 1.2
    assert perfect.token_ids == useless.token_ids


def test_sampled_acceptance_does_not_depend_on_the_batch_size(target):
    drafter = CausalLMDrafter(tiny_model(1))
    by_one = measure(target, drafter, temperature=1.0, batch_size=1, seed=5)
    by_three = measure(target, drafter, temperature=1.0, batch_size=3, seed=5)
    assert by_one.token_ids == by_three.token_ids
    assert by_one.prompts == by_three.prompts


def test_plain_decoding_and_a_lookup_without_matches_have_no_rate(target):
    plain = measure(target, None, num_draft_tokens=0)
    assert math.isnan(plain.acceptance_rate)
    nothing = measure(target, PromptLookupDrafter(min_ngram=8, max_ngram=8), max_new_tokens=4)
    result = record(nothing, 3)
    assert result.num_drafted == 0
    assert result.acceptance_rate == Interval(None)
    assert result.macro_acceptance_rate == Interval(None)


def test_no_prompts_is_a_clear_error(target):
    with pytest.raises(ValueError, match="no prompts"):
        measure_acceptance(target, None, [], num_draft_tokens=1, max_new_tokens=4)


def test_looping_answers_are_told_from_prose():
    assert is_looping([5, 6, 7, 8] * 12)
    assert is_looping([*range(40), *[3, 4] * 20])
    assert not is_looping(list(range(60)))
    assert not is_looping([1, 1, 1, 1])
    assert distinct_ngrams([1, 2, 3]) is None
