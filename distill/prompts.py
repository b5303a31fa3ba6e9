"""Prompts: what the target is asked, for training and for evaluation, and never the same for both.

The embedded default mix, all of it from packages whose licence allows it:

| source          | what                                      | from                       | licence      |
|-----------------|-------------------------------------------|----------------------------|--------------|
| self_prompted   | user turns that the target itself writes  | the target                 | its own      |
| tasks           | "Write a short story about {topic}", ...  | ours; topics from SQuAD    | CC BY-SA 4.0 |
| questions       | questions alone                           | SQuAD 2.0 dev              | CC BY-SA 4.0 |
| reading         | a paragraph and a question on it          | SQuAD 2.0 dev              | CC BY-SA 4.0 |
| summaries       | "Summarize ..." and a paragraph           | SQuAD 2.0 dev              | CC BY-SA 4.0 |
| word_problems   | grade-school word problems, seeded        | reasoning-gym gsm_symbolic | Apache-2.0   |
| (mt_bench)      | 80 questions, evaluation only             | FastChat                   | Apache-2.0   |
| (sharegpt)      | first messages of users; opt-in only      | ShareGPT V3                | none stated  |

A user's own file or data set replaces the mix, or is mixed with it by weight. Which prompts are
held out is decided by a hash of what they are about, so it is the same in every run, and two
prompts on one paragraph never end up on different sides. What is in the evaluation, word for word
or nearly, is left out of training.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from distill.conversations import Turns, conversation_of, prompts_of
from distill.mixture import distinct, mixture, split
from distill.overlap import Overlap, describe, find_overlaps
from distill.prefixes import SOURCE as PREFIXES
from distill.prefixes import prompts_begun, read_prefixes, without_prompts
from distill.prompt import Prompt, asked
from distill.prompt_sources import (
    mt_bench_questions,
    sharegpt_openings,
    squad_questions,
    squad_reading,
    squad_summaries,
    squad_tasks,
    word_problems,
)
from distill.rows import DatasetConfig, dataset_config, read_rows
from distill.templates import ChatTemplate

log = logging.getLogger(__name__)

_FILE = "file"  # name of the data set that prompts.file is


class Source(Enum):
    """Where a prompt of the mix comes from."""

    self_prompted = "self_prompted"
    tasks = "tasks"
    questions = "questions"
    reading = "reading"
    summaries = "summaries"
    word_problems = "word_problems"
    sharegpt = "sharegpt"


class PromptSets(NamedTuple):
    """Disjoint sets of prompts."""

    train: list[Prompt]
    suites: dict[str, list[Prompt]]  # for evaluation; held_out is of the same kinds as train
    overlaps: list[Overlap]  # what was left out of training, as it is in the evaluation


# (number of prompts, seed) -> texts of user turns that the target wrote
SelfPrompting = Callable[[int, int], list[str]]


@dataclass(kw_only=True)
class PromptsConfig:
    """Which prompts.

    Attributes:
        file: a file, folder or hub id of conversations; replaces the mix. What needs more than a
            path is one of the `datasets`.
        datasets: name -> the settings of a `DatasetConfig`: the user's own, each with its weight in
            the mix. (Hydra adds no dataclass to a mapping, so they arrive as mappings.)
        sources: share of each embedded source in the mix; they need not sum to one.
        turns: what becomes of conversations that the data sets answer themselves.
        prefixes: failures.jsonl of an evaluation, or its folder: answers up to where a drafter
            failed, for the target to go on from.
        prefix_share: of the training prompts, as far as there are so many.
        num_train: training prompts; those that are not answered within the budget are unused.
        num_held_out: evaluation prompts of the same kinds.
        held_out_fraction: of all candidates, the part that training never sees.
        suites: further evaluation prompts, never trained on.
        seed: of the generators and of the order.
    """

    file: str | None = None
    datasets: dict[str, Any] = field(default_factory=dict)
    turns: Turns = Turns.last
    prefixes: str | None = None
    prefix_share: float = 0.3
    sources: dict[str, float] = field(
        default_factory=lambda: {
            "self_prompted": 0.4,
            "tasks": 0.2,
            "questions": 0.15,
            "reading": 0.05,
            "summaries": 0.05,
            "word_problems": 0.15,
        }
    )
    num_train: int = 1200
    num_held_out: int = 40
    held_out_fraction: float = 0.1
    suites: list[str] = field(default_factory=lambda: ["mt_bench"])
    seed: int = 0

    def __post_init__(self) -> None:
        self.datasets = {name: dataset_config(name, it) for name, it in self.datasets.items()}
        known = [source.value for source in Source]
        for name, share in self.sources.items():
            if name not in known:
                raise ValueError(
                    f"prompts.sources.{name} is not a source; expected some of {', '.join(known)}"
                )
            if not share >= 0:
                raise ValueError(f"prompts.sources.{name} must be zero or positive, got {share}")
        if taken := sorted(set(self.datasets) & {*known, _FILE, PREFIXES}):
            raise ValueError(
                f"prompts.datasets.{taken[0]} has the name of an embedded source: give it another"
            )
        if self.file is None and not sum(self.shares.values()) > 0:
            raise ValueError(
                "prompts.sources has no positive share: give one, or prompts.file, or "
                "prompts.datasets"
            )
        if not 0 < self.prefix_share < 1:
            raise ValueError(
                f"prompts.prefix_share must be between 0 and 1, got {self.prefix_share}"
            )
        if self.num_train < 1:
            raise ValueError(f"prompts.num_train must be at least 1, got {self.num_train}")
        if self.num_held_out < 1:
            raise ValueError(f"prompts.num_held_out must be at least 1, got {self.num_held_out}")
        if unknown := sorted(set(self.suites) - set(SUITES)):
            raise ValueError(
                f"prompts.suites holds {unknown[0]!r}, expected some of {', '.join(SUITES)}"
            )
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(
                f"prompts.held_out_fraction must be between 0 and 1, got {self.held_out_fraction}"
            )

    @property
    def shares(self) -> dict[str, float]:
        """Name -> positive share, of everything that is in the mix."""
        if self.file is not None:
            return {_FILE: 1.0}
        weights = {name: dataset.weight for name, dataset in self.datasets.items()}
        return {name: share for name, share in (self.sources | weights).items() if share > 0}

    @property
    def own(self) -> dict[str, DatasetConfig]:
        """The user's own data sets that are in the mix."""
        if self.file is not None:
            return {_FILE: DatasetConfig(path=self.file)}
        return {name: self.datasets[name] for name in self.shares if name in self.datasets}


def load_prompts(
    config: PromptsConfig,
    *,
    own: dict[str, list[Prompt]] | None = None,
    self_prompting: SelfPrompting | None = None,
    template: ChatTemplate | None = None,
) -> PromptSets:
    """The prompt sets of a run.

    Args:
        own: what `read_own` has read already.
        self_prompting: has the target write user turns; needed if the mix asks for them.
        template: of the target; needed for `config.prefixes`.

    Raises:
        ValueError: for data that can not be used, or a set that would be empty.
    """
    shares = config.shares
    candidates = read_own(config) if own is None else dict(own)
    for name, share in shares.items():
        if name not in candidates:
            part = share / sum(shares.values())
            candidates[name] = _candidates(Source(name), part, config, self_prompting)
    sides: dict[bool, dict[str, list[Prompt]]] = {False: {}, True: {}}
    for name, prompts in candidates.items():
        for is_held_out, side in split(prompts, config.held_out_fraction).items():
            sides[is_held_out][name] = side
    suites = {name: SUITES[name]() for name in config.suites}
    if config.prefixes is not None:
        assert template is not None, "prefixes need the template that they were rendered with"
        prefixes, sides[True] = _prefixes(config.prefixes, suites, sides[True], template)
        sides[False][PREFIXES] = prefixes
        rest = sum(shares.values())
        shares = shares | {PREFIXES: rest * config.prefix_share / (1 - config.prefix_share)}
    evaluation = {"held_out": _held_out(sides[True], suites, config), **suites}
    overlaps = find_overlaps((p for side in sides[False].values() for p in side), evaluation)
    if overlaps:
        log.warning(describe(overlaps))
    in_evaluation = {one.train_id for one in overlaps}
    train = mixture(sides[False], shares, config.num_train, seed=config.seed, without=in_evaluation)
    _require_prompts({"train": train, **evaluation})
    return PromptSets(train, evaluation, overlaps)


def read_own(config: PromptsConfig) -> dict[str, list[Prompt]]:
    """The prompts of the user's own data sets, by name, in their order and each once.

    Raises:
        ValueError: for a path that can not be read, or the first row (named) that is no prompt.
    """
    return {
        name: distinct(read_dataset(dataset, name, config.turns))
        for name, dataset in config.own.items()
    }


def read_dataset(dataset: DatasetConfig, name: str, turns: Turns = Turns.last) -> list[Prompt]:
    """The prompts of one data set, in its order.

    Raises:
        ValueError: for a path that can not be read, or a row (named) that is no prompt; or if no
            prompt is in it.
    """
    found: list[Prompt] = []
    bad: list[str] = []
    for row in read_rows(dataset):
        try:
            found += prompts_of(conversation_of(row, dataset), turns, name, row.place)
        except ValueError as error:
            if not dataset.skip_bad_rows:
                raise
            bad.append(str(error))
    if bad:
        log.warning("%d rows of %s are no prompts and left out, first %s", len(bad), name, bad[0])
    if not found:
        raise ValueError(f"{dataset.path} holds no prompts")
    return found


def mt_bench() -> list[Prompt]:
    """The first turns of MT-bench's 80 questions."""
    return [asked("mt_bench", text) for text in mt_bench_questions()]


# Evaluation suites that come with the product, by name.
SUITES: dict[str, Callable[[], list[Prompt]]] = {"mt_bench": mt_bench}


def _prefixes(
    path: str,
    suites: dict[str, list[Prompt]],
    held_out: dict[str, list[Prompt]],
    template: ChatTemplate,
) -> tuple[list[Prompt], dict[str, list[Prompt]]]:
    """The prefixes that no suite begins with, and the prompts to hold out that begin none."""
    found = read_prefixes(Path(path), template)
    kept = without_prompts(found, (p for suite in suites.values() for p in suite), template)
    if len(kept) < len(found):
        log.warning(
            "%d of %d prefixes are not trained on: they begin with prompts of %s",
            len(found) - len(kept),
            len(found),
            ", ".join(suites),
        )
    if not kept:
        raise ValueError(
            f"all prefixes of {path} begin with prompts of {', '.join(suites)}, which this run is "
            "evaluated on: leave these out of prompts.suites, or evaluate on more prompts"
        )
    begun = {p.id for side in held_out.values() for p in prompts_begun(side, kept, template)}
    return kept, {name: [p for p in side if p.id not in begun] for name, side in held_out.items()}


def _held_out(
    candidates: dict[str, list[Prompt]], suites: dict[str, list[Prompt]], config: PromptsConfig
) -> list[Prompt]:
    """Held-out prompts of the same kinds as the training prompts, none of which a suite asks too."""
    twice = find_overlaps((p for side in candidates.values() for p in side), suites)
    return mixture(
        candidates,
        config.shares,
        config.num_held_out,
        seed=config.seed,
        without={one.train_id for one in twice},
    )


def _require_prompts(sets: dict[str, Sequence[Prompt]]) -> None:
    for name, prompts in sets.items():
        if not prompts:
            raise ValueError(
                f"no prompt is left for {name}: give more prompts, or another "
                "prompts.held_out_fraction"
            )


def _candidates(
    source: Source, share: float, config: PromptsConfig, self_prompting: SelfPrompting | None
) -> list[Prompt]:
    """Enough prompts of one source for both sides of the split, and some to spare."""
    fraction = config.held_out_fraction
    wanted = share * max(config.num_train / (1 - fraction), config.num_held_out / fraction)
    # The split is by hash, so a side may get less than its part; what costs nothing is oversupplied.
    count = round(wanted * (1.05 if source is Source.self_prompted else 1.5)) + 8
    name, seed = source.value, config.seed
    if source is Source.self_prompted:
        if self_prompting is None:
            raise ValueError("prompts.sources.self_prompted needs a target that writes them")
        return distinct([asked(name, text) for text in self_prompting(count, seed)])
    makers: dict[Source, Callable[[int, int], list[tuple[str, str]]]] = {
        Source.tasks: squad_tasks,
        Source.questions: squad_questions,
        Source.reading: squad_reading,
        Source.summaries: squad_summaries,
        Source.word_problems: word_problems,
        Source.sharegpt: sharegpt_openings,
    }
    return distinct([asked(name, text, about) for text, about in makers[source](count, seed)])
