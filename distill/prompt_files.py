"""A user's own prompts: one JSON object a line, errors by line number.

{"prompt": "..."}                                     one user message
{"messages": [{"role": "user", "content": "..."}]}    a conversation; a last answer is dropped
{"turns": ["...", "..."]}                             user messages; the first is taken
"""

import json
from pathlib import Path
from typing import Any

Messages = tuple[dict[str, str], ...]

_FORMS = "expected a key prompt (text), messages (role and content) or turns (texts)"


def read_prompt_file(path: Path) -> list[Messages]:
    """The conversations of a file; each ends where the target is to answer.

    Raises:
        ValueError: for a file that is missing or empty, or the first line that is no prompt.
    """
    if not path.is_file():
        raise ValueError(f"prompts.file={path}: no such file")
    found = []
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    found.append(_parse(line, f"{path}:{number}"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error.reason}): convert it") from None
    if not found:
        raise ValueError(f"{path} holds no prompts: {_FORMS} on each line")
    return found


def _parse(line: str, place: str) -> Messages:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: {_FORMS}, got {type(record).__name__}")
    match record:
        case {"messages": list(messages)}:
            return _conversation(messages, place)
        case {"prompt": str(text)} if text.strip():
            return ({"role": "user", "content": text},)
        case {"turns": [str(text), *_]} if text.strip():
            return ({"role": "user", "content": text},)
    raise ValueError(f"{place}: {_FORMS}, got keys {sorted(record)}")


def _conversation(messages: list[Any], place: str) -> Messages:
    for number, message in enumerate(messages):
        match message:
            case {"role": str(), "content": str()}:
                continue
        raise ValueError(f"{place}: message {number} needs a role and a content, both text")
    checked = [{"role": m["role"], "content": m["content"]} for m in messages]
    while checked and checked[-1]["role"] == "assistant":
        checked.pop()  # what the target is to write itself
    if not any(message["role"] == "user" and message["content"].strip() for message in checked):
        raise ValueError(f"{place}: messages hold no user's text")
    return tuple(checked)
