"""Answers: each prompt once, the same text however the job is run, a signal that is the target's."""

import dataclasses
import logging
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from distill.answers.authors import RuntimeAuthor, author_of
from distill.answers.cli import run_command
from distill.answers.config import AnswersConfig, HiddenDtype
from distill.answers.dataset import AnswerSet
from distill.answers.manifest import fingerprint, make_manifest
from distill.answers.shards import read_shard, shard_paths, write_shard
from distill.answers.write import collect_answers, write_answers
from distill.batches import BatchStream
from distill.features import FeatureFolder, record_features
from distill.prompts import Prompt
from distill.signals import NoSignal, live_rows
from distill.templates import ChatTemplate
from distill.writer import Request, Writer
from specdec_runtime.engines import make_model
from specdec_runtime.file_lock import exclusive
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target
from tests.conftest import tiny_llama
from tests.killed_jobs import killed
from tests.test_templates import CHATML, tokenizer

EOS = 2
SETTINGS = AnswersConfig(max_new_tokens=9, batch_size=4, shard_tokens=40)


def counting(model):
    """The model, which notes in `passes` how many rows each pass has, and that one was made."""
    model.passes, forward = [], model.forward

    def noted(token_ids, cache, **arguments):
        model.passes.append(tuple(token_ids.shape))
        return forward(token_ids, cache, **arguments)

    model.forward = noted
    return model


@pytest.fixture(scope="module")
def module():
    return tiny_llama(3, vocab_size=len(tokenizer(CHATML)))


@pytest.fixture(scope="module")
def target(module):
    return Target(
        model=counting(make_model(module)),
        tokenizer=tokenizer(CHATML),
        fingerprint="f",
        eos_token_ids=(EOS,),
    )


@pytest.fixture(scope="module")
def prompts():
    texts = [f"question {'x' * (7 * i % 23)} {i}" for i in range(16)]
    return [Prompt(f"p{i}", "test", ({"role": "user", "content": t},)) for i, t in enumerate(texts)]


@pytest.fixture(scope="module")
def undisturbed(target, prompts, tmp_path_factory):
    return write_answers(target, prompts, SETTINGS, tmp_path_factory.mktemp("undisturbed"))


def texts(answers):
    return {answer.id: answer.token_ids.tolist() for answer in answers.answers}


def test_every_prompt_is_answered_once_and_in_order(undisturbed, prompts, target):
    assert [answer.id for answer in undisturbed.answers] == [prompt.id for prompt in prompts]
    template = ChatTemplate(target.tokenizer)
    for answer, prompt in zip(undisturbed.answers, prompts, strict=True):
        ids = answer.token_ids.tolist()
        assert ids[: answer.prompt_length] == template.render(prompt.messages)
        new = ids[answer.prompt_length :]
        assert EOS not in new[:-1]
        assert new[-1] == EOS or len(new) == SETTINGS.max_new_tokens


def test_greedy_answers_are_the_plain_greedy_text(undisturbed, module):
    greedy = [answer for answer in undisturbed.answers if answer.temperature == 0.0]
    assert 2 <= len(greedy) <= 14  # half of 16, give or take 3 standard deviations
    for answer in greedy:
        ids = answer.token_ids.tolist()
        for position in range(answer.prompt_length, len(ids)):
            logits = module(torch.tensor([ids[:position]])).logits[0, -1]
            assert int(logits.argmax()) == ids[position]


def test_the_code_of_transformers_writes_the_same_answers(
    undisturbed, module, target, prompts, tmp_path
):
    eager = dataclasses.replace(target, model=HFModel(module))
    assert texts(write_answers(eager, prompts, SETTINGS, tmp_path)) == texts(undisturbed)


def test_the_signal_is_what_the_target_says_at_the_positions_that_carry_loss(undisturbed, target):
    for answer in undisturbed.answers[:6]:
        positions = torch.arange(answer.prompt_length - 1, len(answer.token_ids) - 1)
        lengths = torch.tensor([len(answer.token_ids)])
        live = live_rows(
            target.model, answer.token_ids[None], lengths, positions,
            real_vocab_size=target.real_vocab_size,
        )  # fmt: skip
        torch.testing.assert_close(answer.rows.hidden.float(), live.hidden, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(answer.rows.log_sum_exp, live.log_sum_exp, rtol=1e-5, atol=1e-4)
        assert answer.rows.argmax.tolist() == live.argmax.tolist()
        if answer.temperature == 0.0:
            assert answer.rows.argmax.tolist() == answer.token_ids[positions + 1].tolist()


def test_answers_are_examples_to_train_on(undisturbed):
    stream = BatchStream(undisturbed.answers, max_tokens=400, seed=0)
    batch = stream(0)
    assert stream.num_tokens == undisturbed.num_tokens
    assert batch.num_tokens == len(batch.rows) > 0


@pytest.mark.parametrize("batch_size", [1, 16])
def test_what_is_answered_does_not_depend_on_the_batch(
    undisturbed, target, prompts, tmp_path, batch_size
):
    config = dataclasses.replace(SETTINGS, batch_size=batch_size)
    assert texts(write_answers(target, prompts, config, tmp_path)) == texts(undisturbed)


def test_the_batch_stays_full_while_there_are_prompts(target, prompts, tmp_path):
    target.model.passes.clear()
    answers = write_answers(target, prompts, SETTINGS, tmp_path)
    steps = [rows for rows, width in target.model.passes if width == 1]
    lasting = max(answer.num_tokens for answer in answers.answers)
    assert set(steps[:-lasting]) == {SETTINGS.batch_size}


def test_a_row_does_not_read_again_what_its_next_prompt_begins_with(target, prompts, tmp_path):
    target.model.passes.clear()
    config = dataclasses.replace(SETTINGS, batch_size=1)
    write_answers(target, prompts, config, tmp_path)
    opening = len(ChatTemplate(target.tokenizer).user_opening())
    read = [width for _, width in target.model.passes if width > 1]
    lengths = [len(ChatTemplate(target.tokenizer).render(prompt.messages)) for prompt in prompts]
    assert len(read) == len(prompts)
    assert read[0] == lengths[0]
    assert all(one <= other - opening for one, other in zip(read[1:], lengths[1:], strict=True))


def test_a_job_that_is_killed_three_times_leaves_the_same_answers(
    undisturbed, target, prompts, tmp_path
):
    config = dataclasses.replace(SETTINGS, shard_tokens=1)

    for wait in (6, 7, 6):
        killed(lambda: write_answers(target, prompts, config, tmp_path), at=wait)
    assert 1 < len(shard_paths(tmp_path)) < len(prompts)
    (tmp_path / ".shard-00099.safetensors").write_bytes(b"half a file")
    answers = write_answers(target, prompts, config, tmp_path)
    assert texts(answers) == texts(undisturbed)
    written = Counter(a.id for path in shard_paths(tmp_path) for a in read_shard(path))
    assert set(written.values()) == {1}


def test_ctrl_c_keeps_every_finished_answer(target, prompts, tmp_path):
    finished = []

    def interrupt(done, total, note):
        finished.append(done)
        if done == 5:
            raise KeyboardInterrupt

    config = dataclasses.replace(SETTINGS, shard_tokens=10_000)
    with pytest.raises(KeyboardInterrupt):
        write_answers(target, prompts, config, tmp_path, progress=interrupt)
    assert len(AnswerSet.read(tmp_path).answers) == 5


def test_finished_answers_are_reused_without_running_the_target(target, prompts, tmp_path):
    first = write_answers(target, prompts, SETTINGS, tmp_path)
    target.model.passes.clear()
    again = write_answers(target, prompts, SETTINGS, tmp_path)
    assert target.model.passes == []
    assert again.fingerprint == first.fingerprint
    for ours, theirs in zip(first.answers, again.answers, strict=True):
        torch.testing.assert_close(ours.rows.hidden, theirs.rows.hidden)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seed": 1}, "seed"),
        ({"temperatures": [1.0]}, "temperatures"),
        ({"max_new_tokens": 8}, "max_new_tokens"),
    ],
)
def test_answers_of_other_settings_are_refused_with_both_fingerprints(
    target, prompts, tmp_path, change, key
):
    write_answers(target, prompts[:4], SETTINGS, tmp_path)
    config = dataclasses.replace(SETTINGS, **change)
    template = ChatTemplate(target.tokenizer)
    found, wanted = (fingerprint(make_manifest(target, template, c)) for c in (SETTINGS, config))
    with pytest.raises(ValueError, match=f"holds answers {found}, wanted are {wanted}: {key} is"):
        write_answers(target, prompts[:4], config, tmp_path)


def test_another_target_or_template_changes_the_fingerprint(target):
    template = ChatTemplate(target.tokenizer)
    own = fingerprint(make_manifest(target, template, SETTINGS))
    other = dataclasses.replace(target, fingerprint="g")
    assert fingerprint(make_manifest(other, template, SETTINGS)) != own
    options = ChatTemplate(target.tokenizer, {"enable_thinking": False})
    assert fingerprint(make_manifest(target, options, SETTINGS)) != own
    moved = dataclasses.replace(target, name="elsewhere")
    assert fingerprint(make_manifest(moved, template, SETTINGS)) == own


def test_a_budget_of_tokens_buys_the_first_prompts_that_hold_so_many(
    undisturbed, target, prompts, tmp_path
):
    config = dataclasses.replace(SETTINGS, max_tokens=60)
    bought = write_answers(target, prompts, config, tmp_path)
    count = len(bought.answers)
    assert texts(bought) == dict(list(texts(undisturbed).items())[:count])
    assert bought.num_tokens >= 60 > bought.num_tokens - bought.answers[-1].num_tokens
    written = sum(len(read_shard(path)) for path in shard_paths(tmp_path))
    assert written <= count + 2 * SETTINGS.batch_size


def test_a_job_keeps_its_answers_when_a_larger_one_adds_to_the_folder(target, prompts, tmp_path):
    config = dataclasses.replace(SETTINGS, max_seconds=1e-9)
    small = write_answers(target, prompts, config, tmp_path)
    assert 1 <= len(small.answers) < len(prompts)
    write_answers(target, prompts, SETTINGS, tmp_path)
    again = write_answers(target, prompts, config, tmp_path)
    assert again.fingerprint == small.fingerprint


def test_prompts_that_are_too_long_are_left_out_and_none_left_is_an_error(
    target, prompts, tmp_path
):
    config = dataclasses.replace(SETTINGS, max_prompt_tokens=45)
    answers = write_answers(target, prompts, config, tmp_path / "some")
    assert 0 < len(answers.answers) < len(prompts)
    config = dataclasses.replace(SETTINGS, max_prompt_tokens=5)
    with pytest.raises(ValueError, match="none of the 16 prompts fits into 5 tokens"):
        write_answers(target, prompts, config, tmp_path / "none")
    config = dataclasses.replace(SETTINGS, max_new_tokens=10_000)
    with pytest.raises(
        ValueError, match=r"answers.max_new_tokens=10000 leaves no room for a prompt"
    ):
        write_answers(target, prompts, config, tmp_path / "endless")


def test_the_size_is_said_before_anything_is_written(
    target, prompts, tmp_path, caplog, monkeypatch
):
    caplog.set_level("INFO")
    write_answers(target, prompts[:3], SETTINGS, tmp_path / "some")
    assert "up to 3 answers, at most 27 tokens and 0.0 MB" in caplog.text
    size = sum(path.stat().st_size for path in shard_paths(tmp_path / "some"))
    assert size < 27 * (32 * 2 + 12) + 4 * 3 * 60 + 2000  # states, ids, names
    bare = RuntimeAuthor(target, ChatTemplate(target.tokenizer), SETTINGS)
    kept = FeatureFolder(tmp_path / "inner", (1, 2))
    with_inner = dataclasses.replace(bare, inner_states=kept)
    for name in ("bytes_per_token", "bytes_per_prompt_token"):
        assert getattr(with_inner, name) - getattr(bare, name) == 2 * 32 * 2  # layers, size, bytes
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=100))
    write_answers(target, prompts[:3], SETTINGS, tmp_path / "full")
    assert "3 answers may take up to 0.0 GB, 0.0 GB are free" in caplog.text


def test_a_folder_of_something_else_or_in_use_is_refused(target, prompts, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes.txt and no answers.json"):
        write_answers(target, prompts, SETTINGS, tmp_path)
    for content, message in (("{", r"answers.json is damaged \(Exp"), ("[]", "is no manifest")):
        (tmp_path / "answers.json").write_text(content)
        with pytest.raises(ValueError, match=f"{message}.*make the answers again"):
            write_answers(target, prompts, SETTINGS, tmp_path)
    with (
        exclusive(tmp_path / "used" / ".lock"),
        pytest.raises(ValueError, match="another process is writing"),
    ):
        write_answers(target, prompts, SETTINGS, tmp_path / "used")


def test_a_second_process_waits_where_it_is_told_to(target, prompts, tmp_path, caplog):
    author = author_of(target, ChatTemplate(target.tokenizer), SETTINGS)
    caplog.set_level(logging.INFO)
    arguments = (author, prompts[:2], SETTINGS, tmp_path)
    second = threading.Thread(target=collect_answers, args=arguments, kwargs={"wait": True})
    with exclusive(tmp_path / ".lock"):
        second.start()
        while second.is_alive() and "waiting for another process" not in caplog.text:
            second.join(0.01)
        assert second.is_alive()
        assert shard_paths(tmp_path) == []
    second.join()
    assert len(AnswerSet.read(tmp_path).answers) == 2


def test_states_beyond_the_range_of_float16_are_stored_as_bfloat16(undisturbed, tmp_path):
    large = undisturbed.answers[0]
    large = dataclasses.replace(
        large, rows=dataclasses.replace(large.rows, hidden=large.rows.hidden.float() * 1e6)
    )
    write_shard(tmp_path, [large], hidden_dtype=HiddenDtype.float16.torch)
    (stored,) = read_shard(shard_paths(tmp_path)[0])
    assert stored.rows.hidden.dtype == torch.bfloat16
    torch.testing.assert_close(stored.rows.hidden.float(), large.rows.hidden, rtol=1e-2, atol=0)


def test_a_damaged_shard_is_named(target, prompts, tmp_path):
    write_answers(target, prompts[:4], SETTINGS, tmp_path)
    shard_paths(tmp_path)[0].write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"shard-00000.safetensors is damaged"):
        AnswerSet.read(tmp_path)


def test_several_samples_of_a_prompt_differ_and_one_at_most_is_greedy(target, prompts, tmp_path):
    config = dataclasses.replace(SETTINGS, samples_per_prompt=4, temperatures=[0.0, 0.0, 1.5])
    answers = write_answers(target, prompts[:6], config, tmp_path).answers
    for prompt in prompts[:6]:
        own = [a for a in answers if a.id.partition("#")[0] == prompt.id]
        assert len({a.id for a in own}) == len(own)
        greedy = [a for a in own if a.temperature == 0.0]
        sampled = [tuple(a.token_ids.tolist()) for a in own if a.temperature > 0.0]
        assert len(greedy) == 1
        assert 1 <= len(sampled) <= 2  # of four answers one or two are at the last temperature
        assert len(set(sampled)) == len(sampled)


def test_more_samples_keep_the_first_ones(undisturbed, target, prompts, tmp_path):
    write_answers(target, prompts, SETTINGS, tmp_path)
    config = dataclasses.replace(SETTINGS, samples_per_prompt=2)
    more = texts(write_answers(target, prompts, config, tmp_path))
    assert {name: more[name] for name in texts(undisturbed)} == texts(undisturbed)
    assert len(more) > len(prompts)


def test_another_seed_changes_the_sampled_answers_only(undisturbed, target, prompts, tmp_path):
    config = dataclasses.replace(SETTINGS, seed=7, temperatures=[1.0])
    sampled = texts(write_answers(target, prompts, config, tmp_path / "sampled"))
    again = texts(write_answers(target, prompts, config, tmp_path / "again"))
    other = dataclasses.replace(config, seed=8)
    assert sampled == again
    assert sampled != texts(write_answers(target, prompts, other, tmp_path / "other"))
    greedy = dataclasses.replace(SETTINGS, seed=7, temperatures=[0.0])
    found = texts(write_answers(target, prompts, greedy, tmp_path / "greedy"))
    for answer in undisturbed.answers:
        if answer.temperature == 0.0:
            assert found[answer.id] == answer.token_ids.tolist()


def test_answers_without_states_are_the_same_texts(undisturbed, target, prompts, tmp_path):
    config = dataclasses.replace(SETTINGS, keep_states=False)
    bare = write_answers(target, prompts, config, tmp_path)
    assert texts(bare) == texts(undisturbed)
    assert all(isinstance(answer.rows, NoSignal) for answer in bare.answers)
    counts = bare.token_counts()
    assert counts.sum() == bare.num_tokens
    assert (counts <= undisturbed.token_counts()).all()


def test_inner_states_kept_while_writing_are_those_of_a_pass_over_the_texts(
    undisturbed, target, prompts, tmp_path
):
    layers = (0, 1)
    kept = FeatureFolder(tmp_path / "kept", layers)
    author = author_of(target, ChatTemplate(target.tokenizer), SETTINGS, inner_states=kept)
    written = collect_answers(author, prompts, SETTINGS, tmp_path / "answers")
    assert texts(written) == texts(undisturbed)
    found = record_features(None, written.answers, kept)  # every text is there: no pass is needed
    passed = FeatureFolder(tmp_path / "passed", layers)
    for answer, again in zip(
        found, record_features(target.model, written.answers, passed), strict=True
    ):
        assert len(answer.features) == len(answer.token_ids)
        torch.testing.assert_close(answer.features, again.features, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("batch_size", [3, 16])
def test_answers_written_with_a_drafter_are_the_targets(
    undisturbed, target, prompts, tmp_path, batch_size
):
    config = dataclasses.replace(SETTINGS, drafter="lookup", batch_size=batch_size)
    helped = write_answers(target, prompts, config, tmp_path)
    found, plain = texts(helped), texts(undisturbed)
    for answer, other in zip(helped.answers, undisturbed.answers, strict=True):
        assert (answer.id, answer.temperature) == (other.id, other.temperature)
        assert answer.num_tokens == len(answer.rows)
        if answer.temperature == 0.0:
            assert found[answer.id] == plain[answer.id]
            torch.testing.assert_close(
                answer.rows.hidden.float(), other.rows.hidden.float(), rtol=2e-3, atol=2e-3
            )
    assert found != plain  # what is sampled has other noise, so the fingerprint is another
    assert fingerprint(helped.manifest) != fingerprint(undisturbed.manifest)


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_top_p_writes_from_the_nucleus_alone(target, module, top_p):
    prompt = target.tokenizer("sample").input_ids
    writer = Writer(target, batch_size=200, max_new_tokens=1, stop_ids=[EOS], top_p=top_p)
    requests = [Request(key, prompt, 1.0, 500 + key) for key in range(400)]
    drawn = [text.token_ids[0] for text in writer.write(requests, longest_prompt=len(prompt))]
    probs = module(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    descending = probs.sort(descending=True)
    before = descending.values.cumsum(0) - descending.values
    nucleus = descending.indices[before < 0.6].tolist()
    assert (set(drawn) <= set(nucleus)) is (top_p < 1.0)
    assert len(set(drawn)) > 1


def first_token_frequencies(target, module, temperature, count):
    prompt = target.tokenizer("sample").input_ids
    writer = Writer(target, batch_size=200, max_new_tokens=1, stop_ids=[EOS])
    requests = [Request(key, prompt, temperature, 10_000 + key) for key in range(count)]
    drawn = [text.token_ids[0] for text in writer.write(requests, longest_prompt=len(prompt))]
    logits = module(torch.tensor([prompt])).logits[0, -1]
    return torch.bincount(torch.tensor(drawn), minlength=len(logits)) / count, logits


def test_sampled_tokens_follow_the_targets_distribution(target, module):
    count = 1000
    found, logits = first_token_frequencies(target, module, 1.0, count)
    for temperature, fits in ((1.0, True), (2.0, False)):
        expected = (logits / temperature).softmax(-1)
        # Every token within 4.5 standard errors: a right sampler fails once in about 600 seeds.
        error = (found - expected).abs() / (expected * (1 - expected) / count).sqrt()
        assert bool((error[expected * count > 10] < 4.5).all()) is fits


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperatures": []}, "answers.temperatures must be"),
        ({"temperatures": [-1.0]}, "answers.temperatures must be"),
        ({"top_p": 0.0}, "answers.top_p must be"),
        ({"batch_size": 0}, "answers.batch_size must be positive"),
        ({"max_seconds": -5.0}, "answers.max_seconds must be positive"),
    ],
)
def test_a_setting_out_of_range_is_named_by_its_path(setting, message):
    with pytest.raises(ValueError, match=message):
        AnswersConfig(**setting)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["output=x", "answers.temprature=1"], "did you mean answers.temperatures?"),
        ([], "output has no value"),
        (["output=x", "answers.batch_size=0"], "answers.batch_size must be positive"),
        (["output=x", "target.model=./nowhere"], "./nowhere: no such folder"),
    ],
)
def test_the_command_line_explains_a_mistake_in_one_line(capsys, arguments, message):
    assert run_command(arguments) != 0
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
