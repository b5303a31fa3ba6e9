"""Intervals of ratios over prompts: the clustered bootstrap.

Tokens of one prompt are not independent, prompts are: each resample draws whole prompts with
replacement and divides summed numerators by summed denominators (Davison and Hinkley 1997,
section 3.8). Everything takes counts; a ratio exists only here and in the report.

Times vary with the prompt and with the minute of the machine. Where every prompt was timed in several
repeats, minutes apart, prompts and repeats are drawn independently of each other: the pigeonhole
bootstrap (Owen 2007, doi:10.1214/07-AOAS122), which is mildly conservative. Of the few repeats one
fewer is drawn than there are, since drawing as many is too narrow by (T - 1) / T (Rao and Wu 1988,
doi:10.1080/01621459.1988.10478591).
Shapes: P prompts, T repeats, R resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 1000  # the smallest number at which 95 % percentiles are steady to about 2 %
COVERAGE = 0.95
NORMAL_QUANTILE = 1.959964  # of that coverage, two-sided


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval; None where it is not defined (nothing drafted, one prompt)."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def shifted(self, by: float) -> "Interval":
        """The interval of the same quantity plus a constant."""
        return Interval(*(None if x is None else x + by for x in (self.value, self.low, self.high)))

    def overlaps(self, other: "Interval") -> bool | None:
        """Whether the two intervals share a point; None where either has no bounds."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return None
        return self.low <= other.high and other.low <= self.high


def resampled_prompts(num_prompts: int, *, num_resamples: int, seed: int) -> np.ndarray:
    """[R, P] int64: which prompts each resample holds. Equal seeds pair two drafters' resamples."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, num_prompts, size=(num_resamples, num_prompts))


def ratio_interval(
    numerators: Sequence[float] | np.ndarray,
    denominators: Sequence[float] | np.ndarray,
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """sum(numerators) / sum(denominators) over prompts, with its bootstrap interval.

    Args:
        numerators, denominators: [P] counts or seconds, one entry a prompt.

    Returns:
        No value where the denominators sum to 0; no bounds where fewer than two prompts have one.
    """
    assert len(numerators) == len(denominators)
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    if bottom.sum() == 0:
        return Interval(None)
    value = float(top.sum() / bottom.sum())
    if np.count_nonzero(bottom) < 2:  # resamples of one prompt's ratio are that ratio
        return Interval(value)
    drawn = resampled_prompts(len(top), num_resamples=num_resamples, seed=seed)
    return _with_bounds(value, top[drawn].sum(-1), bottom[drawn].sum(-1))


def ratio_difference_interval(
    first: tuple[Sequence[float], Sequence[float]],
    second: tuple[Sequence[float], Sequence[float]],
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Paired difference second - first of two ratios measured on the same prompts.

    Args:
        first, second: (numerators [P], denominators [P]); entry i of both is prompt i.
    """
    counts = np.asarray([*first, *second], float)  # [4, P]
    totals = counts.sum(-1)
    if totals[1] == 0 or totals[3] == 0:
        return Interval(None)
    value = float(totals[2] / totals[3] - totals[0] / totals[1])
    if counts.shape[1] < 2:
        return Interval(value)
    drawn = resampled_prompts(counts.shape[1], num_resamples=num_resamples, seed=seed)
    sums = counts[:, drawn].sum(-1)  # [4, R]
    kept = sums[:, (sums[1] > 0) & (sums[3] > 0)]
    return _percentiles(value, kept[2] / kept[3] - kept[0] / kept[1])


def crossed_ratio_interval(
    numerators: Sequence[Sequence[float]] | np.ndarray,
    denominators: Sequence[Sequence[float]] | np.ndarray,
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Ratio of sums over prompts of medians over repeats; prompts and repeats are both resampled.

    Args:
        numerators, denominators: [T, P] seconds. One repeat: an interval over prompts alone.
    """
    times = np.asarray([numerators, denominators], float)
    top, bottom = np.median(times, 1).sum(-1)
    if times.shape[2] < 2:
        return Interval(float(top / bottom))
    prompts = resampled_prompts(times.shape[2], num_resamples=num_resamples, seed=seed)
    tops, bottoms = _crossed_sums(times, prompts, seed=seed)
    return _percentiles(float(top / bottom), tops / bottoms)


def crossed_difference_interval(
    first: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]],
    second: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]],
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Difference second - first of two such ratios: the same prompts, timed in two runs.

    Prompts are drawn for both runs together, repeats for each run by itself, since the minutes of one
    say nothing of those of the other.

    Args:
        first, second: (numerators [T, P], denominators [T, P]); T may differ.
    """
    sides = [np.asarray(side, float) for side in (first, second)]
    ratios = [top / bottom for top, bottom in (np.median(side, 1).sum(-1) for side in sides)]
    value = float(ratios[1] - ratios[0])
    if sides[0].shape[2] < 2:
        return Interval(value)
    prompts = resampled_prompts(sides[0].shape[2], num_resamples=num_resamples, seed=seed)
    before, after = (_crossed_sums(side, prompts, seed=seed + i) for i, side in enumerate(sides))
    return _percentiles(value, after[0] / after[1] - before[0] / before[1])


def _crossed_sums(times: np.ndarray, prompts: np.ndarray, *, seed: int) -> np.ndarray:
    """[2, R] of [2, T, P] times: sums over drawn prompts [R, P] of medians over drawn repeats."""
    num_repeats, num_resamples = times.shape[1], len(prompts)
    generator = np.random.default_rng([seed, num_repeats])  # not the stream of the prompts
    size = (num_resamples, max(num_repeats - 1, 1))
    repeats = generator.integers(0, num_repeats, size=size)
    medians = np.median(times[:, repeats], 2)  # [2, R, P]
    return np.take_along_axis(medians, prompts[None], 2).sum(-1)


def mean_interval(
    values: Sequence[float | None], *, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Interval:
    """Mean over prompts (macro: each prompt counts once); prompts without a value are left out."""
    defined = [value for value in values if value is not None]
    return ratio_interval(defined, [1.0] * len(defined), num_resamples=num_resamples, seed=seed)


def proportion_interval(successes: float, trials: float) -> Interval:
    """successes / trials of independent trials (Wilson 1927): it has a width at 0 and 1 too."""
    if trials == 0:
        return Interval(None)
    value = successes / trials
    spread = NORMAL_QUANTILE**2 / trials
    centre = (value + spread / 2) / (1 + spread)
    half = ((value * (1 - value) + spread / 4) * spread) ** 0.5 / (1 + spread)
    return Interval(value, max(0.0, centre - half), min(1.0, centre + half))


def _with_bounds(value: float, tops: np.ndarray, bottoms: np.ndarray) -> Interval:
    """Bounds from the resamples whose denominator is not 0."""
    kept = bottoms > 0
    return _percentiles(value, tops[kept] / bottoms[kept])


def _percentiles(value: float, resampled: np.ndarray) -> Interval:
    tail = 100 * (1 - COVERAGE) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Interval(value, float(low), float(high))
