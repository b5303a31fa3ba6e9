"""From the costs of a round to what each acceptance would bring; pure arithmetic."""

from dataclasses import dataclass

from eval.cost_model import (
    RoundCosts,
    best_length,
    break_even_acceptance,
    constant_acceptance_length,
    predicted_speedup,
)

ACCEPTANCES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Outlook:
    """What one acceptance probability would bring: the best draft length and its speedup.

    payback_minutes, payback_tokens: of plain decoding that have to be replaced until the time of training
    is saved; None where it never pays.
    """

    acceptance: float
    num_draft_tokens: int
    acceptance_length: float
    speedup: float
    payback_minutes: float | None
    payback_tokens: float | None


@dataclass(frozen=True)
class Plan:
    """One candidate: its costs, where it breaks even, and what each acceptance would bring."""

    num_layers: int
    costs: RoundCosts
    break_even: dict[int, float | None]  # by num_draft_tokens
    outlooks: list[Outlook]

    @property
    def easiest_break_even(self) -> float | None:
        """The smallest acceptance at which some draft length stops costing."""
        return min((rate for rate in self.break_even.values() if rate is not None), default=None)


def plan_of(num_layers: int, costs: RoundCosts, *, training_minutes: float) -> Plan:
    """The plan that follows from measured costs."""
    lengths = range(1, costs.max_draft_tokens + 1)
    return Plan(
        num_layers=num_layers,
        costs=costs,
        break_even={k: break_even_acceptance(costs, k) for k in lengths},
        outlooks=[_outlook(rate, costs, training_minutes) for rate in ACCEPTANCES],
    )


def sentence(plan: Plan) -> str:
    """The plan in a sentence."""
    layers = f"{plan.num_layers} layer{'s' if plan.num_layers > 1 else ''}"
    easiest = plan.easiest_break_even
    if easiest is None:
        return f"{layers}: at these costs not even a perfect drafter would pay."
    half = next(outlook for outlook in plan.outlooks if outlook.acceptance == 0.5)
    return (
        f"{layers}: pays from an acceptance of {easiest:.2f} on; at 0.50 it would give "
        f"{half.speedup:.2f} x with num_draft_tokens={half.num_draft_tokens}."
    )


def _outlook(rate: float, costs: RoundCosts, training_minutes: float) -> Outlook:
    lengths = range(1, costs.max_draft_tokens + 1)
    expected = {k: constant_acceptance_length(rate, k) for k in lengths}
    speedups = {k: predicted_speedup(expected[k], costs, {k: 1}) for k in lengths}
    best = best_length(speedups)
    token_s = costs.target_s * (1 + costs.plain_overhead)
    payback = None if best.speedup <= 1 else training_minutes / (1 - 1 / best.speedup)
    return Outlook(
        acceptance=rate,
        num_draft_tokens=best.num_draft_tokens,
        acceptance_length=expected.get(best.num_draft_tokens, 1.0),
        speedup=best.speedup,
        payback_minutes=payback,
        payback_tokens=None if payback is None else 60 * payback / token_s,
    )
