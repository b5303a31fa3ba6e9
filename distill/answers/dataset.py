"""A folder of answers as training examples, in an order that does not depend on how it was written."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from distill.answers.manifest import ANSWERS, Manifest, fingerprint
from distill.answers.shards import GIVEN, Answer, read_shard, shard_paths
from distill.signals import TargetRows


@dataclass
class AnswerSet:
    """Answers with what they were written with.

    Attributes:
        answers: each prompt once.
        manifest: of the folder.
    """

    answers: list[Answer]
    manifest: Manifest

    @classmethod
    def read(cls, folder: Path, *, order: Sequence[str] | None = None) -> "AnswerSet":
        """The answers of a folder.

        Args:
            order: ids of the wanted prompts; those without an answer yet are left out. None = all,
                by id.

        Raises:
            ValueError: if the folder holds no answers (to these prompts), or is damaged.
        """
        manifest = ANSWERS.read(folder)
        found: dict[str, Answer] = {}
        for path in shard_paths(folder):
            for answer in read_shard(path):
                assert answer.id not in found, f"{answer.id} was written twice"
                found[answer.id] = answer
        wanted = sorted(found) if order is None else order
        answers = [found[prompt_id] for prompt_id in wanted if prompt_id in found]
        if not answers:
            raise ValueError(f"{folder} holds no answers to these prompts: write some first")
        return cls(answers, manifest)

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def num_given_tokens(self) -> int:
        """Of these, the tokens that the target did not write: the data sets' own answers."""
        return sum(one.num_tokens for one in self.answers if one.temperature == GIVEN)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of what was written, and with what."""
        digest = hashlib.sha256(fingerprint(self.manifest).encode())
        for answer in self.answers:
            digest.update(answer.token_ids.numpy().tobytes())
        return digest.hexdigest()[:16]

    def token_counts(self) -> Tensor:
        """[V] float64: how often the target wrote each token, or would have at its first choice.

        Both count where both are known: sampled text shows the tail, the argmax what a greedy
        answer would hold.
        """
        size = self.manifest["vocab_size"]
        counts = torch.zeros(size, dtype=torch.float64)
        for answer in self.answers:
            written = answer.token_ids[answer.prompt_length :]
            counts += torch.bincount(written, minlength=size)
            if isinstance(answer.rows, TargetRows):
                counts += torch.bincount(answer.rows.argmax, minlength=size)
        return counts
