"""Drafter networks of our own: one layer of the target's form, and their folders.

A folder holds config.json, and model.safetensors under the serving engines' names; inside, a network
is a transformers module whose decoder is `model`.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

WEIGHTS_NAME = "model.safetensors"

Prefixes = Mapping[str, str]  # of our names -> of the folder's; the first that fits counts


def one_layer(
    target: PretrainedConfig, *, num_heads: int, head_dim: int, intermediate_size: int
) -> dict[str, Any]:
    """What the configuration of a one-layer network has of its target's, and of its own layer."""
    return {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": getattr(target, "rms_norm_eps", 1e-6),
        "rope_parameters": copy.deepcopy(target.rope_parameters),
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "tie_word_embeddings": False,
        "dtype": torch.float32,
    }


def require_layers(target: PretrainedConfig, layer_ids: Sequence[int], *, first: int) -> None:
    """Raise a ValueError unless these are residuals of the target, ascending, `first` the lowest."""
    wrong = [k for k in layer_ids if not first <= k < target.num_hidden_layers]
    if wrong or list(layer_ids) != sorted(set(layer_ids)) or not layer_ids:
        raise ValueError(
            f"the drafter reads layers {list(layer_ids)} of the target: expected ascending numbers "
            f"from {first} to {target.num_hidden_layers - 1}"
        )


def save_network(network: PreTrainedModel, folder: str | Path, prefixes: Prefixes) -> None:
    """Writes a network's configuration and weights."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    network.config.save_pretrained(folder)
    tensors = {
        folder_name(name, prefixes): tensor.detach().cpu().contiguous()
        for name, tensor in network.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})


def fill_network(
    network: PreTrainedModel, tensors: Mapping[str, Tensor], prefixes: Prefixes, folder: str | Path
) -> None:
    """Puts a folder's weights, given by their names there, into the network.

    Raises:
        ValueError: if one is missing or unknown.
    """
    wanted = {folder_name(name, prefixes): name for name in network.state_dict()}
    if differing := sorted(wanted.keys() ^ tensors.keys()):
        raise ValueError(f"{folder}: {differing[0]} is missing or unknown")
    network.load_state_dict({wanted[name]: tensor for name, tensor in tensors.items()})


def folder_name(name: str, prefixes: Prefixes) -> str:
    """The name in the folder of one of our weights."""
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes.get(prefix, "") + name.removeprefix(prefix)
