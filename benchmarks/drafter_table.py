"""What the drafters' table and its scaling curve say, from the counts of their cells.

Prompts are what intervals are over: the counts of a row's seeds are added prompt by prompt, and two
rows are compared on the same prompts (eval/intervals.py). Two or three seeds give no interval of their
own; each seed's figure stands beside, so that a difference smaller than theirs is seen as such.

Shapes: S seeds, T repeats, P prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.drafter_cells import Cell, Choice, key
from eval.acceptance import length_interval, position_intervals
from eval.intervals import (
    Interval,
    crossed_ratio_interval,
    ratio_difference_interval,
    ratio_interval,
)
from specdec_runtime.stats import AcceptanceStats
from train.material import HELD_OUT

GREEDY, SAMPLED = key(HELD_OUT, 0.0), key(HELD_OUT, 1.0)
LK, KL, BASELINE, NO_DRAFT_VOCAB = "lk_hybrid", "forward_kl", "causal_lm", "draft_vocab_size=null"


@dataclass
class Row:
    """One drafter with one loss, its seeds in order.

    seconds: [S][T][P] of greedy decoding, at the draft length of each seed.
    """

    kind: str
    loss: str
    tokens: int | None = None
    cells: list[Cell] = field(default_factory=list)
    seconds: list[np.ndarray] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.kind} {self.loss}" if self.loss else self.kind

    def counts(self, suite: str) -> list[AcceptanceStats]:
        """[P] of a "suite T=temperature", over all seeds."""
        of_seeds = [cell.acceptance[suite] for cell in self.cells]
        return [added(of_prompt) for of_prompt in zip(*of_seeds, strict=True)]

    def lengths(self, suite: str) -> list[float]:
        """The acceptance length of each seed."""
        return [added(cell.acceptance[suite]).acceptance_length for cell in self.cells]

    @property
    def overlap(self) -> Interval:
        if not self.cells[0].overlaps:
            return Interval(None)
        summed = np.array([cell.overlaps for cell in self.cells]).sum(0)  # [P, 2]
        return ratio_interval(summed[:, 0], summed[:, 1])

    @property
    def total_seconds(self) -> np.ndarray:
        """[T, P] over all seeds."""
        return np.sum(self.seconds, axis=0)

    def speedup(self, plain: np.ndarray) -> Interval:
        """Over plain decoding [T, P] of the same prompts, timed in the same turns."""
        return crossed_ratio_interval(plain * len(self.seconds), self.total_seconds)


def added(counts: Sequence[AcceptanceStats]) -> AcceptanceStats:
    return sum(counts, AcceptanceStats())


def rows_of(choices: Sequence[Choice], cells: Sequence[Cell]) -> list[Row]:
    """Cells that differ in their seed alone, as rows, in the order of their first cells."""
    rows: dict[tuple[str, str, int | None], Row] = {}
    for choice, cell in zip(choices, cells, strict=True):
        place = (choice.kind, choice.loss, choice.tokens)
        rows.setdefault(place, Row(*place)).cells.append(cell)
    return list(rows.values())


def length_difference(first: Row, second: Row, suite: str) -> Interval:
    """Acceptance length of the second minus that of the first, on the same prompts."""
    sides = [
        ([one.num_accepted for one in counts], [one.num_rounds for one in counts])
        for counts in (first.counts(suite), second.counts(suite))
    ]
    return ratio_difference_interval(sides[0], sides[1])


def speed_ratio(first: Row, second: Row) -> Interval:
    """How many times as fast the second is as the first; both have as many seeds."""
    scale = len(second.seconds) / len(first.seconds)
    return crossed_ratio_interval(first.total_seconds * scale, second.total_seconds)


def table(rows: Sequence[Row], plain: np.ndarray | None) -> list[str]:
    """The table, one line a row; without `plain` no speed."""
    suites = list(rows[0].cells[0].acceptance)
    titles = ["drafter", "loss", "steps", "minutes", "overlap", "first token kept T=1"]
    titles += [f"{suite}, K=4" for suite in suites]
    titles += ["c"] + (["greedy speedup", "at K"] if plain is not None else [])
    lines = [_line(titles), "|" + "---|" * len(titles)]
    for row in rows:
        trained = [cell for cell in row.cells if cell.steps]
        found = [row.kind, row.loss or "-", _each([cell.steps for cell in trained])]
        found += [_each([f"{(c.start_s + c.training_s) / 60:.1f}" for c in trained])]
        first = position_intervals(row.counts(SAMPLED))[:1]  # none where nothing was drafted
        found += [text(row.overlap), text(first[0] if first else Interval(None))]
        found += [text(length_interval(row.counts(suite))) for suite in suites]
        found += [_each([f"{cell.draft_cost:.3f}" for cell in row.cells])]
        if plain is not None:
            found += [text(row.speedup(plain)), _each([c.draft_tokens for c in row.cells])]
        lines.append(_line(found))
    return lines


def findings(rows: Sequence[Row], plain: np.ndarray | None) -> list[str]:
    """What was asked of the table, each with its paired interval and a verdict."""
    trained = [row for row in rows if row.loss]
    lines = [
        _length_finding(kl, lk, suite)
        for lk in trained
        for kl in trained
        if lk.loss == LK and kl.loss == KL and lk.kind == kl.kind
        for suite in (SAMPLED, GREEDY)
    ]
    lines += [
        _length_finding(base, row, suite)
        for row in trained
        for base in trained
        if base.kind == BASELINE and row.kind in ("eagle3", "parallel") and row.loss == base.loss
        for suite in (GREEDY, SAMPLED)
    ]
    if plain is not None:
        lines += _speed_findings(rows, plain)
    return [f"- {line}" for line in lines]


def _speed_findings(rows: Sequence[Row], plain: np.ndarray) -> list[str]:
    lines = [
        _speed_finding(whole, row)
        for whole in rows
        for row in rows
        if NO_DRAFT_VOCAB in whole.kind and whole.loss == row.loss and is_reduced(whole, row)
    ]
    order = sorted(rows, key=lambda row: row.speedup(plain).value or 0.0, reverse=True)
    if len(order) > 1:
        lines.append(f"Fastest: {order[0].name}, {text(order[0].speedup(plain))}.")
        lines += [_speed_finding(second, first) for first, second in pairwise(order[:2])]
    return lines


def is_reduced(whole: Row, row: Row) -> bool:
    """Whether the row is the other one with a draft vocabulary, and nothing else apart."""
    settings = whole.kind.split(":")
    return row.kind.split(":") == [one for one in settings if NO_DRAFT_VOCAB not in one]


def _length_finding(first: Row, second: Row, suite: str) -> str:
    found = length_difference(first, second, suite)
    seeds = ", ".join(
        f"{b - a:+.3f}" for a, b in zip(first.lengths(suite), second.lengths(suite), strict=False)
    )
    return (
        f"{second.name} minus {first.name}, acceptance length, {suite}: {text(found, 3)}, by seed "
        f"{seeds}: {verdict(found, 0.0)}."
    )


def _speed_finding(first: Row, second: Row) -> str:
    found = speed_ratio(first, second)
    return f"{second.name} over {first.name}, greedy speed: {text(found)} x: {verdict(found, 1.0)}."


def verdict(found: Interval, nothing: float) -> str:
    """What an interval says about being above `nothing`."""
    if found.value is None or found.low is None or found.high is None:
        return "not known"
    if found.low > nothing:
        return "above"
    return "below" if found.high < nothing else "not told apart"


def curve_table(rows: Sequence[Row]) -> list[str]:
    """Acceptance against the tokens of the target's answers."""
    suites = list(rows[0].cells[0].acceptance)
    titles = ["drafter", "answer tokens", "trained tokens", "epochs", "minutes", "overlap"]
    titles += [f"{suite}, K=4" for suite in suites]
    lines = [_line(titles), "|" + "---|" * len(titles)]
    for row in rows:
        epochs = [cell.trained_tokens / cell.answer_tokens for cell in row.cells]
        found = [row.name, str(row.cells[0].answer_tokens)]
        found += [_each([cell.trained_tokens for cell in row.cells])]
        found += [_each([f"{number:.1f}" for number in epochs])]
        found += [_each([f"{cell.training_s / 60:.1f}" for cell in row.cells]), text(row.overlap)]
        found += [text(length_interval(row.counts(suite))) for suite in suites]
        lines.append(_line(found))
    return lines


def minutes_table(rows: Sequence[Row]) -> list[str]:
    """Acceptance against the minutes of training, as measured on the way on the selection prompts."""
    lines = [
        _line(["drafter", "answer tokens", "seed", "minutes: acceptance length"]),
        "|---|---|---|---|",
    ]
    for row in rows:
        for seed, cell in enumerate(row.cells):
            on_the_way = [f"{m.minutes:.1f}: {m.acceptance_length:.3f}" for m in cell.moments]
            lines.append(
                _line([row.name, str(cell.answer_tokens), str(seed), ", ".join(on_the_way)])
            )
    return lines


def text(found: Interval, digits: int = 2) -> str:
    if found.value is None:
        return "-"
    if found.low is None or found.high is None:
        return f"{found.value:.{digits}f}"
    return f"{found.value:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})"


def _each(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values)) or "-"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
