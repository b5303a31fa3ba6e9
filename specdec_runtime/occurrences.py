"""Where a text has been before: matches of its end in earlier text, and what followed them.

Deliberately not a suffix tree: Python lists keyed by short n-grams find the same candidates, grow by
appending, and cost one dictionary entry a token; the longest matches are then told apart by
comparing backwards. The newest occurrences are the ones looked at.

Source of the scoring: SuffixDecoding, Oliaro et al. 2024, arXiv:2411.04975.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

# Older occurrences than these many of one n-gram are not compared: cost per round stays flat
# however long the text gets.
_MAX_CANDIDATES = 64
_MAX_MATCH = 64  # tokens; longer matches predict no better


class Continuation(NamedTuple):
    """Predicted tokens, and for each the share of occurrences that agree up to it."""

    token_ids: list[int]
    survival: list[float]


class Occurrences:
    """Texts that grow at their ends, indexed by their n-grams of one size.

    Args:
        min_match: size of the n-grams; shorter matches are not found.
    """

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match
        self._texts: list[list[int]] = []
        # n-gram -> (text, position behind it), oldest first
        self._ends: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)

    def add_text(self, tokens: Sequence[int] = ()) -> int:
        """Start a text; returns its number."""
        self._texts.append([])
        self.extend(len(self._texts) - 1, tokens)
        return len(self._texts) - 1

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        """Append tokens to a text. An n-gram can be found as soon as a token follows it."""
        own, size = self._texts[text], self._min_match
        for token in tokens:
            if len(own) >= size:
                self._ends[tuple(own[-size:])].append((text, len(own)))
            own.append(token)

    def length(self, text: int) -> int:
        return len(self._texts[text])

    def continuation(
        self, context: Sequence[int], limit: int, *, min_survival: float, tokens_per_match: float
    ) -> Continuation:
        """What most occurrences of the end of `context` went on with.

        The longest match leads; the draft may be `tokens_per_match` times as long as it, and goes
        on while at least `min_survival` of the occurrences agree with all of it so far.
        """
        matches = self._matches(context)
        best = Continuation([], [])
        for length in sorted({match[0] for match in matches}, reverse=True):
            members = [(text, end) for own, text, end in matches if own >= length]
            found = self._follow(members, min(limit, int(length * tokens_per_match)), min_survival)
            # Expected accepted tokens, if the past is a guide.
            if sum(found.survival) > sum(best.survival):
                best = found
        return best

    def continuations(
        self, context: Sequence[int], limit: int, *, tokens_per_match: float
    ) -> list[tuple[list[int], int]]:
        """(following tokens, length of the match) of every occurrence, the newest first."""
        return [
            (self._texts[text][end : end + min(limit, int(length * tokens_per_match))], length)
            for length, text, end in reversed(self._matches(context))
        ]

    def _matches(self, context: Sequence[int]) -> list[tuple[int, int, int]]:
        """(length, text, position behind it) of occurrences of the end of `context`."""
        if len(context) < self._min_match:
            return []
        ends = self._ends.get(tuple(context[-self._min_match :]), [])[-_MAX_CANDIDATES:]
        return [(self._match_length(context, text, end), text, end) for text, end in ends]

    def _match_length(self, context: Sequence[int], text: int, end: int) -> int:
        own, length = self._texts[text], self._min_match
        most = min(end, len(context), _MAX_MATCH)
        while length < most and own[end - length - 1] == context[-length - 1]:
            length += 1
        return length

    def _follow(
        self, members: list[tuple[int, int]], limit: int, min_survival: float
    ) -> Continuation:
        tokens: list[int] = []
        survival: list[float] = []
        total = len(members)
        for step in range(limit):
            votes = Counter(
                own[end + step]
                for text, end in members
                if end + step < len(own := self._texts[text])
            )
            if not votes:
                break
            token, count = votes.most_common(1)[0]
            if count / total < min_survival:
                break
            tokens.append(token)
            survival.append(count / total)
            members = [
                (text, end)
                for text, end in members
                if end + step < len(self._texts[text]) and self._texts[text][end + step] == token
            ]
        return Continuation(tokens, survival)
