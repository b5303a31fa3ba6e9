"""The plots of an evaluation: records in, figures of charts.py out."""

import itertools

from eval.charts import Axes, Bar, Point, Series, bar_list, line_chart
from eval.intervals import Interval
from eval.results import AcceptanceResult, Prediction, Results, SpeedResult

TIMES = "\u00d7"  # the multiplication sign
MAX_SERIES = 4  # lines that stay readable in one plot


def speed_plots(results: Results) -> str:
    """Speedup against draft length, a plot a suite: lines predicted, dots measured."""
    plots = []
    for suite in [suite.name for suite in results.suites]:
        series = []
        shown = [p for p in results.predictions if p.suite == suite][:MAX_SERIES]
        for colour, prediction in enumerate(shown):
            offset = 0.12 * (colour - (len(shown) - 1) / 2)  # so that all intervals are seen
            series += _speed_series(prediction, results.speed, colour, offset)
        axes = Axes(
            "draft length; dashes predicted, dots measured",
            "speedup",
            reference=1.0,
            reference_label="break-even",
        )
        plots.append(line_chart(f"Decode speedup by draft length, {suite}", series, axes))
    return f'<div class="plots">{"".join(plots)}</div>' if any(plots) else ""


def _factor(name: str, value: float | None, kind: str, title: str = "") -> Bar:
    assert value is not None
    return Bar(name, 0.0, value, f"{value:.2f}{TIMES}", kind, title)


def _speed_series(
    prediction: Prediction, speeds: list[SpeedResult], colour: int, offset: float
) -> list[Series]:
    line = [Point(0, 1.0)] + [
        Point(length.num_draft_tokens, length.speedup) for length in prediction.lengths
    ]
    measured = [
        _interval_point(
            s.num_draft_tokens + offset,
            s.decode_speedup,
            f"{s.drafter}, {s.num_draft_tokens} drafted: measured",
        )
        for s in speeds
        if (s.drafter, s.suite, s.is_auto) == (prediction.drafter, prediction.suite, False)
        and s.decode_speedup
    ]
    return [
        Series(prediction.drafter, line, colour, marks=False, dashed=True),
        Series(f"{prediction.drafter}, measured", measured, colour, line=False),
    ]


def _interval_point(x: float, value: Interval, title: str) -> Point:
    assert value.value is not None
    bounds = "" if value.low is None else f" ({value.low:.2f} to {value.high:.2f})"
    return Point(x, value.value, value.low, value.high, f"{title} {value.value:.2f}{bounds}")


def decomposition_plots(results: Results, prediction: Prediction) -> str:
    """From the ideal speedup down to the measured one, and what single changes would bring."""
    if not prediction.decomposition:
        return ""
    length = prediction.measured_num_draft_tokens or prediction.best_num_draft_tokens
    steps = prediction.decomposition
    bars = [_factor("ideal: tokens a round", steps[0].speedup, "s0")]
    for before, after in itertools.pairwise(steps):
        low, high = sorted((before.speedup, after.speedup))
        change = round(after.speedup - before.speedup, 2)
        bars.append(Bar(after.name, low, high, f"{change:+.2f}" if change else "0.00", "loss"))
    bars.append(_factor("predicted", steps[-1].speedup, "s2"))
    key = (prediction.drafter, prediction.suite, length)
    for speed in results.speed:
        measured = (speed.drafter, speed.suite, speed.num_draft_tokens) == key
        if measured and not speed.is_auto and speed.decode_speedup and speed.speedup:
            bars.append(_factor("measured, decoding alone", speed.decode_speedup.value, "s2"))
            bars.append(_factor("measured, with the prefill", speed.speedup.value, "s2"))
    title = f"From ideal to measured, {length} drafted, {prediction.suite}"
    changes = [
        _factor(one.name, one.speedup, "s2" if i == 0 else "s0", one.assumes)
        for i, one in enumerate(prediction.what_if)
    ]
    eaten = bar_list(title, bars, reference=1.0)
    helped = bar_list("Predicted speedup at the best draft length, if ...", changes, reference=1.0)
    return f'<div class="plots">{eaten}{helped}</div>'


def position_plot(chosen: list[AcceptanceResult], suite: str) -> str:
    """Share of rounds that kept the draft at each position, a line a drafter."""
    chosen = chosen[:MAX_SERIES]
    if not chosen:
        return ""
    series = []
    for colour, result in enumerate(chosen):
        offset = 0.06 * (colour - (len(chosen) - 1) / 2)
        points = [
            _interval_point(position + offset, value, f"{result.drafter}, position {position}:")
            for position, value in enumerate(result.acceptance_by_position, start=1)
            if value.value is not None
        ]
        series.append(Series(result.drafter, points, colour))
    temperature = chosen[0].temperature
    axes = Axes("position in the draft", "kept", y_max=_percent_top(series), percent=True)
    title = f"Kept drafts by position, {suite}, temperature {temperature:g}"
    return line_chart(title, series, axes)


def breakdown_plot(results: Results, drafter: str, by: str, label: str, temperature: float) -> str:
    """Acceptance rate of one drafter by ranges of something, a line a suite; empty for one range."""
    key = (drafter, by, temperature)
    chosen = [b for b in results.breakdown if (b.drafter, b.by, b.temperature) == key]
    groups = list(dict.fromkeys(b.group for b in sorted(chosen, key=lambda b: _edge(b.group))))
    if len(groups) < 2:
        return ""
    series = []
    for colour, suite in enumerate(suite.name for suite in results.suites):
        offset = 0.06 * colour  # apart, so that both intervals are seen
        points = [
            _interval_point(
                groups.index(b.group) + offset, b.acceptance_rate, f"{suite}, {b.group}:"
            )
            for b in chosen
            if b.suite == suite and b.acceptance_rate.value is not None
        ]
        if points:
            series.append(Series(suite, points, colour))
    top = _percent_top(series)
    axes = Axes(label, "accepted", y_max=top, percent=True, x_names=tuple(groups))
    title = f"Accepted of drafted by {by}, {drafter}, temperature {temperature:g}"
    return line_chart(title, series, axes)


def sweep_plots(results: Results) -> str:
    """Speedup by batch size and by context length, where those were swept: best length of each."""
    plots = []
    for label, is_batch in (("batch size", True), ("context, tokens", False)):
        best: dict[int, float] = {}
        for one in results.sweeps:
            if one.measured == is_batch:
                place = one.batch_size if is_batch else one.context_tokens
                best[place] = max(best.get(place, 0.0), one.speedup)
        if len(best) < 2:
            continue
        places = sorted(best)
        points = [Point(i, best[place], title=f"{place}: {best[place]:.2f}") for i, place in
                  enumerate(places)]  # fmt: skip
        axes = Axes(
            label,
            "speedup",
            reference=1.0,
            reference_label="break-even",
            x_names=tuple(map(str, places)),
        )
        how = "measured" if is_batch else "predicted"
        title = f"Speedup by {label.removesuffix(', tokens')}, {how}"
        plots.append(line_chart(title, [Series(results.sweeps[0].drafter, points, 0)], axes))
    return f'<div class="plots">{"".join(plots)}</div>' if plots else ""


def _percent_top(series: list[Series]) -> float:
    """The tenth above the highest interval, at most 100 %."""
    highs = [p.high if p.high is not None else p.y for one in series for p in one.points]
    return min(1.0, (int(10 * max(highs, default=0.9)) + 1) / 10)


def _edge(group: str) -> float:
    """The lower edge of a range, for sorting."""
    return -1.0 if group.startswith("<") else float(group.removeprefix(">= ").split(" to ")[0])
