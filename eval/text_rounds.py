"""The rounds that a drafter would have had along a text: where each began, what came of it.

Two ways tell them: at temperature 0 replay (replay.py), above it expectation (sampled_replay.py),
where several rounds could have begun at a place, each with a share.
"""

from typing import NamedTuple


class TextRound(NamedTuple):
    """A round of one answer.

    position: the answer token that its first draft would be. num_drafted: those that are judged
    (stats.py). share: the probability of such a round; 1 at temperature 0.
    """

    position: int
    num_drafted: int
    num_accepted: int
    share: float = 1.0
