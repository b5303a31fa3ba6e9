"""The loop: lossless for any drafter, length and batch; caches exact after every round."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM

from specdec_runtime import native
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft_length import ConfidenceThreshold
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.early_exit import EarlyExitDrafter
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target
from tests.conftest import tiny_llama
from tests.table_model import ScriptedDrafter, TableModel

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], list(range(20, 37)), [3, 60, 3, 60, 3]]
NEVER = 63  # the useless drafter's token; no model below emits it (asserted)
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make(kind, **settings):
    torch.manual_seed(3)
    if kind == "llama":
        return tiny_llama(0)
    if kind == "gemma3":
        layer_types = ["sliding_attention", "full_attention"]
        config = Gemma3TextConfig(**SHAPE, sliding_window=8, layer_types=layer_types, **settings)
        return Gemma3ForCausalLM(config).eval()
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()


def plain_greedy(module, prompts, num_tokens):
    """transformers' own greedy decoding; it pads on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = module.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
    )
    answers = output[:, width:].tolist()
    # generate fills rows that ended with padding.
    return [answer[: answer.index(2) + 1] if 2 in answer else answer for answer in answers]


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3"])
def case(request):
    """(module, what transformers' generate says) per kind of model: 200 or 60 tokens."""
    module = make(request.param)
    # A token that no text holds, so that the useless drafter is useless in every round.
    with torch.no_grad():
        module.get_output_embeddings().weight[NEVER] = 0.0
    answers = plain_greedy(module, PROMPTS, 200 if request.param == "llama" else 60)
    assert all(NEVER not in answer for answer in answers)
    return module, answers


DRAFT_LENGTHS = {"perfect": (2, 8), "useless": (4,), "half-right": (1, 2, 4, 8)}


@pytest.mark.parametrize("quality", DRAFT_LENGTHS)
def test_greedy_text_is_the_targets_own_for_any_drafter_and_length(case, quality):
    module, answers = case
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    drafter = ScriptedDrafter.knowing(texts, kind=quality, wrong=NEVER)
    for num_draft_tokens in DRAFT_LENGTHS[quality]:
        decoder = SpeculativeDecoder(module, drafter, num_draft_tokens=num_draft_tokens)
        num_tokens = 60 if quality == "useless" else max(map(len, answers))
        generation = decoder.generate(PROMPTS, max_new_tokens=num_tokens)
        assert generation.token_ids == [answer[:num_tokens] for answer in answers]
        if quality != "half-right":
            assert generation.stats.acceptance_rate == (1.0 if quality == "perfect" else 0.0)
    alone = SpeculativeDecoder(module, drafter, num_draft_tokens=4)
    for prompt, answer in zip(PROMPTS[:2], answers, strict=False):
        text = alone.generate([prompt], max_new_tokens=20).token_ids[0]
        assert text == answer[:20]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_roll_back_is_exact_before_at_and_after_the_window_fills(implementation):
    module = make("gemma3", attn_implementation=implementation)
    prompt = [5, 6, 7, 8, 9, 10]  # window 8
    answer = plain_greedy(module, [prompt], 40)[0]
    drafter = ScriptedDrafter.knowing([prompt + answer], kind="half-right", wrong=NEVER)
    decoder = SpeculativeDecoder(module, drafter, num_draft_tokens=4)
    assert decoder.generate([prompt], max_new_tokens=40).token_ids == [answer]


def test_cached_keys_after_every_round_equal_a_fresh_prefill(case):
    module, answers = case
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    drafter = ScriptedDrafter.knowing(texts, kind="half-right", wrong=NEVER)
    decoding = SpeculativeDecoder(module, drafter, num_draft_tokens=4)._begin(
        PROMPTS, max_new_tokens=16
    )
    decoding.prefill()
    while decoding.active:
        decoding.round()
        for row in decoding.active:
            assert_fresh(decoding.target.model, decoding.cache, row.index, row.tokens[:-1])


def assert_fresh(model, cache, row, tokens):
    """The cache of `row` holds exactly the keys and values of `tokens`, to rounding."""
    assert int(cache.lengths[row]) == len(tokens)
    fresh = model.new_cache(1, len(tokens))
    model.forward(torch.tensor([tokens]), fresh, logits=False)
    for layer in range(model.num_layers):
        for held, expected in zip(
            cache.keys_values(layer, row), fresh.keys_values(layer, 0), strict=True
        ):
            torch.testing.assert_close(held, expected, rtol=0, atol=1e-5 * held.abs().max().item())


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("engine", ["eager", "native"])
def test_a_copy_of_the_target_is_accepted_in_every_round(engine, num_draft_tokens):
    module = tiny_llama(0, num_layers=1)
    if engine == "native" and not native.available():
        pytest.skip(native.unavailable_reason())
    model = HFModel(module) if engine == "eager" else native.NativeModel.from_hf(module)
    num_tokens = 500 if engine == "native" else 80
    decoder = SpeculativeDecoder(
        Target(model=model), CausalLMDrafter(model), num_draft_tokens=num_draft_tokens
    )
    generation = decoder.generate([[5, 6, 7]], max_new_tokens=num_tokens)
    assert all(entry.accepted == entry.drafted for entry in generation.rounds)
    assert generation.stats.acceptance_rate == 1.0
    # All but the token of the prefill come in rounds of K + 1.
    assert len(generation.rounds) == -(-(num_tokens - 1) // (num_draft_tokens + 1))


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
    ({"pixel_values": 1}, "unknown argument 'pixel_values'"),
    ({"temprature": 1.0}, "did you mean temperature"),
    ({"do_sample": True, "temperature": 0.0}, "do_sample=True contradicts temperature"),
    ({"do_sample": False, "temperature": 0.7}, "do_sample=False contradicts temperature"),
    ({"stop_strings": ["x"]}, "stop_strings need the target's tokenizer"),
    ({"top_p": 0.0, "temperature": 1.0}, "top_p"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_REQUESTS)
def test_bad_arguments_are_refused_before_any_pass(arguments, message):
    model = TableModel.reciting([1, 2, 3], 8)
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(model).generate([[1]], **{"max_new_tokens": 4, **arguments})
    assert model.num_passes == 0


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompts"),
        ([[1], []], "prompt 1 is empty"),
        ([[1, 99]], "token id 99.*0 to 7"),
        ([[1] * 20], "prompt 0 has 20 tokens.*takes 16"),
        (["text"], "need the target's tokenizer"),
        ([{"image": 1}], "prompt 0 is a dict"),
    ],
)
def test_bad_prompts_are_refused_before_any_pass(prompts, message):
    model = TableModel.reciting([1, 2, 3], 8, max_positions=16)
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(model).generate(prompts, max_new_tokens=4)
    assert model.num_passes == 0


def test_a_negative_draft_length_is_refused():
    with pytest.raises(ValueError, match="num_draft_tokens is -1"):
        SpeculativeDecoder(TableModel.reciting([1, 2], 8), num_draft_tokens=-1)


@pytest.mark.parametrize("help_", ["assistant", "prompt lookup", "early exit"])
def test_transformers_own_speculation_agrees(help_):
    module, draft = tiny_llama(0), tiny_llama(1, num_layers=1)
    prompt = PROMPTS[3]
    theirs, ours = {
        "assistant": ({"assistant_model": draft}, CausalLMDrafter(HFModel(draft))),
        "prompt lookup": ({"prompt_lookup_num_tokens": 3}, PromptLookupDrafter()),
        "early exit": (
            {"assistant_early_exit": 1},
            EarlyExitDrafter(HFModel(module), exit_layer=1),
        ),
    }[help_]
    ids = torch.tensor([prompt])
    expected = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=24,
        pad_token_id=0,
        **theirs,
    )[0, len(prompt) :].tolist()
    target = Target(model=ours.model if help_ == "early exit" else HFModel(module))
    target.eos_token_ids = (2,)
    generation = SpeculativeDecoder(target, ours, num_draft_tokens=3).generate(
        [prompt], max_new_tokens=24
    )
    assert generation.token_ids[0] == expected


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
