"""When a row ends: end-of-text ids, stop strings, custom criteria, budget, context.

Looked at token by token, in text order, so that an end in the middle of a burst of accepted tokens
is found exactly where it falls; everything behind it is dropped before anyone sees it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import StoppingCriteriaList

from specdec_runtime.text import StopStrings


class Ending(NamedTuple):
    """Why a row ended, and how many characters of its last token lie behind a stop string."""

    reason: str  # "eos", "stop", "length" or "context"
    excess_chars: int = 0


class Stopping:
    """What may end the rows of one `generate` call.

    Args:
        eos_token_ids: ids that end a text.
        stop_strings: strings that end it, looked for in the new text only.
        criteria: transformers `StoppingCriteria`; called with the ids of one row and no scores.
        tokenizer: for the stop strings.
    """

    def __init__(
        self,
        *,
        eos_token_ids: Sequence[int],
        stop_strings: Sequence[str],
        criteria: StoppingCriteriaList,
        tokenizer: Any,
    ) -> None:
        self._eos = frozenset(eos_token_ids)
        self._stop_strings = list(stop_strings)
        self._criteria = criteria
        self._tokenizer = tokenizer

    def for_row(self, prompt: Sequence[int], budget: int, *, is_context_bound: bool) -> "RowEnd":
        """The watch over one row that may get `budget` new tokens.

        Args:
            is_context_bound: the budget is what is left of the target's positions.
        """
        strings = StopStrings(self._tokenizer, self._stop_strings) if self._stop_strings else None
        return RowEnd(self._eos, strings, self._criteria, len(prompt) + budget, is_context_bound)


class RowEnd:
    """Decides for one row, fed every new token in order."""

    def __init__(
        self,
        eos: frozenset[int],
        strings: StopStrings | None,
        criteria: StoppingCriteriaList,
        max_length: int,
        is_context_bound: bool,
    ) -> None:
        self.max_length = max_length
        self._eos = eos
        self._strings = strings
        self._criteria = criteria
        self._is_context_bound = is_context_bound

    def check(self, tokens: list[int]) -> Ending | None:
        """Whether the row ends with the last of `tokens` (prompt and new ones)."""
        token = tokens[-1]
        excess = self._strings.push(token) if self._strings else None
        if token in self._eos:
            return Ending("eos")
        if excess is not None:
            return Ending("stop", excess)
        if self._criteria and bool(self._criteria(torch.tensor([tokens]), None).all()):
            return Ending("stop")
        if len(tokens) >= self.max_length:
            return Ending("context" if self._is_context_bound else "length")
        return None
