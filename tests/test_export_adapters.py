"""Low-rank adapters are merged in float32, whole, and never silently as nothing."""

import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specdec_runtime.stats import AcceptanceStats
from tests.export_folders import write_causal_lm, write_target
from train.export import parity
from train.export.adapters import merged_module
from train.export.exporting import export
from train.export.observation import NUM_CONTEXTS, Observation

IDS = torch.arange(3, 60)[None]
CLOSE = 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(target, base, adapter): a tied base, LoRA on attention, a head trained whole."""
    root = tmp_path_factory.mktemp("adapter")
    target = write_target(root / "target")
    base = write_causal_lm(root / "base", target, reduced=False)
    (base / "draftloop.json").unlink()
    model = AutoModelForCausalLM.from_pretrained(base)
    settings = LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], r=4)
    adapted = get_peft_model(model, settings)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += 0.02 * noise
            assert "lora" in name or "lm_head" in name
    adapted.save_pretrained(root / "adapter")
    return target, base, root / "adapter"


def test_the_merged_export_is_the_unmerged_model(folders, tmp_path):
    target, base, adapter = folders
    plain = AutoModelForCausalLM.from_pretrained(base)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    expected, before = adapted(IDS).logits, plain(IDS).logits
    done = export(adapter, tmp_path / "out", engine="transformers", target=str(target))
    (note,) = done.source.notes
    assert note.startswith(
        "adapter merged in float32, written in float32: largest logit difference"
    )
    assert note.endswith("0.0% of the top tokens changed")
    found = AutoModelForCausalLM.from_pretrained(done.folder)
    assert not found.config.tie_word_embeddings
    assert float((found(IDS).logits - expected).abs().max()) < CLOSE * float(expected.abs().max())
    assert not torch.allclose(expected, before, atol=0.1)


def test_rounding_of_a_merge_is_reported(folders):
    _, _, adapter = folders
    exact = merged_module(adapter, IDS, dtype=torch.float32)
    rounded = merged_module(adapter, IDS, dtype=torch.bfloat16)
    assert exact.largest_logit_difference < CLOSE * 10
    assert exact.changed_top_tokens == 0
    assert rounded.largest_logit_difference > exact.largest_logit_difference
    assert rounded.module.dtype == torch.bfloat16


def test_the_acceptance_before_and_after_a_merge_is_reported(folders, tmp_path, monkeypatch):
    """Of the adapter merged without rounding, and of the folder as it was written."""
    target, _, adapter = folders
    dtypes = []

    def seen(_, compared, **__):
        for folder in compared:
            tensors = load_file(folder / "model.safetensors").values()
            dtypes.append({tensor.dtype for tensor in tensors})
        return [observation(2, 1), observation(1, 1)]

    def observation(*accepted):
        row = AcceptanceStats()
        for number in accepted:
            row.add_round(3, number)
        same = AcceptanceStats()
        same.add_round(3, 1)
        return Observation([[1]] * NUM_CONTEXTS, [[1]], [row, same], same_text=True)

    monkeypatch.setattr(parity, "observed_elsewhere", seen)
    out = tmp_path / "out"
    with pytest.warns(UserWarning, match="changed .* of the top tokens"):
        done = export(adapter, out, engine="vllm", target=str(target), dtype=torch.bfloat16)
    said = parity.verify(done.source, done.folder, engine="vllm", same_dtype=False).describe()
    assert dtypes == [{torch.float32}, {torch.bfloat16}]
    assert "acceptance length 2.000 (2.333 before export)" in said


def test_pickled_adapters_are_not_read(folders, tmp_path):
    target, _, adapter = folders
    pickled = shutil.copytree(adapter, tmp_path / "pickled")
    weights = pickled / "adapter_model.safetensors"
    torch.save(load_file(weights), pickled / "adapter_model.bin")
    weights.unlink()
    with pytest.raises(ValueError, match="pickled adapters are not read"):
        export(pickled, tmp_path / "out", engine="vllm", target=str(target))


def test_damaged_adapters_are_named(folders, tmp_path):
    target, _, adapter = folders
    cut = shutil.copytree(adapter, tmp_path / "cut")
    (cut / "adapter_model.safetensors").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is damaged"):
        export(cut, tmp_path / "out", engine="vllm", target=str(target))
    for content, message in (("{", "not valid JSON"), ("{}", "names no base_model_name_or_path")):
        (cut / "adapter_config.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            export(cut, tmp_path / "out", engine="vllm", target=str(target))
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]


def test_an_adapter_with_a_renamed_weight_does_not_load(folders, tmp_path):
    target, _, adapter = folders
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    for path in adapter.iterdir():
        (renamed / path.name).write_bytes(path.read_bytes())
    tensors = load_file(renamed / "adapter_model.safetensors")
    name = next(key for key in tensors if "q_proj" in key)
    tensors[name.replace("q_proj", "queries")] = tensors.pop(name)
    save_file(tensors, renamed / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"is (unknown|missing); expected exactly"):
        export(renamed, tmp_path / "out", engine="transformers", target=str(target))
