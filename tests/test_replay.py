"""Replay along the target's greedy outputs gives exactly what decoding gives, at every K."""

import pytest
import torch

from eval.acceptance import acceptance_result, measure_acceptance
from eval.breakdown import breakdown, edge_group, groups_of, token_classes
from eval.inspection import score_answer, trace_answers, weak_prefixes
from eval.intervals import ratio_interval
from eval.replay import proposals, replay, replayed_rounds, replayed_stats
from eval.suites import EvalPrompt
from eval.target_texts import Answer, TargetStates, target_scores
from eval.text_rounds import TextRound
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.engines import make_model
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target, as_target
from tests.conftest import VOCAB_SIZE, tiny_llama, tiny_model

MAX_NEW_TOKENS = 24
PROMPTS = [[1, *range(5 + i, 12 + 2 * i)] for i in range(6)]


@pytest.fixture(scope="module")
def target() -> Target:
    return as_target(tiny_model(0))


def half_right_draft() -> CausalLMDrafter:
    """The target with noise on its head: often right, often wrong."""
    module = tiny_llama(0)
    torch.manual_seed(3)
    with torch.no_grad():
        module.lm_head.weight += 0.15 * torch.randn_like(module.lm_head.weight)
    return CausalLMDrafter(make_model(module))


def reduced_vocabulary_draft() -> CausalLMDrafter:
    module = tiny_llama(0)
    kept = torch.arange(0, VOCAB_SIZE, 2)
    head = torch.nn.Linear(module.config.hidden_size, len(kept), bias=False)
    head.weight = torch.nn.Parameter(module.lm_head.weight[kept].detach().clone())
    module.lm_head = head
    return CausalLMDrafter(HFModel(module), draft_vocab=kept)


DRAFTERS = {
    "perfect": lambda: CausalLMDrafter(tiny_model(0)),
    "useless": lambda: CausalLMDrafter(tiny_model(1)),
    "half right": half_right_draft,
    "reduced vocabulary": reduced_vocabulary_draft,
    "lookup": PromptLookupDrafter,
}


def greedy(target: Target, drafter, num_draft_tokens: int):
    return measure_acceptance(
        target,
        drafter,
        PROMPTS,
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=MAX_NEW_TOKENS,
        batch_size=8,
    )


@pytest.fixture(scope="module")
def answers(target: Target) -> list[Answer]:
    plain = greedy(target, None, 0)
    return [Answer(p, ids, MAX_NEW_TOKENS) for p, ids in zip(PROMPTS, plain.token_ids, strict=True)]


@pytest.mark.parametrize("name", DRAFTERS)
def test_replayed_counts_equal_decoded_counts_for_every_draft_length(name, target, answers):
    drafter = DRAFTERS[name]()
    found = [
        proposals(TargetStates(target), drafter, answer, max_draft_tokens=4) for answer in answers
    ]
    for k in (1, 4):
        decoded = greedy(target, drafter, k)
        replayed = [replayed_stats(a, p, k)[0] for a, p in zip(answers, found, strict=True)]
        assert replayed == decoded.prompts


def test_some_answers_of_the_fixture_end_early_and_some_at_their_length(answers):
    lengths = {len(answer.token_ids) for answer in answers}
    assert MAX_NEW_TOKENS in lengths
    assert any(answer.token_ids[-1] == 2 for answer in answers), "no end of text is exercised"


def test_replay_of_a_drafter_that_was_decoded_differently_is_not_exact(target, answers):
    drafter = half_right_draft()
    decoded = record(greedy(target, DRAFTERS["useless"](), 3))
    found = [
        proposals(TargetStates(target), drafter, answer, max_draft_tokens=3) for answer in answers
    ]
    result = replay(answers, found, decoded=decoded, max_draft_tokens=3)
    assert not result.exact
    assert result.agrees is False


def test_replay_record_reports_agreement_and_every_length(target, answers):
    drafter = half_right_draft()
    decoded = record(greedy(target, drafter, 3))
    found = [
        proposals(TargetStates(target), drafter, answer, max_draft_tokens=4) for answer in answers
    ]
    result = replay(answers, found, decoded=decoded, max_draft_tokens=4)
    assert result.exact
    assert result.agrees
    assert [length.num_draft_tokens for length in result.lengths] == [1, 2, 3, 4]
    at_three = result.lengths[2]
    assert at_three.acceptance_length.value == pytest.approx(decoded.acceptance_length.value)
    assert sum(at_three.rounds_by_drafted.values()) == at_three.num_rounds
    assert 0.1 < result.agreement.value < 0.99


def record(measured):
    return acceptance_result(
        measured,
        [EvalPrompt(str(i), ids) for i, ids in enumerate(PROMPTS)],
        drafter="draft",
        suite="prompts",
        temperature=0.0,
        num_draft_tokens=3,
    )


def entropies_of(target, answers):
    states = TargetStates(target)
    return [target_scores(states, answer, temperature=1.0).entropies for answer in answers]


def test_groups_of_places_add_up_to_what_decoding_drafted_and_kept(target, answers):
    drafter, kinds = half_right_draft(), ("even", "odd")
    prompts = [EvalPrompt(str(i), ids, kinds[i % 2]) for i, ids in enumerate(PROMPTS)]
    found = [
        proposals(TargetStates(target), drafter, answer, max_draft_tokens=3) for answer in answers
    ]
    rounds = [replayed_rounds(a, p, 3) for a, p in zip(answers, found, strict=True)]
    groups = groups_of(target, prompts, answers, entropies_of(target, answers))
    results = breakdown(
        groups,
        rounds,
        drafter="d",
        suite="s",
        temperature=0.0,
        matches=[[count > 0 for count in one.num_matching] for one in found],
        num_resamples=100,
    )
    decoded = greedy(target, drafter, 3).stats
    by_category = [one for one in results if one.by == "category"]
    assert [one.group for one in by_category] == ["even", "odd"]
    for name in ("num_drafted", "num_accepted", "num_rounds"):
        assert sum(getattr(one, name) for one in by_category) == getattr(decoded, name)
    places = sum(len(answer.token_ids) - 1 for answer in answers)
    assert sum(one.num_positions for one in by_category) == places
    for one in results:
        rate, reached = one.acceptance_rate.value, one.conditional_acceptance.value
        assert rate == pytest.approx(one.num_accepted / one.num_drafted)
        assert rate <= reached <= 1.0
        assert one.overlap is None
    share = ratio_interval(
        [sum(count > 0 for count in one.num_matching) for one in found],
        [len(one.num_matching) for one in found],
    )
    low, high = sorted(one.agreement.value for one in by_category)
    assert low <= share.value <= high
    assert {one.by for one in results} >= {"target entropy", "context length", "answer position"}


def test_rounds_that_only_may_happen_count_with_their_share(target, answers):
    answer = answers[0]
    groups = groups_of(target, [EvalPrompt("0", PROMPTS[0], "all")], [answer], [[]])
    rounds = [TextRound(1, 30, 10, 0.5), TextRound(1, 30, 0, 0.5)]
    one = next(
        found
        for found in breakdown(groups, [rounds], drafter="d", suite="s", temperature=1.0)
        if found.by == "category"
    )
    assert (one.num_rounds, one.num_drafted, one.num_accepted) == (1.0, 30.0, 5.0)
    assert one.acceptance_length.value == pytest.approx(6.0)
    # Of the first round eleven drafts are judged, of the second one.
    assert one.conditional_acceptance.value == pytest.approx(5.0 / (0.5 * 11 + 0.5))
    assert one.agreement is None


def test_overlap_is_one_for_a_perfect_drafter_and_lower_for_others(target, answers):
    perfect = score_answer(TargetStates(target), DRAFTERS["perfect"](), answers[0])
    assert perfect.overlap == pytest.approx([1.0] * len(perfect.overlap))
    useless = score_answer(TargetStates(target), DRAFTERS["useless"](), answers[0])
    assert max(useless.overlap) < 1.0


def test_weak_prefixes_are_places_where_the_top_tokens_differ(target, answers):
    drafter = half_right_draft()
    scores = [score_answer(TargetStates(target), drafter, answer) for answer in answers]
    prompts = [EvalPrompt(str(i), ids) for i, ids in enumerate(PROMPTS)]
    weak = weak_prefixes(target, prompts, answers, scores, drafter="d", suite="s")
    assert weak
    assert all(place.target_token_id != place.draft_token_id for place in weak)
    assert [place.overlap for place in weak] == sorted(place.overlap for place in weak)
    place = weak[0]
    answer = answers[int(place.prompt_id)]
    assert place.token_ids == [*answer.prompt_ids, *answer.token_ids[: place.position]]
    assert place.target_token_id == answer.token_ids[place.position]


def test_trace_tells_accepted_corrected_and_bonus_tokens_apart(target):
    prompts = [EvalPrompt("a", PROMPTS[0], None, "asked")]
    trace = trace_answers(
        target,
        half_right_draft(),
        prompts,
        None,
        num_draft_tokens=2,
        max_new_tokens=16,
        drafter_name="d",
        suite="s",
    )[0]
    kinds = [token.kind for token in trace.tokens]
    assert kinds[0] == "first"
    assert kinds.count("accepted") == sum(r.accepted for r in trace.rounds)
    ends = [r for r in trace.rounds if r.drafted > 0]
    assert kinds.count("bonus") == sum(r.accepted == r.drafted for r in ends)
    assert kinds.count("corrected") == sum(r.accepted < r.drafted for r in ends)


def test_token_classes_know_code_numbers_and_word_starts():
    texts = [" The", " cat", "s", " 42", ",", "```", "python", "\n", "x", "```", " end", "\n\n"]
    assert token_classes(texts) == [
        *("word start", "word start", "continuation", "number", "punctuation"),
        *("code", "code", "code", "code", "code", "word start", "space"),
    ]


def test_ranges_are_named_by_their_edges():
    assert [edge_group(v, (1, 2, 4)) for v in (0.5, 1, 3, 4)] == ["< 1", "1 to 2", "2 to 4", ">= 4"]
