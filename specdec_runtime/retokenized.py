"""A text in two tokenizations at once: the target's as committed, the drafter's re-encoded.

Re-encoding the whole text every round would cost more the longer it gets, so everything up to an
anchor stays as it is; the anchor follows the text at word boundaries. The drafter's ids condition
its proposals only: were they encoded a little differently, the output would still be the target's.
"""

from typing import Any

_TAIL_TOKENS = 48  # the anchor moves once this much text lies behind it
_INCOMPLETE = "\ufffd"


class Retokenized:
    """One row's committed text in the drafter's tokens.

    Attributes:
        draft_ids: the committed text, as the drafter reads it.
        is_whole: False while the text ends inside a character, where no drafter can go on.
    """

    def __init__(self, draft_tokenizer: Any, target_tokenizer: Any) -> None:
        self._draft = draft_tokenizer
        self._target = target_tokenizer
        self.draft_ids = _opening(draft_tokenizer)
        self.is_whole = True
        self._target_anchor = 0  # committed tokens in front of the anchor
        self._draft_anchor = len(self.draft_ids)

    def read(self, tokens: list[int]) -> None:
        """Take over the committed text."""
        if self._target_anchor == 0 and tokens[0] == self._target.bos_token_id:
            self._target_anchor = 1  # the drafter has an opening of its own
        text = self._text(tokens[self._target_anchor :])
        self.is_whole = not text.endswith(_INCOMPLETE)
        tail = self._encode(text.rstrip(_INCOMPLETE))
        self.draft_ids = self.draft_ids[: self._draft_anchor] + tail
        if len(tokens) - self._target_anchor > _TAIL_TOKENS:
            self._move_anchor(tokens)

    def to_target(self, tokens: list[int], drafted: list[int]) -> list[int]:
        """The target's tokens for what the drafter's tokens `drafted` would append."""
        known = self._text(tokens[self._target_anchor :])
        shown = self._draft_text(self.draft_ids[self._draft_anchor :])
        longer = self._draft_text(self.draft_ids[self._draft_anchor :] + drafted)
        new = longer[len(shown) :].rstrip(_INCOMPLETE)
        if not new:
            return []
        encoded = self._target(known + new, add_special_tokens=False).input_ids
        committed = tokens[self._target_anchor :]
        if encoded[: len(committed)] == committed:
            return encoded[len(committed) :]
        # The committed tokens are not how the tokenizer writes this text: append to them.
        return self._target(new, add_special_tokens=False).input_ids

    def _move_anchor(self, tokens: list[int]) -> None:
        """Step over the first half of the tail, up to a word that both tokenizations begin."""
        for end in range(self._target_anchor + _TAIL_TOKENS // 2, len(tokens) - 1):
            if not self._text(tokens[end : end + 2]).startswith(" "):
                continue
            head = self._encode(self._text(tokens[self._target_anchor : end]))
            place = self._draft_anchor + len(head)
            if self.draft_ids[self._draft_anchor : place] == head:
                self._target_anchor, self._draft_anchor = end, place
                return

    def _text(self, tokens: list[int]) -> str:
        return self._target.decode(tokens, clean_up_tokenization_spaces=False)

    def _draft_text(self, ids: list[int]) -> str:
        return self._draft.decode(ids, clean_up_tokenization_spaces=False)

    def _encode(self, text: str) -> list[int]:
        return self._draft(text, add_special_tokens=False).input_ids


def _opening(tokenizer: Any) -> list[int]:
    """The ids that this tokenizer puts in front of every text."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("").input_ids[:1] == [bos] else []
