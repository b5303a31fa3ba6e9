"""The target's states along texts, for readers of a head that have no target of their own."""

from typing import Any

import torch


def states_along(target: Any, head: Any, texts: list[list[int]]) -> dict[str, torch.Tensor]:
    """The tensors "{prompt}.ids" [S] and "{prompt}.states" [S, A * D] of each text."""
    found = {}
    for number, text in enumerate(texts):
        ids = torch.tensor([text])
        cache = target.model.new_cache(1, len(text))
        hidden = target.model.forward(
            ids, cache, logits=False, hidden_layers=head.hidden_layers
        ).hidden
        states = torch.cat([hidden[layer][0] for layer in head.hidden_layers], dim=-1)
        found[f"{number}.ids"], found[f"{number}.states"] = ids[0], states.contiguous()
    return found
