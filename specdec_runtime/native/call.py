"""One checked call of the decoder: from the caller's tensors to the C structure `abi.Request`.

A round makes two of these behind passes that have emptied the caches, so that every small tensor
operation would cost tens of microseconds: numbers are looked at in C++, shapes here.
"""

from collections.abc import Sequence
from ctypes import byref, c_int64, c_void_p

import torch
from torch import Tensor

from specdec_runtime.native import abi
from specdec_runtime.native.abi import Indices, as_int64, listed
from specdec_runtime.native.cache import NativeCache
from specdec_runtime.native.weights import PackedWeights


class Call:
    """One `abi.Request` and the tensors it points into."""

    def __init__(
        self,
        packed: PackedWeights,
        token_ids: Tensor,
        cache: NativeCache,
        *,
        num_new: Tensor | None,
        rows: Indices | None,
        layers: tuple[int, int] | None,
    ):
        self.packed = packed
        self.cache = cache
        self.batch, self.width = token_ids.shape
        self.token_ids = as_int64(token_ids)
        self.rows = as_int64(range(cache.batch_size) if rows is None else rows)
        self.num_new = as_int64([self.width] * self.batch if num_new is None else num_new)
        if len(self.rows) != self.batch or len(self.num_new) != self.batch:
            raise ValueError(
                f"{self.batch} rows of token ids for {len(self.rows)} cache rows "
                f"and {len(self.num_new)} counts: expected as many of each"
            )
        first, end = layers or (0, packed.model.num_layers)
        if not 0 <= first <= end <= packed.model.num_layers:
            raise ValueError(
                f"layers=({first}, {end}): expected 0 <= first <= end <= {packed.model.num_layers}"
            )
        self.hidden_out = (c_void_p * (packed.model.num_layers + 2))()
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

    def check(self, extra: int = 0) -> None:
        """Raise a ValueError if a number does not fit; once, when all inputs are set.

        Args:
            extra: tokens that a row has to have room for besides the new ones.
        """
        found = c_int64()
        problem = abi.decoder().draftloop_check(
            byref(self.cache.structure),
            byref(self.request),
            self.packed.num_embeddings,
            self.cache.capacity,
            extra,
            byref(found),
        )
        if problem:
            raise ValueError(self._message(problem, found.value))

    def _message(self, problem: int, found: int) -> str:
        """In the order of `Problem` in decoder.cpp."""
        messages = (
            f"row {found} of the cache: expected different rows in [0, {self.cache.batch_size})",
            f"num_new {found}: expected values in [1, {self.width}]",
            f"a row would hold {found} tokens, the cache has room for {self.cache.capacity}; "
            "make it with a larger capacity",
            f"token id {found}: expected an id in [0, {self.packed.num_embeddings})",
            f"position {found}: expected, for new token j of a row with n cached, a position in "
            "[n, n + j]",
        )
        return messages[problem - 1]

    def set_tree(self, positions: Tensor | None, visible: Tensor | None) -> None:
        """Positions and visibility of the nodes of a token tree.

        A node's position is its depth, so it lies in [past, slot]; nodes see earlier nodes only.
        """
        if visible is not None and positions is None:
            past = self.cache.lengths[listed(self.rows)]
            positions = past[:, None] + torch.arange(self.width)
        if positions is not None:
            self.positions = as_int64(positions)
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
        hidden: dict[int, Tensor] = {}
        self.hidden = hidden  # alive as long as the call
        for k in layers:
            if not (first <= k <= end or (k == -1 and has_head)):
                allowed = [*range(first, end + 1), *([-1] if has_head else [])]
                raise ValueError(f"hidden layer {k}: this pass has {allowed}")
            hidden[k] = torch.empty(self.batch, self.width, self.packed.model.hidden_size)
            # index -1: the last entry, as in decoder.cpp
            self.hidden_out[k] = abi.pointer(hidden[k])
        return hidden

    def want_logits(self, last_only: bool) -> Tensor:
        width = 1 if last_only else self.width
        self.logits = torch.empty(self.batch, width, self.packed.model.num_logits)
        self.request.logits = abi.pointer(self.logits)
        self.request.last_only = last_only
        return self.logits

    def want_likeliest(self, num_choices: int, last_only: bool) -> Tensor:
        if not 0 < num_choices <= self.packed.model.num_logits:
            raise ValueError(
                f"likeliest_of={num_choices}: expected 1 to {self.packed.model.num_logits} columns"
            )
        self.likeliest = torch.empty(self.batch, 1 if last_only else self.width, dtype=torch.int64)
        self.request.likeliest = abi.pointer(self.likeliest)
        self.request.num_choices = num_choices
        self.request.last_only = last_only
        return self.likeliest
