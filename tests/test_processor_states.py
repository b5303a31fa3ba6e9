"""Custom processors that remember: the state of plain decoding, whatever was drafted and refused."""

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.processor_states import remembers
from specdec_runtime.sampling_settings import SamplingSettings
from specdec_runtime.tree_growth import StaticTree
from tests.conftest import tiny_llama
from tests.test_sampling import make_sampler

PROMPTS = [[5, 6, 7], [3, 60, 3, 60, 3, 60]]


class Restless(LogitsProcessor):
    """Punishes the tokens it would have chosen at its earlier calls; counts its calls."""

    def __init__(self):
        self.num_calls = 0
        self.chosen = {}

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        scores = scores.clone()
        for token, times in self.chosen.items():
            scores[:, token] -= 0.7 * times
        scores[:, self.num_calls % 64] += 3.0
        likeliest = int(scores[0].argmax())
        self.chosen[likeliest] = self.chosen.get(likeliest, 0) + 1
        return scores


@pytest.fixture(scope="module")
def module():
    return tiny_llama(0)


def drafters(module):
    return {
        "copy": CausalLMDrafter(HFModel(module)),
        "other": CausalLMDrafter(HFModel(tiny_llama(1, num_layers=1))),
        "lookup": PromptLookupDrafter(),
    }


@pytest.mark.parametrize("drafter", ["copy", "other", "lookup"])
@pytest.mark.parametrize("num_draft_tokens", [3, StaticTree((2, 1))], ids=["chain", "tree"])
def test_text_is_that_of_transformers_own_loop(module, drafter, num_draft_tokens):
    decoder = SpeculativeDecoder(
        module, drafters(module)[drafter], num_draft_tokens=num_draft_tokens
    )
    processor = Restless()
    generation = decoder.generate(PROMPTS, max_new_tokens=20, logits_processors=[processor])
    assert processor.num_calls == 0  # the user's own is left alone
    # A copy of the target sees the same past at every position, so that all it drafts is right.
    assert (generation.stats.acceptance_rate == 1.0) == (drafter == "copy")
    for prompt, found in zip(PROMPTS, generation.token_ids, strict=True):
        expected = module.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=20,
            logits_processor=LogitsProcessorList([Restless()]),
            pad_token_id=0,
        )
        assert found == expected[0, len(prompt) :].tolist()


def test_a_processor_without_its_own_past_is_caught(module, monkeypatch):
    # The negative control: one object called for every position, refused ones included.
    monkeypatch.setattr("specdec_runtime.processor_states._copied", lambda processors: processors)
    arguments = {"max_new_tokens": 20}
    plain = SpeculativeDecoder(module).generate(
        PROMPTS[:1], logits_processors=[Restless()], **arguments
    )
    drafted = SpeculativeDecoder(module, drafters(module)["other"], num_draft_tokens=3).generate(
        PROMPTS[:1], logits_processors=[Restless()], **arguments
    )
    assert drafted.token_ids != plain.token_ids


def test_only_what_may_remember_is_copied():
    assert remembers(Restless())
    assert not remembers(NoRepeatNGramLogitsProcessor(2))
    assert remembers(SynthIDTextWatermarkLogitsProcessor(3, [1, 2], 16, 16, 8, "cpu"))


def test_what_cannot_follow_drafts_is_refused(module):
    class Held(LogitsProcessor):
        def __init__(self):
            self.lines = (line for line in "ab")  # generators cannot be copied

    guidance = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, module)
    for processor, message in ((Held(), "cannot be copied"), (guidance, "model of its own")):
        with pytest.raises(ValueError, match=message):
            SpeculativeDecoder(module).generate(
                PROMPTS, max_new_tokens=2, logits_processors=[processor]
            )
    assert SamplingSettings(logits_processors=[Restless()]).logits_processors


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("typical_p", [0.05, 0.5, 0.9, 0.999])
def test_typical_p_over_a_large_vocabulary_is_that_of_transformers(spread, typical_p):
    logits = spread * torch.randn(4, 5000, generator=torch.Generator().manual_seed(1))
    logits[:, 3000:3500] = -torch.inf  # what top-k has left out
    sampler = make_sampler(temperature=1.0, typical_p=typical_p, vocab_size=5000)
    found = sampler.probs(logits, [0] * 4) > 0.0
    expected = TypicalLogitsWarper(typical_p)(None, logits.clone()) > -torch.inf
    # Rounding of the summed mass may move the boundary by a token or two.
    assert (found != expected).sum(-1).max() <= 2
    assert (found.sum(-1) > 0).all()
