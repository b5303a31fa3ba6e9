"""Losslessness: every rule, drafter and draft-length policy against the exact law of the text.

The law of a decode is computed (toy_models.py, toy_trees.py) and has to equal the target's to 1e-9.
The negative controls are known mistakes; each has to fail the same check, or the check proves
nothing. What cannot be enumerated, the sampler's own noise: 200,000 draws through the whole decoder
in test_exactness_decode.py.
"""

import pytest
import torch

from specdec_runtime.draft_length import ConfidenceThreshold, CostAware, FixedLength
from specdec_runtime.noise import draw_by_inversion
from specdec_runtime.tree_growth import BestFirstTree, StaticTree
from specdec_runtime.trees import verify_tree
from specdec_runtime.verification import Verification, verify_block, verify_speculative
from tests.toy_models import (
    ToyDrafter,
    chain_error,
    largest_error,
    learning_decode_law,
    random_table,
    text_law,
)
from tests.toy_trees import likeliest, tree_error, with_replacement

EXACT = 1e-9  # bisection leaves 1e-12
WRONG = 5e-3  # what a negative control has to exceed
RULES = [
    pytest.param(verify_speculative, False, id="speculative"),
    pytest.param(verify_block, True, id="block"),
]
TARGET, OTHER = random_table(0), random_table(1)
DRAFTERS = {
    "sampled": ToyDrafter(OTHER),
    "reversed": ToyDrafter(TARGET.flip(1)),
    "copy": ToyDrafter(TARGET),
    "one token only": ToyDrafter(torch.tensor([[1.0, 0.0, 0.0]] * 3, dtype=torch.float64)),
    "greedy, one-hot": ToyDrafter(OTHER, greedy=True),
    "greedy, certain": ToyDrafter(OTHER, greedy=True, claimed="certain"),
    "sampled, certain": ToyDrafter(OTHER, claimed="certain"),  # lossless, though it wastes q
}
REVERSED_TARGET = torch.tensor([[0.3, 0.7], [0.8, 0.2]], dtype=torch.float64)
REVERSED_DRAFT = REVERSED_TARGET.flip(1)
POLICIES = {
    "none": FixedLength(0),
    "fixed": FixedLength(2),
    "threshold": ConfidenceThreshold(0.4, 3),
}


@pytest.mark.parametrize(("rule", "block"), RULES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_decode_has_the_law_of_the_target(rule, block, policy, drafter):
    session = POLICIES[policy].begin(1)
    assert chain_error(rule, TARGET, DRAFTERS[drafter], session, block=block) < EXACT


@pytest.mark.parametrize(("rule", "block"), RULES)
def test_a_target_with_forbidden_tokens_keeps_its_law(rule, block):
    target = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [0.2, 0.8, 0.0]], dtype=torch.float64)
    session = FixedLength(2).begin(1)
    assert chain_error(rule, target, ToyDrafter(OTHER), session, block=block) < EXACT


@pytest.mark.parametrize(("rule", "block"), RULES)
def test_any_policy_that_sees_only_what_is_in_front_is_exact(rule, block):
    class Whim:
        """Draft lengths without reason, as a function of the tokens in front."""

        def wants_more(self, row, confidences):
            return len(confidences) < 3 and int(1000 * sum(confidences)) % 3 != 1

        def end_round(self, row, confidences, num_accepted):
            pass

    assert chain_error(rule, TARGET, ToyDrafter(OTHER), Whim(), block=block) < EXACT


@pytest.mark.parametrize(("rule", "block"), RULES)
def test_a_policy_that_learns_from_its_rounds_is_exact(rule, block):
    target, draft = REVERSED_TARGET, ToyDrafter(REVERSED_DRAFT)
    # Two tokens if the first was likely, one if not; after a refusal one in either case.
    session = CostAware(0.3, (1.0, 1.0, 1.0), acceptance=0.5).begin(1)
    law = learning_decode_law(rule, target, draft, session, block=block, start=0, length=3)
    assert largest_error(law, text_law(target, 0, 3)) < EXACT


@pytest.mark.parametrize(("rule", "block"), RULES)
def test_float32_is_exact_to_float32(rule, block):
    drafter = ToyDrafter(OTHER.float())
    session = FixedLength(2).begin(1)
    assert chain_error(rule, TARGET.float(), drafter, session, block=block, length=3) < 1e-6


TREES = {
    "siblings": StaticTree((3,)),
    "static": StaticTree((2, 1)),
    "best first": BestFirstTree(num_nodes=3, num_siblings=2, num_passes=3),
    "best first, few passes": BestFirstTree(num_nodes=4, num_siblings=3, num_passes=2),
}


@pytest.mark.parametrize("shape", TREES)
def test_a_decode_with_trees_has_the_law_of_the_target(shape):
    assert tree_error(verify_tree, TARGET, OTHER, TREES[shape], claimed=OTHER) < EXACT


@pytest.mark.parametrize("shape", ["static", "best first"])
def test_trees_of_the_likeliest_tokens_are_exact_as_certain_drafts(shape):
    error = tree_error(verify_tree, TARGET, OTHER, TREES[shape], claimed=None, draws=likeliest)
    assert error < EXACT


# Negative controls: known mistakes, each caught by the checks above.


@pytest.mark.parametrize(("rule", "block"), RULES)
def test_a_greedy_draft_with_soft_probabilities_is_caught(rule, block):
    drafter = ToyDrafter(OTHER, greedy=True, claimed="soft")
    session = FixedLength(2).begin(1)
    assert chain_error(rule, TARGET, drafter, session, block=block) > WRONG


def test_recovering_from_the_target_itself_is_caught():
    def target_for_residual(draft_ids, draft_probs, target_probs, num_drafted, uniforms):
        right = verify_speculative(draft_ids, draft_probs, target_probs, num_drafted, uniforms)
        after = target_probs[torch.arange(len(draft_ids)), right.num_accepted]
        return Verification(right.num_accepted, draw_by_inversion(after, uniforms[:, -1]))

    session = FixedLength(2).begin(1)
    error = chain_error(target_for_residual, TARGET, ToyDrafter(OTHER), session, block=False)
    assert error > WRONG


@pytest.mark.parametrize("right_residual", [True, False])
def test_token_wise_tests_inside_block_verification_are_caught(right_residual):
    def token_wise_block(draft_ids, draft_probs, target_probs, num_drafted, uniforms):
        index = draft_ids[:, :, None]
        p = target_probs[:, :-1].gather(2, index).squeeze(2)
        q = draft_probs.gather(2, index).squeeze(2)
        position = torch.arange(1, draft_ids.shape[1] + 1)
        kept = (uniforms[:, :-1] * q < p) & (position <= num_drafted[:, None])
        num_accepted = (kept * position).amax(1)
        row, near = torch.arange(len(draft_ids)), num_accepted.clamp_max(draft_ids.shape[1] - 1)
        target = target_probs[row, num_accepted]
        residual = (target - draft_probs[row, near]).clamp_min(0.0)
        refused = (num_accepted < num_drafted) & (residual.sum(-1) > 0.0) & right_residual
        return Verification(
            num_accepted,
            draw_by_inversion(torch.where(refused[:, None], residual, target), uniforms[:, -1]),
        )

    session = FixedLength(2).begin(1)
    error = chain_error(token_wise_block, TARGET, ToyDrafter(OTHER), session, block=True)
    assert error > WRONG


@pytest.mark.parametrize(("rule", "block"), RULES)
def test_dropping_a_drawn_token_of_low_confidence_is_caught(rule, block):
    def drop_last_if_unsure(tokens, confidences):
        return len(tokens) - (confidences[-1] < 0.4)

    session = FixedLength(1).begin(1)
    error = chain_error(
        rule, TARGET, ToyDrafter(OTHER), session, block=block, submit=drop_last_if_unsure
    )
    assert error > WRONG


def test_the_published_example_of_a_dropped_token_is_reproduced():
    # DSpark's counterexample: target (.7, .3), and a draft that is verified only if it is 0.
    target = torch.tensor([[0.7, 0.3]] * 2, dtype=torch.float64)
    draft = ToyDrafter(torch.full((2, 2), 0.5, dtype=torch.float64))
    error = chain_error(
        verify_speculative,
        target,
        draft,
        FixedLength(1).begin(1),
        block=False,
        length=1,
        submit=lambda tokens, confidences: int(tokens[0] == 0),
    )
    assert error == pytest.approx(0.15, abs=EXACT)


def test_siblings_drawn_with_replacement_are_caught():
    drafted = random_table(5)
    shape = StaticTree((2,))
    assert tree_error(verify_tree, TARGET, drafted, shape, claimed=drafted) < EXACT
    replaced = tree_error(
        verify_tree, TARGET, drafted, shape, draws=with_replacement, claimed=drafted
    )
    assert replaced > WRONG


def test_the_likeliest_siblings_with_soft_probabilities_are_caught():
    shape = StaticTree((2,))
    error = tree_error(verify_tree, TARGET, OTHER, shape, draws=likeliest, claimed=OTHER)
    assert error > WRONG
