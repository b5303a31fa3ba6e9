"""Heads that are padded differently than the tokenizer they share: no id without a string, ever."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_runtime import native
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.loading import load_drafter, load_target
from specdec_runtime.tree_growth import StaticTree
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
