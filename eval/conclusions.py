"""From measurements to answers: certificates, predictions, verdicts and flags of all drafters."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from eval.acceptance import difference
from eval.exactness import certify
from eval.facts import Flag
from eval.flags import flags_of
from eval.prediction import predict
from eval.results import (
    Certificate,
    DrafterDifference,
    IdentityCheck,
    ReplayedLength,
    Results,
    SpeedResult,
)
from eval.verdict import judge
from specdec_runtime.target import Target

Key = tuple[str, str]  # (drafter, suite)


def conclude(
    results: Results,
    target: Target,
    checks: Mapping[str, Sequence[IdentityCheck]],
    lengths: Mapping[Key, Sequence[ReplayedLength]],
    *,
    self_draft_acceptance: float | None,
    notes: Sequence[Flag],
) -> None:
    """Fill in what follows from the measurements in `results`.

    Args:
        checks: identity checks by drafter; a failed one withholds the drafter's speedups.
        lengths: acceptance by draft length of each drafter and suite.
        notes: remarks made while measuring.
    """
    for name in [drafter.name for drafter in results.drafters]:
        certificate = certify(
            name,
            target,
            checks[name],
            engine=results.target.engine,
            self_draft_acceptance=self_draft_acceptance,
            sampling=results.sampling,
        )
        results.exactness.append(certificate)
        if not certificate.passed:
            results.speed = [withheld(s) if s.drafter == name else s for s in results.speed]
        for suite in results.suites:
            _conclude_one(results, name, suite.name, certificate, lengths[name, suite.name])
    results.differences = differences(results)
    results.flags = [*notes, *flags_of(results)]


def differences(results: Results) -> list[DrafterDifference]:
    """Acceptance of every other drafter against the first, where both drafted equally far."""
    by_key = {(a.drafter, a.suite, a.temperature): a for a in results.acceptance}
    found = []
    for other in results.acceptance:
        first = by_key[results.drafters[0].name, other.suite, other.temperature]
        if other is not first and other.num_draft_tokens == first.num_draft_tokens:
            one = difference(first, other, num_resamples=results.settings["num_resamples"])
            found += [] if one is None else [one]
    return found


def withheld(speed: SpeedResult) -> SpeedResult:
    """The record without its speedups: the text it was measured on is not the target's."""
    return replace(
        speed, speedup=None, decode_speedup=None, mean_prompt_speedup=None, repeat_speedups=[]
    )


def _conclude_one(
    results: Results,
    name: str,
    suite: str,
    certificate: Certificate,
    lengths: Sequence[ReplayedLength],
) -> None:
    costs = next(c for c in results.costs if c.drafter == name)
    speed = next((s for s in results.speed if (s.drafter, s.suite) == (name, suite)), None)
    prediction = predict(name, suite, lengths, costs, speed)
    drafted = any(
        a.num_drafted for a in results.acceptance if (a.drafter, a.suite) == (name, suite)
    )
    results.predictions.append(prediction)
    results.verdicts.append(judge(certificate, speed if drafted else None, prediction, costs))
