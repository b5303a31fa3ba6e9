"""Looping output: text that repeats itself inflates acceptance and says nothing about a drafter.

A drafter that has seen a phrase twice predicts it the third time, so prompts whose answer loops
are counted and shown apart; they are never dropped in silence.
"""

from collections.abc import Sequence

MIN_TOKENS = 24  # shorter answers cannot be told from a list or a refrain
NGRAM = 4
MIN_DISTINCT = 0.5  # prose of small models has 0.8 to 1.0 distinct 4-grams, loops below 0.4


def distinct_ngrams(token_ids: Sequence[int], n: int = NGRAM) -> float | None:
    """Distinct n-grams / all n-grams, in (0, 1]; None for texts shorter than n."""
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether more than half of the 4-grams of an answer are repetitions.

    The last half is looked at too: many loops start after a sound beginning.
    """
    if len(token_ids) < MIN_TOKENS:
        return False
    halves = [token_ids, token_ids[len(token_ids) // 2 :]]
    shares = [distinct_ngrams(half) for half in halves if len(half) >= MIN_TOKENS]
    return any(share is not None and share < MIN_DISTINCT for share in shares)
