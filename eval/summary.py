"""What a run keeps of its evaluation: `summary.json`, the drafter's manifest, sweeps, trackers."""

from typing import Any

from eval.intervals import Interval
from eval.results import Results
from eval.trackers import Rows


def summary_of(results: Results, name: str) -> dict[str, Any]:
    """The figures of drafter `name` on the first suite, and the verdict.

    acceptance_length: greedy; `exact`: whether the texts are the target's.
    """
    suite = results.suites[0].name
    verdict = next((v for v in results.verdicts if (v.drafter, v.suite) == (name, suite)), None)
    exact = all(one.passed for one in results.exactness if one.drafter == name)
    values = measured_values(results, name)
    return {
        "acceptance_length": values.get(f"acceptance_length_{suite}_t0"),
        "speedup": values.get(f"speedup_{suite}"),
        "exact": exact,
        "verdict": verdict.sentence if verdict else None,
        **values,
    }


def measured_values(results: Results, name: str) -> dict[str, float | None]:
    """Acceptance by suite and temperature, speedup by suite: what the manifest says was measured."""
    values: dict[str, float | None] = {}
    for one in results.acceptance:
        if one.drafter == name:
            place = f"{one.suite}_t{one.temperature:g}"
            values[f"acceptance_length_{place}"] = one.acceptance_length.value
            values[f"acceptance_rate_{place}"] = one.acceptance_rate.value
    for speed in results.speed:
        key = f"speedup_{speed.suite}"
        if speed.drafter == name and key not in values:  # the recommended length is timed first
            values[key] = speed.speedup.value if speed.speedup is not None else None
    return values


def recommended_values(results: Results, name: str) -> dict[str, int]:
    """The draft length that the cost model finds best on the first suite."""
    suite = results.suites[0].name
    best = [
        one.best_num_draft_tokens
        for one in results.predictions
        if (one.drafter, one.suite) == (name, suite) and one.best_num_draft_tokens > 0
    ]
    return {"num_draft_tokens": best[0]} if best else {}


def tables_of(results: Results) -> dict[str, Rows]:
    """The figures of the page as tables for a tracker: a row a drafter, suite and so on."""
    bounds = ["value", "low", "high"]
    speed: list[list[Any]] = [
        [s.drafter, s.suite, s.num_draft_tokens, *_bounds(s.speedup), s.ms_per_token]
        for s in results.speed
    ]
    positions: list[list[Any]] = [
        [a.drafter, a.suite, a.temperature, position, *_bounds(value)]
        for a in results.acceptance
        for position, value in enumerate(a.acceptance_by_position, start=1)
    ]
    lengths: list[list[Any]] = [
        [a.drafter, a.suite, a.temperature, a.num_draft_tokens, *_bounds(a.acceptance_length)]
        for a in results.acceptance
    ]
    groups: list[list[Any]] = [
        [
            b.drafter,
            b.suite,
            b.temperature,
            b.by,
            b.group,
            b.num_drafted,
            *_bounds(b.acceptance_rate),
        ]
        for b in results.breakdown
    ]
    changes: list[list[Any]] = [
        [p.drafter, p.suite, one.name, one.speedup, one.assumes]
        for p in results.predictions
        for one in p.what_if
    ]
    where = ["drafter", "prompts"]
    return {
        "speedup": Rows([*where, "draft length", *bounds, "ms a token"], speed),
        "acceptance_length": Rows([*where, "temperature", "draft length", *bounds], lengths),
        "acceptance_by_position": Rows([*where, "temperature", "position", *bounds], positions),
        "acceptance_by_place": Rows(
            [*where, "temperature", "by", "group", "drafted", *bounds], groups
        ),
        "what_if": Rows([*where, "if", "predicted speedup", "assumes"], changes),
    }


def _bounds(value: Interval | None) -> list[float | None]:
    return [None] * 3 if value is None else [value.value, value.low, value.high]
