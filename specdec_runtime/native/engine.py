"""NativeModel: the C++ decoder behind the interface of `specdec_runtime.model`.

Checks arguments, allocates outputs, and calls decoder.cpp once a pass. Threads: as many as
`torch.get_num_threads()` says at the time of the call; the results do not depend on it.

Shapes: b rows of one call, Q new tokens a row, D hidden size, V logit columns.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from specdec_runtime.model import ModelOutput
from specdec_runtime.native import abi
from specdec_runtime.native.build import load_library
from specdec_runtime.native.weights import (
    LANES,
    PackedWeights,
    allocate,
    pack_weights,
    unsupported_reason,
)

Indices = Sequence[int] | Tensor


class NativeCache:
    """Keys and values in float32; slot == position; each row on its own.

    Memory is taken as slots are used: layers * kv_heads * head_dim * 8 bytes a token.
    """

    def __init__(self, packed: PackedWeights, batch_size: int, capacity: int):
        model = packed.model
        self.capacity = capacity
        self.lengths = torch.zeros(batch_size, dtype=torch.int64)
        slots = -(-capacity // LANES) * LANES
        size, padded = model.head_dim, -(-model.head_dim // LANES) * LANES
        heads = (model.num_layers, batch_size, model.num_kv_heads)
        shapes = (*heads, slots // LANES, size, LANES), (*heads, padded // LANES, slots, LANES)
        self._keys, self._values = (_zeros(shape) for shape in shapes)
        self._model = packed
        self.structure = abi.Cache(
            keys=abi.pointer(self._keys), values=abi.pointer(self._values),
            lengths=abi.pointer(self.lengths), batch=batch_size, capacity=slots)

    def truncate(self, lengths: Indices, rows: Indices | None = None) -> None:
        """Roll `rows` (default all) back to at most `lengths` tokens each; copies nothing."""
        index = _int64(range(len(self.lengths)) if rows is None else rows)
        self.lengths[index] = torch.minimum(self.lengths[index], _int64(lengths))

    def clear(self, rows: Indices) -> None:
        """Forget everything about `rows`, so that they can take new sequences."""
        self.lengths[_int64(rows)] = 0

    def keep_path(self, row: int, start: int, slots: Indices) -> None:
        """Move the entries at `slots` to start, start + 1, ...; forget what lies behind them.

        Raises:
            ValueError: if the slots do not ascend from `start` or lie outside the row.
        """
        slots = _int64(slots)
        length = int(self.lengths[row])
        before = torch.cat([torch.tensor([start - 1]), slots])
        if start > length or (before.diff() < 1).any() or int(before[-1]) >= length:
            raise ValueError(f"slots {slots.tolist()}: expected ascending slots in [{start}, {length})")
        _library().draftloop_keep_path(byref(self._model.model), byref(self.structure), row, start,
                                       abi.pointer(slots), len(slots))
        self.lengths[row] = start + len(slots)

    def keys_values(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """Copies of one row's keys (rotated) and values, each [kv_heads, length, head_dim]."""
        length, size = int(self.lengths[row]), self._keys.shape[-2]
        keys = self._keys[layer, row].transpose(-1, -2).flatten(1, 2)
        values = self._values[layer, row].transpose(1, 2).flatten(2, 3)
        return keys[:, :length].clone(), values[:, :length, :size].clone()


class NativeModel:
    """A decoder-only model that runs in C++ on the CPU. See `specdec_runtime.model.CausalModel`.

    Every result for a token is the same to the bit for any batch, number of new tokens, choice of
    rows, tree or chain, and number of threads.
    """

    device = torch.device("cpu")

    def __init__(self, config: PretrainedConfig, packed: PackedWeights):
        self.config = config
        self.vocab_size = packed.model.num_logits
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_hidden_layers
        self.max_positions = config.max_position_embeddings
        self.dtype = packed.dtype
        self._packed = packed

    @staticmethod
    def supports(config: PretrainedConfig) -> str | None:
        """None if a model with this configuration can run here, else what stands against it."""
        return unsupported_reason(config)

    @classmethod
    def from_hf(cls, model: PreTrainedModel, *, weight_dtype: torch.dtype | None = None,
                head_rows: Tensor | None = None) -> "NativeModel":
        """Copies the weights of a transformers model.

        Args:
            weight_dtype: torch.bfloat16 or torch.float32. None = bfloat16 where that changes no
                weight (half the bytes, the same numbers), else float32.
            head_rows: [n] int64: keep only these rows of the head; logits then have n columns.

        Raises:
            ValueError: if the model is not supported; the message names what is not.
            BuildError: if the decoder cannot be compiled here.
        """
        if reason := cls.supports(model.config):
            raise ValueError(f"the C++ decoder does not support {reason}; use HFModel")
        packed = pack_weights(model, library=_library(), weight_dtype=weight_dtype, head_rows=head_rows)
        return cls(model.config, packed)

    def new_cache(self, batch_size: int, capacity: int) -> NativeCache:
        """An empty cache for `batch_size` rows of up to `capacity` tokens each."""
        return NativeCache(self._packed, batch_size, capacity)

    @torch.no_grad()
    def forward(self, token_ids: Tensor, cache: NativeCache, *, num_new: Tensor | None = None,
                rows: Indices | None = None, last_only: bool = False, logits: bool = True,
                hidden_layers: Sequence[int] = (), positions: Tensor | None = None,
                visible: Tensor | None = None, layers: tuple[int, int] | None = None,
                hidden_in: Tensor | None = None, early_head: bool = False) -> ModelOutput:
        """Append `token_ids` to the cache and score what follows each of them.

        Args: as in `CausalModel.forward`, and
            early_head: apply the final norm and the head although `layers` ends earlier.

        Raises:
            ValueError: for token ids, rows, lengths, layers or a tree that do not fit.
        """
        call = _Call(self, token_ids, cache, num_new=num_new, rows=rows, layers=layers)
        call.set_tree(positions, visible)
        call.set_hidden_in(hidden_in)
        has_head = early_head or call.request.end_layer == self.num_layers
        hidden = call.want_hidden(hidden_layers, has_head)
        scores = call.want_logits(last_only) if logits and has_head else None
        _library().draftloop_forward(byref(self._packed.model), byref(cache.structure), byref(call.request))
        return ModelOutput(logits=scores, hidden=hidden)

    @torch.no_grad()
    def greedy_chain(self, token_ids: Tensor, cache: NativeCache, *, num_new: Tensor | None = None,
                     rows: Indices | None = None, steps: int,
                     layers: tuple[int, int] | None = None) -> Tensor:
        """Feeds the given tokens, then drafts by argmax without returning to Python.

        The lowest id wins a tie, as in `torch.argmax`. The last drafted token is not fed: each row
        of the cache grows by num_new + steps - 1. `layers=(0, n)` drafts with the first n layers
        and the model's own norm and head.

        Returns: [b, steps] int64 token ids; with `head_rows`, ids of the full vocabulary.
        """
        if steps < 1:
            raise ValueError(f"steps={steps}: expected at least 1")
        call = _Call(self, token_ids, cache, num_new=num_new, rows=rows, layers=layers, extra=steps - 1)
        call.want_logits(last_only=True)
        drafted = torch.empty(len(token_ids), steps, dtype=torch.int64)
        _library().draftloop_greedy_chain(byref(self._packed.model), byref(cache.structure),
                                          byref(call.request), steps, abi.pointer(drafted))
        return drafted

    @torch.no_grad()
    def logits_of(self, hidden: Tensor) -> Tensor:
        """[..., V] float32 logits of [..., D] post-norm hidden states (layer -1)."""
        rows = hidden.to(torch.float32).reshape(-1, self.hidden_size).contiguous()
        logits = torch.empty(len(rows), self.vocab_size)
        _library().draftloop_logits(byref(self._packed.model), abi.pointer(rows), len(rows),
                                    torch.get_num_threads(), abi.pointer(logits))
        return logits.view(*hidden.shape[:-1], self.vocab_size)


class _Call:
    """One checked `abi.Request` and the tensors it points into."""

    def __init__(self, model: NativeModel, token_ids: Tensor, cache: NativeCache, *,
                 num_new: Tensor | None, rows: Indices | None, layers: tuple[int, int] | None,
                 extra: int = 0):
        self.model = model
        self.batch, self.width = token_ids.shape
        self.token_ids = _int64(token_ids)
        self.rows = _int64(range(len(cache.lengths)) if rows is None else rows)
        self.num_new = torch.full((self.batch,), self.width) if num_new is None else _int64(num_new)
        self.past = self._check_rows(cache, extra)
        self.is_ragged = bool((self.num_new < self.width).any())
        self._check_tokens()
        first, end = layers or (0, model.num_layers)
        if not 0 <= first <= end <= model.num_layers:
            raise ValueError(f"layers=({first}, {end}): expected 0 <= first <= end <= {model.num_layers}")
        self.hidden_out = (ctypes.c_void_p * (model.num_layers + 2))()
        self.request = abi.Request(
            token_ids=abi.pointer(self.token_ids), num_new=abi.pointer(self.num_new),
            cache_rows=abi.pointer(self.rows), hidden_out=self.hidden_out, rows=self.batch,
            width=self.width, first_layer=first, end_layer=end, threads=torch.get_num_threads())

    def _check_rows(self, cache: NativeCache, extra: int) -> Tensor:
        if len(self.rows) != self.batch or len(self.num_new) != self.batch:
            raise ValueError(f"{self.batch} rows of token ids for {len(self.rows)} cache rows "
                             f"and {len(self.num_new)} counts: expected as many of each")
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
            raise ValueError(f"a row would hold {needed} tokens, the cache has room for {cache.capacity}; "
                             "make it with a larger capacity")
        return past

    def _check_tokens(self) -> None:
        ids, limit = self.token_ids, self.model._packed.num_embeddings
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
            self.positions = _int64(positions)
            depth = self.positions - self.past[:, None]
            wrong = (depth < 0) | (depth > torch.arange(self.width))
            wrong &= torch.arange(self.width) < self.num_new[:, None]
            if wrong.any():
                raise ValueError(f"position {int(self.positions[wrong][0])}: expected, for new token j of a "
                                 "row with n cached, a position in [n, n + j]")
            self.request.positions = abi.pointer(self.positions)
        if visible is not None:
            if visible.shape != (self.batch, self.width, self.width):
                raise ValueError(f"visible has shape {tuple(visible.shape)}, expected "
                                 f"{(self.batch, self.width, self.width)}")
            self.visible = visible.to(torch.bool).contiguous()
            self.request.visible = abi.pointer(self.visible)

    def set_hidden_in(self, hidden: Tensor | None) -> None:
        if hidden is None:
            return
        self.hidden_in = hidden.to(torch.float32).contiguous()
        expected = (self.batch, self.width, self.model.hidden_size)
        if self.hidden_in.shape != expected:
            raise ValueError(f"hidden_in has shape {tuple(hidden.shape)}, expected {expected}")
        self.request.hidden_in = abi.pointer(self.hidden_in)

    def want_hidden(self, layers: Sequence[int], has_head: bool) -> dict[int, Tensor]:
        first, end = self.request.first_layer, self.request.end_layer
        allowed = [*range(first, end + 1), *([-1] if has_head else [])]
        hidden = {}
        for k in layers:
            if k not in allowed:
                raise ValueError(f"hidden layer {k}: this pass has {allowed}")
            hidden[k] = self._output(self.batch, self.width, self.model.hidden_size)
            self.hidden_out[k] = abi.pointer(hidden[k])  # index -1: the last entry, as in decoder.cpp
        return hidden

    def want_logits(self, last_only: bool) -> Tensor:
        width = 1 if last_only else self.width
        self.logits = self._output(self.batch, width, self.model.vocab_size)
        self.request.logits = abi.pointer(self.logits)
        self.request.last_only = last_only
        return self.logits

    def _output(self, *shape: int) -> Tensor:
        # Padding is not computed; zeros there keep a stray NaN out of the caller's sums.
        return torch.zeros(shape) if self.is_ragged else torch.empty(shape)


def _int64(values: Indices | range) -> Tensor:
    return torch.as_tensor(values if isinstance(values, Tensor) else list(values), dtype=torch.int64).contiguous()


def _zeros(shape: tuple[int, ...]) -> Tensor:
    num_elements = 1
    for size in shape:
        num_elements *= size
    return allocate(num_elements, torch.float32, huge_pages=False).view(shape)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return abi.bind(load_library())
