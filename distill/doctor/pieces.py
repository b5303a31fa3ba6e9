"""Rows as pieces of text: a token each, or several where a character needs them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from distill.doctor.rows import Row

_BROKEN = "\ufffd"  # what an unfinished character decodes to


class Piece(NamedTuple):
    """text: of these tokens. is_trained: they carry loss. is_special: turn marks and the like."""

    text: str
    is_trained: bool
    is_special: bool


def pieces_of(row: Row, tokenizer: Any, special: set[int]) -> list[Piece]:
    """The tokens of a row as they are read, in order."""
    return [
        *_pieces(row.token_ids[: row.prompt_length], tokenizer, special, is_trained=False),
        *_pieces(row.token_ids[row.prompt_length :], tokenizer, special, is_trained=True),
    ]


def _pieces(
    token_ids: Sequence[int], tokenizer: Any, special: set[int], *, is_trained: bool
) -> list[Piece]:
    found: list[Piece] = []
    pending: list[int] = []
    before = 0  # token in front of the pending ones: some tokenizers eat a leading space
    for number, index in enumerate(token_ids):
        pending.append(index)
        context = list(token_ids[before : number + 1 - len(pending)])
        text = tokenizer.decode(context + pending)[len(tokenizer.decode(context)) :]
        if text.endswith(_BROKEN) and number + 1 < len(token_ids):
            continue
        found.append(Piece(text, is_trained, index in special))
        before, pending = number, []
    return found
