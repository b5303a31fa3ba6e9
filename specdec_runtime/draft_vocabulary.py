"""Which of the target's tokens a drafter can propose, and what its logit columns stand for.

Shapes: N rows, n logit columns, V the target's real vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_runtime.model import CausalModel
from specdec_runtime.sampling import Sampler, likeliest_columns


class DraftVocabulary:
    """Maps the drafting model's logit columns to the target's real vocabulary.

    Raises:
        ValueError: if a column stands for an id that the target does not write.
    """

    def __init__(self, draft_vocab: Tensor | None, model: CausalModel, vocab_size: int) -> None:
        if draft_vocab is not None and not bool(
            ((draft_vocab >= 0) & (draft_vocab < vocab_size)).all()
        ):
            raise ValueError(
                f"the draft vocabulary names ids {int(draft_vocab.min())} to "
                f"{int(draft_vocab.max())}, the target writes 0 to {vocab_size - 1}: train a "
                "drafter for this target"
            )
        self._vocab_size = vocab_size
        self._ids = None if draft_vocab is None else draft_vocab.to(model.device)
        self._num_columns = model.vocab_size
        # No column stands for an id beyond the vocabulary.
        self.is_proposable = draft_vocab is not None or model.vocab_size <= vocab_size

    def to_target(self, logits: Tensor) -> Tensor:
        """[N, n] -> [N, V]; tokens that the drafter does not know get no mass."""
        if self._ids is None:
            if self._num_columns >= self._vocab_size:
                return logits[:, : self._vocab_size]
            return torch.nn.functional.pad(
                logits, (0, self._vocab_size - self._num_columns), value=float("-inf")
            )
        full = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        return full.index_copy_(1, self._ids, logits)

    def likeliest(self, logits: Tensor) -> Tensor:
        """[N, n] -> [N] target ids of the largest; only if `is_proposable`."""
        columns = likeliest_columns(logits)
        return columns if self._ids is None else self._ids[columns]


class Proposable:
    """The ids that may be proposed in one call: those with a string that its settings allow.

    Found text may hold others: ids of another tokenizer, or a head's padding in earlier requests.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._vocab_size = sampler.vocab_size
        biases = (sampler.settings.logit_bias or {}).items()
        self._never = frozenset(token for token, bias in biases if bias == -math.inf)

    def part(self, tokens: Sequence[int]) -> Sequence[int]:
        """`tokens` up to the first that may not."""
        for place, token in enumerate(tokens):
            if not 0 <= token < self._vocab_size or token in self._never:
                return tokens[:place]
        return tokens
