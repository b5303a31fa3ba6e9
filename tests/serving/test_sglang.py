"""SGLang's own files read exported folders: its model file drafts what our runtime drafts."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval.acceptance import measure_acceptance
from specdec_runtime.loading import load_drafter, load_target
from tests.export_folders import (
    DRAFT_VOCAB_SIZE,
    LAYER_IDS,
    write_causal_lm,
    write_eagle3,
    write_target,
)
from tests.serving.target_states import states_along
from train.export.engines import call_driver, python_of
from train.export.exporting import export
from train.export.observation import fixed_prompts, proposals

pytestmark = pytest.mark.serving

NUM_DRAFT_TOKENS, NUM_PROMPTS, MAX_NEW_TOKENS = 3, 4, 24


@pytest.fixture(autouse=True)
def _installed():
    python = python_of("vllm")
    if python is None or not list(python.parents[1].glob("lib/*/site-packages/sglang")):
        pytest.skip("SGLang's files are not there: make serving-env")


@pytest.mark.parametrize("norms", ["eagle3", "eagle3.1"])
def test_its_model_file_drafts_what_our_runtime_drafts(tmp_path, norms):
    folder = write_target(tmp_path / "target")
    drafter = write_eagle3(tmp_path / "drafter", folder, norms=norms)
    out = export(drafter, tmp_path / "out", engine="sglang").folder
    target = load_target(folder, dtype=torch.float32)
    head = load_drafter(drafter, target)
    prompts = fixed_prompts(target, {})[:NUM_PROMPTS]
    settings = {"num_draft_tokens": NUM_DRAFT_TOKENS, "max_new_tokens": MAX_NEW_TOKENS}
    answers = measure_acceptance(target, None, prompts, **settings).token_ids
    pairs = list(zip(prompts, answers, strict=True))
    ours = [proposals(target, head, *pair, NUM_DRAFT_TOKENS) for pair in pairs]
    texts = tmp_path / "texts.safetensors"
    save_file(states_along(target, head, [[*p, *a] for p, a in pairs]), texts)
    weights = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    save_file({"embeddings": weights}, tmp_path / "embeddings.safetensors")
    request = {
        "folder": str(out),
        "target": str(folder),
        "texts": str(texts),
        "embeddings": str(tmp_path / "embeddings.safetensors"),
        "num_draft_tokens": NUM_DRAFT_TOKENS,
    }
    layers, theirs = call_driver("vllm", request, script="drive_sglang.py")
    assert layers == LAYER_IDS
    last = [drafted[-len(places) :] for drafted, places in zip(theirs, ours, strict=True)]
    assert last == ours
    config = json.loads((out / "config.json").read_text())  # another flag is another head
    config["rope_parameters"]["rope_theta"] *= 100
    (out / "config.json").write_text(json.dumps(config))
    _, changed = call_driver("vllm", request, script="drive_sglang.py")
    assert changed != theirs


def test_its_configuration_class_reads_what_was_exported(tmp_path):
    folder = write_target(tmp_path / "target")
    head = export(write_eagle3(tmp_path / "e", folder), tmp_path / "head", engine="sglang")
    plain = export(write_causal_lm(tmp_path / "c", folder), tmp_path / "plain", engine="sglang")
    request = {"folders": [str(head.folder), str(plain.folder)]}
    of_head, of_plain = call_driver("vllm", request, script="drive_sglang_config.py")
    size = head.source.target.vocab_size
    for found in (of_head, of_plain):
        assert (found["vocab_size"], found["head_dim"]) == (size, 64)
    assert of_head["architectures"] == ["LlamaForCausalLMEagle3"]
    assert of_head["draft_vocab_size"] == DRAFT_VOCAB_SIZE
    assert of_head["states_width"] == len(LAYER_IDS) * 128
    assert of_head["num_hidden_layers"] == 1
    assert of_plain["architectures"] == ["LlamaForCausalLM"]
    assert of_plain["num_hidden_layers"] == 4
