"""Exported folders: complete, read back as written, and refused where a format cannot say it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from specdec_runtime.drafter_files import read
from specdec_runtime.formats import DRAFT_VOCAB_NAME, read_draft_vocab
from specdec_runtime.pretrained import load_tokenizer
from tests.export_folders import LAYER_IDS, write_causal_lm, write_eagle3, write_target
from train.export.exporting import export
from train.export.registry import FORMATS
from train.export.runtime_folder import runtime_folder
from train.export.source import read_source, read_target

PLAIN = ("draftloop", "transformers", "vllm", "sglang", "llamacpp")
HEADS = ("draftloop", "vllm", "speculators", "sglang")


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="session")
def causal_lm(target, tmp_path_factory) -> Path:
    return write_causal_lm(tmp_path_factory.mktemp("drafter") / "causal_lm", target)


@pytest.fixture(scope="session")
def eagle3(target, tmp_path_factory) -> Path:
    return write_eagle3(tmp_path_factory.mktemp("drafter") / "eagle3", target)


@pytest.mark.parametrize("engine", PLAIN)
def test_a_plain_drafter_passes_the_rules_and_says_how_to_serve_it(causal_lm, tmp_path, engine):
    done = export(causal_lm, tmp_path / "out", engine=engine)
    assert str(tmp_path / "out") in done.launch
    assert done.launch in (tmp_path / "out" / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("engine", HEADS)
@pytest.mark.parametrize("norms", ["eagle3", "eagle3.1"])
def test_a_head_is_read_back_as_written(target, tmp_path, engine, norms):
    folder = write_eagle3(tmp_path / "drafter", target, norms=norms)
    export(folder, tmp_path / "out", engine=engine)
    before, after = read(folder), read(tmp_path / "out")
    assert after.layer_ids == before.layer_ids == LAYER_IDS
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.tensors.keys() == before.tensors.keys()
    assert all(torch.equal(after.tensors[name], before.tensors[name]) for name in before.tensors)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "rope_parameters")
    assert {k: after.config[k] for k in flags} == {k: before.config[k] for k in flags}


def test_a_head_goes_around_through_every_form(eagle3, target, tmp_path):
    folder = eagle3
    for engine in (*HEADS[1:], "draftloop"):
        folder = export(folder, tmp_path / engine, engine=engine, target=str(target)).folder
    assert read_draft_vocab(folder).tolist() == read_draft_vocab(eagle3).tolist()
    before, after = load_file(eagle3 / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_rope_scaling_dtype_and_end_tokens_of_a_head_survive_every_form(eagle3, target, tmp_path):
    """The other conventions of a head; ids, offsets and norm flags are in the tests above."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    kept = {"rope_parameters": rope, "eos_token_id": [2, 7], "rms_norm_eps": 3e-6, "head_dim": 64}
    folder = tmp_path / "drafter"
    shutil.copytree(eagle3, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | kept))
    for engine in (*HEADS[1:], "draftloop"):
        to, goal = tmp_path / engine, str(target)
        folder = export(folder, to, engine=engine, target=goal, dtype=torch.bfloat16).folder
        found = read(folder)
        assert {key: found.config[key] for key in kept} == kept
        assert not found.config["tie_word_embeddings"]
        assert {tensor.dtype for tensor in found.tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("engine", PLAIN)
def test_tied_heads_dtype_rope_and_end_tokens_of_a_plain_model_survive(target, tmp_path, engine):
    goal, stock = tmp_path / "goal", tmp_path / "stock"
    shutil.copytree(target, goal)
    GenerationConfig(eos_token_id=[0, 2]).save_pretrained(goal)
    model = AutoModelForCausalLM.from_pretrained(target)
    model.config.rope_parameters["rope_theta"] = 20000.0
    model.config.rms_norm_eps = 3e-6
    model.to(torch.bfloat16).save_pretrained(stock)
    load_tokenizer(target).save_pretrained(stock)
    done = export(stock, tmp_path / "out", engine=engine, target=str(goal))
    folder = runtime_folder(done.folder, done.source, tmp_path / "back", engine=engine)
    found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert found.config.rope_parameters["rope_theta"] == 20000.0
    assert found.config.rms_norm_eps == pytest.approx(3e-6)
    if engine == "llamacpp":  # read back in float32, its metadata says how it is stored
        assert torch.equal(found.state_dict()["model.norm.weight"], model.model.norm.weight.float())
        return
    assert found.config.tie_word_embeddings
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert found.dtype == torch.bfloat16
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [0, 2]


@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_checkpoints_of_other_trainers_are_taken_in(eagle3, target, tmp_path, form):
    """A folder without our record, with the older rope keys, `model.` names and no flags."""
    native = export(eagle3, tmp_path / "native", engine=form).folder
    (native / "draftloop.json").unlink()
    config = json.loads((native / "config.json").read_text())
    rope = config.pop("rope_parameters")
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        config.pop(flag)
    config["rope_theta"] = rope["rope_theta"]
    (native / "config.json").write_text(json.dumps(config))
    tensors = load_file(native / "model.safetensors")
    tensors.pop("embed_tokens.weight", None)  # shared with the target
    renamed = {name.replace("midlayer.", "model.layers.0."): t for name, t in tensors.items()}
    save_file(renamed, native / "model.safetensors")
    done = export(native, tmp_path / "ours", engine="draftloop", target=str(target))
    before, after = (
        load_file(eagle3 / "model.safetensors"),
        load_file(done.folder / "model.safetensors"),
    )
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert read(done.folder).layer_ids == LAYER_IDS
    with pytest.raises(ValueError, match="does not say which target"):
        export(native, tmp_path / "again", engine="draftloop")


def test_a_stock_model_is_taken_in_and_padded_to_the_target(target, tmp_path):
    stock = write_causal_lm(tmp_path / "stock", target, reduced=False)
    (stock / "draftloop.json").unlink()
    wide = tmp_path / "wide"
    shutil.copytree(target, wide)
    model = AutoModelForCausalLM.from_pretrained(target)
    model.resize_token_embeddings(model.config.vocab_size + 13, mean_resizing=False)
    model.save_pretrained(wide)
    done = export(stock, tmp_path / "out", engine="vllm", target=str(wide))
    padded = AutoModelForCausalLM.from_pretrained(done.folder)
    ids = torch.arange(3, 200)[None]
    logits = AutoModelForCausalLM.from_pretrained(stock)(ids).logits
    found = padded(ids).logits
    assert found.shape[-1] == logits.shape[-1] + 13
    assert torch.allclose(found[..., :-13], logits)
    assert bool((found[..., -13:].amax(-1) < logits.amax(-1)).all())


def test_the_plain_library_loads_the_same_proposals_from_the_folder(causal_lm, tmp_path):
    done = export(causal_lm, tmp_path / "out", engine="transformers")
    loaded, report = AutoModelForCausalLM.from_pretrained(done.folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    source = AutoModelForCausalLM.from_pretrained(causal_lm)
    kept = read_draft_vocab(causal_lm)
    ids = torch.arange(3, 203)[None]
    expected = kept[source(ids).logits[0][:, kept].argmax(-1)]
    assert loaded(ids).logits[0].argmax(-1).tolist() == expected.tolist()
    settings = GenerationConfig.from_pretrained(done.folder)
    assert settings.num_assistant_tokens == 3
    assert settings.num_assistant_tokens_schedule == "constant"


def test_the_gguf_file_holds_the_model_that_was_exported(causal_lm, tmp_path):
    done = export(causal_lm, tmp_path / "out", engine="llamacpp")
    back = runtime_folder(done.folder, done.source, tmp_path / "back", engine="llamacpp")
    plain = export(causal_lm, tmp_path / "plain", engine="transformers").folder
    ids = torch.arange(3, 100)[None]
    logits = [AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (back, plain)]
    assert torch.allclose(logits[0], logits[1], atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "engine", "reason"),
    [
        ("eagle3", "transformers", "read the target's hidden states"),
        ("eagle3", "llamacpp", "read the target's hidden states"),
        ("causal_lm", "speculators", "heads on features"),
    ],
)
def test_what_a_format_cannot_say_is_refused(request, tmp_path, kind, engine, reason):
    with pytest.raises(ValueError, match=f"cannot be exported to {engine}: .*{reason}"):
        export(request.getfixturevalue(kind), tmp_path / "out", engine=engine)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "engine", "reason"),
    [
        ({"norm_before_residual": True}, "sglang", "does not implement norm_before_residual"),
        ({"norm_before_residual": True}, "draftloop", "our runtime does not compute"),
        ({"attention_bias": True}, "sglang", "no attention bias"),
        ({"num_hidden_layers": 2}, "vllm", "fuses with input_layernorm"),
        ({"num_hidden_layers": 2}, "sglang", "fuses with input_layernorm"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "sglang", "cannot name"),
        ({"eagle_aux_hidden_state_layer_ids": [2]}, "sglang", "only where they are wider"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}, "vllm", "without the norm"),
        ({"target_hidden_size": 64}, "vllm", "the target's have 128"),
    ],
)
def test_heads_that_engines_read_differently_are_refused(eagle3, tmp_path, change, engine, reason):
    folder = tmp_path / "drafter"
    shutil.copytree(eagle3, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=reason):
        export(folder, tmp_path / "out", engine=engine)


def test_unknown_formats_and_filled_folders_are_refused(causal_lm, tmp_path):
    with pytest.raises(ValueError, match="format=onnx is not known, expected one of draftloop"):
        export(causal_lm, tmp_path / "out", engine="onnx")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ValueError, match="exists and is not empty"):
        export(causal_lm, tmp_path / "out", engine="vllm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_drafter_of_another_target_is_refused_naming_both(causal_lm, target, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(target, other)
    model = AutoModelForCausalLM.from_pretrained(target)
    model.model.norm.weight.data.mul_(2)
    model.save_pretrained(other)
    with pytest.raises(ValueError, match=f"trained for target .{target}.*at hand is .{other}"):
        export(causal_lm, tmp_path / "out", engine="vllm", target=str(other))


def test_every_format_has_its_module_s_functions():
    for name, chosen in FORMATS.items():
        assert name == chosen.NAME
        assert all(callable(getattr(chosen, f)) for f in ("obstacle", "write", "check", "launch"))


def test_default_draft_length_and_target_are_those_recorded(causal_lm, target):
    source = read_source(causal_lm, target=None, num_draft_tokens=None)
    assert source.num_draft_tokens == 3
    assert source.target.vocab_size == read_target(str(target)).vocab_size
    assert (causal_lm / DRAFT_VOCAB_NAME).is_file()
