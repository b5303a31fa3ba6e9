"""A parallel drafter that is useful before its first step: solved for, part by part.

All of it is least squares over a few ten thousand positions. The target's last state y at place k of
a block that begins at position P, with the states g in front of P and the embeddings e, is made of

    place 0       y ~ A g_{P-1} + B g_{P-1} + (C + D) e_P + U W1[x_P]
    places k > 0  y ~ B g_{P-1} + C e_P + U W1[x_{P+k}]

g keeps what is best for that of the recorded states. Of each map the heads that carry it take the
largest directions; those heads look at what their map is for (position_heads.py):

    A    place 0 at the last state; a mask at itself        B    every place at the last state
    C    every place at the block's token                   D    place 0 at itself; a mask at itself

What a mask reads of itself is the same for all of them, and set to nothing. U W1 is the low-rank table:
U spans the largest directions of what the token before adds to the state, W2 is the head times U.

The MLP starts without a say: solved for with random gates, as that of an EAGLE-3 drafter, it gained
nothing on texts that the solution had not seen (SmolLM2-135M, 121k answer tokens).

Shapes: N blocks of a text, D hidden size, F width of the recorded states, R rank, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from distill.batches import Example
from distill.position_heads import nearest_first, separating, set_heads, set_strength
from distill.recorded_states import (
    SMALLEST_SIZE,
    START_POSITIONS,
    inner_states,
    last_states,
    mean_size,
)
from distill.ridge import Ridge
from specdec_runtime.parallel_network import ParallelNetwork

_PULL = 0.5  # how much g is to give the target's last state beside what predicts best
# One dimension of g is the same for all states and so much larger than the others: heads know a
# state by it.
_CONSTANT = 4.0
_MASK_SIZE = 0.3  # of the mask's embedding, states being about one
_DECAY = 0.8  # weight of each place in the fit relative to the one before
_MOST_PLACES = 3  # that are fitted
_REACH = 2048  # of attention that is to look at what is nearest
_SORTED = 4096  # states and tokens that are to be told apart


class _Blocks(NamedTuple):
    """The blocks of one text at one place; one row a block."""

    states: Tensor  # [N, F] in front of the block, scaled
    pending: Tensor  # [N] the block's token
    before: Tensor  # [N] the token in front of what is drafted at the place
    last: Tensor  # [N, D] the target's last state at the place, scaled


class _Heads(NamedTuple):
    """Which heads have which task."""

    a: range
    b: range
    c: range
    d: range


def solve_start(
    network: ParallelNetwork, examples: Sequence[Example], *, context_heads: int, steps: int
) -> None:
    """Fits the drafter to the target's states on the examples, in place.

    Args:
        context_heads: attention heads that get no task, the last ones.
        steps: places of a block.

    Raises:
        ValueError: if the examples hold no hidden states or features, or no position.
    """
    with torch.no_grad():
        _Start(network, examples, context_heads, steps).solve()


class _Start:
    """The solution for one network, part by part; each part builds on those before it."""

    def __init__(
        self, network: ParallelNetwork, examples: Sequence[Example], context_heads: int, steps: int
    ) -> None:
        self.network = network
        self.layer, self.attention = network.layer, network.layer.self_attn
        self.examples, self.steps = examples, steps
        # A table needs a place behind the first; far places look like those in front of them.
        self.num_places = min(max(steps, 2), _MOST_PLACES)
        self.size: int = network.config.hidden_size
        self.heads = _divided(network.config.num_attention_heads - context_heads)
        # Inside, states have a size of about one, on which optimizers count; the head makes up for
        # it. A power of two changes no digit of a head in 16 bits.
        self.scale = 2.0 ** round(math.log2(mean_size(examples)))
        network.lm_head.weight.mul_(self.scale)
        for norm in (self.layer.input_layernorm, self.layer.post_attention_layernorm):
            norm.weight.fill_(1.0)
        network.model.norm.weight.fill_(1.0)
        network.confidence.weight.zero_()
        network.confidence.bias.zero_()
        self.attention.o_proj.weight.zero_()
        self.layer.mlp.down_proj.weight.zero_()

    def solve(self) -> None:
        self.level_features()
        self.fusion()
        self.mask()
        self.focus()
        self.places_behind()
        self.first_place()
        self.norm()

    def blocks(self, place: int) -> Iterator[_Blocks]:
        """The blocks of the first texts that have positions to fit on, at one place."""
        taken = 0
        for example in self.examples:
            first, end = max(example.prompt_length - 1, 1), len(example.token_ids) - 1 - place
            if end <= first:
                continue
            ids, skipped = example.token_ids, first - (example.prompt_length - 1)
            states = last_states(example)[skipped:].float() / self.scale
            yield _Blocks(
                inner_states(example)[first - 1 : end - 1] * self.network.feature_scale,
                ids[first:end],
                ids[first + place : end + place],
                states[place:],
            )
            taken += end - first
            if taken >= START_POSITIONS:
                return

    def embedded(self, token_ids: Tensor) -> Tensor:
        """[..., D] normed embeddings."""
        return self.layer.input_layernorm(self.network.model.embed_tokens(token_ids))

    def context(self, states: Tensor) -> Tensor:
        """[N, D] normed g of scaled states."""
        return self.layer.input_layernorm(self.network.fc(states))

    def level_features(self) -> None:
        """Gives every dimension of the recorded states about the same size; by powers of two, which
        change no digit in 16 bits."""
        squares, count = torch.zeros(self.network.fc.in_features), 0
        for part in self.blocks(0):
            squares += part.states.square().sum(0)
            count += len(part.states)
        sizes = (squares / max(count, 1)).sqrt().clamp_min(SMALLEST_SIZE)
        self.network.feature_scale.copy_(2.0 ** -sizes.log2().round())

    def fusion(self) -> None:
        """`fc`: what of the recorded states counts for the state at the block's token and for the one
        in front, its directions levelled too; and one that is the same for all states."""
        fit, width = Ridge(), self.network.fc.in_features
        for part in self.blocks(0):
            read = torch.cat([part.states, self.embedded(part.pending)], dim=1)
            always = torch.full((len(read) - 1, 1), _CONSTANT * self.size**0.5)
            fit.add(read[1:], torch.cat([part.last[1:], _PULL * part.last[:-1], always], dim=1))
        solution = fit.solve()
        solution[width:] = 0.0  # what the token says is known anyway
        kept = solution[:width] @ fit.main_outputs(solution, self.size)
        squares, count = torch.zeros(self.size), 0
        for part in self.blocks(0):
            squares += (part.states @ kept).square().sum(0)
            count += len(part.states)
        sizes = (squares / count).sqrt()
        levelled = kept / sizes.clamp_min(1e-3 * sizes.max())
        levelled[:, -1] *= _CONSTANT  # the largest direction is the constant
        self.network.fc.weight.copy_(levelled.T)

    def mask(self) -> None:
        """The mask's embedding: where states and tokens have least to say and the head hardly reads,
        so that it is told from both and leaves the scores alone."""
        head, tokens = self.network.lm_head.weight, self.embedded(self.pending())
        gram = _unit(head.T @ head) + _unit(tokens.T @ tokens)
        read = torch.cat([self.context(part.states) for part in self.blocks(0)])
        gram += _unit(read.T @ read)
        mask = torch.linalg.eigh(gram).eigenvectors[:, 0] * self.size**0.5
        self.network.mask_embedding.copy_(_MASK_SIZE * mask)

    def pending(self) -> Tensor:
        return torch.cat([part.pending for part in self.blocks(0)])

    def focus(self) -> None:
        """Queries and keys of the heads with a task."""
        is_state, is_token = self.sorts()
        frequencies = self.network.model.rotary_emb.inv_freq
        reach = min(_REACH, self.network.config.max_position_embeddings)
        nearest = nearest_first(frequencies, self.steps, reach=reach)
        attention, heads = self.attention, self.heads
        set_strength(attention)
        set_heads(attention, heads.a, nearest, seeks=is_token, found=is_state)
        set_heads(attention, heads.b, nearest, seeks=-is_state, found=is_state)
        set_heads(attention, heads.c, nearest, seeks=-is_state, found=is_token)
        set_heads(attention, heads.d, nearest, seeks=-is_state, found=-is_state)

    def sorts(self) -> tuple[Tensor, Tensor]:
        """Two directions [D]: positive on states and on tokens, negative on all else of a block."""
        states = torch.cat([self.context(part.states) for part in self.blocks(0)])[:_SORTED]
        tokens = self.embedded(self.pending()[:_SORTED])
        mask = self.layer.input_layernorm(self.network.mask_embedding)
        masks = mask.expand(len(tokens) // 4 + 1, -1)
        return (
            separating(states, torch.cat([tokens, masks])),
            separating(tokens, torch.cat([states, masks])),
        )

    def places_behind(self) -> None:
        """B, C and the table, from the places behind the first."""
        fit = Ridge()
        for place in range(1, self.num_places):
            weight = _DECAY ** (place / 2)
            for part in self.blocks(place):
                read = torch.cat([self.seen(part), self.embedded(part.before)], dim=1)
                fit.add(weight * read, weight * part.last)
        solution = fit.solve()
        self.carry(self.heads.b, fit, solution, 0)
        self.carry(self.heads.c, fit, solution, 1)
        before, self.directions = self.largest(fit, solution, 2, self.network.config.markov_rank)
        codes = self.embedded(torch.arange(self.network.config.vocab_size)) @ before
        self.network.markov_w1.weight.copy_(codes)
        self.network.markov_w2.weight.copy_(self.network.lm_head.weight @ self.directions)

    def first_place(self) -> None:
        """A and D: what is missing at the first place."""
        fit = Ridge()
        for part in self.blocks(0):
            fit.add(self.seen(part), self.wanted(part) - self.residual(part))
        solution = fit.solve()
        mask = functional.normalize(self.layer.input_layernorm(self.network.mask_embedding), dim=0)
        for index in (0, 1):  # a mask that looks at itself reads nothing
            own = solution[index * self.size : (index + 1) * self.size]
            own -= torch.outer(mask, mask @ own)
        self.carry(self.heads.a, fit, solution, 0)
        self.carry(self.heads.d, fit, solution, 1)

    def norm(self) -> None:
        """One factor for all dimensions: how large the normed state has to be."""
        norm = self.network.model.norm
        product = square = 0.0
        for part in self.blocks(0):
            normed = norm(self.residual(part))
            product += float((normed * self.wanted(part)).sum())
            square += float(normed.square().sum())
        norm.weight.fill_(product / square)

    def seen(self, part: _Blocks) -> Tensor:
        """[N, 2 D] what attention reads of the states and of the block's token."""
        return torch.cat([self.context(part.states), self.embedded(part.pending)], dim=1)

    def wanted(self, part: _Blocks) -> Tensor:
        """[N, D] what the layer is to give beside the table."""
        return part.last - self.network.markov_w1(part.before) @ self.directions.T

    def residual(self, part: _Blocks) -> Tensor:
        """[N, D] after attention at the first place, every head looking at what its task says."""
        state, token = self.seen(part).split(self.size, dim=1)
        found = self.network.model.embed_tokens(part.pending)
        for heads, read in ((self.heads.a, state), (self.heads.b, state)):
            found = found + self.carried(heads, read)
        for heads, read in ((self.heads.c, token), (self.heads.d, token)):
            found = found + self.carried(heads, read)
        return found

    def carry(self, heads: range, fit: Ridge, solution: Tensor, index: int) -> None:
        """Gives some heads the largest directions of one input's map."""
        rows = self.rows(heads)
        values, directions = self.largest(fit, solution, index, rows.stop - rows.start)
        count = directions.shape[1]
        rows = slice(rows.start, rows.start + count)
        self.attention.v_proj.weight[rows] = values.T
        self.attention.o_proj.weight[:, rows] = directions

    def carried(self, heads: range, read: Tensor) -> Tensor:
        """[N, D] what some heads add where they look at `read`."""
        rows, attention = self.rows(heads), self.attention
        values = read @ attention.v_proj.weight[rows].T
        return values @ attention.o_proj.weight[:, rows].T

    def rows(self, heads: range) -> slice:
        size = self.attention.head_dim
        return slice(heads.start * size, heads.stop * size)

    def largest(
        self, fit: Ridge, solution: Tensor, index: int, count: int
    ) -> tuple[Tensor, Tensor]:
        """Of the map from input `index` to the states, as a product [D, count] times [D, count]^T."""
        rows = slice(index * self.size, (index + 1) * self.size)
        alone = torch.zeros_like(solution)
        alone[rows] = solution[rows]
        directions = fit.main_outputs(alone, min(count, self.size))
        return solution[rows] @ directions, directions


def _divided(count: int) -> _Heads:
    """At least four heads: most for the states."""
    c, d = max(1, count // 6), max(1, count // 4)
    b = (count - c - d) // 2
    a = count - b - c - d
    bounds = [0, a, a + b, a + b + c, count]
    return _Heads(*(range(*pair) for pair in pairwise(bounds)))


def _unit(gram: Tensor) -> Tensor:
    return gram / gram.trace()
