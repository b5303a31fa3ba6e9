"""Sampling: the same distributions as transformers' `generate`, whatever was drafted before."""

import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from specdec_runtime.sampling import Sampler, SamplingSettings
from tests.toy_models import chi_squared, chi_squared_limit

PROMPT = [1, 5, 9, 5, 30, 7]
EOS = 2


def make_sampler(
    batch_size=1, *, prompt_lengths=None, eos=(EOS,), vocab_size=64, seed=0, **settings
):
    return Sampler(
        SamplingSettings(**settings),
        batch_size=batch_size,
        prompt_lengths=prompt_lengths or [len(PROMPT)] * batch_size,
        eos_token_ids=eos,
        real_vocab_size=vocab_size,
        device="cpu",
        seed=seed,
    )


def random_logits(*shape, seed=0):
    return 3.0 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"typical_p": 0.7},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95},
        {"repetition_penalty": 1.8},
        {"min_new_tokens": 4},
        {"bad_words_ids": [[7], [5, 9], [11, 12, 13]]},
        {"logit_bias": {3: 4.0, 8: -math.inf}},
        {"repetition_penalty": 1.3, "logit_bias": {3: 4.0}, "top_p": 0.9, "temperature": 0.9},
        {"logits_processors": [NoRepeatNGramLogitsProcessor(2)], "top_k": 10},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
@pytest.mark.parametrize("do_sample", [True, False])
def test_every_setting_means_what_generate_means_by_it(tiny_target, settings, do_sample):
    sampling_only = {"temperature", "top_k", "top_p", "min_p", "typical_p"}
    if not do_sample:
        settings = {name: value for name, value in settings.items() if name not in sampling_only}
    reference = _generate_with_scores(tiny_target, settings, do_sample=do_sample)
    sampler = make_sampler(**{"temperature": float(do_sample), **settings})
    tokens = reference.sequences[0].tolist()
    steps = range(len(PROMPT), len(tokens))
    # All positions at once, as one verification pass has them.
    logits = torch.cat(reference.logits)
    histories = [tokens[:length] for length in steps]
    probs = sampler.probs(logits, [0] * len(logits), histories)
    if do_sample:
        expected = torch.cat(reference.scores).softmax(-1)
        assert torch.allclose(probs, expected, atol=1e-6)
        assert torch.equal(probs > 0.0, expected > 0.0)
    else:
        assert (
            sampler.argmax(logits, [0] * len(logits), histories).tolist() == tokens[len(PROMPT) :]
        )
        assert torch.equal(probs.argmax(-1), torch.tensor(tokens[len(PROMPT) :]))
        assert set(probs.unique().tolist()) == {0.0, 1.0}


def _generate_with_scores(model, settings, *, do_sample):
    arguments = dict(settings)
    processors = LogitsProcessorList(arguments.pop("logits_processors", []))
    if bias := arguments.pop("logit_bias", None):
        arguments["sequence_bias"] = [[[token], value] for token, value in bias.items()]
    torch.manual_seed(0)
    return model.generate(
        torch.tensor([PROMPT]),
        do_sample=do_sample,
        max_new_tokens=8,
        logits_processor=processors,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **({"top_k": 0} | arguments if do_sample else arguments),
    )


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_over_a_large_vocabulary_is_that_of_transformers(spread, top_p):
    # Flat logits need far more tokens than are looked at first.
    logits = spread * torch.randn(4, 5000, generator=torch.Generator().manual_seed(1))
    sampler = make_sampler(temperature=1.0, top_p=top_p, vocab_size=5000)
    found = sampler.probs(logits, [0] * 4) > 0.0
    expected = TopPLogitsWarper(top_p)(None, logits) > -math.inf
    # Rounding of the summed mass may move the boundary by a token or two.
    assert (found != expected).sum(-1).max() <= 2
    assert (found.sum(-1) > 0).all()


def test_presence_and_frequency_penalties_count_the_output_only():
    sampler = make_sampler(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    logits = random_logits(1, 64)
    history = [*PROMPT, 4, 4, 4, 6]  # 5 occurs in the prompt only
    expected = logits.clone()
    expected[0, 4] -= 0.5 + 3 * 0.25
    expected[0, 6] -= 0.5 + 0.25
    assert torch.allclose(sampler.probs(logits, [0], [history]), expected.softmax(-1))


def test_a_position_sees_the_drafted_tokens_in_front_of_it():
    # Case B6: logits A = 2.0, B = 1.8, repetition penalty 1.3, the drafter proposes A, A, A, A.
    sampler = make_sampler(prompt_lengths=[1], repetition_penalty=1.3, vocab_size=3)
    logits = torch.tensor([[2.0, 1.8, -10.0]]).repeat(5, 1)
    drafted = [[2] + [0] * position for position in range(5)]
    choices = sampler.argmax(logits, [0] * 5, drafted).tolist()
    assert choices == [0, 1, 1, 1, 1]  # A is kept, then B refuses the second A
    assert sampler.argmax(logits[:3], [0] * 3, [[2], [2, 0], [2, 0, 1]]).tolist() == [0, 1, 0]


def test_a_refused_draft_leaves_no_trace():
    settings = {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "min_new_tokens": 3,
        "logits_processors": [NoRepeatNGramLogitsProcessor(2)],
    }
    logits = random_logits(1, 64)
    drafted, fresh = make_sampler(**settings), make_sampler(**settings)
    for length in (3, 7, 5):
        drafted.probs(random_logits(1, 64, seed=length), [0], [PROMPT + [8] * length])
    assert torch.equal(
        drafted.probs(logits, [0], [[*PROMPT, 3]]), fresh.probs(logits, [0], [[*PROMPT, 3]])
    )


def test_logits_handed_in_are_left_as_they_are():
    logits = random_logits(2, 64)
    before = logits.clone()
    processors = [lambda tokens, scores: scores.zero_()]  # one that works in place
    make_sampler(temperature=1.0, logits_processors=processors).probs(
        logits, [0, 0], [PROMPT, PROMPT]
    )
    assert torch.equal(logits, before)


def test_positions_of_many_rows_at_once_equal_one_by_one():
    sampler = make_sampler(
        3,
        prompt_lengths=[2, 6, 4],
        temperature=[0.0, 0.7, 1.3],
        top_p=0.9,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        min_new_tokens=3,
        bad_words_ids=[[5, 9], [4]],
        logits_processors=[NoRepeatNGramLogitsProcessor(3)],
    )
    rows = [0, 0, 1, 1, 2, 2, 2]
    histories = [[1, 5], [1, 5, 2], PROMPT, [*PROMPT, 5], [5, 6, 7, 8], [5, 6, 7, 8, 5], PROMPT]
    logits = random_logits(7, 64)
    together = sampler.probs(logits, rows, histories)
    for i, (row, history) in enumerate(zip(rows, histories, strict=True)):
        alone = sampler.probs(logits[i : i + 1], [row], [history])
        assert torch.allclose(together[i], alone[0], atol=1e-7)


def test_a_batch_may_mix_greedy_and_sampled_rows():
    sampler = make_sampler(3, temperature=[0.0, 1.0, 2.0])
    logits = random_logits(3, 64)
    probs = sampler.probs(logits, [0, 1, 2])
    assert probs[0].max() == 1.0
    assert probs[0].argmax() == logits[0].argmax()
    assert torch.allclose(probs[1], logits[1].softmax(-1))
    assert torch.allclose(probs[2], (logits[2] / 2).softmax(-1))
    assert sampler.greedy.tolist() == [True, False, False]
    assert not sampler.all_greedy


def test_a_draft_temperature_changes_sampled_rows_only():
    sampler = make_sampler(2, temperature=[0.0, 1.0])
    logits = random_logits(2, 64)
    probs = sampler.probs(logits, [0, 1], temperature=0.5)
    assert probs[0].max() == 1.0
    assert torch.allclose(probs[1], (logits[1] / 0.5).softmax(-1))
    certain = sampler.probs(logits, [0, 1], temperature=0.0)
    assert certain.max(-1).values.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_ids_are_not_in_the_distribution(temperature):
    sampler = make_sampler(temperature=temperature, vocab_size=50)
    logits = random_logits(4, 64)
    logits[:, 50:] += 100.0
    probs = sampler.probs(logits, [0] * 4)
    assert probs.shape == (4, 50)
    assert torch.allclose(probs.sum(-1), torch.ones(4))
    assert (sampler.argmax(logits, [0] * 4) < 50).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_probabilities_are_float32_whatever_the_model_computes_in(dtype):
    logits = random_logits(2, 64).to(dtype)
    probs = make_sampler(temperature=0.7).probs(logits, [0, 0])
    assert probs.dtype == torch.float32
    assert torch.equal(probs, (logits.float() / 0.7).softmax(-1))


def test_draws_follow_the_distribution():
    num_rows = 20_000
    sampler = make_sampler(num_rows, temperature=1.0, vocab_size=8)
    probs = sampler.probs(random_logits(1, 8), [0]).expand(num_rows, 8)
    for _ in range(2):
        counts = torch.bincount(sampler.draw(probs, range(num_rows)), minlength=8)
        assert chi_squared(counts, probs[0]) < chi_squared_limit(8)


def test_a_rows_draws_do_not_depend_on_the_batch_it_is_in():
    probs = random_logits(3, 64).softmax(-1)
    batch, alone = make_sampler(3, temperature=1.0, seed=40), make_sampler(temperature=1.0, seed=42)
    batch.draw(probs[:2], [0, 1])
    for _ in range(5):
        assert batch.draw(probs, [0, 1, 2])[2] == alone.draw(probs[2:], [0])[0]
    assert torch.equal(batch.verify_uniforms([0, 2], 4)[1:], alone.verify_uniforms([0], 4))


def test_drafts_and_verification_do_not_share_noise():
    sampler = make_sampler(100, temperature=1.0)
    drafts = sampler.draft_uniforms(range(100), 50).flatten()
    verification = sampler.verify_uniforms(range(100), 50).flatten()
    assert abs(torch.corrcoef(torch.stack([drafts, verification]))[0, 1]) < 5 / 5000**0.5


def test_without_a_seed_torch_decides():
    def draws():
        torch.manual_seed(3)
        return make_sampler(4, temperature=1.0, seed=None).verify_uniforms(range(4), 3)

    assert torch.equal(draws(), draws())
    one_after_another = [make_sampler(seed=None).verify_uniforms([0], 3) for _ in range(2)]
    assert not torch.equal(*one_after_another)


def test_settings_that_read_no_history_ask_for_none():
    assert not make_sampler(
        temperature=1.0, top_p=0.5, logit_bias={3: 1.0}, bad_words_ids=[[4]]
    ).needs_history
    for settings in (
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"min_new_tokens": 1},
        {"bad_words_ids": [[3, 4]]},
        {"logits_processors": [NoRepeatNGramLogitsProcessor(2)]},
    ):
        assert make_sampler(**settings).needs_history


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, expected 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": [1.0, math.inf]}, "temperature is inf"),
        ({"temperature": 1.0, "top_k": 0}, "top_k is 0"),
        ({"temperature": 1.0, "top_k": 2.5}, "top_k is 2.5"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5"),
        ({"temperature": 1.0, "min_p": -1}, "min_p is -1"),
        ({"temperature": 1.0, "typical_p": 2}, "typical_p is 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"bad_words_ids": []}, "bad_words_ids is"),
        ({"bad_words_ids": [[]]}, "bad_words_ids is"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias is token id -1"),
        ({"logit_bias": {1: math.inf}}, "logit_bias is inf for token 1"),
        ({"temperature": "hot"}, "temperature is 'hot', expected a number"),
        ({"temperature": None}, "temperature is None"),
        ({"temperature": []}, "temperature is \\[\\]"),
        ({"temperature": 1.0, "top_p": "0.9"}, "top_p is '0.9'"),
        ({"repetition_penalty": "1"}, "repetition_penalty is '1'"),
        ({"bad_words_ids": [1, 2]}, "bad_words_ids is .*list of lists"),
        ({"bad_words_ids": ["ab"]}, "bad_words_ids is"),
        ({"logit_bias": [1]}, "logit_bias is .*a dict"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias is token id a"),
        ({"logits_processors": TemperatureLogitsWarper(2.0)}, "logits_processors is .*a list"),
        ({"logits_processors": ["x"]}, "logits_processors is"),
        ({"top_p": 0.9}, "top_p=0.9 has no effect at temperature 0"),
        ({"temperature": [0.0, 0.0], "top_k": 3}, "top_k=3 has no effect"),
        (
            {
                "repetition_penalty": 1.1,
                "logits_processors": [RepetitionPenaltyLogitsProcessor(1.2)],
            },
            "pass one of the two",
        ),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingSettings(**settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": [1.0, 0.5]}, "temperature has 2 values for 1 prompts"),
        ({"seed": [1, 2, 3]}, "seed has 3 values for 1 prompts"),
        ({"logit_bias": {64: 1.0}}, "logit_bias names token 64, but the vocabulary has 64"),
        ({"bad_words_ids": [[1, 99]]}, "bad_words_ids names token 99"),
        ({"bad_words_ids": [[EOS]]}, "an end-of-text token: use min_new_tokens"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_sampler(**arguments)


def test_forbidding_every_token_is_told_and_not_nan():
    sampler = make_sampler(temperature=1.0, vocab_size=2, logit_bias={0: -math.inf, 1: -math.inf})
    assert sampler.probs(random_logits(1, 2), [0]).sum() == 1.0
    assert sampler.impossible == {0}
