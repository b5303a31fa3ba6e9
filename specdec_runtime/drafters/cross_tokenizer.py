"""A causal LM with another tokenizer as the drafter.

Two ways, both lossless (Timor et al. 2025, arXiv:2502.05202):
- `text`, for greedy rows: the drafter writes text, which is re-encoded in the target's tokens and
  compared with the target's own (their SLEM). Deterministic, so certain tokens (one-hot).
- `tokens`, for sampling: the drafter's distribution is restricted to the tokens that spell the same
  in both vocabularies and renormalised; its draws are tested like any other's (their TLI).

Shapes: b rows, n of them in a pass, V the target's real vocabulary, W the drafter's head rows.
"""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec_runtime.chain import certain_chains, draft_chain
from specdec_runtime.draft import Draft
from specdec_runtime.draft_length import LengthRound
from specdec_runtime.draft_vocabulary import Proposable
from specdec_runtime.engines import Engine, make_model
from specdec_runtime.model import Cache, CausalModel, right_padded
from specdec_runtime.model_names import resolve_model
from specdec_runtime.pretrained import load_module, load_tokenizer
from specdec_runtime.retokenized import Retokenized
from specdec_runtime.sampling import Sampler
from specdec_runtime.target import Target
from specdec_runtime.token_bytes import shared_tokens
from specdec_runtime.tree_drafting import draft_trees, score_trees
from specdec_runtime.tree_growth import TreeShape
from specdec_runtime.trees import DraftTree

SETTINGS = frozenset({"mode", "temperature"})

# Tokens of the drafter a token of the target: a text that takes more is drafted to that point only.
# Its positions alone would be gigabytes of cache a row for a drafter of long texts.
_MOST_PER_TOKEN = 4
_SPARE_TOKENS = 64


class Mode(Enum):
    """What crosses from one tokenizer to the other; `auto`: text if all rows are greedy."""

    auto = "auto"
    text = "text"
    tokens = "tokens"


class CrossTokenizerDrafter:
    """Drafts with a model that reads and writes other tokens than the target.

    Args:
        model: the drafting model.
        tokenizer: its tokenizer.
        target_tokenizer: the target's.
        mode: see `Mode`.
        temperature: replaces the temperature of rows that sample, while drafting tokens.
        module: the transformers module behind `model`, if training changes it; see `refresh`.

    Raises:
        ValueError: if the vocabularies share no token.
    """

    hidden_layers: tuple[int, ...] = ()
    max_positions: int | None = None  # counted in the drafter's own tokens

    def __init__(
        self,
        model: CausalModel,
        tokenizer: Any,
        target_tokenizer: Any,
        *,
        mode: Mode | str = Mode.auto,
        temperature: float | None = None,
        module: PreTrainedModel | None = None,
    ) -> None:
        self.model = model
        self.module = module
        self.tokenizer = tokenizer
        self.target_tokenizer = target_tokenizer
        self.mode = Mode(mode)
        self.temperature = temperature
        self.draft_ids, self.target_ids = shared_tokens(tokenizer, target_tokenizer)
        self._engine: Engine | str = Engine.auto

    @classmethod
    def from_module(
        cls,
        module: PreTrainedModel,
        tokenizer: Any,
        target_tokenizer: Any,
        *,
        engine: Engine | str = Engine.auto,
        **settings: Any,
    ) -> "CrossTokenizerDrafter":
        """A drafter from a loaded module; `settings` are `mode` and `temperature`."""
        model = make_model(module, engine=engine)
        drafter = cls(model, tokenizer, target_tokenizer, module=module, **settings)
        drafter._engine = engine
        return drafter

    def refresh(self) -> None:
        """Take over the weights that `module` has now; between `generate` calls only."""
        assert self.module is not None, "only a drafter made by from_module can be refreshed"
        self.model = make_model(self.module, engine=self._engine)

    def begin(
        self, batch_size: int, capacity: int, sampler: Sampler
    ) -> "TextDraftSession | TokenDraftSession":
        is_text = self.mode is Mode.text or (self.mode is Mode.auto and sampler.all_greedy)
        kind = TextDraftSession if is_text else TokenDraftSession
        return kind(self, batch_size, capacity, sampler)


def load(
    folder: str | Path | None, target: Target, *, engine: Engine | str, settings: dict[str, Any]
) -> CrossTokenizerDrafter:
    """The causal LM in `folder` with its own tokenizer. Settings: `mode`, `temperature`."""
    if folder is None:
        raise ValueError("a cross_tokenizer drafter needs a model: cross_tokenizer:FOLDER_OR_ID")
    if target.tokenizer is None:
        raise ValueError("a cross_tokenizer drafter needs the target's tokenizer: use load_target")
    folder = resolve_model(folder)
    module = load_module(folder, device=target.device)
    return CrossTokenizerDrafter.from_module(
        module, load_tokenizer(folder), target.tokenizer, engine=engine, **settings
    )


class _Session:
    """The drafter's cache, kept in step with the re-encoded committed text."""

    def __init__(
        self, drafter: CrossTokenizerDrafter, batch_size: int, capacity: int, sampler: Sampler
    ) -> None:
        self._drafter = drafter
        self._model = drafter.model
        self._sampler = sampler
        self._texts = [
            Retokenized(drafter.tokenizer, drafter.target_tokenizer) for _ in range(batch_size)
        ]
        self._fed: list[list[int]] = [[] for _ in range(batch_size)]  # ids in the cache
        most = _MOST_PER_TOKEN * capacity + _SPARE_TOKENS
        self._capacity = min(most, drafter.model.max_positions)
        # Behind the last position there is room for the nodes of a tree.
        self._cache: Cache = drafter.model.new_cache(batch_size, self._capacity + capacity)

    def commit(self, rows: list[int], committed: list[list[int]]) -> None:
        pass  # what no longer fits the text is dropped when it is read again

    def _read(self, rows: list[int], committed: list[list[int]]) -> list[int]:
        """Re-encode and roll the cache back to what still holds; what each row may draft at most."""
        for row, tokens in zip(rows, committed, strict=True):
            text = self._texts[row]
            text.read(tokens)
            common = 0
            for own, fed in zip(text.draft_ids[:-1], self._fed[row], strict=False):
                if own != fed:
                    break
                common += 1
            self._fed[row] = self._fed[row][:common]
            self._cache.truncate([common], [row])
        return [self._room(row) for row in rows]

    def _feed(self, members: list[int], rows: list[int], ids: Tensor | None) -> Tensor:
        """[n, W] logits after feeding `ids` [n], or what the cache lacks of the text."""
        batch = [rows[member] for member in members]
        if ids is None:
            new = [self._texts[row].draft_ids[len(self._fed[row]) :] for row in batch]
        else:
            new = [[token] for token in ids.tolist()]
        logits = self._append(batch, new)
        assert logits is not None
        return logits[:, 0]

    def _append(
        self, batch: list[int], new: list[list[int]], *, logits: bool = True
    ) -> Tensor | None:
        """Feed some rows `new` tokens each, at least one; [n, 1, W] logits after the last."""
        padded, counts = right_padded(new)
        for row, tokens in zip(batch, new, strict=True):
            self._fed[row] = self._fed[row] + tokens
        output = self._model.forward(
            padded, self._cache, num_new=counts, rows=batch, last_only=True, logits=logits
        )
        return output.logits

    def _room(self, row: int) -> int:
        """Most tokens that the drafter can draft behind the row's text; 0 inside a character."""
        text = self._texts[row]
        can_draft = text.is_whole and text.draft_ids
        return self._capacity - len(text.draft_ids) + 1 if can_draft else 0


class TextDraftSession(_Session):
    """Drafts text and re-encodes it."""

    def __init__(
        self, drafter: CrossTokenizerDrafter, batch_size: int, capacity: int, sampler: Sampler
    ) -> None:
        super().__init__(drafter, batch_size, capacity, sampler)
        self._proposable = Proposable(sampler)

    def propose(
        self,
        rows: list[int],
        committed: list[list[int]],
        lengths: LengthRound,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        for member, room in enumerate(self._read(rows, committed)):
            lengths.cap(member, room)
        wanted = [lengths.limit(member) for member in range(len(rows))]
        written: list[list[int]] = [[] for _ in rows]
        members = [member for member, count in enumerate(wanted) if count > 0]
        ids = None
        while members:  # about one token here for one of the target's
            tokens = self._feed(members, rows, ids).argmax(-1).tolist()
            for member, token in zip(members, tokens, strict=True):
                written[member].append(token)
            members = [member for member in members if len(written[member]) < wanted[member]]
            ids = torch.tensor([written[member][-1] for member in members])
        found = [
            self._in_target_tokens(row, tokens, text)
            for row, tokens, text in zip(rows, committed, written, strict=True)
        ]
        return certain_chains(found, lengths)

    def _in_target_tokens(self, row: int, tokens: list[int], written: list[int]) -> Sequence[int]:
        """What was written, re-encoded: up to the first id that the target does not write."""
        eos = self._drafter.tokenizer.eos_token_id
        target_eos = self._drafter.target_tokenizer.eos_token_id
        ends = eos in written
        text = written[: written.index(eos)] if ends else written
        token_ids = self._texts[row].to_target(tokens, text)
        if ends and target_eos is not None:
            token_ids = [*token_ids, target_eos]
        return self._proposable.part(token_ids)


class TokenDraftSession(_Session):
    """Draws tokens that both vocabularies have."""

    def __init__(
        self, drafter: CrossTokenizerDrafter, batch_size: int, capacity: int, sampler: Sampler
    ) -> None:
        super().__init__(drafter, batch_size, capacity, sampler)
        is_real = drafter.target_ids < sampler.vocab_size
        device = drafter.model.device
        self._draft_ids = drafter.draft_ids[is_real].to(device)
        self._target_ids = drafter.target_ids[is_real].to(device)
        self._to_draft = torch.zeros(sampler.vocab_size, dtype=torch.int64, device=device)
        self._to_draft[self._target_ids] = self._draft_ids

    def propose(
        self,
        rows: list[int],
        committed: list[list[int]],
        lengths: LengthRound,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        for member, room in enumerate(self._read(rows, committed)):
            lengths.cap(member, room)

        def next_logits(members: list[int], tokens: Tensor | None) -> Tensor:
            ids = None if tokens is None else self._to_draft[tokens]
            return self._to_target(self._feed(members, rows, ids))

        return draft_chain(
            rows,
            committed,
            lengths,
            sampler=self._sampler,
            next_logits=next_logits,
            temperature=self._drafter.temperature,
        )

    def propose_trees(
        self,
        rows: list[int],
        committed: list[list[int]],
        limits: list[int],
        shape: TreeShape,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        room = self._read(rows, committed)

        def tree_logits(members: list[int], tree: DraftTree) -> Tensor:
            return self._feed_trees(members, rows, tree)

        return draft_trees(
            rows,
            committed,
            [min(limit, most) for limit, most in zip(limits, room, strict=True)],
            shape=shape,
            sampler=self._sampler,
            tree_logits=tree_logits,
            temperature=self._drafter.temperature,
        )

    def _feed_trees(self, members: list[int], rows: list[int], tree: DraftTree) -> Tensor:
        """[n, N + 1, V] logits after the text and every node; the cache forgets the trees."""
        batch = [rows[member] for member in members]
        texts = [self._texts[row].draft_ids for row in batch]
        unseen = {row: ids[len(self._fed[row]) : -1] for row, ids in zip(batch, texts, strict=True)}
        behind = [row for row in batch if unseen[row]]
        if behind:
            self._append(behind, [unseen[row] for row in behind], logits=False)
        own = tree._replace(token_ids=self._to_draft[tree.token_ids.to(self._to_draft.device)])
        pending = [ids[-1] for ids in texts]
        return self._to_target(score_trees(self._model, self._cache, batch, pending, own))

    def _to_target(self, logits: Tensor) -> Tensor:
        """[..., W] -> [..., V]; tokens that only one vocabulary has get no mass."""
        full = logits.new_full((*logits.shape[:-1], self._sampler.vocab_size), float("-inf"))
        full[..., self._target_ids] = logits[..., self._draft_ids]
        return full
