"""From a row of a data set to the prompts in it.

{"messages": [{"role": "user", "content": "..."}, ...]}       a conversation
{"conversations": [{"from": "human", "value": "..."}, ...]}   the same, as in ShareGPT
{"turns": ["...", "..."]}                                     user messages, asked in turn
{"prompt": "...", "completion": "..."}                        one user message, perhaps its answer
{"text": "..."}                                               plain text, without a template

beside which `system` and `tools` are read. Other names are declared in `DatasetConfig.columns`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from distill.prompt import Message, Prompt, letters, make_prompt
from distill.rows import COLUMNS, DatasetConfig, Row

_FORMS = "expected a column messages, conversations, turns, prompt (and completion) or text"
_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
# The target continues the first half of a plain text; longer beginnings teach nothing more.
_MAX_OPENING_CHARS = 1000


class Turns(Enum):
    """What becomes of a conversation that has assistant turns already (prompts.turns).

    last: the target answers the last user message; the turns before it stay as they are.
    each: the target answers each user message on the answers that it gave before; the data set's
        own answers are dropped.
    given: nothing is written; the data set's own answers are trained on, one row a turn.
    """

    last = "last"
    each = "each"
    given = "given"


@dataclass(frozen=True)
class Conversation:
    """What a row holds.

    Attributes:
        messages: all of them, the assistant's included; starts with no assistant's.
        later: user messages to be asked after that.
        tools: JSON schemas.
        text: instead of messages.
    """

    messages: tuple[Message, ...] = ()
    later: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    text: str = ""


def conversation_of(row: Row, config: DatasetConfig) -> Conversation:
    """Reads one row.

    Raises:
        ValueError: naming the row and what it lacks.
    """
    if not isinstance(row.value, dict):
        raise ValueError(f"{row.place}: {_FORMS}, got {type(row.value).__name__}")
    named = {
        ours: row.value[config.columns.get(ours, ours)]
        for ours in COLUMNS
        if row.value.get(config.columns.get(ours, ours)) is not None
    }
    # What the user has declared comes first, then the richest form.
    forms = sorted(_PARSERS, key=lambda name: name not in config.columns)
    form = next((name for name in forms if name in named), None)
    if form is None:
        raise ValueError(
            f"{row.place}: {_FORMS}, got {', '.join(map(str, row.value)) or 'none'}: rename one, or "
            "declare it in columns (docs/data.md)"
        )
    reader = _Reader(row.place, named, config)
    return reader.checked(_PARSERS[form](reader))


def prompts_of(conversation: Conversation, turns: Turns, source: str, place: str) -> list[Prompt]:
    """The prompts in a conversation.

    Raises:
        ValueError: if it holds none, naming its place.
    """
    if conversation.text:
        return [_text_prompt(conversation.text, turns, source)]
    if turns is Turns.given:
        return _answered(conversation, source, place)
    asked = _asked(conversation.messages)
    if turns is Turns.each:
        later = tuple(asked[1:]) + tuple((message,) for message in conversation.later)
        messages = asked[0]
        about = letters(str(messages[-1]["content"]))
        return [make_prompt(source, messages, tools=conversation.tools, about=about, later=later)]
    messages = conversation.messages
    while messages[-1]["role"] == "assistant":
        messages = messages[:-1]  # what the target is to write itself
    return [make_prompt(source, messages, tools=conversation.tools)]


def _answered(conversation: Conversation, source: str, place: str) -> list[Prompt]:
    """One prompt for each answer that the data set has; all of them stay on one side of the split."""
    messages = conversation.messages
    about = letters(next(str(m["content"]) for m in messages if m["role"] == "user"))
    found = [
        make_prompt(source, messages[:i], tools=conversation.tools, about=about, answer=messages[i])
        for i in range(1, len(messages))
        if messages[i]["role"] == "assistant" and any(m["role"] == "user" for m in messages[:i])
    ]
    if not found:
        raise ValueError(
            f"{place}: prompts.turns=given trains on the answers of the data set, and this row has "
            "none: give it a completion or an assistant message, or use prompts.turns=last"
        )
    return found


def _asked(messages: tuple[Message, ...]) -> list[tuple[Message, ...]]:
    """What stands between the assistant's turns, up to the first reply of a tool: it answers a call
    that the target may not make."""
    groups: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] == "tool":
            groups.pop()
            break
        if message["role"] != "assistant":
            groups[-1].append(message)
        elif groups[-1]:
            groups.append([])
    return [tuple(group) for group in groups if group]


def _text_prompt(text: str, turns: Turns, source: str) -> Prompt:
    """The beginning of a text for the target to continue; of a given text, its first word."""
    end = 1 if turns is Turns.given else min(len(text) // 2, _MAX_OPENING_CHARS)
    space = text.find(" ", end)
    cut = space if 0 < space < len(text) - 1 else max(end, 1)
    answer = {"role": "assistant", "content": text[cut:]} if turns is Turns.given else None
    return make_prompt(source, (), text=text[:cut], about=letters(text), answer=answer)


class _Reader:
    """The columns of one row, under our names."""

    def __init__(self, place: str, named: dict[str, Any], config: DatasetConfig) -> None:
        self._place, self._named, self._config = place, named, config

    def conversation(self) -> Conversation:
        column = "messages" if "messages" in self._named else "conversations"
        return Conversation(self._messages(self._named[column], column))

    def turns(self) -> Conversation:
        turns = self._parsed("turns")
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            raise self._error("turns must be a list of texts")
        messages = tuple({"role": "user", "content": turn} for turn in turns)
        return Conversation(messages[:1], later=messages[1:])

    def prompt(self) -> Conversation:
        messages = self._as_messages("prompt", "user")
        if "completion" in self._named:
            messages += self._as_messages("completion", "assistant")
        return Conversation(messages)

    def text(self) -> Conversation:
        text = self._named["text"]
        if not isinstance(text, str) or len(text.split()) < 2:
            raise self._error("text must be a text of two words at least")
        return Conversation(text=text)

    def checked(self, found: Conversation) -> Conversation:
        """With system message and tools; something is asked in it."""
        if found.text:
            return found
        messages = found.messages
        while messages and messages[0]["role"] == "assistant":
            messages = messages[1:]  # an answer to nothing
        if not any(m["role"] == "user" and m["content"].strip() for m in messages):
            raise self._error("no user says anything in it")
        system = self._named.get("system")
        if system and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": str(system)}, *messages)
        tools = self._parsed("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise self._error("tools must be a list of objects")
        return replace(found, messages=messages, tools=tuple(tools))

    def _as_messages(self, column: str, role: str) -> tuple[Message, ...]:
        value = self._named[column]
        if isinstance(value, str):
            return ({"role": role, "content": value},)
        if not isinstance(value, list):
            raise self._error(
                f"{column} must be a text or a list of messages, got {type(value).__name__}"
            )
        return self._messages(value, column)

    def _messages(self, value: Any, column: str) -> tuple[Message, ...]:
        value = _with_lists(value)
        if not isinstance(value, list) or not value:
            raise self._error(f"{column} must be a list of messages")
        return tuple(self._message(message, i) for i, message in enumerate(value))

    def _message(self, message: Any, number: int) -> Message:
        if not isinstance(message, dict):
            raise self._error(f"message {number} must be an object, got {type(message).__name__}")
        role_key = self._config.columns.get("role", "role" if "role" in message else "from")
        default = "value" if role_key == "from" else "content"
        content_key = self._config.columns.get("content", default)
        said_by = message.get(role_key)
        role = _ROLES.get(self._config.roles.get(str(said_by), str(said_by)))
        if role is None:
            raise self._error(
                f"message {number} is by {said_by!r}: expected {role_key} to be system, user, "
                "assistant or tool, or declared in roles (docs/data.md)"
            )
        if role == "user" and message.get(content_key) is None:
            raise self._error(f"message {number} needs a {content_key}")
        content = self._content(message.get(content_key), number)
        others = {
            key: item
            for key, item in message.items()
            if key not in (role_key, content_key) and item is not None
        }
        return {"role": role, "content": content, **others}

    def _content(self, content: Any, number: int) -> str:
        """A message's text; what arrives in parts is joined as servers do for text templates."""
        if content is None:
            return ""  # an assistant's that only calls a tool
        if isinstance(content, list):
            parts: list[Any] = [p.get("text") if isinstance(p, dict) else p for p in content]
            if all(isinstance(part, str) for part in parts):
                return "\n".join(parts)
        if not isinstance(content, str):
            raise self._error(f"message {number} must be text: images and sound can not be used")
        return content

    def _parsed(self, column: str) -> Any:
        return _with_lists(self._named.get(column))

    def _error(self, problem: str) -> ValueError:
        return ValueError(f"{self._place}: {problem}")


def _with_lists(value: Any) -> Any:
    """A value, or the list that it is the JSON text of, as in a CSV file."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


_PARSERS: dict[str, Callable[[_Reader], Conversation]] = {
    "messages": _Reader.conversation,
    "conversations": _Reader.conversation,
    "turns": _Reader.turns,
    "prompt": _Reader.prompt,
    "text": _Reader.text,
}
