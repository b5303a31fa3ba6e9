"""Rules that several engines share, each a small function that returns what is wrong with a folder.

A rule returns a list of problems, empty if it holds; nothing is raised for a folder that is wrong,
so that a check says everything at once.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec_runtime.formats import is_drafter_folder, read_manifest
from specdec_runtime.pretrained import load_tokenizer
from specdec_runtime.tokenizers import check_same_tokenizer
from train.export.source import TargetFacts, check_recorded

WEIGHTS = "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
DTYPE_CODES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# Without a base frequency, engines read a folder with 10,000.
ROPE_KEYS = ("rope_type", "rope_theta")


def stored_tensors(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """{name: (dtype code, shape)} from the headers of all safetensors files.

    Raises:
        ValueError: if there is none or one is damaged.
    """
    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} has no {WEIGHTS}")
    found = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    part = file.get_slice(name)
                    found[name] = (part.get_dtype(), list(part.get_shape()))
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): export again") from None
    return found


def stored_tensor(folder: Path, name: str) -> Tensor:
    """One tensor of a folder."""
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118
                return file.get_tensor(name)
    raise ValueError(f"{folder} has no tensor {name}")


def no_pickles(folder: Path) -> list[str]:
    """Loading a pickle runs code: no folder of ours holds one."""
    found = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    return [f"{name} is a pickle: only safetensors are published" for name in found]


def finite(folder: Path) -> list[str]:
    """No weight is NaN or infinite: an engine would serve it and accept nothing."""
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if not bool(file.get_tensor(name).isfinite().all()):
                    return [f"tensor {name} has numbers that are not finite"]
    return []


def same_tensors(
    stored: dict[str, tuple[str, list[int]]], wanted: dict[str, list[int]]
) -> list[str]:
    """Nothing is missing, foreign or of another shape: what is missing would be random numbers."""
    problems = [f"tensor {name} is missing" for name in sorted(wanted.keys() - stored.keys())]
    problems += [f"tensor {name} is foreign" for name in sorted(stored.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & stored.keys()):
        if stored[name][1] != wanted[name]:
            problems.append(
                f"tensor {name} has shape {stored[name][1]}, the configuration says {wanted[name]}"
            )
    return problems


def dtype_as_said(stored: dict[str, tuple[str, list[int]]], config: dict[str, Any]) -> list[str]:
    """The configuration's dtype is that of the weights: engines load in the one they read."""
    said = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    found = {DTYPE_CODES[code] for code, _ in stored.values() if code in DTYPE_CODES}
    if found <= {said}:
        return []
    return [f"config.json says dtype {said!r}, the weights are {', '.join(sorted(found))}"]


def rope_is_complete(config: dict[str, Any]) -> list[str]:
    """The rotary settings are written out: one missing changes every state."""
    rope = config.get("rope_parameters") or {}
    if "layer_types" in config and all(isinstance(value, dict) for value in rope.values()):
        return []  # one set a layer type
    missing = [key for key in ROPE_KEYS if key not in rope]
    if missing:
        return [f"rope_parameters lacks {', '.join(missing)}: an engine would assume its default"]
    return []


def same_tokenizer(folder: Path, target: TargetFacts) -> list[str]:
    """The drafter runs under the target's tokenizer: every id means the same."""
    try:
        check_same_tokenizer(load_tokenizer(folder), target.tokenizer)
    except ValueError as error:
        return [str(error)]
    return []


def same_vocab_size(config: dict[str, Any], target: TargetFacts, engine: str) -> list[str]:
    """The drafter has as many logits as the target."""
    found = config.get("vocab_size")
    if found == target.vocab_size:
        return []
    return [
        f"vocab_size is {found}, the target's {target.vocab_size}: {engine} wants them equal; pad "
        "with rows that cannot win"
    ]


def recorded_target(folder: Path, target: TargetFacts) -> list[str]:
    """The folder says which target it belongs to, and it is this one."""
    if not is_drafter_folder(folder):
        return ["draftloop.json is missing: nothing says which target the drafter belongs to"]
    try:
        check_recorded(read_manifest(folder), target)
    except ValueError as error:
        return [str(error)]
    return []


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A JSON file as transformers writes them."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
