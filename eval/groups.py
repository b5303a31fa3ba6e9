"""What an evaluation found on a part of the prompts, or of the positions in the texts."""

from dataclasses import dataclass

from eval.intervals import Interval


@dataclass(frozen=True, kw_only=True)
class BreakdownResult:
    """Acceptance of a drafter on one kind of place of the target's texts (breakdown.py).

    by: "category" (of the prompt), "token class", "target entropy" (nats), "answer position" or
    "context length" (tokens in front, prompt included). num_positions: such places in all texts.
    num_drafted, num_accepted: tokens that were to stand there. acceptance_rate: accepted / drafted.
    conditional_acceptance: accepted / drafted with everything in front of them kept. num_rounds,
    acceptance_length: of rounds that begin there. agreement, overlap: over all such places,
    wherever rounds began; None where not known.
    """

    drafter: str
    suite: str
    temperature: float
    by: str
    group: str
    num_positions: int
    num_rounds: float
    num_drafted: float
    num_accepted: float
    acceptance_rate: Interval
    conditional_acceptance: Interval
    acceptance_length: Interval
    agreement: Interval | None
    overlap: Interval | None


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
