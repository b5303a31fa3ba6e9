"""`python -m eval.plan`: what a drafter's shape allows, before one is trained."""

import pytest

from eval.cost_model import RoundCosts, constant_acceptance_length, round_cost
from eval.plan.cli import main
from eval.plan.measure import PlanConfig, measure_plans
from eval.plan.outlook import plan_of, sentence
from eval.progress import silent_stage
from specdec_runtime.tiny_target import byte_tokenizer, random_llama


def _costs(*, draft_cost: float, verify: float = 0.1, longest: int = 4) -> RoundCosts:
    growth = tuple(1.0 + verify * k for k in range(longest + 1))
    return RoundCosts(target_s=0.02, verify=growth, draft_cost=draft_cost, overhead=0.0)


def test_at_the_break_even_acceptance_a_round_yields_what_it_costs():
    costs = _costs(draft_cost=0.1)
    plan = plan_of(2, costs, training_minutes=10)
    for length, rate in plan.break_even.items():
        assert constant_acceptance_length(rate, length) == pytest.approx(
            round_cost(costs, length), abs=1e-6
        )


def test_more_acceptance_is_never_slower_and_pays_back_sooner():
    outlooks = plan_of(2, _costs(draft_cost=0.1), training_minutes=10).outlooks
    speedups = [outlook.speedup for outlook in outlooks]
    assert speedups == sorted(speedups)
    paybacks = [o.payback_minutes for o in outlooks if o.payback_minutes is not None]
    assert paybacks == sorted(paybacks, reverse=True)


def test_replacing_the_payback_saves_exactly_the_training_time():
    outlook = plan_of(2, _costs(draft_cost=0.05), training_minutes=10).outlooks[-1]
    saved = outlook.payback_minutes - outlook.payback_minutes / outlook.speedup
    assert saved == pytest.approx(10)
    # A pass of 20 ms a token and nothing outside it.
    assert outlook.payback_tokens == pytest.approx(outlook.payback_minutes * 60 / 0.02)


def test_a_drafter_as_slow_as_the_target_never_pays_and_the_plan_says_so():
    plan = plan_of(30, _costs(draft_cost=1.0), training_minutes=10)
    assert plan.easiest_break_even is None
    assert all(outlook.payback_minutes is None for outlook in plan.outlooks)
    assert "not even a perfect drafter" in sentence(plan)


def test_candidates_are_measured_on_the_target(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    random_llama(tokenizer).save_pretrained(tmp_path)
    config = PlanConfig(
        target=str(tmp_path), layers=[1, 4], draft_vocab_size=64, max_draft_tokens=3
    )
    few, many = measure_plans(config, stage=silent_stage)
    assert (few.num_layers, many.num_layers) == (1, 4)
    assert set(few.break_even) == set(many.break_even) == {1, 2, 3}
    assert all(plan.costs.target_s > 0 and min(plan.costs.verify) > 0 for plan in (few, many))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("layer=[1]", "did you mean layers"),
        ("layers=[]", "layers must be a list of counts"),
        ("training_minutes=0", "training_minutes must be positive"),
        ("target=/nowhere/at/all", "/nowhere/at/all"),
    ],
)
def test_a_wrong_setting_is_one_line(argument, message, capsys):
    assert main([argument]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
