"""The prompts that come with the product, and the suites that it is evaluated on.

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
"""

from collections.abc import Callable
from enum import Enum

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

# (number of prompts, seed) -> texts of user turns that the target wrote
SelfPrompting = Callable[[int, int], list[str]]


class Source(Enum):
    """Where a prompt of the mix comes from."""

    self_prompted = "self_prompted"
    tasks = "tasks"
    questions = "questions"
    reading = "reading"
    summaries = "summaries"
    word_problems = "word_problems"
    sharegpt = "sharegpt"


def embedded_prompts(
    source: Source, wanted: float, seed: int, self_prompting: SelfPrompting | None
) -> list[Prompt]:
    """The prompts of one source: about as many as are wanted for both sides of the split, and some
    to spare.

    Raises:
        ValueError: if the target is to write them and is not there.
    """
    # The split is by hash, so a side may get less than its part; what costs nothing is oversupplied.
    count = round(wanted * (1.05 if source is Source.self_prompted else 1.5)) + 8
    name = source.value
    if source is Source.self_prompted:
        if self_prompting is None:
            raise ValueError("prompts.sources.self_prompted needs a target that writes them")
        return [asked(name, text) for text in self_prompting(count, seed)]
    makers: dict[Source, Callable[[int, int], list[tuple[str, str]]]] = {
        Source.tasks: squad_tasks,
        Source.questions: squad_questions,
        Source.reading: squad_reading,
        Source.summaries: squad_summaries,
        Source.word_problems: word_problems,
        Source.sharegpt: sharegpt_openings,
    }
    return [asked(name, text, about) for text, about in makers[source](count, seed)]


def mt_bench() -> list[Prompt]:
    """The first turns of MT-bench's 80 questions."""
    return [asked("mt_bench", text, category=kind) for text, kind in mt_bench_questions()]


# Evaluation suites that come with the product, by name.
SUITES: dict[str, Callable[[], list[Prompt]]] = {"mt_bench": mt_bench}
