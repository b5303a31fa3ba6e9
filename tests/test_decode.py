"""The loop: lossless for any drafter, length and batch; caches exact after every round."""

import numpy as np
import pytest
import torch
from transformers import MaxLengthCriteria

from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft_length import ConfidenceThreshold
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target
from tests.conftest import plain_greedy, tiny_llama
from tests.table_model import ScriptedDrafter, TableModel

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], list(range(20, 37)), [3, 60, 3, 60, 3]]
NEVER = 63  # the token of a drafter that is wrong


def test_the_drafters_cache_holds_what_was_kept_and_drafts_as_without_a_cache():
    module = tiny_llama(0)
    draft_module = tiny_llama(0)
    with torch.no_grad():  # close to the target: accepts some, refuses some
        for parameter in draft_module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    drafter = CausalLMDrafter(HFModel(draft_module))
    decoding = SpeculativeDecoder(module, drafter, num_draft_tokens=4)._begin(
        PROMPTS[:2], max_new_tokens=16
    )
    decoding.prefill()
    while decoding.active:
        before = [list(row.tokens) for row in decoding.active]
        rows = [row.index for row in decoding.active]
        proposals = {}
        original = decoding.session.propose
        decoding.session.propose = lambda *a, f=original, p=proposals: p.setdefault("draft", f(*a))
        decoding.round()
        decoding.session.propose = original
        draft = proposals["draft"]
        for i, tokens in enumerate(before):
            for position in range(int(draft.num_drafted[i])):
                prefix = tokens + draft.token_ids[i, :position].tolist()
                logits = draft_module(torch.tensor([prefix])).logits[0, -1]
                assert int(logits.argmax()) == int(draft.token_ids[i, position])
        for row in decoding.active:
            cached = int(decoding.session.cache.lengths[row.index])
            assert cached <= len(row.tokens) - 1
            assert cached >= len(row.tokens) - 2  # at most its own last proposal is missing
            held, _ = decoding.session.cache.keys_values(0, row.index)
            fresh = drafter.model.new_cache(1, cached)
            drafter.model.forward(torch.tensor([row.tokens[:cached]]), fresh, logits=False)
            torch.testing.assert_close(held, fresh.keys_values(0, 0)[0], rtol=0, atol=1e-5)
        assert rows
    accepted = sum(row.stats.num_accepted for row in decoding.rows)
    drafted = sum(row.stats.num_drafted for row in decoding.rows)
    assert 0 < accepted < drafted  # or the test would have tested one case only


@pytest.mark.parametrize("make_drafter", ["none", "model", "lookup", "confident"])
def test_every_row_of_a_batch_decodes_as_it_does_alone(make_drafter):
    module = tiny_llama(0)
    drafters = {
        "none": lambda: None,
        "model": lambda: CausalLMDrafter(HFModel(tiny_llama(1, num_layers=1))),
        "lookup": PromptLookupDrafter,
        "confident": lambda: CausalLMDrafter(HFModel(module)),
    }
    length = 4 if make_drafter != "confident" else ConfidenceThreshold(0.5, 4)
    decoder = SpeculativeDecoder(module, drafters[make_drafter](), num_draft_tokens=length)
    temperatures = [0.0, 1.0, 0.7, 0.0]
    together = decoder.generate(PROMPTS, max_new_tokens=14, temperature=temperatures, seed=7)
    for row, prompt in enumerate(PROMPTS):
        arguments = {"temperature": temperatures[row], "seed": 7 + row}
        alone = decoder.generate([prompt], max_new_tokens=14, **arguments)
        assert together.token_ids[row] == alone.token_ids[0]
        assert together.row_stats[row] == alone.row_stats[0]


def test_rows_of_other_lengths_qualities_and_ends_decode_as_alone():
    # Case E1: prompts of 3, 9 and 17 tokens, a drafter of another quality for each.
    module, prompts = tiny_llama(0), PROMPTS[:3]
    module.generation_config.eos_token_id = None
    answers = plain_greedy(module, prompts, 40)
    end = next(
        token
        for place, token in enumerate(answers[1])
        if place >= 6 and token not in answers[0] + answers[1][:place] + answers[2]
    )
    kinds = ["half-right", "perfect", "useless"]
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    drafters = [
        ScriptedDrafter.knowing([text], kind=kind, wrong=NEVER)
        for text, kind in zip(texts, kinds, strict=True)
    ]

    def next_token(prefix, position):
        row = next(row for row, text in enumerate(texts) if text[: len(prefix)] == prefix)
        return drafters[row].next_token(prefix, position)

    decoder = SpeculativeDecoder(module, ScriptedDrafter(next_token), num_draft_tokens=4)
    arguments = {"max_new_tokens": 40, "eos_token_id": end}
    together = decoder.generate(prompts, **arguments)
    assert together.finish_reasons == ["length", "eos", "length"]
    for row, prompt in enumerate(prompts):
        alone = decoder.generate([prompt], **arguments)
        assert together.token_ids[row] == alone.token_ids[0]
        assert together.row_stats[row] == alone.row_stats[0]
        assert alone.token_ids[0] == answers[row][: len(alone.token_ids[0])]


def test_a_row_that_ends_early_leaves_the_others_alone_and_its_passes_out():
    text = [20, 5, 9, 11, 12, 13, 14]
    target = Target(model=TableModel.reciting(text, 64), eos_token_ids=(13,))
    drafter = ScriptedDrafter.knowing([text], kind="perfect", wrong=NEVER)
    generation = SpeculativeDecoder(target, drafter, num_draft_tokens=1).generate(
        [text[:1], text[:3]], max_new_tokens=8
    )
    assert generation.token_ids == [[5, 9, 11, 12, 13], [11, 12, 13]]
    assert [entry.rows for entry in generation.rounds] == [[0, 1], [0]]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5])
def test_exactly_max_new_tokens_are_returned_and_never_more_drafted_than_fit(num_tokens):
    text = [5, 9, 6, 11, 12, 13, 14, 15, 16, 17]
    model = TableModel.reciting(text, 64)
    drafter = ScriptedDrafter.knowing([text], kind="perfect", wrong=NEVER)
    generation = SpeculativeDecoder(model, drafter, num_draft_tokens=4).generate(
        [text[:1]], max_new_tokens=num_tokens
    )
    assert generation.token_ids == [text[1 : num_tokens + 1]]
    assert generation.finish_reasons == ["length"]
    for _, num_committed, asked in drafter.asked:
        assert asked <= num_tokens - (num_committed - 1) - 1  # the target adds one of its own


def test_drafting_stops_where_the_drafters_positions_end_and_the_text_goes_on():
    module, prompt = tiny_llama(0), list(range(3, 33))
    module.config.max_position_embeddings = 64
    small = tiny_llama(0)
    small.config.max_position_embeddings = 32
    answer = plain_greedy(module, [prompt], 30)[0]
    decoder = SpeculativeDecoder(
        HFModel(module), CausalLMDrafter(HFModel(small)), num_draft_tokens=4
    )
    generation = decoder.generate([prompt], max_new_tokens=30)
    assert generation.token_ids == [answer]
    lengths = [len(prompt) + 1]  # tokens committed in front of each round
    for entry in generation.rounds:
        assert lengths[-1] + entry.drafted[0] - 1 <= 32 or entry.drafted[0] == 0
        lengths.append(lengths[-1] + entry.accepted[0] + 1)
    assert generation.rounds[0].drafted[0] == 2  # 31 tokens and one draft are fed, 32 in all
    assert generation.rounds[-1].drafted[0] == 0


def test_the_end_of_the_targets_context_is_a_reason_of_its_own():
    text = list(range(3, 63)) + list(range(3, 30))
    model = TableModel.reciting(text, 64, max_positions=64)
    drafter = ScriptedDrafter.knowing([text], kind="perfect", wrong=NEVER)
    generation = SpeculativeDecoder(model, drafter, num_draft_tokens=8).generate(
        [text[:60]], max_new_tokens=30
    )
    assert generation.token_ids == [text[60:64]]
    assert generation.finish_reasons == ["context"]


@pytest.mark.parametrize("greedy_drafter", [False, True])
def test_sampled_tokens_follow_the_target_and_are_kept_at_the_overlap_rate(greedy_drafter):
    target, draft = torch.tensor([0.6, 0.4]), torch.tensor([0.8, 0.2])
    model = TableModel.by_token(target.expand(2, 2))
    drafter = CausalLMDrafter(
        TableModel.by_token(draft.expand(2, 2)), temperature=0.0 if greedy_drafter else None
    )
    decoder = SpeculativeDecoder(model, drafter, num_draft_tokens=4, rule="speculative")
    generation = decoder.generate([[0]] * 300, max_new_tokens=101, temperature=1.0, seed=0)
    tokens = torch.tensor(generation.token_ids).flatten()  # 30,300 draws, sigma 0.003
    assert abs(float((tokens == 0).float().mean()) - 0.6) < 0.011
    # sum of min(target, draft); a greedy drafter is certain: the target's mass on its token.
    overlap = 0.6 if greedy_drafter else 0.8
    for rate in generation.stats.conditional_acceptance_by_position:
        assert abs(rate - overlap) < 0.03
    # Rounds that had room for all four: .8 + .64 + .512 + .41 tokens, and the target's own one.
    whole = [
        accepted
        for entry in generation.rounds
        for accepted, limit in zip(entry.accepted, entry.limits, strict=True)
        if limit >= 4
    ]
    expected = 1 + sum(overlap**position for position in (1, 2, 3, 4))
    assert abs(1 + sum(whole) / len(whole) - expected) < 0.08


def test_penalties_see_the_drafted_tokens_in_front_of_them():
    logits = torch.full((4,), -10.0)
    logits[1], logits[2] = 2.0, 1.8

    def logits_at(positions, tokens):
        return logits.expand(*tokens.shape, 4)

    drafter = ScriptedDrafter(lambda prefix, position: 1)
    arguments = {"max_new_tokens": 8, "repetition_penalty": 1.3}
    plain = SpeculativeDecoder(TableModel(logits_at, 4)).generate([[0]], **arguments)
    drafted = SpeculativeDecoder(TableModel(logits_at, 4), drafter, num_draft_tokens=4).generate(
        [[0]], **arguments
    )
    assert plain.token_ids[0][:5] == [1, 2, 1, 1, 1]
    assert drafted.token_ids == plain.token_ids
    # What was proposed and refused leaves no trace in what comes after.
    useless = ScriptedDrafter(lambda prefix, position: 3)
    refused = SpeculativeDecoder(TableModel(logits_at, 4), useless, num_draft_tokens=4).generate(
        [[0]], **arguments
    )
    assert refused.token_ids == plain.token_ids


def test_ids_without_a_string_are_never_emitted_or_proposed():
    probs = torch.full((8, 8), 0.01)
    probs[:, 7] = 0.5  # padding of the head, and the likeliest token
    probs[:, 3] = 0.3  # a hole in the vocabulary
    model = TableModel.by_token(probs / probs.sum(1, keepdim=True))
    target = Target(model=model, real_vocab_size=7, unused_token_ids=(3,))
    drafter = CausalLMDrafter(model)
    for temperature in (0.0, 1.0):
        generation = SpeculativeDecoder(target, drafter, num_draft_tokens=3).generate(
            [[0]] * 40, max_new_tokens=20, temperature=temperature, seed=1
        )
        tokens = {token for text in generation.token_ids for token in text}
        assert not tokens & {3, 7}
        assert generation.stats.acceptance_rate == 1.0  # the drafter proposes none of them either


def test_two_calls_of_one_decoder_know_nothing_of_each_other():
    module = tiny_llama(0)
    policy = ConfidenceThreshold(0.3, 4)
    decoder = SpeculativeDecoder(module, CausalLMDrafter(HFModel(module)), num_draft_tokens=policy)
    arguments = {"max_new_tokens": 15, "temperature": 1.0, "seed": 5}
    first = decoder.generate(PROMPTS, **arguments)
    decoder.generate([[9, 9, 9]], max_new_tokens=15)
    second = decoder.generate(PROMPTS, **arguments)
    assert first.token_ids == second.token_ids
    assert [entry.drafted for entry in first.rounds] == [entry.drafted for entry in second.rounds]


BAD_REQUESTS = [
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"num_beams": 4}, "num_beams=4.*one sequence a prompt"),
    ({"num_return_sequences": 2}, "num_return_sequences=2"),
    ({"pixel_values": 1}, "pixel_values is no argument.*reads text alone"),
    ({"image_sizes": 1}, "unknown argument 'image_sizes'"),
    ({"cache_implementation": "quantized"}, "cache_implementation.*owns its cache"),
    ({"assistant_model": 1}, "assistant_model.*give SpeculativeDecoder a drafter"),
    ({"max_length": 9}, "max_length.*give max_new_tokens"),
    ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
    ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens=4 contradicts max_new_tokens=3"),
    ({"num_beams": 4, "temperature": 1.0}, "num_beams=4"),
    ({"temprature": 1.0}, "did you mean temperature"),
    ({"do_sample": True, "temperature": 0.0}, "do_sample=True contradicts temperature"),
    ({"do_sample": False, "temperature": 0.7}, "do_sample=False contradicts temperature"),
    ({"stop_strings": ["x"]}, "stop_strings need the target's tokenizer"),
    ({"top_p": 0.0, "temperature": 1.0}, "top_p"),
    ({"max_new_tokens": True}, "max_new_tokens is True"),
    ({"do_sample": "yes"}, "do_sample is 'yes'"),
    ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', expected a token id"),
    ({"eos_token_id": 1.5}, "eos_token_id is 1.5"),
    ({"eos_token_id": -1}, "eos_token_id names -1.*0 to 7: .*without any end"),
    ({"eos_token_id": [1, 8]}, "eos_token_id names 8"),
    ({"stop_strings": 3}, "stop_strings is 3, expected a text"),
    ({"stop_strings": [3]}, "stop_strings is \\[3\\]"),
    ({"stopping_criteria": MaxLengthCriteria(3)}, "stopping_criteria is .*expected a list"),
    ({"stopping_criteria": [3]}, "stopping_criteria is \\[3\\]"),
    ({"seed": 1.5, "temperature": 1.0}, "seed is 1.5, expected an integer"),
    ({"seed": "ab", "temperature": 1.0}, "seed is 'ab'"),
    ({"on_tokens": 3}, "on_tokens is 3, expected a function"),
    ({"top_k": True, "temperature": 1.0}, "top_k is True"),
    ({"min_new_tokens": True}, "min_new_tokens is True"),
    ({"pad_token_id": 0}, "pad_token_id.*without padding"),
    ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size.*NoRepeatNGramLogitsProcessor"),
    ({"max_time": 1.0}, "max_time.*MaxTimeCriteria"),
    ({"streamer": 1}, "streamer.*on_tokens"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_REQUESTS)
def test_bad_arguments_are_refused_before_any_pass(arguments, message):
    model = TableModel.reciting([1, 2, 3], 8)
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(model).generate([[1]], **{"max_new_tokens": 4, **arguments})
    assert model.num_passes == 0


def test_numpys_and_torchs_numbers_are_numbers():
    model = tiny_llama(0)
    one = np.int64(1)
    given = SpeculativeDecoder(model).generate(
        torch.tensor([[5, 6]]),
        max_new_tokens=one * 6,
        temperature=np.float32(1.0),
        top_k=one * 9,
        min_new_tokens=one * 2,
        seed=one,
        bad_words_ids=[[one * 7]],
        logit_bias={one * 8: np.float32(1.0)},
        eos_token_id=torch.tensor([2]),
    )
    plain = SpeculativeDecoder(model).generate(
        [[5, 6]],
        max_new_tokens=6,
        temperature=1.0,
        top_k=9,
        min_new_tokens=2,
        seed=1,
        bad_words_ids=[[7]],
        logit_bias={8: 1.0},
        eos_token_id=2,
    )
    assert given.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompts"),
        ([[1], []], "prompt 1 is empty"),
        ([[1, 99]], "token id 99.*0 to 7"),
        ([[1] * 20], "prompt 0 has 20 tokens.*takes 16"),
        (["text"], "need the target's tokenizer"),
        ("text", "prompts is one text, expected a list"),
        ([3, 4], "prompt 0 is a int"),
        ([{"image": 1}], "prompt 0 is a dict"),
        ({"input_ids": [[1]]}, 'a dict, expected a list of prompts: .*under "input_ids"'),
        (None, "prompts is None"),
        ([[1.5]], "prompt 0 is a list: expected text or a list of ids"),
        ([b"\1\2"], "prompt 0 is a bytes"),
        ([{1, 2}], "prompt 0 is a set"),
    ],
)
def test_bad_prompts_are_refused_before_any_pass(prompts, message):
    model = TableModel.reciting([1, 2, 3], 8, max_positions=16)
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(model).generate(prompts, max_new_tokens=4)
    assert model.num_passes == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1"),
        ({"num_draft_tokens": 2.5}, "num_draft_tokens is 2.5"),
        ({"num_draft_tokens": None}, "num_draft_tokens is None"),
        ({"num_draft_tokens": True}, "num_draft_tokens is True"),
        ({"num_draft_tokens": "many"}, "num_draft_tokens is 'many'"),
        ({"drafter": "lookup"}, "drafter is 'lookup', expected what load_drafter gives"),
        ({"target": "gpt2"}, "target is 'gpt2', expected a Target"),
        ({"rule": "greedy"}, "rule is 'greedy', expected speculative or block"),
    ],
)
def test_a_bad_decoder_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(**{"target": TableModel.reciting([1, 2], 8), **settings})


class Int8Linear(torch.nn.Module):
    """Weights in int8 with one scale a row, as quantisation libraries put in a layer's place."""

    def __init__(self, linear):
        super().__init__()
        self.out_features = linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, hidden):
        return torch.nn.functional.linear(hidden, self.weight * self.scale)


def test_a_quantised_target_keeps_its_own_text_with_a_drafter_of_another_dtype():
    quantised = tiny_llama(0)
    for module in list(quantised.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, Int8Linear(child))
    target = Target(model=HFModel(quantised), eos_token_ids=(2,))
    drafter = CausalLMDrafter(HFModel(tiny_llama(0).to(torch.bfloat16)))
    plain = SpeculativeDecoder(target).generate(PROMPTS, max_new_tokens=16)
    helped = SpeculativeDecoder(target, drafter, num_draft_tokens=3).generate(
        PROMPTS, max_new_tokens=16
    )
    assert helped.token_ids == plain.token_ids
    assert 0 < helped.stats.num_accepted < helped.stats.num_drafted
