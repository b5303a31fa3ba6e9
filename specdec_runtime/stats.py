"""Acceptance: what is counted, and the ratios derived from the counts. The one definition of both.

A **round** is one draft and one target pass over the pending token and the drafted ones. It yields
the accepted tokens and one more: recovered at the first refusal, or bonus if all were kept. The
first token of a row comes from the prefill pass, which is no round.

**Where text ends inside a round** (end-of-text or a stop string on an accepted token), the round
counts as a whole round, `num_rounds`, with its one extra token in `acceptance_length`; drafted
tokens behind the end count neither as drafted nor as accepted, since no verdict on them matters
and none of them is returned. So a drafter that is always right has rate 1 to the very end,
`acceptance_length == 1 + num_accepted / num_rounds` always, and
`num_tokens == num_rows + num_accepted + num_rounds - (rows ended on an accepted token)`.

Counts are added, ratios never averaged.
"""

from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass(kw_only=True)
class AcceptanceStats:
    """Counts over any set of rows, and the ratios of style.md B5 derived from them.

    A ratio without a denominator is NaN, never 0.

    Attributes:
        num_rounds: rounds, summed over rows (a batch of 4 rows makes up to 4 a pass).
        num_drafted: drafted tokens that were judged.
        num_accepted: those of them that were kept.
        num_tokens: returned tokens, that of the prefill included.
        drafted_by_position: rounds that drafted more than i tokens.
        accepted_by_position: rounds that accepted more than i tokens.
        reached_by_position: rounds that drafted more than i tokens and accepted at least i.
    """

    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    reached_by_position: list[int] = field(default_factory=list)

    def add_round(self, drafted: int, accepted: int) -> None:
        """Count one round of one row."""
        assert 0 <= accepted <= drafted, (accepted, drafted)
        self.num_rounds += 1
        self.num_drafted += drafted
        self.num_accepted += accepted
        for counts in (
            self.drafted_by_position,
            self.accepted_by_position,
            self.reached_by_position,
        ):
            counts += [0] * (drafted - len(counts))
        for i in range(drafted):
            self.drafted_by_position[i] += 1
            self.reached_by_position[i] += i <= accepted
            self.accepted_by_position[i] += i < accepted

    def __add__(self, other: "AcceptanceStats") -> "AcceptanceStats":
        return AcceptanceStats(
            num_rounds=self.num_rounds + other.num_rounds,
            num_drafted=self.num_drafted + other.num_drafted,
            num_accepted=self.num_accepted + other.num_accepted,
            num_tokens=self.num_tokens + other.num_tokens,
            drafted_by_position=_added(self.drafted_by_position, other.drafted_by_position),
            accepted_by_position=_added(self.accepted_by_position, other.accepted_by_position),
            reached_by_position=_added(self.reached_by_position, other.reached_by_position),
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted."""
        return _ratio(self.num_accepted, self.num_drafted)

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / rounds: tokens per target pass, the recovered or bonus one included."""
        return 1.0 + _ratio(self.num_accepted, self.num_rounds)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Rounds that accepted more than i tokens / all rounds."""
        return [_ratio(count, self.num_rounds) for count in self.accepted_by_position]

    @property
    def conditional_acceptance_by_position(self) -> list[float]:
        """Accepted at position i / rounds that drafted it and kept everything before it."""
        pairs = zip(self.accepted_by_position, self.reached_by_position, strict=True)
        return [_ratio(accepted, reached) for accepted, reached in pairs]


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else float("nan")


def _added(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]
