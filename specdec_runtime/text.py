"""From token ids to text, token by token: what is final, and where a stop string ends.

A token need not be a whole character, so text becomes final only when later tokens cannot change
it any more: at the latest when it no longer ends in the replacement character.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from specdec_runtime.results import Chunk

_INCOMPLETE = "\ufffd"  # what decoders put in place of an unfinished character


class TextBuilder:
    """Decodes a growing sequence; `push` returns the text that has become final.

    Args:
        tokenizer: a transformers tokenizer.
        skip_special_tokens: as in its `decode`.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._shown = 0  # tokens whose text has been returned
        self._anchor = 0  # decoding starts here: keeps the spacing in front of `_shown`

    def push(self, token_id: int) -> str:
        """Append a token; returns the text that is final now, perhaps ""."""
        self._ids.append(token_id)
        text = self.pending()
        if text.endswith(_INCOMPLETE):
            return ""
        self._anchor, self._shown = self._shown, len(self._ids)
        return text

    def flush(self) -> str:
        """The rest, when no token follows: a character that stayed incomplete, or ""."""
        text = self.pending()
        self._anchor, self._shown = self._shown, len(self._ids)
        return text

    def pending(self) -> str:
        """The text that is not final yet: it ends in a character that stayed incomplete, or ""."""
        before = self._decode(self._ids[self._anchor : self._shown])
        return self._decode(self._ids[self._anchor :])[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )


class Piece(NamedTuple):
    """Text that is final, and what the token that completed it was (`Chunk.kinds`)."""

    text: str
    kind: str


class TextStream:
    """One row's chunks as pieces of text, each yielded once and never taken back."""

    def __init__(self, tokenizer: Any) -> None:
        self._builder = TextBuilder(tokenizer)

    def pieces(self, chunk: Chunk) -> list[Piece]:
        """What becomes final with `chunk`; nothing behind a stop string."""
        pieces = [
            Piece(self._builder.push(token), kind)
            for token, kind in zip(chunk.token_ids, chunk.kinds, strict=True)
        ]
        if chunk.finish_reason is not None:
            pieces.append(Piece(self._builder.flush(), chunk.kinds[-1]))
            pieces = _without_end(pieces, chunk.excess_chars)
        return [piece for piece in pieces if piece.text]


def _without_end(pieces: list[Piece], num_chars: int) -> list[Piece]:
    kept = []
    for piece in reversed(pieces):
        dropped = min(num_chars, len(piece.text))
        num_chars -= dropped
        kept.append(Piece(piece.text[: len(piece.text) - dropped], piece.kind))
    return kept[::-1]


class StopStrings:
    """Watches one row's new text for the first of several stop strings.

    Special tokens count as text here, so that a turn marker can be a stop string.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str]) -> None:
        self._stops = list(stop_strings)
        self._tokenizer = tokenizer
        self._builder = TextBuilder(tokenizer, skip_special_tokens=False)
        self._tail = ""
        self._keep = max(map(len, self._stops)) - 1

    def push(self, token_id: int) -> int | None:
        """Append a token; if it completes a stop string, how many characters follow that string.

        Characters that the text shows: of a special token there are none. None while no stop string
        is complete.
        """
        final = self._tail + self._builder.push(token_id)
        pending = self._builder.pending()
        text = final + pending.rstrip(_INCOMPLETE)
        ends = [at + len(stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            shown = self._tokenizer.decode([token_id], skip_special_tokens=True)
            return min(len(final + pending) - min(ends), len(shown))
        self._tail = final[-self._keep :] if self._keep else ""
        return None


def require_unicode(text: str) -> None:
    """A command line or file in another encoding leaves halves of characters, which no tokenizer takes.

    Raises:
        ValueError: naming the first of them.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt holds {text[error.start]!r} at character {error.start}, which is no text: "
            "give it in UTF-8"
        ) from None
