"""Replay: what a drafter would propose at every position of the target's own greedy outputs.

At temperature 0 an accepted draft is a prefix of the target's output, so the proposals along that
output decide the acceptance of every draft length without decoding again. Where a drafter scores
tokens (text_drafts.py), a proposal of k tokens matches as far as its top token is the text's, behind
the text's; other drafters are asked position by position. So a few prompts are decoded, and where
their counts are the replayed ones, the others' need not be.

Exact or not: a drafter's proposal is a function of the committed tokens and, for some kinds, of the
target's states at them, and neither depends on where rounds began. On the C++ engine every number of
a replay has the bits that it has in decoding, so the counts are equal for every kind. Through
transformers a pass over a text and a pass over a round differ in rounding, for target and drafter:
equal but for near-ties of the drafter's two best tokens, which the decoded prompts would show.

Shapes: n tokens of an answer, V target vocabulary.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from eval.acceptance import Counts, length_interval, position_intervals
from eval.asking import asked_along
from eval.intervals import NUM_RESAMPLES, Interval, ratio_interval
from eval.results import AcceptanceResult, ReplayedLength, ReplayResult
from eval.target_texts import Answer, TargetStates
from eval.text_drafts import ScoredDrafter, read_along
from eval.text_rounds import TextRound
from specdec_runtime.draft import Drafter
from specdec_runtime.draft_length import FixedLength
from specdec_runtime.drafters.composite import CompositeDrafter
from specdec_runtime.stats import AcceptanceStats


class Proposals(NamedTuple):
    """For each answer token but the first: how many tokens would be drafted from there, and how
    many of them, from the start, equal the answer."""

    num_proposed: list[int]  # [n - 1]
    num_matching: list[int]  # [n - 1]


def proposals(
    states: TargetStates, drafter: Drafter, answer: Answer, *, max_draft_tokens: int
) -> Proposals:
    """What the drafter proposes along one answer, up to `max_draft_tokens` from every position."""
    if isinstance(drafter, CompositeDrafter):
        return _first_found(
            *(
                proposals(states, part, answer, max_draft_tokens=max_draft_tokens)
                for part in (drafter.lookup, drafter.model)
            )
        )
    if isinstance(drafter, ScoredDrafter):
        answered = torch.tensor(answer.token_ids[1:])
        proposed, matches = read_along(
            states,
            drafter,
            answer,
            lambda logits, places: _is_likeliest(logits, answered[places]),
            goes_on=lambda values: values[-1],
            max_draft_tokens=max_draft_tokens,
        )
        return Proposals(proposed, [sum(takewhile(bool, one)) for one in matches])
    return _asked(states, drafter, answer, max_draft_tokens)


def replayed_stats(
    answer: Answer, proposed: Proposals, num_draft_tokens: int
) -> tuple[AcceptanceStats, Counter[int]]:
    """The acceptance counts that decoding this answer with `num_draft_tokens` would give.

    Returns:
        The counts, and how many rounds submitted how many drafts to the target (those behind an
        end of text included: they cost time although they are not judged).
    """
    stats, submitted = AcceptanceStats(num_tokens=len(answer.token_ids)), Counter[int]()
    for one, num_submitted in _rounds(answer, proposed, num_draft_tokens):
        submitted[num_submitted] += 1
        stats.add_round(one.num_drafted, one.num_accepted)
    return stats, submitted


def replayed_rounds(answer: Answer, proposed: Proposals, num_draft_tokens: int) -> list[TextRound]:
    """The rounds that decoding this answer with `num_draft_tokens` would have."""
    return [one for one, _ in _rounds(answer, proposed, num_draft_tokens)]


def _rounds(
    answer: Answer, proposed: Proposals, num_draft_tokens: int
) -> Iterator[tuple[TextRound, int]]:
    """Each round, and how many drafts it submits to the target."""
    position, end = 1, len(answer.token_ids)  # token 0 comes from the prefill
    while position < end:
        budget = answer.max_new_tokens - position - 1  # the target adds one token of its own
        drafted = min(num_draft_tokens, budget, proposed.num_proposed[position - 1])
        accepted = min(drafted, proposed.num_matching[position - 1])
        # Where the text ends on a kept draft, the rest is not judged.
        judged = accepted if position + accepted >= end else drafted
        yield TextRound(position, judged, accepted), drafted
        position += accepted + 1


def replay(
    answers: Sequence[Answer],
    proposed: Sequence[Proposals],
    *,
    decoded: AcceptanceResult,
    max_draft_tokens: int,
    overlaps: Sequence[Sequence[float]] | None = None,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> ReplayResult:
    """Acceptance at every draft length, and how it compares with what was decoded.

    Args:
        answers, proposed: of the same prompts as `decoded`, in the same order.
        decoded: greedy acceptance of the same drafter at `decoded.num_draft_tokens`; compared are
            the prompts that were decoded.
        overlaps: per answer and position, sum(min(target, draft)) at temperature 1.
    """
    lengths = []
    at_decoded: list[AcceptanceStats] = []
    for k in range(1, max_draft_tokens + 1):
        counted = [
            replayed_stats(answer, p, k) for answer, p in zip(answers, proposed, strict=True)
        ]
        rows = [stats for stats, _ in counted]
        if k == decoded.num_draft_tokens:
            at_decoded = rows
        lengths.append(_length(k, counted, num_resamples, seed))
    pairs = [
        (row, counts)
        for row, counts in zip(at_decoded, decoded.prompts, strict=True)
        if counts.decoded
    ]
    first, decoded_first = (
        _first_position([pair[side] for pair in pairs], num_resamples, seed) for side in (0, 1)
    )
    return ReplayResult(
        drafter=decoded.drafter,
        suite=decoded.suite,
        num_draft_tokens=decoded.num_draft_tokens,
        num_positions=sum(len(p.num_matching) for p in proposed),
        agreement=_share([[m > 0 for m in p.num_matching] for p in proposed], num_resamples, seed),
        overlap=_share(overlaps, num_resamples, seed) if overlaps is not None else None,
        round_start_agreement=first,
        decoded_first_acceptance=decoded_first,
        agrees=first.overlaps(decoded_first),
        exact=all(same_counts(row, counts) for row, counts in pairs),
        lengths=lengths,
    )


def _is_likeliest(logits: Tensor, token_ids: Tensor) -> list[bool]:
    return (logits.argmax(-1) == token_ids.to(logits.device)).tolist()


def _asked(
    states: TargetStates, drafter: Drafter, answer: Answer, max_draft_tokens: int
) -> Proposals:
    """Ask a session at every position, as if each were the start of a round."""
    found = Proposals([], [])
    lengths = FixedLength(max_draft_tokens).begin(1)
    for asked in asked_along(states, drafter, answer, lengths, most=max_draft_tokens):
        found.num_proposed.append(len(asked.token_ids))
        found.num_matching.append(
            common_prefix(asked.token_ids, answer.token_ids[asked.position :])
        )
    return found


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two lists share from their start."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))


def _length(
    num_draft_tokens: int,
    counted: Sequence[tuple[AcceptanceStats, Counter[int]]],
    num_resamples: int,
    seed: int,
) -> ReplayedLength:
    rows = [stats for stats, _ in counted]
    return ReplayedLength(
        num_draft_tokens=num_draft_tokens,
        num_rounds=sum(row.num_rounds for row in rows),
        num_accepted=sum(row.num_accepted for row in rows),
        acceptance_length=length_interval(rows, num_resamples=num_resamples, seed=seed),
        rounds_by_drafted=dict(sorted(sum((c for _, c in counted), Counter()).items())),
    )


def _share(rows: Sequence[Sequence[float]], num_resamples: int, seed: int) -> Interval:
    """Mean over all positions of all answers, clustered by answer."""
    return ratio_interval(
        [float(sum(row)) for row in rows],
        [float(len(row)) for row in rows],
        num_resamples=num_resamples,
        seed=seed,
    )


def same_counts(replayed: Counts, decoded: Counts) -> bool:
    """Whether replay and decoder agree on one prompt in rounds, drafted and accepted tokens."""
    one, other = (
        (counts.num_rounds, counts.num_drafted, counts.num_accepted)
        for counts in (replayed, decoded)
    )
    return one == other


def _first_position(rows: Sequence[Counts], num_resamples: int, seed: int) -> Interval:
    """Rounds that kept their first draft / all rounds."""
    found = position_intervals(rows, num_resamples=num_resamples, seed=seed)
    return found[0] if found else Interval(None)


def _first_found(lookup: Proposals, model: Proposals) -> Proposals:
    """What a composite proposes: the model's where lookup has nothing to say."""
    chosen = [
        found if found[0] else drafted
        for found, drafted in zip(zip(*lookup, strict=True), zip(*model, strict=True), strict=True)
    ]
    return Proposals([count for count, _ in chosen], [matching for _, matching in chosen])
