"""What the report shows token by token, and the prefixes where a drafter does worst: records.

They are made in replay.py, from a decoded answer and one pass of both models over it.
"""

from dataclasses import dataclass

from eval.records import to_json

Top = list[tuple[str, float]]  # the most probable tokens, as text, with their probabilities


@dataclass(frozen=True)
class TraceToken:
    """One returned token. kind: "first", "accepted", "corrected", "bonus" or "plain"."""

    text: str
    kind: str
    round: int  # index into Trace.rounds; -1 for the token of the prefill
    target: Top
    draft: Top


@dataclass(frozen=True)
class TraceRound:
    """One round of the answer: what it drafted, what was kept, where its time went."""

    drafted: int
    accepted: int
    draft_s: float
    verify_s: float
    other_s: float


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One greedy answer, decoded with one drafter at batch size 1."""

    drafter: str
    suite: str
    prompt_id: str
    prompt: str
    tokens: list[TraceToken]
    rounds: list[TraceRound]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def as_json(self) -> dict:
        """What the page's script reads."""
        return {"tokens": to_json(self.tokens), "rounds": to_json(self.rounds)}


@dataclass(frozen=True, kw_only=True)
class WeakPrefix:
    """A place where the drafter's distribution overlaps least with the target's.

    token_ids: prompt and answer up to that place, enough to train on. overlap: sum over tokens of
    min(target, draft), temperature 1. tail: the end of the prefix as text.
    """

    drafter: str
    suite: str
    prompt_id: str
    position: int
    token_ids: list[int]
    tail: str
    target_token_id: int
    target_text: str
    draft_token_id: int
    draft_text: str
    target_probability: float
    overlap: float
