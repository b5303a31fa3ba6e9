"""What would help: predictions that follow from the measured costs, and promise no more."""

from dataclasses import replace

import pytest
import torch

from eval.cost_model import RoundCosts, constant_acceptance_length
from eval.results import CostResult, PassWeights
from eval.what_if import (
    AS_MEASURED,
    draft_weights,
    fewer_rejections,
    memory_bandwidth,
    pass_weights,
    what_if,
)
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.composite import CompositeDrafter
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.hf_model import HFModel
from tests.conftest import tiny_llama
from tests.test_cost_model import lengths_of

TARGET = PassWeights(
    num_layers=30, layer_weights=9000, head_rows=50_000, head_weights=1000, read_s=0.01
)
DRAFT = PassWeights(
    num_layers=4, layer_weights=1200, head_rows=50_000, head_weights=800, read_s=0.001
)


def measured_costs(draft_s: float = 0.004, **weights: PassWeights | None) -> CostResult:
    """A target pass of 20 ms; verification grows by 5 % a token."""
    target_s = 0.02
    verify = tuple(1.0 + 0.05 * k for k in range(7))
    return CostResult(
        drafter="d",
        context_tokens=10,
        verify_s=[target_s * v for v in verify],
        draft_token_s=draft_s,
        draft_start_s=0.0,
        outside_s=0.0,
        costs=RoundCosts(
            target_s=target_s,
            verify=verify,
            draft_cost=draft_s / target_s,
            overhead=0.1,
            plain_overhead=0.02,
        ),
        **({"target_weights": TARGET, "draft_weights": DRAFT} | weights),
    )


def answers(measured: CostResult) -> dict[str, float]:
    found = what_if(lengths_of(0.6), measured)
    assert all(one.assumes for one in found)
    return {one.name: one.speedup for one in found}


def test_a_fifth_fewer_rejections_raises_a_constant_rate_by_a_fifth_of_its_gap():
    lengths = lengths_of(0.5)
    improved = fewer_rejections(lengths)
    for k, length in lengths.items():
        assert improved(length) == pytest.approx(constant_acceptance_length(0.6, k))


def test_answers_never_fall_below_things_as_they_are():
    found = answers(measured_costs())
    assert min(found.values()) == found[AS_MEASURED]
    assert found["a perfect drafter at this cost"] == max(found.values())


@pytest.mark.parametrize(
    ("name", "share"),
    [("half the drafter's layers (2)", 0.7), ("a draft vocabulary of 8,192 tokens", None)],
)
def test_a_smaller_drafter_is_what_one_of_its_weights_would_cost(name, share):
    weights = 2000 * share if share else 1200 + 800 * 8192 / 50_000
    measured = measured_costs()
    smaller = measured_costs(draft_s=0.004 * weights / 2000)
    assert answers(measured)[name] == pytest.approx(answers(smaller)[AS_MEASURED])


def test_compiled_passes_are_held_against_compiled_plain_decoding():
    # The target reads its weights in half its pass, the drafter in a quarter: by hand,
    by_hand = RoundCosts(
        target_s=0.01,
        verify=tuple(1.0 + 0.1 * k for k in range(7)),  # more tokens cost the same seconds
        draft_cost=0.1,
        overhead=0.2,
        plain_overhead=0.04,
    )
    measured = measured_costs()
    expected = answers(replace(measured, costs=by_hand))[AS_MEASURED]
    assert answers(measured)["both models compiled"] == pytest.approx(expected)
    # Where compiling helps plain decoding alone, less is left to gain.
    slow = answers(measured_costs(draft_weights=replace(DRAFT, read_s=1.0)))
    assert slow["both models compiled"] < slow[AS_MEASURED]
    compiled = replace(DRAFT, read_s=None)
    assert "both models compiled" not in answers(measured_costs(draft_weights=compiled))


def test_bandwidth_is_positive_and_finite():
    assert 0 < memory_bandwidth(torch.device("cpu")) < 1e13


def test_shapes_are_not_guessed_where_weights_are_unknown():
    names = answers(measured_costs(draft_weights=None))
    assert not any("layer" in name or "vocabulary" in name for name in names)


def test_weights_are_those_of_the_model():
    module = tiny_llama(0)
    model = HFModel(module)
    found = pass_weights(model, 1e9)
    matrices = [p for n, p in module.named_parameters() if "layers" in n and p.dim() == 2]
    assert found.layer_weights == sum(p.numel() for p in matrices)
    assert found.head_weights == module.lm_head.weight.numel()
    assert found.read_s == pytest.approx(4 * found.weights / 1e9)
    composite = CompositeDrafter(PromptLookupDrafter(), CausalLMDrafter(model))
    assert draft_weights(composite, 1e9) == found
    assert draft_weights(PromptLookupDrafter(), 1e9) is None
