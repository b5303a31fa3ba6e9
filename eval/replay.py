"""Replay: what a drafter would propose at every position of the target's own greedy outputs.

At temperature 0 an accepted draft is a prefix of the target's output, so the proposals along that
output decide the acceptance of every draft length without decoding again. A causal LM needs one
pass over each output (a proposal of k tokens matches as far as its top token equals the next one,
teacher-forced); other drafters that read no target features are asked position by position. So a
few prompts are decoded, and where their counts are the replayed ones, the others' need not be.

Shapes: n tokens of an answer; V target vocabulary; D hidden size.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eval.acceptance import Counts, length_interval, position_intervals
from eval.intervals import NUM_RESAMPLES, Interval, ratio_interval
from eval.results import AcceptanceResult, ReplayedLength, ReplayResult
from specdec_runtime.draft import Drafter, DraftSession
from specdec_runtime.draft_length import FixedLength, LengthRound
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.composite import CompositeDrafter
from specdec_runtime.drafters.early_exit import EarlyExitDrafter
from specdec_runtime.model import CausalModel
from specdec_runtime.sampling import Sampler
from specdec_runtime.sampling_settings import SamplingSettings
from specdec_runtime.stats import AcceptanceStats
from specdec_runtime.target import Target

HEAD_CHUNK = 64  # positions whose logits are held at once: 64 x 49k floats are 12 MiB


class Answer(NamedTuple):
    """One greedy output of the target: the prompt, the new tokens, and the budget they had."""

    prompt_ids: list[int]
    token_ids: list[int]
    max_new_tokens: int


class Proposals(NamedTuple):
    """For each answer token but the first: how many tokens would be drafted from there, and how
    many of them, from the start, equal the answer."""

    num_proposed: list[int]  # [n - 1]
    num_matching: list[int]  # [n - 1]


def is_replayable(drafter: Drafter | None) -> bool:
    """Whether the drafter's proposals depend on the tokens alone, without the target's states."""
    if drafter is None or isinstance(drafter, EarlyExitDrafter):
        return False
    return not drafter.hidden_layers


def proposals(
    target: Target, drafter: Drafter, answer: Answer, *, max_draft_tokens: int
) -> Proposals:
    """What the drafter proposes along one answer, up to `max_draft_tokens` from every position."""
    if isinstance(drafter, CompositeDrafter):
        return _first_found(
            *(
                proposals(target, part, answer, max_draft_tokens=max_draft_tokens)
                for part in (drafter.lookup, drafter.model)
            )
        )
    if isinstance(drafter, CausalLMDrafter):
        return _teacher_forced(target, drafter, answer, max_draft_tokens)
    return _asked(target, drafter, answer, max_draft_tokens)


def replayed_stats(
    answer: Answer, proposed: Proposals, num_draft_tokens: int
) -> tuple[AcceptanceStats, Counter[int]]:
    """The acceptance counts that decoding this answer with `num_draft_tokens` would give.

    Returns:
        The counts, and how many rounds submitted how many drafts to the target (those behind an
        end of text included: they cost time although they are not judged).
    """
    stats, submitted = AcceptanceStats(num_tokens=len(answer.token_ids)), Counter[int]()
    position, end = 1, len(answer.token_ids)  # token 0 comes from the prefill
    while position < end:
        budget = answer.max_new_tokens - position - 1  # the target adds one token of its own
        drafted = min(num_draft_tokens, budget, proposed.num_proposed[position - 1])
        accepted = min(drafted, proposed.num_matching[position - 1])
        submitted[drafted] += 1
        if position + accepted >= end:  # the text ends on a kept draft; the rest is not judged
            drafted = accepted
        stats.add_round(drafted, accepted)
        position += accepted + 1
    return stats, submitted


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


def draft_logits(drafter: CausalLMDrafter, hidden: Tensor, vocab_size: int) -> Tensor:
    """[N, V] logits over the target's real vocabulary of [N, D] hidden states of the drafter.

    Tokens that the drafter cannot propose get -inf.
    """
    logits = drafter.model.logits_of(hidden)  # [N, n]
    full = logits.new_full((len(logits), vocab_size), float("-inf"))
    if drafter.draft_vocab is not None:
        return full.index_copy_(1, drafter.draft_vocab.to(logits.device), logits)
    width = min(vocab_size, logits.shape[1])
    full[:, :width] = logits[:, :width]
    return full


def answer_hidden(model: CausalModel, answer: Answer) -> Tensor:
    """[m, D] hidden states from which answer tokens 1, 2, ... are predicted, m <= n - 1.

    Fewer than n - 1 where the model's positions end before the answer does.
    """
    tokens = [*answer.prompt_ids, *answer.token_ids[:-1]][: model.max_positions]
    cache = model.new_cache(1, len(tokens))
    output = model.forward(torch.tensor([tokens]), cache, logits=False, hidden_layers=(-1,))
    return output.hidden[-1][0, len(answer.prompt_ids) :]


@torch.inference_mode()
def _teacher_forced(
    target: Target, drafter: CausalLMDrafter, answer: Answer, max_draft_tokens: int
) -> Proposals:
    count = len(answer.token_ids) - 1
    if count < 1:
        return Proposals([], [])
    hidden = answer_hidden(drafter.model, answer)
    top: list[int] = []
    for chunk in hidden.split(HEAD_CHUNK):
        top += draft_logits(drafter, chunk, target.real_vocab_size).argmax(-1).tolist()
    matches = [t == token for t, token in zip(top, answer.token_ids[1:], strict=False)]
    matches += [False] * (count - len(matches))
    room = [drafter.model.max_positions - len(answer.prompt_ids) - i for i in range(count)]
    proposed = [max(0, min(max_draft_tokens, left)) for left in room]
    runs = [0] * (count + 1)  # runs[i]: matches from position i on
    for i in reversed(range(count)):
        runs[i] = runs[i + 1] + 1 if matches[i] else 0
    return Proposals(proposed, [min(run, most) for run, most in zip(runs, proposed, strict=False)])


@torch.inference_mode()
def _asked(target: Target, drafter: Drafter, answer: Answer, max_draft_tokens: int) -> Proposals:
    """Ask a session at every position, as if each were the start of a round."""
    found = Proposals([], [])
    session = position_session(target, drafter, answer, max_draft_tokens)
    lengths = FixedLength(max_draft_tokens).begin(1)
    for position in range(1, len(answer.token_ids)):
        committed = [[*answer.prompt_ids, *answer.token_ids[:position]]]
        draft = session.propose([0], committed, LengthRound(lengths, [0], [max_draft_tokens]), None)
        session.commit([0], committed)
        count = int(draft.num_drafted[0])
        drafted = draft.token_ids[0, :count].tolist()
        rest = answer.token_ids[position : position + count]
        found.num_proposed.append(count)
        found.num_matching.append(common_prefix(drafted, rest))
    return found


def position_session(
    target: Target, drafter: Drafter, answer: Answer, max_draft_tokens: int
) -> DraftSession:
    """A greedy session that can be asked at every position of an answer."""
    sampler = Sampler(
        SamplingSettings(),
        batch_size=1,
        prompt_lengths=[len(answer.prompt_ids)],
        eos_token_ids=target.eos_token_ids,
        real_vocab_size=target.real_vocab_size,
        device=target.model.device,
    )
    capacity = len(answer.prompt_ids) + len(answer.token_ids) + max_draft_tokens + 1
    return drafter.begin(1, capacity, sampler)


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
