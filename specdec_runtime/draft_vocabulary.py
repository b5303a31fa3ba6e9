"""What a drafting model's logit columns stand for among the target's tokens.

Shapes: N rows, n logit columns, V the target's real vocabulary.
"""

import torch
from torch import Tensor

from specdec_runtime.model import CausalModel
from specdec_runtime.sampling import likeliest_columns


class DraftVocabulary:
    """Maps the drafting model's logit columns to the target's real vocabulary."""

    def __init__(self, draft_vocab: Tensor | None, model: CausalModel, vocab_size: int) -> None:
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
