"""What a reader must know before trusting a number: findings over finished results."""

from eval.facts import Flag
from eval.results import AcceptanceResult, ReplayResult, Results, SampledReplay
from eval.verdict import deviation_message

_TEXT_KIND = "cross_tokenizer"
LOOPING_SHARE = 0.25  # of a suite's answers; more than this colours the acceptance of the suite


def flags_of(results: Results) -> list[Flag]:
    """Errors first: what contradicts itself, then what weakens a conclusion."""
    flags = [
        Flag("error", "not_exact", f"{c.drafter}: {c.summary}; its speedups are withheld")
        for c in results.exactness
        if not c.passed
    ]
    for replayed in results.replay:
        may_differ = results.target.dtype != "float32" or _drafts_text(results, replayed.drafter)
        flags += _replay_flags(replayed, may_differ=may_differ)
    flags += [_sampled_flag(one) for one in results.sampled_replay if one.agrees is False]
    for prediction in results.predictions:
        message = deviation_message(prediction)
        if message is not None:
            flags.append(Flag("error", "prediction_deviates", message))
    for acceptance in results.acceptance:
        flags += _acceptance_flags(acceptance)
    for suite in results.suites:
        if suite.num_too_long:
            message = (
                f"{suite.name}: {suite.num_too_long} prompts are too long for the target's "
                "context and were left out"
            )
            flags.append(Flag("note", "prompts_too_long", message))
        if suite.num_prompts < 2:
            message = f"{suite.name} has one prompt: no interval can be given, use two or more"
            flags.append(Flag("warning", "no_interval", message))
    return flags


def _drafts_text(results: Results, name: str) -> bool:
    """Whether it may write text in tokens of its own, which read otherwise in the target's when more is
    written: a long draft does not begin with the short one, and replay is an estimate."""
    kinds = {drafter.name: drafter.kind for drafter in results.drafters}
    own = kinds.get(name)
    return own == _TEXT_KIND or (own == "composite" and _TEXT_KIND in kinds.values())


def _replay_flags(replayed: ReplayResult, *, may_differ: bool) -> list[Flag]:
    place = f"{replayed.drafter} on {replayed.suite}"
    if replayed.agrees is False:
        message = (
            f"{place}: teacher-forced agreement {_value(replayed.round_start_agreement.value)} and "
            f"decoded acceptance {_value(replayed.decoded_first_acceptance.value)} at position 1 "
            "differ beyond their intervals: training and serving do not see the same model"
        )
        return [Flag("error", "teacher_forcing_disagrees", message)]
    if not replayed.exact:
        # Rounding may flip a token in 16 bit; in float32 the counts have to be equal.
        level = "note" if may_differ else "error"
        message = f"{place}: the counts of replay and decoding are not equal"
        return [Flag(level, "replay_not_exact", message)]
    return []


def _sampled_flag(sampled: SampledReplay) -> Flag:
    assert sampled.replayed is not None
    assert sampled.decoded is not None
    message = (
        f"{sampled.drafter} on {sampled.suite} at temperature {sampled.temperature:g}: acceptance "
        f"length {_value(sampled.replayed.value)} by replay and {_value(sampled.decoded.value)} by "
        "decoding differ beyond their intervals"
    )
    return Flag("error", "sampled_replay_disagrees", message)


def _acceptance_flags(acceptance: AcceptanceResult) -> list[Flag]:
    place = f"{acceptance.drafter} on {acceptance.suite} at temperature {acceptance.temperature:g}"
    flags = []
    if not acceptance.num_drafted:
        message = f"{place}: nothing was drafted, acceptance is n/a"
        flags.append(Flag("note", "nothing_drafted", message))
    if acceptance.num_looping > LOOPING_SHARE * acceptance.num_prompts:
        message = (
            f"{place}: {acceptance.num_looping} of {acceptance.num_prompts} answers repeat "
            "themselves, which makes them easy to draft"
        )
        flags.append(Flag("note", "looping", message))
    return flags


def _value(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"
