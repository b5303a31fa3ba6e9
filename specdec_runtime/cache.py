"""Key/value buffers for transformers decoders: slot == position, rows of different lengths.

`BufferCache` is a transformers `Cache`, so every decoder writes to it through the usual
`cache.update(...)`. What transformers' own caches cannot do, and this one can: rows that grow and
roll back independently, roll-back after a sliding window has filled (nothing is ever evicted; the
mask of masks.py does the windowing), and dropping finished rows without touching the others.

Shapes: B rows of the cache, b rows of one pass, Q new tokens, S slots, H key/value heads, D head.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

# Buffers grow by this many slots at least: 256 tokens are seconds of decoding, so growing is rare.
_CHUNK_SLOTS = 256


class Placement(NamedTuple):
    """Where the tokens of the pass under way go."""

    num_rows: int
    start: int | None  # first slot, if it is the same for all rows
    slots: Tensor  # [b, Q] int64
    row_index: Tensor  # [b, 1] int64
    end: int  # slots that attention may look at


class BufferCache(Cache):
    """Preallocated buffers [B, H, S, D] a layer, made when the layer first writes to them.

    Args:
        batch_size: number of rows.
        capacity: most tokens a row may hold.
        static: allocate everything at once and always show attention the whole buffer, so that
            shapes never change (for compiled models); otherwise buffers grow as they fill.
    """

    def __init__(self, batch_size: int, capacity: int, *, static: bool = False) -> None:
        super().__init__(layers=[])
        self.capacity = capacity
        self.static = static
        self.lengths = torch.zeros(batch_size, dtype=torch.int64)
        # Room for the padding of the widest compiled pass behind a full row.
        self._num_slots = _round_up(capacity + 16) if static else 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._order = list(range(batch_size))  # physical place -> row
        self._placement: Placement | None = None
        # Rows and slots of the pass under way, by device: copied once, not once a layer.
        self._indices: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def placement(self) -> Placement:
        """Of the pass that `begin_pass` has begun."""
        assert self._placement is not None, "begin_pass has to be called before a forward pass"
        return self._placement

    def buffers(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Keys and values by layer, each [B, H, S, D]; the memory, not a copy."""
        return self._keys, self._values

    def is_allocated(self, layers: Iterable[int]) -> bool:
        """Whether the layers' buffers have their full size, so that a pass allocates nothing."""
        return all(
            layer in self._keys and self._keys[layer].shape[2] == self._num_slots
            for layer in layers
        )

    def begin_pass(self, rows: Sequence[int] | None, num_new: Tensor, width: int) -> Placement:
        """Make room for `width` tokens in each of `rows`; the model's layers write there next.

        Raises:
            ValueError: if a row would hold more than `capacity` tokens.
        """
        chosen = list(range(len(self._order))) if rows is None else list(rows)
        starts = self.lengths[chosen]
        fullest = int((starts + num_new).max())
        if fullest > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} tokens a row, {fullest} are needed: "
                "make it with a larger capacity"
            )
        self._arrange(chosen)
        slots = starts[:, None] + torch.arange(width)  # [b, Q]
        last = int(starts.max()) + width
        if last > self._num_slots:
            # Growing by half keeps the copies below the work of filling what is copied.
            self._num_slots = _round_up(max(last, self._num_slots * 3 // 2))
        self._indices = {}
        uniform = bool((starts == starts[0]).all()) and not self.static
        self._placement = Placement(
            num_rows=len(chosen),
            start=int(starts[0]) if uniform else None,
            slots=slots,
            row_index=torch.arange(len(chosen))[:, None],
            end=self._num_slots if self.static else last,
        )
        return self._placement

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(rows [b, 1], slots [b, Q]) of the new tokens, on `device`."""
        if device not in self._indices:
            place = self.placement
            self._indices[device] = place.row_index.to(device), place.slots.to(device)
        return self._indices[device]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of one layer; returns all that attention may look at."""
        keys = self._write(self._keys, layer_idx, key_states)
        values = self._write(self._values, layer_idx, value_states)
        return keys, values

    def truncate(self, lengths: Sequence[int] | Tensor, rows: Sequence[int] | None = None) -> None:
        """Roll `rows` (default all) back to at most `lengths` tokens each; copies nothing."""
        chosen = slice(None) if rows is None else list(rows)
        limit = torch.as_tensor(lengths, dtype=torch.int64)
        self.lengths[chosen] = torch.minimum(self.lengths[chosen], limit)

    def keep_path(self, row: int, start: int, slots: Sequence[int]) -> None:
        """Move the entries at `slots` to start, start + 1, ... and forget what lies behind them."""
        place = self._order.index(row)
        end = start + len(slots)
        if list(slots) != list(range(start, end)):
            for buffer in (*self._keys.values(), *self._values.values()):
                buffer[place, :, start:end] = buffer[place][:, list(slots)]
        self.lengths[row] = end

    def clear(self, rows: Sequence[int]) -> None:
        """Forget everything about `rows`."""
        self.lengths[list(rows)] = 0

    def keys_values(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values of one row, each [H, length, D]."""
        place, length = self._order.index(row), int(self.lengths[row])
        return self._keys[layer][place, :, :length], self._values[layer][place, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.lengths.max())

    def _write(self, buffers: dict[int, Tensor], layer: int, new: Tensor) -> Tensor:
        place = self.placement
        buffer = buffers.get(layer)
        if buffer is None or buffer.shape[2] < self._num_slots:
            buffer = buffers[layer] = self._grown(buffer, new)
        if place.start is not None:
            buffer[: place.num_rows, :, place.start : place.start + new.shape[2]] = new
        else:
            rows, slots = self.indices(new.device)
            buffer[rows, :, slots] = new.transpose(1, 2)  # [b, Q, H, D]
        return buffer[: place.num_rows, :, : place.end]

    def _grown(self, buffer: Tensor | None, like: Tensor) -> Tensor:
        shape = (len(self._order), like.shape[1], self._num_slots, like.shape[3])
        # Zeros, not garbage: masked slots still enter the attention product, and 0 * NaN is NaN.
        grown = torch.zeros(shape, dtype=like.dtype, device=like.device)
        if buffer is not None:
            grown[:, :, : buffer.shape[2]] = buffer
        if self.static:
            # CUDA graphs write to it in place; another cache is recorded anew, not compiled anew.
            torch._dynamo.mark_static_address(grown, guard=False)
        return grown

    def _arrange(self, rows: list[int]) -> None:
        """Bring `rows` to the front of the buffers, so that passes over them read plain slices.

        Rows move only when the set of active rows changes, i.e. when one of them has finished.
        """
        if self._order[: len(rows)] == rows:
            return
        order = rows + [row for row in self._order if row not in set(rows)]
        moved = [place for place, row in enumerate(order) if self._order[place] != row]
        sources = [self._order.index(order[place]) for place in moved]
        used = int(self.lengths.max())
        for buffer in (*self._keys.values(), *self._values.values()):
            buffer[moved, :, :used] = buffer[sources, :, :used]
        self._order = order


def _round_up(num_slots: int) -> int:
    return -(-num_slots // _CHUNK_SLOTS) * _CHUNK_SLOTS
