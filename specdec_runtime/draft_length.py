"""Draft length: how many tokens a round drafts, decided before each of them is drawn.

The target's distribution survives speculation only if *whether* a position is drafted does not
depend on the token drawn there: dropping a token because it looks unlikely shifts the output
(two tokens of probability .7 and .3 can come out as .85 and .15). So a policy here cannot take
a token back: `LengthRound` asks it before every draw, shows it the confidences of the tokens in
front only, and counts the position as drafted the moment the answer is yes.

The drafter's side of one round:

    while members := length_round.ask():      # positions in `rows` that draft one more token
        ...draw one token for each of them...
        length_round.tell(confidences)        # in the same order; None if the drafter has none

A confidence is the drafter's probability of the token it drew, at temperature 1. Sessions live
for one `generate` call and judge every row by that row alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# Cost-aware drafting forgets old drafts at this rate: about the last 50 count.
_MEMORY = 0.98
_PRIOR_TESTS = 2.5  # verified tokens the prior is worth: a useless drafter shows itself in five
# A row that stopped drafting looks again after so many rounds that a look takes this share of
# their time; after each that brings nothing it waits twice as long as before, but not for ever.
_LOOKING_SHARE = 0.02
_LONGEST_WAIT = 8  # times the shortest
_NUM_CONFIDENCE_BINS = 5


class LengthSession(Protocol):
    """Decides for the rows of one `generate` call."""

    def wants_more(self, row: int, confidences: Sequence[float | None]) -> bool:
        """Whether to draft one token more, given the confidences of the round's tokens so far."""

    def end_round(self, row: int, confidences: Sequence[float | None], num_accepted: int) -> None:
        """Learn what became of the tokens drafted for `row`."""


class DraftLength(Protocol):
    """A policy: what the user chooses. It holds settings only."""

    @property
    def num_draft_tokens(self) -> int:
        """The most that one round drafts."""

    @property
    def needs_confidence(self) -> bool:
        """Whether drafters must measure the confidences they tell."""

    def begin(self, batch_size: int) -> LengthSession:
        """A fresh session: nothing is remembered from one `generate` call to the next."""


def as_draft_length(value: "int | DraftLength") -> DraftLength:
    """A number of tokens as a policy; a policy as it is.

    Raises:
        ValueError: if it is neither.
    """
    if isinstance(value, bool) or not (isinstance(value, int) or hasattr(value, "begin")):
        raise ValueError(
            f'num_draft_tokens is {value!r}, expected a number, "auto", a policy of '
            "draft_length.py or a shape of tree_growth.py"
        )
    return FixedLength(value) if isinstance(value, int) else value


class LengthRound:
    """The draft lengths of one round, grown one position at a time; they never shrink.

    Attributes:
        num_drafted: [n], positions drafted so far for each of the rows.
        needs_confidence: whether the drafter has to tell confidences (the policy's own flag).
    """

    def __init__(
        self,
        session: LengthSession,
        rows: Sequence[int],
        limits: Sequence[int],
        *,
        needs_confidence: bool = False,
    ):
        assert len(rows) == len(limits), (rows, limits)
        self.needs_confidence = needs_confidence
        self.num_drafted = [0] * len(rows)
        self.session = session
        self._rows = list(rows)
        self._limits = list(limits)
        self._confidences: list[list[float | None]] = [[] for _ in rows]
        self._stopped = [False] * len(rows)
        self._awaited: list[int] = []

    def part(self) -> "LengthRound":
        """The same round for one of several drafters that share it; see drafters/composite.py.

        What the part is told counts for the round; what it has drafted it counts itself. Each
        member may be drafted for by one part only.
        """
        part = LengthRound(
            self.session, self._rows, self._limits, needs_confidence=self.needs_confidence
        )
        part._confidences = self._confidences
        return part

    def limit(self, member: int) -> int:
        """The most tokens this row can be asked for."""
        return self._limits[member]

    def cap(self, member: int, available: int) -> None:
        """Draft at most `available` tokens for this row: what a lookup found, before any is drawn."""
        assert not self.num_drafted[member], "a cap after a draw could depend on the token drawn"
        self._limits[member] = min(self._limits[member], available)

    def ask(self) -> list[int]:
        """The members (indices into rows) that draft one more token now; empty: the round is over."""
        assert not self._awaited, "the confidences of the last tokens were not told"
        for member, row in enumerate(self._rows):
            if self._stopped[member]:
                continue
            drafts = self.num_drafted[member] < self._limits[member] and self.session.wants_more(
                row, self._confidences[member]
            )
            if drafts:
                self._awaited.append(member)
                self.num_drafted[member] += 1
            self._stopped[member] = not drafts
        return list(self._awaited)

    def tell(self, confidences: Sequence[float] | None) -> None:
        """Confidences of the tokens just drawn, in the order of `ask`."""
        assert self._awaited, "nothing was asked for"
        given = [None] * len(self._awaited) if confidences is None else list(confidences)
        for member, confidence in zip(self._awaited, given, strict=True):
            self._confidences[member].append(confidence)
        self._awaited = []

    def finish(self, num_accepted: Sequence[int]) -> None:
        """Hand the verdict to the session, once the round is verified."""
        for row, told, kept in zip(self._rows, self._confidences, num_accepted, strict=True):
            self.session.end_round(row, told, kept)


@dataclass(frozen=True)
class FixedLength:
    """Always `num_draft_tokens`, as far as the limits allow; 0 drafts nothing."""

    num_draft_tokens: int
    needs_confidence = False

    def __post_init__(self) -> None:
        _check_num_draft_tokens(self.num_draft_tokens, at_least=0)

    def begin(self, batch_size: int) -> LengthSession:
        return _FixedSession(self)


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Draft until a token was drawn with less confidence than `threshold`; it is still verified."""

    threshold: float
    num_draft_tokens: int
    needs_confidence = True

    def __post_init__(self) -> None:
        _check_num_draft_tokens(self.num_draft_tokens, at_least=1)
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"draft length threshold is {self.threshold}, expected 0 to 1")

    def begin(self, batch_size: int) -> LengthSession:
        return _ThresholdSession(self)


@dataclass(frozen=True)
class CostAware:
    """Draft one token more while it is likely enough to be kept to pay for itself.

    By the renewal-reward theorem the best rule drafts on while some number of further tokens is
    expected to bring more accepted ones than S * (their marginal cost), S being the tokens per
    unit of time that the rule itself achieves. Time is in rounds of plain decoding, so S is 1
    where nothing is drafted. What is expected is a product of acceptance rates by confidence, S a
    running rate; both are learned row by row.

    Attributes:
        draft_cost: c, time of one draft step.
        verify_cost: v(0), v(1), ..., v(num_draft_tokens): time of a target pass over that many
            drafted tokens and the pending one; v(0) is 1.
        acceptance: share of drafted tokens expected to be kept, before anything is known.
        draft_start: time to begin a draft, whatever its length.
    """

    draft_cost: float
    verify_cost: tuple[float, ...]
    acceptance: float = 0.5
    draft_start: float = 0.0
    needs_confidence = True

    def __post_init__(self) -> None:
        _check_num_draft_tokens(self.num_draft_tokens, at_least=1)
        for name in ("draft_cost", "draft_start"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} is {value}, expected 0 or more target passes")
        if not all(0.0 < cost < math.inf for cost in self.verify_cost):
            raise ValueError(f"verify_cost is {self.verify_cost}, expected positive target passes")
        if not 0.0 < self.acceptance < 1.0:
            raise ValueError(f"acceptance is {self.acceptance}, expected between 0 and 1")

    @property
    def num_draft_tokens(self) -> int:
        return len(self.verify_cost) - 1

    def round_cost(self, num_drafted: int) -> float:
        """Time of a round that drafts so many tokens."""
        drafting = self.draft_start + self.draft_cost * num_drafted if num_drafted else 0.0
        return self.verify_cost[num_drafted] + drafting

    @property
    def rounds_between_looks(self) -> float:
        """Rounds that a row which stopped drafting waits; for good if no draft could ever pay."""
        lengths = range(1, self.num_draft_tokens + 1)
        if all(self.round_cost(count) >= count + 1 for count in lengths):
            return math.inf
        return math.ceil((self.round_cost(1) - self.round_cost(0)) / _LOOKING_SHARE)

    def begin(self, batch_size: int) -> LengthSession:
        return _CostAwareSession(self, batch_size)


class _FixedSession:
    def __init__(self, policy: FixedLength):
        self._policy = policy

    def wants_more(self, row: int, confidences: Sequence[float | None]) -> bool:
        return len(confidences) < self._policy.num_draft_tokens

    def end_round(self, row: int, confidences: Sequence[float | None], num_accepted: int) -> None:
        """Nothing to learn."""


class _ThresholdSession:
    def __init__(self, policy: ConfidenceThreshold):
        self._policy = policy

    def wants_more(self, row: int, confidences: Sequence[float | None]) -> bool:
        if len(confidences) >= self._policy.num_draft_tokens:
            return False
        last = confidences[-1] if confidences else None
        return last is None or last >= self._policy.threshold

    def end_round(self, row: int, confidences: Sequence[float | None], num_accepted: int) -> None:
        """Nothing to learn."""


class _CostAwareSession:
    def __init__(self, policy: CostAware, batch_size: int):
        self._policy = policy
        self._rows = [_RowRecord(policy) for _ in range(batch_size)]

    def wants_more(self, row: int, confidences: Sequence[float | None]) -> bool:
        record = self._rows[row]
        return self._pays(record, confidences) or (not confidences and record.looks_again())

    def end_round(self, row: int, confidences: Sequence[float | None], num_accepted: int) -> None:
        time = self._policy.round_cost(len(confidences))
        self._rows[row].learn(confidences, num_accepted, time)

    def _pays(self, record: "_RowRecord", confidences: Sequence[float | None]) -> bool:
        policy, num_drafted = self._policy, len(confidences)
        survival = math.prod(map(record.acceptance, confidences))
        so_far = policy.round_cost(num_drafted)
        gained = 0.0
        # Where the next token alone does not pay, it may still open a longer draft that does:
        # the start of a draft is paid once, and some passes over more tokens cost the same.
        for count in range(num_drafted + 1, policy.num_draft_tokens + 1):
            survival *= record.acceptance(None)  # of a token not drawn yet
            gained += survival
            if gained >= record.tokens / record.time * (policy.round_cost(count) - so_far):
                return True
        return False


class _RowRecord:
    """What one row has shown so far, older rounds counting less.

    Bin 0 holds every verified token, bins 1.. those of one range of confidence each.
    """

    def __init__(self, policy: CostAware):
        # Before anything is known a confidence is taken at its word.
        self._prior = [policy.acceptance] + [
            (index + 0.5) / _NUM_CONFIDENCE_BINS for index in range(_NUM_CONFIDENCE_BINS)
        ]
        self._tests = [0.0] * len(self._prior)
        self._kept = [0.0] * len(self._prior)
        self.tokens = self.time = 1.0  # as if one token had been decoded without drafting
        self._shortest_wait = policy.rounds_between_looks
        self._wait = self._shortest_wait  # rounds in front of the next look
        self._idle: float = 0  # rounds since the last draft
        self._is_looking = False

    def acceptance(self, confidence: float | None) -> float:
        """Estimated probability that a token of this confidence (None: any) is kept."""
        bin_ = _bin_of(confidence)
        kept = self._kept[bin_] + self._prior[bin_] * _PRIOR_TESTS
        return kept / (self._tests[bin_] + _PRIOR_TESTS)

    def looks_again(self) -> bool:
        """Whether to draft a token that is not expected to pay, to see whether that has changed."""
        self._is_looking = self._idle >= self._wait
        return self._is_looking

    def learn(self, confidences: Sequence[float | None], num_accepted: int, time: float) -> None:
        self.tokens = self.tokens * _MEMORY + num_accepted + 1
        self.time = self.time * _MEMORY + time
        if not confidences:
            self._idle += 1
            return
        for counts in (self._tests, self._kept):
            counts[:] = [count * _MEMORY for count in counts]
        # Tokens behind the first refused one were never judged.
        for position, confidence in enumerate(confidences[: num_accepted + 1]):
            for bin_ in {0, _bin_of(confidence)}:
                self._tests[bin_] += 1.0
                self._kept[bin_] += float(position < num_accepted)
        if num_accepted:  # a look that has found something is followed by the next at once
            self._wait, self._idle = self._shortest_wait, math.inf if self._is_looking else 0
        else:
            longer = self._wait * (2 if self._is_looking else 1)
            self._wait, self._idle = min(longer, _LONGEST_WAIT * self._shortest_wait), 0
        self._is_looking = False


def _bin_of(confidence: float | None) -> int:
    if confidence is None:
        return 0
    return 1 + min(int(confidence * _NUM_CONFIDENCE_BINS), _NUM_CONFIDENCE_BINS - 1)


def _check_num_draft_tokens(value: int, *, at_least: int) -> None:
    if value < at_least:
        raise ValueError(f"num_draft_tokens is {value}, expected {at_least} or more")
