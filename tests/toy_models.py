"""The exactness kit: toy models small enough that the law of a decode is computed, not sampled.

A toy is a table [V, V]: row s is the next-token distribution after token s. For a verification
rule, a drafter and a draft-length policy the kit enumerates every draft, finds by bisection the
points at which the rule's outcome changes in each of its uniform numbers (the rule is a black
box), and adds up the exact probability of every text of a given length. It has to equal the
target's own. All of it in float64.

Shapes: P enumerated drafts, K drafted positions, V vocabulary.
"""

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_runtime.draft_length import LengthRound, LengthSession

ALMOST_ONE = 1.0 - 2.0**-53
_NUM_BISECTIONS = 40  # leaves intervals of 1e-12
NEGLIGIBLE = 1e-11  # mass that is bisection error, not an outcome

Text = tuple[int, ...]


def random_table(seed: int, vocab_size: int = 3, sharpness: float = 1.5) -> Tensor:
    """[V, V] float64 of random next-token distributions."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab_size, vocab_size, generator=generator, dtype=torch.float64)
    return (sharpness * logits).softmax(-1)


def text_law(table: Tensor, start: int, length: int) -> dict[Text, float]:
    """Probability of every text of `length` tokens after `start`, under plain sampling."""
    law = {}
    for text in itertools.product(range(len(table)), repeat=length):
        prob = 1.0
        for before, token in itertools.pairwise((start, *text)):
            prob *= float(table[before, token])
        law[text] = prob
    return law


class ToyDrafter(NamedTuple):
    """How the toy draft model proposes, and what it claims about it.

    table: [V, V], its next-token distributions.
    greedy: it proposes the likeliest token instead of drawing one.
    claimed: what verification is told: "drawn" (the distribution drawn from; one-hot if greedy),
        "certain" (None) or, wrongly for a greedy drafter, "soft" (the table).
    """

    table: Tensor
    greedy: bool = False
    claimed: str = "drawn"

    def drawn_from(self) -> Tensor:
        if not self.greedy:
            return self.table
        return torch.zeros_like(self.table).scatter_(1, self.table.argmax(1, keepdim=True), 1.0)

    def claimed_probs(self, contexts: Tensor) -> Tensor | None:
        """[P, K, V] for the contexts [P, K], or None."""
        if self.claimed == "certain":
            return None
        return (self.table if self.claimed == "soft" else self.drawn_from())[contexts]


class EnumeratedDrafts(NamedTuple):
    """Every draft that can follow any start token: [P] rows, their start, tokens, probability."""

    starts: Tensor  # [P]
    token_ids: Tensor  # [P, K]
    num_drafted: Tensor  # [P]
    mass: Tensor  # [P] float64; sums to 1 for each start
    rounds: list[LengthRound]  # [P], each with its own copy of the session


def enumerate_drafts(
    drafter: ToyDrafter,
    session: LengthSession,
    *,
    starts: Sequence[int] | None = None,
    submit: Callable | None = None,
) -> EnumeratedDrafts:
    """All drafts of one round under a draft-length policy, after each start token (default all).

    Args:
        submit: (tokens, confidences) -> how many of the drawn tokens are submitted. Only negative
            controls pass it: a LengthRound cannot take a token back.
    """
    found: list[tuple[int, Text, int, float, LengthRound]] = []

    def extend(length_round: LengthRound, text: Text, confidences: Text, mass: float) -> None:
        if not length_round.ask():
            tokens = text[1:]
            kept = len(tokens) if submit is None else submit(tokens, confidences)
            found.append((text[0], tokens, kept, mass, length_round))
            return
        for token, prob in enumerate(drafter.drawn_from()[text[-1]].tolist()):
            if prob > 0.0:
                branch = copy.deepcopy(length_round)
                confidence = float(drafter.table[text[-1], token])
                branch.tell([confidence])
                extend(branch, (*text, token), (*confidences, confidence), mass * prob)

    for start in range(len(drafter.table)) if starts is None else starts:
        extend(LengthRound(copy.deepcopy(session), [0], [8]), (start,), (), 1.0)
    from_, tokens, kept, mass, rounds = zip(*found, strict=True)
    width = max(map(len, tokens))
    padded = [[*text, *[0] * (width - len(text))] for text in tokens]
    return EnumeratedDrafts(
        torch.tensor(from_),
        torch.tensor(padded, dtype=torch.int64).view(len(found), width),
        torch.tensor(kept),
        torch.tensor(mass, dtype=torch.float64),
        list(rounds),
    )


class Outcomes(NamedTuple):
    """What can become of the enumerated drafts: the draft, tokens kept, law of the next one."""

    drafts: list[int]  # [M] row of the drafts
    kept: list[int]  # [M]
    probs: list[list[float]]  # [M, V], joint with the draft and the count


def chain_outcomes(
    verify: Callable, target: Tensor, drafter: ToyDrafter, drafts: EnumeratedDrafts, *, block: bool
) -> Outcomes:
    """Everything that `verify` can make of the drafts, with its probability.

    Args:
        verify: a rule with the signature of `verify_speculative`.
        block: how the rule reads its uniforms: False, tokens pass in turn up to the first that
            fails; True, every prefix is tested and the longest that passes counts.
    """
    contexts = torch.cat([drafts.starts[:, None], drafts.token_ids], dim=1)  # [P, K + 1]
    draft_probs = drafter.claimed_probs(contexts[:, :-1])
    target_probs = target[contexts]

    def run(index: Tensor, uniforms: Tensor) -> Tensor:
        """Rows `index` of the drafts with these uniforms: [n, 2] (num_accepted, next token)."""
        q = None if draft_probs is None else draft_probs[index]
        ids, counts = drafts.token_ids[index], drafts.num_drafted[index]
        return torch.stack(verify(ids, q, target_probs[index], counts, uniforms), 1)

    thresholds = pass_thresholds(run, *drafts.token_ids.shape, block=block)
    found = []  # (drafts' rows, kept, uniforms in the middle of that outcome, mass)
    for kept in range(drafts.token_ids.shape[1] + 1):
        mass = drafts.mass * count_probs(thresholds, kept, block=block)
        rows = torch.nonzero(mass > NEGLIGIBLE).squeeze(1)
        uniforms = uniforms_for_count(thresholds[rows], kept, block=block)
        found.append((rows, torch.full_like(rows, kept), uniforms, mass[rows]))
    rows, counts, uniforms, mass = map(torch.cat, zip(*found, strict=True))
    last = torch.full((len(rows), 1), 0.5, dtype=torch.float64)
    kept_by_rule = run(rows, torch.cat([uniforms, last], 1))[:, 0]
    assert (kept_by_rule == counts).all(), "the rule does not count as its kind does"
    joint = mass[:, None] * next_token_probs(run, rows, uniforms, len(target))
    return Outcomes(rows.tolist(), counts.tolist(), joint.tolist())


def chain_round_laws(
    verify: Callable, target: Tensor, drafter: ToyDrafter, drafts: EnumeratedDrafts, *, block: bool
) -> list[dict[Text, float]]:
    """For each start token, the probability of every burst (kept tokens and the next one)."""
    outcomes = chain_outcomes(verify, target, drafter, drafts, block=block)
    laws: list[dict[Text, float]] = [defaultdict(float) for _ in target]
    for row, kept, probs in zip(*outcomes, strict=True):
        prefix = tuple(drafts.token_ids[row, :kept].tolist())
        for token, prob in enumerate(probs):
            laws[int(drafts.starts[row])][(*prefix, token)] += prob
    return laws


def decode_law(bursts: list[dict[Text, float]], start: int, length: int) -> dict[Text, float]:
    """Probability of every text of `length` tokens after `start`, decoded round after round."""
    known: dict[tuple[int, int], dict[Text, float]] = {}

    def law(start: int, length: int) -> dict[Text, float]:
        if length == 0:
            return {(): 1.0}
        if (start, length) not in known:
            total: dict[Text, float] = defaultdict(float)
            for burst, prob in bursts[start].items():
                head = burst[:length]
                for tail, tail_prob in law(head[-1], length - len(head)).items():
                    total[head + tail] += prob * tail_prob
            known[start, length] = total
        return known[start, length]

    return law(start, length)


def learning_decode_law(
    verify: Callable,
    target: Tensor,
    drafter: ToyDrafter,
    session: LengthSession,
    *,
    block: bool,
    start: int,
    length: int,
) -> dict[Text, float]:
    """As `decode_law`, for a session that changes with every round: all histories, one by one."""
    if length == 0:
        return {(): 1.0}
    total: dict[Text, float] = defaultdict(float)
    drafts = enumerate_drafts(drafter, session, starts=[start])
    outcomes = chain_outcomes(verify, target, drafter, drafts, block=block)
    for row, kept, probs in zip(*outcomes, strict=True):
        learned = copy.deepcopy(drafts.rounds[row])
        learned.finish([kept])
        for token, prob in enumerate(probs):
            head = (*drafts.token_ids[row, :kept].tolist(), token)[:length]
            tails = learning_decode_law(
                verify,
                target,
                drafter,
                learned.session,
                block=block,
                start=head[-1],
                length=length - len(head),
            )
            for tail, tail_prob in tails.items():
                total[head + tail] += prob * tail_prob
    return total


def largest_error(found: dict[Text, float], expected: dict[Text, float]) -> float:
    """Largest difference of the probabilities of any text."""
    texts = found.keys() | expected.keys()
    return max(abs(found.get(text, 0.0) - expected.get(text, 0.0)) for text in texts)


def bisect(
    holds: Callable[[Tensor], Tensor], count: int, *, steps: int = _NUM_BISECTIONS
) -> Tensor:
    """For each of `count` rows, the u in [0, 1] below which `holds(u)` is true: [count] float64.

    `holds` is monotone: true up to some u, false from there on. The error is 2**-steps.
    """
    low = torch.zeros(count, dtype=torch.float64)
    high = torch.ones_like(low)
    always = holds(torch.full_like(low, ALMOST_ONE))
    for _ in range(steps):
        middle = (low + high) / 2
        true = holds(middle)
        low, high = torch.where(true, middle, low), torch.where(true, high, middle)
    return torch.where(always, 1.0, (low + high) / 2)


def pass_thresholds(
    run: Callable,
    num_rows: int,
    num_positions: int,
    *,
    block: bool,
    steps: int = _NUM_BISECTIONS,
) -> Tensor:
    """The u_i below which position i passes, if it is reached: [P, K]."""
    position = torch.arange(num_positions).repeat_interleave(num_rows)
    rows = torch.arange(num_rows).repeat(num_positions)
    probe = torch.full((len(rows), num_positions + 1), ALMOST_ONE, dtype=torch.float64)
    if not block:  # everything in front passes, as far as it can
        probe[torch.arange(num_positions + 1) < position[:, None]] = 0.0

    def passes(uniform: Tensor) -> Tensor:
        return run(rows, probe.scatter(1, position[:, None], uniform[:, None]))[:, 0] > position

    return bisect(passes, len(rows), steps=steps).view(num_positions, num_rows).T


def count_probs(thresholds: Tensor, kept: int, *, block: bool) -> Tensor:
    """Probability that exactly `kept` tokens are kept: [P]."""
    if block:
        last = thresholds[:, kept - 1] if kept else torch.ones(len(thresholds)).double()
        return last * (1.0 - thresholds[:, kept:]).prod(1)
    refused = 1.0 - thresholds[:, kept] if kept < thresholds.shape[1] else 1.0
    return thresholds[:, :kept].prod(1) * refused


def uniforms_for_count(thresholds: Tensor, kept: int, *, block: bool) -> Tensor:
    """Uniforms [n, K] in the middle of the region where exactly `kept` tokens are kept."""
    uniforms = (1.0 + thresholds) / 2
    inside = slice(max(kept - 1, 0), kept) if block else slice(0, kept)
    uniforms[:, inside] = thresholds[:, inside] / 2
    return uniforms.clamp_max(ALMOST_ONE)


def next_token_probs(
    run: Callable,
    rows: Tensor,
    uniforms: Tensor,
    vocab_size: int,
    *,
    steps: int = _NUM_BISECTIONS,
) -> Tensor:
    """Law of the next token over the last uniform number, the others being given: [n, V]."""
    tokens = torch.arange(vocab_size - 1).repeat(len(rows))
    index, first = (
        rows.repeat_interleave(vocab_size - 1),
        uniforms.repeat_interleave(vocab_size - 1, 0),
    )

    def at_most(last: Tensor) -> Tensor:
        return run(index, torch.cat([first, last[:, None]], 1))[:, 1] <= tokens

    below = bisect(at_most, len(index), steps=steps).view(len(rows), vocab_size - 1)
    edges = torch.nn.functional.pad(torch.nn.functional.pad(below, (1, 0)), (0, 1), value=1.0)
    return edges.diff(dim=1)


def chain_error(
    verify: Callable,
    target: Tensor,
    drafter: ToyDrafter,
    session: LengthSession,
    *,
    block: bool,
    length: int = 4,
    submit: Callable | None = None,
) -> float:
    """Largest error in the probability of any text of `length` tokens after any start token."""
    drafts = enumerate_drafts(drafter, session, submit=submit)
    bursts = chain_round_laws(verify, target, drafter, drafts, block=block)
    return max(
        largest_error(decode_law(bursts, start, length), text_law(target, start, length))
        for start in range(len(target))
    )


def chi_squared(counts: Sequence[int] | Tensor, probs: Sequence[float] | Tensor) -> float:
    """Pearson's statistic; bins that cannot occur must be empty."""
    observed = torch.as_tensor(counts, dtype=torch.float64)
    expected = torch.as_tensor(probs, dtype=torch.float64) * observed.sum()
    possible = expected > 0.0
    if observed[~possible].any():
        return float("inf")
    return float(((observed - expected)[possible] ** 2 / expected[possible]).sum())


def chi_squared_limit(num_bins: int) -> float:
    """A right law exceeds this about once in 100,000 tests of at most 16 bins (df = bins - 1)."""
    degrees = num_bins - 1
    return degrees + 6.0 * (2.0 * degrees) ** 0.5 + 6.0
