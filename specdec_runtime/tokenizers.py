"""Whether two tokenizers mean the same by an id: compared by content, never by size alone.

Two vocabularies of equal size that differ in two ids corrupt text without any error, so draft and
target are compared id by id: the same string for every id, the same special tokens.
"""

import hashlib
from typing import Any

# Leading spaces, code with newlines and tabs, letters outside ASCII.
_PROBES = (
    "  two spaces ahead",
    "def f(x):\n\treturn x  # 1\n\n",
    "na\u00efve \u4f60\u597d \U0001f642",
)


def real_vocab_size(tokenizer: Any) -> int:
    """One more than the largest id with a string; rows of a head beyond it are padding."""
    return max(tokenizer.get_vocab().values()) + 1


def unused_token_ids(tokenizer: Any) -> tuple[int, ...]:
    """Ids below the real vocabulary size that have no string."""
    return tuple(
        sorted(set(range(real_vocab_size(tokenizer))) - set(tokenizer.get_vocab().values()))
    )


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of every (id, string) pair and of which ids are special."""
    digest = hashlib.sha256()
    for token_id, string in sorted(_strings(tokenizer).items()):
        digest.update(f"{token_id}\x00{string}\x00".encode("utf-8", "surrogatepass"))
    digest.update(repr(sorted(tokenizer.all_special_ids)).encode())
    return digest.hexdigest()


def template_hash(tokenizer: Any) -> str:
    """SHA-256 of the chat template, "" where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(template.encode()).hexdigest() if template else ""


def check_round_trip(tokenizer: Any) -> None:
    """Raise a ValueError naming the first of a few texts that does not survive the tokenizer.

    What goes in comes out with a tokenizer that was loaded as it was made; spaces lost after an
    upgrade of a library show here, not in the vocabulary.
    """
    for text in _PROBES:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        found = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if found != text:
            raise ValueError(
                f"the tokenizer turns {text!r} into {found!r}: expected the same text back; load "
                "it with the version of transformers that it was made with, or convert it anew"
            )


def check_same_tokenizer(draft: Any, target: Any) -> None:
    """Raise a ValueError naming the first id that the two tokenizers read differently."""
    ours, theirs = _strings(draft), _strings(target)
    for token_id in range(max(*ours, *theirs) + 1):
        if ours.get(token_id) != theirs.get(token_id):
            raise ValueError(
                f"draft and target tokenizers differ at id {token_id}: the draft reads "
                f"{ours.get(token_id)!r}, the target {theirs.get(token_id)!r}; train the draft "
                "with the target's tokenizer, or declare the difference: draft=cross_tokenizer to "
                "train it, cross_tokenizer:FOLDER to decode with it"
            )
    different = set(draft.all_special_ids) ^ set(target.all_special_ids)
    if different:
        token_id = min(different)
        owner = "target" if token_id in target.all_special_ids else "draft"
        raise ValueError(
            f"draft and target tokenizers differ at id {token_id} ({theirs[token_id]!r}): it is a "
            f"special token of the {owner} only"
        )


def _strings(tokenizer: Any) -> dict[int, str]:
    return {token_id: string for string, token_id in tokenizer.get_vocab().items()}
