"""Drafter networks of our own in a folder: config.json, and model.safetensors under other names.

The names are those of the serving engines; inside, a network is a transformers module whose decoder
is `model`.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

WEIGHTS_NAME = "model.safetensors"

Prefixes = Mapping[str, str]  # of our names -> of the folder's; the first that fits counts


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
