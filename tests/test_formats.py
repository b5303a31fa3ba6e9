"""Drafter folders: written whole or not at all, read back as written, refused if foreign."""

import json

import pytest
import torch
from safetensors.torch import load_file

from specdec_runtime.formats import (
    DRAFT_VOCAB_NAME,
    MANIFEST_NAME,
    DrafterManifest,
    TargetRecord,
    check_target,
    read_draft_vocab,
    read_manifest,
    write_drafter,
)
from specdec_runtime.target import Target
from tests.conftest import tiny_llama
from tests.table_model import TableModel

MANIFEST = DrafterManifest(
    kind="causal_lm",
    target=TargetRecord(name="some/target", fingerprint="f" * 64, real_vocab_size=64),
    tokenizer_hash="t" * 64,
    measured={"acceptance_length": 1.7},
    recommended={"num_draft_tokens": 3},
)


class FailingModule:
    def save_pretrained(self, folder):
        (folder / "half").write_text("written")
        raise KeyboardInterrupt


def test_what_is_written_is_read_back(tmp_path):
    kept = torch.tensor([0, 5, 9])
    tensors = {DRAFT_VOCAB_NAME: {"d2t": kept - torch.arange(3), "t2d": torch.ones(64).bool()}}
    folder = write_drafter(tmp_path / "drafter", tiny_llama(0), MANIFEST, tensors=tensors)
    assert read_manifest(folder) == MANIFEST
    assert read_draft_vocab(folder).tolist() == [0, 5, 9]
    assert load_file(folder / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_config_names_the_type_that_the_weights_have(tmp_path, dtype):
    folder = write_drafter(tmp_path / "drafter", tiny_llama(0).to(dtype), MANIFEST)
    config = json.loads((folder / "config.json").read_text())
    found = {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()}
    assert (f"torch.{config['dtype']}", found) == (str(dtype), {dtype})


def test_an_interrupted_write_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write_drafter(tmp_path / "drafter", FailingModule(), MANIFEST)
    assert list(tmp_path.iterdir()) == []


def test_a_filled_folder_is_never_written_over(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not empty"):
        write_drafter(tmp_path, tiny_llama(0), MANIFEST)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert read_manifest(write_drafter(tmp_path / "empty", tiny_llama(0), MANIFEST)) == MANIFEST


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        (json.dumps({"format_version": 99}), "format_version 99, this version reads 1"),
        (json.dumps({"format_version": 1, "kind": "x", "target": {"nam": "y"}}), "unknown keys"),
        (json.dumps({"format_version": 1, "target": {"name": "y"}}), "incomplete.*kind"),
    ],
)
def test_a_broken_manifest_is_named(tmp_path, content, message):
    (tmp_path / MANIFEST_NAME).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_manifest(tmp_path)


def test_a_folder_without_manifest_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"has no {MANIFEST_NAME}"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "hashed", "message"),
    [
        ({"fingerprint": "e" * 64}, "t" * 64, "fingerprint ffffffffffff.*'other' .eeeeeeeeeeee"),
        ({"real_vocab_size": 60}, "t" * 64, "real vocabulary size 64.*60"),
        ({}, "u" * 64, "tokenizer hash tttttttttttt.*uuuuuuuuuuuu"),
    ],
)
def test_a_drafter_of_another_target_is_refused_naming_both(change, hashed, message):
    model = TableModel.reciting([1, 2], 64)
    at_hand = {"name": "other", "fingerprint": "f" * 64, "real_vocab_size": 64, **change}
    with pytest.raises(ValueError, match=f"'some/target'.*{message}"):
        check_target(MANIFEST, Target(model=model, **at_hand), hashed)
    check_target(MANIFEST, Target(model=model, fingerprint="f" * 64), "t" * 64)
