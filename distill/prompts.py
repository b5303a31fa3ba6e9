"""Prompts: what the target is asked, for training and for evaluation, and never the same for both.

Where none are given, they come from `embedded_prompts.py`; a user's own file or data set replaces
that mix, or is mixed with it by weight. Which prompts are held out is decided by a hash of what
they are about, so it is the same in every run, and two prompts on one paragraph never end up on
different sides. What is in the evaluation, word for word or nearly, is left out of training.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from distill.conversations import Turns, conversation_of, prompts_of
from distill.embedded_prompts import SUITES, SelfPrompting, Source, embedded_prompts
from distill.mixture import distinct, mixture, split
from distill.overlap import Overlap, describe, find_overlaps
from distill.prefixes import SOURCE as PREFIXES
from distill.prefixes import prompts_begun, read_prefixes, without_prompts
from distill.prompt import Prompt
from distill.rows import DatasetConfig, dataset_config, read_rows
from distill.templates import ChatTemplate

log = logging.getLogger(__name__)

_FILE = "file"  # name of the data set that prompts.file is


class PromptSets(NamedTuple):
    """Disjoint sets of prompts."""

    train: list[Prompt]
    suites: dict[str, list[Prompt]]  # for evaluation; held_out is of the same kinds as train
    overlaps: list[Overlap]  # what was left out of training, as it is in the evaluation


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
            fraction = config.held_out_fraction
            wanted = max(config.num_train / (1 - fraction), config.num_held_out / fraction)
            candidates[name] = distinct(
                embedded_prompts(Source(name), part * wanted, config.seed, self_prompting)
            )
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
    held_out, _ = _without_overlaps(sides[True], config.shares, config.num_held_out, suites, config)
    evaluation = {"held_out": held_out, **suites}
    train, overlaps = _without_overlaps(sides[False], shares, config.num_train, evaluation, config)
    if overlaps:
        log.warning("%s", describe(overlaps))
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


def _without_overlaps(
    candidates: dict[str, list[Prompt]],
    shares: dict[str, float],
    size: int,
    evaluation: dict[str, list[Prompt]],
    config: PromptsConfig,
) -> tuple[list[Prompt], list[Overlap]]:
    """A mixture of prompts that are not in the evaluation, and those that others took the place of.

    Only what is taken is compared, as a data set may hold far more than is needed.
    """
    overlaps: list[Overlap] = []
    compared: set[str] = set()
    while True:
        out = {one.train_id for one in overlaps}
        taken = mixture(candidates, shares, size, seed=config.seed, without=out)
        found = find_overlaps((p for p in taken if p.id not in compared), evaluation)
        if not found:
            return taken, overlaps
        compared |= {prompt.id for prompt in taken}
        overlaps += found


def _require_prompts(sets: dict[str, Sequence[Prompt]]) -> None:
    for name, prompts in sets.items():
        if not prompts:
            raise ValueError(
                f"no prompt is left for {name}: give more prompts, or another "
                "prompts.held_out_fraction"
            )
