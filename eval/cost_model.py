"""What a drafter must cost and reach to pay: pure functions of acceptance and measured costs.

Unit of every cost: seconds of one target pass over one token, `target_s`. With K drafted tokens,
    speedup(K) = acceptance_length(K) * (1 + plain_overhead) / (v(K) + K * c + o)
where v(K) is a pass over K + 1 tokens, c one draft pass, o what a round spends outside model
passes, and plain_overhead the same for a round of plain decoding.
Sources: Leviathan et al. 2023, arXiv:2211.17192, theorem 3.8 is the case v = 1, o = 0, constant
acceptance; Chen et al. 2023, arXiv:2302.01318, measure v; the two overheads are added here so
that predictions can be held against a clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

DEVIATION_LIMIT = (
    0.10  # predicted and measured speedup may differ by this share before it is flagged
)

NEAR_BEST = 0.02  # predicted speedups that differ by less cannot be told apart


@dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """Costs of one round, in passes of the target over one token.

    verify: v(0), v(1), ...: entry K is the pass over K + 1 tokens; v(0) = 1.
    draft_cost: c, one more drafted token. overhead: o, per round, outside model passes.
    plain_overhead: the same per token of plain decoding. target_s: the unit in seconds.
    """

    target_s: float
    verify: tuple[float, ...]
    draft_cost: float
    overhead: float
    plain_overhead: float = 0.0

    @property
    def max_draft_tokens(self) -> int:
        return len(self.verify) - 1


@dataclass(frozen=True)
class BestLength:
    """The draft length with the highest predicted speedup; 0 tokens (1.0) where none is above 1."""

    num_draft_tokens: int
    speedup: float


@dataclass(frozen=True)
class Step:
    """One bar of the decomposition: the speedup left after this cost is charged too."""

    name: str
    speedup: float


@dataclass(frozen=True, kw_only=True)
class RoundParts:
    """Mean seconds of a part of the timed rounds, plain or speculative; without the prefill."""

    draft_s: float
    verify_s: float
    outside_s: float


@dataclass(frozen=True)
class PartCheck:
    """A part of a round as predicted and as timed, in passes of the target over one token."""

    name: str
    predicted: float
    timed: float


def expected_acceptance_length(acceptance_by_position: Sequence[float]) -> float:
    """1 + sum over k of P(the first k drafts are all kept): tokens a round, bonus included."""
    return 1.0 + sum(acceptance_by_position)


def constant_acceptance_length(rate: float, num_draft_tokens: int) -> float:
    """(1 - a^(K+1)) / (1 - a): the same for one acceptance probability at every position."""
    return 1.0 + sum(rate**k for k in range(1, num_draft_tokens + 1))


def round_cost(costs: RoundCosts, num_draft_tokens: int) -> float:
    """v(K) + K c + o, in passes of the target over one token.

    Raises:
        ValueError: if v was not measured up to K.
    """
    if num_draft_tokens > costs.max_draft_tokens:
        raise ValueError(
            f"the pass over {num_draft_tokens + 1} tokens was not measured: verify costs end at "
            f"num_draft_tokens={costs.max_draft_tokens}; measure costs up to the longest draft"
        )
    drafting = num_draft_tokens * costs.draft_cost
    return costs.verify[num_draft_tokens] + drafting + costs.overhead


def mean_round_cost(costs: RoundCosts, rounds_by_drafted: Mapping[int, int]) -> float:
    """Round cost averaged over rounds of different draft lengths (lookup does not always draft).

    Args:
        rounds_by_drafted: number of rounds for each number of drafted tokens; not empty.
    """
    total = sum(rounds_by_drafted.values())
    return sum(n * round_cost(costs, drafted) for drafted, n in rounds_by_drafted.items()) / total


def predicted_speedup(
    acceptance_length: float, costs: RoundCosts, rounds_by_drafted: Mapping[int, int]
) -> float:
    """Tokens a round over the cost of a round, relative to plain decoding; prefill excluded."""
    cost = mean_round_cost(costs, rounds_by_drafted)
    return acceptance_length * (1.0 + costs.plain_overhead) / cost


def best_length(speedups: Mapping[int, float]) -> BestLength:
    """The best entry of {num_draft_tokens: predicted speedup}; ties go to the shorter draft."""
    best = BestLength(0, 1.0)
    for num_draft_tokens, speedup in sorted(speedups.items()):
        if speedup > best.speedup:
            best = BestLength(num_draft_tokens, speedup)
    return best


def length_to_use(speedups: Mapping[int, float]) -> int:
    """The shortest draft length predicted within NEAR_BEST of the best of {length: speedup}; of those
    that gain, where any does.

    Costs are not known better than that. Among lengths that cannot be told apart the shorter one
    costs less where a batch grows, and the next measurement finds it again.
    """
    best = max(speedups.values())
    enough = max((1.0 - NEAR_BEST) * best, min(best, 1.0))
    return min(length for length, speedup in speedups.items() if speedup >= enough)


def break_even_acceptance(costs: RoundCosts, num_draft_tokens: int) -> float | None:
    """The constant acceptance probability at which drafting K tokens gains nothing.

    Returns:
        0.0 where even a useless drafter costs nothing; None where a perfect one cannot pay.
    """
    needed = round_cost(costs, num_draft_tokens) / (1.0 + costs.plain_overhead)
    if needed > num_draft_tokens + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):  # halving to 1e-15: acceptance length grows strictly with acceptance
        middle = (low + high) / 2
        if constant_acceptance_length(middle, num_draft_tokens) < needed:
            low = middle
        else:
            high = middle
    return high if high > 1e-9 else 0.0


def constant_rate_of(acceptance_length: float, num_draft_tokens: int) -> float | None:
    """The constant acceptance probability that gives this acceptance length at this K."""
    if num_draft_tokens == 0 or not 1.0 <= acceptance_length <= num_draft_tokens + 1:
        return None
    free = RoundCosts(
        target_s=1.0,
        verify=(1.0,) * num_draft_tokens + (acceptance_length,),
        draft_cost=0.0,
        overhead=0.0,
    )
    return break_even_acceptance(free, num_draft_tokens)


def perfect_drafter_speedup(costs: RoundCosts, num_draft_tokens: int) -> float:
    """Every drafted token kept, at this drafter's cost: the ceiling of better training."""
    return predicted_speedup(num_draft_tokens + 1.0, costs, {num_draft_tokens: 1})


def free_drafting_ceiling(rate: float) -> float | None:
    """1 / (1 - a): endless free drafts verified at no extra cost (Leviathan et al., section 3.3)."""
    return None if rate >= 1.0 else 1.0 / (1.0 - rate)


def decomposition(
    acceptance_length: float,
    costs: RoundCosts,
    rounds_by_drafted: Mapping[int, int],
    *,
    draft_start: float = 0.0,
) -> list[Step]:
    """The speedup after each cost is charged in turn, from the ideal to the prediction.

    The ideal is the acceptance length: free drafts, a verification that costs one pass, nothing
    outside the passes. The last step equals `predicted_speedup`.

    Args:
        draft_start: the part of the overhead that drafting takes whatever its length (the drafter
            reads what was kept), in passes of the target over one token.
    """
    plain = costs.plain_overhead
    free = replace(costs, draft_cost=0.0, overhead=plain, verify=(1.0,) * len(costs.verify))
    verified = replace(free, verify=costs.verify)
    drafted = replace(verified, draft_cost=costs.draft_cost, overhead=plain + draft_start)
    steps = [
        ("ideal", free),
        ("verification of more tokens", verified),
        ("drafting", drafted),
        ("sampling, roll-back, bookkeeping", costs),
    ]
    return [
        Step(name, predicted_speedup(acceptance_length, charged, rounds_by_drafted))
        for name, charged in steps
    ]


def whole_generation_speedup(
    decode_speedup: float, *, prefill_s: float, plain_decode_s: float
) -> float:
    """Speedup of prefill + decoding where the prefill takes equally long on both sides."""
    return (prefill_s + plain_decode_s) / (prefill_s + plain_decode_s / decode_speedup)


def deviation(predicted: float, measured: float) -> float:
    """predicted / measured - 1."""
    return predicted / measured - 1.0
