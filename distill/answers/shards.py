"""The files of an answer folder. A shard is complete under its name or it is not there.

Layout of one shard (safetensors), for its n answers with T new tokens in total:
    token_ids       [sum of lengths] int32   prompt and answer of each, one behind the other
    lengths         [n] int64                tokens of each
    prompt_lengths  [n] int64                of which prompt
and, unless only the texts are known,
    log_sum_exp     [T] float32              of the target's logits in front of each new token
    argmax          [T] int32                the target's first choice there
    hidden          [T, D]                   its post-norm hidden state there
and, as metadata, the ids, sources and temperatures of the prompts.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from distill.batches import Example
from distill.durable import opened_tensors, save_tensors
from distill.signals import NoSignal, SignalRows, TargetRows, rounded

# Stands for a temperature where the data set's own answer was kept: nobody drew it.
GIVEN = -1.0
_PATTERN = "shard-*.safetensors"


@dataclass(frozen=True)
class Answer(Example):
    """An example to learn from that knows where it came from.

    Attributes:
        source: of the prompt.
        temperature: at which the target answered; GIVEN if it is the data set's own answer.
    """

    source: str
    temperature: float


def write_shard(folder: Path, answers: Sequence[Answer], *, hidden_dtype: torch.dtype) -> Path:
    """Writes the next shard; with the target's signal if every one of the answers has it."""
    number = 1 + max((_number(path) for path in shard_paths(folder)), default=-1)
    path = folder / f"shard-{number:05d}.safetensors"
    tensors = {
        "token_ids": torch.cat([answer.token_ids for answer in answers]).int(),
        "lengths": torch.tensor([len(answer.token_ids) for answer in answers]),
        "prompt_lengths": torch.tensor([answer.prompt_length for answer in answers]),
    }
    recorded = [answer.rows for answer in answers if isinstance(answer.rows, TargetRows)]
    if len(recorded) == len(answers):
        rows = TargetRows.join(recorded)
        tensors |= {
            "hidden": rounded(rows.hidden, hidden_dtype),
            "log_sum_exp": rows.log_sum_exp,
            "argmax": rows.argmax.int(),
        }
    records = [
        {"id": answer.id, "source": answer.source, "temperature": answer.temperature}
        for answer in answers
    ]
    save_tensors(path, tensors, {"prompts": json.dumps(records)})
    return path


def read_shard(path: Path) -> list[Answer]:
    """The answers of one shard; their tensors are views of the shard's.

    Raises:
        ValueError: if the file is damaged.
    """
    with opened_tensors(path) as file:
        records = json.loads(file.metadata()["prompts"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    lengths = tensors["lengths"].tolist()
    prompts = tensors["prompt_lengths"].tolist()
    news = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
    texts = tensors["token_ids"].long().split(lengths)
    return [
        Answer(**record, token_ids=text, prompt_length=prompt, rows=rows)
        for record, text, prompt, rows in zip(
            records, texts, prompts, _rows(tensors, news), strict=True
        )
    ]


def _rows(tensors: dict[str, Tensor], counts: list[int]) -> Sequence[SignalRows]:
    """The signal of each answer, as far as it was recorded."""
    if "hidden" not in tensors:
        return [NoSignal(count) for count in counts]
    parts = zip(
        tensors["hidden"].split(counts),
        tensors["log_sum_exp"].split(counts),
        tensors["argmax"].long().split(counts),
        strict=True,
    )
    return [TargetRows(*part) for part in parts]


def token_numbers(path: Path) -> dict[str, int]:
    """Prompt id -> new tokens of every answer of a shard, without reading its states.

    Raises:
        ValueError: if the file is damaged.
    """
    with opened_tensors(path) as file:
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


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("shard-"))
