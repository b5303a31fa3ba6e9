"""Where a drafter does well and where not: agreement and overlap by kind of position.

Along the target's own greedy texts, from the scores of inspection.py; nothing is decoded again.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eval.groups import BreakdownResult
from eval.inspection import AnswerScores
from eval.intervals import NUM_RESAMPLES, ratio_interval
from eval.suites import EvalPrompt
from eval.target_texts import Answer
from specdec_runtime.target import Target

ENTROPY_EDGES = (0.1, 0.5, 1.0, 2.0, 3.0)  # nats; below 0.1 the target is all but certain
POSITION_EDGES = (16, 32, 64, 128, 256)  # tokens into the answer
CONTEXT_EDGES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # tokens of prompt and answer
MIN_POSITIONS = 20  # smaller groups say nothing
FENCE = "```"  # opens and closes code in chat answers
BY_CATEGORY, BY_CLASS = "category", "token class"
BY_ENTROPY, BY_POSITION = "target entropy", "answer position"
BY_CONTEXT = "context length"


class Place(NamedTuple):
    """One position of one answer, with what the drafter did there."""

    prompt: int
    group: str
    matches: bool
    overlap: float


def breakdown(
    target: Target,
    prompts: Sequence[EvalPrompt],
    answers: Sequence[Answer],
    scores: Sequence[AnswerScores],
    *,
    drafter: str,
    suite: str,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> list[BreakdownResult]:
    """Groups of every kind with enough positions, in their natural order."""
    classes = [token_classes(_texts(target, answer)) for answer in answers]
    before = [len(answer.prompt_ids) for answer in answers]
    kinds: list[tuple[str, Callable[[int, int], str | None]]] = [
        (BY_CATEGORY, lambda prompt, _: prompts[prompt].category),
        (BY_CLASS, lambda prompt, i: classes[prompt][i + 1]),
        (BY_ENTROPY, lambda prompt, i: edge_group(scores[prompt].entropy[i], ENTROPY_EDGES)),
        (BY_POSITION, lambda _, i: edge_group(i + 1, POSITION_EDGES)),
        (BY_CONTEXT, lambda prompt, i: edge_group(before[prompt] + i + 1, CONTEXT_EDGES)),
    ]
    results = []
    for by, group_of in kinds:
        places = [
            Place(prompt, group, score.draft[i].token_ids[0] == answer.token_ids[i + 1], overlap)
            for prompt, (answer, score) in enumerate(zip(answers, scores, strict=True))
            for i, overlap in enumerate(score.overlap)
            if (group := group_of(prompt, i)) is not None
        ]
        for group in _ordered({place.group for place in places}):
            chosen = [place for place in places if place.group == group]
            if len(chosen) >= MIN_POSITIONS:
                options = {"num_resamples": num_resamples, "seed": seed}
                results.append(_result(chosen, len(prompts), drafter, suite, by, group, options))
    return results


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


def _result(
    places: Sequence[Place],
    num_prompts: int,
    drafter: str,
    suite: str,
    by: str,
    group: str,
    options: dict[str, int],
) -> BreakdownResult:
    matches, overlaps, counts = ([0.0] * num_prompts for _ in range(3))
    for place in places:
        matches[place.prompt] += place.matches
        overlaps[place.prompt] += place.overlap
        counts[place.prompt] += 1
    return BreakdownResult(
        drafter=drafter,
        suite=suite,
        by=by,
        group=group,
        num_positions=len(places),
        agreement=ratio_interval(matches, counts, **options),
        overlap=ratio_interval(overlaps, counts, **options),
    )
