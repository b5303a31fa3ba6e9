"""Each convention an engine relies on, flipped: none gives an error there, all are caught here."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.export_folders import write_causal_lm, write_eagle3, write_target
from train.export.exporting import export
from train.export.registry import FORMATS
from train.export.source import read_target

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
ENGINES = {
    "eagle3": ("vllm", "speculators", "sglang"),
    "causal_lm": ("vllm", "transformers", "sglang"),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[tuple[str, str], Any]:
    """(kind, engine) -> a folder that passes its check; tests mutate copies. And the target."""
    root = tmp_path_factory.mktemp("conventions")
    target = write_target(root / "target")
    drafters = {
        "eagle3": write_eagle3(root / "eagle3", target),
        "causal_lm": write_causal_lm(root / "causal_lm", target),
    }
    return {("target", ""): read_target(str(target))} | {
        (kind, engine): export(folder, root / f"{kind}-{engine}", engine=engine).folder
        for kind, folder in drafters.items()
        for engine in ENGINES[kind]
    }


def edit_config(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_weights(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, path, metadata={"format": "pt"})


def absolute_d2t(folder: Path) -> None:
    edit_weights(folder, lambda t: t.update(d2t=t["d2t"] + torch.arange(len(t["d2t"]))))


def next_layer(by: int) -> Callable[[Path], None]:
    def mutate(folder: Path) -> None:
        def change(config: dict) -> None:
            holder = config.get("eagle_config") or config
            holder[LAYER_IDS] = [layer_id + by for layer_id in holder[LAYER_IDS]]

        edit_config(folder, change)

    return mutate


def without_layer_ids(folder: Path) -> None:
    def change(config: dict) -> None:
        config.pop(LAYER_IDS, None)
        config.pop("eagle_config", None)

    edit_config(folder, change)


def flipped(flag: str) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, lambda c: c.update({flag: not c[flag]}))


def layer_of(config: dict) -> dict:
    return config.get("transformer_layer_config", config)


def without_rope_base(folder: Path) -> None:
    def change(config: dict) -> None:
        config.pop("rope_theta", None)
        layer_of(config)["rope_parameters"].pop("rope_theta")

    edit_config(folder, change)


def other_rope_base(folder: Path) -> None:
    def change(config: dict) -> None:
        layer_of(config)["rope_parameters"]["rope_theta"] = 500000.0
        if "rope_theta" in config:
            config["rope_theta"] = 500000.0

    edit_config(folder, change)


def other_eps(folder: Path) -> None:
    edit_config(folder, lambda c: layer_of(c).update(rms_norm_eps=1e-2))


def smaller_vocabulary(folder: Path) -> None:
    edit_config(folder, lambda c: layer_of(c).update(vocab_size=layer_of(c)["vocab_size"] - 3))


def missing(tensor: str) -> Callable[[Path], None]:
    def mutate(folder: Path) -> None:
        edit_weights(folder, lambda t: t.pop(next(name for name in t if name.endswith(tensor))))

    return mutate


def other_dtype(folder: Path) -> None:
    edit_config(folder, lambda c: c.update(dtype="float16"))


def tied(folder: Path) -> None:
    edit_config(folder, lambda c: c.update(tie_word_embeddings=not c["tie_word_embeddings"]))


def swapped_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))


def with_penalty(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 1.1}))


def without_threshold(folder: Path) -> None:
    path = folder / "generation_config.json"
    content = json.loads(path.read_text())
    del content["assistant_confidence_threshold"]
    path.write_text(json.dumps(content))


def wider(tensor: str) -> Callable[[Path], None]:
    def mutate(folder: Path) -> None:
        def change(tensors: dict) -> None:
            name = next(name for name in tensors if name.endswith(tensor))
            tensors[name] = torch.cat([tensors[name], tensors[name][:1]])

        edit_weights(folder, change)

    return mutate


HEAD_MUTATIONS = {
    "absolute d2t": (absolute_d2t, "d2t"),
    "no d2t": (missing("d2t"), "d2t is missing"),
    "layer ids + 1": (next_layer(1), "layer"),
    "layer ids - 1": (next_layer(-1), "layer"),
    "no layer ids": (without_layer_ids, "layer"),
    "norm_before_residual": (flipped("norm_before_residual"), "norm_before_residual"),
    "norm_before_fc": (flipped("norm_before_fc"), "input_norm"),
    "fc_norm": (flipped("fc_norm"), "fc_norm"),
    "norm_output": (flipped("norm_output"), "norm_output"),
    "rope key missing": (without_rope_base, "rope"),
    "another rope base": (other_rope_base, "rope"),
    "another epsilon": (other_eps, "rms_norm_eps"),
    "unpadded vocabulary": (smaller_vocabulary, "vocab_size"),
    "tied": (tied, "tie_word_embeddings"),
    "a missing tensor": (missing("hidden_norm.weight"), "missing"),
    "another shape": (wider("mlp.up_proj.weight"), "up_proj.weight has shape"),
    "another dtype": (other_dtype, "dtype"),
    "another tokenizer": (swapped_tokens, "tokenizers differ"),
}
PLAIN_MUTATIONS = {
    name: HEAD_MUTATIONS[name]
    for name in (
        "rope key missing",
        "another rope base",
        "another epsilon",
        "unpadded vocabulary",
        "another shape",
        "another dtype",
        "another tokenizer",
    )
} | {
    "tied": (tied, "lm_head.weight is foreign|tie_word_embeddings"),
    "a missing tensor": (missing("lm_head.weight"), "missing"),
    "a warper of its own": (with_penalty, "repetition_penalty"),
    "no confidence threshold": (without_threshold, "assistant_confidence_threshold"),
}


def problems(exported: dict, kind: str, engine: str, folder: Path) -> list[str]:
    return FORMATS[engine].check(folder, exported["target", ""])


@pytest.mark.parametrize("engine", ENGINES["eagle3"])
@pytest.mark.parametrize("name", HEAD_MUTATIONS)
def test_a_flipped_convention_of_a_head_is_caught(exported, tmp_path, engine, name):
    mutate, word = HEAD_MUTATIONS[name]
    _check_catches(exported, tmp_path, "eagle3", engine, mutate, word)


@pytest.mark.parametrize("engine", ENGINES["causal_lm"])
@pytest.mark.parametrize("name", PLAIN_MUTATIONS)
def test_a_flipped_convention_of_a_plain_model_is_caught(exported, tmp_path, engine, name):
    mutate, word = PLAIN_MUTATIONS[name]
    _check_catches(exported, tmp_path, "causal_lm", engine, mutate, word)


def test_a_flag_left_out_means_different_things_and_is_caught(exported, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(exported["eagle3", "speculators"], folder)
    edit_config(folder, lambda c: c.pop("norm_before_residual"))
    found = problems(exported, "eagle3", "speculators", folder)
    assert any("means true in this form" in problem for problem in found)


def test_a_pickle_beside_the_weights_is_refused(exported, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(exported["causal_lm", "vllm"], folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    found = problems(exported, "causal_lm", "vllm", folder)
    assert found == ["pytorch_model.bin is a pickle: only safetensors are published"]


def _check_catches(
    exported: dict, tmp_path: Path, kind: str, engine: str, mutate: Callable, word: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(exported[kind, engine], folder)
    assert problems(exported, kind, engine, folder) == []
    mutate(folder)
    found = problems(exported, kind, engine, folder)
    assert any(part in problem for problem in found for part in word.split("|")), found
