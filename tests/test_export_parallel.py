"""A parallel drafter exported as the DSpark folder that vLLM reads: the same drafter, or refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.loading import load_drafter, load_target
from specdec_runtime.parallel_network import load_parallel
from tests.export_folders import (
    toy_tokenizer,
    write_padded_target,
    write_parallel,
    write_target,
)
from train.export.exporting import export
from train.export.for_vllm import check
from train.export.registry import FORMATS
from train.export.source import read_target


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_padded_target(tmp_path_factory.mktemp("target") / "padded")


@pytest.fixture(scope="module")
def drafter(target, tmp_path_factory) -> Path:
    return write_parallel(tmp_path_factory.mktemp("drafter") / "parallel", target)


@pytest.fixture(scope="module")
def exported(drafter, tmp_path_factory) -> Path:
    done = export(drafter, tmp_path_factory.mktemp("exported") / "vllm", engine="vllm")
    assert '"method": "dspark"' in done.launch
    return done.folder


def test_the_exported_folder_drafts_the_same(drafter, exported, target):
    ours, theirs = load_parallel(drafter), load_parallel(exported)
    features = torch.randn(5, 3 * 128, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours.fuse(features), theirs.fuse(features))
    assert torch.equal(ours.mask_embedding, theirs.mask_embedding)
    stored = load_file(exported / "model.safetensors")
    assert {"hidden_norm.weight", "markov_head.markov_w2.weight", "d2t", "t2d"} < set(stored)
    goal = load_target(target)
    prompt = toy_tokenizer()("and the").input_ids
    stats = [
        SpeculativeDecoder(goal, load_drafter(folder, goal), num_draft_tokens=3)
        .generate([prompt], max_new_tokens=16, temperature=1.0, seed=2)
        .stats
        for folder in (drafter, exported)
    ]
    assert stats[0] == stats[1]
    assert stats[0].num_drafted > 0


MUTATIONS = {
    "target_layer_ids": [2, 3, 4],
    "is_causal": False,
    "sample_from_anchor": False,
    "mask_token_id": 5,
    "rope_parameters": {"rope_type": "default"},
    "markov_head_type": "gated",
    "model_type": "llama",
    "draft_vocab_size": 119,
}


@pytest.mark.parametrize("key", MUTATIONS)
def test_a_changed_setting_is_caught(exported, target, tmp_path, key):
    folder = shutil.copytree(exported, tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    config[key] = MUTATIONS[key]
    (folder / "config.json").write_text(json.dumps(config))
    assert any(key in problem for problem in check(folder, read_target(str(target))))


@pytest.mark.parametrize(
    ("name", "word"),
    [("d2t", "d2t"), ("hidden_norm.weight", "differs"), ("confidence_head.proj.bias", "missing")],
)
def test_a_changed_weight_is_caught(exported, target, tmp_path, name, word):
    folder = shutil.copytree(exported, tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")
    if name == "d2t":
        tensors[name] += torch.arange(len(tensors[name]))
    elif word == "differs":
        tensors[name] += 1
    else:
        del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    assert any(word in problem for problem in check(folder, read_target(str(target))))


def test_what_no_engine_reads_is_refused_with_the_reason(drafter, tmp_path):
    reasons = {
        "transformers": "table of what follows",
        "speculators": "token by token",
        "sglang": "were not read",
        "llamacpp": "hidden states",
        "draftloop": "parallel:FOLDER",
    }
    assert reasons.keys() == FORMATS.keys() - {"vllm"}
    for engine, reason in reasons.items():
        with pytest.raises(ValueError, match=reason):
            export(drafter, tmp_path / engine, engine=engine)
    whole = write_target(tmp_path / "target")  # every row of its head is a token in use
    other = write_parallel(tmp_path / "other", whole)
    with pytest.raises(ValueError, match="none to spare"):
        export(other, tmp_path / "out", engine="vllm")
