"""Trees in the loop: drafted by a model, verified in one pass, cut back to the kept path."""

import pytest
import torch

from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.sampling import Sampler, SamplingSettings
from specdec_runtime.tree_drafting import draft_trees, path, tree_inputs
from specdec_runtime.tree_growth import ROOT, BestFirstTree, StaticTree
from specdec_runtime.trees import pack_trees
from tests.conftest import plain_greedy, tiny_llama
from tests.test_greedy_decode import assert_fresh, make
from tests.toy_models import random_table

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [3, 60, 3, 60, 3]]
SHAPES = [StaticTree((3, 2, 1)), BestFirstTree(7, num_siblings=3, num_passes=3)]


def noisy_draft(module):
    """A drafter that agrees with the target now and then."""
    torch.manual_seed(0)
    draft = type(module)(module.config).eval()
    draft.load_state_dict(module.state_dict())
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    return CausalLMDrafter(HFModel(draft))


def test_padding_of_a_smaller_tree_is_not_a_level_of_it():
    inputs = tree_inputs([1, 2], pack_trees([[5, 6], []], [[-1, 0], []]))
    assert inputs.token_ids[0].tolist() == [1, 5, 6]
    assert inputs.depths.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert inputs.num_new.tolist() == [3, 1]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])  # gemma3: a sliding window of 8
def test_greedy_text_is_the_targets_own(kind, shape):
    module = make(kind)
    decoder = SpeculativeDecoder(module, noisy_draft(module), num_draft_tokens=shape)
    generation = decoder.generate(PROMPTS, max_new_tokens=24)
    assert generation.token_ids == plain_greedy(module, PROMPTS, 24)
    assert generation.stats.num_accepted > 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_cached_keys_after_every_round_equal_a_fresh_prefill(kind, shape):
    module = make(kind)
    drafter = noisy_draft(module)
    decoding = SpeculativeDecoder(module, drafter, num_draft_tokens=shape)._begin(
        PROMPTS, max_new_tokens=16, temperature=1.5, seed=0
    )
    decoding.prefill()
    while decoding.active:
        decoding.round()
        for row in decoding.active:
            assert_fresh(decoding.target.model, decoding.cache, row.index, row.tokens[:-1])
            assert_fresh(drafter.model, decoding.session.cache, row.index, _seen(decoding, row))
    assert 0.0 < decoding.result().stats.acceptance_rate < 1.0


def _seen(decoding, row):
    return row.tokens[: int(decoding.session.cache.lengths[row.index])]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_copy_of_the_target_is_followed_to_a_leaf_in_every_round(shape):
    module = tiny_llama(0, num_layers=1)
    drafter = CausalLMDrafter(HFModel(module))
    decoder = SpeculativeDecoder(module, drafter, num_draft_tokens=shape)
    generation = decoder.generate(PROMPTS[:1], max_new_tokens=40)
    # The last round may end the text before a leaf.
    assert all(entry.accepted == entry.drafted for entry in generation.rounds[:-1])
    assert len(generation.rounds) <= 14  # three levels and the bonus token each


@pytest.mark.parametrize("shape", SHAPES)
def test_penalties_see_the_path_in_front_of_each_node(shape):
    module = tiny_llama(0)
    settings = {"max_new_tokens": 20, "repetition_penalty": 1.4, "frequency_penalty": 0.5}
    plain = SpeculativeDecoder(module).generate(PROMPTS, **settings)
    drafted = SpeculativeDecoder(module, noisy_draft(module), num_draft_tokens=shape).generate(
        PROMPTS, **settings
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_accepted > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_are_not_proposed(temperature):
    sampler = make_sampler(2, temperature=temperature, logit_bias={4: float("-inf")})
    draft = draft_from_table(sampler, StaticTree((3, 3)))
    assert not (draft.tree.token_ids == 4).any()


def test_what_a_row_drafts_does_not_depend_on_the_batch_it_is_in():
    shape = BestFirstTree(8, num_siblings=3, num_passes=3)
    batch = draft_from_table(make_sampler(3, temperature=[1.0, 0.0, 1.0], seed=20), shape)
    for row, temperature in ((0, 1.0), (1, 0.0), (2, 1.0)):
        alone = draft_from_table(make_sampler(1, temperature=temperature, seed=20 + row), shape)
        assert torch.equal(batch.tree.token_ids[row], alone.tree.token_ids[0])
        assert torch.equal(batch.tree.parents[row], alone.tree.parents[0])


def test_the_distributions_handed_over_are_those_the_children_were_drawn_from():
    table = random_table(3, vocab_size=6).float()
    sampler = make_sampler(1, temperature=0.7, top_k=4)
    draft = draft_from_table(sampler, StaticTree((2, 2)), table=table)
    tokens = draft.tree.token_ids[0].tolist()
    for node in [ROOT, *(n for n, up in enumerate(draft.tree.parents[0].tolist()) if up == ROOT)]:
        context = 0 if node == ROOT else tokens[node]
        expected = sampler.probs(table[context].log()[None], [0])[0]
        assert torch.equal(draft.probs[0, node + 1], expected)
        for child, parent in enumerate(draft.tree.parents[0].tolist()):
            assert parent != node or expected[tokens[child]] > 0.0


def test_certain_drafts_claim_no_distribution():
    sampler = make_sampler(1, temperature=1.0)
    assert draft_from_table(sampler, StaticTree((2, 2)), temperature=0.0).probs is None
    assert draft_from_table(make_sampler(1), StaticTree((2, 2))).probs is None


def test_rows_without_room_get_no_tree():
    draft = draft_from_table(make_sampler(2, temperature=1.0), StaticTree((2, 2)), limits=[0, 1])
    assert draft.tree.num_nodes.tolist() == [0, 2]


def test_paths_run_from_the_root_down():
    tree = StaticTree((1, 1)).begin(9)
    tree.offer(tree.next_parents()[0], [7], [1.0])
    tree.offer(tree.next_parents()[0], [9], [1.0])
    assert (path(tree, ROOT), path(tree, 0), path(tree, 1)) == ([], [7], [7, 9])


def make_sampler(batch_size, *, seed=0, **settings):
    return Sampler(
        SamplingSettings(**settings),
        batch_size=batch_size,
        prompt_lengths=[1] * batch_size,
        eos_token_ids=(),
        real_vocab_size=6,
        device="cpu",
        seed=seed,
    )


def draft_from_table(sampler, shape, *, table=None, limits=None, temperature=None):
    """Trees for texts that end in token 0, drafted by the last token."""
    table = random_table(3, vocab_size=6).float() if table is None else table
    num_rows = len(sampler.temperatures)

    def tree_logits(members, tree):
        contexts = torch.nn.functional.pad(tree.token_ids, (1, 0))
        return table[contexts].log()

    return draft_trees(
        list(range(num_rows)),
        [[0]] * num_rows,
        limits or [9] * num_rows,
        shape=shape,
        sampler=sampler,
        tree_logits=tree_logits,
        temperature=temperature,
    )
