"""A causal model whose logits are looked up, and drafters with a script: exact expected outputs."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from specdec_runtime.draft import Draft, chains
from specdec_runtime.draft_length import LengthRound
from specdec_runtime.model import ModelOutput


class TableCache:
    def __init__(self, batch_size: int, capacity: int) -> None:
        self.lengths = torch.zeros(batch_size, dtype=torch.int64)
        self.capacity = capacity

    def truncate(self, lengths, rows=None) -> None:
        chosen = slice(None) if rows is None else list(rows)
        self.lengths[chosen] = torch.minimum(self.lengths[chosen], torch.as_tensor(lengths))

    def keep_path(self, row, start, slots) -> None:
        self.lengths[row] = start + len(slots)


class TableModel:
    """Implements `CausalModel`; `logits_at(positions [b, Q], token_ids [b, Q])` -> [b, Q, V]."""

    device = torch.device("cpu")
    dtype = torch.float32
    hidden_size = 1
    num_layers = 1

    def __init__(self, logits_at: Callable, vocab_size: int, *, max_positions: int = 1000) -> None:
        self.logits_at = logits_at
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.config = SimpleNamespace(eos_token_id=None)
        self.num_passes = 0

    @classmethod
    def by_token(cls, probs: Tensor) -> "TableModel":
        """Next-token distributions [V, V] by the last token."""
        return cls(lambda positions, tokens: probs[tokens].log(), probs.shape[1])

    @classmethod
    def reciting(cls, text: Sequence[int], vocab_size: int, **settings) -> "TableModel":
        """Greedily continues any prompt with `text`, by position, and then with its last token."""
        script = torch.tensor(text)

        def logits_at(positions: Tensor, tokens: Tensor) -> Tensor:
            following = script[(positions + 1).clamp_max(len(script) - 1)]
            return torch.nn.functional.one_hot(following, vocab_size).float() * 10.0

        return cls(logits_at, vocab_size, **settings)

    def new_cache(self, batch_size: int, capacity: int) -> TableCache:
        return TableCache(batch_size, capacity)

    def forward(
        self,
        token_ids,
        cache,
        *,
        num_new=None,
        rows=None,
        last_only=False,
        likeliest_of=None,
        positions=None,
        **_,
    ) -> ModelOutput:
        self.num_passes += 1
        chosen = slice(None) if rows is None else list(rows)
        width = token_ids.shape[1]
        counts = torch.full((len(token_ids),), width) if num_new is None else num_new
        if positions is None:
            positions = cache.lengths[chosen][:, None] + torch.arange(width)
        cache.lengths[chosen] += counts
        assert (cache.lengths <= cache.capacity).all()
        assert (cache.lengths <= self.max_positions).all(), "a position past the model's last one"
        if last_only:
            last = (counts - 1)[:, None]
            positions, token_ids = positions.gather(1, last), token_ids.gather(1, last)
        logits = self.logits_at(positions, token_ids).float()
        likeliest = None if likeliest_of is None else logits[..., :likeliest_of].argmax(-1)
        return ModelOutput(logits, {}, likeliest)


class ScriptedDrafter:
    """Proposes `propose(prefix, position)` for each position after the committed `prefix`.

    Records every (row, num committed, num asked) in `asked`.
    """

    hidden_layers = ()
    max_positions = None

    def __init__(self, next_token: Callable[[list[int], int], int]) -> None:
        self.next_token = next_token
        self.asked: list[tuple[int, int, int]] = []

    @classmethod
    def knowing(cls, texts: Sequence[Sequence[int]], *, kind: str, wrong: int) -> "ScriptedDrafter":
        """Knows the whole texts (prompt and answer).

        Args:
            kind: "perfect", "useless" (always `wrong`) or "half-right" (right at even positions).
        """
        known = [list(text) for text in texts]

        def next_token(prefix: list[int], position: int) -> int:
            text = next(text for text in known if text[: len(prefix)] == prefix)
            is_right = kind == "perfect" or (kind == "half-right" and position % 2 == 0)
            return text[position] if is_right and position < len(text) else wrong

        return cls(next_token)

    def begin(self, batch_size, capacity, sampler) -> "ScriptedDrafter":
        return self

    def propose(self, rows, committed, lengths: LengthRound, features=None) -> Draft:
        while lengths.ask():
            lengths.tell(None)
        drafts = []
        for row, tokens, count in zip(rows, committed, lengths.num_drafted, strict=True):
            self.asked.append((row, len(tokens), count))
            drafts.append([self.next_token(tokens, len(tokens) + i) for i in range(count)])
        return chains(drafts)

    def commit(self, rows, committed) -> None:
        pass
