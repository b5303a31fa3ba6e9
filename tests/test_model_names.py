"""GGUF files become plain folders with the tokenizer that the model was trained with."""

import json

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specdec_runtime.assets import cache_folder
from specdec_runtime.formats import (
    DrafterManifest,
    TargetRecord,
    check_target,
    read_manifest,
    write_drafter,
)
from specdec_runtime.gguf_folder import convert_gguf
from specdec_runtime.loading import load_target
from specdec_runtime.model_names import DEFAULT_TARGET, portable_name, resolve_model
from specdec_runtime.tokenizers import tokenizer_hash

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Merges in the order they were learned; "G" stands for the byte-level space.
MERGES = ["\u010a \u010a", "l l", "h e", "he ll", "hell o", "\u0120 \u0120", "1 2"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def byte_alphabet():
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def vocabulary():
    return CONTROL + byte_alphabet() + [merge.replace(" ", "") for merge in MERGES]


def tiny_model(vocab_size):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # weights that bfloat16 holds exactly
        parameter.data = parameter.data.bfloat16().float()
    return model


def pairs_from_halves(weight, heads):
    shape = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, *, pre="smollm", extra_tensor=None, tokenizer=True):
    config = model.config
    writer = GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    if tokenizer:
        tokens = vocabulary()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in CONTROL else 1 for token in tokens])
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(False)
        writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        array = tensor
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = pairs_from_halves(tensor, heads)
        parts = name.removesuffix(".weight").split(".", 3)
        if name == "lm_head.weight":
            continue
        gguf_name = {
            "model.embed_tokens": "token_embd",
            "model.norm": "output_norm",
        }.get(".".join(parts[:2])) or f"blk.{parts[2]}.{GGUF_NAMES[parts[3]]}"
        writer.add_tensor(f"{gguf_name}.weight", array.numpy())
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(path, tiny_model(len(vocabulary())))


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory):
    target = tmp_path_factory.mktemp("converted") / "tiny"
    convert_gguf(source, target)
    return target


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def pieces(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    return tokenizer.convert_ids_to_tokens(ids)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n\n1.", ["\u010a\u010a", "1", "."]),
        ("12", ["1", "2"]),  # a learned merge that the split into digits forbids
        ("hello\n", ["hello", "\u010a"]),
        ("a  b", ["a", "\u0120", "\u0120", "b"]),
        ("x\u00e9", ["x", "\u00c3", "\u00a9"]),
        ("<|im_end|>\n", ["<|im_end|>", "\u010a"]),
    ],
)
def test_text_is_split_as_the_pre_tokenizer_of_the_file_says(tokenizer, text, expected):
    assert pieces(tokenizer, text) == expected


def test_every_control_token_is_one_special_id(tokenizer):
    for index, token in enumerate(CONTROL):
        assert tokenizer(token, add_special_tokens=False).input_ids == [index]
    assert tokenizer.decode(tokenizer("<|im_start|>he").input_ids, skip_special_tokens=True) == "he"


def test_text_without_repairs_would_get_other_ids(source, tokenizer):
    """The control: transformers' own reading of the same file is what is being repaired."""
    plain = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    assert plain("12").input_ids != tokenizer("12").input_ids


def test_weights_give_the_logits_of_the_model_that_was_written(folder):
    expected = tiny_model(len(vocabulary()))
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, expected(ids).logits, rtol=0, atol=1e-4)
    assert found.get_input_embeddings().weight is found.get_output_embeddings().weight


def test_the_folder_knows_nothing_of_where_it_came_from(folder):
    config = json.loads((folder / "config.json").read_text())
    assert not {"quantization_config", "_name_or_path", "_model_name_or_path"} & set(config)
    assert config["dtype"] == "bfloat16"
    assert config["rms_norm_eps"] == 1e-05
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer_config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer_config["model_max_length"] == 128
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)


def test_an_unknown_pre_tokenizer_is_warned_about_by_name(tmp_path):
    path = write_gguf(tmp_path / "odd.gguf", tiny_model(len(vocabulary())), pre="odd-bpe")
    with pytest.warns(UserWarning, match="'odd-bpe' splits text is not known"):
        convert_gguf(path, tmp_path / "odd")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": False}, "holds no tokenizer"),
        ({"extra_tensor": "blk.0.ffn_gate_exps.weight"}, "ffn_gate_exps.weight has no place"),
        ({"extra_tensor": "rope_freqs.weight"}, "rotary positions are scaled"),
    ],
)
def test_what_can_not_be_converted_is_refused_and_leaves_nothing(tmp_path, options, message):
    path = write_gguf(tmp_path / "bad.gguf", tiny_model(len(vocabulary())), **options)
    with pytest.raises(ValueError, match=message):
        convert_gguf(path, tmp_path / "out" / "bad")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_that_is_not_gguf_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTLOOP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"not a model at all, only text that is long enough")
    with pytest.raises(ValueError, match="not a readable GGUF file"):
        resolve_model(str(tmp_path / "bad.gguf"))


def test_a_gguf_file_is_converted_once_into_the_cache(source, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTLOOP_CACHE", str(tmp_path))
    first = resolve_model(str(source))
    written = (tmp_path / "targets").stat().st_mtime_ns
    assert resolve_model(str(source)) == first
    assert (tmp_path / "targets").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("model.safetensors", r"has no weights"),
        ("tokenizer.json", r"has no tokenizer"),
        ("config.json", r"has no configuration"),
    ],
)
def test_an_incomplete_folder_is_refused_by_what_it_lacks(folder, tmp_path, missing, message):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        if path.name != missing:
            (copy / path.name).symlink_to(path)
    with pytest.raises(ValueError, match=message):
        resolve_model(str(copy))


def test_names_resolve_to_folders_or_stay_hub_ids(folder):
    assert resolve_model(str(folder)) == str(folder)
    assert resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct") == (
        "HuggingFaceTB/SmolLM2-135M-Instruct"
    )
    with pytest.raises(ValueError, match=r"./nowhere: no such folder"):
        resolve_model("./nowhere")
    with pytest.raises(ValueError, match=r"no such file"):
        resolve_model("nowhere.gguf")


@pytest.mark.skipif(
    not (cache_folder() / "targets").is_dir()
    or not list((cache_folder() / "targets").glob(f"{DEFAULT_TARGET}-v*")),
    reason="the default target was not converted on this machine yet",
)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n\n1.", ["\u010a\u010a", "1", "."]),
        ("2024", ["2", "0", "2", "4"]),
        ("    return x", ["\u0120\u0120\u0120", "\u0120return", "\u0120x"]),
        ("na\u00efve", ["na", "\u00c3\u00afve"]),
    ],
)
def test_the_default_target_has_its_own_ids(text, expected):
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(DEFAULT_TARGET))
    assert pieces(tokenizer, text) == expected


def test_a_drafter_folder_finds_its_target_on_another_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTLOOP_CACHE", str(tmp_path / "here"))
    trained_for = load_target("tiny-random", engine="eager")
    record = TargetRecord(name=trained_for.name, fingerprint=trained_for.fingerprint)
    hashed = tokenizer_hash(trained_for.tokenizer)
    manifest = DrafterManifest(kind="causal_lm", target=record, tokenizer_hash=hashed)
    write_drafter(tmp_path / "drafter", tiny_model(8), manifest)
    monkeypatch.setenv("DRAFTLOOP_CACHE", str(tmp_path / "elsewhere"))
    (tmp_path / "here").rename(tmp_path / "gone")
    name = read_manifest(tmp_path / "drafter").target.name
    assert str(tmp_path) not in name
    found = load_target(name, engine="eager")
    check_target(manifest, found, tokenizer_hash(found.tokenizer))
    assert found.source.startswith(str(tmp_path / "elsewhere"))


def test_a_path_is_recorded_whole(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert portable_name(folder.name) == str(folder.resolve())
    assert portable_name("owner/name") == "owner/name"
    assert portable_name("tiny-random") == "tiny-random"
