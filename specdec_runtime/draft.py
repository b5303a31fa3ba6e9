"""What a drafter must offer, and what it hands to verification.

A drafter is made once (weights, settings); a session is one `generate` call's state in it (cache,
match tables), for a batch of rows that live and end independently.

Shapes: b rows of one call, K drafted positions of the longest draft, V the target's real
vocabulary, D hidden size of the target.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdec_runtime.draft_length import LengthRound
from specdec_runtime.model import Cache, CausalModel, right_padded
from specdec_runtime.sampling import Sampler
from specdec_runtime.tree_growth import TreeShape
from specdec_runtime.trees import DraftTree


class Draft(NamedTuple):
    """Proposed tokens of a batch of rows, ragged by `num_drafted`."""

    token_ids: Tensor  # [b, K] int64; positions at or past num_drafted are padding (any valid id)
    num_drafted: Tensor  # [b] int64 on the CPU, each in [0, K]
    probs: Tensor | None = None  # [b, K, V] float32, exactly what was drawn from; None = one-hot
    # Self-speculation: the residual after `exit_layer` layers of the target for the pending token
    # and the drafts, [b, K + 1, D], already in the target's cache; verification starts from it.
    exit_layer: int | None = None
    exit_hidden: Tensor | None = None
    # A token tree: token_ids are its nodes, and probs [b, K + 1, V] what the children of the
    # pending token and of each node were drawn from; zeros where they were chosen without chance.
    tree: DraftTree | None = None


class DraftSession(Protocol):
    """State of one drafter for one batch. `rows` are indices into the batch, ascending."""

    def propose(
        self,
        rows: list[int],
        committed: list[list[int]],
        lengths: LengthRound,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        """Draft for each row as many tokens as `lengths` asks for, one position at a time.

        A token that was asked for is submitted, whatever it turns out to be: dropping it after
        seeing it would change the output distribution (draft_length.py).

        Args:
            committed: per row, prompt and all final tokens; the last one is pending (the target
                has not seen it yet).
            lengths: asks for positions; a drafter that can offer fewer caps it beforehand.
            features: for each of the drafter's `hidden_layers`, [b, F, D]: the target's hidden
                states of the row's last F_i tokens before the pending one that have not been
                handed over yet, left-aligned.
        """

    def commit(self, rows: list[int], committed: list[list[int]]) -> None:
        """Forget what was drafted past `committed` (same form as in `propose`)."""


@runtime_checkable
class TreeSession(DraftSession, Protocol):
    """A session that can also draft token trees."""

    def propose_trees(
        self,
        rows: list[int],
        committed: list[list[int]],
        limits: list[int],
        shape: TreeShape,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        """One tree a row, at most limits[i] levels deep; otherwise as `propose`."""


@runtime_checkable
class TargetSharing(Protocol):
    """A session that runs on the target's own cache (self-speculation)."""

    def share(self, model: CausalModel, cache: Cache) -> None:
        """Take the target's model and its cache of this batch; called once, before the prefill.

        Raises:
            ValueError: if the drafter was made of another model.
        """


class Drafter(Protocol):
    """Proposes tokens; anything it proposes is lossless, good proposals are fast."""

    hidden_layers: tuple[int, ...]  # hidden states of the target it reads; () = none
    max_positions: int | None  # longest text it can follow; None = any

    def begin(self, batch_size: int, capacity: int, sampler: Sampler) -> DraftSession:
        """A session for `batch_size` rows of up to `capacity` tokens each."""


@runtime_checkable
class Learning(Protocol):
    """A drafter that learns from what it decodes."""

    def forgetful(self) -> Drafter:
        """The same drafter, knowing what this one knows, that does not learn."""


def without_learning(drafter: Drafter) -> Drafter:
    """The drafter for rounds that nobody gets to see, such as those that are timed."""
    return drafter.forgetful() if isinstance(drafter, Learning) else drafter


def no_draft(num_rows: int) -> Draft:
    """The draft of nothing: the round then is a plain decoding step."""
    return Draft(
        torch.zeros(num_rows, 0, dtype=torch.int64), torch.zeros(num_rows, dtype=torch.int64)
    )


def chains(proposals: Sequence[Sequence[int]]) -> Draft:
    """A draft of certain tokens (one-hot distributions) from one list per row."""
    return Draft(*right_padded(proposals))
