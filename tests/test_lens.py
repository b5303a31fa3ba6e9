"""The closed-form head: exact where a linear map exists, and folded without a trace."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

from distill.lens import fit_lens, fold_lens


def test_a_linear_map_is_found_from_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(400, 16, generator=generator)
    wanted_map = torch.randn(16, 16, generator=generator)
    pairs = [(part, part @ wanted_map) for part in states.split(150)]
    lens = fit_lens(pairs)
    # The ridge shrinks the map by its own share of the data's second moment: 0.1 %.
    assert torch.allclose(lens, wanted_map, atol=1e-2)


def test_the_fit_beats_every_nearby_matrix() -> None:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(300, 8, generator=generator)
    wanted = torch.randn(300, 8, generator=generator)
    lens = fit_lens([(states, wanted)])
    error = (states @ lens - wanted).square().sum()
    for _ in range(20):
        other = lens + 0.05 * torch.randn(8, 8, generator=generator)
        assert (states @ other - wanted).square().sum() > error


def test_folding_multiplies_the_state_in_front_of_the_head(tiny_target: PreTrainedModel) -> None:
    module = copy.deepcopy(tiny_target)
    lens = torch.randn(32, 32, generator=torch.Generator().manual_seed(2))
    ids = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        state = module.model(input_ids=ids).last_hidden_state
        expected = (state @ lens) @ module.lm_head.weight.T
        fold_lens(module, lens)
        assert torch.allclose(module(input_ids=ids).logits, expected, atol=1e-4)
    assert not module.config.tie_word_embeddings
    assert not module.lm_head.weight.requires_grad


def test_nothing_to_fit_on_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected answers with tokens"):
        fit_lens([])
