"""Where a drafter does well and where not: acceptance by kind of place in the text.

Along the target's own texts, greedy and sampled; nothing is decoded again. A drafted token belongs to
the place of the text that it was to be, a round to the place that its first draft was to be. So the
groups of one kind add up to the acceptance of the table: every drafted token is in one of them.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from eval.groups import BreakdownResult
from eval.intervals import NUM_RESAMPLES, Interval, ratio_interval
from eval.suites import EvalPrompt
from eval.target_texts import Answer
from eval.text_rounds import TextRound
from specdec_runtime.target import Target

ENTROPY_EDGES = (0.1, 0.5, 1.0, 2.0, 3.0)  # nats; below 0.1 the target is all but certain
POSITION_EDGES = (16, 32, 64, 128, 256)  # tokens into the answer
CONTEXT_EDGES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # tokens of prompt and answer
MIN_DRAFTED = 20  # smaller groups say nothing
FENCE = "```"  # opens and closes code in chat answers
BY_CATEGORY, BY_CLASS = "category", "token class"
BY_ENTROPY, BY_POSITION = "target entropy", "answer position"
BY_CONTEXT = "context length"

# {kind: [prompt][i] = the group of answer token i + 1, None where it has none}
Groups = Mapping[str, list[list[str | None]]]


def groups_of(
    target: Target,
    prompts: Sequence[EvalPrompt],
    answers: Sequence[Answer],
    entropies: Sequence[Sequence[float]],
) -> Groups:
    """The groups of every place of these texts.

    Args:
        entropies: the target's, per answer and token but the first; fewer where its positions end.
    """
    found: dict[str, list[list[str | None]]] = {}
    for prompt, answer, known in zip(prompts, answers, entropies, strict=True):
        places = range(1, len(answer.token_ids))
        classes = token_classes(_texts(target, answer))
        before = len(answer.prompt_ids)
        by_entropy: list[str | None] = [edge_group(value, ENTROPY_EDGES) for value in known]
        by_entropy += [None] * (len(places) - len(known))
        for kind, groups in (
            (BY_CATEGORY, [prompt.category for _ in places]),
            (BY_CLASS, [classes[i] for i in places]),
            (BY_ENTROPY, by_entropy),
            (BY_POSITION, [edge_group(i, POSITION_EDGES) for i in places]),
            (BY_CONTEXT, [edge_group(before + i, CONTEXT_EDGES) for i in places]),
        ):
            found.setdefault(kind, []).append(list(groups))
    return found


def breakdown(
    groups: Groups,
    rounds: Sequence[Sequence[TextRound]],
    *,
    drafter: str,
    suite: str,
    temperature: float,
    matches: Sequence[Sequence[bool]] | None = None,
    overlaps: Sequence[Sequence[float]] | None = None,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> list[BreakdownResult]:
    """Groups of every kind in which enough was drafted, in their natural order.

    Args:
        rounds: of each prompt.
        matches: per prompt and answer token but the first, whether a round that began there would
            have kept its first draft; None = not known.
        overlaps: sum(min(target, draft)) at temperature 1, at these places.
    """
    options = {"num_resamples": num_resamples, "seed": seed}
    results = []
    for kind, places in groups.items():
        names = _ordered({group for row in places for group in row if group is not None})
        sums = {name: _Sums(len(places)) for name in names}
        for prompt, own in enumerate(places):
            for one in rounds[prompt]:
                _add_round(sums, prompt, own, one)
            for row, into in ((matches, "matching"), (overlaps, "overlap")):
                for group, value in zip(own, row[prompt] if row else (), strict=False):
                    if group is not None:
                        getattr(sums[group], into)[:, prompt] += (value, 1)
        for name, found in sums.items():
            if found.drafted.sum() >= MIN_DRAFTED:
                results.append(
                    BreakdownResult(
                        drafter=drafter,
                        suite=suite,
                        temperature=temperature,
                        by=kind,
                        group=name,
                        num_positions=sum(row.count(name) for row in places),
                        num_rounds=float(found.rounds.sum()),
                        num_drafted=float(found.drafted.sum()),
                        num_accepted=float(found.accepted.sum()),
                        acceptance_rate=ratio_interval(found.accepted, found.drafted, **options),
                        conditional_acceptance=ratio_interval(
                            found.accepted, found.judged, **options
                        ),
                        acceptance_length=ratio_interval(
                            found.kept, found.rounds, **options
                        ).shifted(1.0),
                        agreement=_share(found.matching, options),
                        overlap=_share(found.overlap, options),
                    )
                )
    return results


class _Sums:
    """Counts of one group, an entry a prompt.

    drafted, accepted: tokens of the group. judged: those of them with everything before kept.
    rounds, kept: rounds that begin in the group, and what they kept. matching, overlap: sums over
    its places, and how many places.
    """

    def __init__(self, num_prompts: int) -> None:
        self.drafted, self.judged, self.accepted, self.rounds, self.kept = np.zeros(
            (5, num_prompts)
        )
        self.matching, self.overlap = np.zeros((2, 2, num_prompts))


def _add_round(
    sums: Mapping[str, _Sums], prompt: int, own: Sequence[str | None], one: TextRound
) -> None:
    """Count one round of a prompt; drafts behind the end of the text count with its last token."""
    start = own[one.position - 1]
    if start is not None:
        sums[start].rounds[prompt] += one.share
        sums[start].kept[prompt] += one.share * one.num_accepted
    for i in range(one.num_drafted):
        group = own[min(one.position - 1 + i, len(own) - 1)]
        if group is not None:
            sums[group].drafted[prompt] += one.share
            sums[group].judged[prompt] += one.share * (i <= one.num_accepted)
            sums[group].accepted[prompt] += one.share * (i < one.num_accepted)


def _share(sums: np.ndarray, options: dict[str, int]) -> Interval | None:
    """Mean over places, None where nothing is known of them."""
    return ratio_interval(sums[0], sums[1], **options) if sums[1].any() else None


def token_classes(texts: Sequence[str]) -> list[str]:
    """Of each token of an answer: code, number, word start, continuation, punctuation or space."""
    classes, in_code, seen = [], False, ""
    for text in texts:
        seen = (seen + text)[-(len(text) + len(FENCE)) :]
        fences = seen.count(FENCE)
        classes.append("code" if in_code or fences else _class_of(text))
        if fences:
            in_code = in_code != (fences % 2 == 1)
            seen = ""
    return classes


def edge_group(value: float, edges: Sequence[float]) -> str:
    """The range that a value falls into: "< 0.1", "0.1 to 0.5", ..., ">= 3"."""
    if value < edges[0]:
        return f"< {edges[0]:g}"
    for low, high in itertools.pairwise(edges):
        if value < high:
            return f"{low:g} to {high:g}"
    return f">= {edges[-1]:g}"


def _class_of(text: str) -> str:
    stripped = text.strip()
    if not stripped:
        return "space"
    if stripped[0].isdigit():
        return "number"
    if not stripped[0].isalpha():
        return "punctuation"
    return "word start" if text[0].isspace() else "continuation"


def _texts(target: Target, answer: Answer) -> list[str]:
    """Each token of the answer as text; ids as text where the target has no tokenizer."""
    if target.tokenizer is None:
        return [f" {token}" for token in answer.token_ids]
    return [target.tokenizer.decode([token]) for token in answer.token_ids]


def _ordered(groups: set[str]) -> list[str]:
    """Ranges by their lower edge, names by the alphabet."""

    def key(group: str) -> tuple[float, str]:
        if group.startswith("< "):
            return (float("-inf"), group)
        head = group.removeprefix(">= ").split(" to ")[0]
        return (float(head), group) if head.replace(".", "", 1).isdigit() else (0.0, group)

    return sorted(groups, key=key)
