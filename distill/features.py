"""The target's inner hidden states along whole texts, for drafters that read them while decoding.

Prompts and answers alike: a drafter that runs on the target's states sees those of the prompt too.
They are recorded once for a set of answers, by one pass of the target over each text, and kept
beside the answers. Size: layers x D x 2 bytes a token (3.5 kB with three layers of 576).

Shapes: S tokens of a text, T tokens of a file, A layers, D hidden size.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from distill.batches import Example
from specdec_runtime.file_lock import exclusive
from specdec_runtime.model import CausalModel

_PATTERN = "features-*.safetensors"
_PASS_TOKENS = 2048  # padded tokens of one pass of the target
_FILE_TOKENS = 16_384  # an interrupted recording loses at most so much

E = TypeVar("E", bound=Example)

# done, total tokens, what else to say
Progress = Callable[[int, int, str], None]


def record_features(
    model: CausalModel,
    examples: Sequence[E],
    layers: Sequence[int],
    folder: Path,
    *,
    progress: Progress | None = None,
) -> list[E]:
    """The examples with the residuals after `layers` of the target; what is missing is recorded.

    Args:
        model: the target that wrote the examples.
        layers: k in [0, num_layers], ascending; of each text [S, A * D], side by side.
        folder: of these layers of this target; made if need be.

    Raises:
        ValueError: if a file in `folder` is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".lock"):
        found = _read(folder)
        missing = [example for example in examples if _key(example) not in found]
        _record(model, missing, layers, folder, progress)
    found = _read(folder) if missing else found
    return [replace(example, features=found[_key(example)]) for example in examples]


def _record(
    model: CausalModel,
    examples: Sequence[Example],
    layers: Sequence[int],
    folder: Path,
    progress: Progress | None,
) -> None:
    total = sum(len(example.token_ids) for example in examples)
    waiting: dict[str, Tensor] = {}
    done = waiting_tokens = 0
    for group in _passes(examples):
        for example, states in zip(group, _states(model, group, layers), strict=True):
            waiting[_key(example)] = states
            waiting_tokens += len(states)
        if waiting_tokens >= _FILE_TOKENS:
            _write(folder, waiting)
            done, waiting, waiting_tokens = done + waiting_tokens, {}, 0
        if progress is not None:
            progress(done + waiting_tokens, total, "tokens")
    if waiting:
        _write(folder, waiting)


@torch.no_grad()
def _states(
    model: CausalModel, examples: Sequence[Example], layers: Sequence[int]
) -> Iterator[Tensor]:
    """[S, A * D] of each text, from one pass over all of them."""
    lengths = torch.tensor([len(example.token_ids) for example in examples])
    output = model.forward(
        pad_sequence([example.token_ids for example in examples], batch_first=True),
        model.new_cache(len(examples), int(lengths.max())),
        num_new=lengths,
        logits=False,
        hidden_layers=layers,
    )
    states = torch.cat([output.hidden[layer] for layer in layers], dim=-1).cpu()
    for row, length in enumerate(lengths.tolist()):
        yield states[row, :length]


def _passes(examples: Sequence[Example]) -> Iterator[list[Example]]:
    """Texts of similar length, a bounded number of padded tokens at a time."""
    group: list[Example] = []
    for example in sorted(examples, key=lambda example: len(example.token_ids)):
        if group and (len(group) + 1) * len(example.token_ids) > _PASS_TOKENS:
            yield group
            group = []
        group.append(example)
    if group:
        yield group


def _write(folder: Path, states: dict[str, Tensor]) -> None:
    """One file, complete under its name or not there: keys and lengths, all states in a row."""
    number = len(list(folder.glob(_PATTERN)))
    whole = torch.cat(list(states.values()))
    stored = whole.half()
    if not bool(stored.isfinite().all()):
        stored = whole.bfloat16()
    lengths = [[key, len(part)] for key, part in states.items()]
    path = folder / f"features-{number:05d}.safetensors"
    unfinished = folder / f".{path.name}"
    save_file({"states": stored}, unfinished, metadata={"lengths": json.dumps(lengths)})
    unfinished.chmod(0o644)  # safetensors makes private files
    unfinished.replace(path)


def _read(folder: Path) -> dict[str, Tensor]:
    """key -> [S, A * D]; the tensors are views of the files."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob(_PATTERN)):
        try:
            with safe_open(path, "pt") as file:
                lengths = json.loads(file.metadata()["lengths"])
                states = file.get_tensor("states")
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}): delete it") from None
        parts = states.split([length for _, length in lengths])
        found |= {key: part for (key, _), part in zip(lengths, parts, strict=True)}
    return found


def _key(example: Example) -> str:
    """Names a text by its tokens: the states depend on nothing else."""
    return hashlib.sha256(example.token_ids.numpy().tobytes()).hexdigest()[:24]
