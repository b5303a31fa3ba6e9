"""The speculators library's form of an EAGLE-3 folder, which names its target: `vllm serve DIR`."""

from pathlib import Path
from typing import Any

import torch

from specdec_runtime.drafter_files import EAGLE3_FLAGS, LAYER_IDS, read_config
from train.export.eagle3_folder import (
    check_eagle3,
    eagle3_config,
    eagle3_obstacle,
    eagle3_tensors,
    weights_dtype,
    write_eagle3,
)
from train.export.source import Source, TargetFacts

NAME = "speculators"
VERSION = "0.9.0"  # of the library whose form this is
_OWN_KEYS = ("draft_vocab_size", "target_hidden_size", LAYER_IDS, *EAGLE3_FLAGS)


def obstacle(source: Source) -> str | None:
    return eagle3_obstacle(source)


def write(source: Source, folder: Path, *, dtype: torch.dtype | None) -> None:
    dtype = weights_dtype(source, dtype)
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in eagle3_tensors(source, dtype).items()
    }
    config = speculators_config(source, eagle3_config(source, dtype))
    write_eagle3(source, folder, engine=NAME, config=config, tensors=tensors)


def speculators_config(source: Source, native: dict[str, Any]) -> dict[str, Any]:
    """config.json in this form: the layer's keys apart from the head's own."""
    own = {key: native[key] for key in _OWN_KEYS}
    outside = {
        *_OWN_KEYS,
        "architectures",
        "num_aux_hidden_states",
        "dtype",
        "transformers_version",
    }
    layer = {key: value for key, value in native.items() if key not in outside}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": source.num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "dtype": native["dtype"],
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": source.target.name,
                "architectures": source.target.config.architectures,
            },
        },
        **own,
    }


def check(folder: Path, target: TargetFacts) -> list[str]:
    config = read_config(folder)
    problems = _required_keys(config)
    if problems:
        return problems
    if missing := [flag for flag in EAGLE3_FLAGS if flag not in config]:
        problems.append(
            f"{', '.join(missing)} not written: a missing norm_before_residual means true in this "
            "form and false in vLLM's native one"
        )
    named = config["speculators_config"]["verifier"]["name_or_path"]
    if named != target.name:
        problems.append(f"its verifier is {named!r}, the target at hand is {target.name!r}")
    return [*problems, *check_eagle3(folder, target, prefix="layers.0.")]


def launch(folder: Path, target: TargetFacts, num_draft_tokens: int) -> str:
    return f"vllm serve {folder}"


def _required_keys(config: dict[str, Any]) -> list[str]:
    """What vLLM refuses to start without."""
    problems = []
    if config.get("speculators_model_type") != "eagle3":
        problems.append(
            f"speculators_model_type is {config.get('speculators_model_type')!r}, expected 'eagle3'"
        )
    if config.get("transformer_layer_config", {}).get("model_type") not in ("llama", "qwen3"):
        problems.append("transformer_layer_config.model_type has to be llama or qwen3")
    settings = config.get("speculators_config", {})
    methods = settings.get("proposal_methods") or [{}]
    if not isinstance(methods[0].get("speculative_tokens"), int):
        problems.append("speculators_config.proposal_methods[0].speculative_tokens is missing")
    if not settings.get("verifier", {}).get("name_or_path"):
        problems.append("speculators_config.verifier.name_or_path is missing")
    return problems
