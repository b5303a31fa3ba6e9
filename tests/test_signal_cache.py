"""Cached signals: what a live target would say, said to be how large beforehand, and never foreign."""

import dataclasses
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from distill.batches import BatchStream, Example
from distill.cache.cli import run_command
from distill.cache.job import require_same_tokenizer
from distill.cache.manifest import bytes_per_position
from distill.cache.read import SignalCache
from distill.cache.shards import shard_paths
from distill.cache.write import write_signals
from distill.chunked_head import head_loss
from distill.draft_vocab import full_vocab
from distill.live_signals import LiveSignals
from distill.losses import LossConfig
from distill.objective import terms_of
from distill.signal_forms import SignalForm, SignalsConfig
from distill.signals import NoSignal, TargetHead
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target
from specdec_runtime.tokenizers import tokenizer_hash
from tests.conftest import VOCAB_SIZE, tiny_llama
from tests.killed_jobs import killed
from tests.tiny_tokenizers import byte_level_tokenizer

HIDDEN = SignalsConfig(form=SignalForm.hidden)
SPARSE = SignalsConfig(form=SignalForm.sparse, top_k=6, draws=9)
FORMS = pytest.mark.parametrize("config", [HIDDEN, SPARSE], ids=["hidden", "sparse"])
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def target():
    return Target(
        model=HFModel(tiny_llama(8)), tokenizer=byte_level_tokenizer(), fingerprint="f",
        eos_token_ids=(2,), real_vocab_size=VOCAB_SIZE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def examples():
    noise = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, VOCAB_SIZE, (8 + i % 5,), generator=noise) for i in range(14)]
    return [Example(f"a{i}", ids, 3, NoSignal(len(ids) - 3)) for i, ids in enumerate(texts)]


def write(target, examples, config, folder, **others):
    arguments = {"answers_fingerprint": "answers", "say": lambda text: None} | others
    return write_signals(target, examples, config, folder, **arguments)


def contents(cache, examples):
    return [
        {name: value.float() for name, value in vars(example.rows).items()}
        for example in cache.attach(examples)
    ]


def require_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(ours[name].equal(theirs[name]) for name in ours)


@FORMS
def test_a_cache_holds_what_the_live_target_says(target, examples, tmp_path, config):
    config = dataclasses.replace(config, dtype=type(config.dtype).float32)
    cached = write(target, examples, config, tmp_path).attach(examples)
    stream = BatchStream(cached, max_tokens=50, seed=0)
    live = LiveSignals(BatchStream(examples, max_tokens=50, seed=0), target)
    head = TargetHead.of(target.model.module, full_vocab(VOCAB_SIZE))
    logits = []
    for batch in (stream(1), live(1)):
        hidden = torch.zeros(batch.num_tokens, 32)
        sums = head_loss(hidden, head.kept_weight, head, batch.rows, batch.labels, LossConfig())
        logits.append(terms_of(sums, batch.num_tokens))
        assert batch.rows.argmax.equal(live(1).rows.argmax)
    cached_terms, live_terms = logits
    overlap, count = (float(value) for value in live_terms.counts["overlap"])
    if config.form is SignalForm.hidden:
        torch.testing.assert_close(cached_terms.loss_sum, live_terms.loss_sum, rtol=1e-5, atol=1e-5)
        assert "overlap_upper" not in cached_terms.counts
    else:
        lower, upper = (float(cached_terms.counts[n][0]) for n in ("overlap", "overlap_upper"))
        assert lower - 1e-4 <= overlap <= upper + 1e-4
        assert float(cached_terms.counts["kept_mass"][0]) < count


@FORMS
def test_a_job_that_is_killed_three_times_leaves_the_same_signals(
    target, examples, tmp_path, monkeypatch, config
):
    monkeypatch.setattr("distill.cache.write._SHARD_BYTES", 1)  # a shard for each answer
    undisturbed = contents(write(target, examples, config, tmp_path / "whole"), examples)
    folder = tmp_path / "killed"

    for wait in (6, 7, 6):
        killed(lambda: write(target, examples, config, folder), at=wait)
    assert 1 < len(shard_paths(folder)) < len(examples)
    (folder / ".signals-00099.safetensors").write_bytes(b"half a file")
    cache = write(target, examples, config, folder)
    assert len(shard_paths(folder)) == len(examples)
    require_equal(contents(cache, examples), undisturbed)


def test_size_disk_and_time_are_said_before_anything_is_written(target, examples, tmp_path):
    said = []

    def say(text):
        assert bool(shard_paths(tmp_path)) is bool(said)
        said.append(text)

    cache = write(target, examples, SPARSE, tmp_path, say=say)
    positions = sum(example.num_tokens for example in examples)
    each = bytes_per_position(target, SPARSE)
    assert f"signals: {positions} positions of {each} bytes" in said[0]
    assert "GB are free; about" in said[0]
    assert "the 6 most probable tokens hold" in said[1]
    held = sum(t.numel() * t.itemsize for tensors in cache.shards for t in tensors.values())
    assert held == positions * each
    said.clear()
    write(target, examples, SPARSE, tmp_path, say=said.append)
    assert said == []  # nothing is left to write


def test_what_does_not_fit_on_the_disk_is_not_begun(target, examples, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(1, 1, 3000))
    with pytest.raises(ValueError, match=r"the signals need .* GB and .* GB are free"):
        write(target, examples, HIDDEN, tmp_path)
    assert shard_paths(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"config": dataclasses.replace(SPARSE, top_k=7)}, "top_k"),
        ({"config": dataclasses.replace(SPARSE, seed=1)}, "seed"),
        ({"config": HIDDEN}, "form"),
        ({"answers_fingerprint": "others"}, "answers_fingerprint"),
    ],
)
def test_signals_of_something_else_are_refused_with_both_fingerprints(
    target, examples, tmp_path, change, key
):
    write(target, examples[:2], SPARSE, tmp_path)
    arguments = {"config": SPARSE} | change
    with pytest.raises(ValueError, match=rf"holds signals \w+, wanted are \w+: {key} is"):
        write(target, examples[:2], arguments.pop("config"), tmp_path, **arguments)


def test_signals_of_another_target_are_refused(target, examples, tmp_path):
    write(target, examples[:2], SPARSE, tmp_path)
    tuned = dataclasses.replace(target, fingerprint="g")
    with pytest.raises(ValueError, match="target_fingerprint is 'f' there and 'g' here"):
        write(tuned, examples[:2], SPARSE, tmp_path)
    moved = dataclasses.replace(target, name="elsewhere")
    assert len(write(moved, examples[:2], SPARSE, tmp_path).entries) == 2


def test_a_folder_grows_with_the_answers_and_misses_none(target, examples, tmp_path):
    small = write(target, examples[:5], HIDDEN, tmp_path)
    with pytest.raises(ValueError, match=r"has none for answer a5: run python -m distill.cache"):
        small.attach(examples)
    large = write(target, examples, HIDDEN, tmp_path)
    require_equal(contents(large, examples[:5]), contents(small, examples[:5]))
    other = dataclasses.replace(examples[0], token_ids=examples[0].token_ids.flip(0))
    with pytest.raises(ValueError, match=r"are of the text \w+, the answer is now \w+"):
        large.attach([other])


def test_a_damaged_shard_is_named_before_it_is_used(target, examples, tmp_path):
    write(target, examples, HIDDEN, tmp_path)
    (path,) = shard_paths(tmp_path)
    damaged = bytearray(path.read_bytes())
    damaged[-5] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"is damaged \(SHA-256 \w+, written was \w+\)"):
        SignalCache.open(tmp_path)


def test_signals_are_mapped_and_not_read(target, examples, tmp_path):
    cache = write(target, examples, HIDDEN, tmp_path)
    maps = Path("/proc/self/maps")
    assert not maps.exists() or shard_paths(tmp_path)[0].name in maps.read_text()
    first, second = cache.attach(examples[:1])[0].rows, cache.attach(examples[:1])[0].rows
    assert first.hidden.data_ptr() == second.hidden.data_ptr()  # views, no copies


def test_the_live_form_and_a_target_of_another_tokenizer_are_refused(target, examples, tmp_path):
    with pytest.raises(ValueError, match="live keeps nothing"):
        write(target, examples, SignalsConfig(form=SignalForm.live), tmp_path)
    own = tokenizer_hash(target.tokenizer)
    require_same_tokenizer({"tokenizer_hash": own}, own)
    with pytest.raises(ValueError, match="signals of a target with another tokenizer are not"):
        require_same_tokenizer({"tokenizer_hash": "f" * 64}, own)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "answers has no value"),
        (["answers=nowhere"], "nowhere holds no answers"),
        (["answers=x", "signals.topk=3"], "did you mean signals.top_k?"),
        (["answers=x", "signals.top_k=-3"], "signals.top_k must be 0 or more"),
    ],
)
def test_the_command_line_explains_a_mistake_in_one_line(capsys, arguments, message):
    assert run_command(arguments) != 0
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
