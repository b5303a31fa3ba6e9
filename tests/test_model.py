"""HFModel: cached, ragged, rolled-back and partial passes equal one plain forward pass."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertGenerationConfig,
    BertGenerationDecoder,
    CohereConfig,
    CohereForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.hf_model import HFModel
from specdec_runtime.masks import attention_mask
from tests.conftest import plain_greedy, tiny_llama
from tests.table_model import ScriptedDrafter

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
# Differences of float32 sums taken in another order.
ROUNDING = 2e-4


def make(kind):
    torch.manual_seed(0)
    heads = {"head_dim": 8}
    models = {
        "llama": lambda: tiny_llama(0),
        "gemma2": lambda: Gemma2ForCausalLM(
            Gemma2Config(**SHAPE, **heads, **MIXED, attn_implementation="eager")
        ),
        "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, **heads, **MIXED)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)),
        "llama4": lambda: Llama4ForCausalLM(
            Llama4TextConfig(
                **SHAPE,
                **heads,
                intermediate_size_mlp=64,
                num_local_experts=2,
                attention_chunk_size=8,
                layer_types=["chunked_attention", "full_attention"],
            )
        ),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, **heads)),
        "cohere": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)),
        "granite": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=4.0)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128)
        ),
        "falcon": lambda: FalconForCausalLM(FalconConfig(**SHAPE, bias=True)),
    }
    return models[kind]().eval()


KINDS = ["llama", "gemma2", "gemma3", "mistral", "llama4", "qwen3", "cohere", "granite"]
KINDS += ["gpt2", "falcon"]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_ragged_cached_passes_with_roll_back_score_as_one_plain_pass(kind):
    module = make(kind)
    model = HFModel(module)
    ids = torch.randint(3, 64, (3, 30))
    expected = module(ids).logits
    cache = model.new_cache(3, 64)
    lengths = torch.tensor([5, 9, 2])
    first = model.forward(ids[:, :9], cache, num_new=lengths, last_only=True)
    assert_close(first.logits[:, 0], expected[torch.arange(3), lengths - 1])
    # Rows 0 and 2 run alone, with different numbers of new tokens.
    new = torch.stack([ids[0, 5:9], ids[2, 2:6]])
    second = model.forward(new, cache, num_new=torch.tensor([4, 3]), rows=[0, 2])
    assert_close(second.logits[0], expected[0, 5:9])
    assert_close(second.logits[1, :3], expected[2, 2:5])
    assert cache.lengths.tolist() == [9, 9, 5]
    # Every row rolls back to a length of its own, past the window of 8, and goes on.
    cache.truncate([7, 9, 3])
    for row in (1, 2, 0):
        length = int(cache.lengths[row])
        rest = model.forward(ids[row : row + 1, length:25], cache, rows=[row])
        assert_close(rest.logits[0], expected[row, length:25])
    cache.truncate([12, 12, 12])
    assert_close(model.forward(ids[:, 12:28], cache).logits, expected[:, 12:28])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_pass_split_between_two_layers_equals_the_whole(kind):
    module = make(kind)
    model = HFModel(module)
    ids = torch.randint(3, 64, (2, 20))
    cache = model.new_cache(2, 32)
    lower = model.forward(ids, cache, layers=(0, 1), hidden_layers=(1,), logits=False)
    assert lower.logits is None
    cache.truncate([0, 0])
    upper = model.forward(ids, cache, layers=(1, 2), hidden_in=lower.hidden[1])
    assert_close(upper.logits, module(ids).logits)


@torch.no_grad()
def test_hidden_layers_are_the_residuals_and_the_normed_last_one():
    module = make("llama")
    model = HFModel(module)
    ids = torch.randint(3, 64, (2, 10))
    output = model.forward(ids, model.new_cache(2, 32), hidden_layers=(0, 1, 2, -1))
    reference = module(ids, output_hidden_states=True)
    assert_close(output.hidden[0], reference.hidden_states[0])
    assert_close(output.hidden[1], reference.hidden_states[1])
    # transformers' last entry is already normed; ours keeps the residual and the normed apart.
    assert_close(output.hidden[-1], reference.hidden_states[-1])
    assert_close(module.model.norm(output.hidden[2]), output.hidden[-1])
    assert_close(model.logits_of(output.hidden[-1]), output.logits)


@torch.no_grad()
def test_a_reduced_head_computes_the_chosen_rows_only():
    module = make("llama")
    rows = torch.tensor([3, 9, 40])
    model = HFModel(module, head_rows=rows)
    ids = torch.randint(3, 64, (1, 10))
    output = model.forward(ids, model.new_cache(1, 32))
    assert model.vocab_size == 3
    assert_close(output.logits, module(ids).logits[..., rows])


@pytest.mark.parametrize("window", [None, 4])
@torch.no_grad()
def test_a_token_tree_scores_every_node_as_its_own_path_would(window):
    module = make("llama") if window is None else make("mistral")
    model = HFModel(module)
    prompt = torch.randint(3, 64, (1, 12))
    tree, parents = torch.tensor([[5, 6, 7, 8, 9]]), [-1, 0, 0, 1, 2]
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
    visible = torch.zeros(1, 5, 5, dtype=torch.bool)
    for node, path in enumerate(paths):
        visible[0, node, path] = True
        assert parents[node] in (-1, *path)
    positions = torch.tensor([[12 + len(path) - 1 for path in paths]])
    cache = model.new_cache(1, 32)
    model.forward(prompt, cache, logits=False)
    scored = model.forward(tree, cache, positions=positions, visible=visible)
    for node, path in enumerate(paths):
        whole = torch.cat([prompt, tree[:, path]], dim=1)
        assert_close(scored.logits[0, node], module(whole).logits[0, -1])
    # Keeping the path 0-2-4 leaves the cache of the plain sequence.
    cache.keep_path(0, 12, [12 + node for node in paths[4]])
    follow = model.forward(torch.tensor([[11]]), cache)
    whole = torch.cat([prompt, tree[:, paths[4]], torch.tensor([[11]])], dim=1)
    assert_close(follow.logits[0, 0], module(whole).logits[0, -1])


@torch.no_grad()
def test_a_module_in_training_is_decoded_without_dropout_and_left_in_training():
    module = make("llama")
    module.model.layers[0].self_attn.attention_dropout = 0.5
    module.model.layers[1].eval()  # a frozen part that was in eval mode stays there
    module.train()
    module.model.layers[1].eval()
    model = HFModel(module)
    ids = torch.randint(3, 64, (1, 10))
    first = model.forward(ids, model.new_cache(1, 32)).logits
    second = model.forward(ids, model.new_cache(1, 32)).logits
    assert torch.equal(first, second)
    assert module.model.layers[0].training
    assert not module.model.layers[1].training


def test_masks_follow_windows_and_chunks():
    starts = torch.tensor([0, 3])
    causal = attention_mask(starts, 2, 6)
    assert causal[0, 0].int().tolist() == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]
    assert causal[1, 0].int().tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
    windowed = attention_mask(starts, 2, 6, window=2)
    assert windowed[1, 0].int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]]
    chunked = attention_mask(starts, 2, 6, chunk=4)
    assert chunked[1, 0].int().tolist() == [[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0]]


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
            ),
            "encoder-decoder",
        ),
        (
            lambda: MambaForCausalLM(
                MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, pad_token_id=0)
            ),
            "MambaForCausalLM|Mamba2|MambaModel",
        ),
        (
            lambda: Qwen3NextForCausalLM(
                Qwen3NextConfig(
                    **SHAPE,
                    head_dim=8,
                    num_experts=4,
                    num_experts_per_tok=2,
                    moe_intermediate_size=16,
                    shared_expert_intermediate_size=16,
                    layer_types=["linear_attention", "linear_attention"],
                    linear_num_value_heads=4,
                    linear_num_key_heads=2,
                    linear_key_head_dim=8,
                    linear_value_head_dim=8,
                )
            ),
            "Qwen3NextForCausalLM has recurrent layers only",
        ),
        (
            lambda: BertGenerationDecoder(  # reads in both directions unless is_decoder is set
                BertGenerationConfig(**SHAPE)
            ),
            "BertGenerationDecoder .*looks ahead",
        ),
        (
            lambda: BartForCausalLM(  # what transformers makes of an encoder-decoder's folder
                BartConfig(vocab_size=64, d_model=16, decoder_layers=1, decoder_attention_heads=2)
            ),
            "BartDecoder.* has no list of",
        ),
        (
            lambda: OpenAIGPTLMHeadModel(
                OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=128)
            ),
            "OpenAIGPTModel takes no cache",
        ),
    ],
)
def test_what_cannot_be_rolled_back_is_refused_by_name(module, named):
    with pytest.raises(ValueError, match=named):
        HFModel(module())


class Hoarding(torch.nn.Module):
    """An attention layer's output, and a bit of what it gave at its last call."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.last = 0.0

    def forward(self, *args, **kwargs):
        output, *rest = self.attention(*args, **kwargs)
        seen, self.last = self.last, output[:, -1:].detach()
        return output + 0.1 * seen, *rest


def test_a_state_that_no_configuration_names_is_found():
    module = make("llama")
    module.model.layers[1].self_attn = Hoarding(module.model.layers[1].self_attn)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM (changes its|keeps a state)"):
        HFModel(module)


def test_texts_end_where_longrope_changes_its_frequencies():
    """transformers reads everything anew there; a draft across it, or rows on both sides, would
    mix keys of two kinds."""
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope |= {"rope_theta": 100.0, "original_max_position_embeddings": 32}
    config = Phi3Config(**SHAPE, original_max_position_embeddings=32, rope_parameters=rope)
    module = Phi3ForCausalLM(config).eval()
    module.generation_config.eos_token_id = config.eos_token_id = None
    with pytest.warns(UserWarning, match=r"Phi3ForCausalLM .*32 tokens.*\(longrope\).*not at 128"):
        model = HFModel(module)
    prompts = [[5, 6, 7, 8, 9, 10], [*range(20, 46)]]
    texts = [prompt + plain_greedy(module, [prompt], 32 - len(prompt))[0] for prompt in prompts]
    drafter = ScriptedDrafter.knowing(texts, kind="half-right", wrong=63)
    found = SpeculativeDecoder(model, drafter, num_draft_tokens=5).generate(
        prompts, max_new_tokens=40
    )
    assert [a + b for a, b in zip(prompts, found.token_ids, strict=True)] == texts
    assert found.finish_reasons == ["context", "context"]


def test_attention_without_masks_is_refused_with_the_remedy():
    module = tiny_llama(0)
    module.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation in \\('sdpa', 'eager'\\)"):
        HFModel(module)
