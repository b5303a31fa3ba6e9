"""From a transformers model to the packed weights that decoder.cpp reads.

Which models: `unsupported_reason`. How they are laid out: decoder.cpp (heads padded to a multiple
of 16 columns, gate and up interleaved) and kernels.h (panels). Copying is done once, at load time.

Shapes: D hidden, F MLP, H heads, E head_dim, Ep = E rounded up to 16.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specdec_runtime.int8_grid import is_rounded, whole_numbers
from specdec_runtime.native import abi
from specdec_runtime.native.memory import HugePages

LANES = 16
# As decoder.cpp numbers them.
_WEIGHT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Rotary types whose frequencies do not change with the sequence length.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def unsupported_reason(config: PretrainedConfig) -> str | None:
    """What about this model the C++ decoder cannot run; None if it can run it."""
    if config.model_type not in _MODEL_TYPES:
        return f"model type {config.model_type!r} (only {', '.join(_MODEL_TYPES)})"
    if getattr(config, "quantization_config", None) is not None:
        return "quantized weights"
    if config.hidden_act not in ("silu", "swish"):
        return f"activation {config.hidden_act!r} (only 'silu')"
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in _ROPE_TYPES:
        return f"rope type {rope['rope_type']!r} (only {', '.join(_ROPE_TYPES)})"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"partial rotary embedding ({rope['partial_rotary_factor']})"
    if head_dim(config) % 2:
        return f"odd head_dim {head_dim(config)}"
    unknown = set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES)
    return f"layer types {sorted(unknown)}" if unknown else None


def head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@dataclass(kw_only=True)
class PackedWeights:
    """The C structure `abi.Model` and the tensors it points into."""

    model: abi.Model
    dtype: torch.dtype  # that the weights, as numbers, fit in
    matrix_dtype: torch.dtype  # that the matrices are stored in
    num_embeddings: int
    tensors: list[Tensor] = field(repr=False)  # alive as long as the pointers
    layers: ctypes.Array = field(repr=False)


def pack_weights(
    model: PreTrainedModel,
    *,
    weight_dtype: torch.dtype | None,
    head_rows: Tensor | None,
    head_token_ids: Tensor | None = None,
) -> PackedWeights:
    """Copies all weights of `model` into the layout of decoder.cpp.

    Args:
        weight_dtype: bfloat16 or float32; None = the shortest that changes no weight, int8 (see
            int8_grid.py) among them.
        head_rows: [n] int64 rows of the head to keep, in this order; None = all.
        head_token_ids: [n] int64 tokens that the kept rows stand for; None = their own numbers.

    Raises:
        ValueError: a layer that is not a plain nn.Linear, or another weight_dtype.
    """
    if weight_dtype not in (torch.bfloat16, torch.float32, None):
        raise ValueError(f"weight_dtype {weight_dtype}: expected torch.bfloat16 or torch.float32")
    matrix_dtype = weight_dtype or _exact_dtype(model)
    dtype = torch.bfloat16 if matrix_dtype == torch.int8 else matrix_dtype
    packer = _Packer(matrix_dtype)
    config: PretrainedConfig = model.config
    decoder: Any = model.model
    layers = (abi.Layer * config.num_hidden_layers)()
    for index, layer in enumerate(decoder.layers):
        layers[index] = packer.layer(layer, config, _window(config, index))

    embedding = packer.copy(decoder.embed_tokens.weight, dtype)
    head, rotary = _plain(model.lm_head, "lm_head"), decoder.rotary_emb
    rows = torch.arange(len(head.weight)) if head_rows is None else head_rows.cpu().long()
    tokens = rows if head_token_ids is None else head_token_ids.cpu().long()
    assert len(tokens) == len(rows), (len(tokens), len(rows))
    fused_norm = _embedding_norm(decoder.layers[0])
    packed = abi.Model(
        layers=layers,
        head=packer.linear(head.weight[rows], _map(head.bias, lambda bias: bias[rows])),
        embedding=abi.pointer(embedding), norm_final=packer.vector(decoder.norm.weight),
        norm_embedding=_map(fused_norm, lambda norm: packer.vector(norm.weight)),
        inverse_frequencies=abi.pointer(packer.copy(rotary.inv_freq, torch.float32)),
        head_token_ids=abi.pointer(packer.keep(tokens)),
        num_layers=config.num_hidden_layers, hidden_size=config.hidden_size,
        mlp_size=config.intermediate_size, num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads, head_dim=head_dim(config), num_logits=len(rows),
        weight_type=_WEIGHT_TYPES[matrix_dtype], norm_epsilon=config.rms_norm_eps,
        attention_scale=head_dim(config) ** -0.5, rotary_scale=rotary.attention_scaling,
    )  # fmt: skip
    return PackedWeights(
        model=packed,
        dtype=dtype,
        matrix_dtype=matrix_dtype,
        num_embeddings=len(embedding),
        tensors=packer.tensors,
        layers=layers,
    )


def pack_matrix(linear: nn.Linear, norm_epsilon: float = 0.0) -> PackedWeights:
    """One matrix as the head of a model without layers."""
    weight = linear.weight.detach()
    dtype = _shortest([weight])
    packer = _Packer(dtype)
    layers = (abi.Layer * 0)()
    packed = abi.Model(
        layers=layers, head=packer.linear(weight, linear.bias), hidden_size=weight.shape[1],
        num_logits=weight.shape[0], weight_type=_WEIGHT_TYPES[dtype], norm_epsilon=norm_epsilon,
    )  # fmt: skip
    return PackedWeights(
        model=packed, dtype=dtype, matrix_dtype=dtype, num_embeddings=0, tensors=packer.tensors,
        layers=layers,
    )  # fmt: skip


class _Packer:
    """Packs matrices and vectors and keeps what it made alive."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.tensors: list[Tensor] = []
        self._pages = HugePages()

    def layer(self, layer: Any, config: PretrainedConfig, window: int) -> abi.Layer:
        attention, mlp, size = layer.self_attn, layer.mlp, head_dim(config)
        inputs = [_plain(getattr(attention, name), name) for name in ("q_proj", "k_proj", "v_proj")]
        out, down = _plain(attention.o_proj, "o_proj"), _plain(mlp.down_proj, "down_proj")
        gate, up = _plain(mlp.gate_proj, "gate_proj"), _plain(mlp.up_proj, "up_proj")
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        fused = _embedding_norm(layer) is not None
        rows = torch.cat([_pad_heads(p.weight, size) for p in inputs])
        return abi.Layer(
            qkv=self.linear(
                _pad_halves(rows) if fused else rows,
                _concatenate([_map(p.bias, lambda bias: _pad_heads(bias, size)) for p in inputs])),
            attention_out=self.linear(_pad_heads(out.weight.T, size).T, out.bias),
            gate_up=self.linear(_interleave(gate.weight, up.weight),
                                _map(gate.bias, lambda bias: _interleave(bias, up.bias))),
            down=self.linear(down.weight, down.bias),
            norm_attention=self.vector(
                layer.hidden_norm.weight if fused else layer.input_layernorm.weight),
            norm_mlp=self.vector(layer.post_attention_layernorm.weight),
            norm_query=_map(norms[0], lambda norm: self.vector(norm.weight)),
            norm_key=_map(norms[1], lambda norm: self.vector(norm.weight)),
            window=window,
        )  # fmt: skip

    def linear(self, weight: Tensor, bias: Tensor | None) -> abi.Linear:
        """Packs [outputs, inputs] into panels of 16 outputs."""
        rows, scale = weight.detach().cpu(), None
        if self.dtype == torch.int8:
            rows, scale = whole_numbers(rows)
        rows = rows.to(self.dtype).contiguous()
        outputs, inputs = rows.shape
        padded = -(-outputs // LANES) * LANES
        panels = self.keep(self._pages.take(padded * inputs, self.dtype))
        abi.decoder().draftloop_pack(
            abi.pointer(rows), outputs, inputs, _WEIGHT_TYPES[self.dtype], abi.pointer(panels)
        )
        return abi.Linear(
            weight=abi.pointer(panels), scale=_map(scale, self.vector),
            bias=_map(bias, self.vector), outputs=padded, inputs=inputs,
        )  # fmt: skip

    def vector(self, values: Tensor) -> int:
        """Address of a float32 copy, padded with zeros to a multiple of 16."""
        return abi.pointer(self.keep(padded_vector(values)))

    def copy(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy even where none is needed: `model` may be trained on, this one must not change."""
        return self.keep(tensor.detach().to(device="cpu", dtype=dtype, copy=True))

    def keep(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor.contiguous())
        return self.tensors[-1]


def padded_vector(values: Tensor) -> Tensor:
    """A float32 copy, padded with zeros to a multiple of 16."""
    padded = torch.zeros(-(-len(values) // LANES) * LANES)
    padded[: len(values)] = values.detach()
    return padded


def _pad_heads(rows: Tensor, size: int) -> Tensor:
    """[heads * E, ...] -> [heads * Ep, ...]: zero rows behind every head."""
    heads = rows.detach().unflatten(0, (-1, size))
    padding = heads.new_zeros(len(heads), -size % LANES, *heads.shape[2:])
    return torch.cat([heads, padding], dim=1).flatten(0, 1)


def _embedding_norm(layer: Any) -> Any:
    """The norm of the embeddings, where attention reads them beside the residual (EAGLE-3)."""
    return layer.input_layernorm if hasattr(layer, "hidden_norm") else None


def _pad_halves(rows: Tensor) -> Tensor:
    """[outputs, 2 * D] -> [outputs, 2 * (D rounded up)]: zero columns behind each half."""
    halves = rows.unflatten(1, (2, -1))
    return nn.functional.pad(halves, (0, -halves.shape[2] % LANES)).flatten(1)


def _interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Two [F, ...] -> [2 * F rounded up, ...]: 16 rows of gate, 16 of up, and so on."""
    padding = gate.new_zeros(-len(gate) % LANES, *gate.shape[1:])
    blocks = [torch.cat([x.detach(), padding]).unflatten(0, (-1, LANES)) for x in (gate, up)]
    return torch.stack(blocks, dim=1).flatten(0, 2)


def _window(config: PretrainedConfig, layer: int) -> int:
    """Positions that a query of this layer sees, its own included; 0 = all."""
    types = getattr(config, "layer_types", None)
    slides = types[layer] == "sliding_attention" if types else config.model_type == "mistral"
    return (config.sliding_window or 0) if slides else 0


def _exact_dtype(model: PreTrainedModel) -> torch.dtype:
    """The shortest that changes no matrix; embeddings are bfloat16 beside int8 matrices."""
    if not all(_is_bfloat16(weight) for weight in _weights(model, nn.Embedding)):
        return torch.float32
    return _shortest(list(_weights(model, nn.Linear)))


def _shortest(matrices: Sequence[Tensor]) -> torch.dtype:
    """int8, bfloat16 or float32, whichever first stores all of them without a change."""
    if all(is_rounded(matrix) for matrix in matrices):
        return torch.int8
    return torch.bfloat16 if all(map(_is_bfloat16, matrices)) else torch.float32


def _is_bfloat16(matrix: Tensor) -> bool:
    return torch.equal(matrix, matrix.to(torch.bfloat16).to(matrix.dtype))


def _weights(model: PreTrainedModel, kind: type[nn.Module]) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, kind):
            yield module.weight.detach()  # type: ignore[operator,union-attr]


def _plain(module: nn.Module, name: str) -> nn.Linear:
    if type(module) is not nn.Linear:
        raise ValueError(
            f"{name} is a {type(module).__name__}, expected a plain torch.nn.Linear: "
            "merge adapters and dequantize before the model is converted"
        )
    return module


def _concatenate(parts: list[Tensor | None]) -> Tensor | None:
    return None if parts[0] is None else torch.cat([part for part in parts if part is not None])


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    """`function(value)`, or None for None."""
    return None if value is None else function(value)
