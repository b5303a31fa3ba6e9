"""Token trees of every kind of drafter: the target's own text, more of it a pass, the exact law."""

import pytest
import torch

from specdec_runtime.branches import Branch
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.composite import CompositeDrafter
from specdec_runtime.drafters.cross_tokenizer import CrossTokenizerDrafter
from specdec_runtime.drafters.early_exit import EarlyExitDrafter
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.drafters.suffix_lookup import SuffixLookupDrafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target
from specdec_runtime.tree_growth import BestFirstTree, StaticTree
from specdec_runtime.trees import pack_trees, verify_tree
from tests.conftest import tiny_llama
from tests.table_model import TableModel
from tests.test_cross_tokenizer import DRAFT_TOKENIZER, TARGET_TOKENIZER, tiny
from tests.test_drafters import engines, make_drafter, make_model
from tests.toy_models import chi_squared, chi_squared_limit, random_table

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], list(range(20, 37)), [3, 60, 3, 60, 3]]
STATIC, BEST_FIRST = StaticTree((3, 2, 1)), BestFirstTree(8, num_siblings=3, num_passes=3)
KINDS = ["causal_lm", "prompt_lookup", "suffix_lookup", "early_exit", "composite"]


@pytest.fixture(scope="module", params=engines())
def plain(request):
    """(engine, target, plain greedy text)."""
    target = Target(model=make_model(tiny_llama(0), request.param), eos_token_ids=(2,))
    return request.param, target, SpeculativeDecoder(target).generate(PROMPTS, max_new_tokens=16)


@pytest.mark.parametrize("shape", [STATIC, BEST_FIRST], ids=["static", "best first"])
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_the_targets_and_rows_decode_as_alone(plain, kind, shape):
    engine, target, expected = plain
    drafter = make_drafter(kind, target.model, engine)
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=shape)
    greedy = decoder.generate(PROMPTS, max_new_tokens=16)
    assert greedy.token_ids == expected.token_ids
    assert greedy.stats.num_drafted > 0
    mixed = decoder.generate(PROMPTS, max_new_tokens=8, temperature=[1.0, 0.0, 0.7, 1.0], seed=5)
    assert mixed.token_ids[1] == expected.token_ids[1][:8]
    alone = decoder.generate([PROMPTS[2]], max_new_tokens=8, temperature=0.7, seed=7)
    assert mixed.token_ids[2] == alone.token_ids[0]


def test_lookup_branches_where_a_phrase_has_gone_on_in_two_ways():
    text = [1, 2, 3, 4, 1, 2, 5, 6, 1, 2]  # after 1 2: 3 4, and later 5 6
    for drafter in (PromptLookupDrafter(), SuffixLookupDrafter()):
        for following in ([3, 4], [5, 6]):
            model = TableModel.reciting([*text, *following, 7, 7], 16)
            decoder = SpeculativeDecoder(model, drafter, num_draft_tokens=StaticTree((2, 1)))
            generation = decoder.generate([text], max_new_tokens=4)
            assert generation.token_ids[0] == [*following, 7, 7]
    root = Branch.merged([([5, 6], 3.0), ([3, 4], 2.0), ([3, 9], 2.0)])
    assert root.likeliest(2) == ([3, 5], pytest.approx([4 / 7, 1.0]))
    assert root.at([3]).likeliest(5) == ([4, 9], pytest.approx([0.5, 1.0]))
    assert root.at([8]).likeliest(2) == ([], [])


def test_branches_are_accepted_where_a_chain_takes_the_wrong_way():
    # Each phrase goes on in its two ways by turns: the newest is always wrong, the older right.
    unit = [1, 2, 3, 1, 2, 4]
    model = TableModel.reciting(unit * 12, 16)
    accepted = {}
    for name, shape in (("chain", 1), ("tree", StaticTree((2,)))):
        decoder = SpeculativeDecoder(
            model, PromptLookupDrafter(max_ngram=2), num_draft_tokens=shape
        )
        generation = decoder.generate([unit * 2], max_new_tokens=48)
        accepted[name] = generation.stats.acceptance_rate
        assert generation.token_ids[0] == (unit * 12)[12:60]
    assert accepted["tree"] == 1.0 > accepted["chain"]


@pytest.mark.parametrize("shape", [STATIC, BEST_FIRST], ids=["static", "best first"])
def test_trees_cross_tokenizers(shape):
    target = Target(
        model=tiny(TARGET_TOKENIZER, 0),
        tokenizer=TARGET_TOKENIZER,
        real_vocab_size=len(TARGET_TOKENIZER),
        eos_token_ids=(TARGET_TOKENIZER.eos_token_id,),
    )
    drafter = CrossTokenizerDrafter(
        tiny(DRAFT_TOKENIZER, 1), DRAFT_TOKENIZER, TARGET_TOKENIZER, mode="tokens"
    )
    prompts = ["So the cat", "on the \u00e9"]
    plain = SpeculativeDecoder(target).generate(prompts, max_new_tokens=10)
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=shape)
    assert decoder.generate(prompts, max_new_tokens=10).token_ids == plain.token_ids
    sampled = decoder.generate(prompts, max_new_tokens=10, temperature=1.0, seed=3)
    alone = decoder.generate(prompts[1:], max_new_tokens=10, temperature=1.0, seed=4)
    assert sampled.token_ids[1] == alone.token_ids[0]


def test_an_early_exit_tree_leaves_the_cache_as_a_fresh_prefill_does():
    model = HFModel(tiny_llama(0))
    decoding = SpeculativeDecoder(
        model, EarlyExitDrafter(model, exit_layer=1), num_draft_tokens=STATIC
    )._begin(PROMPTS, max_new_tokens=10, temperature=1.5, seed=0)
    decoding.prefill()
    for _ in range(4):
        decoding.round()
    for row in decoding.active:
        tokens = row.tokens[:-1]
        fresh = model.new_cache(1, len(tokens))
        model.forward(torch.tensor([tokens]), fresh, logits=False)
        for layer in range(model.num_layers):
            for held, expected in zip(
                decoding.cache.keys_values(layer, row.index),
                fresh.keys_values(layer, 0),
                strict=True,
            ):
                torch.testing.assert_close(held, expected, rtol=0, atol=1e-4)


TARGET, DRAFT = (random_table(seed, vocab_size=4, sharpness=1.0) for seed in (11, 12))


def composite():
    return CompositeDrafter(
        PromptLookupDrafter(min_ngram=2), CausalLMDrafter(TableModel.by_token(DRAFT))
    )


@pytest.mark.parametrize("make", [PromptLookupDrafter, SuffixLookupDrafter, composite])
def test_texts_follow_the_target(make):
    decoder = SpeculativeDecoder(
        TableModel.by_token(TARGET), make(), num_draft_tokens=StaticTree((2, 2))
    )
    prompts = [[row % 4, 0] for row in range(50)]
    generation = decoder.generate(prompts, max_new_tokens=100, temperature=1.0, seed=7)
    assert generation.stats.num_accepted > 100
    texts = torch.tensor([[0, *text] for text in generation.token_ids])
    pairs = (4 * texts[:, :-1] + texts[:, 1:]).flatten()
    counts = torch.bincount(pairs, minlength=16).view(4, 4)
    found = sum(chi_squared(counts[token], TARGET[token]) for token in range(4))
    assert found < chi_squared_limit(4 * 3 + 1)


def test_a_chosen_tree_beside_a_drawn_one_is_verified_as_chosen():
    # Children 0 and 1 of the root; the first half of the rows chose them, the others drew them.
    half = 4000
    tree = pack_trees([[0, 1]] * (2 * half), [[-1, -1]] * (2 * half))
    draft_probs = torch.zeros(2 * half, 3, 3)
    draft_probs[half:, 0] = torch.tensor([0.5, 0.3, 0.2])
    target = torch.tensor([0.2, 0.3, 0.5]).expand(2 * half, 3, 3)
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(2 * half, 3, generator=generator, dtype=torch.float64)
    kept = verify_tree(tree, draft_probs, target, uniforms).num_accepted.view(2, half)
    # Chosen: p(0) + p(1). Drawn: 0.2 / 0.5, then (0, 0, .3) is left of the target: 1 is refused.
    shares = kept.double().mean(1).tolist()
    assert shares == pytest.approx([0.5, 0.4], abs=0.04)  # 5 sigma
