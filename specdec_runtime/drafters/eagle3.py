"""EAGLE-3: one small layer that continues from the target's own hidden states.

The layer has one cache entry for every position i whose state the target has handed over: that state
beside the token at i + 1, scoring the token at i + 2. While drafting, the layer's own state stands in
for the target's; once the target has verified the tokens, those entries are made again from its
states. So between rounds the cache holds true entries only, and a round begins by feeding the one or
more states that the last verification brought.

The network: eagle3_network.py. Source: Li et al. 2025, arXiv:2503.01840.

Shapes: b rows, n of them in a step, F states of a row, A layers of the target, D hidden size.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec_runtime.chain import ChainStart, draft_chain, greedy_chain
from specdec_runtime.draft import Draft
from specdec_runtime.draft_length import LengthRound
from specdec_runtime.draft_vocabulary import DraftVocabulary
from specdec_runtime.eagle3_network import Eagle3Network, load_eagle3
from specdec_runtime.engines import Engine, make_model
from specdec_runtime.formats import read_draft_vocab
from specdec_runtime.handed_over import HandedOver, require_states_of
from specdec_runtime.model import Cache, CausalModel, right_padded
from specdec_runtime.native import NativeLinear, NativeModel
from specdec_runtime.sampling import Sampler
from specdec_runtime.target import Target

SETTINGS = frozenset({"temperature"})

# The state that a step hands on: the residual after the layer, or the one after the norm.
_RESIDUAL, _NORMED = 1, -1


class Eagle3Drafter:
    """Drafts with an EAGLE-3 network, greedily where the row is greedy.

    Args:
        network: its weights are copied where the C++ engine runs it; see `refresh`.
        draft_vocab: [n] int64, the target id of each row of its head; None = row i is id i.
        temperature: replaces the temperature of rows that sample, while drafting.
    """

    def __init__(
        self,
        network: Eagle3Network,
        *,
        draft_vocab: Tensor | None = None,
        temperature: float | None = None,
        engine: Engine | str = Engine.auto,
    ) -> None:
        rows = network.lm_head.out_features
        if draft_vocab is not None and len(draft_vocab) != rows:
            raise ValueError(
                f"the draft vocabulary names {len(draft_vocab)} tokens, the head has {rows} rows: "
                "expected one row a token"
            )
        self.network = network
        self.draft_vocab = draft_vocab
        self.temperature = temperature
        self.hidden_layers = tuple(network.config.eagle_aux_hidden_state_layer_ids)
        self.max_positions: int | None = network.config.max_position_embeddings
        self.hands_on = _NORMED if network.config.norm_output else _RESIDUAL
        self._engine = engine
        self.refresh()

    def refresh(self) -> None:
        """Take over the weights that the network has now; between `generate` calls only."""
        self.model: CausalModel = make_model(
            self.network, engine=self._engine, head_token_ids=self.draft_vocab
        )
        decoder = self.network.model
        self._fusion: Callable[[Tensor], Tensor] = decoder.fuse
        if isinstance(self.model, NativeModel):
            self._fusion = NativeLinear(decoder.fc, list(decoder.fc_norm))  # type: ignore[arg-type]

    @torch.no_grad()
    def fuse(self, features: Tensor) -> Tensor:
        """[..., A * D] states of the target -> [..., D] float32."""
        if isinstance(self._fusion, NativeLinear):
            return self._fusion(features)
        weight = self.network.model.fc.weight
        return self._fusion(features.to(device=weight.device, dtype=weight.dtype)).float()

    def begin(self, batch_size: int, capacity: int, sampler: Sampler) -> "Eagle3Session":
        return Eagle3Session(self, self.model.new_cache(batch_size, capacity), batch_size, sampler)


def load(
    folder: str | Path | None, target: Target, *, engine: Engine | str, settings: dict[str, Any]
) -> Eagle3Drafter:
    """The drafter in `folder`. Settings: `temperature`.

    Raises:
        ValueError: if there is none, or it reads states of another size than the target's.
    """
    if folder is None:
        raise ValueError("an eagle3 drafter needs a folder with its weights: give eagle3:FOLDER")
    network = load_eagle3(folder, device=target.model.device)
    require_states_of(network.config, folder, target)
    return Eagle3Drafter(
        network,
        draft_vocab=read_draft_vocab(folder),
        temperature=settings.get("temperature"),
        engine=engine,
    )


class Eagle3Session:
    """The layer's cache for one batch, and the states that it has not been fed yet."""

    def __init__(
        self, drafter: Eagle3Drafter, cache: Cache, batch_size: int, sampler: Sampler
    ) -> None:
        self.cache = cache
        self._drafter = drafter
        self._model = drafter.model
        self._sampler = sampler
        self._vocab = DraftVocabulary(drafter.draft_vocab, drafter.model, sampler.vocab_size)
        self._states = HandedOver(batch_size, drafter.hidden_layers)

    def propose(
        self,
        rows: list[int],
        committed: list[list[int]],
        lengths: LengthRound,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        self._states.take(rows, committed, features)
        for member, tokens in enumerate(committed):
            # Drafting k tokens makes entries up to position len(tokens) + k - 3.
            lengths.cap(member, self._model.max_positions - len(tokens) + 2)
        chain = greedy_chain(
            rows,
            lengths,
            model=self._model,
            cache=self.cache,
            sampler=self._sampler,
            vocab=self._vocab,
            start=lambda members: self._unseen(members, rows, committed),
            hands_on=self._drafter.hands_on,
        )
        if chain is not None:
            return chain
        states: dict[int, Tensor] = {}  # row -> [D], what its next step is entered with

        def next_logits(members: list[int], tokens: Tensor | None) -> Tensor:
            batch = [rows[member] for member in members]
            if tokens is None:
                return self._step(batch, states, *self._unseen(members, rows, committed))
            entering = torch.stack([states[row] for row in batch])[:, None]
            return self._step(batch, states, tokens[:, None], None, entering)

        return draft_chain(
            rows,
            committed,
            lengths,
            sampler=self._sampler,
            next_logits=next_logits,
            temperature=self._drafter.temperature,
        )

    def commit(self, rows: list[int], committed: list[list[int]]) -> None:
        """Entries made of the layer's own states go; the target's are on their way."""
        self.cache.truncate([self._states.num_read(row) for row in rows], rows)

    def _unseen(
        self, members: list[int], rows: list[int], committed: list[list[int]]
    ) -> ChainStart:
        """What the members' rows are fed first, with the fused states."""
        new = right_padded(
            [committed[member][self._states.num_read(rows[member]) + 1 :] for member in members]
        )
        states = [self._states.read(rows[member]) for member in members]
        side_by_side = (
            states[0][None] if len(states) == 1 else pad_sequence(states, batch_first=True)
        )
        return ChainStart(new.token_ids, new.num_new, self._drafter.fuse(side_by_side))

    def _step(
        self,
        batch: list[int],
        states: dict[int, Tensor],
        token_ids: Tensor,
        num_new: Tensor | None,
        entering: Tensor | None,
    ) -> Tensor:
        """[n, V] logits after the last entry of each row; puts its state into `states`."""
        hands_on = self._drafter.hands_on
        output = self._model.forward(
            token_ids,
            self.cache,
            num_new=num_new,
            rows=batch,
            last_only=True,
            hidden_layers=(hands_on,),
            layers=(0, 1),
            hidden_in=entering,
        )
        assert output.logits is not None
        last = [0] * len(batch) if num_new is None else (num_new - 1).tolist()
        for place, row in enumerate(batch):
            states[row] = output.hidden[hands_on][place, last[place]]
        return self._vocab.to_target(output.logits[:, 0])
