"""Hybrid decoders: states that cannot be cut back are restored and read on; the text is the same."""

import pytest
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.early_exit import EarlyExitDrafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.tree_growth import StaticTree
from tests.conftest import plain_greedy
from tests.table_model import ScriptedDrafter

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [3, 60, 3, 60, 3]]
NUM_TOKENS = 10  # four rounds or more, with something refused in them
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LINEAR = ["linear_attention", "full_attention"]
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}


def make(kind):
    torch.manual_seed(3)
    if kind == "qwen3_next":
        return Qwen3NextForCausalLM(
            Qwen3NextConfig(
                **SHAPE,
                head_dim=8,
                num_experts=2,
                num_experts_per_tok=1,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
                layer_types=LINEAR,
                linear_num_value_heads=4,
                linear_num_key_heads=2,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
            )
        ).eval()
    if kind == "lfm2":
        return Lfm2ForCausalLM(Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])).eval()
    if kind == "bamba":
        return BambaForCausalLM(
            BambaConfig(**SHAPE, **MAMBA, mamba_expand=2, attn_layer_indices=[1])
        ).eval()
    if kind == "falcon_h1":
        return FalconH1ForCausalLM(FalconH1Config(**SHAPE, **MAMBA, mamba_d_ssm=64)).eval()
    return Gemma3nForCausalLM(
        Gemma3nTextConfig(
            **{**SHAPE, "num_hidden_layers": 4},
            head_dim=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=8,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=64,
            hidden_size_per_layer_input=8,
            laurel_rank=4,
            activation_sparsity_pattern=[0.0] * 4,
        )
    ).eval()


def noisy_copy(module, scale=0.02):
    copy = type(module)(module.config).eval()
    copy.load_state_dict(module.state_dict())
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return copy


@pytest.fixture(scope="module", params=["qwen3_next", "lfm2", "bamba", "falcon_h1", "gemma3n"])
def case(request):
    """(kind, module, what transformers' generate says, prompt by prompt)."""
    module = make(request.param)
    return request.param, module, [plain_greedy(module, [p], NUM_TOKENS)[0] for p in PROMPTS]


def test_greedy_text_is_the_targets_own_whatever_is_refused(case):
    _, module, answers = case
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    assert (
        SpeculativeDecoder(module).generate(PROMPTS, max_new_tokens=NUM_TOKENS).token_ids == answers
    )
    for quality in ("perfect", "half-right"):
        drafter = ScriptedDrafter.knowing(texts, kind=quality, wrong=63)
        decoder = SpeculativeDecoder(module, drafter, num_draft_tokens=3)
        generation = decoder.generate(PROMPTS, max_new_tokens=NUM_TOKENS)
        assert generation.token_ids == answers
        assert generation.stats.num_accepted > 0


def test_a_drafter_with_states_of_its_own_follows_what_was_kept(case):
    _, module, answers = case
    copy = SpeculativeDecoder(module, CausalLMDrafter(HFModel(module)), num_draft_tokens=3)
    generation = copy.generate(PROMPTS, max_new_tokens=NUM_TOKENS)
    assert generation.token_ids == answers
    assert generation.stats.acceptance_rate == 1.0
    other = SpeculativeDecoder(
        module, CausalLMDrafter(HFModel(noisy_copy(module))), num_draft_tokens=3
    )
    assert other.generate(PROMPTS, max_new_tokens=NUM_TOKENS).token_ids == answers
    together = other.generate(PROMPTS, max_new_tokens=8, temperature=1.0, seed=5)
    alone = other.generate([PROMPTS[2]], max_new_tokens=8, temperature=1.0, seed=7)
    assert together.token_ids[2] == alone.token_ids[0]


@torch.inference_mode()
def test_states_after_every_round_equal_a_fresh_prefill(case):
    _, module, answers = case
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    drafter = ScriptedDrafter.knowing(texts, kind="half-right", wrong=63)
    decoding = SpeculativeDecoder(module, drafter, num_draft_tokens=3)._begin(
        PROMPTS, max_new_tokens=NUM_TOKENS - 2
    )
    model = decoding.target.model
    decoding.prefill()
    while decoding.active:
        decoding.round()
        for row in decoding.active:
            probe = torch.tensor([[9]])
            found = model.forward(probe, decoding.cache, rows=[row.index]).logits
            decoding.cache.truncate([len(row.tokens) - 1], [row.index])
            fresh = model.new_cache(1, 64)
            model.forward(torch.tensor([row.tokens[:-1]]), fresh, logits=False)
            expected = model.forward(probe, fresh).logits
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_trees_and_early_exit_are_refused_before_any_pass(case):
    kind, module, _ = case
    model = HFModel(module)
    with pytest.raises(ValueError, match="recurrent layers or layers that share keys"):
        EarlyExitDrafter(model, exit_layer=1)
    if kind != "gemma3n":
        with pytest.raises(ValueError, match="draft chains"):
            SpeculativeDecoder(model, CausalLMDrafter(model), num_draft_tokens=StaticTree((2,)))


def test_hybrids_are_not_compiled():
    with pytest.raises(ValueError, match="not compiled: use engine=eager"):
        HFModel(make("lfm2"), compiled=True)
