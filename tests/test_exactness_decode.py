"""Losslessness of the whole decoder: sampled texts of table models against the table itself.

test_exactness_kit.py proves the parts; this is the sum of them, through `generate`. The texts of
a model that looks at the last token only form a Markov chain, so the counts of what followed each
token are compared with the target's row of it by chi-squared: 8,000 draws (5,000 with trees), 16
bins, 12 degrees of freedom.
"""

import pytest
import torch

from specdec_runtime import verifier
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft_length import ConfidenceThreshold, CostAware
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.composite import CompositeDrafter
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.sampling import Sampler, SamplingSettings
from specdec_runtime.tree_growth import BestFirstTree, StaticTree
from tests.conftest import tiny_llama
from tests.table_model import TableModel
from tests.toy_models import chi_squared, chi_squared_limit, random_table

NUM_ROWS, NUM_TOKENS = 80, 100
TARGET, DRAFT = (random_table(seed, vocab_size=4, sharpness=1.0) for seed in (11, 12))


def drafter(kind):
    model = TableModel.by_token(DRAFT)
    return {
        "sampled": lambda: CausalLMDrafter(model),
        "greedy": lambda: CausalLMDrafter(model, temperature=0.0),
        "warm": lambda: CausalLMDrafter(model, temperature=2.0),
        "reversed": lambda: CausalLMDrafter(TableModel.by_token(TARGET.flip(1))),
        "lookup": PromptLookupDrafter,
        "lookup or model": lambda: CompositeDrafter(PromptLookupDrafter(), CausalLMDrafter(model)),
    }[kind]()


def misfit(drafter, num_draft_tokens, *, rule="block", num_rows=NUM_ROWS, **settings):
    """Chi-squared of what followed each token, relative to the limit a right decoder keeps to."""
    decoder = SpeculativeDecoder(
        TableModel.by_token(TARGET), drafter, num_draft_tokens=num_draft_tokens, rule=rule
    )
    arguments = {"temperature": 1.0, **settings}
    prompts = [[row % 4, 0] for row in range(num_rows)]
    generation = decoder.generate(prompts, max_new_tokens=NUM_TOKENS, seed=7, **arguments)
    assert generation.stats.num_drafted > 0
    texts = torch.tensor([[0, *text] for text in generation.token_ids])
    pairs = (4 * texts[:, :-1] + texts[:, 1:]).flatten()
    counts = torch.bincount(pairs, minlength=16).view(4, 4)
    expected = _processed(arguments)
    statistic = sum(chi_squared(counts[token], expected[token]) for token in range(4))
    return statistic / chi_squared_limit(4 * 3 + 1)


def _processed(settings):
    """[4, 4] what the target's table becomes under the settings."""
    sampler = Sampler(
        SamplingSettings(**settings),
        batch_size=1,
        prompt_lengths=[1],
        eos_token_ids=(),
        real_vocab_size=4,
        device="cpu",
    )
    return sampler.probs(TARGET.log(), [0] * 4)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("sampled", "speculative"), ("sampled", "block"), ("greedy", "block"), ("reversed", "block")],
)
def test_texts_follow_the_target_under_either_rule(kind, rule):
    assert misfit(drafter(kind), 3, rule=rule) < 1.0


@pytest.mark.parametrize("kind", ["warm", "lookup", "lookup or model"])
def test_texts_follow_the_target_whatever_drafts(kind):
    assert misfit(drafter(kind), 3) < 1.0


@pytest.mark.parametrize(
    "policy", [ConfidenceThreshold(0.5, 4), CostAware(0.2, (1.0, 1.05, 1.1, 1.2))]
)
def test_texts_follow_the_target_under_any_draft_length(policy):
    assert misfit(drafter("sampled"), policy) < 1.0


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("sampled", StaticTree((2, 2))),
        ("sampled", BestFirstTree(5, num_siblings=3, num_passes=3)),
        ("greedy", BestFirstTree(5, num_siblings=3, num_passes=3)),
    ],
)
def test_texts_follow_the_target_with_trees(kind, shape):
    assert misfit(drafter(kind), shape, num_rows=50) < 1.0


@pytest.mark.parametrize("num_draft_tokens", [3, StaticTree((2, 1))], ids=["chain", "tree"])
def test_texts_follow_the_processed_target(num_draft_tokens):
    settings = {"temperature": 0.8, "top_k": 3, "logit_bias": {1: 0.7}}
    assert misfit(drafter("sampled"), num_draft_tokens, num_rows=50, **settings) < 1.0


@pytest.mark.parametrize("num_draft_tokens", [3, StaticTree((2, 1))], ids=["chain", "tree"])
def test_a_drafter_that_did_not_draw_from_what_it_claims_is_caught(monkeypatch, num_draft_tokens):
    def likeliest(probs, uniforms):
        return probs.argmax(-1)

    monkeypatch.setattr("specdec_runtime.sampling.draw_by_inversion", likeliest)
    monkeypatch.setattr("specdec_runtime.trees.draw_by_inversion", likeliest)
    assert misfit(drafter("sampled"), num_draft_tokens, num_rows=50) > 2.0


def test_a_policy_that_looks_at_the_token_it_decides_about_is_caught(monkeypatch):
    class Dropping(CausalLMDrafter):
        def begin(self, batch_size, capacity, sampler):
            session = super().begin(batch_size, capacity, sampler)
            propose = session.propose

            def drop_the_unsure(rows, committed, lengths, features=None):
                draft = propose(rows, committed, lengths, features)
                if not draft.token_ids.shape[1]:
                    return draft
                sure = draft.probs[:, 0].gather(1, draft.token_ids[:, :1])[:, 0] > 0.4
                return draft._replace(num_drafted=draft.num_drafted * sure)

            session.propose = drop_the_unsure
            return session

    assert misfit(Dropping(TableModel.by_token(DRAFT)), 1) > 2.0


@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_the_probabilities_drawn_from_are_those_verified_against_bit_by_bit(monkeypatch, rule):
    # Case B3: bf16 models; drafting in bf16 and refusing in float32 would be two distributions.
    drawn, verified = [], []
    draw, rule_itself = Sampler.draw, getattr(verifier, f"verify_{rule}")

    def recording_draw(self, probs, rows):
        drawn.append(probs.clone())
        return draw(self, probs, rows)

    def recording_rule(draft_ids, draft_probs, *rest):
        if draft_probs is not None:
            verified.append(draft_probs.clone())
        return rule_itself(draft_ids, draft_probs, *rest)

    monkeypatch.setattr(Sampler, "draw", recording_draw)
    monkeypatch.setattr(verifier, f"verify_{rule}", recording_rule)
    target, draft = (HFModel(tiny_llama(seed).to(torch.bfloat16)) for seed in (0, 1))
    decoder = SpeculativeDecoder(target, CausalLMDrafter(draft), num_draft_tokens=3, rule=rule)
    decoder.generate([[5, 6, 7], [8, 9]], max_new_tokens=5, temperature=1.0, seed=0)
    assert drawn[0].dtype == torch.float32
    assert torch.equal(torch.stack(drawn[:3], 1), verified[0])
