"""The scaling curve as SVG files: the report's own plot (eval/charts.py), made to stand alone."""

from collections.abc import Sequence
from html import escape

from benchmarks.drafter_table import Row
from eval.acceptance import length_interval
from eval.charts import HEIGHT, LEFT, WIDTH, Axes, Point, Series, line_chart

COLOURS = ("#2c6e9c", "#b9602b", "#4d8050", "#7d5fa6", "#8a8f96", "#a8842c")
LEGEND_LINE = 15  # units a line of the legend takes
STYLE = (
    "svg{background:#fff;font:11px sans-serif}.grid{stroke:#ddd}.line{fill:none;stroke-width:2}"
    "text{fill:#444}"
) + "".join(
    f".s{i}{{stroke:{colour}}}circle.s{i},text.s{i}{{fill:{colour};stroke:none}}"
    for i, colour in enumerate(COLOURS)
)


def curve_plots(rows: Sequence[Row]) -> dict[str, str]:
    """{file name: SVG} of acceptance against answer tokens, and against minutes of training."""
    axes = [Axes(x, "acceptance length", y_min=1.0) for x in ("thousand answer tokens", "minutes")]
    return {
        "curve_tokens.svg": standalone(by_tokens(rows), axes[0]),
        "curve_minutes.svg": standalone(by_minutes(rows), axes[1]),
    }


def by_tokens(rows: Sequence[Row]) -> list[Series]:
    """A line for each drafter and suite, seeds pooled."""
    names = list(dict.fromkeys(row.name for row in rows))
    lines = [(name, suite) for name in names for suite in rows[0].cells[0].acceptance]
    return [
        Series(f"{name}, {suite}", [_point(row, suite) for row in rows if row.name == name], i)
        for i, (name, suite) in enumerate(lines)
    ]


def by_minutes(rows: Sequence[Row]) -> list[Series]:
    """A line for each row, of its first seed."""
    return [
        Series(
            f"{row.name}, {row.cells[0].answer_tokens} tokens",
            [Point(one.minutes, one.acceptance_length) for one in row.cells[0].moments],
            i,
        )
        for i, row in enumerate(rows)
    ]


def standalone(series: Sequence[Series], axes: Axes) -> str:
    """The plot as a file of its own, with its colours and its legend below."""
    title = f"{axes.y_label} by {axes.x_label}"
    shown = [Series(s.name, s.points, s.colour % len(COLOURS)) for s in series]
    figure = line_chart(title, shown, axes)
    body = figure[figure.index(">", figure.index("<svg ")) + 1 : figure.index("</svg>")]
    legend = "".join(
        f'<text class="s{one.colour}" x="{LEFT}" y="{HEIGHT + LEGEND_LINE * (i + 1)}">'
        f"{escape(one.name)}</text>"
        for i, one in enumerate(shown)
    )
    height = HEIGHT + LEGEND_LINE * (len(shown) + 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}"><style>{STYLE}</style>{body}{legend}</svg>\n'
    )


def _point(row: Row, suite: str) -> Point:
    found = length_interval(row.counts(suite))
    assert found.value is not None
    return Point(row.cells[0].answer_tokens / 1000, found.value, found.low, found.high)
