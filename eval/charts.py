"""Plots of the report as SVG text, coloured by the page's CSS variables (light and dark alike).

Every plot is drawn for a box 360 units wide, the width of a phone, so that its text stays
readable there; on wide screens plots stand side by side. Colours: classes s0, s1, ... of
report.css. Exact values are in <title> elements, which browsers show on hover, and in the
tables beside the plots.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 360, 236
LEFT, RIGHT, TOP, BOTTOM = 38, 12, 12, 40
MAX_TICKS = 16  # numbers below a plot that do not touch


@dataclass(frozen=True)
class Point:
    """One value with its interval; `low` and `high` None = no interval is drawn."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    title: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one thing. line: joined; marks: drawn as dots with interval bars."""

    name: str
    points: list[Point]
    colour: int
    line: bool = True
    marks: bool = True
    dashed: bool = False


@dataclass(frozen=True)
class Axes:
    """Ranges, labels and an optional horizontal reference line of a plot.

    x_names: names of the places 0, 1, ... where x counts groups instead of measuring something.
    """

    x_label: str
    y_label: str
    y_min: float = 0.0
    y_max: float | None = None
    reference: float | None = None
    reference_label: str = ""
    percent: bool = False
    x_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bar:
    """One row of a bar list: a part [start, end] of a common scale, with the value written out."""

    name: str
    start: float
    end: float
    label: str
    kind: str = "s0"
    title: str = ""


@dataclass
class _Frame:
    """Maps values to the plot's units."""

    x_min: float
    x_max: float
    y_min: float
    y_max: float
    parts: list[str] = field(default_factory=list)

    def x(self, value: float) -> float:
        span = self.x_max - self.x_min or 1.0
        inset = 14  # keeps the first and the last mark off the frame
        usable = WIDTH - LEFT - RIGHT - 2 * inset
        return LEFT + inset + usable * (value - self.x_min) / span

    def y(self, value: float) -> float:
        span = self.y_max - self.y_min or 1.0
        clipped = min(max(value, self.y_min), self.y_max)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (clipped - self.y_min) / span


def line_chart(title: str, series: Sequence[Series], axes: Axes) -> str:
    """An SVG plot with integer x ticks (draft lengths, positions) and a legend below it."""
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    highs = [point.high if point.high is not None else point.y for point in points]
    reference = [] if axes.reference is None else [axes.reference * 1.05]
    top = axes.y_max if axes.y_max is not None else _round_up(max([*highs, *reference]))
    frame = _Frame(
        min(point.x for point in points), max(point.x for point in points), axes.y_min, top
    )
    ticks = sorted({round(point.x) for point in points})
    _draw_axes(frame, axes, ticks[:: math.ceil(len(ticks) / MAX_TICKS)])
    for one in series:
        _draw_series(frame, one)
    named = axes.reference is not None and bool(axes.reference_label)
    legend = _legend(series, axes) if len(series) > 1 or named else ""
    body = "".join(frame.parts)
    return (
        f'<figure class="plot"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg>'
        f"{legend}</figure>"
    )


def bar_list(title: str, bars: Sequence[Bar], *, reference: float | None = None) -> str:
    """Horizontal bars on one scale, each with its name above and its value behind it."""
    if not bars:
        return ""
    reach = max([bar.end for bar in bars] + ([] if reference is None else [reference])) or 1.0
    row, label_space = 38, 74
    height = row * len(bars) + 6
    scale = (WIDTH - label_space) / reach
    parts = []
    for index, bar in enumerate(bars):
        y = index * row
        if reference is not None:  # beside the bars alone, not through their names
            x = reference * scale
            ends = f'x1="{x:.1f}" y1="{y + 17}" x2="{x:.1f}" y2="{y + 33}"'
            parts.append(f'<line class="reference" {ends}/>')
        left, width = bar.start * scale, max((bar.end - bar.start) * scale, 1.5)
        tip = f"<title>{escape(bar.title)}</title>" if bar.title else ""
        parts.append(
            f'<text class="name" x="0" y="{y + 13}">{escape(bar.name)}</text>'
            f'<rect class="{bar.kind}" x="{left:.1f}" y="{y + 18}" width="{width:.1f}" '
            f'height="12" rx="2">{tip}</rect>'
            f'<text class="value" x="{left + width + 6:.1f}" y="{y + 28}">{escape(bar.label)}</text>'
        )
    return (
        f'<figure class="plot"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _draw_axes(frame: _Frame, axes: Axes, x_values: list[int]) -> None:
    step = _tick_step(frame.y_max - frame.y_min)
    tick = frame.y_min
    while tick <= frame.y_max + 1e-9:
        y = frame.y(tick)
        label = f"{tick:.0%}" if axes.percent else f"{tick:g}"
        frame.parts.append(
            f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )
        tick = round(tick + step, 10)
    for value in x_values:
        name = axes.x_names[value] if axes.x_names else str(value)
        frame.parts.append(
            f'<text class="tick" x="{frame.x(value):.1f}" y="{HEIGHT - BOTTOM + 16}" '
            f'text-anchor="middle">{escape(name)}</text>'
        )
    if axes.reference is not None:
        y = frame.y(axes.reference)
        frame.parts.append(
            f'<line class="reference" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    frame.parts.append(
        f'<text class="axis" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(axes.x_label)}</text>"
    )


def _draw_series(frame: _Frame, series: Series) -> None:
    colour = f"s{series.colour}"
    places = [(frame.x(point.x), frame.y(point.y)) for point in series.points]
    if series.line and len(places) > 1:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        frame.parts.append(f'<path class="line {colour}{_dashes(series)}" d="{path}"/>')
    if not series.marks:
        return
    for point, (x, y) in zip(series.points, places, strict=True):
        if point.low is not None and point.high is not None:
            frame.parts.append(
                f'<line class="interval {colour}" x1="{x:.1f}" y1="{frame.y(point.low):.1f}" '
                f'x2="{x:.1f}" y2="{frame.y(point.high):.1f}"/>'
            )
        title = escape(point.title or f"{series.name}: {point.y:.3g}")
        frame.parts.append(
            f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{title}</title></circle>'
        )


def _legend(series: Sequence[Series], axes: Axes) -> str:
    """What each colour is, and the reference line: its name inside the plot would lie on curves."""
    first = {one.colour: one for one in reversed(series)}  # a colour is one thing, named once
    items = [(f"s{one.colour}{_swatch(one)}", one.name) for _, one in sorted(first.items())]
    if axes.reference_label:
        items.append(("reference", axes.reference_label))
    spans = "".join(f'<span><i class="{kind}"></i>{escape(name)}</span>' for kind, name in items)
    return f'<div class="legend">{spans}</div>'


def _swatch(series: Series) -> str:
    return _dashes(series) if series.line else " dot"


def _dashes(series: Series) -> str:
    return " dashed" if series.dashed else ""


def _tick_step(span: float) -> float:
    """A step of 1, 2 or 5 times a power of ten that gives three to six ticks."""
    power = 10.0 ** (len(f"{span:.0f}") - 2 if span >= 10 else -1)
    while span / power > 60:
        power *= 10
    return next(power * m for m in (1, 2, 5, 10, 20, 50, 100) if span / (power * m) <= 6 + 1e-9)


def _round_up(value: float) -> float:
    """The next tick above a value, so that the frame ends on a line."""
    step = _tick_step(max(value, 1e-6))
    ticks = int(value / step)
    return step * (ticks if abs(ticks * step - value) < 1e-9 else ticks + 1)
