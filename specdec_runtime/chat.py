"""Conversations -> the exact ids that the target sees when it is served.

The tokenizer's own chat template does the rendering, with the options of the serving side. One way
for training, evaluation and the command line: a prompt rendered in two ways is two prompts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

# An option of ours: the system message of conversations that have none. All others are variables
# of the template (enable_thinking, reasoning_effort, ...).
SYSTEM_PROMPT = "system_prompt"

Message = Mapping[str, Any]


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    options: Mapping[str, Any] | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Token ids of a conversation up to where the answer begins.

    A template writes its own beginning-of-text token: none is added to it. Without a template, the
    texts of the messages are encoded one below the other.

    Raises:
        ValueError: if the template refuses the conversation.
    """
    if tokenizer.chat_template is None:
        return list(tokenizer(plain_text(messages)).input_ids)
    encoded = apply_template(
        tokenizer, messages, options, tools=tools, add_generation_prompt=True, tokenize=True
    )
    return list(encoded["input_ids"])


def chat_text(
    tokenizer: Any,
    messages: Sequence[Message],
    options: Mapping[str, Any] | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    answered: bool = False,
) -> str:
    """The text that `encode_chat` encodes; `answered` ends behind the last message instead.

    Raises:
        ValueError: if the template refuses the conversation.
    """
    if tokenizer.chat_template is None:
        return plain_text(messages)
    return str(
        apply_template(
            tokenizer,
            messages,
            options,
            tools=tools,
            add_generation_prompt=not answered,
            tokenize=False,
        )
    )


def apply_template(
    tokenizer: Any,
    messages: Sequence[Message],
    options: Mapping[str, Any] | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    **settings: Any,
) -> Any:
    """`apply_chat_template` with the options of the serving side.

    Raises:
        ValueError: with what the template says, if it refuses the conversation.
    """
    variables = dict(options or {})
    system = variables.pop(SYSTEM_PROMPT, None)
    chat = [dict(message) for message in messages]
    if system and (not chat or chat[0]["role"] != "system"):
        chat.insert(0, {"role": "system", "content": system})
    try:
        return tokenizer.apply_chat_template(
            chat,
            tools=[dict(tool) for tool in tools] or None,
            return_dict=bool(settings.get("tokenize")),
            **settings,
            **variables,
        )
    except TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in chat)
        raise ValueError(
            f"the target's chat template refuses a conversation of {roles}: {error}; leave it out "
            "(skip_bad_rows), or change what it is made of"
        ) from None


def plain_text(messages: Sequence[Message]) -> str:
    """What a target without a template is given."""
    return "\n\n".join(str(message["content"]) for message in messages)
