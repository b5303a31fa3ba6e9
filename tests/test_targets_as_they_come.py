"""Targets as transformers loads them: quantised, offloaded, spread; the text kept is their own.

The quantisation libraries are optional: a test skips itself where one is not installed.
"""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BitsAndBytesConfig,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
)

from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.early_exit import EarlyExitDrafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.loading import load_target
from tests.tiny_tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer([" the", " cat"])
PROMPTS = [[70, 71, 72, 73], [80, 81, 82, 83, 84, 85, 86]]
NUM_TOKENS = 20


def llama(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),  # no padding: generate would emit ids without a string
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    llama().save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


def greedy(module):
    """transformers' own text, prompt by prompt."""
    texts = [
        module.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS)
        for prompt in PROMPTS
    ]
    return [text[0, len(prompt) :].tolist() for prompt, text in zip(PROMPTS, texts, strict=True)]


def check_kept(target):
    """Plain and drafted text are the loaded model's own; the drafter is the unquantised one."""
    expected = greedy(target.model.module)
    plain = SpeculativeDecoder(target).generate(PROMPTS, max_new_tokens=NUM_TOKENS)
    assert plain.token_ids == expected
    for drafter in (
        CausalLMDrafter(HFModel(llama())),
        EarlyExitDrafter(target.model, exit_layer=1),
    ):
        decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=3)
        assert decoder.generate(PROMPTS, max_new_tokens=NUM_TOKENS).token_ids == expected
    # It is another model than the one in the folder, and that one was not kept.
    probe = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        gap = target.model.module(input_ids=probe).logits - llama()(input_ids=probe).logits
    return float(gap.abs().max())


def test_torchao(folder):
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    target = load_target(
        folder, model_arguments={"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
    )
    assert check_kept(target) > 1e-4


@pytest.mark.parametrize("bits", [8, 4])
def test_bitsandbytes(folder, bits):
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(
        load_in_8bit=bits == 8, load_in_4bit=bits == 4, bnb_4bit_compute_dtype=torch.float32
    )
    target = load_target(folder, model_arguments={"quantization_config": config})
    assert check_kept(target) > 1e-4


def test_compressed_tensors(folder, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    module = AutoModelForCausalLM.from_pretrained(folder)
    scheme = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}}
    config = QuantizationConfig(config_groups=scheme, ignore=["lm_head"])
    apply_quantization_config(module, config)
    for part in module.modules():
        if hasattr(part, "weight_scale"):
            part.weight_scale.data.fill_(float(part.weight.abs().max()) / 127)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(module)
    module.save_pretrained(tmp_path / "compressed")
    compressor.update_config(str(tmp_path / "compressed"))
    TOKENIZER.save_pretrained(tmp_path / "compressed")
    target = load_target(tmp_path / "compressed")
    assert check_kept(target) > 1e-4


def test_layers_that_wait_on_disk(folder, tmp_path):
    # What accelerate does for a model spread by device_map: forward passes wrapped layer by layer.
    places = {name: "cpu" for name in ("model.embed_tokens", "model.norm", "model.rotary_emb")}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    target = load_target(
        folder,
        model_arguments={
            "device_map": {**places, "lm_head": "cpu"},
            "offload_folder": str(tmp_path / "offloaded"),
        },
    )
    assert isinstance(target.model, HFModel)
    assert check_kept(target) < 1e-5


def test_a_target_is_spread_over_all_devices_that_there_are(folder):
    # Here that is the CPU alone; several places: the test above.
    assert check_kept(load_target(folder, device="spread", engine="eager")) < 1e-5
    with pytest.raises(ValueError, match="device is spred, expected auto, cpu"):
        load_target(folder, device="spred")


def test_a_multimodal_target_is_refused_by_name():
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    module = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=llama().config)
    )
    with pytest.raises(ValueError, match="LlavaForConditionalGeneration is multimodal"):
        HFModel(module)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config(), r"is an encoder-decoder model \(t5\)"),
        (BartConfig(), r"is an encoder-decoder model \(bart\)"),  # its half would load
        (LlavaConfig(), r"is a multimodal model \(llava\): load its text model alone"),
    ],
)
def test_folders_of_other_architectures_are_refused_by_name(config, message, tmp_path):
    config.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()  # is not opened
    with pytest.raises(ValueError, match=message):
        load_target(tmp_path)


def test_a_target_in_bfloat16_with_a_drafter_in_float32(folder):
    target = load_target(folder, dtype=torch.bfloat16, engine="eager")
    drafter = CausalLMDrafter(HFModel(llama()))
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=3)
    for temperature in (0.0, 1.0):
        generation = decoder.generate(
            PROMPTS, max_new_tokens=NUM_TOKENS, temperature=temperature, seed=0
        )
        assert generation.stats.acceptance_rate > 0.5  # the same weights, rounded
