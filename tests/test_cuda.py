"""On a GPU: compiled passes as CUDA graphs, 16 bits, drafter and target on different devices.

Every test skips itself without CUDA.
"""

import pytest
import torch

from specdec_runtime.compiled import compile_obstacle
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.eagle3 import Eagle3Drafter
from specdec_runtime.drafters.early_exit import EarlyExitDrafter
from specdec_runtime.drafters.parallel import ParallelDrafter
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.engines import make_model
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target
from specdec_runtime.tree_growth import StaticTree
from tests import test_eagle3, test_parallel
from tests.conftest import tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [3, 60, 3, 60, 3]]


def on_gpu(dtype=torch.float32, *, compiled=False):
    if compiled and (reason := compile_obstacle(torch.device("cuda"))):
        pytest.skip(reason)
    return HFModel(tiny_llama(0).to("cuda", dtype), compiled=compiled)


def greedy(model, drafter=None, num_draft_tokens=3):
    decoder = SpeculativeDecoder(
        Target(model=model, eos_token_ids=(2,)), drafter, num_draft_tokens=num_draft_tokens
    )
    return decoder.generate(PROMPTS, max_new_tokens=40)


@pytest.mark.parametrize("num_draft_tokens", [3, StaticTree((2, 1))], ids=["chain", "tree"])
def test_text_is_the_targets_for_every_drafter(num_draft_tokens):
    model = on_gpu()
    expected = greedy(model).token_ids
    drafters = [
        CausalLMDrafter(on_gpu()),
        CausalLMDrafter(HFModel(tiny_llama(0))),  # on the CPU
        EarlyExitDrafter(model, exit_layer=1),
        PromptLookupDrafter(),
    ]
    for drafter in drafters:
        assert greedy(model, drafter, num_draft_tokens).token_ids == expected


def test_compiled_target_and_drafter_give_the_same_text_call_after_call():
    expected = greedy(on_gpu()).token_ids
    model, drafter = on_gpu(compiled=True), CausalLMDrafter(on_gpu(compiled=True))
    first = greedy(model, drafter)
    assert first.token_ids == expected
    assert first.stats.acceptance_rate == 1.0
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert greedy(model, drafter).token_ids == expected


@pytest.mark.parametrize("kind", ["early_exit", "eagle3", "parallel"])
def test_compiled_parts_of_a_model_give_the_same_text_call_after_call(kind):
    module = tiny_llama(0, num_layers=4).to("cuda")
    expected = greedy(HFModel(module)).token_ids
    model = make_model(module, engine="compiled")
    drafter = {
        "early_exit": lambda: EarlyExitDrafter(model, exit_layer=2),
        "eagle3": lambda: Eagle3Drafter(
            test_eagle3.network().to("cuda"), draft_vocab=test_eagle3.KEPT, engine="compiled"
        ),
        "parallel": lambda: ParallelDrafter(
            test_parallel.network().to("cuda"), draft_vocab=test_parallel.KEPT, engine="compiled"
        ),
    }[kind]()
    assert greedy(model, drafter).token_ids == expected
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert greedy(model, drafter).token_ids == expected


def test_bfloat16_compiled_follows_its_copy():
    model = on_gpu(torch.bfloat16, compiled=True)
    generation = greedy(model, CausalLMDrafter(on_gpu(torch.bfloat16, compiled=True)))
    assert generation.stats.acceptance_rate > 0.9  # passes of different widths round differently
    sampled = SpeculativeDecoder(Target(model=model), CausalLMDrafter(model)).generate(
        PROMPTS, max_new_tokens=20, temperature=1.0, seed=0
    )
    assert sampled.stats.acceptance_rate > 0.9


def test_compiled_residuals_are_those_of_eager_passes():
    eager, compiled = on_gpu(), on_gpu(compiled=True)
    ids = torch.tensor([[5, 6, 7, 8]])
    found = {}
    for name, model in (("eager", eager), ("compiled", compiled)):
        cache = model.new_cache(1, 32)
        model.forward(ids, cache, logits=False)  # allocates
        found[name] = [
            model.forward(torch.tensor([[token]]), cache, hidden_layers=(0, 1, -1)).hidden
            for token in (9, 10)
        ]
    for expected, hidden in zip(found["eager"], found["compiled"], strict=True):
        for layer, states in expected.items():
            torch.testing.assert_close(hidden[layer], states, rtol=1e-3, atol=1e-3)
