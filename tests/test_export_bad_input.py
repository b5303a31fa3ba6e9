"""Damaged, foreign and unfinished input: one clear message, nothing half-written."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tests.export_folders import write_causal_lm, write_eagle3, write_target
from tests.test_export_cli import call

WRITERS = {"causal_lm": write_causal_lm, "eagle3": write_eagle3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bad")
    target = write_target(root / "target")
    return {kind: write(root / kind, target) for kind, write in WRITERS.items()}


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def of_weights(change):
    """Changes the tensors of a folder; `change` gets them and the name of a weight of the layer."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors, min(name for name in tensors if "q_proj" in name))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def of_config(key: str):
    def edit(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        del content[key]
        (folder / "config.json").write_text(json.dumps(content))

    return edit


def writes(name: str, content: str):
    return lambda folder: (folder / name).write_text(content)


missing = of_weights(lambda tensors, name: tensors.pop(name))
smaller = of_weights(lambda tensors, name: tensors.update({name: tensors[name][:-2].clone()}))
not_finite = of_weights(lambda tensors, name: tensors[name].view(-1)[7].fill_(torch.nan))


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("causal_lm", lambda folder: (folder / "config.json").unlink(), r"has no config\.json"),
        ("causal_lm", truncate, "are damaged"),
        ("eagle3", truncate, "is damaged"),
        ("causal_lm", missing, r"1 weights are missing, model\.layers\.0\.self_attn\.q_proj"),
        ("eagle3", missing, r"tensor midlayer\.self_attn\.q_proj\.weight is missing"),
        ("causal_lm", smaller, r"q_proj\.weight has shape \[126, 128\], its configuration says"),
        ("eagle3", smaller, r"q_proj\.weight has shape \[126, 256\], the configuration says"),
        ("causal_lm", not_finite, r"q_proj\.weight has numbers that are not finite"),
        ("eagle3", not_finite, r"q_proj\.weight has numbers that are not finite"),
        ("eagle3", of_config("hidden_size"), r"config\.json lacks hidden_size: expected the sizes"),
        ("causal_lm", writes("draftloop.json", "[]"), "holds no JSON object"),
        (
            "eagle3",
            writes("draft_vocab.safetensors", "123"),
            r"draft_vocab\.safetensors is damaged",
        ),
    ],
)
def test_a_damaged_drafter_is_one_message_and_leaves_nothing(
    folders, tmp_path, kind, damage, message
):
    folder = tmp_path / "drafter"
    shutil.copytree(folders[kind], folder)
    damage(folder)
    code, _, said = call(f"drafter={folder}", "format=vllm", f"to={tmp_path / 'out'}")
    assert code == 1
    (line,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert re.search(message, line)
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_a_full_disk_or_a_refused_licence_leaves_nothing(folders, tmp_path, monkeypatch):
    argv = (f"drafter={folders['eagle3']}", "format=vllm", f"to={tmp_path / 'out'}")
    code, _, said = call(*argv, "push_to_hub=org/name", "dry_run=true")
    assert (code, "states no licence" in said) == (1, True)

    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("train.export.eagle3_folder.save_file", full)
    code, _, said = call(*argv)
    assert code == 1
    assert re.search(r"out could not be written: I/O error: No space left on device", said)
    assert list(tmp_path.iterdir()) == []
