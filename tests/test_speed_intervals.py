"""Intervals of speed: they hold what a machine does from one minute to the next, on any drift."""

import numpy as np
import pytest

from eval.intervals import (
    crossed_difference_interval,
    crossed_ratio_interval,
    ratio_interval,
)

PROMPTS, RUNS = 12, 100
SPEEDUP = 1.1
BETWEEN_PROMPTS, NOISE = 0.06, 0.02  # of the logarithm of a speedup
BETWEEN_MINUTES = {2: 0.02, 3: 0.03}  # the same, by repeats: two of them hold less
DRIFT = 0.2  # of the logarithm of the machine's speed, which hits plain decoding as well
ENOUGH = 0.87  # of 95 % nominal; 0.90 but for the chance of so few runs (standard error 0.025)
OPTIONS = {"num_resamples": 120}


def machine(noise: np.random.Generator, prompts: np.ndarray, repeats: int):
    """Plain and speculative seconds [repeat, prompt] of a machine that drifts.

    In some minutes speculation pays less than in others: something else wants the cores that a pass
    over several tokens would use.
    """
    drift = noise.normal(0, DRIFT, (repeats, 1))
    minutes = noise.normal(0, BETWEEN_MINUTES[repeats], (repeats, 1))
    plain = np.exp(drift + noise.normal(0, NOISE, (repeats, PROMPTS)))
    gained = np.log(SPEEDUP) + prompts + minutes
    return plain, np.exp(drift - gained + noise.normal(0, NOISE, (repeats, PROMPTS)))


def drawn_prompts(noise: np.random.Generator) -> np.ndarray:
    return noise.normal(0, BETWEEN_PROMPTS, PROMPTS)


@pytest.mark.parametrize("repeats", [2, 3])
def test_intervals_hold_the_speedup_of_a_machine_that_drifts(repeats):
    noise = np.random.default_rng(repeats)
    crossed = over_prompts = 0
    for seed in range(RUNS):
        plain, fast = machine(noise, drawn_prompts(noise), repeats)
        found = crossed_ratio_interval(plain, fast, seed=seed, **OPTIONS)
        crossed += found.low <= SPEEDUP <= found.high
        old = ratio_interval(np.median(plain, 0), np.median(fast, 0), seed=seed, **OPTIONS)
        over_prompts += old.low <= SPEEDUP <= old.high
    assert crossed / RUNS >= ENOUGH
    assert over_prompts / RUNS < ENOUGH  # the control: prompts are not all that varies


@pytest.mark.parametrize("repeats", [2, 3])
def test_two_runs_of_one_drafter_agree_on_a_machine_that_drifts(repeats):
    noise = np.random.default_rng(10 + repeats)
    crossed = over_prompts = 0
    for seed in range(RUNS):
        prompts = drawn_prompts(noise)
        runs = [machine(noise, prompts, repeats) for _ in range(2)]
        found = crossed_difference_interval(*runs, seed=seed, **OPTIONS)
        crossed += found.low <= 0 <= found.high
        # The control: the medians of the repeats as if they were exact.
        medians = [tuple(np.median(side, 0, keepdims=True) for side in run) for run in runs]
        old = crossed_difference_interval(*medians, seed=seed, **OPTIONS)
        over_prompts += old.low <= 0 <= old.high
    assert crossed / RUNS >= ENOUGH
    assert over_prompts / RUNS < 0.6


def test_a_real_difference_between_two_runs_is_seen():
    noise = np.random.default_rng(3)
    prompts = drawn_prompts(noise)
    before, after = machine(noise, prompts, 3), machine(noise, prompts - 0.3, 3)
    found = crossed_difference_interval(before, after)
    assert found.high < -0.1


def test_repeats_that_differ_widen_the_interval_and_one_disturbed_one_does_not_move_it():
    plain = np.ones((3, PROMPTS))
    fast = plain / 1.2
    assert crossed_ratio_interval(plain, fast).value == pytest.approx(1.2)
    assert crossed_ratio_interval(plain, fast).high == pytest.approx(1.2)
    stalled = fast.copy()
    stalled[1, 4] = 9.0
    found = crossed_ratio_interval(plain, stalled)
    assert found.value == pytest.approx(1.2)
    assert found.low < 1.1


def test_one_prompt_has_no_interval_and_one_repeat_has_that_of_its_prompts():
    one = crossed_ratio_interval([[2.0], [2.2]], [[1.0], [1.0]])
    assert (one.value, one.low) == (pytest.approx(2.1), None)
    plain, fast = [1.0, 2.0, 3.0], [1.0, 1.0, 2.0]
    assert crossed_ratio_interval([plain], [fast]) == ratio_interval(plain, fast)
    alone = crossed_difference_interval(([[2.0]], [[1.0]]), ([[3.0]], [[1.0]]))
    assert (alone.value, alone.low) == (1.0, None)
