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

A user's own file (JSON lines) replaces the mix. Which prompts are held out is decided by a hash of
what they are about, so it is the same in every run, and two prompts on one paragraph never end up
on different sides.
"""

import hashlib
import random
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from distill.prompt_files import read_prompt_file
from distill.prompt_sources import (
    mt_bench_questions,
    sharegpt_openings,
    squad_questions,
    squad_reading,
    squad_summaries,
    squad_tasks,
    word_problems,
)

_HELD_OUT_BUCKETS = 1000


class Source(Enum):
    """Where a prompt of the mix comes from."""

    self_prompted = "self_prompted"
    tasks = "tasks"
    questions = "questions"
    reading = "reading"
    summaries = "summaries"
    word_problems = "word_problems"
    sharegpt = "sharegpt"


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends where the target is to answer.

    Attributes:
        id: source and a hash of the messages: the same prompt has the same id in every run.
        source: of the mix, a suite's name, or a file's.
        messages: role and content, the last one not the assistant's.
        about: what the split looks at; prompts about the same thing stay together.
    """

    id: str
    source: str
    messages: tuple[dict[str, str], ...]
    about: str = ""


class PromptSets(NamedTuple):
    """Disjoint sets of prompts."""

    train: list[Prompt]
    suites: dict[str, list[Prompt]]  # for evaluation; held_out is of the same kinds as train


# (number of prompts, seed) -> texts of user turns that the target wrote
SelfPrompting = Callable[[int, int], list[str]]


@dataclass(kw_only=True)
class PromptsConfig:
    """Which prompts.

    Attributes:
        file: JSON lines with messages, prompt or turns; replaces the mix.
        sources: share of each source in the mix; they need not sum to one.
        num_train: training prompts; those that are not answered within the budget are unused.
        num_held_out: evaluation prompts of the same kinds.
        held_out_fraction: of all candidates, the part that training never sees.
        suites: further evaluation prompts, never trained on.
        seed: of the generators and of the order.
    """

    file: str | None = None
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
        known = [source.value for source in Source]
        for name, share in self.sources.items():
            if name not in known:
                raise ValueError(
                    f"prompts.sources.{name} is not a source; expected some of {', '.join(known)}"
                )
            if not share >= 0:
                raise ValueError(f"prompts.sources.{name} must be zero or positive, got {share}")
        if self.file is None and not sum(self.sources.values()) > 0:
            raise ValueError("prompts.sources has no positive share: give one, or prompts.file")
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


def load_prompts(
    config: PromptsConfig, *, self_prompting: SelfPrompting | None = None
) -> PromptSets:
    """The prompt sets of a run.

    Args:
        self_prompting: has the target write user turns; needed if the mix asks for them.

    Raises:
        ValueError: for a file that can not be used, or sets that overlap.
    """
    if config.file is not None:
        candidates = {"file": distinct(read_prompts(Path(config.file)))}
        shares = {"file": 1.0}
    else:
        shares = {name: share for name, share in config.sources.items() if share > 0}
        candidates = {
            name: _candidates(Source(name), share / sum(shares.values()), config, self_prompting)
            for name, share in shares.items()
        }
    suites = {name: SUITES[name]() for name in config.suites}
    asked = {normalised(prompt) for suite in suites.values() for prompt in suite}
    sides: dict[bool, dict[str, list[Prompt]]] = {False: {}, True: {}}
    for name, prompts in candidates.items():
        for is_held_out, side in split(prompts, config.held_out_fraction).items():
            sides[is_held_out][name] = [p for p in side if normalised(p) not in asked]
    train = mixture(sides[False], shares, config.num_train, seed=config.seed)
    held_out = mixture(sides[True], shares, config.num_held_out, seed=config.seed)
    evaluation = {"held_out": held_out, **suites}
    require_disjoint(train, evaluation)
    return PromptSets(train, evaluation)


def mt_bench() -> list[Prompt]:
    """The first turns of MT-bench's 80 questions."""
    return [_prompt("mt_bench", text) for text in mt_bench_questions()]


# Evaluation suites that come with the product, by name.
SUITES: dict[str, Callable[[], list[Prompt]]] = {"mt_bench": mt_bench}


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a JSON-lines file, in its order.

    Raises:
        ValueError: for a file that does not exist or is empty, or a line (named) that is no prompt.
    """
    return [
        Prompt(_prompt_id(path.stem, messages), path.stem, messages)
        for messages in read_prompt_file(path)
    ]


def split(prompts: Sequence[Prompt], held_out_fraction: float) -> dict[bool, list[Prompt]]:
    """{False: for training, True: held out}, by a hash of what each prompt is about.

    Both sides get something where that is possible: with few prompts none may hash to the smaller
    side, and then the prompts about the thing with the smallest hash are held out.
    """
    limit = round(held_out_fraction * _HELD_OUT_BUCKETS)
    buckets = {prompt.id: _bucket(prompt) for prompt in prompts}
    if buckets and min(buckets.values()) >= limit:
        limit = min(buckets.values()) + 1
    sides: dict[bool, list[Prompt]] = {False: [], True: []}
    for prompt in prompts:
        sides[buckets[prompt.id] < limit].append(prompt)
    return sides


def mixture(
    prompts: dict[str, list[Prompt]], shares: dict[str, float], size: int, *, seed: int
) -> list[Prompt]:
    """At most `size` prompts by share, shuffled; every beginning of the list has about the mix.

    A source that runs out leaves its places to the others.
    """
    queues = {name: list(_shuffled(items, seed)) for name, items in sorted(prompts.items())}
    taken = dict.fromkeys(queues, 0)
    mixed: list[Prompt] = []
    while len(mixed) < size:
        open_sources = [name for name, queue in queues.items() if taken[name] < len(queue)]
        if not open_sources:
            break
        # The source that lags most behind its share is next.
        name = min(open_sources, key=lambda source: (taken[source] + 1) / shares[source])
        mixed.append(queues[name][taken[name]])
        taken[name] += 1
    return mixed


def distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts without repetitions, compared as `normalised`; the first of each stays."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(normalised(prompt), prompt)
    return list(first.values())


def require_disjoint(train: Sequence[Prompt], evaluation: dict[str, list[Prompt]]) -> None:
    """Whether no evaluation prompt occurs in training, up to case, spacing and punctuation.

    Raises:
        ValueError: naming the first prompt that does, or a set that is empty.
    """
    for name, prompts in {"train": list(train), **evaluation}.items():
        if not prompts:
            raise ValueError(
                f"no prompt is left for {name}: give more prompts, or another "
                "prompts.held_out_fraction"
            )
    seen = {normalised(prompt): prompt.id for prompt in train}
    for name, prompts in evaluation.items():
        for prompt in prompts:
            if (found := seen.get(normalised(prompt))) is not None:
                raise ValueError(
                    f"prompt {prompt.id} of {name} is also trained on (as {found}): remove it from "
                    "the training prompts, or the evaluation measures memory"
                )


def normalised(prompt: Prompt) -> str:
    """The users' words in lower case, without spacing and punctuation."""
    text = "".join(m["content"] for m in prompt.messages if m["role"] == "user")
    folded = unicodedata.normalize("NFKC", text).casefold()
    return "".join(character for character in folded if character.isalnum())


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
        return distinct([_prompt(name, text) for text in self_prompting(count, seed)])
    makers: dict[Source, Callable[[int, int], list[tuple[str, str]]]] = {
        Source.tasks: squad_tasks,
        Source.questions: squad_questions,
        Source.reading: squad_reading,
        Source.summaries: squad_summaries,
        Source.word_problems: word_problems,
        Source.sharegpt: sharegpt_openings,
    }
    return distinct([_prompt(name, text, about) for text, about in makers[source](count, seed)])


def _prompt(source: str, text: str, about: str = "") -> Prompt:
    messages = ({"role": "user", "content": text},)
    return Prompt(_prompt_id(source, messages), source, messages, about)


def _prompt_id(source: str, messages: Sequence[dict[str, str]]) -> str:
    content = "\x1e".join(f"{message['role']}\x1f{message['content']}" for message in messages)
    return f"{source}-{hashlib.sha256(content.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def _bucket(prompt: Prompt) -> int:
    about = prompt.about or normalised(prompt)
    digest = hashlib.sha256(about.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_BUCKETS


def _shuffled(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    return random.Random(seed).sample(list(prompts), len(prompts))
