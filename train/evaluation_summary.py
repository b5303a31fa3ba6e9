"""What a run keeps of its evaluation: for `summary.json`, the drafter's manifest, and sweeps."""

from typing import Any

from eval.results import Results


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
