"""The files of an answer folder. A shard is complete under its name or it is not there.

Layout of one shard (safetensors), for its n answers with T new tokens in total:
    token_ids       [sum of lengths] int32   prompt and answer of each, one behind the other
    lengths         [n] int64                tokens of each
    prompt_lengths  [n] int64                of which prompt
    log_sum_exp     [T] float32              of the target's logits in front of each new token
    argmax          [T] int32                the target's first choice there
    hidden          [T, D]                   its post-norm hidden state there
and, as metadata, the ids, sources and temperatures of the prompts.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from distill.batches import Example
from distill.signals import TargetRows

_PATTERN = "shard-*.safetensors"


@dataclass(frozen=True)
class Answer(Example):
    """An example to learn from that knows where it came from.

    Attributes:
        source: of the prompt.
        temperature: at which the target answered.
    """

    source: str
    temperature: float


def write_shard(folder: Path, answers: Sequence[Answer], *, hidden_dtype: torch.dtype) -> Path:
    """Writes the next shard: under a hidden name, flushed to disk, then renamed."""
    number = 1 + max((_number(path) for path in shard_paths(folder)), default=-1)
    path = folder / f"shard-{number:05d}.safetensors"
    tensors = {
        "token_ids": torch.cat([answer.token_ids for answer in answers]).int(),
        "lengths": torch.tensor([len(answer.token_ids) for answer in answers]),
        "prompt_lengths": torch.tensor([answer.prompt_length for answer in answers]),
        "hidden": _rounded([answer.rows.hidden for answer in answers], hidden_dtype),
        "log_sum_exp": torch.cat([answer.rows.log_sum_exp for answer in answers]),
        "argmax": torch.cat([answer.rows.argmax for answer in answers]).int(),
    }
    records = [
        {"id": answer.id, "source": answer.source, "temperature": answer.temperature}
        for answer in answers
    ]
    unfinished = folder / f".{path.name}"
    save_file(tensors, unfinished, metadata={"prompts": json.dumps(records)})
    unfinished.chmod(0o644)  # safetensors makes private files
    _flush(unfinished)
    unfinished.rename(path)
    _flush(folder)
    return path


def read_shard(path: Path) -> list[Answer]:
    """The answers of one shard; their tensors are views of the shard's.

    Raises:
        ValueError: if the file is damaged.
    """
    with _opened(path) as file:
        records = json.loads(file.metadata()["prompts"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    lengths = tensors["lengths"].tolist()
    prompts = tensors["prompt_lengths"].tolist()
    news = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
    texts = tensors["token_ids"].long().split(lengths)
    rows = zip(
        tensors["hidden"].split(news),
        tensors["log_sum_exp"].split(news),
        tensors["argmax"].long().split(news),
        strict=True,
    )
    return [
        Answer(**record, token_ids=text, prompt_length=prompt, rows=TargetRows(*part))
        for record, text, prompt, part in zip(records, texts, prompts, rows, strict=True)
    ]


def token_numbers(path: Path) -> dict[str, int]:
    """Prompt id -> new tokens of every answer of a shard, without reading its states.

    Raises:
        ValueError: if the file is damaged.
    """
    with _opened(path) as file:
        records = json.loads(file.metadata()["prompts"])
        news = file.get_tensor("lengths") - file.get_tensor("prompt_lengths")
    return {record["id"]: number for record, number in zip(records, news.tolist(), strict=True)}


def shard_paths(folder: Path) -> list[Path]:
    """The complete shards, in the order they were written."""
    return sorted(folder.glob(_PATTERN))


def remove_unfinished(folder: Path) -> None:
    """Deletes what an interrupted job has left; only for the one who holds the folder's lock."""
    for path in folder.glob(f".{_PATTERN}"):
        path.unlink()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): delete it and write the answers again"
        ) from None


def _rounded(states: list[Tensor], dtype: torch.dtype) -> Tensor:
    """[T, D] in the wanted type, or in bfloat16 where that type can not hold a number of it."""
    whole = torch.cat(states)
    stored = whole.to(dtype)
    return stored if bool(stored.isfinite().all()) else whole.to(torch.bfloat16)


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("shard-"))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
