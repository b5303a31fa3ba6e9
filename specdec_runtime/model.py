"""What decoding asks of a model: logits for new tokens, on a cache that can be rolled back.

Two implementations share these protocols: `hf_model.HFModel` (any transformers decoder) and
`native.NativeModel` (a C++ engine for CPUs). Everything above them is written once.

The cache rule that both obey: **slot == position**. Token j of row r is written to slot
`lengths[r] + j`; rows of a batch have different lengths and are never padded on the left or moved.
Rolling back is setting a smaller length: stale slots are invisible and get overwritten.

Shapes: b rows of one call, Q new tokens a row (right-padded), D hidden size, V vocabulary size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class NewTokens(NamedTuple):
    """Texts of different lengths, as a pass takes them."""

    token_ids: Tensor  # [b, Q] int64, right-padded with 0
    num_new: Tensor  # [b] int64


def right_padded(texts: Sequence[Sequence[int]]) -> NewTokens:
    """Token ids of each row side by side."""
    width = max(map(len, texts), default=0)
    padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in texts]
    return NewTokens(
        torch.tensor(padded, dtype=torch.int64).view(len(texts), width),
        torch.tensor([len(tokens) for tokens in texts], dtype=torch.int64),
    )


class ModelOutput(NamedTuple):
    """What one forward pass returns; numbers are float32 whatever the model computes in."""

    logits: Tensor | None  # [b, Q, V], or [b, 1, V] with last_only; None if not asked for
    hidden: dict[int, Tensor]  # layer k -> [b, Q, D]: the residual after k layers; -1 = head input
    likeliest: Tensor | None = None  # [b, Q] int64, or [b, 1]: columns of the largest logits


class Cache(Protocol):
    """Keys and values of a batch; rows are independent of each other."""

    lengths: Tensor  # [batch] int64 on the CPU: how many tokens of each row are cached
    capacity: int  # slots a row

    def truncate(self, lengths: Sequence[int] | Tensor, rows: Sequence[int] | None = None) -> None:
        """Roll `rows` (default all) back to at most `lengths` tokens each; copies nothing."""

    def keep_path(self, row: int, start: int, slots: Sequence[int]) -> None:
        """Move the entries at `slots` to start, start + 1, ... and forget what lies behind them.

        What is left of a verified token tree: the root path becomes a plain sequence.
        """

    def clear(self, rows: Sequence[int]) -> None:
        """Forget everything about `rows`, so that they can take new sequences."""

    def keys_values(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values of one row, each [kv_heads, length, head_dim]."""


class CausalModel(Protocol):
    """A decoder-only language model, ready to decode: eval mode, no gradients."""

    config: Any  # the transformers configuration
    vocab_size: int  # rows of the head, padding included
    hidden_size: int
    num_layers: int
    max_positions: int

    @property
    def device(self) -> torch.device:
        """Where token ids go in and logits come out."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""

    def new_cache(self, batch_size: int, capacity: int) -> Any:
        """An empty `Cache` for `batch_size` rows of up to `capacity` tokens each."""

    def forward(
        self,
        token_ids: Tensor,
        cache: Any,
        *,
        num_new: Tensor | None = None,
        rows: Sequence[int] | None = None,
        last_only: bool = False,
        logits: bool = True,
        likeliest_of: int | None = None,
        hidden_layers: Sequence[int] = (),
        positions: Tensor | None = None,
        visible: Tensor | None = None,
        layers: tuple[int, int] | None = None,
        hidden_in: Tensor | None = None,
        early_head: bool = False,
    ) -> ModelOutput:
        """Append `token_ids` to the cache and score what follows each of them.

        Args:
            token_ids: [b, Q] int64; the first num_new[i] of row i are real, the rest is padding.
            cache: a `Cache` from `new_cache` of this model; its lengths grow by `num_new`.
            num_new: [b] int64 in [1, Q]; None = all Q.
            rows: which cache rows take part, ascending; None = all, in order.
            last_only: score the last real token of each row only.
            logits: False returns none; where nothing else is scored it skips the head.
            likeliest_of: n: return which of the first n logits is the largest (the lowest of equal
                ones), which costs less than to return them all. None = not asked for.
            hidden_layers: which hidden states to return, k in [0, num_layers] or -1.
            positions: [b, Q] int64 positions, where they are not lengths + 0..Q-1 (trees).
            visible: [b, Q, Q] bool: which of the new tokens each new token sees (trees); None =
                those up to and including itself.
            layers: run only layers [a, b) of the model; logits come only if b is the last one.
            hidden_in: [b, Q, D] residual entering layer a; None = embed the tokens.
            early_head: apply the final norm and the head after layer b even if it is not the last.
        """

    def logits_of(self, hidden: Tensor) -> Tensor:
        """[..., V] float32 logits of [..., D] post-norm hidden states (layer -1)."""
