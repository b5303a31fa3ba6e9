"""Chat templates: messages -> the exact ids that the target sees when it is served.

The tokenizer's own template does the rendering, and what it was given is part of every fingerprint.
A tokenizer without a template gets the text as it is.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from distill.prompt import Prompt
from specdec_runtime.chat import apply_template, chat_text, encode_chat

# Stands for a text while the template around it is looked at; no tokenizer merges it away.
MARK = "\u241fdraftloop\u241f"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """One tokenizer's way of writing a conversation.

    Attributes:
        tokenizer: of the target.
        options: as the target is served with: extra variables of the template (enable_thinking,
            ...), and `system_prompt` for conversations that bring no system message.
    """

    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exists(self) -> bool:
        return self.tokenizer.chat_template is not None

    @property
    def source(self) -> str:
        """The template itself, "" where there is none; of several, all."""
        template: Any = self.tokenizer.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    @property
    def has_markers(self) -> bool:
        """Whether it marks what an assistant writes ({% generation %})."""
        return _GENERATION.search(self.source) is not None

    @property
    def hash(self) -> str:
        """SHA-256 of the template and its options; the same for equal renderings only."""
        content = json.dumps([self.tokenizer.chat_template, dict(self.options)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids up to where the target's answer begins."""
        return encode_chat(self.tokenizer, messages, self.options, tools=tools)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: rendered, or as they are where it holds no messages."""
        if prompt.token_ids:
            return list(prompt.token_ids)
        if prompt.text:
            return list(self.tokenizer(prompt.text).input_ids)
        return self.render(prompt.messages, prompt.tools)

    def prompt_text(self, prompt: Prompt) -> str:
        """The text of a prompt of messages, up to where the answer begins."""
        return chat_text(self.tokenizer, prompt.messages, self.options, tools=prompt.tools)

    def answered_text(self, prompt: Prompt, answer: Message) -> str:
        """The text of a prompt of messages with its answer."""
        messages = [*prompt.messages, answer]
        return chat_text(self.tokenizer, messages, self.options, tools=prompt.tools, answered=True)

    def answered_ids(self, prompt: Prompt, answer: Message) -> tuple[list[int], list[int]]:
        """Token ids of a prompt of messages with its answer, and the template's mask of what
        assistants write (all zeros from a template without markers)."""
        encoded = apply_template(
            self.tokenizer,
            [*prompt.messages, answer],
            self.options,
            tools=prompt.tools,
            tokenize=True,
            return_assistant_tokens_mask=self.has_markers,
        )
        ids = list(encoded["input_ids"])
        return ids, list(encoded["assistant_masks"]) if self.has_markers else [0] * len(ids)

    def user_opening(self) -> list[int]:
        """Token ids up to where a user's first message begins: what a prompt is written after.

        Raises:
            ValueError: if there is no template, or one that does not show where a user writes.
        """
        return self.encode(self._around_user[0])

    def user_end(self) -> int | None:
        """The special token that closes a user's message, if the template has one."""
        after = self.encode(self._around_user[1])
        first = after[0] if after else None
        return first if first in self.special else None

    def special_ids(self) -> set[int]:
        """Special tokens that a rendered conversation contains: turn marks and the like."""
        if not self.exists:
            return set()
        conversation = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        return set(self.render(conversation)) & self.special

    @cached_property
    def special(self) -> set[int]:
        """Ids of all special tokens; turn marks often have no role name such as eos_token."""
        added = self.tokenizer.added_tokens_decoder
        marked = {index for index, token in added.items() if token.special}
        return marked | set(self.tokenizer.all_special_ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of rendered text, nothing added."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    @cached_property
    def _around_user(self) -> tuple[str, str]:
        if not self.exists:
            raise ValueError(
                "the target has no chat template, so it can not write user turns itself: give "
                "prompts (prompts.file=...) or leave self_prompted out of prompts.sources"
            )
        asked = [{"role": "user", "content": MARK}]
        before, mark, after = chat_text(self.tokenizer, asked, self.options).partition(MARK)
        if not mark:
            raise ValueError(
                "the chat template changes what a user writes: leave self_prompted out of "
                "prompts.sources"
            )
        return before, after
