"""Self-speculation: the target's own first layers draft, the others verify. Nothing runs twice.

Drafting runs pending and drafted tokens through the first `exit_layer` layers on the target's own
cache and keeps their residuals there. Verification enters at that layer with those residuals: the
lower layers' keys, values and hidden states are the ones the target needs anyway.

Source: Elhoushi et al. 2024 (LayerSkip), arXiv:2404.16710. On a target that was not trained for
early exit the drafts are poor; a trained adapter in front of the head (exit_adapter.py) repairs
that, and a reduced draft vocabulary spares most of the head.

Shapes: b rows, n of them in a pass, K drafted positions, D hidden size, V vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec_runtime.chain import draft_chain
from specdec_runtime.draft import Draft, no_draft
from specdec_runtime.draft_length import LengthRound
from specdec_runtime.draft_vocabulary import DraftVocabulary
from specdec_runtime.engines import Engine
from specdec_runtime.exit_adapter import ReducedHead, load_exit_adapter
from specdec_runtime.formats import read_draft_vocab, read_manifest
from specdec_runtime.hf_model import HFModel
from specdec_runtime.model import Cache, CausalModel
from specdec_runtime.sampling import Sampler
from specdec_runtime.target import Target
from specdec_runtime.tree_drafting import draft_trees, tree_inputs
from specdec_runtime.tree_growth import TreeShape
from specdec_runtime.trees import DraftTree

SETTINGS = frozenset({"exit_layer", "temperature"})


class EarlyExitDrafter:
    """Drafts with the first layers of the target.

    Args:
        model: the target's model itself.
        exit_layer: number of layers that draft, at least 1 and fewer than all.
        adapter: [..., D] residual after these layers -> [..., D] what the target's head reads;
            None = the target's own final norm.
        draft_vocab: [n] int64 target ids, the only rows of the target's head that are computed
            behind the adapter; None = all.
        temperature: replaces the temperature of rows that sample, while drafting.

    Raises:
        ValueError: for an exit_layer outside the model, or a model that cannot be divided.
    """

    hidden_layers: tuple[int, ...] = ()
    max_positions: int | None = None

    def __init__(
        self,
        model: CausalModel,
        *,
        exit_layer: int,
        adapter: nn.Module | None = None,
        draft_vocab: Tensor | None = None,
        temperature: float | None = None,
    ) -> None:
        if not isinstance(exit_layer, int) or not 1 <= exit_layer < model.num_layers:
            raise ValueError(
                f"exit_layer is {exit_layer!r}, expected 1 to {model.num_layers - 1}: "
                f"the target has {model.num_layers} layers"
            )
        if isinstance(model, HFModel) and not model.is_divisible:
            raise ValueError(
                f"{type(model.module).__name__} has recurrent layers or layers that share keys and "
                "values, so that its first layers cannot run alone: use another drafter"
            )
        self.model = model
        self.exit_layer = exit_layer
        self.adapter = adapter
        self.draft_vocab = draft_vocab
        self.temperature = temperature
        self._head = None if draft_vocab is None else ReducedHead(model, draft_vocab)

    def refresh(self) -> None:
        """The adapter under training is the one that drafts: there is nothing to take over."""

    def adapted_logits(self, residual: Tensor) -> Tensor:
        """[..., n] logits of [..., D] residuals after the lower layers, behind the adapter."""
        assert self.adapter is not None
        hidden = self.adapter(residual)
        return self.model.logits_of(hidden) if self._head is None else self._head(hidden)

    def begin(self, batch_size: int, capacity: int, sampler: Sampler) -> "EarlyExitSession":
        return EarlyExitSession(self, sampler)


def load(
    folder: str | Path | None, target: Target, *, engine: Engine | str, settings: dict[str, Any]
) -> EarlyExitDrafter:
    """The target's own early layers, with the trained adapter of `folder` if one is given.

    Settings: `exit_layer` (default a third of the layers) and `temperature`; those of an adapter
    come from its folder.

    Raises:
        ValueError: if the folder has no adapter, or one for another target.
    """
    model = target.model
    if folder is None:
        return EarlyExitDrafter(model, **{"exit_layer": max(1, model.num_layers // 3), **settings})
    stored = read_manifest(folder).kind_config
    adapter = load_exit_adapter(
        folder,
        model.hidden_size,
        mlp_size=stored["mlp_size"],
        norm_eps=stored["norm_eps"],
        device=model.device,
    )
    return EarlyExitDrafter(
        model,
        exit_layer=stored["exit_layer"],
        adapter=adapter,
        draft_vocab=read_draft_vocab(folder),
        temperature=settings.get("temperature"),
    )


class EarlyExitSession:
    """Works on the target's cache; between rounds it holds nothing."""

    def __init__(self, drafter: EarlyExitDrafter, sampler: Sampler) -> None:
        self._drafter = drafter
        self._model = drafter.model
        self._sampler = sampler
        self._vocab = DraftVocabulary(drafter.draft_vocab, drafter.model, sampler.vocab_size)
        self._cache: Cache | None = None

    def share(self, model: CausalModel, cache: Cache) -> None:
        own = self._model
        is_own = own is model
        if isinstance(own, HFModel) and isinstance(model, HFModel):
            is_own = own.module is model.module  # two wrappers of one module run the same weights
        if not is_own:
            raise ValueError(
                "this early exit was made of another model than the target, whose layers cannot "
                "stand in for its own: make it with load_drafter, or of target.model"
            )
        self._cache = cache

    def propose(
        self,
        rows: list[int],
        committed: list[list[int]],
        lengths: LengthRound,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        fed: list[tuple[list[int], Tensor]] = []  # members and residuals, pass by pass

        def next_logits(members: list[int], tokens: Tensor | None) -> Tensor:
            if tokens is None:
                tokens = torch.tensor([committed[member][-1] for member in members])
            batch = [rows[member] for member in members]
            logits, residual = self._lower_layers(tokens[:, None], batch, draws=True)
            fed.append((members, residual[:, 0]))
            return self._vocab.to_target(logits[:, 0])

        draft = draft_chain(
            rows,
            committed,
            lengths,
            sampler=self._sampler,
            next_logits=next_logits,
            temperature=self._drafter.temperature,
        )
        if not fed:
            return no_draft(len(rows))
        # One token of each row has not been through the lower layers: the last one drafted, or
        # the pending one of a row that drafted nothing.
        counts = draft.num_drafted.tolist()
        last = [
            int(draft.token_ids[i, count - 1]) if count else committed[i][-1]
            for i, count in enumerate(counts)
        ]
        _, residual = self._lower_layers(torch.tensor(last)[:, None], rows, draws=False)
        fed.append((list(range(len(rows))), residual[:, 0]))
        assert self._cache is not None
        self._cache.truncate([len(tokens) - 1 for tokens in committed], rows)
        hidden = _in_order(fed, counts)
        return draft._replace(exit_layer=self._drafter.exit_layer, exit_hidden=hidden)

    def propose_trees(
        self,
        rows: list[int],
        committed: list[list[int]],
        limits: list[int],
        shape: TreeShape,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        """Trees feed all their nodes once a level: the lower layers are computed again for those."""

        def tree_logits(members: list[int], tree: DraftTree) -> Tensor:
            logits, _ = self._feed_trees(members, rows, committed, tree, draws=True)
            return self._vocab.to_target(logits.flatten(0, 1)).view(*logits.shape[:2], -1)

        draft = draft_trees(
            rows,
            committed,
            limits,
            shape=shape,
            sampler=self._sampler,
            tree_logits=tree_logits,
            temperature=self._drafter.temperature,
        )
        if draft.tree is None:
            return draft
        everyone = list(range(len(rows)))
        _, hidden = self._feed_trees(everyone, rows, committed, draft.tree, draws=False)
        return draft._replace(exit_layer=self._drafter.exit_layer, exit_hidden=hidden)

    def commit(self, rows: list[int], committed: list[list[int]]) -> None:
        pass

    def _feed_trees(
        self,
        members: list[int],
        rows: list[int],
        committed: list[list[int]],
        tree: DraftTree,
        *,
        draws: bool,
    ) -> tuple[Tensor, Tensor]:
        """Pending tokens and trees through the lower layers, whose cache lengths stay: logits
        [n, N + 1, V] (if it draws) and residuals [n, N + 1, D]."""
        assert self._cache is not None, "share has to be called before propose_trees"
        batch = [rows[member] for member in members]
        inputs = tree_inputs([committed[member][-1] for member in members], tree)
        starts = self._cache.lengths[batch]
        found = self._lower_layers(
            inputs.token_ids,
            batch,
            draws=draws,
            num_new=inputs.num_new,
            positions=starts[:, None] + inputs.depths.cpu(),
            visible=inputs.visible,
        )
        self._cache.truncate(starts, batch)
        return found

    def _lower_layers(
        self, token_ids: Tensor, rows: list[int], *, draws: bool, **places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Feed [n, Q] tokens to the lower layers: logits [n, Q, V] (if it draws) and residuals
        [n, Q, D]; `places` as in `CausalModel.forward`."""
        assert self._cache is not None, "share has to be called before propose"
        exit_layer, adapter = self._drafter.exit_layer, self._drafter.adapter
        output = self._model.forward(
            token_ids,
            self._cache,
            rows=rows,
            layers=(0, exit_layer),
            hidden_layers=(exit_layer,),
            logits=draws and adapter is None,
            early_head=draws and adapter is None,
            **places,  # type: ignore[arg-type]
        )
        residual = output.hidden[exit_layer]
        logits = output.logits if output.logits is not None else residual[..., :0]
        if draws and adapter is not None:
            logits = self._drafter.adapted_logits(residual)
        return logits, residual


def _in_order(fed: list[tuple[list[int], Tensor]], counts: list[int]) -> Tensor:
    """[b, K + 1, D] residuals of the pending token and the drafts, zeros as padding."""
    like = fed[0][1]
    hidden = like.new_zeros(len(counts), max(counts) + 1, like.shape[-1])
    filled = [0] * len(counts)
    for members, residual in fed:
        hidden[members, [filled[member] for member in members]] = residual
        for member in members:
            filled[member] += 1
    return hidden
