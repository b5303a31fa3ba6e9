"""A transformers tokenizer as the metadata of a GGUF file.

llama.cpp knows how text is split by a name (`tokenizer.ggml.pre`); a tokenizer whose split has none here
is refused, since a wrong name changes the ids of digits and newlines without any error.
"""

import json
from typing import Any

from gguf import GGUFWriter, TokenType

from specdec_runtime.gguf_tokenizer import pre_tokenizer_name


def vocabulary_obstacle(tokenizer: Any) -> str | None:
    """Why the tokenizer cannot be written; None if it can."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or json.loads(backend.to_str())["model"]["type"] != "BPE":
        return "its tokenizer is not byte-level BPE, the kind that is written to GGUF here"
    if not _merges(tokenizer):
        return "its tokenizer has no merges, and llama.cpp does not load one without"
    if pre_tokenizer_name(tokenizer) is None:
        return "llama.cpp's name for how its tokenizer splits text is not known here"
    return None


def add_vocabulary(writer: GGUFWriter, tokenizer: Any, size: int) -> None:
    """Tokens, their types, merges, special ids and the chat template."""
    tokens, types = tokens_and_types(tokenizer, size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(pre_tokenizer_name(tokenizer)))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(_merges(tokenizer))
    for add, token_id in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
    ):
        if token_id is not None:
            add(token_id)
    writer.add_add_bos_token(adds_bos(tokenizer))
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def tokens_and_types(tokenizer: Any, size: int) -> tuple[list[str], list[int]]:
    """[V] strings and [V] GGUF token types; ids without a string are marked unused."""
    strings = {token_id: string for string, token_id in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens, types = [], []
    for token_id in range(size):
        tokens.append(strings.get(token_id, f"[PAD{token_id}]"))
        if token_id not in strings:
            types.append(TokenType.UNUSED)
        elif token_id in added:
            special = added[token_id].special
            types.append(TokenType.CONTROL if special else TokenType.USER_DEFINED)
        else:
            types.append(TokenType.NORMAL)
    return tokens, [int(kind) for kind in types]


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a beginning-of-text token in front of a text."""
    ids = tokenizer("a").input_ids
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def _merges(tokenizer: Any) -> list[str]:
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
