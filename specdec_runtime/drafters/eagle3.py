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
from specdec_runtime.eagle3_network import Eagle3Network, load_eagle3
from specdec_runtime.engines import Engine
from specdec_runtime.model import right_padded
from specdec_runtime.native import NativeLinear, NativeModel
from specdec_runtime.sampling import Sampler
from specdec_runtime.state_drafter import StateDrafter, StateSession
from specdec_runtime.target import Target

SETTINGS = frozenset({"temperature"})

# The state that a step hands on: the residual after the layer, or the one after the norm.
_RESIDUAL, _NORMED = 1, -1


class Eagle3Drafter(StateDrafter):
    """Drafts with an EAGLE-3 network, greedily where the row is greedy."""

    kind = "eagle3"
    network: Eagle3Network

    @property
    def hands_on(self) -> int:
        return _NORMED if self.network.config.norm_output else _RESIDUAL

    def refresh(self) -> None:
        super().refresh()
        decoder = self.network.model
        self._fusion: Callable[[Tensor], Tensor] = decoder.fuse
        if isinstance(self.model, NativeModel):
            self._fusion = NativeLinear(decoder.fc, list(decoder.fc_norm))  # type: ignore[arg-type]

    def fuse(self, features: Tensor) -> Tensor:
        """[..., A * D] states of the target -> [..., D] float32."""
        if isinstance(self._fusion, NativeLinear):
            return self._fusion(features)
        weight = self.network.model.fc.weight
        with torch.no_grad():
            return self._fusion(features.to(device=weight.device, dtype=weight.dtype)).float()

    def begin(self, batch_size: int, capacity: int, sampler: Sampler) -> "Eagle3Session":
        return Eagle3Session(self, batch_size, capacity, sampler)


def load(
    folder: str | Path | None, target: Target, *, engine: Engine | str, settings: dict[str, Any]
) -> Eagle3Drafter:
    """See `StateDrafter.of_folder`."""
    return Eagle3Drafter.of_folder(
        folder, target, load_network=load_eagle3, engine=engine, settings=settings
    )


class Eagle3Session(StateSession):
    _drafter: Eagle3Drafter

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
