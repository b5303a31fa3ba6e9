"""Drafting chains: what the drafters share.

With a model, one token at a time (`draft_chain`), or in one call of an engine that can draft by
itself (`greedy_chain`). Or without one: `certain_chains`.

Shapes: b rows, n of them drafting at a step, F tokens fed first, K steps, D hidden size, V the
target's real vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_runtime.draft import Draft, chains, no_draft
from specdec_runtime.draft_length import LengthRound
from specdec_runtime.draft_vocabulary import DraftVocabulary
from specdec_runtime.model import Cache, CausalModel
from specdec_runtime.sampling import Sampler

# (members, tokens) -> [n, V] logits: feeds `tokens` [n] (None at the first step: whatever the
# model has not seen of those members) and scores what follows.
NextLogits = Callable[[list[int], Tensor | None], Tensor]


class ChainStart(NamedTuple):
    """What the rows that draft are fed in front of their first token."""

    token_ids: Tensor  # [n, F] int64, right-padded
    num_new: Tensor  # [n] int64
    hidden_in: Tensor | None = None  # [n, F, D] that enter the model beside them


class _Step(NamedTuple):
    """One drafted token of each of the members that drafted at this step."""

    members: list[int]
    tokens: Tensor  # [n] int64
    probs: Tensor | None  # [n, V]


def draft_chain(
    rows: list[int],
    committed: list[list[int]],
    lengths: LengthRound,
    *,
    sampler: Sampler,
    next_logits: NextLogits,
    confidences: Callable[[list[int], Tensor], Tensor] | None = None,
    temperature: float | None = None,
) -> Draft:
    """Draft for each row as many tokens as `lengths` asks for.

    Args:
        rows: batch rows; a member is an index into them.
        committed: all final tokens of each.
        confidences: (members, tokens just drawn) -> [n] what is told of them; None = the drafter's
            probabilities of them, at temperature 1.
        temperature: see `Sampler.probs`.
    """
    histories = [list(tokens) for tokens in committed] if sampler.needs_history else None
    steps: list[_Step] = []
    tokens = None
    while members := lengths.ask():
        if steps:
            places = {member: place for place, member in enumerate(steps[-1].members)}
            tokens = steps[-1].tokens[[places[member] for member in members]]
        logits = next_logits(members, tokens)
        context = None if histories is None else [histories[member] for member in members]
        step = _draw(sampler, logits, members, [rows[i] for i in members], context, temperature)
        steps.append(step)
        told = None
        if lengths.needs_confidence:
            told = (confidences or partial(_probabilities, logits))(members, step.tokens)
        lengths.tell(None if told is None else told.tolist())  # waits for the device
        if context is not None:
            for history, token in zip(context, step.tokens.tolist(), strict=True):
                history.append(token)
    return _assemble(steps, len(rows), lengths.num_drafted) if steps else no_draft(len(rows))


def greedy_chain(
    rows: list[int],
    lengths: LengthRound,
    *,
    model: CausalModel,
    cache: Cache,
    sampler: Sampler,
    vocab: DraftVocabulary,
    start: Callable[[list[int]], ChainStart],
    hands_on: int | None = None,
) -> Draft | None:
    """The same draft in one call of the model, or None where it cannot draft by itself.

    It can, if its engine does so, greedily and over ids that all have a string. With None nothing
    has been asked of `lengths`.

    Args:
        start: members that draft -> what they are fed first.
        hands_on: see `NativeModel.greedy_chain`.
    """
    chain: Callable[..., Tensor] | None = getattr(model, "greedy_chain", None)
    if chain is None or not (sampler.is_plain_greedy and vocab.is_proposable):
        return None
    active = lengths.ask()
    if not active:
        return no_draft(len(rows))
    first, places = start(active), {member: place for place, member in enumerate(active)}
    asked = active

    def proceed(confidences: list[float]) -> bool:
        nonlocal asked
        lengths.tell([confidences[places[member]] for member in asked])
        asked = lengths.ask()
        return bool(asked)

    token_ids = chain(
        first.token_ids,
        cache,
        num_new=first.num_new,
        rows=[rows[member] for member in active],
        steps=max(lengths.limit(member) for member in active),
        hidden_in=first.hidden_in,
        hands_on=hands_on,
        proceed=proceed,
    )
    if len(active) < len(rows):
        drafted = token_ids.new_zeros(len(rows), token_ids.shape[1])
        drafted[active] = token_ids
        token_ids = drafted
    return Draft(token_ids, torch.tensor(lengths.num_drafted))


def certain_chains(proposals: Sequence[Sequence[int]], lengths: LengthRound) -> Draft:
    """As much as `lengths` asks for of what was found for each row, as certain tokens."""
    for member, tokens in enumerate(proposals):
        lengths.cap(member, len(tokens))
    while lengths.ask():
        lengths.tell(None)
    counts = lengths.num_drafted
    return chains([tokens[:count] for tokens, count in zip(proposals, counts, strict=True)])


def _draw(
    sampler: Sampler,
    logits: Tensor,
    members: list[int],
    batch: list[int],
    context: list[list[int]] | None,
    temperature: float | None,
) -> _Step:
    """The next token of each member, with the very distribution it came from."""
    if sampler.all_greedy:
        return _Step(members, sampler.argmax(logits, batch, context), None)
    probs = sampler.probs(logits, batch, context, temperature=temperature)
    return _Step(members, sampler.draw(probs, batch), probs)


def _probabilities(logits: Tensor, members: list[int], tokens: Tensor) -> Tensor:
    """[n] the drafter's probability of each token drawn, at temperature 1."""
    return logits.softmax(-1).gather(1, tokens[:, None]).squeeze(1)


def _assemble(steps: list[_Step], num_rows: int, num_drafted: list[int]) -> Draft:
    """The steps side by side, as one draft of all rows."""
    token_ids = steps[0].tokens.new_zeros(num_rows, len(steps))
    for position, step in enumerate(steps):
        token_ids[step.members, position] = step.tokens
    if steps[0].probs is None:
        return Draft(token_ids, torch.tensor(num_drafted))
    probs = steps[0].probs.new_zeros(num_rows, len(steps), steps[0].probs.shape[-1])
    for position, step in enumerate(steps):
        assert step.probs is not None
        probs[step.members, position] = step.probs
    return Draft(token_ids, torch.tensor(num_drafted), probs)
