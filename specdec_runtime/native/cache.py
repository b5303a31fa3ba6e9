"""Keys and values of a batch in the layout of decoder.cpp, with lengths that can be rolled back."""

from ctypes import byref
from itertools import pairwise

import torch
from torch import Tensor

from specdec_runtime.native import abi
from specdec_runtime.native.abi import Indices, as_int64, listed
from specdec_runtime.native.memory import zeros_where_touched
from specdec_runtime.native.weights import LANES, PackedWeights


class NativeCache:
    """Keys and values in float32; slot == position; each row on its own.

    Memory is taken as slots are used: layers * kv_heads * head_dim * 8 bytes a token.
    """

    def __init__(self, packed: PackedWeights, batch_size: int, capacity: int):
        model = packed.model
        self.capacity = capacity
        self.batch_size = batch_size
        self.lengths = torch.zeros(batch_size, dtype=torch.int64)
        self._counts = self.lengths.numpy()  # the same numbers; single ones are read much faster
        slots = -(-capacity // LANES) * LANES
        size, padded = model.head_dim, -(-model.head_dim // LANES) * LANES
        heads = (model.num_layers, batch_size, model.num_kv_heads)
        shapes = (*heads, slots // LANES, size, LANES), (*heads, padded // LANES, slots, LANES)
        self._keys, self._values = (_zeros(shape) for shape in shapes)
        self._model = packed
        self.structure = abi.Cache(
            keys=abi.pointer(self._keys),
            values=abi.pointer(self._values),
            lengths=abi.pointer(self.lengths),
            batch=batch_size,
            capacity=slots,
        )

    def truncate(self, lengths: Indices, rows: Indices | None = None) -> None:
        """Roll `rows` (default all) back to at most `lengths` tokens each; copies nothing."""
        chosen = range(self.batch_size) if rows is None else listed(rows)
        for row, length in zip(chosen, listed(lengths), strict=True):
            self._counts[row] = min(self._counts[row], length)

    def clear(self, rows: Indices) -> None:
        """Forget everything about `rows`, so that they can take new sequences."""
        self._counts[listed(rows)] = 0

    def keep_path(self, row: int, start: int, slots: Indices) -> None:
        """Move the entries at `slots` to start, start + 1, ...; forget what lies behind them.

        Raises:
            ValueError: if the slots do not ascend from `start` or lie outside the row.
        """
        chosen = listed(slots)
        length = int(self._counts[row])
        path = [start - 1, *chosen]
        if start > length or any(b <= a for a, b in pairwise(path)) or path[-1] >= length:
            raise ValueError(f"slots {chosen}: expected ascending slots in [{start}, {length})")
        moved = as_int64(chosen)
        abi.decoder().draftloop_keep_path(
            byref(self._model.model),
            byref(self.structure),
            row,
            start,
            abi.pointer(moved),
            len(moved),
        )
        self._counts[row] = start + len(moved)

    def keys_values(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """Copies of one row's keys (rotated) and values, each [kv_heads, length, head_dim]."""
        length, size = int(self.lengths[row]), self._keys.shape[-2]
        keys = self._keys[layer, row].transpose(-1, -2).flatten(1, 2)
        values = self._values[layer, row].transpose(1, 2).flatten(2, 3)
        return keys[:, :length].clone(), values[:, :length, :size].clone()


def _zeros(shape: tuple[int, ...]) -> Tensor:
    num_elements = 1
    for size in shape:
        num_elements *= size
    return zeros_where_touched(num_elements, torch.float32).view(shape)
