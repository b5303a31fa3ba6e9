"""An EAGLE-3 drafter that is useful before its first step: its linear part and its MLP, solved for.

The state that the layer works on is made to be what the target's head reads, up to a factor: `fc`
maps the recorded states at a position to the target's last one there, and the layer maps a state and
the next token's embedding to the state at the next position, so that a drafted state can stand in for
a recorded one. All of it follows from least squares over a few ten thousand positions:

    fc      f_p -> g with  g ~ y_p  and  g T + e A ~ y_{p+1}   (T, A: from y_p, e_{p+1} to y_{p+1})
    V       [norm(e_{p+1}); norm(g)] -> y_{p+1} - g, by attention of every entry to itself; of this
            map what the carrying heads have room for, its largest directions
    MLP     random gates on norm(r), their outputs solved for: -> y_{p+1} - r

V and the MLP are fitted on drafted states as well as recorded ones. The heads that carry V attend to
their own entry because queries and keys are the same projection of the token's embedding; the other
heads start without a say and are there for training.

The linear idea: tuned lens, Belrose et al. 2023, arXiv:2303.08112. Random gates with solved outputs:
Huang et al. 2006 (extreme learning machine). Measured on SmolLM2-135M, see docs/drafters.md.

Shapes: N positions of a text, D hidden size, F width of the recorded states, C carried dimensions.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from distill.batches import Example
from distill.recorded_states import (
    SMALLEST_SIZE,
    START_POSITIONS,
    inner_states,
    last_states,
    mean_size,
)
from distill.ridge import Ridge
from specdec_runtime.eagle3_network import Eagle3Network

_DRAFTED_STEPS = 2  # steps of drafting whose states count in the fit, the first included
# Own entry against all others: its score is about 8 times the square of this, theirs are near 0.
_FOCUS = 1.5
_PULL = 0.3  # how much `fc` is to give the target's last state rather than what predicts best
_SEED = 0  # of the random gates


class _Text(NamedTuple):
    """The answer part of one text; position p of all rows goes with p + 1 of the next."""

    features: Tensor  # [N, F] what `fc` reads at p
    embeddings: Tensor  # [N, D] normed, of the token at p + 1
    before: Tensor  # [N, D] the target's last state at p, scaled
    after: Tensor  # [N, D] the same at p + 1


def solve_start(network: Eagle3Network, examples: Sequence[Example], carrying_heads: int) -> None:
    """Fits the drafter to the target's states on the examples, in place.

    Args:
        carrying_heads: attention heads that are given the linear map; its rank is at most theirs.

    Raises:
        ValueError: if the examples hold no hidden states or features, or no position.
    """
    with torch.no_grad():
        head_dim = network.model.layer.self_attn.head_dim
        carried = min(carrying_heads * head_dim, network.config.hidden_size)
        _Start(network, examples, carried).solve()


class _Start:
    """The solution for one network, part by part; each part builds on those before it."""

    def __init__(self, network: Eagle3Network, examples: Sequence[Example], carried: int) -> None:
        self.decoder = network.model
        self.layer = network.model.layer
        self.examples = examples
        self.size: int = network.config.hidden_size
        self.carried = carried  # dimensions of the values that carry the linear map
        # Inside, states have a size of about one, on which optimizers count; the head makes up for
        # it. A power of two changes no digit of a head in 16 bits.
        self.scale = 2.0 ** round(math.log2(mean_size(examples)))
        network.lm_head.weight.mul_(self.scale)
        self.decoder.norm.weight.fill_(1.0)
        self.layer.mlp.down_proj.weight.zero_()

    def solve(self) -> None:
        self.level_features()
        self.decoder.fc.weight.copy_(self.fusion().T)
        self.focus_heads()
        for drafted in range(1, _DRAFTED_STEPS + 1):
            self.fit_values(drafted)
        self.mlp()
        self.norm()

    def texts(self) -> Iterator[_Text]:
        """The first texts that have positions to fit on."""
        taken = 0
        for example in self.examples:
            first, last = example.prompt_length - 1, len(example.token_ids) - 2
            if last <= first:
                continue
            features = inner_states(example)
            states = last_states(example).float() / self.scale  # of positions first .. last
            embedded = self.decoder.embed_tokens(example.token_ids[first + 1 : last + 1])
            yield _Text(
                self.decoder.normed_features(features[first:last]),
                self.layer.input_layernorm(embedded),
                states[:-1],
                states[1:],
            )
            taken += last - first
            if taken >= START_POSITIONS:
                return

    def steps(self, text: _Text, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(state, normed embedding, wanted state) of each step of drafting over a text."""
        state = self.decoder.fc(text.features)
        for step in range(count):
            if step:
                residual = self.layer.finish(self.attended(state, text.embeddings[step - 1 :]))
                state = self.decoder.handed_on(residual)[:-1]
            if len(state):
                yield state, text.embeddings[step:], text.after[step:]

    def attended(self, state: Tensor, embeddings: Tensor) -> Tensor:
        """The residual after attention if every carrying head sees its own entry only."""
        attention, carried = self.layer.self_attn, self.carried
        read = torch.cat([embeddings, self.layer.hidden_norm(state)], dim=1)
        values = read @ attention.v_proj.weight[:carried].T
        return state + values @ attention.o_proj.weight[:, :carried].T

    def level_features(self) -> None:
        """Where the recorded states are normed, gives every dimension of them the same size: some
        are hundreds of times larger than others."""
        if not self.decoder.fc_norm:
            return
        squares, count = torch.zeros(self.decoder.fc.in_features), 0
        for text in self.texts():
            squares += text.features.square().sum(0)
            count += len(text.features)
        sizes = (squares / max(count, 1)).sqrt().clamp_min(SMALLEST_SIZE)
        parts = sizes.chunk(len(self.decoder.fc_norm))
        for norm, part in zip(self.decoder.fc_norm, parts, strict=True):
            norm.weight.copy_(1 / part)

    def fusion(self) -> Tensor:
        """[F, D] of `fc`."""
        transition, passed = Ridge(), Ridge()
        for text in self.texts():
            transition.add(torch.cat([text.before, text.embeddings], dim=1), text.after)
        onward, token = transition.solve().split(self.size)
        for text in self.texts():
            left = text.after - text.embeddings @ token
            passed.add(text.features, torch.cat([left, text.before], dim=1))
        predicts, last = passed.solve().split(self.size, dim=1)
        # g minimises |g T - f B|^2 + pull |g - f Z|^2 for every f at once.
        normal = onward @ onward.T + _PULL * torch.eye(self.size)
        return torch.linalg.solve(normal, (predicts @ onward.T + _PULL * last).T).T

    def focus_heads(self) -> None:
        """Queries and keys of the carrying heads: one random projection of the token's embedding."""
        attention, size = self.layer.self_attn, self.size
        count = self.carried
        generator = torch.Generator().manual_seed(_SEED)
        normed = self.layer.input_layernorm(self.decoder.embed_tokens.weight[:8192])
        common = functional.normalize(normed.mean(0), dim=0)
        rows = torch.randn(count, size, generator=generator)
        rows -= (rows @ common)[:, None] * common
        rows *= _FOCUS / rows.norm(dim=1, keepdim=True)
        for part in (attention.q_proj, attention.k_proj):
            part.weight[:count, :size] = rows
            part.weight[:count, size:] = 0.0

    def fit_values(self, drafted: int) -> None:
        """What attention should add, given what it reads, over recorded states and those of
        `drafted` - 1 further steps as the layer drafts them now; its largest directions are carried.
        """
        fit = Ridge()
        for text in self.texts():
            for state, embeddings, wanted in self.steps(text, drafted):
                read = torch.cat([embeddings, self.layer.hidden_norm(state)], dim=1)
                fit.add(read, wanted - state)
        values = fit.solve()
        directions = fit.main_outputs(values, self.carried)
        attention = self.layer.self_attn
        attention.v_proj.weight[: self.carried] = (values @ directions).T
        attention.o_proj.weight.zero_()
        attention.o_proj.weight[:, : self.carried] = directions

    def mlp(self) -> None:
        """Random gates, and what comes out of them solved for."""
        generator = torch.Generator().manual_seed(_SEED + 1)
        mlp, fit = self.layer.mlp, Ridge()
        for part in (mlp.gate_proj, mlp.up_proj):
            numbers = torch.randn(part.weight.shape, generator=generator)
            part.weight.copy_(numbers * part.in_features**-0.5)
        for text in self.texts():
            for state, embeddings, wanted in self.steps(text, _DRAFTED_STEPS):
                residual = self.attended(state, embeddings)
                normed = self.layer.post_attention_layernorm(residual)
                gated = functional.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed)
                fit.add(gated, wanted - residual)
        mlp.down_proj.weight.copy_(fit.solve().T)

    def norm(self) -> None:
        """One factor for all dimensions: how large the normed state has to be."""
        norm = self.decoder.norm
        norm.weight.fill_(1.0)
        product = square = 0.0
        for text in self.texts():
            state, embeddings, wanted = next(self.steps(text, 1))
            normed = norm(self.layer.finish(self.attended(state, embeddings)))
            product += float((normed * wanted).sum())
            square += float(normed.square().sum())
        norm.weight.fill_(product / square)
