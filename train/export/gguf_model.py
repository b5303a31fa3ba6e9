"""A Llama-type model as a GGUF file, through the gguf library.

llama.cpp's "llama" rotates neighbouring pairs of a head, transformers its halves, so rows of q and k
change places; its Qwen architectures keep the order. Norms stay float32, as llama.cpp wants them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    get_tensor_name_map,
    quants,
)
from torch import Tensor
from transformers import PreTrainedModel

from train.export.gguf_vocabulary import add_vocabulary

# transformers' model_type -> llama.cpp's architecture
ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
}
_STORED = {
    torch.float32: (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    torch.float16: (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    torch.bfloat16: (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
}


def model_obstacle(config: dict[str, Any]) -> str | None:
    """Why a model of this configuration cannot be written; None if it can."""
    if config.get("model_type") not in ARCHITECTURES:
        return (
            f"a {config.get('model_type')} model is not written to GGUF here (known: "
            f"{', '.join(ARCHITECTURES)})"
        )
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        return f"rotary scaling of type {rope['rope_type']!r} is not written to GGUF here"
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return "llama.cpp would ignore its sliding window"
    return None


def write_gguf(module: PreTrainedModel, tokenizer: Any, path: Path, *, name: str) -> None:
    """The whole model with its tokenizer as one GGUF file in the module's dtype."""
    config = module.config
    arch = ARCHITECTURES[config.model_type]
    writer = GGUFWriter(str(path), _arch_name(arch))
    stored, file_type = _STORED[module.dtype]
    writer.add_name(name)
    writer.add_file_type(file_type)
    _add_settings(writer, config)
    add_vocabulary(writer, tokenizer, config.vocab_size)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    for key, tensor in _tensors(module):
        found = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ValueError(f"tensor {key} has no place in a {_arch_name(arch)} GGUF file")
        if arch is MODEL_ARCH.LLAMA:
            tensor = _in_llama_order(key, tensor, config)
        values = tensor.detach().to(torch.float32).contiguous().numpy()
        _add_tensor(writer, found, values, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(module: PreTrainedModel) -> list[tuple[str, Tensor]]:
    state = module.state_dict()
    if module.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    return list(state.items())


def _add_settings(writer: GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    pairs: list[tuple[Callable[[Any], None], Any]] = [
        (writer.add_vocab_size, config.vocab_size),
        (writer.add_block_count, config.num_hidden_layers),
        (writer.add_context_length, config.max_position_embeddings),
        (writer.add_embedding_length, config.hidden_size),
        (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, config.num_attention_heads),
        (writer.add_head_count_kv, config.num_key_value_heads),
        (writer.add_key_length, head_dim),
        (writer.add_value_length, head_dim),
        (writer.add_rope_dimension_count, head_dim),
        (writer.add_rope_freq_base, float(config.rope_parameters["rope_theta"])),
        (writer.add_layer_norm_rms_eps, config.rms_norm_eps),
    ]
    for add, value in pairs:
        add(value)


def _add_tensor(
    writer: GGUFWriter, name: str, values: np.ndarray, stored: GGMLQuantizationType
) -> None:
    if values.ndim == 1 or stored is GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, quants.quantize(values, stored), raw_dtype=stored)


def _in_llama_order(key: str, tensor: Tensor, config: Any) -> Tensor:
    """Rows of q and k: halves of each head become neighbouring pairs."""
    if ".q_proj." in key:
        heads = config.num_attention_heads
    elif ".k_proj." in key:
        heads = config.num_key_value_heads
    else:
        return tensor
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _arch_name(arch: MODEL_ARCH) -> str:
    return arch.name.lower()
