"""Losslessness of the whole decoder, through `generate`: its texts have exactly the target's law.

Every pair of rule, drafter and draft-length policy is followed along every path it can take
(toy_decodes.py). What that leaves out is the noise itself: 200,000 draws in 16 bins for either
rule. test_exactness_kit.py proves the rules alone, on larger vocabularies and with trees. The
negative controls are known mistakes in the decoder's parts; each has to fail the same check.
"""

import pytest
import torch

from specdec_runtime import tree_drafting, verifier
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft_length import ConfidenceThreshold, CostAware
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.composite import CompositeDrafter
from specdec_runtime.drafters.early_exit import EarlyExitDrafter
from specdec_runtime.drafters.parallel import ParallelDrafter
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.drafters.suffix_lookup import SuffixLookupDrafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.noise import draw_by_inversion
from specdec_runtime.parallel_network import ParallelNetwork, parallel_config
from specdec_runtime.sampling import Sampler, SamplingSettings
from specdec_runtime.target import Target
from specdec_runtime.tree_growth import BestFirstTree, StaticTree
from specdec_runtime.verification import Verification, verify_speculative
from tests.conftest import tiny_llama
from tests.table_model import TableModel
from tests.toy_decodes import Paths, generated_law, plain_law
from tests.toy_models import chi_squared, chi_squared_limit, largest_error, random_table
from tests.toy_tree_decodes import siblings_by, tree_rule_by

EXACT = 1e-6  # the models' float32
WRONG = 5e-3  # what a negative control has to exceed
RULES = ["speculative", "block"]
PROMPT, LENGTH = [0, 1, 0], 4  # 16 texts
NUM_PATHS = 192  # a fixed length of two has 169; with too few rows the law is not whole, and fails
NUM_TREE_PATHS = 1536
TARGET = torch.tensor([[0.3, 0.7], [0.8, 0.2]], dtype=torch.float64)
DRAFT = torch.tensor([[0.6, 0.4], [0.55, 0.45]], dtype=torch.float64)
MODEL, DRAFT_MODEL = TableModel.by_token(TARGET), TableModel.by_token(DRAFT)
DRAFTERS = {
    "sampled": lambda: CausalLMDrafter(DRAFT_MODEL),
    "greedy": lambda: CausalLMDrafter(DRAFT_MODEL, temperature=0.0),
    "warm": lambda: CausalLMDrafter(DRAFT_MODEL, temperature=2.0),
    "copy": lambda: CausalLMDrafter(MODEL),
    "reversed": lambda: CausalLMDrafter(TableModel.by_token(TARGET.flip(1))),
    "prompt_lookup": PromptLookupDrafter,
    "suffix_lookup": lambda: SuffixLookupDrafter(min_match=1),
    "composite": lambda: CompositeDrafter(
        SuffixLookupDrafter(min_match=2), CausalLMDrafter(DRAFT_MODEL)
    ),
}
POLICIES = {
    "fixed": 2,
    "threshold": ConfidenceThreshold(0.5, 2),
    "cost-aware": CostAware(0.5, (1.0, 1.05, 1.1), acceptance=0.5),
}
# Every pair of these three is there; all triples are followed through the rules alone in
# test_exactness_kit.py.
PAIRS = [
    (drafter, policy, RULES[(i + j) % 2])
    for i, drafter in enumerate(DRAFTERS)
    for j, policy in enumerate(POLICIES)
]


def error(drafter, num_draft_tokens, *, rule="speculative", model=MODEL, paths=None, **settings):
    """Largest error in the probability of any text."""
    paths = Paths(NUM_PATHS) if paths is None else paths
    decoder = SpeculativeDecoder(
        Target(model=model), drafter, num_draft_tokens=num_draft_tokens, rule=rule
    )
    settings = {"temperature": 1.0, **settings}
    found = generated_law(decoder, PROMPT, LENGTH, paths, **settings)
    return largest_error(found, plain_law(model, PROMPT, LENGTH, **settings))


@pytest.mark.parametrize(("drafter", "policy", "rule"), PAIRS)
def test_every_text_has_the_targets_probability(drafter, policy, rule):
    assert error(DRAFTERS[drafter](), POLICIES[policy], rule=rule) < EXACT


@pytest.mark.parametrize("shape", [StaticTree((1, 2)), BestFirstTree(2, 2, 2)])
@pytest.mark.parametrize("drafter", ["sampled", "greedy"])
def test_every_text_from_a_tree_has_the_targets_probability(monkeypatch, drafter, shape):
    paths = Paths(NUM_TREE_PATHS)
    monkeypatch.setattr(tree_drafting, "draw_siblings", siblings_by(paths))
    monkeypatch.setattr(verifier, "verify_tree", tree_rule_by(paths))
    assert error(DRAFTERS[drafter](), shape, paths=paths) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_every_text_of_an_early_exit_has_the_targets_probability(rule):
    model = HFModel(tiny_llama(5, vocab_size=2))
    drafter = EarlyExitDrafter(model, exit_layer=1)
    assert error(drafter, 2, rule=rule, model=model, temperature=3.0) < EXACT


@pytest.mark.parametrize(("rule", "policy"), [("speculative", "fixed"), ("block", "threshold")])
def test_every_text_of_a_parallel_drafter_has_the_targets_probability(rule, policy):
    """The tokens of a block depend on those picked before, and its length on the confidence head."""
    module = tiny_llama(5, vocab_size=2)
    config = parallel_config(
        module.config, layer_ids=[1], draft_vocab_size=2, num_heads=2, head_dim=8,
        intermediate_size=16, markov_rank=2, block_size=2,
    )  # fmt: skip
    network = ParallelNetwork(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.5)
    drafter = ParallelDrafter(network, engine="eager")
    model = HFModel(module)
    assert error(drafter, POLICIES[policy], rule=rule, model=model, temperature=3.0) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_every_text_has_the_probability_of_the_processed_target(rule):
    settings = {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4}
    assert error(DRAFTERS["sampled"](), 2, rule=rule, logit_bias={1: 0.5}, **settings) < EXACT


@pytest.mark.parametrize("greedy", [False, True])
def test_the_case_of_a_drafter_that_prefers_what_the_target_does_not(greedy):
    # Case B1: the known wrong result is 0.75 for token 0.
    model = TableModel.by_token(torch.tensor([[0.6, 0.4]] * 2))
    draft = TableModel.by_token(torch.tensor([[0.8, 0.2]] * 2))
    drafter = CausalLMDrafter(draft, temperature=0.0 if greedy else None)
    decoder = SpeculativeDecoder(model, drafter, num_draft_tokens=1, rule="speculative")
    law = generated_law(decoder, [0], 3, Paths(128), temperature=1.0)
    for position in range(3):
        share = sum(prob for text, prob in law.items() if text[position] == 0)
        assert share == pytest.approx(0.6, abs=EXACT)


# Negative controls.


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_that_claims_another_distribution_is_caught(rule):
    class Claiming(CausalLMDrafter):
        """Drafts greedily and claims to have sampled: case B1's mistake."""

        def begin(self, batch_size, capacity, sampler):
            session = super().begin(batch_size, capacity, sampler)
            propose = session.propose

            def claim(rows, committed, lengths, features=None):
                draft = propose(rows, committed, lengths, features)
                contexts = torch.tensor([[tokens[-1]] for tokens in committed])
                contexts = torch.cat([contexts, draft.token_ids], 1)[:, :-1]
                return draft._replace(probs=DRAFT.float()[contexts])

            session.propose = claim
            return session

    assert error(Claiming(DRAFT_MODEL, temperature=0.0), 2, rule=rule) > WRONG


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_that_drops_tokens_it_is_not_sure_of_is_caught(rule):
    class Dropping(CausalLMDrafter):
        def begin(self, batch_size, capacity, sampler):
            session = super().begin(batch_size, capacity, sampler)
            propose = session.propose

            def drop_the_unsure(rows, committed, lengths, features=None):
                draft = propose(rows, committed, lengths, features)
                if not draft.token_ids.shape[1]:
                    return draft
                sure = draft.probs[:, 0].gather(1, draft.token_ids[:, :1])[:, 0] > 0.5
                return draft._replace(num_drafted=draft.num_drafted * sure)

            session.propose = drop_the_unsure
            return session

    assert error(Dropping(DRAFT_MODEL), 1, rule=rule) > WRONG


def test_a_refused_token_replaced_by_the_targets_own_is_caught(monkeypatch):
    def target_for_residual(draft_ids, draft_probs, target_probs, num_drafted, uniforms):
        right = verify_speculative(draft_ids, draft_probs, target_probs, num_drafted, uniforms)
        after = target_probs[torch.arange(len(draft_ids)), right.num_accepted]
        return Verification(right.num_accepted, draw_by_inversion(after, uniforms[:, -1]))

    monkeypatch.setattr(verifier, "verify_speculative", target_for_residual)
    assert error(DRAFTERS["sampled"](), 2, paths=Paths(4 * NUM_PATHS)) > WRONG


# The noise: 200,000 texts' worth of draws. The texts of a model that looks at the last token only
# form a Markov chain, so what followed each token is compared with the target's row of it: 16
# bins, 12 degrees of freedom.

NUM_TOKENS = 200
SHARP = random_table(11, vocab_size=4, sharpness=1.0)
NEAR = 0.7 * SHARP + 0.3 * random_table(12, vocab_size=4, sharpness=1.0)


def misfit(num_draft_tokens, *, rule="block", num_rows=1000, draft=NEAR, **settings):
    """Chi-squared of what followed each token, relative to the limit a right decoder keeps to."""
    decoder = SpeculativeDecoder(
        TableModel.by_token(SHARP),
        CausalLMDrafter(TableModel.by_token(draft)),
        num_draft_tokens=num_draft_tokens,
        rule=rule,
    )
    arguments = {"temperature": 1.0, **settings}
    prompts = [[row % 4, 0] for row in range(num_rows)]
    generation = decoder.generate(prompts, max_new_tokens=NUM_TOKENS, seed=7, **arguments)
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
    return sampler.probs(SHARP.log(), [0] * 4)


@pytest.mark.parametrize("rule", RULES)
def test_200000_draws_follow_the_target(rule):
    assert misfit(6, rule=rule) < 1.0


def test_draws_follow_the_processed_target_with_trees():
    settings = {"temperature": 0.8, "top_k": 3, "logit_bias": {1: 0.7}}
    shape = BestFirstTree(5, num_siblings=3, num_passes=3)
    assert misfit(shape, num_rows=25, **settings) < 1.0


@pytest.mark.parametrize("rule", RULES)
def test_noise_shared_between_draft_and_verification_is_caught(monkeypatch, rule):
    take_verify, drawn = Sampler.verify_uniforms, {}

    def draw(self, probs, rows):
        noise = self.draft_uniforms(rows, 1)[:, 0]
        drawn.update(zip(rows, noise.tolist(), strict=True))
        return draw_by_inversion(probs, noise)

    def verify_uniforms(self, rows, count):
        noise = take_verify(self, rows, count)
        noise[:, -1] = torch.tensor([drawn.get(row, 0.5) for row in rows]).double()
        return noise

    monkeypatch.setattr(Sampler, "draw", draw)
    monkeypatch.setattr(Sampler, "verify_uniforms", verify_uniforms)
    far = random_table(12, vocab_size=4, sharpness=1.0)
    assert misfit(1, rule=rule, num_rows=50, draft=far) > 2.0


@pytest.mark.parametrize("num_draft_tokens", [3, StaticTree((2, 1))], ids=["chain", "tree"])
def test_a_drafter_that_did_not_draw_from_what_it_claims_is_caught(monkeypatch, num_draft_tokens):
    def likeliest(probs, uniforms):
        return probs.argmax(-1)

    monkeypatch.setattr("specdec_runtime.sampling.draw_by_inversion", likeliest)
    monkeypatch.setattr("specdec_runtime.trees.draw_by_inversion", likeliest)
    assert misfit(num_draft_tokens, num_rows=20) > 2.0


@pytest.mark.parametrize("rule", RULES)
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
