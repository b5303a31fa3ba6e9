"""The GGUF export: what llama.cpp would read wrongly without a word is caught or refused."""

import shutil
from pathlib import Path

import pytest
from gguf import GGUFReader
from tokenizers import Regex, pre_tokenizers

from tests.export_folders import toy_tokenizer, write_causal_lm, write_target
from train.export import for_llamacpp
from train.export.exporting import export
from train.export.gguf_model import model_obstacle
from train.export.gguf_vocabulary import vocabulary_obstacle
from train.export.source import TargetFacts, read_target


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Path, TargetFacts]:
    root = tmp_path_factory.mktemp("gguf")
    target = write_target(root / "target")
    drafter = write_causal_lm(root / "drafter", target)
    return export(drafter, root / "out", engine="llamacpp").folder, read_target(str(target))


def changed(folder: Path, to: Path, key: str, value: float, *, item: int = 0) -> Path:
    """A copy of the folder in which one number of the metadata is another."""
    shutil.copytree(folder, to)
    field = GGUFReader(str(to / for_llamacpp.FILE), "r+").fields[key]
    field.parts[field.data[item]][0] = value
    return to


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.rope.freq_base", 500000.0, "llama.rope.freq_base=500000"),
        ("llama.attention.layer_norm_rms_epsilon", 1e-2, "layer_norm_rms_epsilon"),
        ("llama.attention.head_count_kv", 2, "head_count_kv=2"),
        ("tokenizer.ggml.token_type", 6, "token types"),
        ("tokenizer.ggml.pre", ord("x"), "splits text like 'gpt-2'"),
        ("tokenizer.ggml.tokens", ord("\u00e9") % 128, "token 0 is"),
    ],
)
def test_a_changed_number_is_caught(exported, tmp_path, key, value, message):
    folder, target = exported
    assert for_llamacpp.check(folder, target) == []
    found = for_llamacpp.check(changed(folder, tmp_path / "copy", key, value), target)
    assert any(message in problem for problem in found), found


def test_a_cut_off_and_a_missing_file_are_named(exported, tmp_path):
    folder, target = exported
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / for_llamacpp.FILE
    path.write_bytes(path.read_bytes()[:-1000])
    found = for_llamacpp.check(tmp_path / "copy", target)
    assert any("export again" in problem or "cut off" in problem for problem in found), found
    path.unlink()
    assert for_llamacpp.check(tmp_path / "copy", target) == ["drafter.gguf is missing"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "gemma3_text"}, "a gemma3_text model is not written"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "llama3"}}, "type 'llama3'"),
        ({"model_type": "mistral", "sliding_window": 4096}, "ignore its sliding window"),
    ],
)
def test_models_that_the_file_cannot_hold_are_refused(config, reason):
    assert reason in str(model_obstacle(config))
    assert model_obstacle({"model_type": "qwen3"}) is None


def test_a_tokenizer_without_a_name_in_llama_cpp_is_refused():
    tokenizer = toy_tokenizer()
    assert vocabulary_obstacle(tokenizer) is None
    by_letter = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [by_letter, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    assert "splits text is not known" in str(vocabulary_obstacle(tokenizer))
