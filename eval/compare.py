"""`python -m eval.compare A B ...`: did the later evaluations get better or worse than the first?

They are evaluation folders or results.json files of the same target and prompts. Acceptance and
speed are compared prompt by prompt (paired bootstrap); speed has the repeats of each evaluation
resampled too, for what the machine did to it. For CI: exit code 1 where a later one is worse by more
than the margin and the interval of the difference excludes 0.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.intervals import (
    Interval,
    crossed_difference_interval,
    crossed_ratio_interval,
    ratio_difference_interval,
)
from eval.records import read_json
from eval.results import AcceptanceResult, PromptTimes, Results, SpeedResult

Times = list[tuple[float, ...]]  # [repeat][prompt]


@dataclass(frozen=True)
class Difference:
    """One figure of both evaluations. `change`: second - first, paired where prompts are shared."""

    what: str
    suite: str
    first: float
    second: float
    change: Interval
    num_prompts: int

    @property
    def is_sure(self) -> bool:
        """Whether the interval of the difference leaves out 0."""
        low, high = self.change.low, self.change.high
        return low is not None and high is not None and (low > 0 or high < 0)

    def is_worse(self, margin: float) -> bool:
        """Whether the second is lower by more than `margin` and surely lower at all."""
        value, high = self.change.value, self.change.high
        return value is not None and value < -margin and (high is None or high < 0)


def compare(first: Results, second: Results) -> list[Difference]:
    """Differences of the main drafters of two evaluations, by suite and temperature.

    Raises:
        ValueError: different targets, or nothing in common to compare.
    """
    if first.target.fingerprint != second.target.fingerprint:
        raise ValueError(
            f"the evaluations are of different targets ({first.target.name}, "
            f"{second.target.name}): compare drafters of one target"
        )
    differences = _acceptance_differences(first, second) + _speed_differences(first, second)
    if not differences:
        raise ValueError(
            "the evaluations have no suite, temperature and prompt in common: repeat the second "
            "with prompts= of the first"
        )
    return differences


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.compare", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("first", type=Path, help="evaluation folder or results.json")
    parser.add_argument("later", type=Path, nargs="+", help="each is compared with the first")
    parser.add_argument(
        "--margin",
        type=float,
        default=0.02,
        help="how much lower (tokens a round, or speedup) a later one may be; default 0.02",
    )
    given = parser.parse_args(arguments)
    try:
        first = read_results(given.first)
        found = [compare(first, read_results(path)) for path in given.later]
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path, differences in zip(given.later, found, strict=True):
        if len(found) > 1:
            print(f"{path}:")
        for one in differences:
            print(_line(one, one.is_worse(given.margin)))
        if not any(one.is_sure for one in differences):
            print("no figure differs beyond its 95 % interval")
    return int(any(one.is_worse(given.margin) for differences in found for one in differences))


def read_results(path: Path) -> Results:
    """The results in an evaluation folder or file.

    Raises:
        ValueError: the file is not one, or of another schema version.
    """
    file = path / "results.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} holds no results.json: expected an evaluation folder")
    try:
        return read_json(file, Results)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a results file of this version ({error})") from error


def _acceptance_differences(first: Results, second: Results) -> list[Difference]:
    found = []
    for before in _main(first.acceptance, first):
        for after in _main(second.acceptance, second):
            key = (before.suite, before.temperature, before.num_draft_tokens)
            if key == (after.suite, after.temperature, after.num_draft_tokens):
                difference = _length_difference(before, after)
                found += [difference] if difference is not None else []
    return found


def _length_difference(before: AcceptanceResult, after: AcceptanceResult) -> Difference | None:
    """Acceptance length on the shared prompts; None if there are none or nothing was decoded."""
    ours = {p.prompt_id: p for p in before.prompts}
    shared = [(ours[p.prompt_id], p) for p in after.prompts if p.prompt_id in ours]
    counts = [
        ([float(p.num_accepted) for p in side], [float(p.num_rounds) for p in side])
        for side in zip(*shared, strict=True)
    ]
    if not counts or not all(sum(rounds) for _, rounds in counts):
        return None
    lengths = [1.0 + sum(accepted) / sum(rounds) for accepted, rounds in counts]
    what = (
        f"acceptance length, temperature {before.temperature:g}, {before.num_draft_tokens} drafted"
    )
    change = ratio_difference_interval(counts[0], counts[1])
    return Difference(what, before.suite, lengths[0], lengths[1], change, len(shared))


def _speed_differences(first: Results, second: Results) -> list[Difference]:
    """Speedups at the recommended lengths, on the prompts that both have timed."""
    found = []
    for suite in [suite.name for suite in first.suites]:
        before, after = (
            next((s for s in _main(r.speed, r) if s.suite == suite), None) for r in (first, second)
        )
        if before is None or after is None or before.speedup is None or after.speedup is None:
            continue
        difference = _speedup_difference(before, after)
        found += [difference] if difference is not None else []
    return found


def _speedup_difference(before: SpeedResult, after: SpeedResult) -> Difference | None:
    """None where they share no timed prompt (or were written when times were not kept by prompt)."""
    ours = {prompt.prompt_id: prompt for prompt in before.prompts}
    shared = [(ours[p.prompt_id], p) for p in after.prompts if p.prompt_id in ours]
    if not shared:
        return None
    first, second = (_times(side) for side in zip(*shared, strict=True))
    ratios = [crossed_ratio_interval(*side).value for side in (first, second)]
    assert ratios[0] is not None
    assert ratios[1] is not None
    lengths = dict.fromkeys((before.num_draft_tokens, after.num_draft_tokens))
    what = f"speedup, {' and '.join(map(str, lengths))} drafted"
    change = crossed_difference_interval(first, second)
    return Difference(what, before.suite, ratios[0], ratios[1], change, len(shared))


def _times(prompts: Sequence[PromptTimes]) -> tuple[Times, Times]:
    """Plain and speculative seconds [repeat][prompt]; per token of plain decoding."""
    plain = [prompt.plain_s for prompt in prompts]
    speculative = [
        [s * prompt.num_plain_tokens / prompt.num_tokens for s in prompt.speculative_s]
        for prompt in prompts
    ]
    return list(zip(*plain, strict=True)), list(zip(*speculative, strict=True))


def _main(records: Sequence, results: Results) -> list:
    """The records of the drafter that an evaluation is about."""
    return [record for record in records if record.drafter == results.drafters[0].name]


def _line(one: Difference, worse: bool) -> str:
    change = one.change
    bounds = "" if change.low is None else f" ({change.low:+.3f} to {change.high:+.3f})"
    mark = "  WORSE" if worse else ""
    return (
        f"{one.suite}: {one.what}: {one.first:.3f} -> {one.second:.3f}, "
        f"{change.value:+.3f}{bounds}, {one.num_prompts} prompts{mark}"
    )


if __name__ == "__main__":
    sys.exit(main())
