"""Drafter folders as they lie on disk, whoever wrote them: ours, stock models, EAGLE-3 checkpoints, and
parallel drafters (parallel_files.py).

`read` brings an EAGLE-3 folder of vLLM, SGLang or the speculators library into one form: the keys and
tensor names of vLLM's native folder, every flag written out, layer ids counted as Hugging Face
counts `hidden_states` (k = the residual after k layers), and the draft vocabulary as plain ids.
What the three mean by a missing key, and how each counts layers, is in docs/serving.md.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec_runtime.formats import (
    DrafterManifest,
    is_drafter_folder,
    read_draft_vocab,
    read_manifest,
)
from specdec_runtime.missing_folder import missing_folder
from specdec_runtime.parallel_files import is_parallel, own_tensors

EAGLE3_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "LlamaForCausalLMEagle3Speculator",
)
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Flags that change what an EAGLE-3 head computes, and what a native folder without them means.
EAGLE3_FLAGS = {
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
_VOCABULARY = ("d2t", "t2d")
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, kw_only=True)
class DrafterFiles:
    """One drafter folder.

    Attributes:
        kind: a module of specdec_runtime.drafters.
        config: of config.json; for eagle3 in the one form described above; empty for an adapter.
        tensors: of an eagle3 or parallel folder, by native name, without the draft vocabulary; else
            empty (transformers reads the others).
        token_ids: [n] int64, ascending target ids of the head's rows; None = all of them.
        manifest: of draftloop.json, if it is ours.
    """

    folder: Path
    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    token_ids: Tensor | None
    manifest: DrafterManifest | None

    @property
    def is_adapter(self) -> bool:
        """Whether the folder holds a low-rank adapter instead of a whole model."""
        return (self.folder / ADAPTER_CONFIG).is_file()

    @property
    def layer_ids(self) -> list[int] | None:
        """The target's layers that an eagle3 head reads; None = the engines' default."""
        return self.config.get(LAYER_IDS)


def read(folder: str | Path) -> DrafterFiles:
    """The drafter in `folder`.

    Raises:
        ValueError: if it is no drafter, is damaged, or contradicts itself.
    """
    folder = Path(folder)
    # An adapter's configuration is that of the model it changes.
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    config = {} if is_adapter else read_config(folder)
    manifest = read_manifest(folder) if is_drafter_folder(folder) else None
    if is_eagle3(config) or is_parallel(config):
        _check_sizes(config, folder)
    if is_eagle3(config):
        tensors, token_ids = _eagle3_tensors(folder)
        config = native_config(config)
        if token_ids is None:
            token_ids = read_draft_vocab(folder)
        return DrafterFiles(
            folder=folder,
            kind="eagle3",
            config=config,
            tensors=tensors,
            token_ids=token_ids,
            manifest=manifest,
        )
    if is_parallel(config):
        found = read_tensors(folder)
        tensors = {name: part for name, part in found.items() if name not in _VOCABULARY}
        token_ids = draft_token_ids(found, folder)
        return DrafterFiles(
            folder=folder,
            kind="parallel",
            config=config,
            tensors=own_tensors(tensors, config, folder),
            token_ids=read_draft_vocab(folder) if token_ids is None else token_ids,
            manifest=manifest,
        )
    return DrafterFiles(
        folder=folder,
        kind=manifest.kind if manifest is not None else "causal_lm",
        config=config,
        tensors={},
        token_ids=read_draft_vocab(folder),
        manifest=manifest,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder.

    Raises:
        ValueError: if it is missing or no JSON object.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        problem = missing_folder(folder.absolute()) or f"{folder} is a file"
        raise ValueError(f"{problem}: expected a Hugging Face model folder")
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json: expected a Hugging Face model folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON (line {error.lineno}): {error.msg}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no JSON object: expected a model's configuration")
    return config


def _check_sizes(config: dict[str, Any], folder: Path) -> None:
    """Raise a ValueError if the configuration of a drafter on states lacks a size that has no default."""
    in_layer = "speculators_model_type" in config
    layer = config.get("transformer_layer_config") or {} if in_layer else config
    missing = [key for key in SIZES if key not in layer]
    missing += [key for key in ("draft_vocab_size",) if in_layer and key not in config]
    if missing:
        raise ValueError(
            f"{folder / 'config.json'} lacks {', '.join(missing)}: expected the sizes of the "
            "drafter's layer"
        )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files.

    Raises:
        ValueError: if there are none, or a file is damaged. Pickled weights are never opened.
    """
    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} has no model.safetensors: pickled weights are not read")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            tensors |= load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): copy it again") from None
    return tensors


def is_eagle3(config: dict[str, Any]) -> bool:
    """Whether a configuration is that of an EAGLE-3 head, in any of the forms."""
    architectures = config.get("architectures") or []
    is_named = any(name in EAGLE3_ARCHITECTURES for name in architectures)
    return is_named or config.get("speculators_model_type") == "eagle3"


def native_config(config: dict[str, Any]) -> dict[str, Any]:
    """An EAGLE-3 configuration in the one form, from vLLM's, SGLang's or the speculators' one."""
    if "speculators_model_type" in config:
        # A missing flag means True in this form alone.
        flags = {**EAGLE3_FLAGS, "norm_before_residual": True}
        layer = config["transformer_layer_config"]
        own = {key: config[key] for key in (*flags, LAYER_IDS) if config.get(key) is not None}
        sizes = {
            "vocab_size": layer["vocab_size"],
            "draft_vocab_size": config["draft_vocab_size"],
            "target_hidden_size": config.get("target_hidden_size") or layer["hidden_size"],
            "tie_word_embeddings": any(
                place.get("tie_word_embeddings", False) for place in (config, layer)
            ),
        }
        found = {**layer, **flags, **own, **sizes}
    else:
        found = {**EAGLE3_FLAGS, **config}
        found.setdefault("draft_vocab_size", found["vocab_size"])
        found.setdefault("target_hidden_size", found["hidden_size"])
    nested = found.pop("eagle_config", None) or {}
    if LAYER_IDS not in found and nested.get(LAYER_IDS):
        # SGLang's nested key names the layer whose output is read: one less than our count.
        found[LAYER_IDS] = [layer_id + 1 for layer_id in nested[LAYER_IDS]]
    if "rope_parameters" not in found:
        found["rope_parameters"] = _rope_parameters(found)
    for outdated in ("rope_theta", "rope_scaling"):
        found.pop(outdated, None)
    return {**found, "architectures": [EAGLE3_ARCHITECTURES[0]], "model_type": "llama"}


def draft_token_ids(tensors: dict[str, Tensor], place: Path) -> Tensor | None:
    """[n] target ids of `d2t`, which holds offsets; None without one.

    Raises:
        ValueError: if d2t and t2d contradict each other.
    """
    if "d2t" not in tensors:
        return None
    d2t = tensors["d2t"].to(torch.int64)
    token_ids = d2t + torch.arange(len(d2t))
    if problem := draft_vocab_problem(d2t, tensors.get("t2d")):
        raise ValueError(f"{place}: {problem}")
    return token_ids


def draft_vocab_problem(d2t: Tensor, t2d: Tensor | None) -> str | None:
    """What is wrong with a draft vocabulary; None if nothing is."""
    token_ids = d2t + torch.arange(len(d2t))
    if not bool((token_ids.diff() > 0).all()):
        return "d2t + arange does not ascend: expected offsets (target id = draft id + d2t)"
    if t2d is None:
        return None
    if t2d.dtype != torch.bool:
        return f"t2d is {t2d.dtype}, expected bool: whether the drafter knows a target token"
    if not torch.equal(t2d.nonzero()[:, 0], token_ids):
        return (
            "d2t and t2d name different tokens: d2t holds offsets (target id = draft id + d2t), "
            "t2d marks the target ids that are reached"
        )
    return None


def _eagle3_tensors(folder: Path) -> tuple[dict[str, Tensor], Tensor | None]:
    tensors = {_native_name(name): tensor for name, tensor in read_tensors(folder).items()}
    token_ids = draft_token_ids(tensors, folder)
    return {k: v for k, v in tensors.items() if k not in _VOCABULARY}, token_ids


def _native_name(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith("layers.0."):
        return "midlayer." + name.removeprefix("layers.0.")
    return name


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """From the older pair of keys; both missing is Llama's plain rope."""
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    return {"rope_type": kind, "rope_theta": config.get("rope_theta", 10000.0), **scaling}
