"""Acceptance of a drafter on prompts, measured by the decoder that serves: counts and intervals.

The training loop calls `measure_acceptance` too, so there is one definition and one
implementation (specdec_runtime/stats.py). Greedy and sampled decoding are never pooled: one call
has one temperature.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from eval.groups import CategoryResult
from eval.intervals import (
    NUM_RESAMPLES,
    Interval,
    mean_interval,
    ratio_difference_interval,
    ratio_interval,
)
from eval.looping import is_looping
from eval.results import AcceptanceResult, DrafterDifference, PromptCounts
from eval.suites import EvalPrompt
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft import Drafter
from specdec_runtime.model import CausalModel
from specdec_runtime.results import Chunk
from specdec_runtime.stats import AcceptanceStats
from specdec_runtime.target import Target

Progress = Callable[[int], None]  # called with the number of prompts just finished


class Counts(Protocol):
    """What figures are made of: counts of a prompt, or their expectations (sampled_replay.py)."""

    @property
    def num_rounds(self) -> float: ...
    @property
    def num_drafted(self) -> float: ...
    @property
    def num_accepted(self) -> float: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def drafted_by_position(self) -> Sequence[float]: ...
    @property
    def accepted_by_position(self) -> Sequence[float]: ...


class Counted(Protocol):
    """Counts of a set of prompts and the texts they belong to; the lists run parallel."""

    @property
    def prompts(self) -> Sequence[Counts]: ...
    @property
    def token_ids(self) -> Sequence[list[int]]: ...
    @property
    def finish_reasons(self) -> Sequence[str]: ...
    @property
    def seconds(self) -> float: ...


@dataclass(frozen=True)
class MeasuredAcceptance:
    """Counts of a set of prompts. The lists run parallel to them.

    kinds: of each returned token, "accepted", "recovered", "bonus" or "target".
    """

    stats: AcceptanceStats
    prompts: list[AcceptanceStats]
    token_ids: list[list[int]]
    finish_reasons: list[str]
    seconds: float
    kinds: list[list[str]]

    @property
    def acceptance_length(self) -> float:
        return self.stats.acceptance_length

    @property
    def acceptance_rate(self) -> float:
        return self.stats.acceptance_rate

    def length_interval(self, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> Interval:
        """Acceptance length with its 95 % interval over prompts."""
        return length_interval(self.prompts, num_resamples=num_resamples, seed=seed)


def measure_acceptance(
    target: Target | CausalModel,
    drafter: Drafter | None,
    prompt_ids: Sequence[Sequence[int]],
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int | Sequence[int] = 0,
    batch_size: int = 8,
    on_prompts: Progress | None = None,
) -> MeasuredAcceptance:
    """Decode the prompts and count what was accepted.

    Args:
        drafter: None decodes plainly (nothing is drafted; the ratios are undefined).
        prompt_ids: token ids of each prompt, ready to decode.
        temperature: 0 = greedy.
        seed: prompt i draws with seed + i, whatever the batch size; or the seed of each prompt.
        on_prompts: told how many prompts a finished batch held.

    Raises:
        ValueError: no prompts, or settings that the decoder refuses.
    """
    if not prompt_ids:
        raise ValueError("no prompts to measure acceptance on, expected at least one")
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=num_draft_tokens)
    seeds = [seed + i for i in range(len(prompt_ids))] if isinstance(seed, int) else list(seed)
    started = time.perf_counter()
    stats: list[AcceptanceStats] = []
    kinds: list[list[str]] = []
    token_ids: list[list[int]] = []
    reasons: list[str] = []
    for first in range(0, len(prompt_ids), batch_size):
        batch = prompt_ids[first : first + batch_size]
        of_batch: list[list[str]] = [[] for _ in batch]

        def note_kinds(chunk: Chunk, of_batch: list[list[str]] = of_batch) -> None:
            of_batch[chunk.row] += chunk.kinds

        generation = decoder.generate(
            batch,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seeds[first : first + batch_size],
            on_tokens=note_kinds,
        )
        kinds += of_batch
        stats += generation.row_stats
        token_ids += generation.token_ids
        reasons += generation.finish_reasons
        if on_prompts is not None:
            on_prompts(len(batch))
    return MeasuredAcceptance(
        stats=sum(stats, AcceptanceStats()),
        prompts=stats,
        token_ids=token_ids,
        finish_reasons=reasons,
        seconds=time.perf_counter() - started,
        kinds=kinds,
    )


def joined(batches: Sequence[MeasuredAcceptance]) -> MeasuredAcceptance:
    """Batches measured one after the other, as one measurement."""
    return MeasuredAcceptance(
        stats=sum((one.stats for one in batches), AcceptanceStats()),
        prompts=[stats for one in batches for stats in one.prompts],
        token_ids=[ids for one in batches for ids in one.token_ids],
        finish_reasons=[reason for one in batches for reason in one.finish_reasons],
        seconds=sum(one.seconds for one in batches),
        kinds=[kinds for one in batches for kinds in one.kinds],
    )


def acceptance_result(
    counted: Counted,
    prompts: Sequence[EvalPrompt],
    *,
    drafter: str,
    suite: str,
    temperature: float,
    num_draft_tokens: int,
    decoded: Collection[int] | None = None,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> AcceptanceResult:
    """The record of a measurement: micro and macro figures, by position, with intervals.

    Args:
        decoded: indices of the prompts that were decoded, the others' counts being replayed; None =
            all.
    """
    rows = counted.prompts
    rates = [_defined(row.num_accepted, row.num_drafted) for row in rows]
    lengths = [_defined(row.num_accepted + row.num_rounds, row.num_rounds) for row in rows]
    options = {"num_resamples": num_resamples, "seed": seed}
    looping = [is_looping(ids) for ids in counted.token_ids]
    were_decoded = set(range(len(rows)) if decoded is None else decoded)
    return AcceptanceResult(
        drafter=drafter,
        suite=suite,
        temperature=temperature,
        num_draft_tokens=num_draft_tokens,
        num_prompts=len(rows),
        num_looping=sum(looping),
        num_rounds=sum(row.num_rounds for row in rows),
        num_drafted=sum(row.num_drafted for row in rows),
        num_accepted=sum(row.num_accepted for row in rows),
        num_tokens=sum(row.num_tokens for row in rows),
        acceptance_rate=rate_interval(rows, **options),
        acceptance_length=length_interval(rows, **options),
        macro_acceptance_rate=mean_interval(rates, **options),
        macro_acceptance_length=mean_interval(lengths, **options),
        acceptance_by_position=position_intervals(rows, **options),
        conditional_acceptance_by_position=conditional_intervals(rows, **options),
        seconds=counted.seconds,
        prompts=[
            PromptCounts(
                prompt_id=prompts[i].id,
                num_rounds=row.num_rounds,
                num_drafted=row.num_drafted,
                num_accepted=row.num_accepted,
                num_tokens=row.num_tokens,
                drafted_by_position=list(row.drafted_by_position),
                accepted_by_position=list(row.accepted_by_position),
                finish_reason=counted.finish_reasons[i],
                looping=looping[i],
                decoded=i in were_decoded,
                token_ids=counted.token_ids[i],
            )
            for i, row in enumerate(rows)
        ],
    )


def by_category(
    result: AcceptanceResult, prompts: Sequence[EvalPrompt], **options: int
) -> list[CategoryResult]:
    """The same of each category that prompts of the suite name, by the alphabet."""
    found = []
    for category in sorted({p.category for p in prompts if p.category is not None}):
        ids = {p.id for p in prompts if p.category == category}
        rows = [counts for counts in result.prompts if counts.prompt_id in ids]
        found.append(
            CategoryResult(
                drafter=result.drafter,
                suite=result.suite,
                temperature=result.temperature,
                num_draft_tokens=result.num_draft_tokens,
                category=category,
                num_prompts=len(rows),
                num_rounds=sum(row.num_rounds for row in rows),
                num_drafted=sum(row.num_drafted for row in rows),
                num_accepted=sum(row.num_accepted for row in rows),
                acceptance_rate=rate_interval(rows, **options),
                acceptance_length=length_interval(rows, **options),
            )
        )
    return found


def difference(
    first: AcceptanceResult, other: AcceptanceResult, **options: int
) -> DrafterDifference | None:
    """Acceptance length of `other` minus that of `first` on the same prompts; None without rounds.

    Both at one temperature, suite and draft length.
    """
    sides = [
        ([p.num_accepted for p in side.prompts], [p.num_rounds for p in side.prompts])
        for side in (first, other)
    ]
    values = [side.acceptance_length.value for side in (first, other)]
    if values[0] is None or values[1] is None:
        return None
    return DrafterDifference(
        drafter=other.drafter,
        suite=other.suite,
        temperature=other.temperature,
        first=values[0],
        second=values[1],
        difference=ratio_difference_interval(sides[0], sides[1], **options),
    )


def rate_interval(
    rows: Sequence[Counts], *, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Interval:
    """Accepted / drafted over prompts; no value where nothing was drafted."""
    return ratio_interval(
        [row.num_accepted for row in rows],
        [row.num_drafted for row in rows],
        num_resamples=num_resamples,
        seed=seed,
    )


def length_interval(
    rows: Sequence[Counts], *, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Interval:
    """1 + accepted / rounds over prompts."""
    return ratio_interval(
        [row.num_accepted for row in rows],
        [row.num_rounds for row in rows],
        num_resamples=num_resamples,
        seed=seed,
    ).shifted(1.0)


def position_intervals(
    rows: Sequence[Counts], *, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> list[Interval]:
    """Rounds with more than i accepted tokens / all rounds, for each position i."""
    return [
        ratio_interval(
            [_at(row.accepted_by_position, i) for row in rows],
            [row.num_rounds for row in rows],
            num_resamples=num_resamples,
            seed=seed,
        )
        for i in range(_num_positions(rows))
    ]


def conditional_intervals(
    rows: Sequence[Counts], *, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> list[Interval]:
    """Accepted at position i / rounds that drafted there with everything before it kept."""
    intervals = []
    for i in range(_num_positions(rows)):
        reached = [_at(row.accepted_by_position, i - 1) if i else row.num_rounds for row in rows]
        asked = [
            min(count, _at(row.drafted_by_position, i))
            for count, row in zip(reached, rows, strict=True)
        ]
        accepted = [_at(row.accepted_by_position, i) for row in rows]
        intervals.append(ratio_interval(accepted, asked, num_resamples=num_resamples, seed=seed))
    return intervals


def _num_positions(rows: Sequence[Counts]) -> int:
    return max((len(row.drafted_by_position) for row in rows), default=0)


def _at(counts: Sequence[float], index: int) -> float:
    return counts[index] if index < len(counts) else 0


def _defined(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
