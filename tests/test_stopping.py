"""Ends are exact: at the token, wherever it falls in a burst; nothing behind it is seen or counted."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StoppingCriteria

from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.target import Target, as_target, end_of_text_ids
from specdec_runtime.text import StopStrings, TextBuilder, TextStream
from tests.conftest import tiny_llama
from tests.table_model import ScriptedDrafter, TableModel

WRONG = 63


def byte_tokenizer():
    """One token a byte (256 ids), a few longer ones, and a special end marker."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    for word in ("ab", "END", "\u0120stop", "here", "!\u00c3"):  # the last: half of a character
        vocab[word] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    return tokenizer


TOKENIZER = byte_tokenizer()


def ids_of(*pieces):
    """Token ids of the given pieces; a piece that is no token is spelled in bytes."""
    vocab, ids = TOKENIZER.get_vocab(), []
    for piece in pieces:
        symbol = piece.replace(" ", "\u0120")
        ids += (
            [vocab[symbol]] if symbol in vocab and piece.isascii() else TOKENIZER(piece).input_ids
        )
    return ids


def reciting(text, *, eos=(), num_draft_tokens=4):
    """A decoder that recites `text` after its first token, with a perfect drafter."""
    model = TableModel.reciting(text, len(TOKENIZER))
    target = Target(model=model, tokenizer=TOKENIZER, eos_token_ids=tuple(eos))
    drafter = ScriptedDrafter.knowing([text], kind="perfect", wrong=WRONG)
    return SpeculativeDecoder(target, drafter, num_draft_tokens=num_draft_tokens)


@pytest.mark.parametrize("eos", [2, 7])
@pytest.mark.parametrize("position", range(1, 8))
def test_end_of_text_ends_the_row_wherever_it_falls_in_a_burst(eos, position):
    # Position 1 is the prefill's token, 2..5 the first draft, 6 its bonus token, 7 the next draft.
    answer = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
    answer[position - 1] = eos
    chunks = []
    decoder = reciting([3, *answer], eos=(2, 7))
    generation = decoder.generate([[3]], max_new_tokens=10, on_tokens=chunks.append)
    assert generation.token_ids == [answer[:position]]
    assert generation.finish_reasons == ["eos"]
    assert [token for chunk in chunks for token in chunk.token_ids] == answer[:position]
    stats = generation.stats
    assert stats.num_tokens == position
    # Tokens behind the end are neither generated nor drafted nor accepted.
    rounds = [0, 0, 1, 1, 1, 1, 1, 2][position]
    assert stats.num_rounds == rounds
    assert stats.num_accepted == min(position - 1, 4) + max(0, position - 6)
    assert stats.num_drafted == stats.num_accepted
    if rounds:
        assert stats.acceptance_rate == 1.0
        assert stats.acceptance_length == 1 + stats.num_accepted / rounds


def test_an_end_token_that_replaces_a_refused_draft_ends_the_row_too():
    target = Target(model=TableModel.reciting([3, 11, 12, 7, 14], 64), eos_token_ids=(7,))
    drafter = ScriptedDrafter.knowing([[3, 11, 12, 9, 14]], kind="perfect", wrong=WRONG)
    drafter.next_token = lambda prefix, position: [3, 11, 12, 9, 14][min(position, 4)]
    generation = SpeculativeDecoder(target, drafter, num_draft_tokens=3).generate(
        [[3]], max_new_tokens=10
    )
    assert generation.token_ids == [[11, 12, 7]]
    assert (generation.stats.num_drafted, generation.stats.num_accepted) == (3, 1)


def test_the_ends_of_the_generation_config_count():
    module = tiny_llama(0)
    module.generation_config.eos_token_id = [2, 7]
    assert as_target(module).eos_token_ids == (2, 7)
    module.generation_config.eos_token_id = None
    assert end_of_text_ids(module.generation_config, module.config) == (2,)


def test_other_settings_of_the_generation_config_are_named_and_left_to_the_call():
    module = tiny_llama(0)
    module.generation_config.repetition_penalty = 1.3
    with pytest.warns(UserWarning, match="configuration sets repetition_penalty=1.3"):
        decoder = SpeculativeDecoder(module)
    arguments = {"max_new_tokens": 12, "eos_token_id": []}
    ids = torch.tensor([[5, 6, 7]])
    theirs = module.generate(ids, do_sample=False, pad_token_id=0, max_new_tokens=12)[0, 3:]
    ours = decoder.generate([[5, 6, 7]], repetition_penalty=1.3, **arguments).token_ids[0]
    assert ours == theirs.tolist()
    assert decoder.generate([[5, 6, 7]], **arguments).token_ids[0] != ours


def test_without_any_end_of_text_the_row_runs_to_its_length():
    module = tiny_llama(0)
    module.generation_config.eos_token_id = None
    module.config.eos_token_id = module.config.pad_token_id = None
    generation = SpeculativeDecoder(module).generate([[5, 6]], max_new_tokens=7)
    assert len(generation.token_ids[0]) == 7
    assert generation.finish_reasons == ["length"]


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("pieces", "stop", "kept_tokens", "text"),
    [
        (["a", "b", "END", "c"], "END", 3, "abEND"),
        (["a", "b", "E", "N", "D", "c", "d"], "END", 5, "abEND"),  # completed over three tokens
        (["a", " stop", "here", "c", "d"], "sto", 2, "a sto"),  # ends inside a token
        (["a", " stop", "here", "c", "d"], "ophe", 3, "a stophe"),  # begins in one, ends in another
        (["a", "b", "c", "<|end|>", "d"], "<|end|>", 4, "abc"),  # a special token, skipped in text
        (["\u00e9", "x", "y", "z"], "\u00e9x", 3, "\u00e9x"),  # two tokens to a character
    ],
)
def test_stop_strings_end_the_text_exactly(pieces, stop, kept_tokens, text, num_draft_tokens):
    answer = ids_of(*pieces)
    decoder = reciting([1, *answer, 1, 1, 1, 1], num_draft_tokens=num_draft_tokens)
    texts, streamed = TextStream(TOKENIZER), []
    generation = decoder.generate(
        [[1]],
        max_new_tokens=10,
        stop_strings=[stop, "never"],
        on_tokens=lambda chunk: streamed.extend(texts.pieces(chunk)),
    )
    assert generation.token_ids == [answer[:kept_tokens]]
    assert generation.finish_reasons == ["stop"]
    assert generation.text() == text
    assert "".join(piece.text for piece in streamed) == text


@pytest.mark.parametrize("num_draft_tokens", [0, 2, 3, 8])
def test_what_follows_a_stop_string_in_a_special_token_takes_no_text_away(num_draft_tokens):
    ids = [*ids_of("h", "i", "!"), TOKENIZER.eos_token_id, *ids_of("a", "b")]
    chunks, stream = [], TextStream(TOKENIZER)
    generation = reciting([3, *ids], num_draft_tokens=num_draft_tokens).generate(
        [[3]], max_new_tokens=6, eos_token_id=[], stop_strings="<|en", on_tokens=chunks.append
    )
    assert generation.token_ids == [ids[:4]]
    assert generation.text(0) == "hi!"
    assert "".join(piece.text for chunk in chunks for piece in stream.pieces(chunk)) == "hi!"


@pytest.mark.parametrize("num_draft_tokens", [0, 2, 3, 8])
def test_a_stop_string_is_found_in_a_token_that_ends_inside_a_character(num_draft_tokens):
    first, *rest = TOKENIZER("\u00e9").input_ids
    half = TOKENIZER.convert_tokens_to_ids("!" + TOKENIZER.convert_ids_to_tokens(first))
    ids = [*ids_of("a", "b"), half, *rest, *ids_of("c")]
    chunks, stream = [], TextStream(TOKENIZER)
    generation = reciting([3, *ids], num_draft_tokens=num_draft_tokens).generate(
        [[3]], max_new_tokens=5, stop_strings="b!", on_tokens=chunks.append
    )
    assert generation.token_ids == [ids[:3]]
    assert generation.text(0) == "ab!"
    assert "".join(piece.text for chunk in chunks for piece in stream.pieces(chunk)) == "ab!"


def test_a_stop_string_in_the_prompt_ends_nothing():
    text = ids_of("E", "N", "D", "a", "b", "c")
    decoder = reciting(text)
    generation = decoder.generate([text[:3]], max_new_tokens=3, stop_strings="END")
    assert generation.finish_reasons == ["length"]
    # The first new character does not complete what the prompt began.
    half = ids_of("E", "N", "D", "a")
    generation = reciting(half).generate([half[:2]], max_new_tokens=2, stop_strings="END")
    assert generation.finish_reasons == ["length"]


def test_custom_criteria_are_asked_token_by_token():
    class AfterThree(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] == 13

    decoder = reciting([3, 11, 12, 13, 14, 15, 16])
    generation = decoder.generate([[3]], max_new_tokens=6, stopping_criteria=[AfterThree()])
    assert generation.token_ids == [[11, 12, 13]]
    assert generation.finish_reasons == ["stop"]


def test_text_is_streamed_whole_characters_at_a_time():
    ids = ids_of("a", "\u00e9", "\u4f60", "b")  # 1, 2, 3 and 1 bytes
    builder = TextBuilder(TOKENIZER)
    assert [builder.push(token) for token in ids] == ["a", "", "\u00e9", "", "", "\u4f60", "b"]
    assert builder.flush() == ""
    unfinished = TextBuilder(TOKENIZER)
    assert unfinished.push(ids[1]) == ""
    assert unfinished.flush() == "\ufffd"


def test_chunks_say_what_became_of_each_token():
    text = [3, 11, 12, 13, 14, 15, 16, 17, 18]
    target = Target(model=TableModel.reciting(text, 64))
    drafter = ScriptedDrafter.knowing([text], kind="half-right", wrong=WRONG)
    chunks = list(
        SpeculativeDecoder(target, drafter, num_draft_tokens=1).stream([[3]], max_new_tokens=6)
    )
    kinds = [pair for chunk in chunks for pair in zip(chunk.token_ids, chunk.kinds, strict=True)]
    assert kinds == [
        (11, "target"),
        (12, "accepted"),
        (13, "bonus"),
        (14, "accepted"),
        (15, "bonus"),
        (16, "target"),
    ]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, None, "length"]


def test_the_earliest_of_several_stop_strings_counts():
    stops = StopStrings(TOKENIZER, ["here", "ophe"])
    assert [stops.push(token) for token in ids_of("a", " stop", "here")] == [None, None, 2]
