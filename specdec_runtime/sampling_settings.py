"""The settings of sampling, under the names that transformers' `generate` gives them.

Checked when made: a value out of range, or settings that contradict each other, is one
`ValueError` before any model runs. What they do to logits is in sampling.py.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TypeGuard

from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor


@dataclass(kw_only=True)
class SamplingSettings:
    """How logits become a distribution; checked when made.

    A row is greedy if and only if its temperature is 0; nothing else decides it.

    Attributes:
        temperature: 0 for greedy, or a positive divisor of the logits; one value or one per row.
        top_k: keep the k most likely tokens.
        top_p: keep the likeliest tokens up to this mass, in (0, 1].
        min_p: drop tokens below this fraction of the likeliest one's probability, in [0, 1].
        typical_p: keep the most typical tokens up to this mass, in (0, 1].
        repetition_penalty: divides positive and multiplies negative logits of every token of the
            prompt or output; 1 changes nothing.
        presence_penalty: subtracted from the logits of tokens in the output so far (not the
            prompt, as in vLLM and the OpenAI API).
        frequency_penalty: the same, once per occurrence in the output so far.
        min_new_tokens: no end-of-text token before this many new tokens.
        bad_words_ids: token sequences that are never completed.
        logit_bias: added to the logits, by token id.
        logits_processors: run after all of the above and before the temperature.
    """

    temperature: float | Sequence[float] = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    bad_words_ids: list[list[int]] | None = None
    logit_bias: dict[int, float] | None = None
    logits_processors: list[LogitsProcessor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_ranges()
        self._check_tokens()
        self._check_contradictions()

    def temperatures(self, batch_size: int) -> list[float]:
        """One temperature per row.

        Raises:
            ValueError: temperatures were given per row, for another number of rows.
        """
        given = self._given_temperatures()
        if isinstance(self.temperature, float | Real):
            given = given * batch_size
        if len(given) != batch_size:
            raise ValueError(
                f"temperature has {len(given)} values for {batch_size} prompts: "
                "give one value, or one per prompt"
            )
        return given

    def _given_temperatures(self) -> list[float]:
        if isinstance(self.temperature, float | Real):
            return [float(self.temperature)]
        return [float(value) for value in self.temperature]

    def _check_kinds(self) -> None:
        given = self.temperature
        rows = [given] if isinstance(given, float | Real) else given
        valid = isinstance(rows, Sequence) and bool(rows) and all(map(_is_number, rows))
        _check(valid, "temperature", repr(given), "a number, or one per prompt")
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(_is_number(value), name, repr(value), "a number")
        for name in ("top_p", "typical_p", "min_p"):
            value = getattr(self, name)
            _check(value is None or _is_number(value), name, repr(value), "a number, or None")
        words = self.bad_words_ids
        valid = words is None or (
            isinstance(words, Sequence) and all(isinstance(word, Sequence) for word in words)
        )
        _check(valid, "bad_words_ids", repr(words), "a list of lists of token ids")
        bias = self.logit_bias
        valid = bias is None or (isinstance(bias, Mapping) and all(map(_is_number, bias.values())))
        _check(valid, "logit_bias", repr(bias), "a dict from token ids to numbers")
        processors = self.logits_processors
        valid = isinstance(processors, Sequence) and all(map(callable, processors))
        _check(valid, "logits_processors", repr(processors), "a list of LogitsProcessor objects")

    def _check_ranges(self) -> None:
        for value in self._given_temperatures():
            _check(0.0 <= value < math.inf, "temperature", value, "0 (greedy) or positive")
        if self.top_k is not None:
            valid = is_whole_number(self.top_k) and self.top_k >= 1
            _check(valid, "top_k", self.top_k, "an integer of at least 1, or None for all tokens")
        for name in ("top_p", "typical_p"):
            value = getattr(self, name)
            _check(value is None or 0.0 < value <= 1.0, name, value, "in (0, 1], or None")
        _check(self.min_p is None or 0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "in [0, 1]")
        penalty = self.repetition_penalty
        _check(0.0 < penalty < math.inf, "repetition_penalty", penalty, "positive (1 is neutral)")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(math.isfinite(value), name, value, "a finite number (0 is neutral)")
        count = self.min_new_tokens
        _check(
            is_whole_number(count) and count >= 0, "min_new_tokens", count, "an integer, 0 or more"
        )

    def _check_tokens(self) -> None:
        words = self.bad_words_ids
        valid = words is None or (
            len(words) > 0 and all(word and all(map(_is_token_id, word)) for word in words)
        )
        _check(valid, "bad_words_ids", words, "a non-empty list of non-empty lists of token ids")
        for token, bias in (self.logit_bias or {}).items():
            _check(_is_token_id(token), "logit_bias", f"token id {token}", "ids of 0 or more")
            valid = not math.isnan(bias) and bias < math.inf
            _check(valid, "logit_bias", f"{bias} for token {token}", "finite, or -inf to forbid")

    def _check_contradictions(self) -> None:
        if not any(self._given_temperatures()):
            for name in ("top_k", "top_p", "min_p", "typical_p"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)} has no effect at temperature 0 (greedy): "
                        f"set temperature above 0 to sample, or drop {name}"
                    )
        penalised = any(
            isinstance(processor, RepetitionPenaltyLogitsProcessor)
            for processor in self.logits_processors
        )
        if penalised and self.repetition_penalty != 1.0:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty} and a "
                "RepetitionPenaltyLogitsProcessor in logits_processors: pass one of the two"
            )


def is_whole_number(value: object) -> TypeGuard[int]:
    """Python's integers and numpy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_token_id(value: object) -> bool:
    return is_whole_number(value) and operator.index(value) >= 0


def _check(valid: bool, name: str, value: object, expected: str) -> None:
    if not valid:
        raise ValueError(f"{name} is {value}, expected {expected}")
