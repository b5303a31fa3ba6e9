"""A second causal language model as the drafter, with the target's tokenizer.

Its cache follows the committed text by lengths alone. After a round it has seen one token less
than the target if every draft was kept (it never feeds its own last proposal), else exactly what
was kept; the next draft starts by feeding what it has not seen, one or two tokens.

Shapes: b rows of one call, K drafted positions, V the target's real vocabulary, n rows of a
reduced head.
"""

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from specdec_runtime.chain import ChainStart, draft_chain, greedy_chain
from specdec_runtime.draft import Draft
from specdec_runtime.draft_length import LengthRound
from specdec_runtime.draft_vocabulary import DraftVocabulary
from specdec_runtime.engines import Engine, make_model
from specdec_runtime.formats import read_draft_vocab
from specdec_runtime.model import Cache, CausalModel, NewTokens, right_padded
from specdec_runtime.model_names import resolve_model
from specdec_runtime.pretrained import load_module, load_tokenizer
from specdec_runtime.sampling import Sampler
from specdec_runtime.target import Target
from specdec_runtime.tokenizers import check_same_tokenizer
from specdec_runtime.tree_drafting import draft_trees, score_trees
from specdec_runtime.tree_growth import TreeShape
from specdec_runtime.trees import DraftTree

SETTINGS = frozenset({"temperature"})


class CausalLMDrafter:
    """Drafts with a causal LM, greedily where the row is greedy, else from its own distribution.

    Args:
        model: the drafting model. With a reduced output vocabulary its logits have n columns.
        draft_vocab: [n] int64, the target id of each logit column; None = column i is id i.
        temperature: replaces the temperature of rows that sample, while drafting (any value is
            lossless; 0 drafts the likeliest token).
        module: the transformers module behind `model`, if training changes it; see `refresh`.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: CausalModel,
        *,
        draft_vocab: Tensor | None = None,
        temperature: float | None = None,
        module: PreTrainedModel | None = None,
    ) -> None:
        if draft_vocab is not None and len(draft_vocab) != model.vocab_size:
            raise ValueError(
                f"the draft vocabulary names {len(draft_vocab)} tokens, the head has "
                f"{model.vocab_size} rows: expected one row a token"
            )
        self.model = model
        self.draft_vocab = draft_vocab
        self.temperature = temperature
        self.module = module
        self.max_positions: int | None = model.max_positions
        self._engine: Engine | str = Engine.auto

    @classmethod
    def from_module(
        cls,
        module: PreTrainedModel,
        *,
        draft_vocab: Tensor | None = None,
        temperature: float | None = None,
        engine: Engine | str = Engine.auto,
    ) -> "CausalLMDrafter":
        """A drafter from a loaded module; with `draft_vocab` only those rows of its head count."""
        model = make_model(module, engine=engine, head_rows=draft_vocab)
        drafter = cls(model, draft_vocab=draft_vocab, temperature=temperature, module=module)
        drafter._engine = engine
        return drafter

    def refresh(self) -> None:
        """Take over the weights that `module` has now; between `generate` calls only."""
        assert self.module is not None, "only a drafter made by from_module can be refreshed"
        self.model = make_model(self.module, engine=self._engine, head_rows=self.draft_vocab)

    def begin(self, batch_size: int, capacity: int, sampler: Sampler) -> "CausalLMSession":
        cache = self.model.new_cache(batch_size, capacity)
        return CausalLMSession(self, cache, sampler)


def load(
    folder: str | Path | None, target: Target, *, engine: Engine | str, settings: dict[str, Any]
) -> CausalLMDrafter:
    """The drafter in `folder` (or of a hub id), checked to share the target's tokenizer.

    Settings: `temperature`.

    Raises:
        ValueError: if there is no such model, its tokenizer reads an id differently, or it has no
            embedding for an id that the target may write.
    """
    if folder is None:
        raise ValueError("a causal_lm drafter needs a model: give its folder or hub id")
    if target.tokenizer is None:
        raise ValueError("the target has no tokenizer to compare the drafter's with: load_target")
    folder = resolve_model(folder)
    check_same_tokenizer(load_tokenizer(folder), target.tokenizer)
    module = load_module(folder, device=target.device)
    _check_embeddings(module, folder, target)
    return CausalLMDrafter.from_module(
        module,
        draft_vocab=read_draft_vocab(folder),
        temperature=settings.get("temperature"),
        engine=engine,
    )


def _check_embeddings(module: PreTrainedModel, folder: str, target: Target) -> None:
    embeddings: Any = module.get_input_embeddings()
    num_rows = embeddings.weight.shape[0]
    if num_rows < target.real_vocab_size:
        string = target.tokenizer.convert_ids_to_tokens(num_rows)
        raise ValueError(
            f"{folder} embeds {num_rows} ids, the target writes {target.real_vocab_size}, id "
            f"{num_rows} ({string!r}) among them: resize the drafter's embeddings and train them"
        )


class CausalLMSession:
    """The drafting model's cache for one batch."""

    def __init__(self, drafter: CausalLMDrafter, cache: Cache, sampler: Sampler) -> None:
        self.cache = cache
        self._model = drafter.model
        self._sampler = sampler
        self._temperature = drafter.temperature
        self._vocab = DraftVocabulary(drafter.draft_vocab, drafter.model, sampler.vocab_size)
        self._max_positions = drafter.model.max_positions

    def propose(
        self,
        rows: list[int],
        committed: list[list[int]],
        lengths: LengthRound,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        for member, tokens in enumerate(committed):
            # Drafting k tokens feeds everything committed and k - 1 drafts.
            lengths.cap(member, self._max_positions - len(tokens) + 1)
        chain = greedy_chain(
            rows,
            lengths,
            model=self._model,
            cache=self.cache,
            sampler=self._sampler,
            vocab=self._vocab,
            start=lambda members: ChainStart(*self._unseen(members, rows, committed)),
        )
        if chain is not None:
            return chain

        def next_logits(members: list[int], tokens: Tensor | None) -> Tensor:
            if tokens is None:
                return self._feed(*self._unseen(members, rows, committed), members, rows)
            return self._feed(tokens[:, None], None, members, rows)

        return draft_chain(
            rows,
            committed,
            lengths,
            sampler=self._sampler,
            next_logits=next_logits,
            temperature=self._temperature,
        )

    def propose_trees(
        self,
        rows: list[int],
        committed: list[list[int]],
        limits: list[int],
        shape: TreeShape,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        def tree_logits(members: list[int], tree: DraftTree) -> Tensor:
            return self._feed_trees(members, rows, committed, tree)

        room = [self._max_positions - len(tokens) + 1 for tokens in committed]
        return draft_trees(
            rows,
            committed,
            [min(limit, most) for limit, most in zip(limits, room, strict=True)],
            shape=shape,
            sampler=self._sampler,
            tree_logits=tree_logits,
            temperature=self._temperature,
        )

    def commit(self, rows: list[int], committed: list[list[int]]) -> None:
        self.cache.truncate([len(tokens) - 1 for tokens in committed], rows)

    def _feed(
        self, token_ids: Tensor, num_new: Tensor | None, members: list[int], rows: list[int]
    ) -> Tensor:
        """[n, V] logits after the last token of each member."""
        batch = [rows[member] for member in members]
        output = self._model.forward(
            token_ids, self.cache, num_new=num_new, rows=batch, last_only=True
        )
        assert output.logits is not None
        return self._vocab.to_target(output.logits[:, 0])

    def _feed_trees(
        self, members: list[int], rows: list[int], committed: list[list[int]], tree: DraftTree
    ) -> Tensor:
        """[n, N + 1, V] logits after the pending token and every node; the cache forgets both."""
        self._catch_up(members, rows, committed)
        batch = [rows[member] for member in members]
        pending = [committed[member][-1] for member in members]
        scores = score_trees(self._model, self.cache, batch, pending, tree)
        return self._vocab.to_target(scores.flatten(0, 1)).view(*scores.shape[:2], -1)

    def _catch_up(self, members: list[int], rows: list[int], committed: list[list[int]]) -> None:
        """Bring everything but the pending token into the cache."""
        seen = self.cache.lengths.tolist()
        behind = [i for i in members if len(committed[i]) - 1 > seen[rows[i]]]
        if behind:
            token_ids, num_new = self._unseen(behind, rows, [tokens[:-1] for tokens in committed])
            batch = [rows[member] for member in behind]
            self._model.forward(token_ids, self.cache, num_new=num_new, rows=batch, logits=False)

    def _unseen(self, members: list[int], rows: list[int], committed: list[list[int]]) -> NewTokens:
        """Committed tokens that are not in the cache yet."""
        seen = self.cache.lengths.tolist()
        return right_padded([committed[member][seen[rows[member]] :] for member in members])
