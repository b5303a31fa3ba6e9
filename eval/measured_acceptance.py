"""Acceptance of the drafters on a suite: a few prompts decoded, the others replayed.

Decoding with a drafter costs as much again as the target's own text did. Where what a drafter
proposes follows from the text alone, its acceptance follows from the target's text and one cheap
pass of the drafter: count for count at temperature 0 (replay.py), in expectation above
(sampled_replay.py). So all drafters share the target's texts, and a few prompts are decoded to see
that both ways agree; where they do not at temperature 0, all prompts are decoded.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from eval.acceptance import (
    Counts,
    MeasuredAcceptance,
    acceptance_result,
    joined,
    length_interval,
    measure_acceptance,
)
from eval.breakdown import Groups, breakdown, groups_of
from eval.groups import BreakdownResult
from eval.inspection import AnswerScores
from eval.measurements import Setting
from eval.replay import Proposals, proposals, replayed_rounds, replayed_stats, same_counts
from eval.results import AcceptanceResult, SampledLength, SampledReplay
from eval.sampled_replay import Keeps, expected_counts, expected_rounds, is_recordable, keeps
from eval.suites import spread
from eval.target_texts import Answer, TargetScores, target_scores
from eval.text_rounds import TextRound

ENOUGH_TO_AGREE = 5  # prompts; a bootstrap over fewer is too narrow for its word to count


@dataclass(frozen=True)
class CountedTexts:
    """Counts of all prompts of a suite, and their texts; the lists run parallel."""

    prompts: Sequence[Counts]
    token_ids: Sequence[list[int]]
    finish_reasons: Sequence[str]
    seconds: float


class Measured(NamedTuple):
    """Acceptance of one drafter on one suite at one temperature.

    sampled: at every draft length, above temperature 0. rounds: of each prompt, at the record's draft
    length, along the target's own texts. Both None where that is not known without decoding.
    """

    record: AcceptanceResult
    sampled: SampledReplay | None
    rounds: list[list[TextRound]] | None


def plain(setting: Setting, suite: str, temperature: float) -> MeasuredAcceptance:
    """The target's own texts; nothing is drafted."""
    return _decode(setting, None, suite, range(len(setting.suites[suite])), temperature, 0)


def scores_along(setting: Setting, suite: str, temperature: float) -> list[TargetScores]:
    """What the target's head says along its texts of a suite, shared by all drafters."""
    answers = answers_of(setting, suite, plain(setting, suite, temperature))

    def compute() -> list[TargetScores]:
        found = []
        title = f"target along its texts, {suite}, temperature {temperature:g}"
        with setting.stage(title, len(answers)) as advance:
            for answer in answers:
                found.append(target_scores(setting.states, answer, temperature=temperature or 1.0))
                advance(1)
        return found

    part = f"target scores {suite} {temperature:g}"
    found = setting.parts.get(part, list[list[list[float]]], compute)
    return [TargetScores(*one) for one in found]


def answers_of(setting: Setting, suite: str, texts: MeasuredAcceptance) -> list[Answer]:
    """The texts of a suite with their prompts."""
    budget = setting.config.max_new_tokens
    pairs = zip(setting.suites[suite], texts.token_ids, strict=True)
    return [Answer(prompt.token_ids, text, budget) for prompt, text in pairs]


def greedy_acceptance(
    setting: Setting, name: str, suite: str, texts: MeasuredAcceptance
) -> tuple[Measured, list[Proposals]]:
    """Acceptance at temperature 0, and what was proposed along the texts.

    Args:
        texts: the target's greedy texts of the suite.
    """
    config, everything = setting.config, range(len(setting.suites[suite]))
    length, answers = config.num_draft_tokens, answers_of(setting, suite, texts)
    found = _proposals(setting, name, suite, answers)
    rounds = [replayed_rounds(a, p, length) for a, p in zip(answers, found, strict=True)]
    rows = [replayed_stats(a, p, length)[0] for a, p in zip(answers, found, strict=True)]
    chosen = spread(everything, config.decoded_prompts)
    decoded = _decode(setting, name, suite, chosen, 0.0, length)
    pairs = zip(chosen, decoded.prompts, strict=True)
    if not all(same_counts(rows[i], counts) for i, counts in pairs):
        decoded = _decode(setting, name, suite, everything, 0.0, length)
        return Measured(_record(setting, name, suite, decoded, 0.0, length), None, rounds), found
    place = {prompt: i for i, prompt in enumerate(chosen)}
    merged = CountedTexts(
        prompts=rows,
        token_ids=[
            decoded.token_ids[place[i]] if i in place else texts.token_ids[i] for i in everything
        ],
        finish_reasons=texts.finish_reasons,
        seconds=decoded.seconds,
    )
    record = _record(setting, name, suite, merged, 0.0, length, chosen)
    return Measured(record, None, rounds), found


def sampled_acceptance(
    setting: Setting, name: str, suite: str, temperature: float, *, check: bool
) -> Measured:
    """Acceptance at a temperature above 0: expected along sampled texts where that is known.

    Args:
        check: also decode a few of the prompts, with other draws.
    """
    drafter, config = setting.drafters[name], setting.config
    everything, length = range(len(setting.suites[suite])), config.num_draft_tokens
    if not is_recordable(drafter):
        decoded = _decode(setting, name, suite, everything, temperature, length)
        return Measured(_record(setting, name, suite, decoded, temperature, length), None, None)
    texts = plain(setting, suite, temperature)
    answers = answers_of(setting, suite, texts)
    kept = _keeps(setting, name, suite, answers, temperature)
    pairs = list(zip(answers, kept, strict=True))
    rows = [expected_counts(answer, one, length) for answer, one in pairs]
    lengths = [
        SampledLength(
            num_draft_tokens=k,
            acceptance_length=length_interval(
                [expected_counts(answer, one, k) for answer, one in pairs], **setting.bootstrap
            ),
        )
        for k in range(1, config.max_draft_tokens + 1)
    ]
    chosen = spread(everything, config.decoded_prompts if check else 0)
    decoded_length = replayed_length = None
    if chosen:
        decoded = _decode(setting, name, suite, chosen, temperature, length)
        decoded_length = decoded.length_interval(**setting.bootstrap)
        replayed_length = length_interval([rows[i] for i in chosen], **setting.bootstrap)
    counted = CountedTexts(rows, texts.token_ids, texts.finish_reasons, texts.seconds)
    record = _record(setting, name, suite, counted, temperature, length, ())
    replayed = SampledReplay(
        drafter=name,
        suite=suite,
        temperature=temperature,
        num_draft_tokens=length,
        num_prompts=len(rows),
        num_decoded=len(chosen),
        replayed=replayed_length,
        decoded=decoded_length,
        agrees=replayed_length.overlaps(decoded_length)
        if replayed_length and decoded_length and len(chosen) >= ENOUGH_TO_AGREE
        else None,
        lengths=lengths,
    )
    rounds = [list(expected_rounds(answer, one, length)) for answer, one in pairs]
    return Measured(record, replayed, rounds)


def by_place(
    setting: Setting,
    found: Measured,
    proposed: Sequence[Proposals] | None = None,
    scores: Sequence[AnswerScores] | None = None,
) -> list[BreakdownResult]:
    """What was measured, by kind of place in the texts; empty where no rounds are known.

    Args:
        proposed, scores: of the same texts, for agreement and overlap.
    """
    record = found.record
    if found.rounds is None:
        return []
    return breakdown(
        _places(setting, record.suite, record.temperature),
        found.rounds,
        drafter=record.drafter,
        suite=record.suite,
        temperature=record.temperature,
        matches=None if proposed is None else [[n > 0 for n in p.num_matching] for p in proposed],
        overlaps=None if scores is None else [one.overlap for one in scores],
        **setting.bootstrap,
    )


def _places(setting: Setting, suite: str, temperature: float) -> Groups:
    """The kinds of all places of the target's texts, for all drafters."""
    return setting.parts.get(
        f"places {suite} {temperature:g}",
        dict[str, list[Any]],
        lambda: groups_of(
            setting.target,
            setting.suites[suite],
            answers_of(setting, suite, plain(setting, suite, temperature)),
            [one.entropies for one in scores_along(setting, suite, temperature)],
        ),
    )


def _proposals(
    setting: Setting, name: str, suite: str, answers: Sequence[Answer]
) -> list[Proposals]:
    """What would be drafted along every answer, greedily."""
    states, drafter = setting.states, setting.drafters[name]
    longest = setting.config.max_draft_tokens

    def compute() -> list[list[list[int]]]:
        found = []
        with setting.stage(f"replay of {name}, {suite}", len(answers)) as advance:
            for answer in answers:
                one = proposals(states, drafter, answer, max_draft_tokens=longest)
                found.append([one.num_proposed, one.num_matching])
                advance(1)
        return found

    stored = setting.parts.get(f"proposals {name} {suite}", list[list[list[int]]], compute)
    return [Proposals(*one) for one in stored]


def _keeps(
    setting: Setting, name: str, suite: str, answers: Sequence[Answer], temperature: float
) -> list[Keeps]:
    """What would be kept along every sampled answer."""
    states, drafter = setting.states, setting.drafters[name]
    longest = setting.config.max_draft_tokens
    known = scores_along(setting, suite, temperature)

    def compute() -> list[list[Any]]:
        found: list[list[Any]] = []
        title = f"replay of {name}, {suite}, temperature {temperature:g}"
        with setting.stage(title, len(answers)) as advance:
            for answer, scores in zip(answers, known, strict=True):
                one = keeps(
                    states,
                    drafter,
                    answer,
                    scores.log_probs,
                    temperature=temperature,
                    max_draft_tokens=longest,
                )
                found.append([one.num_proposed, one.survival])
                advance(1)
        return found

    part = f"keeps {name} {suite} {temperature:g}"
    return [Keeps(*one) for one in setting.parts.get(part, list[Any], compute)]


def _decode(
    setting: Setting,
    name: str | None,
    suite: str,
    chosen: Sequence[int],
    temperature: float,
    length: int,
) -> MeasuredAcceptance:
    """Some prompts of a suite, decoded with a drafter or, `name` None, plainly; every batch of them
    is kept once it is done."""
    config, prompts = setting.config, setting.suites[suite]
    kind = "greedy" if temperature == 0 else "sampled"
    title = f"plain {kind} texts" if name is None else f"{kind} decoding with {name}"
    part = f"{title} {suite} {temperature:g} {len(chosen)}"

    def compute(batch: Sequence[int]) -> MeasuredAcceptance:
        return measure_acceptance(
            setting.target,
            None if name is None else setting.drafters[name],
            [prompts[i].token_ids for i in batch],
            num_draft_tokens=length,
            max_new_tokens=config.max_new_tokens,
            temperature=temperature,
            seed=[_seed(config.seed, name is None, prompts[i].token_ids) for i in batch],
            batch_size=config.batch_size,
        )

    def all_batches() -> MeasuredAcceptance:
        found = []
        with setting.stage(f"{title}, {suite}", len(chosen)) as advance:
            for first in range(0, len(chosen), config.batch_size):
                batch = chosen[first : first + config.batch_size]
                done = partial(compute, batch)
                found.append(setting.parts.get(f"{part} from {first}", MeasuredAcceptance, done))
                advance(len(batch))
        return joined(found)

    return setting.parts.get(part, MeasuredAcceptance, all_batches)


def _seed(seed: int, is_plain: bool, token_ids: Sequence[int]) -> int:
    """What a prompt's draws start from: its own content, so that a page with other prompts beside it
    has the same text. Plain texts draw apart from speculative ones, which are a check of them."""
    facts = json.dumps([seed, is_plain, list(token_ids)])
    return int.from_bytes(hashlib.sha256(facts.encode()).digest()[:6], "big")


def _record(
    setting: Setting,
    name: str,
    suite: str,
    counted: MeasuredAcceptance | CountedTexts,
    temperature: float,
    length: int,
    decoded: Sequence[int] | None = None,
) -> AcceptanceResult:
    return acceptance_result(
        counted,
        setting.suites[suite],
        drafter=name,
        suite=suite,
        temperature=temperature,
        num_draft_tokens=length,
        decoded=decoded,
        **setting.bootstrap,
    )
