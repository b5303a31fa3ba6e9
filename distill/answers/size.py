"""How much answers and what is kept with them will take at most, said before they are written."""

import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from distill.answers.authors import Author
from distill.answers.config import AnswersConfig

log = logging.getLogger(__name__)


def announce_size(
    author: Author,
    prompt_tokens: Mapping[str, int],
    done: Iterable[str],
    config: AnswersConfig,
    folder: Path,
) -> None:
    """Says the most that the missing answers can take, and warns if that is more than is free.

    How long answers are is known when they are written, so nothing is refused here: a job that fills
    the disk stops, and goes on behind its last complete file once there is room.

    Args:
        prompt_tokens: answer id -> tokens of its prompt.
        done: ids of the answers that are written.
    """
    missing = [prompt_tokens[name] for name in prompt_tokens.keys() - set(done)]
    new = len(missing) * config.max_new_tokens
    new = new if config.max_tokens is None else min(new, config.max_tokens)
    size = new * author.bytes_per_token + sum(missing) * author.bytes_per_prompt_token
    free = shutil.disk_usage(folder).free
    if size > free:
        log.warning(
            "%d answers may take up to %.1f GB, %.1f GB are free in %s: answers.keep_states=false "
            "keeps the text alone, answers.max_tokens bounds it",
            len(missing), size / 1e9, free / 1e9, folder,
        )  # fmt: skip
    elif missing:
        log.info(
            "up to %d answers, at most %d tokens and %.1f MB; %.1f GB are free",
            len(missing), new, size / 1e6, free / 1e9,
        )  # fmt: skip
