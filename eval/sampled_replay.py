"""Replay at a temperature: the acceptance that is to be expected, given the text that was written.

Sampled text follows the target whatever the drafter does. So the target writes its texts once, for
every drafter, and what a drafter would have had of it follows from one pass over them. Let p and q
be the target's and the draft's probability of the token that the text has, r = q / p, and P the
weights of block verification, P_i = min(1, P_{i-1} / r_i), P_0 = 1 (Sun et al. 2024,
arXiv:2403.10444, the rule that the runtime samples with). A draft starts with x_1 .. x_i and that
prefix is kept with probability q(x_1 .. x_i) P_i; the text has it with p(x_1 .. x_i); hence

    P(at least i drafts kept | text) = S_i = S_{i-1} min(1, r_i / P_{i-1}),   S_0 = 1,

whatever the text goes on with. Rounds draw on their own, so the places where rounds start form a
Markov chain along the text, and every count has its expectation without a draw: the chance of
acceptance drops out of the figures, and only that of the texts is left in their intervals.

For a drafter that goes on from states of its own, q depends on where the draft began as well; each
draft is followed by itself, as far as what is left of it shows (NEGLIGIBLE).

Shapes: n tokens of an answer, V target vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from eval.replay import Proposals, proposals
from eval.target_texts import Answer, TargetStates, log_probs_of
from eval.text_drafts import ScoredDrafter, read_along
from eval.text_rounds import TextRound
from specdec_runtime.draft import Drafter
from specdec_runtime.drafters.composite import CompositeDrafter
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.drafters.suffix_lookup import SuffixLookupDrafter

NEGLIGIBLE = 1e-4  # a draft that is kept so rarely is not followed: figures have two decimals


# Logarithms of r_1, r_2, ... of one draft -> S_1, S_2, ...
Survive = Callable[[Sequence[float]], list[float]]


class Keeps(NamedTuple):
    """For each answer token but the first: how many tokens would be drafted from there, and the
    probabilities S_1, S_2, ... that so many are kept, as far as the text reaches."""

    num_proposed: list[int]  # [n - 1]
    survival: list[list[float]]  # [n - 1], of up to num_proposed entries


@dataclass(kw_only=True)
class ExpectedCounts:
    """Expectations of the counts of specdec_runtime/stats.py."""

    num_rounds: float = 0.0
    num_drafted: float = 0.0
    num_accepted: float = 0.0
    num_tokens: int = 0
    drafted_by_position: list[float] = field(default_factory=list)
    accepted_by_position: list[float] = field(default_factory=list)

    def add_rounds(self, share: float, drafted: int, accepted: int) -> None:
        """Count this share of a round."""
        self.num_rounds += share
        self.num_drafted += share * drafted
        self.num_accepted += share * accepted
        for counts, reach in (
            (self.drafted_by_position, drafted),
            (self.accepted_by_position, accepted),
        ):
            counts += [0.0] * (drafted - len(counts))
            for i in range(reach):
                counts[i] += share


def is_recordable(drafter: Drafter) -> bool:
    """Whether a drafter's distributions follow from the text alone and are known here."""
    if isinstance(drafter, CompositeDrafter):
        return is_recordable(drafter.lookup) and is_recordable(drafter.model)
    if isinstance(drafter, SuffixLookupDrafter):
        return not drafter.remembers
    return isinstance(drafter, ScoredDrafter | PromptLookupDrafter)


def keeps(
    states: TargetStates,
    drafter: Drafter,
    answer: Answer,
    target_log_probs: Sequence[float],
    *,
    temperature: float,
    max_draft_tokens: int,
    survive: Survive | None = None,
) -> Keeps:
    """What a drafter would have had of one sampled answer, from every position.

    Args:
        drafter: one that `is_recordable`.
        target_log_probs: of `answer` at `temperature`, from `target_scores`.
        survive: the rule of verification; None = that of our runtime.
    """
    survive = survive or survival
    if isinstance(drafter, CompositeDrafter):
        first, second = (
            keeps(
                states,
                part,
                answer,
                target_log_probs,
                temperature=temperature,
                max_draft_tokens=max_draft_tokens,
                survive=survive,
            )
            for part in (drafter.lookup, drafter.model)
        )
        chosen = [a if a[0] else b for a, b in zip(_pairs(first), _pairs(second), strict=True)]
        return Keeps([count for count, _ in chosen], [survival for _, survival in chosen])
    if not isinstance(drafter, ScoredDrafter) or drafter.temperature == 0:
        certain = proposals(states, drafter, answer, max_draft_tokens=max_draft_tokens)
        return Keeps(certain.num_proposed, _certain_survival(certain))
    answered, heat = torch.tensor(answer.token_ids[1:]), drafter.temperature or temperature

    def log_ratios(logits: Tensor, places: slice) -> list[float]:
        log_q = log_probs_of(logits / heat, answered[places])
        return [q - p for q, p in zip(log_q, target_log_probs[places], strict=False)]

    proposed, ratios = read_along(
        states,
        drafter,
        answer,
        log_ratios,
        goes_on=lambda values: survive(values)[-1] > NEGLIGIBLE,
        max_draft_tokens=max_draft_tokens,
    )
    return Keeps(proposed, [survive(one) for one in ratios])


def survival(log_ratios: Sequence[float]) -> list[float]:
    """S_1, S_2, ... of one draft, from the logarithms of r_1, r_2, ..."""
    found: list[float] = []
    log_survival = log_weight = 0.0
    for ratio in log_ratios:
        log_survival += min(0.0, ratio - log_weight)
        log_weight = min(0.0, log_weight - ratio)
        found.append(math.exp(log_survival))
    return found


def token_survival(log_ratios: Sequence[float]) -> list[float]:
    """The same where every token is verified on its own, as transformers does (Leviathan et al. 2023,
    arXiv:2211.17192): S_i = S_{i-1} min(1, r_i), on average never above block verification."""
    log_survivals = accumulate(min(0.0, ratio) for ratio in log_ratios)
    return [math.exp(one) for one in log_survivals]


def expected_counts(answer: Answer, kept: Keeps, num_draft_tokens: int) -> ExpectedCounts:
    """The counts to be expected of decoding this answer with `num_draft_tokens`."""
    end = len(answer.token_ids)
    counts = ExpectedCounts(num_tokens=end)
    for one in expected_rounds(answer, kept, num_draft_tokens):
        counts.add_rounds(one.share, one.num_drafted, one.num_accepted)
    return counts


def expected_rounds(answer: Answer, kept: Keeps, num_draft_tokens: int) -> Iterator[TextRound]:
    """The rounds that decoding this answer could have, with their probabilities."""
    end = len(answer.token_ids)
    starts = [0.0] * (end + 1)  # probability that a round starts at a position
    starts[min(1, end)] = 1.0  # token 0 comes from the prefill
    for position in range(1, end):
        for one in _rounds_from(answer, kept, num_draft_tokens, position):
            share = starts[position] * one.share
            if share <= 0.0:
                continue
            yield one._replace(share=share)
            after = position + one.num_accepted + 1
            if after < end:
                starts[after] += share


def accepted_variance(answer: Answer, kept: Keeps, num_draft_tokens: int) -> float:
    """Variance of the number of accepted tokens: what chance is left in it, given the text."""
    end = len(answer.token_ids)
    # Of the number accepted from a position on: its mean and mean square.
    means, squares = ([0.0] * (end + num_draft_tokens + 2) for _ in range(2))
    for position in reversed(range(1, end)):
        for one in _rounds_from(answer, kept, num_draft_tokens, position):
            count, after = one.num_accepted, position + one.num_accepted + 1
            means[position] += one.share * (count + means[after])
            squares[position] += one.share * (count**2 + 2 * count * means[after] + squares[after])
    return max(0.0, squares[1] - means[1] ** 2)


def _rounds_from(
    answer: Answer, kept: Keeps, num_draft_tokens: int, position: int
) -> Iterator[TextRound]:
    """What a round that starts at a position can come to; the shares sum to 1."""
    budget = answer.max_new_tokens - position - 1  # the target adds one token of its own
    drafted = min(num_draft_tokens, budget, kept.num_proposed[position - 1])
    reached = [1.0, *kept.survival[position - 1][:drafted], 0.0]
    for accepted in range(len(reached) - 1):
        # A text that ends on a kept draft leaves those behind it unjudged.
        is_over = position + accepted + 1 > len(answer.token_ids)
        share = reached[accepted] - reached[accepted + 1]
        yield TextRound(position, accepted if is_over else drafted, accepted, share)


def _certain_survival(certain: Proposals) -> list[list[float]]:
    """Tokens that are certain are kept as far as they are the text."""
    return [
        [1.0] * matching + [0.0] * (proposed - matching)
        for proposed, matching in zip(certain.num_proposed, certain.num_matching, strict=True)
    ]


def _pairs(kept: Keeps) -> list[tuple[int, list[float]]]:
    return list(zip(kept.num_proposed, kept.survival, strict=True))
