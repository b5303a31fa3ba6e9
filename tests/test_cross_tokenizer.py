"""Drafting across tokenizers: the text is the target's own, by re-encoding or shared tokens."""

import itertools
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.drafters.cross_tokenizer import CrossTokenizerDrafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.retokenized import Retokenized
from specdec_runtime.target import Target
from specdec_runtime.token_bytes import _sentencepiece, shared_tokens, token_bytes
from specdec_runtime.tree_growth import StaticTree
from tests.table_model import TableModel
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.toy_decodes import Paths, generated_law

TARGET_TOKENIZER = byte_level_tokenizer([" the", " cat", " sat", "on"])
DRAFT_TOKENIZER = byte_level_tokenizer([" th", " on", "at", " \u00e9"], eos="</s>", reverse=True)
TEXT = "So the cat sat on the mat, the \u00e9clair on the hat. " * 3


def tiny(tokenizer, seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 3,  # padded
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
    )
    return HFModel(LlamaForCausalLM(config).eval())


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_a_drafter_that_knows_the_text_is_accepted_in_its_own_tokens(mode):
    target_ids = TARGET_TOKENIZER(TEXT).input_ids
    draft_ids = DRAFT_TOKENIZER(TEXT).input_ids
    assert len(target_ids) != len(draft_ids)
    target = Target(
        model=TableModel.reciting(target_ids, len(TARGET_TOKENIZER)), tokenizer=TARGET_TOKENIZER
    )
    drafter = CrossTokenizerDrafter(
        TableModel.reciting(draft_ids, len(DRAFT_TOKENIZER)),
        DRAFT_TOKENIZER,
        TARGET_TOKENIZER,
        mode=mode,
    )
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=4)
    prompt = TARGET_TOKENIZER("So the cat").input_ids
    generation = decoder.generate([prompt], max_new_tokens=80)
    assert prompt + generation.token_ids[0] == target_ids[: len(prompt) + 80]
    # Text that ends inside a token, or tokens that only one side has, cost some drafts.
    least = 0.7 if mode == "text" else 0.2
    assert generation.stats.acceptance_rate > least


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_drafting_stops_where_the_drafters_positions_end(mode):
    # Case A5; the table notices a position past its last one.
    target_ids, draft_ids = TARGET_TOKENIZER(TEXT).input_ids, DRAFT_TOKENIZER(TEXT).input_ids
    target = Target(
        model=TableModel.reciting(target_ids, len(TARGET_TOKENIZER)), tokenizer=TARGET_TOKENIZER
    )
    draft = TableModel.reciting(draft_ids, len(DRAFT_TOKENIZER), max_positions=40)
    drafter = CrossTokenizerDrafter(draft, DRAFT_TOKENIZER, TARGET_TOKENIZER, mode=mode)
    prompt = TARGET_TOKENIZER("So the cat").input_ids
    found = SpeculativeDecoder(target, drafter, num_draft_tokens=4).generate(
        [prompt], max_new_tokens=80
    )
    assert prompt + found.token_ids[0] == target_ids[: len(prompt) + 80]
    assert found.stats.num_accepted > 0
    assert not any(entry.drafted[0] for entry in found.rounds[-20:])


def test_trees_stop_where_the_drafters_positions_end():
    target = Target(
        model=tiny(TARGET_TOKENIZER, 0),
        tokenizer=TARGET_TOKENIZER,
        real_vocab_size=len(TARGET_TOKENIZER),
    )
    draft = tiny(DRAFT_TOKENIZER, 1)
    draft.max_positions = 24
    drafter = CrossTokenizerDrafter(draft, DRAFT_TOKENIZER, TARGET_TOKENIZER, mode="tokens")
    plain, drafted = (
        SpeculativeDecoder(target, one, num_draft_tokens=StaticTree((3, 3, 1))).generate(
            ["So the cat"], max_new_tokens=30
        )
        for one in (None, drafter)
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.rounds[0].drafted[0] > 0 == drafted.rounds[-2].drafted[0]


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_a_drafter_of_long_texts_gets_a_cache_for_this_one(mode):
    long_word, bytewise = byte_level_tokenizer([" thecatsatonthemat"]), byte_level_tokenizer()
    text = " thecatsatonthemat" * 20
    target_ids, draft_ids = long_word(text).input_ids, bytewise(text).input_ids
    assert len(draft_ids) == 18 * len(target_ids)
    target = Target(model=TableModel.reciting(target_ids, len(long_word)), tokenizer=long_word)
    draft, capacities = TableModel.reciting(draft_ids, len(bytewise), max_positions=1 << 30), []
    new_cache = draft.new_cache

    def noted(batch_size, capacity):
        capacities.append(capacity)
        return new_cache(batch_size, capacity)  # notices a token past its capacity

    draft.new_cache = noted
    drafter = CrossTokenizerDrafter(draft, bytewise, long_word, mode=mode)
    found = SpeculativeDecoder(target, drafter, num_draft_tokens=4).generate(
        [target_ids[:2]], max_new_tokens=18
    )
    assert found.token_ids == [target_ids[2:]]
    assert len(draft_ids) > capacities[0]
    drafted = [entry.drafted[0] for entry in found.rounds]
    assert drafted[0] > 0 == drafted[-3]  # where the drafter's tokens no longer fit, none are


@pytest.mark.parametrize("mode", ["text", "tokens"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_models_decode_as_without_a_drafter(mode, temperature):
    target = Target(
        model=tiny(TARGET_TOKENIZER, 0),
        tokenizer=TARGET_TOKENIZER,
        real_vocab_size=len(TARGET_TOKENIZER),
        eos_token_ids=(TARGET_TOKENIZER.eos_token_id,),
    )
    drafter = CrossTokenizerDrafter(
        tiny(DRAFT_TOKENIZER, 1), DRAFT_TOKENIZER, TARGET_TOKENIZER, mode=mode
    )
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=3)
    prompts = ["So the cat", "on the \u00e9"]
    arguments = {"max_new_tokens": 14, "temperature": temperature, "seed": 1}
    generation = decoder.generate(prompts, **arguments)
    if temperature == 0.0:
        plain = SpeculativeDecoder(target).generate(prompts, **arguments)
        assert generation.token_ids == plain.token_ids
    for row, prompt in enumerate(prompts):
        alone = decoder.generate([prompt], **{**arguments, "seed": 1 + row})
        assert alone.token_ids[0] == generation.token_ids[row]


def test_sampling_over_shared_tokens_follows_the_target():
    size = len(TARGET_TOKENIZER)
    a, b, the = (TARGET_TOKENIZER.get_vocab()[token] for token in ("a", "b", "\u0120the"))
    target_probs = torch.zeros(size)
    target_probs[[a, b, the]] = torch.tensor([0.5, 0.3, 0.2])  # " the" is the target's alone
    draft_probs = torch.full((len(DRAFT_TOKENIZER),), 1e-9)
    names = DRAFT_TOKENIZER.get_vocab()
    draft_probs[[names["a"], names["b"], names["\u0120on"]]] = torch.tensor([0.1, 0.4, 0.5])
    target = Target(
        model=TableModel.by_token(target_probs.expand(size, -1)), tokenizer=TARGET_TOKENIZER
    )
    draft = TableModel.by_token(draft_probs.expand(len(DRAFT_TOKENIZER), -1))
    drafter = CrossTokenizerDrafter(draft, DRAFT_TOKENIZER, TARGET_TOKENIZER)
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=2, rule="speculative")
    law = generated_law(decoder, [a], 3, Paths(108), temperature=1.0)
    shares = {a: 0.5, b: 0.3, the: 0.2}
    for text in itertools.product(shares, repeat=3):
        expected = math.prod(shares[token] for token in text)
        assert law[text] == pytest.approx(expected, abs=1e-6)
    generation = decoder.generate([[a]] * 50, max_new_tokens=31, temperature=1.0, seed=0)
    # Restricted to shared tokens and renormalised q = (0.2, 0.8): overlap 0.2 + 0.3.
    assert abs(generation.stats.acceptance_by_position[0] - 0.5) < 0.08


def test_tokens_are_matched_by_what_they_spell():
    draft_ids, target_ids = shared_tokens(DRAFT_TOKENIZER, TARGET_TOKENIZER)
    pairs = dict(zip(draft_ids.tolist(), target_ids.tolist(), strict=True))
    ours, theirs = token_bytes(DRAFT_TOKENIZER), token_bytes(TARGET_TOKENIZER)
    eos = DRAFT_TOKENIZER.eos_token_id
    assert pairs.pop(eos) == TARGET_TOKENIZER.eos_token_id
    assert all(ours[draft] == theirs[target] for draft, target in pairs.items())
    assert len(pairs) >= 256 + 1  # all bytes, and " th" on the way to " the"
    assert ours[DRAFT_TOKENIZER.get_vocab()["\u0120th"]] == b" th"
    assert _sentencepiece("\u2581the") == b" the"
    assert _sentencepiece("<0xE2>") == b"\xe2"


def test_re_encoding_follows_the_text_and_stays_local():
    text = Retokenized(DRAFT_TOKENIZER, TARGET_TOKENIZER)
    tokens = TARGET_TOKENIZER(TEXT).input_ids
    for end in range(1, len(tokens) + 1):
        text.read(tokens[:end])
        whole = TARGET_TOKENIZER.decode(tokens[:end])
        assert text.is_whole == (not whole.endswith("\ufffd"))
        if text.is_whole:
            assert DRAFT_TOKENIZER.decode(text.draft_ids) == whole
    assert text._target_anchor > len(tokens) // 2  # the tail that is re-encoded stays short
