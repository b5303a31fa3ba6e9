"""Caches of hybrid decoders: attention layers by position, recurrent layers by snapshot.

A recurrent state (Mamba, gated delta rules) is a sum over the text and cannot be cut back, so each
row keeps two: the newest, and a snapshot of what was certain when it was taken. Rolling back
restores the snapshot; the tokens between it and the row's length are fed again in front of the
next pass (recurrent_pass.py). What a short convolution needs of the past is its input at the last
positions, which is kept by position like keys and values, and rolls back like them.

Shapes: B rows of the cache, b rows of one pass, Q new tokens, C channels, S slots.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_runtime.cache import BufferCache

_Key = tuple[int, int]  # layer, number of the state within it


class RecurrentCache(BufferCache):
    """A `BufferCache` that holds the states of recurrent layers too.

    Attributes:
        absorbed: [B] int64 on the CPU, tokens in each row's newest state; more than `lengths`
            after a roll-back.
        tokens: of each row, as fed.
    """

    def __init__(self, batch_size: int, capacity: int) -> None:
        super().__init__(batch_size, capacity)
        self.absorbed = torch.zeros(batch_size, dtype=torch.int64)
        self.tokens: list[list[int]] = [[] for _ in range(batch_size)]
        self._saved_at: list[int | None] = [None] * batch_size
        self._is_certain = [True] * batch_size  # nothing in the newest state can be refused
        self._inputs: dict[_Key, Tensor] = {}  # of convolutions, [B, C, S]
        self._states: dict[_Key, Tensor] = {}  # [B, ...]
        self._saved: dict[_Key, Tensor] = {}

    # What the layers of transformers call.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: convolutions get their past from `update_conv_state`."""
        return

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: no layer may advance a state behind this cache's back."""
        return True

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Store [b, C, Q] inputs; returns them behind those of the positions in front, zeros
        where the text begins: [b, C, conv_kernel_size + Q]."""
        assert conv_kernel_size is not None, "the layer did not say how wide its convolution is"
        buffer = self._inputs.get((layer_idx, state_idx))
        if buffer is None or buffer.shape[2] < self._num_slots:
            buffer = self._inputs[layer_idx, state_idx] = self._grown_inputs(buffer, conv_states)
        rows, slots = self.indices(buffer.device)
        past = slots[:, :1] + torch.arange(-conv_kernel_size, 0, device=buffer.device)  # [b, k]
        context = buffer[rows, :, past.clamp_min(0)] * (past >= 0)[:, :, None]  # [b, k, C]
        buffer[rows, :, slots] = conv_states.transpose(1, 2)
        return torch.cat([context.transpose(1, 2).to(conv_states.dtype), conv_states], dim=-1)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """[b, ...]; None before any text was read."""
        states = self._states.get((layer_idx, state_idx))
        return None if states is None else states[: self.placement.num_rows]

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Store the states after the pass under way."""
        key, num_rows = (layer_idx, state_idx), self.placement.num_rows
        if key not in self._states:
            shape = (len(self.tokens), *recurrent_states.shape[1:])
            self._states[key] = recurrent_states.new_zeros(shape)
            self._saved[key] = recurrent_states.new_zeros(shape)
        self._states[key][:num_rows] = recurrent_states
        return self._states[key][:num_rows]

    # What decoding calls.

    def truncate(self, lengths: Sequence[int] | Tensor, rows: Sequence[int] | None = None) -> None:
        super().truncate(lengths, rows)
        for row in range(len(self.tokens)) if rows is None else rows:
            self._is_certain[row] = True

    def keep_path(self, row: int, start: int, slots: Sequence[int]) -> None:
        raise ValueError("recurrent layers read a text, not a tree: draft chains for this target")

    def clear(self, rows: Sequence[int]) -> None:
        super().clear(rows)
        for row in rows:
            self._reset(row)

    def keys_values(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """Of an attention layer; a recurrent one's state and nothing beside it."""
        if layer in self._keys:
            return super().keys_values(layer, row)
        place = self._order.index(row)
        held = self._states.get((layer, 0))
        if held is None:
            return self._inputs[layer, 0][place, :, : int(self.lengths[row])], torch.empty(0)
        return held[place], torch.empty(0)

    def save(self, rows: Sequence[int]) -> None:
        """Take a snapshot of those `rows` whose newest state can no longer be refused."""
        certain = [row for row in rows if self._is_certain[row] and int(self.absorbed[row])]
        places = [self._order.index(row) for row in certain]
        for key, states in self._states.items():
            self._saved[key][places] = states[places]
        for row in certain:
            self._saved_at[row] = int(self.absorbed[row])
            self._is_certain[row] = False

    def restore(self, row: int) -> None:
        """Go back to the snapshot, or to no text at all where that is too new."""
        length, saved_at = int(self.lengths[row]), self._saved_at[row]
        place = self._order.index(row)
        if saved_at is None or saved_at > length:
            self._reset(row)
            return
        for key, states in self._states.items():
            states[place] = self._saved[key][place]
        self.absorbed[row] = saved_at

    def _reset(self, row: int) -> None:
        for states in self._states.values():
            states[self._order.index(row)] = 0.0
        self.absorbed[row] = 0
        self._saved_at[row], self._is_certain[row] = None, True

    def _arrange(self, rows: list[int]) -> None:
        before = list(self._order)
        super()._arrange(rows)
        if self._order != before:
            sources = [before.index(row) for row in self._order]
            for held in (self._inputs, self._states, self._saved):
                for key, tensor in held.items():
                    held[key] = tensor[sources]

    def _grown_inputs(self, buffer: Tensor | None, like: Tensor) -> Tensor:
        grown = like.new_zeros(len(self.tokens), like.shape[1], self._num_slots)
        if buffer is not None:
            grown[:, :, : buffer.shape[2]] = buffer
        return grown
