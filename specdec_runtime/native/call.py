"""One checked call of the decoder: from the caller's tensors to the C structure `abi.Request`."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_runtime.native import abi
from specdec_runtime.native.abi import Indices, as_int64
from specdec_runtime.native.cache import NativeCache
from specdec_runtime.native.weights import PackedWeights


class Call:
    """One checked `abi.Request` and the tensors it points into."""

    def __init__(
        self,
        packed: PackedWeights,
        token_ids: Tensor,
        cache: NativeCache,
        *,
        num_new: Tensor | None,
        rows: Indices | None,
        layers: tuple[int, int] | None,
        extra: int = 0,
    ):
        self.packed = packed
        self.batch, self.width = token_ids.shape
        self.token_ids = as_int64(token_ids)
        self.rows = as_int64(range(len(cache.lengths)) if rows is None else rows)
        self.num_new = (
            torch.full((self.batch,), self.width) if num_new is None else as_int64(num_new)
        )
        self.past = self._check_rows(cache, extra)
        self.is_ragged = bool((self.num_new < self.width).any())
        self._check_tokens()
        first, end = layers or (0, packed.model.num_layers)
        if not 0 <= first <= end <= packed.model.num_layers:
            raise ValueError(
                f"layers=({first}, {end}): expected 0 <= first <= end <= {packed.model.num_layers}"
            )
        self.hidden_out = (ctypes.c_void_p * (packed.model.num_layers + 2))()
        self.request = abi.Request(
            token_ids=abi.pointer(self.token_ids),
            num_new=abi.pointer(self.num_new),
            cache_rows=abi.pointer(self.rows),
            hidden_out=self.hidden_out,
            rows=self.batch,
            width=self.width,
            first_layer=first,
            end_layer=end,
            threads=torch.get_num_threads(),
        )

    def _check_rows(self, cache: NativeCache, extra: int) -> Tensor:
        if len(self.rows) != self.batch or len(self.num_new) != self.batch:
            raise ValueError(
                f"{self.batch} rows of token ids for {len(self.rows)} cache rows "
                f"and {len(self.num_new)} counts: expected as many of each"
            )
        batch = len(cache.lengths)
        chosen = self.rows.tolist()
        if len(set(chosen)) != len(chosen) or not all(0 <= row < batch for row in chosen):
            raise ValueError(f"rows {chosen}: expected different rows in [0, {batch})")
        counts = self.num_new.tolist()
        if not all(1 <= count <= self.width for count in counts):
            raise ValueError(f"num_new {counts}: expected values in [1, {self.width}]")
        past = cache.lengths[self.rows]
        needed = int((past + self.num_new).max()) + extra if chosen else 0
        if needed > cache.capacity:
            raise ValueError(
                f"a row would hold {needed} tokens, the cache has room for {cache.capacity}; "
                "make it with a larger capacity"
            )
        return past

    def _check_tokens(self) -> None:
        ids, limit = self.token_ids, self.packed.num_embeddings
        wrong = (ids < 0) | (ids >= limit)
        if self.is_ragged:
            wrong &= torch.arange(self.width) < self.num_new[:, None]
        if wrong.any():
            raise ValueError(f"token id {int(ids[wrong][0])}: expected an id in [0, {limit})")

    def set_tree(self, positions: Tensor | None, visible: Tensor | None) -> None:
        """Positions and visibility of the nodes of a token tree.

        A node's position is its depth, so it lies in [past, slot]; nodes see earlier nodes only.
        """
        if visible is not None and positions is None:
            positions = self.past[:, None] + torch.arange(self.width)
        if positions is not None:
            self.positions = as_int64(positions)
            depth = self.positions - self.past[:, None]
            wrong = (depth < 0) | (depth > torch.arange(self.width))
            wrong &= torch.arange(self.width) < self.num_new[:, None]
            if wrong.any():
                raise ValueError(
                    f"position {int(self.positions[wrong][0])}: expected, for new token j of a "
                    "row with n cached, a position in [n, n + j]"
                )
            self.request.positions = abi.pointer(self.positions)
        if visible is not None:
            if visible.shape != (self.batch, self.width, self.width):
                raise ValueError(
                    f"visible has shape {tuple(visible.shape)}, expected "
                    f"{(self.batch, self.width, self.width)}"
                )
            self.visible = visible.to(torch.bool).contiguous()
            self.request.visible = abi.pointer(self.visible)

    def set_hidden_in(self, hidden: Tensor | None) -> None:
        if hidden is None:
            return
        self.hidden_in = hidden.to(torch.float32).contiguous()
        expected = (self.batch, self.width, self.packed.model.hidden_size)
        if self.hidden_in.shape != expected:
            raise ValueError(f"hidden_in has shape {tuple(hidden.shape)}, expected {expected}")
        self.request.hidden_in = abi.pointer(self.hidden_in)

    def want_hidden(self, layers: Sequence[int], has_head: bool) -> dict[int, Tensor]:
        first, end = self.request.first_layer, self.request.end_layer
        allowed = [*range(first, end + 1), *([-1] if has_head else [])]
        hidden: dict[int, Tensor] = {}
        self.hidden = hidden  # alive as long as the call
        for k in layers:
            if k not in allowed:
                raise ValueError(f"hidden layer {k}: this pass has {allowed}")
            hidden[k] = self._output(self.batch, self.width, self.packed.model.hidden_size)
            self.hidden_out[k] = abi.pointer(
                hidden[k]
            )  # index -1: the last entry, as in decoder.cpp
        return hidden

    def want_logits(self, last_only: bool) -> Tensor:
        width = 1 if last_only else self.width
        self.logits = self._output(self.batch, width, self.packed.model.num_logits)
        self.request.logits = abi.pointer(self.logits)
        self.request.last_only = last_only
        return self.logits

    def _output(self, *shape: int) -> Tensor:
        # Padding is not computed; zeros there keep a stray NaN out of the caller's sums.
        return torch.zeros(shape) if self.is_ragged else torch.empty(shape)
