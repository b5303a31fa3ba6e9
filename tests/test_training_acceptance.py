"""Acceptance while training: shared by the processes, priced, and the same for any number of them."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from specdec_runtime.draft_length import CostAware
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.target import Target, as_target
from tests.conftest import tiny_llama
from train.acceptance import (
    PLANNED_SHARE,
    AcceptanceConfig,
    evenly,
    interval,
    measure,
    measured_round_cost,
)
from train.loop import Measurement

CONFIG = AcceptanceConfig(num_prompts=5, max_new_tokens=6, num_draft_tokens=2, temperature=0.8)
PROMPTS = [[3, 5, 7], [11, 13], [17, 19, 23, 29], [31, 37], [41, 43, 47]]


@pytest.fixture(scope="module")
def target() -> Target:
    spelled = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    return replace(as_target(tiny_llama(0)), tokenizer=spelled)


def measured_by(
    target: Target, processes: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Measurement, list[int]]:
    """The measurement of `processes` ranks, as rank 0 sees it, and the rounds each decoded."""
    module = tiny_llama(1)
    drafter = CausalLMDrafter.from_module(module)
    shares = []

    def of_rank(rank: int) -> Measurement:
        accelerator = SimpleNamespace(
            process_index=rank, num_processes=processes, is_main_process=rank == 0
        )
        return measure(accelerator, target, drafter, module, PROMPTS, CONFIG, round_cost=1.25)  # type: ignore[arg-type]

    def note(accelerator: object, value: object) -> list:
        shares.append(value)
        return [value]

    monkeypatch.setattr("train.acceptance.from_all", note)
    for rank in range(min(processes, len(PROMPTS))):
        of_rank(rank)
    gathered = shares + [None] * (processes - len(shares))
    monkeypatch.setattr("train.acceptance.from_all", lambda accelerator, value: gathered)
    return of_rank(0), [share[0].num_rounds for share in gathered if share]


@pytest.mark.parametrize("processes", [2, 3, 7])
def test_any_number_of_processes_measures_the_same(
    target: Target, processes: int, monkeypatch: pytest.MonkeyPatch
):
    one, _ = measured_by(target, 1, monkeypatch)
    many, rounds = measured_by(target, processes, monkeypatch)
    assert many.score == one.score
    assert many.values == one.values
    assert len(rounds) == min(processes, len(PROMPTS))  # each took a share
    assert sum(rounds) == one.values["num_rounds"]


def test_a_measurement_tells_speedup_positions_and_what_became_of_each_token(
    target: Target, monkeypatch: pytest.MonkeyPatch
):
    found, _ = measured_by(target, 1, monkeypatch)
    assert found.values["predicted_speedup"] == pytest.approx(found.score / 1.25)
    by_position = found.values["acceptance_by_position"]
    assert isinstance(by_position, list)
    assert len(by_position) == CONFIG.num_draft_tokens
    assert 1 + sum(by_position) == pytest.approx(found.score)
    kinds = [kind for sample in found.samples for _, kind in sample.tokens]
    assert len(found.samples) == 4
    assert set(kinds) <= {"accepted", "recovered", "bonus", "target"}
    assert {"target", "recovered"} <= set(kinds)


def test_the_cost_of_a_round_is_verifying_and_drafting_at_the_deployed_length(
    target: Target, monkeypatch: pytest.MonkeyPatch
):
    costs = CostAware(draft_cost=0.25, verify_cost=(1.0, 1.1, 1.3), draft_start=0.1)
    asked = {}

    def measured_policy(target: Target, drafter: object, **named: object) -> CostAware:
        asked.update(named)
        return costs

    monkeypatch.setattr("train.acceptance.measured_policy", measured_policy)
    drafter = CausalLMDrafter.from_module(tiny_llama(1))
    assert measured_round_cost(target, drafter, CONFIG) == pytest.approx(1.3 + 0.1 + 2 * 0.25)
    assert asked == {"is_sampled": True, "max_draft_tokens": 2}


def test_measuring_takes_its_share_of_the_time_at_most():
    config = AcceptanceConfig(share=0.1)
    every = interval(config, step_s=0.5, acceptance_s=3.0)
    planned = 0.1 * PLANNED_SHARE
    assert 3.0 / (3.0 + every * 0.5) <= planned < 3.0 / (3.0 + (every - 1) * 0.5)
    assert interval(AcceptanceConfig(every=7), step_s=0.5, acceptance_s=3.0) == 7
    assert evenly(AcceptanceConfig(every=7), 7, max_steps=15) == 7
    with pytest.raises(ValueError, match=r"acceptance\.patience must be at least 1"):
        AcceptanceConfig(patience=0)


@pytest.mark.parametrize("max_steps", [1, 9, 62, 63, 391, 1000])
def test_the_measurement_at_the_end_stays_within_the_share(max_steps: int):
    config = AcceptanceConfig(share=0.1)
    step_s, acceptance_s = 1.31, 9.02  # 7 measurements in 391 steps, one every 62, were 11 %
    every = evenly(
        config, interval(config, step_s=step_s, acceptance_s=acceptance_s), max_steps=max_steps
    )
    number = math.ceil(max_steps / every)
    spent = number * acceptance_s
    assert number == 1 or spent / (spent + max_steps * step_s) <= 0.1 * PLANNED_SHARE
