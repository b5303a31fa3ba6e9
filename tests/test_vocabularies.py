"""Heads that are padded differently than the tokenizer they share: no id without a string, ever."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_runtime import native
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.drafters.suffix_lookup import SuffixLookupDrafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.loading import load_drafter, load_target
from specdec_runtime.target import Target
from specdec_runtime.tree_growth import StaticTree
from tests.conftest import tiny_llama
from tests.table_model import TableModel
from tests.tiny_tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer([" the", " cat"])
REAL = len(TOKENIZER)
PROMPTS = ["So the cat", "the"]


def save(folder, *, padding):
    """A model whose padded rows score higher than all others; padding below 0 lacks real ids.

    Of any padding it is the same model otherwise.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=REAL + 16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    module = LlamaForCausalLM(config)
    with torch.no_grad():
        module.model.norm.weight.copy_(module.model.norm.weight.abs())
        module.lm_head.weight[REAL:] *= 20.0
    module.resize_token_embeddings(REAL + padding)  # drops rows at the end
    module.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["eager", "native"] if native.available() else ["eager"])
def target(request, tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("target"), padding=5)
    return request.param, load_target(folder, engine=request.param)


def drafted_tokens(decoder, **arguments):
    """(texts by row, all tokens that a drafter proposed and the target kept)."""
    texts, kept = [[], []], []
    for chunk in decoder.stream(PROMPTS, max_new_tokens=24, eos_token_id=(), **arguments):
        texts[chunk.row] += chunk.token_ids
        kept += chunk.token_ids[: chunk.num_accepted]
    return texts, kept


def test_padded_rows_would_win_if_they_took_part(target):
    _, target = target
    cache = target.model.new_cache(1, 8)
    ids = torch.tensor([TOKENIZER("the").input_ids])
    logits = target.model.forward(ids, cache, last_only=True).logits
    assert int(logits.argmax(-1)) >= REAL


@pytest.mark.parametrize("padding", [0, 5, 9])
def test_any_padding_of_the_drafter_keeps_the_text_and_proposes_real_ids(target, padding, tmp_path):
    engine, target = target
    folder = save(tmp_path / "drafter", padding=padding)
    drafter = load_drafter(folder, target, engine=engine)
    plain, _ = drafted_tokens(SpeculativeDecoder(target))
    assert max(map(max, plain)) < REAL
    for shape in (3, StaticTree((2, 1))):
        decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=shape)
        texts, kept = drafted_tokens(decoder)
        assert texts == plain
        assert kept
        sampled, kept = drafted_tokens(decoder, temperature=1.5, seed=1)
        assert max(map(max, sampled)) < REAL
        assert not kept or max(kept) < REAL


def test_a_drafter_that_cannot_read_what_the_target_writes_is_refused(target, tmp_path):
    engine, target = target
    folder = save(tmp_path / "drafter", padding=-4)
    with pytest.raises(ValueError, match=f"embeds {REAL - 4} ids, the target writes {REAL}, id"):
        load_drafter(folder, target, engine=engine)


@pytest.mark.parametrize("shape", [3, StaticTree((2, 2))], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lookup_proposes_only_what_the_target_can_write(shape, temperature):
    # 7 has no string, 8 is padding, 9 and -1 are of another tokenizer, 3 is forbidden by the call.
    target = Target(
        model=TableModel.by_token(torch.full((9, 9), 1 / 9)),
        real_vocab_size=8,
        unused_token_ids=(7,),
    )
    never = (7, 8, 9, -1, 3)
    corpus = [[token, 5, wrong, 5] for wrong in never for token in range(7)]
    in_prompt = [part for token in range(7) for part in (token, 5, 3)]
    for drafter, prompt in (
        (SuffixLookupDrafter(corpus=corpus, min_match=1, tokens_per_match=9.0), [4]),
        (PromptLookupDrafter(), in_prompt),
    ):
        seen = []
        propose = drafter.begin
        drafter.begin = lambda *a, f=propose, s=seen: watched(f(*a), s)
        text = SpeculativeDecoder(target, drafter, num_draft_tokens=shape).generate(
            [prompt],
            max_new_tokens=12,
            temperature=temperature,
            seed=0,
            logit_bias={3: -torch.inf, 5: 1.0},
        )
        assert text.stats.num_drafted > 0
        assert 5 in seen
        assert not {*seen, *text.token_ids[0]} & {*never}


def watched(session, seen):
    """The session, which notes what it proposes."""

    def noting(propose):
        def note(*arguments):
            draft = propose(*arguments)
            for tokens, count in zip(draft.token_ids, draft.num_drafted, strict=True):
                seen.extend(tokens[: int(count)].tolist())
            return draft

        return note

    session.propose, session.propose_trees = map(noting, (session.propose, session.propose_trees))
    return session


def test_what_has_no_string_is_refused_in_prompts_and_draft_vocabularies():
    target = Target(model=HFModel(tiny_llama(0)), real_vocab_size=60)
    small = CausalLMDrafter(HFModel(tiny_llama(1, num_layers=1, vocab_size=60)))  # cannot read 61
    with pytest.raises(ValueError, match="prompt 0 holds token id 61, the target knows 0 to 59"):
        SpeculativeDecoder(target, small).generate([[5, 61, 6]], max_new_tokens=4)
    kept = torch.tensor([5, 6, 60])
    reduced = HFModel(tiny_llama(1), head_rows=kept)
    with pytest.raises(ValueError, match="names ids 5 to 60, the target writes 0 to 59"):
        SpeculativeDecoder(target, CausalLMDrafter(reduced, draft_vocab=kept)).generate(
            [[5]], max_new_tokens=4
        )
