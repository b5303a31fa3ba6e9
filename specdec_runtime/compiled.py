"""Transformers decoders through torch.compile, on static cache buffers.

Only passes of few tokens are compiled, in a handful of widths; prompts are read eagerly, as every
length would be compiled anew. On CUDA the compiled pass is replayed as a CUDA graph.

Shapes: b rows of one pass, Q new tokens, S slots, H key/value heads, D head size.
"""

import os
import shutil
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton
from transformers import Cache

from specdec_runtime.cache import BufferCache

# Widths that get compiled; a pass is padded to the next one. More would cost a compilation each,
# fewer would compute more padding.
WIDTHS = (1, 2, 4, 8, 16)


class CompiledDecoder:
    """One decoder's compiled forward pass.

    Args:
        decoder: the module under the head.
        cache_argument: what its forward calls the cache.
    """

    def __init__(self, decoder: nn.Module, cache_argument: str) -> None:
        self._decoder = decoder
        self._cache_argument = cache_argument
        # Of the device where the pass begins; layers elsewhere split the graph.
        is_cuda = next(decoder.parameters()).device.type == "cuda"
        self._compiled = torch.compile(
            self._run, mode="reduce-overhead" if is_cuda else None, dynamic=None
        )

    def __call__(
        self,
        token_ids: Tensor,
        masks: Tensor | dict[str, Tensor | None] | None,
        positions: Tensor,
        cache: BufferCache,
        hidden_layers: tuple[int, ...] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Hidden states [b, Q, D] for the head, and the residuals in front of `hidden_layers`.

        The cache's pass has to be begun, its buffers be allocated. Each set of layers is compiled
        by itself.
        """
        place = cache.placement
        hidden, residuals = self._compiled(
            token_ids,
            masks,
            positions,
            place.slots.to(token_ids.device),
            place.row_index.to(token_ids.device),
            *cache.buffers(),
            hidden_layers,
        )
        # A CUDA graph writes its next results into the same memory.
        kept = {k: residual.clone() for k, residual in zip(hidden_layers, residuals, strict=True)}
        return hidden.clone(), kept

    def _run(
        self,
        token_ids: Tensor,
        masks: Tensor | dict[str, Tensor | None] | None,
        positions: Tensor,
        slots: Tensor,
        row_index: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
        hidden_layers: tuple[int, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        cache = _View(keys, values, slots, row_index)
        output = self._decoder(
            input_ids=token_ids,
            attention_mask=masks,
            position_ids=positions,
            use_cache=True,
            output_hidden_states=bool(hidden_layers),
            **{self._cache_argument: cache},
        )
        return output.last_hidden_state, [output.hidden_states[k] for k in hidden_layers]


class _View(Cache):
    """What the compiled code sees of a `BufferCache`: tensors only."""

    def __init__(
        self, keys: list[Tensor], values: list[Tensor], slots: Tensor, row_index: Tensor
    ) -> None:
        super().__init__(layers=[])
        self._keys = keys
        self._values = values
        self._slots = slots
        self._row_index = row_index

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._row_index, :, self._slots] = key_states.transpose(1, 2)  # [b, Q, H, D]
        values[self._row_index, :, self._slots] = value_states.transpose(1, 2)
        num_rows = key_states.shape[0]
        return keys[:num_rows], values[:num_rows]


def compiled_width(width: int) -> int | None:
    """The width that a pass of `width` tokens is padded to; None = it is not compiled."""
    return next((bucket for bucket in WIDTHS if bucket >= width), None)


def compile_obstacle(device: torch.device) -> str | None:
    """Why nothing can be compiled for `device` here; None if it can."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if not any(map(shutil.which, (compiler, "g++", "clang++"))):
            return "no C++ compiler was found (looked for $CXX, g++ and clang++)"
        return None
    return None if has_triton() else "Triton is not installed or does not support this GPU"
