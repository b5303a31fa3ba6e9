"""Speed: plain against speculative decoding of the same prompts, interleaved, batch size 1.

All decoders go through a prompt side by side: whoever has written the fewest tokens has the next
round, so that they pass every place of the text within the same tenth of a second, and what else
the machine does meanwhile hits all of them. A speedup is a ratio of sums over prompts and repeats,
per token; what a repeat and a prompt did to it is in its interval (intervals.py). The baseline is
the fastest plain decoding of the same target that this product has (its engine, or transformers' own
generate), never a slower one.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from eval.cost_model import RoundParts
from eval.exactness import greedy_arguments
from eval.intervals import crossed_ratio_interval
from eval.results import PromptTimes, SpeedResult
from specdec_runtime.auto_length import MAX_DRAFT_TOKENS
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft import Drafter
from specdec_runtime.results import Generation
from specdec_runtime.round_times import in_steps
from specdec_runtime.stats import AcceptanceStats
from specdec_runtime.target import Target

WARM_UP_TOKENS = 8
FEW_PROMPTS = 6  # below, prompts are worth more than a second repeat
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


# A decode that others may take turns with: yields the tokens so far, returns its own times.
Steps = Generator[int, None, Timing]
Decode = Callable[[list[int], int], Steps]  # (prompt, max_new_tokens) -> one timed decode


class Plan(NamedTuple):
    """How much is timed."""

    num_prompts: int
    num_repeats: int


def speculative_decode(
    target: Target, drafter: Drafter | None, num_draft_tokens: int | str
) -> Decode:
    """Greedy decoding in the engine in use; no drafter = plain decoding."""
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=num_draft_tokens)

    def decode(prompt: list[int], max_new_tokens: int) -> Steps:
        generation = yield from in_steps(decoder, prompt, max_new_tokens=max_new_tokens)
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
    """Greedy decoding by the `generate` of a transformers model; `arguments` go to it as well.

    Its loop cannot be stopped on the way: one step.
    """

    @torch.inference_mode()
    def generate(prompt: list[int], max_new_tokens: int) -> Timing:
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

    def decode(prompt: list[int], max_new_tokens: int) -> Steps:
        yield 0
        return generate(prompt, max_new_tokens)

    return decode


def whole(steps: Steps) -> Timing:
    """A decode to its end, without turns."""
    [timing] = side_by_side({"": steps}).values()
    return timing


def side_by_side(under_way: Mapping[str, Steps]) -> dict[str, Timing]:
    """Decodes of one prompt to their ends; the next step is that of who has the fewest tokens."""
    tokens = dict.fromkeys(under_way, 0)
    timings: dict[str, Timing] = {}
    while tokens:
        behind = min(tokens, key=lambda name: tokens[name])
        try:
            tokens[behind] = next(under_way[behind])
        except StopIteration as end:
            timings[behind] = end.value
            del tokens[behind]
    return timings


def tokens_per_s(decode: Decode, prompts: Sequence[list[int]], *, max_new_tokens: int) -> float:
    """Decoded tokens a second, prefill excluded; the best of the prompts, after a warm-up."""
    whole(decode(prompts[0], WARM_UP_TOKENS))
    rates = []
    for prompt in prompts:
        timing = whole(decode(prompt, max_new_tokens))
        if len(timing.token_ids) > 1:
            rates.append((len(timing.token_ids) - 1) / (timing.seconds - timing.start_s))
    return max(rates, default=0.0)


def fit_to_time(
    seconds_a_prompt: float, *, num_prompts: int, num_repeats: int, limit_s: float
) -> Plan:
    """As many prompts and repeats as fit the limit.

    Repeats go first, since prompts differ more from each other than repeats of one do. Two are kept
    while there are FEW_PROMPTS: one alone says nothing of what the machine does meanwhile.
    """
    least = min(FEW_PROMPTS, num_prompts)
    plans = [
        *(Plan(num_prompts, repeats) for repeats in range(num_repeats, 1, -1)),
        *(Plan(prompts, 2) for prompts in range(num_prompts - 1, least - 1, -1) if num_repeats > 1),
        *(Plan(prompts, 1) for prompts in range(num_prompts, 1, -1)),
    ]
    cost = {plan: plan.num_prompts * plan.num_repeats * seconds_a_prompt for plan in plans}
    return next((plan for plan in plans if cost[plan] <= limit_s), Plan(min(num_prompts, 2), 1))


def warm_up(decoders: Mapping[str, Decode], prompt: list[int]) -> None:
    """A few tokens with every decoder: what is loaded or compiled on first use."""
    for decode in decoders.values():
        whole(decode(prompt, WARM_UP_TOKENS))


def time_prompt(
    decoders: Mapping[str, Decode], prompt: list[int], *, max_new_tokens: int, turn: int
) -> dict[str, Timing]:
    """One prompt with all decoders side by side; `turn` rotates who goes first."""
    names = list(decoders)
    first = turn % len(names)
    order = names[first:] + names[:first]
    return side_by_side({name: decoders[name](prompt, max_new_tokens) for name in order})


def time_interleaved(
    decoders: Mapping[str, Decode],
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    num_repeats: int,
) -> dict[str, list[list[Timing]]]:
    """{decoder: [repeat][prompt] timings}, after a warm-up."""
    warm_up(decoders, prompts[0])
    timings: dict[str, list[list[Timing]]] = {name: [] for name in decoders}
    for repeat in range(num_repeats):
        found = [
            time_prompt(decoders, prompt, max_new_tokens=max_new_tokens, turn=repeat + index)
            for index, prompt in enumerate(prompts)
        ]
        for name, of_decoder in timings.items():
            of_decoder.append([one[name] for one in found])
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
    prompt_ids: Sequence[str] = (),
) -> SpeedResult:
    """Compare the timings of two decoders on the same prompts, [repeat][prompt] each.

    Args:
        prompt_ids: of these prompts, where the times of each are to be kept.
    """
    options = {"num_resamples": num_resamples, "seed": seed}
    is_auto = num_draft_tokens == "auto"
    base, fast = _times(plain), _times(speculative)
    # Per token on both sides: greedy texts are equal in float32, in 16 bit they may not be.
    scale = base.tokens / fast.tokens
    stats = sum((t.stats for t in speculative[0] if t.stats is not None), AcceptanceStats())
    drafted = Counter(count for timing in speculative[0] for count in timing.drafted)
    plain_s, speculative_s = _total(base.seconds), _total(fast.seconds)
    ratios = np.median(base.seconds, 0) / np.median(fast.seconds * scale, 0)
    return SpeedResult(
        drafter=drafter,
        suite=suite,
        num_draft_tokens=MAX_DRAFT_TOKENS if is_auto else int(num_draft_tokens),
        is_auto=is_auto,
        num_prompts=len(plain[0]),
        num_repeats=len(plain),
        num_tokens=int(fast.tokens.sum()),
        plain_s=plain_s,
        speculative_s=speculative_s,
        plain_prefill_s=_total(base.start_s),
        prefill_s=_total(fast.start_s),
        plain_tokens_per_s=float(base.tokens.sum()) / plain_s,
        tokens_per_s=float(fast.tokens.sum()) / speculative_s,
        plain_ms_per_token=1000 * plain_s / float(base.tokens.sum()),
        ms_per_token=1000 * speculative_s / float(fast.tokens.sum()),
        plain_first_token_ms=1000 * float(np.median(base.first_token_s)),
        first_token_ms=1000 * float(np.median(fast.first_token_s)),
        speedup=crossed_ratio_interval(base.seconds, fast.seconds * scale, **options),
        decode_speedup=crossed_ratio_interval(
            base.seconds - base.start_s, (fast.seconds - fast.start_s) * scale, **options
        ),
        mean_prompt_speedup=float(ratios.mean()),
        repeat_speedups=(base.seconds.sum(1) / (fast.seconds * scale).sum(1)).tolist(),
        acceptance_length=stats.acceptance_length if stats.num_rounds else None,
        rounds_by_drafted=dict(sorted(drafted.items())),
        plain_parts=_mean_parts(plain),
        parts=_mean_parts(speculative),
        prompts=_prompt_times(prompt_ids, base, fast),
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


class _Times(NamedTuple):
    """Seconds [repeat, prompt] of one decoder, and its tokens [prompt]."""

    seconds: np.ndarray
    start_s: np.ndarray
    first_token_s: np.ndarray
    tokens: np.ndarray


def _times(repeats: Sequence[Sequence[Timing]]) -> _Times:
    return _Times(
        seconds=np.array([[t.seconds for t in repeat] for repeat in repeats]),
        start_s=np.array([[t.start_s for t in repeat] for repeat in repeats]),
        first_token_s=np.array([[t.first_token_s for t in repeat] for repeat in repeats]),
        tokens=np.array([len(t.token_ids) for t in repeats[0]]),
    )


def _total(seconds: np.ndarray) -> float:
    """Sum over prompts of medians over repeats."""
    return float(np.median(seconds, 0).sum())


def _prompt_times(prompt_ids: Sequence[str], base: _Times, fast: _Times) -> list[PromptTimes]:
    return [
        PromptTimes(
            prompt_id=prompt_id,
            plain_s=base.seconds[:, i].tolist(),
            speculative_s=fast.seconds[:, i].tolist(),
            num_plain_tokens=int(base.tokens[i]),
            num_tokens=int(fast.tokens[i]),
        )
        for i, prompt_id in enumerate(prompt_ids)
    ]


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
