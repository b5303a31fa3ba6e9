"""The timing of one suite: plain decoding and every drafter, interleaved, within a time limit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.config import EvaluationConfig
from eval.facts import Flag
from eval.progress import Stage
from eval.results import SpeedResult
from eval.speed import (
    NOISY_SPREAD,
    Decode,
    fit_to_time,
    speculative_decode,
    speed_result,
    spread,
    time_interleaved,
)
from eval.suites import EvalPrompt
from specdec_runtime.draft import Drafter
from specdec_runtime.target import Target

PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class TimedTexts:
    """Greedy texts of the first repeat, of the first prompts of the timed ones."""

    drafter: str
    num_draft_tokens: int | str  # or "auto"
    prompt_ids: list[str]
    token_ids: list[list[int]]


@dataclass(frozen=True, kw_only=True)
class SuiteTiming:
    """Speeds (a drafter's recommended draft length first), the timed texts, and remarks."""

    speeds: list[SpeedResult]
    texts: list[TimedTexts]
    flags: list[Flag]


def time_suite(
    target: Target,
    drafters: Mapping[str, Drafter],
    lengths: Mapping[str, Sequence[int | str]],
    prompts: Sequence[EvalPrompt],
    *,
    suite: str,
    config: EvaluationConfig,
    plain: Decode,
    limit_s: float,
    stage: Stage,
) -> SuiteTiming:
    """Time every drafter at its draft lengths against `plain`.

    Args:
        lengths: draft lengths by drafter, the recommended one first; or "auto".
        limit_s: seconds this may take; fewer repeats and prompts are used where it is short.
    """
    decoders: dict[str, Decode] = {PLAIN: plain}
    for name, drafter in drafters.items():
        for k in lengths[name]:
            decoders[_label(name, k)] = speculative_decode(target, drafter, k)
    ids = [prompt.token_ids for prompt in prompts]
    trial = plain(ids[0], config.max_new_tokens)
    plan = fit_to_time(
        trial.seconds * len(decoders),
        num_prompts=len(ids),
        num_repeats=config.speed_repeats,
        limit_s=limit_s,
    )
    total = plan.num_prompts * plan.num_repeats * len(decoders)
    with stage(f"timing, {suite}", total) as advance:
        timings = time_interleaved(
            decoders,
            ids[: plan.num_prompts],
            max_new_tokens=config.max_new_tokens,
            num_repeats=plan.num_repeats,
            on_decode=lambda: advance(1),
        )
    timed = [(name, k) for name in drafters for k in lengths[name]]
    return SuiteTiming(
        speeds=[
            speed_result(
                timings[PLAIN],
                timings[_label(name, k)],
                drafter=name,
                suite=suite,
                num_draft_tokens=k,
                num_resamples=config.num_resamples,
                seed=config.seed,
            )
            for name, k in timed
        ],
        texts=[
            TimedTexts(
                drafter=name,
                num_draft_tokens=k,
                prompt_ids=[prompt.id for prompt in prompts[: plan.num_prompts]],
                token_ids=[timing.token_ids for timing in timings[_label(name, k)][0]],
            )
            for name, k in timed
        ],
        flags=_remarks(suite, plan.num_prompts, len(ids), spread(timings[PLAIN])),
    )


def _label(drafter: str, num_draft_tokens: int | str) -> str:
    return f"{drafter} {num_draft_tokens}"


def _remarks(suite: str, timed: int, wanted: int, noise: float) -> list[Flag]:
    flags = []
    if timed < wanted:
        message = f"{suite}: {timed} instead of {wanted} prompts were timed, to stay in the limit"
        flags.append(Flag("note", "fewer_timed_prompts", message))
    if noise > NOISY_SPREAD:
        message = (
            f"{suite}: the speed of plain decoding varied by {noise:.0%}; other programs were "
            "running, so read speedups with care"
        )
        flags.append(Flag("warning", "noisy_machine", message))
    return flags
