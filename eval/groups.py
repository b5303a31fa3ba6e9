"""What an evaluation found on a part of the prompts, or of the positions in the texts."""

from dataclasses import dataclass

from eval.intervals import Interval


@dataclass(frozen=True, kw_only=True)
class BreakdownResult:
    """Agreement and overlap of a drafter on one kind of position of the target's greedy texts.

    by: "category" (of the prompt), "token class", "target entropy" (nats), "answer position" or
    "context length" (tokens in front, prompt included).
    """

    drafter: str
    suite: str
    by: str
    group: str
    num_positions: int
    agreement: Interval
    overlap: Interval


@dataclass(frozen=True, kw_only=True)
class CategoryResult:
    """Acceptance of a drafter on the prompts of one category of a suite."""

    drafter: str
    suite: str
    temperature: float
    num_draft_tokens: int
    category: str
    num_prompts: int
    num_rounds: float
    num_drafted: float
    num_accepted: float
    acceptance_rate: Interval
    acceptance_length: Interval
