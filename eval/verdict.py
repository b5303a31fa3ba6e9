"""The answer in one sentence: does this drafter pay here, what eats the gain, what to do next.

"It does not pay here" is a normal answer and is worded as one. Pure functions over the records.
"""

import itertools

from eval.cost_model import DEVIATION_LIMIT
from eval.results import (
    Certificate,
    CostResult,
    Prediction,
    Results,
    SpeedResult,
    Verdict,
)

SMALL_STEP = 0.02  # a change that moves the speedup by less is not worth recommending

ADVICE = {
    "half the drafting time": (
        "a cheaper drafter (fewer layers, a smaller output vocabulary, 16-bit weights)"
    ),
    "a fifth fewer rejections": (
        "a better match (more target-written text of this kind, a longer training)"
    ),
    "verification at the cost of one token": (
        "hardware or a dtype in which a pass over several tokens costs little more than one"
    ),
    "nothing spent outside model passes": "a leaner decoding loop",
}


def judge(
    certificate: Certificate,
    speed: SpeedResult | None,
    prediction: Prediction | None,
    costs: CostResult | None,
) -> Verdict:
    """The verdict for one drafter on one suite; withheld where the certificate failed."""
    drafter, suite = certificate.drafter, prediction.suite if prediction else ""
    suite = speed.suite if speed is not None else suite
    if not certificate.passed:
        return Verdict(
            drafter=drafter,
            suite=suite,
            pays=None,
            headline="withheld",
            sentence=f"Speedup withheld: {certificate.summary}.",
            reason=certificate.summary,
            next_step="find out why the output differs before trusting any number of this drafter",
        )
    if speed is None or speed.speedup is None or speed.speedup.value is None:
        sentence = "Nothing was drafted, so there is nothing to measure: acceptance is n/a."
        return Verdict(
            drafter=drafter,
            suite=suite,
            pays=None,
            headline="n/a",
            sentence=sentence,
            reason="zero drafted tokens",
            next_step="use prompts on which the drafter proposes something",
        )
    return _measured_verdict(speed, prediction, costs)


def _measured_verdict(
    speed: SpeedResult, prediction: Prediction | None, costs: CostResult | None
) -> Verdict:
    assert speed.speedup is not None
    value, low, high = speed.speedup.value, speed.speedup.low, speed.speedup.high
    assert value is not None
    pays: bool | None = value > 1.0
    if low is not None and high is not None and low <= 1.0 <= high:
        pays = None
    reason = main_cost(prediction, costs)
    between = f" (95 % interval {low:.2f} to {high:.2f})" if low is not None else ""
    at_length = f"at num_draft_tokens={speed.num_draft_tokens}"
    if pays:
        opening = f"{value:.2f} x faster {at_length}{between}"
    elif pays is None:
        opening = f"No clear gain: {value:.2f} x {at_length}{between}"
    else:
        opening = f"Does not pay here: {value:.2f} x {at_length}{between}"
    closing = [_break_even(prediction), reason if not pays else ""]
    sentence = "; ".join([opening, *(part for part in closing if part)]) + "."
    return Verdict(
        drafter=speed.drafter,
        suite=speed.suite,
        pays=pays,
        headline=f"{value:.2f} x",
        sentence=sentence,
        reason=reason,
        next_step=next_step(prediction),
    )


def _break_even(prediction: Prediction | None) -> str:
    if prediction is None or prediction.measured_num_draft_tokens is None:
        return ""
    at = {length.num_draft_tokens: length for length in prediction.lengths}
    length = at.get(prediction.measured_num_draft_tokens)
    if length is None or prediction.mean_acceptance is None:
        return ""
    if length.break_even_acceptance is None:
        return "at these costs not even a perfect drafter would pay"
    return (
        f"break-even acceptance {length.break_even_acceptance:.2f}, "
        f"measured {prediction.mean_acceptance:.2f}"
    )


def main_cost(prediction: Prediction | None, costs: CostResult | None) -> str:
    """What takes the largest share of the ideal speedup, in words."""
    if prediction is None or costs is None or len(prediction.decomposition) < 2:
        return ""
    steps = prediction.decomposition
    losses = [
        (before.speedup - after.speedup, after.name) for before, after in itertools.pairwise(steps)
    ]
    loss, name = max(losses)
    ideal = steps[0].speedup
    if loss <= SMALL_STEP:
        return f"almost nothing is lost of the ideal {ideal:.2f} x"
    return f"most of the ideal {ideal:.2f} x is lost to {name} (-{loss:.2f})"


def next_step(prediction: Prediction | None) -> str:
    """The change that the cost model says would bring most, among those one can make."""
    if prediction is None:
        return ""
    by_name = {step.name: step.speedup for step in prediction.what_if}
    now = by_name["as measured"]
    name, speedup = max(((name, by_name[name]) for name in ADVICE), key=lambda item: item[1])
    if speedup >= now + SMALL_STEP:
        return (
            f"{ADVICE[name]}: {name} would give {speedup:.2f} x instead of {now:.2f} x, by the cost "
            "model and without the prefill"
        )
    perfect = by_name["a perfect drafter at this cost"]
    if perfect >= now + SMALL_STEP:
        return (
            f"{ADVICE['a fifth fewer rejections']}, by far; the most that this drafter's cost "
            f"leaves room for is {perfect:.2f} x"
        )
    return "nothing that the cost model knows would bring much here"


def fastest(results: Results) -> str:
    """A sentence about the drafter to serve with, where it is not the one the page is about."""
    if not results.drafters:
        return ""
    suite = results.suites[0].name
    gains = [
        (speed.speedup.value, speed)
        for speed in results.speed
        if speed.suite == suite and speed.speedup is not None and speed.speedup.value is not None
    ]
    gain, best = max(gains, key=lambda pair: pair[0], default=(0.0, None))
    if best is None or gain <= 1.0 or best.drafter == results.drafters[0].name:
        return ""
    setting = f"num_draft_tokens={best.num_draft_tokens}"
    return f"Fastest on {suite}: {best.drafter}, {gain:.2f} x at {setting}."


def deviation_message(prediction: Prediction) -> str | None:
    """A line where predicted and measured speedup differ by more than the limit, else None."""
    if prediction.deviation is None or abs(prediction.deviation) <= DEVIATION_LIMIT:
        return None
    assert prediction.predicted_at_measured is not None
    measured = prediction.predicted_at_measured / (1 + prediction.deviation)
    return (
        f"{prediction.drafter} on {prediction.suite}: the cost model predicts "
        f"{prediction.predicted_at_measured:.2f} x, the clock says {measured:.2f} x "
        f"({prediction.deviation:+.0%}){_worst_part(prediction)}"
    )


def _worst_part(prediction: Prediction) -> str:
    """The part of a round that was predicted worst, where parts are known."""
    if not prediction.parts:
        return ""
    worst = max(prediction.parts, key=lambda part: abs(part.predicted - part.timed))
    return (
        f", most of it in {worst.name}: {worst.predicted:.2f} instead of {worst.timed:.2f} passes of "
        "the target a round"
    )
