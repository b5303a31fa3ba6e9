"""Passes over hybrid decoders: no padding, and what was rolled back is read again first.

A token of padding would enter a recurrent state, so rows with different numbers of new tokens take
turns. A roll-back costs one more pass, over the tokens that were kept of the last draft; where
everything was kept there is none.

Shapes: b rows of one pass, Q new tokens, V vocabulary, D hidden size.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_runtime.model import ModelOutput
from specdec_runtime.recurrent_cache import RecurrentCache

Run = Callable[..., ModelOutput]  # one pass without padding; arguments of `CausalModel.forward`


def forward_recurrent(
    run: Run,
    token_ids: Tensor,
    cache: RecurrentCache,
    *,
    num_new: Tensor | None,
    rows: Sequence[int] | None,
    last_only: bool,
    **wanted: Any,
) -> ModelOutput:
    """`CausalModel.forward` for a model with recurrent layers.

    Args:
        wanted: `logits` and `hidden_layers`.
    """
    chosen = list(range(len(cache.tokens))) if rows is None else list(rows)
    counts = [token_ids.shape[1]] * len(chosen) if num_new is None else num_new.tolist()
    _catch_up(run, cache, chosen)
    cache.save(chosen)
    members_of = _by_value(dict(enumerate(counts)))
    outputs = {}
    for count, members in members_of.items():
        new, taking_part = token_ids[members, :count], [chosen[member] for member in members]
        outputs[count] = _feed(run, cache, taking_part, new, last_only=last_only, **wanted)
    return _merged(outputs, members_of, width=1 if last_only else token_ids.shape[1])


def _catch_up(run: Run, cache: RecurrentCache, rows: list[int]) -> None:
    """Bring the states of `rows` to the rows' lengths."""
    lengths = {row: int(cache.lengths[row]) for row in rows}
    behind = [row for row in rows if int(cache.absorbed[row]) > lengths[row]]
    for row in behind:
        cache.restore(row)
    missing = {row: lengths[row] - int(cache.absorbed[row]) for row in behind}
    for count, group in _by_value(missing).items():
        if not count:
            continue
        starts = [int(cache.absorbed[row]) for row in group]
        cache.lengths[group] = torch.tensor(starts)
        again = [
            cache.tokens[row][start : start + count]
            for row, start in zip(group, starts, strict=True)
        ]
        _feed(run, cache, group, torch.tensor(again), last_only=True, logits=False)


def _feed(
    run: Run, cache: RecurrentCache, rows: list[int], token_ids: Tensor, **wanted: Any
) -> ModelOutput:
    for row, new in zip(rows, token_ids.tolist(), strict=True):
        cache.tokens[row][int(cache.lengths[row]) :] = new
    output = run(token_ids, cache, rows=rows, **wanted)
    cache.absorbed[rows] = cache.lengths[rows]
    return output


def _by_value(values: Mapping[int, int]) -> dict[int, list[int]]:
    """{value: keys that have it}, in the order of the keys."""
    groups: dict[int, list[int]] = defaultdict(list)
    for key, value in values.items():
        groups[value].append(key)
    return groups


def _merged(
    outputs: Mapping[int, ModelOutput], members_of: Mapping[int, list[int]], *, width: int
) -> ModelOutput:
    """The outputs of several groups of rows as one, padded with zeros."""
    if len(outputs) == 1:
        return next(iter(outputs.values()))
    num_rows = sum(map(len, members_of.values()))

    def merged(parts: Mapping[int, Tensor]) -> Tensor:
        like = next(iter(parts.values()))
        whole = like.new_zeros(num_rows, width, like.shape[-1])
        for count, part in parts.items():
            whole[members_of[count], : part.shape[1]] = part
        return whole

    logits = {
        count: output.logits for count, output in outputs.items() if output.logits is not None
    }
    layers = next(iter(outputs.values())).hidden
    return ModelOutput(
        merged(logits) if logits else None,
        {
            layer: merged({count: output.hidden[layer] for count, output in outputs.items()})
            for layer in layers
        },
    )
