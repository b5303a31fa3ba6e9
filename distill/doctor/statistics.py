"""Numbers of the rows: tokens, lengths, padding, and what a reduced vocabulary covers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distill.batches import BatchStream, Example
from distill.doctor.finding import Finding, Level
from distill.doctor.rows import Row
from distill.draft_vocab import coverage, most_frequent, token_counts
from distill.signals import NoSignal
from distill.templates import ChatTemplate

_BARS = 20  # of the length histogram
_LITTLE_COVERED = 0.95
_FOLDS = 5


@dataclass(frozen=True)
class Statistics:
    """Of all rows.

    Attributes:
        sources: rows of each.
        lengths: tokens of each row. trained: those of them that carry loss.
        padding: share of the positions of an epoch's batches that are padding.
        batches: micro-batches of an epoch; 0 if nothing is trained on yet.
        covered: share of the answers' tokens that a reduced vocabulary holds, each fifth of the
            answers measured with the vocabulary of the others; None if there are no answers.
    """

    sources: dict[str, int]
    lengths: list[int]
    trained: list[int]
    padding: float
    batches: int
    covered: float | None

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_trained(self) -> int:
        return sum(self.trained)


def statistics_of(
    rows: Sequence[Row],
    template: ChatTemplate,
    *,
    batch_tokens: int,
    draft_vocab_size: int | None,
    real_vocab_size: int,
    eos_token_ids: Sequence[int],
) -> Statistics:
    """Counts the rows; a row without an answer counts with its prompt."""
    padding, batches = _batches(rows, batch_tokens)
    always = {*eos_token_ids, *template.special_ids()}
    return Statistics(
        sources=dict(Counter(row.source for row in rows).most_common()),
        lengths=[len(row.token_ids) for row in rows],
        trained=[row.num_trained for row in rows],
        padding=padding,
        batches=batches,
        covered=_covered(rows, draft_vocab_size, real_vocab_size, always),
    )


def histogram(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first length, last length, rows) of equal intervals from the shortest to the longest."""
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // _BARS))
    counts = Counter((length - low) // width for length in lengths)
    bars = (high - low) // width + 1
    return [(low + i * width, low + (i + 1) * width - 1, counts[i]) for i in range(bars)]


def check_statistics(statistics: Statistics, draft_vocab_size: int | None) -> list[Finding]:
    """What the numbers say."""
    covered = statistics.covered
    if covered is None or draft_vocab_size is None or covered >= _LITTLE_COVERED:
        return []
    return [
        Finding(
            Level.warning,
            "little_covered",
            f"{draft_vocab_size:,} draft tokens hold {covered:.1%} of the answers",
            "what is left out is never proposed: raise draft.draft_vocab_size, or give more answers "
            "to choose from",
        )
    ]


def _batches(rows: Sequence[Row], batch_tokens: int) -> tuple[float, int]:
    """(share of padding, number of batches) of one epoch, from the very plan that training follows."""
    examples = [
        Example(row.id, torch.tensor(row.token_ids), row.prompt_length, NoSignal(row.num_trained))
        for row in rows
        if row.num_trained > 0
    ]
    if not examples:
        return 0.0, 0
    stream = BatchStream(examples, max_tokens=batch_tokens, seed=0)
    number = padded = 0
    while stream.epoch_of(number) == 0:
        padded += stream(number).token_ids.numel()
        number += 1
    return 1 - sum(len(example.token_ids) for example in examples) / padded, number


def _covered(
    rows: Sequence[Row], size: int | None, real_vocab_size: int, always: set[int]
) -> float | None:
    answers = [torch.tensor(row.token_ids[row.prompt_length :]) for row in rows if row.num_trained]
    if size is None or not len(always) <= size <= real_vocab_size or len(answers) < 2:
        return None
    shares, total = 0.0, 0
    for fold in range(_FOLDS):
        held = token_counts(answers[fold::_FOLDS], real_vocab_size)
        others = [answer for i, answer in enumerate(answers) if i % _FOLDS != fold]
        chosen = most_frequent(token_counts(others, real_vocab_size), size, always=always)
        if int(held.sum()):
            shares += coverage(chosen, held) * int(held.sum())
            total += int(held.sum())
    return shares / total
