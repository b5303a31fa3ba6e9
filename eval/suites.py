"""Prompt suites: questions from a file or from a fetched package, encoded for one target.

A line of a suite file is a JSON object with one of
    "prompt": a user's question as text
    "messages": a chat, [{"role": ..., "content": ...}, ...]
    "turns": a list of user turns (MT-bench, Spec-Bench and SPEED-Bench files): see `turns.py`
    "token_ids": an encoded prompt (what a run writes to eval/prompts.jsonl), taken as it is
and optionally "id" (also "question_id"), "category" and "suite".
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from eval.records import write_text
from specdec_runtime.chat import encode_chat

DEFAULT_SUITE = "prompts"  # where a line does not name its suite
T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """One line of a suite: a chat, or token ids that are final already.

    Attributes:
        later_turns: what the user says after the first answer, and so on.
    """

    id: str
    suite: str
    category: str | None
    messages: list[dict[str, str]] | None
    token_ids: list[int] | None = None
    text: str | None = None
    later_turns: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvalPrompt:
    """A prompt ready to decode; `text` is what the report shows of it."""

    id: str
    token_ids: list[int]
    category: str | None = None
    text: str = ""


def read_questions(path: Path, *, suite: str | None = None) -> list[Question]:
    """The questions of a JSONL file; `suite` names those whose line does not.

    Raises:
        ValueError: a line that cannot be used, as file:line; or no question at all.
    """
    questions = []
    for number, line in enumerate(_lines_of(path), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: not JSON ({error.msg} at column {error.colno})") from error
        questions.append(_question(record, place, number, suite or DEFAULT_SUITE))
    if not questions:
        raise ValueError(f"{path} holds no prompts; expected one JSON object a line")
    return questions


def encode(
    questions: Iterable[Question], tokenizer: Any, template_options: Mapping[str, Any] | None = None
) -> dict[str, list[EvalPrompt]]:
    """Questions -> {suite: prompts}, rendered with the target's own chat template.

    Args:
        tokenizer: the target's; without a chat template the last user text is encoded as it is.
        template_options: passed to the template, as recorded in the drafter's folder.
    """
    suites: dict[str, list[EvalPrompt]] = {}
    for question in questions:
        token_ids = question.token_ids
        if token_ids is None:
            assert question.messages is not None
            token_ids = encode_messages(question.messages, tokenizer, template_options)
        text = question.text or (question.messages[-1]["content"] if question.messages else "")
        prompt = EvalPrompt(question.id, token_ids, question.category, text)
        suites.setdefault(question.suite, []).append(prompt)
    return suites


def encode_messages(
    messages: Sequence[Mapping[str, str]],
    tokenizer: Any,
    template_options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a chat up to where the answer starts."""
    return encode_chat(tokenizer, messages, template_options)


def write_prompts(path: Path, suites: Mapping[str, Sequence[EvalPrompt]]) -> None:
    """Keep the encoded prompts of an evaluation, so that it can be repeated from its folder."""
    records = [
        {
            "id": prompt.id,
            "suite": suite,
            "category": prompt.category,
            "text": prompt.text,
            "token_ids": prompt.token_ids,
        }
        for suite, prompts in suites.items()
        for prompt in prompts
    ]
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def fitting(
    prompts: Sequence[EvalPrompt], *, max_new_tokens: int, max_positions: int, suite: str
) -> list[EvalPrompt]:
    """The prompts that leave room for their answer in the target's context.

    Raises:
        ValueError: if none does.
    """
    kept = [p for p in prompts if len(p.token_ids) + max_new_tokens <= max_positions]
    if not kept:
        shortest = min((len(prompt.token_ids) for prompt in prompts), default=0)
        raise ValueError(
            f"suite {suite}: the shortest of {len(prompts)} prompts has {shortest} tokens, which "
            f"with {max_new_tokens} new ones exceeds the target's context of {max_positions}; "
            "use shorter prompts or a smaller evaluation.max_new_tokens"
        )
    return kept


def as_prompts(suite: str, prompts: Sequence[EvalPrompt | Sequence[int]]) -> list[EvalPrompt]:
    """Accept bare token ids where a caller has nothing else."""
    return [
        prompt if isinstance(prompt, EvalPrompt) else EvalPrompt(f"{suite}/{index}", list(prompt))
        for index, prompt in enumerate(prompts)
    ]


def spread(prompts: Sequence[T], number: int) -> list[T]:
    """At most `number` prompts from all over the list, so that every category of a sorted file is seen.

    They come in the order of van der Corput's sequence (0, 1/2, 1/4, 3/4, 1/8, ...): the first few of
    them lie evenly too, and a smaller number is the beginning of a larger one. So evaluations that
    have time for different numbers of prompts share those of the smaller one.
    """
    bits = max(len(prompts) - 1, 0).bit_length()
    places = (_reversed_bits(i, bits) * len(prompts) >> bits for i in range(2**bits))
    return [prompts[i] for i in itertools.islice(dict.fromkeys(places), min(number, len(prompts)))]


def _reversed_bits(value: int, bits: int) -> int:
    return sum(1 << (bits - 1 - i) for i in range(bits) if value >> i & 1)


def _lines_of(path: Path) -> list[str]:
    if not path.is_file():
        raise FileNotFoundError(f"prompts file {path} does not exist; expected a JSONL file")
    try:
        # Not splitlines(): it also cuts at U+2028 and friends, which JSON strings may hold raw.
        return path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error


def _question(record: Any, place: str, number: int, suite: str) -> Question:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected a JSON object, got {type(record).__name__}")
    name = str(record.get("id", record.get("question_id", number)))
    category = record.get("category")
    token_ids, messages = record.get("token_ids"), _messages(record, place)
    if token_ids is not None and not (
        token_ids and isinstance(token_ids, list) and all(isinstance(t, int) for t in token_ids)
    ):
        raise ValueError(f"{place}: token_ids must be a non-empty list of integers")
    if token_ids is None and messages is None:
        keys = ", ".join(sorted(record)) or "none"
        raise ValueError(
            f"{place}: no prompt found (keys: {keys}); expected one of "
            "prompt, messages, turns, token_ids"
        )
    return Question(
        id=name,
        suite=str(record.get("suite", suite)),
        category=None if category is None else str(category),
        messages=messages,
        token_ids=token_ids,
        text=record.get("text"),
        later_turns=_later_turns(record) if token_ids is None else (),
    )


def _messages(record: Mapping[str, Any], place: str) -> list[dict[str, str]] | None:
    """The chat of a line, from whichever of the accepted keys it has."""
    if "messages" in record:
        messages = record["messages"]
        sound = isinstance(messages, list) and messages
        if not sound or not all(_is_message(message) for message in messages):
            raise ValueError(f"{place}: messages must be a list of objects with role and content")
        return [{"role": m["role"], "content": m["content"]} for m in messages]
    if "turns" in record:
        turns = record["turns"]
        texts = isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)
        if not texts or not turns or not turns[0].strip():
            raise ValueError(f"{place}: turns must be a non-empty list of texts")
        return [{"role": "user", "content": turns[0]}]
    if "prompt" in record:
        if not isinstance(record["prompt"], str) or not record["prompt"].strip():
            raise ValueError(f"{place}: prompt must be a non-empty text")
        return [{"role": "user", "content": record["prompt"]}]
    return None


def _later_turns(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a line without messages, the user turns behind the first."""
    return () if "messages" in record else tuple(record.get("turns", ())[1:])


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )
