"""The weights and the configuration inside a GGUF file, as a transformers model.

The Llama architecture (Llama, SmolLM, Mistral and their kin) is read here: one pass over the file,
seconds instead of minutes, and the same result whatever transformers version and kernels are
installed. Other architectures go through transformers' own loader.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGUFReader, dequantize
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

# Left in a configuration by transformers' GGUF loader; the first would send a later
# from_pretrained of the saved folder back to the GGUF quantizer.
LOADER_KEYS = frozenset(
    {
        "quantization_config",
        "_name_or_path",
        "_model_name_or_path",
        "pretraining_tp",
        "unk_token_id",
    }
)

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}


def gguf_model(
    path: Path, reader: GGUFReader, fields: Mapping[str, Any], dtype: torch.dtype
) -> PreTrainedModel:
    """The model of a GGUF file with plain weights of `dtype`, quantised blocks multiplied out.

    Raises:
        ValueError: for an architecture or tensors that can not be converted.
    """
    config: PreTrainedConfig
    if fields.get("general.architecture") == "llama":
        config = _llama_config(path, reader, fields)
        state = dict(_llama_tensors(path, reader, fields, dtype))
        model_class: type[PreTrainedModel] = LlamaForCausalLM
    else:
        loaded = _load_with_transformers(path)
        config = type(loaded.config).from_dict(_cleaned(loaded.config.to_dict()))
        state = {name: tensor.to(dtype) for name, tensor in loaded.state_dict().items()}
        model_class = type(loaded)
    with torch.device("meta"):
        model = model_class(config)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.config.dtype = dtype
    return model


def _llama_config(path: Path, reader: GGUFReader, fields: Mapping[str, Any]) -> LlamaConfig:
    names = {tensor.name for tensor in reader.tensors}
    if "rope_freqs.weight" in names or fields.get("llama.rope.scaling.type", "none") != "none":
        raise ValueError(
            f"{path}: its rotary positions are scaled, which a GGUF file does not say how to undo; "
            "use the model's original Hugging Face folder"
        )
    heads = fields["llama.attention.head_count"]
    hidden_size = fields["llama.embedding_length"]
    tokens = fields.get("tokenizer.ggml.tokens", [])
    return LlamaConfig(
        vocab_size=fields.get("llama.vocab_size", len(tokens)),
        hidden_size=hidden_size,
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=fields.get("llama.attention.head_count_kv", heads),
        head_dim=fields.get("llama.attention.key_length", hidden_size // heads),
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=_rounded(fields["llama.attention.layer_norm_rms_epsilon"]),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": _rounded(fields.get("llama.rope.freq_base", 10000.0)),
        },
        tie_word_embeddings="output.weight" not in names,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=fields.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=fields.get("tokenizer.ggml.padding_token_id"),
    )


def _llama_tensors(
    path: Path, reader: GGUFReader, fields: Mapping[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    heads = fields["llama.attention.head_count"]
    num_heads = {"attn_q": heads, "attn_k": fields.get("llama.attention.head_count_kv", heads)}
    for tensor in reader.tensors:
        match tensor.name.split("."):
            case [part, "weight"] if part in _TOP:
                name = _TOP[part]
            case ["blk", layer, part, "weight"] if part in _IN_LAYER:
                name = f"model.layers.{layer}.{_IN_LAYER[part]}"
            case _:
                raise ValueError(
                    f"{path}: tensor {tensor.name} has no place in a Llama model; expected a plain "
                    "Llama-type decoder without experts or biases"
                )
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        if part in num_heads:
            weight = _halves_from_pairs(weight, num_heads[part])
        yield f"{name}.weight", weight.to(dtype)


def _halves_from_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k in transformers' order: it rotates halves of a head, llama.cpp pairs."""
    size = weight.shape[0] // num_heads
    paired = weight.reshape(num_heads, size // 2, 2, *weight.shape[1:])
    return paired.swapaxes(1, 2).reshape(weight.shape)


def _load_with_transformers(path: Path) -> PreTrainedModel:
    options = {}
    if plain := getattr(transformers, "GgufConfig", None):  # newer versions keep blocks packed
        options["quantization_config"] = plain(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, **options
    )


def _cleaned(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _rounded(value) for key, value in settings.items() if key not in LOADER_KEYS}


def _rounded(value: Any) -> Any:
    """GGUF holds 32-bit floats: 9.99999974e-06 was written as 1e-05."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return value
