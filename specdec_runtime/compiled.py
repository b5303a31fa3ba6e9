"""Transformers decoders through torch.compile, on static cache buffers.

Only passes of few tokens are compiled; prompts are read eagerly, as they are read once. On CUDA the
compiled pass is replayed as a CUDA graph, in a handful of widths.

Shapes: b rows of one pass, Q new tokens, S slots, H key/value heads, D head size.
"""

import os
import shutil
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton
from transformers import Cache

from specdec_runtime.cache import BufferCache
from specdec_runtime.layer_access import DecoderOutput, Masks, PartialDecoder, Plan

# Tokens a row of the passes that are compiled. One compilation serves all widths above 1, but on a GPU
# every width is a graph of its own: there a pass is padded to the next of these.
WIDTHS = (1, 2, 4, 8, 16)

# All models of a process share one count of what was compiled, at most 8 by default; a target and its
# drafter need about 5 each (one row or several, one token or several, how many of the rows) for every
# span of layers, and beyond the limit torch would go on without compiling.
_MAX_VARIANTS = 128


class CompiledDecoder:
    """A decoder's compiled forward pass, called as the decoder itself is.

    Each plan is compiled by itself.
    """

    def __init__(self, decoder: PartialDecoder, device: torch.device) -> None:
        self._decoder = decoder
        # Of the device where the pass begins; layers elsewhere split the graph.
        self._compiled = torch.compile(
            self._run, mode="reduce-overhead" if device.type == "cuda" else None, dynamic=None
        )

    def __call__(
        self,
        token_ids: Tensor,
        masks: Masks,
        positions: Tensor,
        cache: BufferCache,
        plan: Plan,
        hidden_in: Tensor | None,
    ) -> DecoderOutput:
        """As `PartialDecoder`. The cache's pass has to be begun, its buffers be allocated."""
        place = cache.placement
        with torch._dynamo.config.patch(recompile_limit=_MAX_VARIANTS):
            last, residuals = self._compiled(
                token_ids,
                masks,
                positions,
                place.slots.to(token_ids.device),
                place.row_index.to(token_ids.device),
                *cache.buffers(),
                plan,
                hidden_in,
            )
        # A CUDA graph writes its next results into the same memory.
        return DecoderOutput(last.clone(), {k: part.clone() for k, part in residuals.items()})

    def _run(
        self,
        token_ids: Tensor,
        masks: Masks,
        positions: Tensor,
        slots: Tensor,
        row_index: Tensor,
        keys: dict[int, Tensor],
        values: dict[int, Tensor],
        plan: Plan,
        hidden_in: Tensor | None,
    ) -> DecoderOutput:
        cache = _View(keys, values, slots, row_index)
        return self._decoder(token_ids, masks, positions, cache, plan, hidden_in)


class _View(Cache):
    """What the compiled code sees of a `BufferCache`: tensors only."""

    def __init__(
        self,
        keys: dict[int, Tensor],
        values: dict[int, Tensor],
        slots: Tensor,
        row_index: Tensor,
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


def compiled_width(width: int, device: torch.device) -> int | None:
    """The width that a pass of `width` tokens is padded to; None = it is not compiled."""
    padded = next((bucket for bucket in WIDTHS if bucket >= width), None)
    return width if padded and device.type == "cpu" else padded


def compile_obstacle(device: torch.device) -> str | None:
    """Why nothing can be compiled for `device` here; None if it can."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if not any(map(shutil.which, (compiler, "g++", "clang++"))):
            return "no C++ compiler was found (looked for $CXX, g++ and clang++)"
        return None
    return None if has_triton() else "Triton is not installed or does not support this GPU"
