"""The texts behind the embedded prompts. Each source gives (text, what it is about) pairs.

What it is about decides the split: all prompts on one paragraph or one topic stay on one side.
Lists are drawn with a seed; equal seeds give equal lists, and a longer one begins with a shorter.
"""

import json
import random
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from specdec_runtime.assets import MT_BENCH, SHAREGPT, SQUAD, fetch

Pairs = list[tuple[str, str]]

_MAX_PARAGRAPH_CHARS = 900  # about 200 tokens: long enough to read, short enough to be answered
_SHAREGPT_CHARS = range(10, 401)
# Names of persons, places and things: capitalised words, with small words only between them.
_TOPIC = re.compile(r"[A-Z][a-z]{2,}(?: (?:of |the |and )*[A-Z][a-z]+){0,3}")

# What people ask a chat model for, other than facts; the kinds are those of common chat suites.
_TASKS = (
    "Write a short story about {topic}.",
    "Write a poem about {topic}.",
    "Write a short blog post about {topic}.",
    "Write an email to a colleague about {topic}.",
    "Explain {topic} to a ten-year-old child.",
    "Explain {topic} in simple terms.",
    "What are the most important facts about {topic}?",
    "List five ideas for a school project about {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "Imagine you are an expert on {topic}. Introduce yourself and your work.",
    "Write a dialogue between two friends who talk about {topic}.",
    "Write an outline for a talk about {topic}.",
    "Compare {topic} with {other}.",
    "What would happen if {topic} did not exist?",
    "Write three quiz questions about {topic}, with answers.",
    "Give me a step-by-step plan for learning more about {topic}.",
    "Describe {topic} vividly, in one paragraph.",
    "Write a product description for a board game about {topic}.",
    "Write a Python function that stores facts about {topic} in a dictionary.",
    "Write a formal letter that asks the city council to do something about {topic}.",
)


class _Paragraph(NamedTuple):
    title: str
    text: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]


def word_problems(count: int, seed: int) -> Pairs:
    """Grade-school word problems; names and numbers are drawn, so there is no end to them."""
    import reasoning_gym  # imports a hundred generators and matplotlib: a second, for this source

    problems = reasoning_gym.create_dataset("gsm_symbolic", size=count, seed=seed)
    return [(problem["question"], "") for problem in problems]


def squad_questions(count: int, seed: int) -> Pairs:
    """Questions without the paragraph that answers them."""
    pairs = [(question, p.text) for p in _squad() for question in p.questions]
    return _drawn(pairs, count, seed)


def squad_reading(count: int, seed: int) -> Pairs:
    """A paragraph, then a question on it."""
    pairs = [(f"{p.text}\n\n{question}", p.text) for p in _short() for question in p.questions]
    return _drawn(pairs, count, seed)


def squad_summaries(count: int, seed: int) -> Pairs:
    """A request for a summary, then a paragraph."""
    pairs = [(f"Summarize the following text:\n\n{p.text}", p.text) for p in _short()]
    return _drawn(pairs, count, seed)


def squad_tasks(count: int, seed: int) -> Pairs:
    """Things to write about topics; a topic is the answer to a question, often a name or a thing."""
    topics = sorted(
        {
            (answer, paragraph.text)
            for paragraph in _squad()
            for answer in paragraph.answers
            if _TOPIC.fullmatch(answer)
        }
    )
    noise = random.Random(seed)
    drawn = noise.sample(topics, min(count, len(topics)))
    return [
        (noise.choice(_TASKS).format(topic=topic, other=noise.choice(topics)[0]), about)
        for topic, about in drawn
    ]


def sharegpt_openings(count: int, seed: int) -> Pairs:
    """What users said first to a chat model; no licence is stated, so nobody gets it unasked."""
    openings = dict.fromkeys(_sharegpt_openings())
    return _drawn([(text, "") for text in openings], count, seed)


def mt_bench_questions() -> Pairs:
    """The first turns of the 80 questions, in their order, each with its category."""
    lines = fetch(MT_BENCH).read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line) for line in lines]
    return [(question["turns"][0], question["category"]) for question in questions]


def _drawn(pairs: Pairs, count: int, seed: int) -> Pairs:
    return random.Random(seed).sample(pairs, len(pairs))[:count]


def _short() -> list[_Paragraph]:
    return [p for p in _squad() if len(p.text) <= _MAX_PARAGRAPH_CHARS]


@lru_cache(maxsize=1)
def _squad() -> list[_Paragraph]:
    articles = json.loads(fetch(SQUAD).read_text(encoding="utf-8"))["data"]
    return [
        _Paragraph(
            article["title"],
            paragraph["context"],
            tuple(qa["question"].strip() for qa in paragraph["qas"]),
            tuple(answer["text"].strip() for qa in paragraph["qas"] for answer in qa["answers"]),
        )
        for article in articles
        for paragraph in article["paragraphs"]
    ]


def _sharegpt_openings() -> Iterator[str]:
    for conversation in _readable_objects(fetch(SHAREGPT).read_text("utf-8", errors="ignore")):
        turns = conversation["conversations"]
        if len(turns) >= 2 and turns[0]["from"] == "human":
            text = turns[0]["value"].strip()
            if len(text) in _SHAREGPT_CHARS and text.isascii():
                yield text


def _readable_objects(text: str) -> Iterator[dict[str, Any]]:
    """The objects of a JSON array up to where the file was cut off, as this one was."""
    decoder = json.JSONDecoder()
    position = text.index("[") + 1
    while True:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        try:
            record, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            return
        yield record
