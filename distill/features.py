"""The target's inner hidden states along whole texts, for drafters that read them while decoding.

Prompts and answers alike: a drafter that runs on the target's states sees those of the prompt too.
They are recorded while the target writes (writer.py), or by one pass over texts that exist, and kept
for all runs. Size: layers x D x 2 bytes a token (3.5 kB with three layers of 576).

Shapes: S tokens of a text, T tokens of a file, A layers, D hidden size.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from distill.batches import Example
from distill.durable import opened_tensors, save_checked_tensors
from specdec_runtime.file_lock import exclusive
from specdec_runtime.model import CausalModel

_PATTERN = "features-*.safetensors"
STATE_BYTES = 2  # of each number kept
_PASS_TOKENS = 2048  # padded tokens of one pass of the target
_FILE_TOKENS = 16_384  # an interrupted recording loses at most so much

E = TypeVar("E", bound=Example)

# done, total tokens, what else to say
Progress = Callable[[int, int, str], None]


class FeatureFolder:
    """Where the states after some layers of one target are kept, text by text.

    Args:
        layers: k in [0, num_layers], ascending; of each text [S, A * D], side by side.
        folder: of these layers of this target; made if need be.
    """

    def __init__(self, folder: Path, layers: Sequence[int]) -> None:
        self.folder, self.layers = folder, tuple(layers)
        self._waiting: dict[str, Tensor] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, token_ids: Tensor, states: Tensor) -> None:
        """Keeps the states [S, A * D] of a text [S]; on the disk after the next file or `flush`."""
        self._waiting[_key(token_ids)] = states
        if sum(map(len, self._waiting.values())) >= _FILE_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Writes what waits: keys and lengths, all states in a row."""
        if not self._waiting:
            return
        whole = torch.cat(list(self._waiting.values()))
        stored = whole.half()
        if not bool(stored.isfinite().all()):
            stored = whole.bfloat16()
        lengths = [[key, len(part)] for key, part in self._waiting.items()]
        metadata = {"lengths": json.dumps(lengths)}
        save_checked_tensors(self.folder, "features", {"states": stored}, metadata)
        self._waiting = {}

    def read(self) -> dict[str, Tensor]:
        """key -> [S, A * D]; the tensors are views of the files.

        Raises:
            ValueError: if a file is damaged.
        """
        found: dict[str, Tensor] = {}
        for path in sorted(self.folder.glob(_PATTERN)):
            with opened_tensors(path) as file:
                lengths = json.loads(file.metadata()["lengths"])
                states = file.get_tensor("states")
            parts = states.split([length for _, length in lengths])
            found |= {key: part for (key, _), part in zip(lengths, parts, strict=True)}
        return found


def record_features(
    model: CausalModel,
    examples: Sequence[E],
    kept: FeatureFolder,
    *,
    progress: Progress | None = None,
) -> list[E]:
    """The examples with the target's states at their tokens; what is missing is recorded.

    Args:
        model: the target that wrote the examples.

    Raises:
        ValueError: if a file of `kept` is damaged.
    """
    with exclusive(kept.folder / ".lock"):
        found = kept.read()
        missing = [example for example in examples if _key(example.token_ids) not in found]
        _record(model, missing, kept, progress)
    found = kept.read() if missing else found
    return [replace(example, features=found[_key(example.token_ids)]) for example in examples]


def _record(
    model: CausalModel,
    examples: Sequence[Example],
    kept: FeatureFolder,
    progress: Progress | None,
) -> None:
    total = sum(len(example.token_ids) for example in examples)
    done = 0
    for group in _passes(examples):
        for example, states in zip(group, _states(model, group, kept.layers), strict=True):
            kept.add(example.token_ids, states)
            done += len(states)
        if progress is not None:
            progress(done, total, "tokens")
    kept.flush()


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


def _key(token_ids: Tensor) -> str:
    """Names a text by its tokens: the states depend on nothing else."""
    return hashlib.sha256(token_ids.numpy().tobytes()).hexdigest()[:24]
