"""A parallel drafter's folder, ours or as vLLM reads it, in the one form: our names, nothing folded.

vLLM's folder differs in three weights: the layer's input norm stands there once more for the states
(`hidden_norm`), the mask's embedding is a row of the embeddings (`mask_token_id`), and what levels the
states is a part of `fc`.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ARCHITECTURE = "Qwen3DSparkModel"
STATES_NORM, LAYER_NORM = "hidden_norm.weight", "layers.0.input_layernorm.weight"
MASK, SCALE, FUSION = "mask_embedding", "feature_scale", "fc.weight"
EMBEDDINGS = "embed_tokens.weight"
# What a configuration may say that the network computes in one way only.
COMPUTED = {
    "num_hidden_layers": 1,
    "markov_head_type": "vanilla",
    "sample_from_anchor": True,
    "is_causal": True,
    "confidence_head_with_markov": True,
}


def is_parallel(config: dict[str, Any]) -> bool:
    """Whether a configuration is that of a parallel drafter."""
    return config.get("architectures") == [ARCHITECTURE]


def own_tensors(
    tensors: dict[str, Tensor], config: dict[str, Any], folder: Path
) -> dict[str, Tensor]:
    """The weights of a folder in the one form.

    Raises:
        ValueError: if the drafter computes what our network does not.
    """
    for key, value in COMPUTED.items():
        if config.get(key) != value:
            raise ValueError(
                f"{folder} was trained with {key}={config.get(key)}, computed here is {value}: "
                "serve it with the engine it was made for"
            )
    if STATES_NORM not in tensors:
        return tensors
    own = {name: tensor for name, tensor in tensors.items() if name != STATES_NORM}
    for name in (LAYER_NORM, EMBEDDINGS, FUSION):
        if name not in own:
            raise ValueError(f"{folder}: {name} is missing")
    if not torch.equal(tensors[STATES_NORM], own[LAYER_NORM]):
        raise ValueError(
            f"{folder} norms the target's states otherwise than the block, which is not computed "
            "here: serve it with the engine it was made for"
        )
    own[MASK] = own[EMBEDDINGS][config["mask_token_id"]].clone()
    own[SCALE] = own[FUSION].new_ones(own[FUSION].shape[1])
    return own
