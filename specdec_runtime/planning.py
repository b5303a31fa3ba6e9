"""How much a round drafts: chains of a policy's lengths, or token trees of a shape.

One of them per decoder; the loop only asks for a proposal and reports what was kept.
"""

from typing import Protocol

from torch import Tensor

from specdec_runtime.auto_length import measured_policy
from specdec_runtime.draft import Draft, Drafter, DraftSession, TreeSession
from specdec_runtime.draft_length import DraftLength, FixedLength, LengthRound, as_draft_length
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target
from specdec_runtime.tree_growth import TreeShape


class DraftPlan(Protocol):
    """The plan of one `generate` call."""

    def propose(
        self,
        rows: list[int],
        committed: list[list[int]],
        limits: list[int],
        features: dict[int, Tensor],
    ) -> Draft:
        """The drafts of one round, at most limits[i] tokens deep."""

    def learn(self, num_accepted: list[int]) -> None:
        """Take note of what became of the last proposal."""


class ChainSetting:
    """Chains, their length decided by a policy."""

    def __init__(self, policy: DraftLength) -> None:
        self.policy = policy
        self.most = policy.num_draft_tokens

    def begin(self, batch_size: int, session: DraftSession) -> DraftPlan:
        return _ChainPlan(self.policy, batch_size, session)

    def measured(self, batch_size: int, *, is_sampled: bool) -> "ChainSetting":
        return self


class AutoSetting:
    """Chains, their length decided by what drafting and verifying cost on this machine."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self._target = target
        self._drafter = drafter

    def measured(self, batch_size: int, *, is_sampled: bool) -> ChainSetting:
        """The policy for such a batch; its costs are measured where they are not known yet."""
        return ChainSetting(
            measured_policy(
                self._target, self._drafter, batch_size=batch_size, is_sampled=is_sampled
            )
        )


class TreeSetting:
    """Token trees of one shape."""

    def __init__(self, shape: TreeShape) -> None:
        self.shape = shape
        self.most = shape.num_nodes

    def begin(self, batch_size: int, session: DraftSession) -> DraftPlan:
        if not isinstance(session, TreeSession):
            raise ValueError(
                f"{type(session).__name__} drafts chains only: give num_draft_tokens as a number"
            )
        return _TreePlan(self.shape, session)

    def measured(self, batch_size: int, *, is_sampled: bool) -> "TreeSetting":
        return self


def as_draft_plan(
    value: int | DraftLength | TreeShape | str, target: Target, drafter: Drafter | None
) -> ChainSetting | AutoSetting | TreeSetting:
    """A number of tokens, a policy, "auto" or a tree's shape, as what the loop works with.

    Raises:
        ValueError: if it is none of them.
    """
    if isinstance(value, str) and value == "auto":
        return ChainSetting(FixedLength(0)) if drafter is None else AutoSetting(target, drafter)
    if isinstance(value, TreeShape):
        if isinstance(target.model, HFModel) and target.model.is_recurrent:
            raise ValueError(
                f"{type(target.model.module).__name__} has recurrent layers, which read a text and "
                "not a tree: draft chains, with num_draft_tokens as a number"
            )
        return TreeSetting(value)
    return ChainSetting(as_draft_length(value))  # type: ignore[arg-type]


class _ChainPlan:
    def __init__(self, policy: DraftLength, batch_size: int, session: DraftSession) -> None:
        self._needs_confidence = policy.needs_confidence
        self._most = policy.num_draft_tokens
        self._lengths = policy.begin(batch_size)
        self._session = session
        self._round: LengthRound | None = None

    def propose(
        self,
        rows: list[int],
        committed: list[list[int]],
        limits: list[int],
        features: dict[int, Tensor],
    ) -> Draft:
        limits = [min(limit, self._most) for limit in limits]
        self._round = LengthRound(
            self._lengths, rows, limits, needs_confidence=self._needs_confidence
        )
        return self._session.propose(rows, committed, self._round, features)

    def learn(self, num_accepted: list[int]) -> None:
        assert self._round is not None, "nothing was proposed yet"
        self._round.finish(num_accepted)


class _TreePlan:
    def __init__(self, shape: TreeShape, session: TreeSession) -> None:
        self._shape = shape
        self._session = session

    def propose(
        self,
        rows: list[int],
        committed: list[list[int]],
        limits: list[int],
        features: dict[int, Tensor],
    ) -> Draft:
        return self._session.propose_trees(rows, committed, limits, self._shape, features)

    def learn(self, num_accepted: list[int]) -> None:
        pass
