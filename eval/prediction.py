"""The cost model applied to what was measured: predicted speedups, best length, what would help.

Acceptance comes from the replay (temperature 0, exact for every draft length), costs from the
clock.
"""

from collections.abc import Sequence

from eval.cost_model import (
    BestLength,
    PartCheck,
    RoundCosts,
    Step,
    best_length,
    break_even_acceptance,
    constant_rate_of,
    decomposition,
    deviation,
    length_to_use,
    predicted_speedup,
)
from eval.results import (
    CostResult,
    LengthPrediction,
    Prediction,
    ReplayedLength,
    SpeedResult,
)
from eval.what_if import Lengths, value_of, what_if

VERIFICATION, DRAFTING = "verification", "drafting"
OUTSIDE, PLAIN_OUTSIDE = "the rest of a round", "the rest of a plain round"
MOSTLY_FULL = 0.8  # a drafter that fills this share of its rounds has one draft length


def predict(
    drafter: str,
    suite: str,
    replayed: Sequence[ReplayedLength],
    measured: CostResult,
    speed: SpeedResult | None,
) -> Prediction:
    """Predicted speedup by draft length, what eats it, and how it compares with the clock.

    Args:
        replayed: acceptance at each draft length.
        speed: the measured speedup of the same drafter and suite, None where not measured.
    """
    costs = measured.costs
    lengths = {
        length.num_draft_tokens: length
        for length in replayed
        if length.num_draft_tokens <= costs.max_draft_tokens and length.num_rounds
    }
    speedups = speedups_by_length(lengths, costs)
    best = best_length(speedups)
    if best.num_draft_tokens:
        length = length_to_use(speedups)
        best = BestLength(length, speedups[length])
    shown = speed.num_draft_tokens if speed is not None else best.num_draft_tokens
    at_shown = lengths.get(shown)
    predicted = None if speed is None else _predicted_as_timed(speed, costs)
    known = speed.decode_speedup.value if speed is not None and speed.decode_speedup else None
    return Prediction(
        drafter=drafter,
        suite=suite,
        lengths=[_length_prediction(lengths[k], speedups[k], costs) for k in sorted(lengths)],
        best_num_draft_tokens=best.num_draft_tokens,
        best_speedup=best.speedup,
        mean_acceptance=None if at_shown is None else equivalent_rate(at_shown),
        decomposition=_decompose(speed, at_shown, measured),
        what_if=what_if(lengths, measured),
        measured_num_draft_tokens=None if speed is None else shown,
        predicted_at_measured=predicted,
        deviation=deviation(predicted, known) if predicted and known else None,
        parts=[] if speed is None or predicted is None else _parts(speed, measured),
    )


def speedups_by_length(lengths: Lengths, costs: RoundCosts) -> dict[int, float]:
    """{num_draft_tokens: predicted decode speedup}."""
    return {
        k: predicted_speedup(value_of(length), costs, length.rounds_by_drafted)
        for k, length in lengths.items()
    }


def equivalent_rate(length: ReplayedLength) -> float | None:
    """The constant acceptance that gives this length; None for drafters that often do not draft."""
    rounds = sum(length.rounds_by_drafted.values())
    full = length.rounds_by_drafted.get(length.num_draft_tokens, 0)
    if rounds == 0 or full < MOSTLY_FULL * rounds:
        return None
    return constant_rate_of(value_of(length), length.num_draft_tokens)


def _predicted_as_timed(speed: SpeedResult, costs: RoundCosts) -> float | None:
    """The prediction for the timed prompts, so that only costs can differ from the clock."""
    longest = max(speed.rounds_by_drafted, default=0)
    if speed.acceptance_length is None or longest > costs.max_draft_tokens:
        return None
    return predicted_speedup(speed.acceptance_length, costs, speed.rounds_by_drafted)


def _parts(speed: SpeedResult, measured: CostResult) -> list[PartCheck]:
    """Every part of the timed rounds beside what it was predicted to take; the unit is the pass of
    plain decoding that was timed with them."""
    if speed.parts is None or speed.plain_parts is None:
        return []
    costs, rounds = measured.costs, speed.rounds_by_drafted
    total, unit_s = sum(rounds.values()), speed.plain_parts.verify_s
    mean_drafted = sum(k * n for k, n in rounds.items()) / total
    draft_start, outside = (
        seconds / costs.target_s for seconds in (measured.draft_start_s, measured.outside_s)
    )
    predicted = {
        VERIFICATION: sum(costs.verify[k] * n for k, n in rounds.items()) / total,
        DRAFTING: draft_start + mean_drafted * costs.draft_cost,
        OUTSIDE: outside,
        PLAIN_OUTSIDE: costs.plain_overhead,
    }
    timed = {
        VERIFICATION: speed.parts.verify_s / unit_s,
        DRAFTING: speed.parts.draft_s / unit_s,
        OUTSIDE: speed.parts.outside_s / unit_s,
        PLAIN_OUTSIDE: (speed.plain_parts.draft_s + speed.plain_parts.outside_s) / unit_s,
    }
    return [PartCheck(name, predicted[name], timed[name]) for name in predicted]


def _decompose(
    speed: SpeedResult | None, replayed: ReplayedLength | None, measured: CostResult
) -> list[Step]:
    """Of the timed prompts where there are any, else of the replayed ones."""
    costs = measured.costs
    start = measured.draft_start_s / costs.target_s
    if speed is not None and _predicted_as_timed(speed, costs) is not None:
        assert speed.acceptance_length is not None
        rounds = speed.rounds_by_drafted
        return decomposition(speed.acceptance_length, costs, rounds, draft_start=start)
    if replayed is None:
        return []
    return decomposition(value_of(replayed), costs, replayed.rounds_by_drafted, draft_start=start)


def _length_prediction(
    length: ReplayedLength, speedup: float, costs: RoundCosts
) -> LengthPrediction:
    return LengthPrediction(
        num_draft_tokens=length.num_draft_tokens,
        acceptance_length=value_of(length),
        speedup=speedup,
        break_even_acceptance=break_even_acceptance(costs, length.num_draft_tokens),
    )
