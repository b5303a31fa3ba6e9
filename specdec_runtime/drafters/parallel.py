"""A block drafter: one pass of one small layer scores all tokens of a round.

The layer's cache holds one entry for every position whose states the target has handed over. A round
feeds the states that the last verification brought and, behind them, the block: the pending token
and as many masks as there are more tokens to draft. The block's entries are forgotten at once. Then
the tokens are picked one by one: each is drawn from the scores of its row plus what follows from the
token before it, which is a small matrix product; the distributions that are verified against are the
ones that were drawn from.

The network: parallel_network.py. Sources: DFlash, arXiv:2602.06036; DSpark, arXiv:2607.05147.

Shapes: b rows, n of them in a pass, F states of a row, K places of a block, D hidden size, n_d draft
vocabulary, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec_runtime.chain import draft_chain
from specdec_runtime.draft import Draft, no_draft
from specdec_runtime.draft_length import LengthRound
from specdec_runtime.engines import Engine
from specdec_runtime.native import NativeLinear, NativeModel
from specdec_runtime.parallel_network import ParallelNetwork, load_parallel
from specdec_runtime.sampling import Sampler
from specdec_runtime.state_drafter import StateDrafter, StateSession
from specdec_runtime.target import Target

SETTINGS = frozenset({"temperature"})

_NORMED = -1  # the hidden state that the head reads


class ParallelDrafter(StateDrafter):
    """Drafts blocks with a parallel network."""

    kind = "parallel"
    network: ParallelNetwork

    def refresh(self) -> None:
        super().refresh()
        network = self.network
        is_native = isinstance(self.model, NativeModel)
        self._fc: Callable[[Tensor], Tensor] = NativeLinear(network.fc) if is_native else network.fc
        self._w2: Callable[[Tensor], Tensor] = (
            NativeLinear(network.markov_w2) if is_native else network.markov_w2
        )

    @torch.no_grad()
    def fuse(self, features: Tensor) -> Tensor:
        """[..., A * D] states of the target -> [..., D] float32."""
        weight = self.network.fc.weight
        features = features.to(device=weight.device, dtype=weight.dtype)
        return self._fc(features * self.network.feature_scale).float()

    @torch.no_grad()
    def block(self, pending: int, size: int) -> Tensor:
        """[size, D] float32, what enters the layer behind the states."""
        network = self.network
        first = network.model.embed_tokens.weight[pending][None]
        return torch.cat([first, network.mask_embedding.expand(size - 1, -1)]).float()

    @torch.no_grad()
    def following(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Of tokens [n]: their rows of W1 [n, R] and the scores of what follows them [n, n_d]."""
        codes = self.network.markov_w1(tokens.to(self.network.markov_w1.weight.device))
        return codes, self._w2(codes).float().to(self.model.device)

    @torch.no_grad()
    def kept_chance(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """[n] chance that the token drafted behind `codes`, at a place with `hidden`, is kept."""
        head = self.network.confidence
        read = torch.cat([hidden.to(codes), codes], dim=-1)
        return head(read.to(head.weight.dtype)).squeeze(-1).float().sigmoid()

    def begin(self, batch_size: int, capacity: int, sampler: Sampler) -> "ParallelSession":
        return ParallelSession(self, batch_size, capacity, sampler)


def load(
    folder: str | Path | None, target: Target, *, engine: Engine | str, settings: dict[str, Any]
) -> ParallelDrafter:
    """See `StateDrafter.of_folder`."""
    return ParallelDrafter.of_folder(
        folder, target, load_network=load_parallel, engine=engine, settings=settings
    )


class ParallelSession(StateSession):
    _drafter: ParallelDrafter

    def propose(
        self,
        rows: list[int],
        committed: list[list[int]],
        lengths: LengthRound,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        self._states.take(rows, committed, features)
        for member, tokens in enumerate(committed):
            # A block of k places makes entries up to position len(tokens) + k - 2.
            lengths.cap(member, self._model.max_positions - len(tokens) + 1)
        picks = _Picks(self._drafter, committed)
        is_greedy = self._sampler.is_plain_greedy and self._vocab.is_proposable
        if is_greedy and not lengths.needs_confidence:
            return self._greedy_blocks(picks, rows, committed, lengths)

        def next_logits(members: list[int], tokens: Tensor | None) -> Tensor:
            if tokens is None:
                sizes = [lengths.limit(member) for member in members]
                picks.start(members, self._pass(members, rows, committed, sizes))
            return self._vocab.to_target(picks.next_logits(members, tokens))

        return draft_chain(
            rows,
            committed,
            lengths,
            sampler=self._sampler,
            next_logits=next_logits,
            confidences=picks.confidences,
            temperature=self._drafter.temperature,
        )

    def commit(self, rows: list[int], committed: list[list[int]]) -> None:
        """Nothing drafted is left in the cache: a block goes when it has been scored."""

    def _greedy_blocks(
        self, picks: "_Picks", rows: list[int], committed: list[list[int]], lengths: LengthRound
    ) -> Draft:
        """The same draft without leaving the draft vocabulary, where nothing is told or drawn."""
        while lengths.ask():
            lengths.tell(None)
        counts = lengths.num_drafted
        active = [member for member, count in enumerate(counts) if count]
        if not active:
            return no_draft(len(rows))
        picks.start(active, self._pass(active, rows, committed, [counts[i] for i in active]))
        drafted = torch.zeros(len(rows), max(counts), dtype=torch.int64, device=self._model.device)
        tokens = None
        for place in range(max(counts)):
            tokens = self._vocab.likeliest(picks.next_logits(active, tokens))
            drafted[active, place] = tokens
        return Draft(drafted, torch.tensor(counts))

    def _pass(
        self, members: list[int], rows: list[int], committed: list[list[int]], sizes: list[int]
    ) -> Tensor:
        """[n, K, D] what the head reads at the places of the members' blocks, padded."""
        batch = [rows[member] for member in members]
        states = [self._states.read(row) for row in batch]
        fused = self._drafter.fuse(torch.cat(states)).split([len(part) for part in states])
        entering = [
            torch.cat([part, self._drafter.block(committed[member][-1], size).to(part)])
            for part, member, size in zip(fused, members, sizes, strict=True)
        ]
        num_new = torch.tensor([len(part) for part in entering])
        padded = pad_sequence(entering, batch_first=True)
        output = self._model.forward(
            torch.zeros(padded.shape[:2], dtype=torch.int64),
            self.cache,
            num_new=num_new,
            rows=batch,
            logits=False,
            hidden_layers=(_NORMED,),
            layers=(0, 1),
            hidden_in=padded,
        )
        self.cache.truncate([len(committed[member]) - 1 for member in members], batch)
        places = torch.tensor([len(part) for part in fused])[:, None] + torch.arange(max(sizes))
        last = (num_new - 1)[:, None]
        hidden = output.hidden[_NORMED]
        index = torch.minimum(places, last).to(hidden.device)
        return hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[-1]))


class _Picks:
    """One round's tokens, place by place: a row's scores and what the token before adds to them."""

    def __init__(self, drafter: ParallelDrafter, committed: list[list[int]]) -> None:
        self._drafter = drafter
        self._pending = torch.tensor([tokens[-1] for tokens in committed])
        self._place = -1

    def start(self, members: list[int], hidden: Tensor) -> None:
        """`hidden` [n, K, D] of the blocks of these members."""
        self._rows = {member: row for row, member in enumerate(members)}
        self._hidden = hidden
        self._logits = self._drafter.model.logits_of(hidden)  # [n, K, n_d]

    def next_logits(self, members: list[int], tokens: Tensor | None) -> Tensor:
        """[n, n_d] at the next place, behind the tokens drawn at the one before."""
        self._place += 1
        before = self._pending[members] if tokens is None else tokens
        self._codes, bias = self._drafter.following(before)
        rows = [self._rows[member] for member in members]
        return self._logits[rows, self._place] + bias

    def confidences(self, members: list[int], tokens: Tensor) -> Tensor:
        """[n] for the tokens just drawn; it does not depend on which they are."""
        rows = [self._rows[member] for member in members]
        return self._drafter.kept_chance(self._hidden[rows, self._place], self._codes)
