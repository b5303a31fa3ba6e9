"""What each token of a vocabulary spells, in bytes: the common ground of different tokenizers.

Byte-level BPE writes bytes as printable characters (a space is U+0120), SentencePiece writes spaces
as U+2581 and lone bytes as "<0xE2>". Compared as bytes, " the" is the same token in both.
"""

import re
from functools import cache
from typing import Any

import torch
from torch import Tensor

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
_SPACE_BYTE_LEVEL, _SPACE_SENTENCEPIECE = "\u0120", "\u2581"


def shared_tokens(draft: Any, target: Any) -> tuple[Tensor, Tensor]:
    """(draft ids [n], target ids [n]) of the tokens that spell the same bytes in both, each id once.

    The two end-of-text tokens are taken as one, whatever they are called; other special tokens
    mean different things in different models and are left out.

    Raises:
        ValueError: if the vocabularies have nothing in common.
    """
    # Where two tokens spell the same ("<0x41>" and "A"), a tokenizer writes the later one.
    ours, theirs = (
        {spelling: token for token, spelling in sorted(token_bytes(tokenizer).items())}
        for tokenizer in (draft, target)
    )
    pairs = {token: theirs[spelling] for spelling, token in ours.items() if spelling in theirs}
    if draft.eos_token_id is not None and target.eos_token_id is not None:
        pairs[draft.eos_token_id] = target.eos_token_id
    if not pairs:
        raise ValueError(
            "the two vocabularies share no token: this drafter cannot serve this target"
        )
    ids = torch.tensor(sorted(pairs.items()), dtype=torch.int64)
    return ids[:, 0], ids[:, 1]


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """id -> bytes for every token that is not special."""
    vocab = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    count_byte_level = sum(token.startswith(_SPACE_BYTE_LEVEL) for token in vocab)
    count_sentencepiece = sum(token.startswith(_SPACE_SENTENCEPIECE) for token in vocab)
    spell = _byte_level if count_byte_level >= count_sentencepiece else _sentencepiece
    spelled = {
        token_id: spell(token) for token, token_id in vocab.items() if token_id not in special
    }
    return {token_id: spelling for token_id, spelling in spelled.items() if spelling is not None}


def _byte_level(token: str) -> bytes | None:
    table = _byte_of_character()
    if any(character not in table for character in token):
        return None
    return bytes(table[character] for character in token)


def _sentencepiece(token: str) -> bytes | None:
    if match := _BYTE_TOKEN.match(token):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE_SENTENCEPIECE, " ").encode("utf-8", "surrogatepass")


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for U+0100 onwards."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}
