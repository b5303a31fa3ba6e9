"""What was evaluated on what, and what a reader must know: records of results.py."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """Something the reader must know. level: "error" (do not trust), "warning" or "note"."""

    level: str
    code: str
    message: str


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """The target as evaluated."""

    name: str
    revision: str | None
    fingerprint: str
    engine: str
    dtype: str
    num_layers: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class DrafterFacts:
    """A drafter as evaluated; `folder` is None where it has none. free: needs no training."""

    name: str
    kind: str
    folder: str | None
    free: bool


@dataclass(frozen=True, kw_only=True)
class SuiteFacts:
    """The prompts of one suite that were used, and how many were left out as too long."""

    name: str
    num_prompts: int
    num_too_long: int
    mean_prompt_tokens: float
    categories: dict[str, int]
