"""The verdict says in one sentence what the numbers say, also where they say no."""

from dataclasses import replace

import pytest

from eval.cost_model import RoundParts
from eval.flags import flags_of
from eval.intervals import Interval
from eval.prediction import predict
from eval.results import Certificate, CostResult
from eval.verdict import deviation_message, judge
from tests.test_report import COSTS, acceptance, replay, sample_results, speed

CERTIFICATE = Certificate(
    drafter="distilled",
    engine="native",
    dtype="float32",
    checks=[],
    self_draft_acceptance=1.0,
    passed=True,
    summary="24 of 24 texts identical",
)
COST = CostResult(
    drafter="distilled",
    context_tokens=80,
    verify_s=[0.02],
    draft_token_s=0.002,
    draft_start_s=0.0,
    outside_s=0.001,
    costs=COSTS,
)


def verdict_of(measured, rate=0.6, costs=COST):
    lengths = replay("distilled", "held_out", rate).lengths
    prediction = predict("distilled", "held_out", lengths, costs, measured)
    return judge(CERTIFICATE, measured, prediction, costs)


def test_gain_is_stated_with_length_interval_and_break_even():
    verdict = verdict_of(speed("distilled", "held_out", 3, 1.40))
    assert verdict.pays is True
    assert verdict.headline == "1.40 x"
    assert "1.40 x faster at num_draft_tokens=3" in verdict.sentence
    assert "95 % interval 1.33 to 1.46" in verdict.sentence
    assert "break-even acceptance" in verdict.sentence
    assert verdict.next_step


def test_loss_is_a_normal_answer_and_names_what_eats_the_gain():
    dear = replace(COST, costs=replace(COSTS, draft_cost=0.7))
    verdict = verdict_of(speed("distilled", "held_out", 3, 0.62), costs=dear)
    assert verdict.pays is False
    assert verdict.sentence.startswith("Does not pay here: 0.62 x")
    assert "lost to drafting" in verdict.sentence
    assert "half the drafting time" in verdict.next_step


def test_an_interval_around_one_is_no_clear_gain():
    verdict = verdict_of(speed("distilled", "held_out", 3, 1.01))
    assert verdict.pays is None
    assert verdict.sentence.startswith("No clear gain")


def test_one_prompt_gives_a_verdict_without_interval():
    measured = replace(speed("distilled", "held_out", 3, 1.2), speedup=Interval(1.2))
    verdict = verdict_of(measured)
    assert verdict.pays is True
    assert "interval" not in verdict.sentence


def test_failed_certificate_withholds_the_speedup():
    failed = replace(CERTIFICATE, passed=False, summary="3 of 24 texts differ")
    verdict = judge(failed, speed("distilled", "held_out", 3, 1.5), None, None)
    assert verdict.pays is None
    assert verdict.headline == "withheld"
    assert "1.5" not in verdict.sentence


def test_nothing_drafted_is_not_applicable():
    assert judge(CERTIFICATE, None, None, None).headline == "n/a"


def test_hopeless_costs_are_said_to_be_hopeless():
    dear = replace(COST, costs=replace(COSTS, draft_cost=1.5))
    verdict = verdict_of(speed("distilled", "held_out", 3, 0.4), costs=dear)
    assert "not even a perfect drafter" in verdict.sentence


def test_useless_drafter_is_told_that_it_must_match_better():
    dear = replace(COST, costs=replace(COSTS, draft_cost=0.4))
    verdict = verdict_of(speed("distilled", "held_out", 1, 0.8), rate=0.01, costs=dear)
    assert "a better match" in verdict.next_step
    assert "leaves room for" in verdict.next_step


@pytest.mark.parametrize(("factor", "flagged"), [(1.0, False), (0.92, False), (0.85, True)])
def test_prediction_and_clock_may_differ_by_ten_per_cent(factor, flagged):
    lengths = replay("distilled", "held_out", 0.6).lengths
    exact = predict("distilled", "held_out", lengths, COST, speed("distilled", "held_out", 3, 1.0))
    measured = replace(
        speed("distilled", "held_out", 3, 1.0),
        decode_speedup=Interval(exact.predicted_at_measured * factor),
    )
    prediction = predict("distilled", "held_out", lengths, COST, measured)
    assert (deviation_message(prediction) is not None) is flagged


def test_disagreement_of_training_and_serving_is_an_error():
    results = sample_results()
    results.replay = [
        replace(
            results.replay[0],
            agrees=False,
            exact=False,
            round_start_agreement=Interval(0.9, 0.88, 0.92),
            decoded_first_acceptance=Interval(0.1, 0.08, 0.12),
        )
    ]
    found = [flag for flag in flags_of(results) if flag.code == "teacher_forcing_disagrees"]
    assert found[0].level == "error"
    assert "0.900" in found[0].message


def test_unequal_counts_are_an_error_in_float32_and_a_note_in_16_bit():
    results = sample_results()
    results.replay = [replace(results.replay[0], exact=False)]
    assert [f.level for f in flags_of(results) if f.code == "replay_not_exact"] == ["error"]
    results.target = replace(results.target, dtype="bfloat16")
    assert [f.level for f in flags_of(results) if f.code == "replay_not_exact"] == ["note"]


def test_unequal_counts_are_a_note_where_drafts_are_text_in_other_tokens():
    results = sample_results()
    results.replay = [replace(results.replay[0], exact=False)]
    results.drafters = [
        replace(one, kind="cross_tokenizer") if one.name == results.replay[0].drafter else one
        for one in results.drafters
    ]
    assert [f.level for f in flags_of(results) if f.code == "replay_not_exact"] == ["note"]


def test_looping_answers_and_idle_drafters_are_flagged():
    results = sample_results()
    results.acceptance = [
        replace(acceptance("d", "s", 0.0, [0.5]), num_looping=12),
        replace(acceptance("d", "s", 1.0, [0.0]), num_drafted=0),
    ]
    codes = {flag.code for flag in flags_of(results)}
    assert {"looping", "nothing_drafted"} <= codes


def test_a_deviation_names_the_part_of_a_round_that_was_predicted_worst():
    lengths = replay("distilled", "held_out", 0.6).lengths
    unit = COSTS.target_s
    expected = {"draft_s": 0.006, "verify_s": unit * COSTS.verify[3], "outside_s": 0.001}
    measured = replace(
        speed("distilled", "held_out", 3, 1.0),
        plain_parts=RoundParts(draft_s=0.0, verify_s=unit, outside_s=unit * COSTS.plain_overhead),
        parts=RoundParts(**expected),
    )
    exact = predict("distilled", "held_out", lengths, COST, measured)
    at = {part.name: part for part in exact.parts}
    assert at["verification"].predicted == pytest.approx(at["verification"].timed)
    assert at["the rest of a round"].timed == pytest.approx(0.001 / unit)
    dearer = replace(measured, parts=RoundParts(**expected | {"verify_s": unit * 1.4}))
    message = deviation_message(predict("distilled", "held_out", lengths, COST, dearer))
    assert message is not None
    assert "most of it in verification: 1.12 instead of 1.40 passes" in message
