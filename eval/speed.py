"""Speed: plain against speculative decoding of the same prompts, interleaved, batch size 1.

Every decoder decodes every prompt in turn, repeat after repeat, in rotating order, so that a slow
minute of the machine hits all of them. Per prompt the median over repeats counts; a speedup is a
ratio of sums over prompts, per token. The baseline is the fastest plain decoding of the same target
that this product has (its engine, or transformers' own generate), never a slower one.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from eval.cost_model import RoundParts
from eval.exactness import greedy_arguments
from eval.intervals import ratio_interval
from eval.results import SpeedResult
from specdec_runtime.auto_length import MAX_DRAFT_TOKENS
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft import Drafter
from specdec_runtime.results import Generation
from specdec_runtime.stats import AcceptanceStats
from specdec_runtime.target import Target

WARM_UP_TOKENS = 8
NOISY_SPREAD = 0.10  # plain repeats that differ by more than this are reported as noise


@dataclass(frozen=True)
class Timing:
    """One prompt decoded once.

    start_s: prefill, and the drafter's first look at the prompt. drafted: by round, as submitted
    to the target. parts: sums over the rounds, that first look left out. stats, parts, drafted: None
    and empty where transformers decoded.
    """

    seconds: float
    first_token_s: float
    start_s: float
    token_ids: list[int]
    stats: AcceptanceStats | None = None
    drafted: tuple[int, ...] = ()
    parts: RoundParts | None = None


Decode = Callable[[list[int], int], Timing]  # (prompt, max_new_tokens) -> one timed decode


class Plan(NamedTuple):
    """How much is timed."""

    num_prompts: int
    num_repeats: int


def speculative_decode(
    target: Target, drafter: Drafter | None, num_draft_tokens: int | str
) -> Decode:
    """Greedy decoding in the engine in use; no drafter = plain decoding."""
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=num_draft_tokens)

    def decode(prompt: list[int], max_new_tokens: int) -> Timing:
        generation = decoder.generate([prompt], max_new_tokens=max_new_tokens)
        first_look_s = _first_look_s(generation)
        return Timing(
            seconds=generation.seconds,
            first_token_s=generation.prefill_s,
            start_s=generation.prefill_s + first_look_s,
            token_ids=generation.token_ids[0],
            stats=generation.row_stats[0],
            drafted=tuple(one.drafted[0] for one in generation.rounds),
            parts=RoundParts(
                draft_s=sum(one.draft_s for one in generation.rounds) - first_look_s,
                verify_s=sum(one.verify_s for one in generation.rounds),
                outside_s=sum(one.other_s for one in generation.rounds),
            ),
        )

    return decode


def transformers_decode(module: Any, eos_token_ids: Sequence[int], **arguments: Any) -> Decode:
    """Greedy decoding by the `generate` of a transformers model; `arguments` go to it as well."""

    @torch.inference_mode()
    def decode(prompt: list[int], max_new_tokens: int) -> Timing:
        inputs = torch.tensor([prompt], device=module.device)
        watch = _FirstToken()
        started = time.perf_counter()
        output = module.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            streamer=watch,
            **greedy_arguments(max_new_tokens, eos_token_ids),
            **arguments,
        )
        token_ids = output[0, len(prompt) :].tolist()  # waits for the device
        seconds = time.perf_counter() - started
        first = watch.seconds - started
        return Timing(seconds, first, first, token_ids)

    return decode


def tokens_per_s(decode: Decode, prompts: Sequence[list[int]], *, max_new_tokens: int) -> float:
    """Decoded tokens a second, prefill excluded; the best of the prompts, after a warm-up."""
    decode(prompts[0], WARM_UP_TOKENS)
    rates = []
    for prompt in prompts:
        timing = decode(prompt, max_new_tokens)
        if len(timing.token_ids) > 1:
            rates.append((len(timing.token_ids) - 1) / (timing.seconds - timing.start_s))
    return max(rates, default=0.0)


def fit_to_time(
    seconds_a_prompt: float, *, num_prompts: int, num_repeats: int, limit_s: float
) -> Plan:
    """As many prompts and repeats as fit the limit: repeats go first, then prompts (to 2).

    Prompts differ more from each other than repeats of one do, so that a prompt more narrows the
    interval more than a repeat more.
    """
    plan = Plan(num_prompts, num_repeats)
    while plan.num_prompts * plan.num_repeats * seconds_a_prompt > limit_s:
        if plan.num_repeats > 1:
            plan = Plan(plan.num_prompts, plan.num_repeats - 1)
        elif plan.num_prompts > 2:
            plan = Plan(plan.num_prompts - 1, plan.num_repeats)
        else:
            break
    return plan


def time_interleaved(
    decoders: Mapping[str, Decode],
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    num_repeats: int,
    on_decode: Callable[[], None] | None = None,
) -> dict[str, list[list[Timing]]]:
    """{decoder: [repeat][prompt] timings}; the order of the decoders rotates."""
    for decode in decoders.values():
        decode(prompts[0], WARM_UP_TOKENS)
    names = list(decoders)
    timings: dict[str, list[list[Timing]]] = {name: [] for name in names}
    for repeat in range(num_repeats):
        for name in names:
            timings[name].append([])
        for index, prompt in enumerate(prompts):
            turn = (repeat + index) % len(names)
            for name in names[turn:] + names[:turn]:
                timings[name][-1].append(decoders[name](prompt, max_new_tokens))
                if on_decode is not None:
                    on_decode()
    return timings


def speed_result(
    plain: Sequence[Sequence[Timing]],
    speculative: Sequence[Sequence[Timing]],
    *,
    drafter: str,
    suite: str,
    num_draft_tokens: int | str,
    num_resamples: int,
    seed: int = 0,
) -> SpeedResult:
    """Compare the timings of two decoders on the same prompts, [repeat][prompt] each."""
    options = {"num_resamples": num_resamples, "seed": seed}
    is_auto = num_draft_tokens == "auto"
    base, fast = _summary(plain), _summary(speculative)
    # Per token on both sides: greedy texts are equal in float32, in 16 bit they may not be.
    scaled = [f * b / n for f, b, n in zip(fast.seconds, base.tokens, fast.tokens, strict=True)]
    decoding = [f * b / n for f, b, n in zip(fast.decode_s, base.tokens, fast.tokens, strict=True)]
    stats = sum((t.stats for t in speculative[0] if t.stats is not None), AcceptanceStats())
    drafted = Counter(count for timing in speculative[0] for count in timing.drafted)
    total_tokens = sum(fast.tokens)
    return SpeedResult(
        drafter=drafter,
        suite=suite,
        num_draft_tokens=MAX_DRAFT_TOKENS if is_auto else int(num_draft_tokens),
        is_auto=is_auto,
        num_prompts=len(base.seconds),
        num_repeats=len(plain),
        num_tokens=total_tokens,
        plain_s=sum(base.seconds),
        speculative_s=sum(fast.seconds),
        plain_prefill_s=sum(base.start_s),
        prefill_s=sum(fast.start_s),
        plain_tokens_per_s=sum(base.tokens) / sum(base.seconds),
        tokens_per_s=total_tokens / sum(fast.seconds),
        plain_ms_per_token=1000 * sum(base.seconds) / sum(base.tokens),
        ms_per_token=1000 * sum(fast.seconds) / total_tokens,
        plain_first_token_ms=1000 * median(base.first_token_s),
        first_token_ms=1000 * median(fast.first_token_s),
        speedup=ratio_interval(base.seconds, scaled, **options),
        decode_speedup=ratio_interval(base.decode_s, decoding, **options),
        mean_prompt_speedup=sum(b / s for b, s in zip(base.seconds, scaled, strict=True))
        / len(scaled),
        repeat_speedups=[
            _per_token(before) / _per_token(after)
            for before, after in zip(plain, speculative, strict=True)
        ],
        acceptance_length=stats.acceptance_length if stats.num_rounds else None,
        rounds_by_drafted=dict(sorted(drafted.items())),
        plain_parts=_mean_parts(plain),
        parts=_mean_parts(speculative),
    )


def _mean_parts(repeats: Sequence[Sequence[Timing]]) -> RoundParts | None:
    """Of a round, over all repeats and prompts."""
    timings = [timing for repeat in repeats for timing in repeat]
    parts = [timing.parts for timing in timings if timing.parts is not None]
    num_rounds = sum(len(timing.drafted) for timing in timings)
    if not num_rounds:
        return None
    return RoundParts(
        draft_s=sum(one.draft_s for one in parts) / num_rounds,
        verify_s=sum(one.verify_s for one in parts) / num_rounds,
        outside_s=sum(one.outside_s for one in parts) / num_rounds,
    )


def spread(repeats: Sequence[Sequence[Timing]]) -> float:
    """(slowest - fastest) / median seconds a token of the repeats: how noisy the machine was.

    Of a single repeat, its two halves are compared (other prompts, but the same work a token).
    """
    parts = list(repeats)
    if len(parts) == 1 and len(parts[0]) > 1:
        middle = len(parts[0]) // 2
        parts = [parts[0][:middle], parts[0][middle:]]
    rates = [_decode_per_token(part) for part in parts]
    return (max(rates) - min(rates)) / median(rates)


class _Summary(NamedTuple):
    """Medians over repeats, one entry a prompt."""

    seconds: list[float]
    decode_s: list[float]
    start_s: list[float]
    first_token_s: list[float]
    tokens: list[int]


def _summary(repeats: Sequence[Sequence[Timing]]) -> _Summary:
    by_prompt = list(zip(*repeats, strict=True))
    return _Summary(
        seconds=[median(t.seconds for t in times) for times in by_prompt],
        decode_s=[median(t.seconds - t.start_s for t in times) for times in by_prompt],
        start_s=[median(t.start_s for t in times) for times in by_prompt],
        first_token_s=[median(t.first_token_s for t in times) for times in by_prompt],
        tokens=[len(times[0].token_ids) for times in by_prompt],
    )


def _per_token(timings: Sequence[Timing]) -> float:
    return sum(t.seconds for t in timings) / sum(len(t.token_ids) for t in timings)


def _decode_per_token(timings: Sequence[Timing]) -> float:
    """Seconds a token behind the prefill."""
    tokens = sum(len(t.token_ids) - 1 for t in timings)
    return sum(t.seconds - t.start_s for t in timings) / max(tokens, 1)


def _first_look_s(generation: Generation) -> float:
    """Seconds by which the first draft, which reads the prompt, exceeds the usual one."""
    drafting = [one.draft_s for one in generation.rounds]
    return max(0.0, drafting[0] - median(drafting[1:])) if len(drafting) > 1 else 0.0


class _FirstToken:
    """A transformers streamer that notes when the first new token arrived."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.seconds = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.num_calls += 1
        if self.num_calls == 2:  # the first call hands over the prompt
            self.seconds = time.perf_counter()

    def end(self) -> None:
        """Nothing is left to flush."""
