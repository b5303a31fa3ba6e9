"""Prompts that the target writes itself: given the opening of a user turn, it writes the user.

A chat model has seen many conversations, and what it writes after "user:" is a sample of them: the
widest and closest prompts there are when none are at hand (Magpie, arXiv:2406.08464). Small models
repeat themselves and break off, so what they write is filtered; what is left is kept on disk, as
writing it costs minutes.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from distill.progress import Progress
from distill.templates import ChatTemplate
from distill.writer import Request, Writer
from specdec_runtime.assets import cache_folder
from specdec_runtime.file_lock import exclusive
from specdec_runtime.target import Target

_VERSION = 1  # of the filter and the file; part of its name
_BATCH_SIZE = 64
_MAX_TOKENS = 56  # nine in ten user turns are shorter; a longer one is cut at a sentence
_CHARS = range(12, 401)
_MAX_SHARE_OF_ONE_WORD = 0.3
_ATTEMPTS_PER_PROMPT = 3  # a model of which less than a third passes can not prompt itself
_SEEDS_APART = 1_000_003  # seeds of one list must not be those of the next


def self_prompts(
    target: Target,
    template: ChatTemplate,
    count: int,
    seed: int,
    *,
    progress: Progress | None = None,
) -> list[str]:
    """`count` distinct user turns, the same ones for the same target and seed.

    They are kept in the user's cache folder and read from there the next time.

    Raises:
        ValueError: if there is no chat template, or almost all that the target writes is unusable.
    """
    name = _cache_name(target, template, seed)
    path = cache_folder() / "self_prompts" / f"{name}.jsonl"
    with exclusive(path.with_suffix(".lock")):
        kept = _read(path)
        if len(kept) < count:
            kept = _write(target, template, count, seed, progress)
            _store(path, kept)
    return kept[:count]


def is_usable(text: str) -> bool:
    """Whether a text reads like something a user may have asked."""
    words = re.findall(r"\w+", text.lower())
    if len(text) not in _CHARS or len(words) < 3 or "\ufffd" in text:
        return False
    most = Counter(words).most_common(1)[0][1]
    if len(words) >= 10 and most > _MAX_SHARE_OF_ONE_WORD * len(words):
        return False
    trigrams = list(zip(words, words[1:], words[2:], strict=False))
    return len(trigrams) < 10 or len(set(trigrams)) > 0.7 * len(trigrams)


def whole_sentences(text: str) -> str:
    """A text that broke off, up to its last sentence; "" if it has none."""
    return text[: max(text.rfind(mark) for mark in ".?!") + 1].strip()


def _write(
    target: Target,
    template: ChatTemplate,
    count: int,
    seed: int,
    progress: Progress | None,
) -> list[str]:
    opening = template.user_opening()
    end = template.user_end()
    stop_ids = {*target.eos_token_ids, *([end] if end is not None else [])}
    writer = Writer(
        target, batch_size=_BATCH_SIZE, max_new_tokens=_MAX_TOKENS, stop_ids=sorted(stop_ids)
    )
    limit = count * _ATTEMPTS_PER_PROMPT + _BATCH_SIZE
    found: dict[int, str] = {}
    seen: set[str] = set()
    stopped = False

    def requests() -> Iterator[Request]:
        for key in range(limit):
            if stopped:
                return
            yield Request(key, opening, 1.0, seed * _SEEDS_APART + key)

    for text in writer.write(requests(), longest_prompt=len(opening)):
        ended = text.token_ids[-1] in stop_ids
        words = str(template.tokenizer.decode(text.token_ids[:-1] if ended else text.token_ids))
        words = words.strip() if ended else whole_sentences(words)
        if is_usable(words) and words.casefold() not in seen:
            seen.add(words.casefold())
            found[text.request.key] = words
        stopped = len(found) >= count
        if progress is not None:
            progress(min(len(found), count), count, "prompts")
    if len(found) < count:
        raise ValueError(
            f"of {limit} user turns that the target wrote only {len(found)} were usable, {count} "
            "are wanted: lower prompts.num_train or prompts.sources.self_prompted"
        )
    return [found[key] for key in sorted(found)]


def _cache_name(target: Target, template: ChatTemplate, seed: int) -> str:
    parts = (target.fingerprint, template.hash, seed, _VERSION)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _read(path: Path) -> list[str]:
    if not path.exists():
        return []
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]


def _store(path: Path, prompts: list[str]) -> None:
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(lines, encoding="utf-8")
    unfinished.rename(path)
