"""One prompt: what the target is asked, at one place of a conversation or of a text."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

_PLAIN_KEYS = {"role", "content"}
# Words; where a script writes none apart, each of its characters.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


@dataclass(frozen=True)
class Prompt:
    """What the target is to answer.

    Attributes:
        id: source and a hash of everything that is rendered: the same prompt has the same id in
            every run.
        source: of the mix, a suite's name, or a data set's.
        messages: role, content and whatever else the template reads; the last one is not the
            assistant's.
        about: what the split looks at; prompts about the same thing stay together.
        tools: JSON schemas that the template is given.
        text: instead of messages: the beginning of a plain text, which no template touches.
        token_ids: instead of messages: a prompt and the beginning of its answer, rendered already.
        answer: what the data set itself answers; None = the target writes it.
        later: what is asked after this answer, and after the next one, and so on.
        category: the kind of prompt within a source that has several; "" = the source is the kind.
    """

    id: str
    source: str
    messages: tuple[Message, ...]
    about: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] = ()
    answer: Message | None = None
    later: tuple[tuple[Message, ...], ...] = ()
    category: str = ""


def make_prompt(source: str, messages: Sequence[Message], **others: Any) -> Prompt:
    """A prompt with the id that belongs to it."""
    draft = Prompt("", source, tuple(messages), **others)
    digest = hashlib.sha256(_content(draft).encode("utf-8", "surrogatepass")).hexdigest()
    return Prompt(f"{source}-{digest[:16]}", source, tuple(messages), **others)


def asked(source: str, text: str, about: str = "", category: str = "") -> Prompt:
    """A prompt of one user message."""
    messages = [{"role": "user", "content": text}]
    return make_prompt(source, messages, about=about, category=category)


def user_texts(prompt: Prompt) -> list[str]:
    """What users say in it, or what stands in for that."""
    if prompt.token_ids:
        return [" ".join(map(str, prompt.token_ids))]
    if prompt.text:
        return [prompt.text]
    return [str(m["content"]) for m in prompt.messages if m["role"] == "user"]


def normalised(prompt: Prompt) -> str:
    """The users' words in lower case, without spacing and punctuation."""
    return letters("".join(user_texts(prompt)))


def letters(text: str) -> str:
    """Letters and digits of a text in lower case; of one without any, the text."""
    folded = _folded(text)
    return "".join(character for character in folded if character.isalnum()) or folded.strip()


def words(text: str) -> list[str]:
    """Words of a text in lower case, without punctuation."""
    return _WORD.findall(_folded(text))


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _content(prompt: Prompt) -> str:
    """Everything that decides what is rendered, as one text."""
    others = (prompt.tools, prompt.text, prompt.token_ids, prompt.answer)
    if not any(others) and all(set(message) == _PLAIN_KEYS for message in prompt.messages):
        return "\x1e".join(f"{m['role']}\x1f{m['content']}" for m in prompt.messages)
    return json.dumps([prompt.messages, *others], sort_keys=True)
