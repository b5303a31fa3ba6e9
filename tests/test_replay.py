"""Replay along the target's greedy outputs gives exactly what decoding gives, at every K."""

import pytest
import torch

from eval.acceptance import acceptance_result, measure_acceptance
from eval.replay import Answer, proposals, replay, replayed_stats
from eval.suites import EvalPrompt
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target, as_target
from tests.conftest import VOCAB_SIZE, tiny_llama

MAX_NEW_TOKENS = 24
PROMPTS = [[1, *range(5 + i, 12 + 2 * i)] for i in range(6)]


@pytest.fixture(scope="module")
def target() -> Target:
    return as_target(tiny_llama(0))


def half_right_draft() -> CausalLMDrafter:
    """The target with noise on its head: often right, often wrong."""
    module = tiny_llama(0)
    torch.manual_seed(3)
    with torch.no_grad():
        module.lm_head.weight += 0.15 * torch.randn_like(module.lm_head.weight)
    return CausalLMDrafter(HFModel(module))


def reduced_vocabulary_draft() -> CausalLMDrafter:
    module = tiny_llama(0)
    kept = torch.arange(0, VOCAB_SIZE, 2)
    head = torch.nn.Linear(module.config.hidden_size, len(kept), bias=False)
    head.weight = torch.nn.Parameter(module.lm_head.weight[kept].detach().clone())
    module.lm_head = head
    return CausalLMDrafter(HFModel(module), draft_vocab=kept)


DRAFTERS = {
    "perfect": lambda: CausalLMDrafter(HFModel(tiny_llama(0))),
    "useless": lambda: CausalLMDrafter(HFModel(tiny_llama(1))),
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
    found = [proposals(target, drafter, answer, max_draft_tokens=4) for answer in answers]
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
    found = [proposals(target, drafter, answer, max_draft_tokens=3) for answer in answers]
    result = replay(answers, found, decoded=decoded, max_draft_tokens=3)
    assert not result.exact
    assert result.agrees is False


def test_replay_record_reports_agreement_and_every_length(target, answers):
    drafter = half_right_draft()
    decoded = record(greedy(target, drafter, 3))
    found = [proposals(target, drafter, answer, max_draft_tokens=4) for answer in answers]
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
