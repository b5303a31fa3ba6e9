"""The timing of all suites: plain decoding and every drafter side by side, within a time limit.

A repeat goes through all prompts of all suites, the suites in turns, before the next one begins: the
repeats of a prompt are minutes apart, as far as the time limit lets them be, and every suite sees
the whole of that time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from eval.config import EvaluationConfig
from eval.facts import Flag
from eval.parts import Parts
from eval.progress import Stage
from eval.results import SpeedResult
from eval.speed import (
    NOISY_SPREAD,
    Decode,
    Plan,
    Timing,
    fit_to_time,
    speculative_decode,
    speed_result,
    spread,
    time_prompt,
    warm_up,
    whole,
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
class TimedSuite:
    """What is timed of a suite.

    lengths: draft lengths by drafter, the recommended one first; or "auto".
    """

    prompts: Sequence[EvalPrompt]
    lengths: Mapping[str, Sequence[int | str]]

    @property
    def pairs(self) -> list[tuple[str, int | str]]:
        return [(name, length) for name, lengths in self.lengths.items() for length in lengths]


@dataclass(frozen=True, kw_only=True)
class SuiteTiming:
    """Speeds (a drafter's recommended draft length first), the timed texts, and how much the speed of
    plain decoding varied."""

    speeds: list[SpeedResult]
    texts: list[TimedTexts]
    noise: float


def time_suites(
    target: Target,
    drafters: Mapping[str, Drafter],
    suites: Mapping[str, TimedSuite],
    *,
    config: EvaluationConfig,
    plain: Decode,
    limit_s: float,
    parts: Parts,
    stage: Stage,
) -> dict[str, SuiteTiming]:
    """Time every drafter at its draft lengths against `plain`, on all suites.

    Args:
        limit_s: seconds this may take; fewer repeats and prompts are used where it is short.
        parts: where the times of every prompt are kept.
    """
    decoders = {
        name: {PLAIN: plain}
        | {
            _label(drafter, length): speculative_decode(target, drafters[drafter], length)
            for drafter, length in suite.pairs
        }
        for name, suite in suites.items()
    }
    plan = Plan(
        *parts.get("timing plan", list[int], lambda: list(_plan(suites, plain, config, limit_s)))
    )
    chosen = {name: suite.prompts[: plan.num_prompts] for name, suite in suites.items()}
    timings: dict[str, list[list[dict[str, Timing]]]] = {name: [] for name in suites}
    with stage("timing", plan.num_repeats * sum(map(len, chosen.values()))) as advance:
        for name, prompts in chosen.items():
            warm_up(decoders[name], prompts[0].token_ids)
        for repeat in range(plan.num_repeats):
            for of_suite in timings.values():
                of_suite.append([])
            for index, name in _in_turns(chosen):
                prompt, turn = chosen[name][index].token_ids, repeat + index
                compute = partial(
                    time_prompt,
                    decoders[name],
                    prompt,
                    max_new_tokens=config.max_new_tokens,
                    turn=turn,
                )
                part = f"timing {name} {repeat} {index}"
                timings[name][-1].append(parts.get(part, dict[str, Timing], compute))
                advance(1)
    return {
        name: _result(name, suite, chosen[name], timings[name], config)
        for name, suite in suites.items()
    }


def _in_turns(prompts: Mapping[str, Sequence[EvalPrompt]]) -> Iterator[tuple[int, str]]:
    """(index, suite) of every prompt: the first of each suite, the second of each, ..."""
    for index in range(max(map(len, prompts.values()))):
        yield from ((index, name) for name, of_suite in prompts.items() if index < len(of_suite))


def _plan(
    suites: Mapping[str, TimedSuite], plain: Decode, config: EvaluationConfig, limit_s: float
) -> Plan:
    """How much of it fits the limit, by one plain decode of each suite."""
    seconds_a_prompt = sum(
        whole(plain(suite.prompts[0].token_ids, config.max_new_tokens)).seconds
        * (1 + len(suite.pairs))
        for suite in suites.values()
    )
    return fit_to_time(
        seconds_a_prompt,
        num_prompts=max(len(suite.prompts) for suite in suites.values()),
        num_repeats=config.speed_repeats,
        limit_s=limit_s,
    )


def _result(
    name: str,
    suite: TimedSuite,
    prompts: Sequence[EvalPrompt],
    repeats: Sequence[Sequence[Mapping[str, Timing]]],
    config: EvaluationConfig,
) -> SuiteTiming:
    ids = [prompt.id for prompt in prompts]
    timings = {
        decoder: [[one[decoder] for one in repeat] for repeat in repeats]
        for decoder in repeats[0][0]
    }
    return SuiteTiming(
        speeds=[
            speed_result(
                timings[PLAIN],
                timings[_label(drafter, length)],
                drafter=drafter,
                suite=name,
                num_draft_tokens=length,
                num_resamples=config.num_resamples,
                seed=config.seed,
                prompt_ids=ids,
            )
            for drafter, length in suite.pairs
        ],
        texts=[
            TimedTexts(
                drafter=drafter,
                num_draft_tokens=length,
                prompt_ids=ids,
                token_ids=[timing.token_ids for timing in timings[_label(drafter, length)][0]],
            )
            for drafter, length in suite.pairs
        ],
        noise=spread(timings[PLAIN]),
    )


def _label(drafter: str, num_draft_tokens: int | str) -> str:
    return f"{drafter} {num_draft_tokens}"


def remarks(timings: Mapping[str, SuiteTiming], wanted: Mapping[str, TimedSuite]) -> list[Flag]:
    """What a reader has to know of the timing, once for all suites.

    Args:
        wanted: what was to be timed.
    """
    flags = []
    timed = {name: timing.speeds[0].num_prompts for name, timing in timings.items()}
    fewer = [name for name, number in timed.items() if number < len(wanted[name].prompts)]
    if fewer:
        message = (
            f"{timed[fewer[0]]} prompts of {', '.join(fewer)} were timed, to stay in the limit"
        )
        flags.append(Flag("note", "fewer_timed_prompts", message))
    if all(timing.speeds[0].num_repeats == 1 for timing in timings.values()):
        message = (
            "everything was timed once, so the intervals of speed do not know what the machine does from "
            "one minute to the next; raise evaluation.time_limit_s"
        )
        flags.append(Flag("warning", "one_repeat", message))
    noisy = {name: timing.noise for name, timing in timings.items() if timing.noise > NOISY_SPREAD}
    if noisy:
        message = (
            f"the speed of plain decoding varied by up to {max(noisy.values()):.0%} ({', '.join(noisy)}): "
            "other programs were running. Speedups compare decoders that ran side by side, so that "
            "little of it is in them; tokens a second have all of it"
        )
        flags.append(Flag("note", "noisy_machine", message))
    return flags
