"""The tokenizer inside a GGUF file, as the model was trained with it.

A GGUF file holds the vocabulary and the merges, and *names* how text is split before merging
(`tokenizer.ggml.pre`); the split itself is code. transformers' loader ignores that name and splits
every byte-level vocabulary as GPT-2 does, which changes the ids of digits, newlines and spaces: with
SmolLM2 "\\n\\n1." becomes <\\n><\\n><1><.> in place of <\\n\\n><1><.>, in every numbered list. It
also forgets most control tokens. So byte-level vocabularies are built here; other kinds
(SentencePiece) come from transformers and get their control tokens.

The splits are those of the models' own tokenizer.json files (as in llama.cpp, llama-vocab.cpp).
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4  # token types of the GGUF specification

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(*, use_regex: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _digits() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _byte_level()])


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])


# tokenizer.ggml.pre -> how text is split; the names are llama.cpp's.
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": _digits,
    "starcoder": _digits,
    "llama-bpe": lambda: _split_by(_LLAMA3),
    "qwen2": lambda: _split_by(_QWEN2),
}
_NORMALIZERS = {"qwen2": normalizers.NFC}
_WHOLE_WORDS_FIRST = {"llama-bpe"}  # a word that is a token is not merged up from its bytes
# Where the splits above differ: digits, contractions, newlines, spaces, letters of other alphabets.
_PROBE = (
    "It's 2024, I'LL pay 12345.67!\n\n1. a  b\r\n\tx = y**2  # na\u00efve \u4f60\u597d\n   \n 3rd "
)


def pre_tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """What llama.cpp calls the way in which a byte-level tokenizer splits text; None if unknown."""
    own = tokenizer.backend_tokenizer.pre_tokenizer
    if own is None:
        return None
    normalizer = tokenizer.backend_tokenizer.normalizer
    for name, make in _PRE_TOKENIZERS.items():
        if make().pre_tokenize_str(_PROBE) != own.pre_tokenize_str(_PROBE):
            continue
        if (normalizer is not None) == (name in _NORMALIZERS):
            return name
    return None


def gguf_tokenizer(path: Path, fields: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file, with every control token registered as special.

    Args:
        path: the file, for the kinds that transformers reads.
        fields: its metadata, key -> value.

    Raises:
        ValueError: if the file holds no tokenizer.
    """
    if "tokenizer.ggml.tokens" not in fields:
        raise ValueError(
            f"{path} holds no tokenizer: expected a GGUF file of a whole language model"
        )
    if fields.get("tokenizer.ggml.model") == "gpt2":
        return _byte_level_tokenizer(path, fields)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.add_tokens(_added(fields, _CONTROL, special=True), special_tokens=True)
    return tokenizer


def _byte_level_tokenizer(path: Path, fields: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        warnings.warn(
            f"{path.name}: how tokenizer.ggml.pre={pre!r} splits text is not known here (known: "
            f"{', '.join(_PRE_TOKENIZERS)}); GPT-2's split is used and some texts will get other "
            "ids than the model was trained with: compare with the model's own tokenizer.json",
            stacklevel=3,
        )
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS.get(pre, _byte_level)()
    if pre in _NORMALIZERS:
        tokenizer.normalizer = _NORMALIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    named = _named_tokens(fields, tokens)
    if fields.get("tokenizer.ggml.add_bos_token") and "bos_token" in named:
        bos = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer.add_tokens(_added(fields, _USER_DEFINED, special=False))
    tokenizer.add_special_tokens(_added(fields, _CONTROL, special=True))
    assert tokenizer.get_vocab_size() == len(tokens), "an added token was not in the vocabulary"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )


def _added(fields: Mapping[str, Any], kind: int, *, special: bool) -> list[AddedToken]:
    tokens, types = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.token_type", [])
    return [
        AddedToken(token, special=special, normalized=False)
        for token, token_type in zip(tokens, types, strict=False)
        if token_type == kind
    ]


def _named_tokens(fields: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {ours: fields.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in names.items()}
    return {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}
