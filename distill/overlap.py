"""Whether evaluation prompts occur in training: exactly, up to spelling, or nearly.

Compared is what users say: of a training prompt each message and all of them joined, of an
evaluation prompt the whole and its longer messages ("go on" is in every second conversation). Two
texts are the same if their letters and digits are; they are nearly the same by the share of
three-word sequences that they have in common: of both together (Jaccard), and where an evaluation
prompt is long enough to be recognised inside a longer text, of its own. Exact counts over an index
of the evaluation's sequences; no sketches, as an evaluation is small.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distill.prompt import Prompt, letters, user_texts, words

# "The same question with a word changed"; another topic in one sentence of a template is below it.
NEAR = 0.85
_SHINGLE_WORDS = 3
_OWN_WORDS = 8  # of a message that stands for itself in a conversation
_LONG = 20  # sequences of an evaluation prompt that is looked for inside longer texts

Shingles = frozenset[tuple[str, ...]]


@dataclass(frozen=True)
class Overlap:
    """A training prompt that is an evaluation prompt, or nearly so.

    similarity: 1 = the same up to case, spacing and punctuation.
    """

    train_id: str
    suite: str
    evaluation_id: str
    similarity: float

    @property
    def is_exact(self) -> bool:
        return self.similarity == 1.0


def find_overlaps(
    train: Iterable[Prompt], evaluation: Mapping[str, Sequence[Prompt]], *, near: float = NEAR
) -> list[Overlap]:
    """The training prompts with a likeness of at least `near`, each with its closest counterpart."""
    index = _Index(evaluation)
    found = []
    for prompt in train:
        best = max((index.closest(text) for text in _all_messages(prompt)), key=lambda one: one[0])
        similarity, owner = best
        if similarity >= near and owner is not None:
            found.append(Overlap(prompt.id, owner[0], owner[1], similarity))
    return found


def describe(overlaps: Sequence[Overlap]) -> str:
    """One sentence for a log; "" if there are none."""
    if not overlaps:
        return ""
    exact = sum(one.is_exact for one in overlaps)
    suites = Counter(one.suite for one in overlaps)
    counted = ", ".join(f"{count} of {suite}" for suite, count in suites.most_common())
    example = max(overlaps, key=lambda one: (not one.is_exact, one.similarity))
    return (
        f"{len(overlaps)} training prompts left out as they are in the evaluation ({exact} exactly, "
        f"{len(overlaps) - exact} nearly; {counted}), such as {example.train_id}, which is "
        f"{example.similarity:.0%} of {example.evaluation_id}"
    )


class _Index:
    """All evaluation prompts, by letters and by sequences of words."""

    def __init__(self, evaluation: Mapping[str, Sequence[Prompt]]) -> None:
        self._exact: dict[str, tuple[str, str]] = {}
        self._owners: list[tuple[str, str]] = []
        self._sizes: list[int] = []
        self._holders: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for suite, prompts in evaluation.items():
            for prompt in prompts:
                for text in _whole_and_long(prompt):
                    self._add(text, (suite, prompt.id))

    def _add(self, text: str, owner: tuple[str, str]) -> None:
        self._exact.setdefault(letters(text), owner)
        number, parts = len(self._owners), _shingles(text)
        self._owners.append(owner)
        self._sizes.append(len(parts))
        for part in parts:
            self._holders[part].append(number)

    def closest(self, text: str) -> tuple[float, tuple[str, str] | None]:
        """(likeness, suite and id of the evaluation prompt) of whatever is most like a text."""
        if (owner := self._exact.get(letters(text))) is not None:
            return 1.0, owner
        parts = _shingles(text)
        shared = Counter(number for part in parts for number in self._holders.get(part, ()))
        best, closest = 0.0, None
        for number, count in shared.items():
            own = self._sizes[number]
            likeness = count / (own + len(parts) - count)
            if own >= _LONG:
                likeness = max(likeness, count / own)
            if likeness > best:
                best, closest = likeness, self._owners[number]
        return min(best, 0.999), closest  # not the same: 1 is kept for what is


def _whole_and_long(prompt: Prompt) -> list[str]:
    texts = user_texts(prompt)
    if len(texts) < 2:
        return texts
    return ["\n".join(texts), *(text for text in texts if len(words(text)) >= _OWN_WORDS)]


def _all_messages(prompt: Prompt) -> list[str]:
    texts = user_texts(prompt)
    return texts if len(texts) < 2 else [*texts, "\n".join(texts)]


def _shingles(text: str) -> Shingles:
    found = words(text)
    if len(found) < _SHINGLE_WORDS:
        return frozenset([tuple(found)])
    return frozenset(zip(*(found[i:] for i in range(_SHINGLE_WORDS)), strict=False))
