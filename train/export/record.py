"""What `draftloop.json` says about an exported folder, so that a later change of it is noticed.

A key of config.json that changes the forward pass, flipped by hand or lost on the way, gives no error in any
engine; only acceptance falls. So the record holds those keys once more.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec_runtime.drafter_files import EAGLE3_FLAGS, LAYER_IDS
from specdec_runtime.formats import DrafterManifest, is_drafter_folder, read_manifest
from specdec_runtime.parallel_files import COMPUTED
from train.export.source import Source

FORWARD_KEYS = (
    "attention_bias",
    "draft_vocab_size",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "target_hidden_size",
    "tie_word_embeddings",
    "vocab_size",
    LAYER_IDS,
    *EAGLE3_FLAGS,
    "target_layer_ids",
    "mask_token_id",
    "markov_rank",
    *COMPUTED,
)


def forward_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a configuration, in the one form, that change what the drafter computes."""
    return {key: config[key] for key in FORWARD_KEYS if config.get(key) is not None}


def served(source: Source, engine: str, config: dict[str, Any]) -> DrafterManifest:
    """The manifest of an exported folder.

    Args:
        config: of the folder, in the one form.
    """
    record = {"format": engine, "forward": forward_settings(config)}
    recommended = source.manifest.recommended | {"num_draft_tokens": source.num_draft_tokens}
    return replace(source.manifest, served=record, recommended=recommended)


def differences(folder: Path, config: dict[str, Any]) -> list[str]:
    """Where the folder's configuration, in the one form, is not what was exported."""
    if not is_drafter_folder(folder):
        return []
    recorded = read_manifest(folder).served.get("forward", {})
    found = forward_settings(config)
    return [
        f"config.json means {key}={found.get(key)}, the drafter was exported with "
        f"{recorded.get(key)}"
        for key in sorted(recorded.keys() | found.keys())
        if recorded and recorded.get(key) != found.get(key)
    ]
