"""Chat templates: messages -> the exact ids that the target sees when it is served.

The tokenizer's own template does the rendering, and what it was given is part of every fingerprint.
A tokenizer without a template gets the text as it is.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

# Stands for a user's text while the template around it is looked at; no tokenizer merges it away.
_MARK = "\u241fdraftloop\u241f"

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """One tokenizer's way of writing a conversation.

    Attributes:
        tokenizer: of the target.
        options: extra variables of the template (a system prompt, enable_thinking, ...), as the
            target is served with.
    """

    tokenizer: PreTrainedTokenizerBase
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exists(self) -> bool:
        return self.tokenizer.chat_template is not None

    @property
    def hash(self) -> str:
        """SHA-256 of the template and its options; the same for equal renderings only."""
        content = json.dumps([self.tokenizer.chat_template, dict(self.options)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Token ids up to where the target's answer begins.

        The template writes its own beginning-of-text token: none is added to it (case F1).
        """
        if not self.exists:
            text = "\n\n".join(str(message["content"]) for message in messages)
            return list(self.tokenizer(text).input_ids)
        encoded: Any = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **self.options,
        )
        return list(encoded["input_ids"])

    def user_opening(self) -> list[int]:
        """Token ids up to where a user's first message begins: what a prompt is written after.

        Raises:
            ValueError: if there is no template, or one that does not show where a user writes.
        """
        return self._encode(self._around_user[0])

    def user_end(self) -> int | None:
        """The special token that closes a user's message, if the template has one."""
        after = self._encode(self._around_user[1])
        first = after[0] if after else None
        return first if first in self._special else None

    def special_ids(self) -> set[int]:
        """Special tokens that a rendered conversation contains: turn marks and the like."""
        if not self.exists:
            return set()
        conversation = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        return set(self.render(conversation)) & self._special

    @cached_property
    def _special(self) -> set[int]:
        """Ids of all special tokens; turn marks often have no role name such as eos_token."""
        added = self.tokenizer.added_tokens_decoder
        marked = {index for index, token in added.items() if token.special}
        return marked | set(self.tokenizer.all_special_ids)

    @cached_property
    def _around_user(self) -> tuple[str, str]:
        if not self.exists:
            raise ValueError(
                "the target has no chat template, so it can not write user turns itself: give "
                "prompts (prompts.file=...) or leave self_prompted out of prompts.sources"
            )
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}],
            add_generation_prompt=True,
            tokenize=False,
            **self.options,
        )
        before, mark, after = str(text).partition(_MARK)
        if not mark:
            raise ValueError(
                "the chat template changes what a user writes: leave self_prompted out of "
                "prompts.sources"
            )
        return before, after

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)
