"""Draft-length policies from a recording: the counts of decoding with them."""

import pytest

from eval.cost_model import RoundCosts
from eval.policies import compare_policies, policies, policy_stats, record
from eval.replay import proposals, replayed_stats
from eval.target_texts import Answer, TargetStates
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft_length import ConfidenceThreshold, CostAware, FixedLength
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.engines import make_model
from specdec_runtime.target import as_target
from tests.conftest import tiny_llama, tiny_model

LONGEST = 5
COSTS = RoundCosts(
    target_s=0.02,
    verify=tuple(1 + 0.1 * k for k in range(LONGEST + 1)),
    draft_cost=0.1,
    overhead=0.05,
)


@pytest.fixture(scope="module")
def decoded():
    """A target, a drafter that is right now and then, and the target's greedy answers."""
    target = as_target(tiny_model(0))
    near = tiny_llama(0)
    for parameter in near.parameters():
        parameter.data.add_(0.02 * parameter.data.abs().mean())
    drafter = CausalLMDrafter(make_model(near))
    prompts = [[3, 9, 4], [7, 7, 1, 12], [20, 5]]
    decoder = SpeculativeDecoder(target, None)
    texts = decoder.generate(prompts, max_new_tokens=40, eos_token_id=()).token_ids
    answers = [Answer(p, text, 40) for p, text in zip(prompts, texts, strict=True)]
    states = TargetStates(target)
    drafts = [record(states, drafter, answer, max_draft_tokens=LONGEST) for answer in answers]
    matching = [draft.num_matching for recorded in drafts for draft in recorded]
    assert 0 in matching
    assert LONGEST in matching
    return target, drafter, answers, drafts


@pytest.mark.parametrize(
    "policy",
    [
        FixedLength(3),
        ConfidenceThreshold(0.3, LONGEST),
        ConfidenceThreshold(0.02, LONGEST),
        CostAware(draft_cost=0.05, verify_cost=(1.0, 1.02, 1.04, 1.06, 1.08, 1.1)),
    ],
)
def test_replayed_counts_are_those_of_decoding_with_the_policy(decoded, policy):
    target, drafter, answers, drafts = decoded
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=policy)
    for answer, recorded in zip(answers, drafts, strict=True):
        stats, _ = policy_stats(policy, answer, recorded)
        found = decoder.generate(
            [answer.prompt_ids], max_new_tokens=answer.max_new_tokens, eos_token_id=()
        )
        assert found.token_ids[0] == answer.token_ids
        assert (stats.num_rounds, stats.num_drafted, stats.num_accepted) == (
            found.stats.num_rounds,
            found.stats.num_drafted,
            found.stats.num_accepted,
        )


def test_a_fixed_policy_replays_as_the_replay_of_fixed_lengths_does(decoded):
    target, drafter, answers, drafts = decoded
    for answer, recorded in zip(answers, drafts, strict=True):
        known = proposals(TargetStates(target), drafter, answer, max_draft_tokens=LONGEST)
        for length in range(1, LONGEST + 1):
            assert policy_stats(FixedLength(length), answer, recorded) == replayed_stats(
                answer, known, length
            )


def test_every_policy_is_compared_on_the_same_rounds(decoded):
    _, _, answers, drafts = decoded
    found = compare_policies(
        answers, drafts, policies(COSTS, 2), COSTS, drafter="near", suite="toy"
    )
    assert [one.policy for one in found] == list(policies(COSTS, 2))
    assert all(0 <= one.mean_drafted <= LONGEST for one in found)
    assert all(one.acceptance_length == 1 + one.num_accepted / one.num_rounds for one in found)
