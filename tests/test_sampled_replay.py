"""Acceptance expected along sampled texts is the acceptance that decoding has."""

import itertools
import math

import pytest
import torch

from eval.acceptance import length_interval, measure_acceptance
from eval.config import EvaluationConfig
from eval.measured_acceptance import greedy_acceptance, plain, sampled_acceptance
from eval.measurements import Setting
from eval.parts import Parts
from eval.progress import silent_stage
from eval.reference import Reference
from eval.replay import proposals, replayed_stats, same_counts
from eval.sampled_replay import (
    Keeps,
    expected_counts,
    is_recordable,
    keeps,
    survival,
)
from eval.suites import EvalPrompt
from eval.target_texts import Answer, TargetStates, target_scores
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.composite import CompositeDrafter
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.drafters.suffix_lookup import SuffixLookupDrafter
from specdec_runtime.target import Target, as_target
from specdec_runtime.verification import verify_block
from tests.conftest import tiny_model
from tests.test_replay import half_right_draft

LENGTH, K = 20, 3
# A repeating prompt, so that lookup has something to propose.
PROMPTS = [[1, *([7, 8, 9, 10 + i] * 3)] for i in range(4)]
NUM_SEEDS = 10
TARGET_PROBS, DRAFT_PROBS = [0.6, 0.4], [0.8, 0.2]


@pytest.fixture(scope="module")
def target() -> Target:
    return as_target(tiny_model(0))


@pytest.fixture(scope="module")
def sampled(target) -> list[tuple[Answer, list[float]]]:
    """Texts of the target at temperature 1, NUM_SEEDS of each prompt, with its log-probabilities."""
    prompts = PROMPTS * NUM_SEEDS
    found = measure_acceptance(
        target, None, prompts, num_draft_tokens=0, max_new_tokens=LENGTH, temperature=1.0,
        batch_size=len(prompts), seed=10_000,
    )  # fmt: skip
    answers = [Answer(p, ids, LENGTH) for p, ids in zip(prompts, found.token_ids, strict=True)]
    states = TargetStates(target)
    return [(a, target_scores(states, a, temperature=1.0).log_probs) for a in answers]


DRAFTERS = {
    "causal LM": half_right_draft,
    "lookup": PromptLookupDrafter,
    "composite": lambda: CompositeDrafter(SuffixLookupDrafter(min_match=2), half_right_draft()),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_expected_acceptance_is_what_decoding_with_other_draws_has(name, target, sampled):
    drafter = DRAFTERS[name]()
    assert is_recordable(drafter)
    rows = [
        expected_counts(
            answer,
            keeps(
                TargetStates(target), drafter, answer, known, temperature=1.0, max_draft_tokens=K
            ),
            K,
        )
        for answer, known in sampled
    ]
    prompts = PROMPTS * NUM_SEEDS
    decoded = measure_acceptance(
        target, drafter, prompts, num_draft_tokens=K, max_new_tokens=LENGTH, temperature=1.0,
        batch_size=len(prompts),
    )  # fmt: skip
    found, expected = decoded.length_interval(), length_interval(rows)
    # Two half widths of 95 % intervals are four standard errors.
    bound = (found.high - found.low) + (expected.high - expected.low)
    assert expected.value == pytest.approx(found.value, abs=bound)
    useless = decoded.stats.num_accepted == 0
    assert not useless
    if name == "causal LM":  # no draw of acceptance is left in it, so its interval is narrower
        assert expected.high - expected.low < found.high - found.low


def toy_log_ratio(token: int) -> float:
    return math.log(DRAFT_PROBS[token] / TARGET_PROBS[token])


def test_survival_has_the_law_of_block_verification_and_not_that_of_token_verification():
    expected = [0.0] * 4
    for text in itertools.product((0, 1), repeat=4):
        weight = math.prod(TARGET_PROBS[token] for token in text)
        for i, kept in enumerate(survival([toy_log_ratio(token) for token in text])):
            expected[i] += weight * kept
    num_rounds = 40_000
    generator = torch.Generator().manual_seed(0)
    draft = torch.tensor(DRAFT_PROBS).expand(num_rounds, 4, 2)
    ids = torch.multinomial(draft.reshape(-1, 2), 1, generator=generator).view(num_rounds, 4)
    verdict = verify_block(
        ids,
        draft,
        torch.tensor(TARGET_PROBS).expand(num_rounds, 5, 2),
        torch.full((num_rounds,), 4),
        torch.rand(num_rounds, 5, generator=generator),
    )
    found = [float((verdict.num_accepted > i).double().mean()) for i in range(4)]
    assert found == pytest.approx(expected, abs=0.01)  # four standard errors
    assert abs(expected[3] - 0.8**4) > 0.02  # what verification token by token would keep


def test_certain_keeps_give_the_counts_of_the_greedy_replay(target):
    plain_texts = measure_acceptance(
        target, None, PROMPTS, num_draft_tokens=0, max_new_tokens=LENGTH
    )
    drafter = PromptLookupDrafter()
    for prompt, text in zip(PROMPTS, plain_texts.token_ids, strict=True):
        answer = Answer(prompt, text, LENGTH)
        certain = proposals(TargetStates(target), drafter, answer, max_draft_tokens=K)
        kept = keeps(TargetStates(target), drafter, answer, [], temperature=1.0, max_draft_tokens=K)
        replayed = replayed_stats(answer, certain, K)[0]
        assert same_counts(expected_counts(answer, kept, K), replayed)


def test_expected_counts_of_one_draft_by_hand():
    # Three tokens, the first from the prefill; from token 1 on, two drafts, kept with 1/2 and 1/4.
    answer = Answer([1], [5, 6, 7], max_new_tokens=8)
    counts = expected_counts(answer, Keeps([2, 2], [[0.5, 0.25], [0.0]]), 2)
    # 1/2: refused at once, then a second round. 1/4: one kept, one refused. 1/4: both kept, end.
    assert counts.num_rounds == 1.5
    assert counts.num_accepted == 0.75
    assert counts.num_drafted == 3.0
    assert counts.accepted_by_position == [0.5, 0.25]
    assert counts.num_tokens == 3


def setting_of(target, drafter, **config) -> Setting:
    prompts = [EvalPrompt(str(i), ids) for i, ids in enumerate(PROMPTS)]
    settings = EvaluationConfig(
        max_new_tokens=LENGTH, max_draft_tokens=4, decoded_prompts=2, num_resamples=100, **config
    )
    return Setting(
        target, {"d": drafter}, {"s": prompts}, settings, Parts(None, ""), silent_stage,
        Reference(target), TargetStates(target),
    )  # fmt: skip


def test_a_few_prompts_are_decoded_and_the_others_counted_as_decoding_would(target):
    setting = setting_of(target, half_right_draft())
    measured, proposed = greedy_acceptance(setting, "d", "s", plain(setting, "s", 0.0))
    record = measured.record
    assert len(proposed) == 4
    assert (record.num_prompts, record.num_decoded) == (4, 2)
    assert [counts.decoded for counts in record.prompts] == [True, False, True, False]
    decoded = measure_acceptance(
        target, half_right_draft(), PROMPTS, num_draft_tokens=K, max_new_tokens=LENGTH
    )
    assert all(map(same_counts, record.prompts, decoded.prompts))
    assert [counts.token_ids for counts in record.prompts] == decoded.token_ids


def test_where_replay_and_decoding_differ_everything_is_decoded(target, monkeypatch):
    monkeypatch.setattr("eval.measured_acceptance.same_counts", lambda left, right: False)
    setting = setting_of(target, half_right_draft())
    record = greedy_acceptance(setting, "d", "s", plain(setting, "s", 0.0))[0].record
    assert record.num_decoded == record.num_prompts == 4


def test_sampled_acceptance_is_checked_by_decoding_where_that_is_asked_for(target, monkeypatch):
    setting = setting_of(target, half_right_draft())
    record, replayed, rounds = sampled_acceptance(setting, "d", "s", 1.0, check=True)
    total = sum(one.share * one.num_accepted for row in rounds for one in row)
    assert total == pytest.approx(record.num_accepted)
    assert record.num_decoded == 0
    assert replayed.num_decoded == 2
    assert replayed.agrees is None  # the word of two prompts does not count
    monkeypatch.setattr("eval.measured_acceptance.ENOUGH_TO_AGREE", 2)
    assert sampled_acceptance(setting, "d", "s", 1.0, check=True).sampled.agrees in (True, False)
    assert [one.num_draft_tokens for one in replayed.lengths] == [1, 2, 3, 4]
    at_three = replayed.lengths[2].acceptance_length
    assert at_three.value == pytest.approx(record.acceptance_length.value)
    unchecked = sampled_acceptance(setting, "d", "s", 1.0, check=False).sampled
    assert unchecked.decoded is None
    assert unchecked.agrees is None


def test_an_interrupted_evaluation_goes_on_behind_the_batches_that_are_done(
    target, tmp_path, monkeypatch
):
    real, asked = measure_acceptance, []

    def stops_in_the_second_batch(found_target, drafter, prompts, **options):
        asked.append(len(prompts))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(found_target, drafter, prompts, **options)

    monkeypatch.setattr("eval.measured_acceptance.measure_acceptance", stops_in_the_second_batch)
    settings = [setting_of(target, None, batch_size=3) for _ in range(2)]
    for setting in settings:
        setting.parts = Parts(tmp_path, "")
    with pytest.raises(KeyboardInterrupt):
        plain(settings[0], "s", 1.0)
    texts = plain(settings[1], "s", 1.0).token_ids
    assert asked == [3, 1, 1]  # three of four were not asked again
    assert texts == plain(setting_of(target, None), "s", 1.0).token_ids


def test_a_prompt_has_its_sampled_text_whatever_prompts_are_beside_it(target):
    setting = setting_of(target, half_right_draft())
    together = plain(setting, "s", 1.0).token_ids
    setting.suites["s"] = setting.suites["s"][2:]
    assert plain(setting, "s", 1.0).token_ids == together[2:]
    other = setting_of(target, half_right_draft(), seed=1)
    assert plain(other, "s", 1.0).token_ids != together


def test_a_drafter_whose_distribution_is_not_known_is_decoded(target):
    drafter = SuffixLookupDrafter(remembers=True)
    assert not is_recordable(drafter)
    setting = setting_of(target, drafter)
    record, replayed, rounds = sampled_acceptance(setting, "d", "s", 1.0, check=True)
    assert replayed is rounds is None
    assert record.num_decoded == 4


def test_a_copy_of_the_target_keeps_everything(target, sampled):
    answer, known = sampled[0]
    copy = CausalLMDrafter(tiny_model(0))
    kept = keeps(TargetStates(target), copy, answer, known, temperature=1.0, max_draft_tokens=K)
    assert all(value == pytest.approx(1.0) for row in kept.survival for value in row)
