"""Suites that arrive inside packages, by name: what a drafter meets in use, one kind each.

| name        | what                                        | prompts | from                       | licence      |
|-------------|---------------------------------------------|---------|----------------------------|--------------|
| mt_bench    | chat, eight categories, two turns           | 80      | FastChat                   | Apache-2.0   |
| humaneval   | a Python function to complete               | 164     | OpenAI                     | MIT          |
| rag         | ten paragraphs, then a question             | 100     | HotpotQA dev               | CC BY-SA 4.0 |
| summary     | a passage to summarise                      | 100     | SQuAD 2.0 dev              | CC BY-SA 4.0 |
| translation | a sentence to translate, three languages    | 99      | SQuAD 2.0 dev              | CC BY-SA 4.0 |
| math        | grade-school word problems                  | 100     | reasoning-gym gsm_symbolic | Apache-2.0   |

Each file is fetched by package name, version and SHA-256. Spec-Bench and SPEED-Bench files are read
from where the user has them (`prompts=FILE.jsonl`): their licences do not allow to bundle them.
"""

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eval.suites import Question, read_questions
from specdec_runtime.assets import HOTPOTQA, HUMANEVAL, MT_BENCH, SQUAD, fetch

_NUM_PROMPTS = 100
_LANGUAGES = ("German", "French", "Spanish")
_MATH_SEED = 20_240_607  # training draws its own word problems with small seeds


def mt_bench() -> list[Question]:
    return read_questions(fetch(MT_BENCH), suite="mt_bench")


def humaneval() -> list[Question]:
    with gzip.open(fetch(HUMANEVAL), "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines]
    return [
        _question(
            "humaneval",
            index,
            f"Complete this Python function:\n\n```python\n{problem['prompt'].rstrip()}\n```",
        )
        for index, problem in enumerate(problems)
    ]


def rag() -> list[Question]:
    """Long inputs: about 1,300 tokens, of which the answer needs two paragraphs."""
    records = _spread(json.loads(fetch(HOTPOTQA).read_text(encoding="utf-8")), _NUM_PROMPTS)
    return [
        _question(
            "rag",
            index,
            "\n\n".join(f"{title}\n{''.join(sentences)}" for title, sentences in record["context"])
            + f"\n\nAnswer from the passages above, and say why: {record['question']}",
        )
        for index, record in enumerate(records)
    ]


def summary() -> list[Question]:
    return [
        _question("summary", index, f"Summarize the following passage:\n\n{passage}")
        for index, passage in enumerate(_spread(list(_passages()), _NUM_PROMPTS))
    ]


def translation() -> list[Question]:
    """Each sentence into one of three languages, which are the categories."""
    sentences = [passage.split(". ")[0].strip(". ") + "." for passage in _passages()]
    kept = _spread([text for text in sentences if 60 <= len(text) <= 240], _NUM_PROMPTS - 1)
    return [
        _question(
            "translation",
            index,
            f"Translate this sentence into {language}:\n\n{sentence}",
            category=language,
        )
        for index, sentence in enumerate(kept)
        for language in (_LANGUAGES[index % len(_LANGUAGES)],)
    ]


def math() -> list[Question]:
    import reasoning_gym  # a second to import, for this suite alone

    problems = reasoning_gym.create_dataset("gsm_symbolic", size=_NUM_PROMPTS, seed=_MATH_SEED)
    return [_question("math", index, p["question"]) for index, p in enumerate(problems)]


FETCHED: dict[str, Callable[[], list[Question]]] = {
    maker.__name__: maker for maker in (mt_bench, humaneval, rag, summary, translation, math)
}


def load_suites(names: Sequence[str], own: Sequence[Question] = ()) -> list[Question]:
    """The questions of some suites, in the order of the names.

    Args:
        own: questions of suites that can be named too; where a fetched one has the same name, that
            one is meant (it has categories and later turns).

    Raises:
        ValueError: for a name that is none, or no name.
    """
    known = dict.fromkeys([*FETCHED, *(question.suite for question in own)])
    if not names or not set(names) <= set(known):
        raise ValueError(
            f"suites={list(names)}: expected one or more of {', '.join(known)}, "
            "or give prompts=FILE.jsonl"
        )
    found: list[Question] = []
    for name in names:
        found += FETCHED[name]() if name in FETCHED else [q for q in own if q.suite == name]
    return found


def _passages() -> Iterator[str]:
    for article in json.loads(fetch(SQUAD).read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            yield paragraph["context"].strip()


def _spread(items: Sequence[Any], number: int) -> list[Any]:
    """At most `number`, evenly spaced: neighbours of these files are about the same thing."""
    return [items[i * len(items) // number] for i in range(min(number, len(items)))]


def _question(suite: str, index: int, text: str, *, category: str | None = None) -> Question:
    messages = [{"role": "user", "content": text}]
    return Question(f"{suite}/{index}", suite, category, messages)
