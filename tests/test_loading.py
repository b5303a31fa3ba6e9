"""Loading: targets from folders, drafters by specification, tokenizers compared by content."""

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from specdec_runtime import engines, native
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.early_exit import EarlyExitDrafter
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.engines import make_model
from specdec_runtime.fingerprint import folder_fingerprint
from specdec_runtime.formats import DRAFT_VOCAB_NAME, DrafterManifest, TargetRecord, write_drafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.loading import drafter_kinds, load_drafter, load_target
from specdec_runtime.tokenizers import (
    check_same_tokenizer,
    real_vocab_size,
    tokenizer_hash,
    unused_token_ids,
)
from tests.conftest import tiny_llama
from tests.tiny_tokenizers import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer([" the", " cat"])
PADDING = 5
VOCAB_SIZE = len(TOKENIZER) + PADDING


def save_model(folder, seed, *, tokenizer=TOKENIZER, num_layers=2):
    module = tiny_llama(seed, num_layers=num_layers, vocab_size=VOCAB_SIZE)
    module.generation_config.eos_token_id = [2, TOKENIZER.eos_token_id]
    module.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target"), 0)


@pytest.fixture(scope="module")
def target(target_folder):
    return load_target(target_folder, engine="eager")


def test_a_target_knows_its_ends_its_padding_and_its_fingerprint(target, target_folder):
    assert target.eos_token_ids == (2, TOKENIZER.eos_token_id)
    assert target.real_vocab_size == len(TOKENIZER) == target.model.vocab_size - PADDING
    assert target.fingerprint == folder_fingerprint(target_folder)
    generation = SpeculativeDecoder(target).generate(["So the cat"], max_new_tokens=8)
    assert max(generation.token_ids[0]) < len(TOKENIZER)
    assert isinstance(generation.text(), str)


def test_the_fingerprint_changes_with_any_weight_and_not_with_the_sharding(target_folder, tmp_path):
    module = tiny_llama(0, vocab_size=VOCAB_SIZE)
    module.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert folder_fingerprint(tmp_path / "sharded") == folder_fingerprint(target_folder)
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight += 1e-3
    module.save_pretrained(tmp_path / "tuned")
    assert folder_fingerprint(tmp_path / "tuned") != folder_fingerprint(target_folder)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no weights"):
        folder_fingerprint(tmp_path / "empty")


def manifest(at_hand, **changes):
    record = TargetRecord(
        name="tiny", fingerprint=at_hand.fingerprint, real_vocab_size=at_hand.real_vocab_size
    )
    content = {"kind": "causal_lm", "target": record, "tokenizer_hash": tokenizer_hash(TOKENIZER)}
    return DrafterManifest(**{**content, **changes})


def test_a_drafter_folder_loads_with_its_vocabulary_and_its_recommended_temperature(
    target, tmp_path
):
    kept = torch.arange(0, len(TOKENIZER), 2)
    folder = write_drafter(
        tmp_path / "drafter",
        tiny_llama(0, vocab_size=VOCAB_SIZE),
        manifest(target, recommended={"draft_temperature": 0.6}),
        tokenizer=TOKENIZER,
        tensors={DRAFT_VOCAB_NAME: {"d2t": kept - torch.arange(len(kept))}},
    )
    drafter = load_drafter(folder, target, engine="eager")
    assert isinstance(drafter, CausalLMDrafter)
    assert drafter.temperature == 0.6
    assert drafter.model.vocab_size == len(kept)
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=2)
    generation = decoder.generate(["the cat"], max_new_tokens=20)
    assert generation.stats.num_accepted > 0
    # The same head with every row is the target: it loses only the tokens left out.
    drafted_odd = [
        token % 2
        for chunk in decoder.stream(["the cat"], max_new_tokens=20)
        for token in chunk.token_ids[: chunk.num_accepted]
    ]
    assert not any(drafted_odd)


def test_every_specification_gives_its_drafter(target, target_folder, tmp_path):
    assert load_drafter("none", target) is None
    assert isinstance(load_drafter("lookup", target), PromptLookupDrafter)
    assert load_drafter("lookup", target, max_ngram=5).max_ngram == 5
    assert isinstance(load_drafter("early_exit", target), EarlyExitDrafter)
    assert type(load_drafter("suffix_lookup", target)).__name__ == "SuffixLookupDrafter"
    plain = load_drafter(target_folder, target, engine="eager")  # any causal LM folder
    assert isinstance(plain, CausalLMDrafter)
    other = save_model(tmp_path, 1, tokenizer=byte_level_tokenizer([" the"], reverse=True))
    assert (
        type(load_drafter(f"cross_tokenizer:{other}", target)).__name__ == "CrossTokenizerDrafter"
    )
    composite = load_drafter(f"composite:{target_folder}", target, temperature=0.5, min_match=4)
    assert type(composite).__name__ == "CompositeDrafter"
    assert (composite.lookup.min_match, composite.model.temperature) == (4, 0.5)
    for nothing in ("composite", "composite:none"):
        with pytest.raises(ValueError, match="needs a drafter behind the lookup"):
            load_drafter(nothing, target)
    assert {"causal_lm", "prompt_lookup", "suffix_lookup", "early_exit"} <= set(drafter_kinds())


def test_a_drafter_that_does_not_fit_is_refused_before_it_is_used(target, tmp_path):
    foreign = manifest(target, target=TargetRecord(name="else", fingerprint="0" * 64))
    folder = write_drafter(tmp_path / "foreign", tiny_llama(0), foreign, tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match="trained for target 'else'"):
        load_drafter(folder, target)
    unknown = write_drafter(tmp_path / "kind", tiny_llama(0), manifest(target, kind="oracle"))
    with pytest.raises(ValueError, match="of kind 'oracle', this version knows"):
        load_drafter(unknown, target)
    swapped = save_model(tmp_path / "swapped", 1, tokenizer=swapped_tokenizer(tmp_path))
    with pytest.raises(ValueError, match="differ at id 65: the draft reads 'c', the target 'b'"):
        load_drafter(swapped, target)
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_drafter(save_model(tmp_path / "bare", 1, tokenizer=None), target)
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        load_drafter(tmp_path / "nowhere", target)
    with pytest.raises(ValueError, match="needs a model"):
        load_drafter("causal_lm", target)


def swapped_tokenizer(tmp_path):
    """The target's tokenizer with two ids exchanged: the same size, another meaning."""
    TOKENIZER.save_pretrained(tmp_path / "source")
    content = json.loads((tmp_path / "source" / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["b"], vocab["c"] = vocab["c"], vocab["b"]
    (tmp_path / "source" / "tokenizer.json").write_text(json.dumps(content))
    return AutoTokenizer.from_pretrained(tmp_path / "source")


def test_tokenizers_are_compared_by_content():
    check_same_tokenizer(TOKENIZER, byte_level_tokenizer([" the", " cat"]))
    assert tokenizer_hash(TOKENIZER) == tokenizer_hash(byte_level_tokenizer([" the", " cat"]))
    other = byte_level_tokenizer([" the", " car"])
    assert len(other) == len(TOKENIZER)
    assert tokenizer_hash(TOKENIZER) != tokenizer_hash(other)
    with pytest.raises(ValueError, match=r"differ at id \d+: the draft reads .*r.*the target .*t"):
        check_same_tokenizer(other, TOKENIZER)
    shorter = byte_level_tokenizer([" the"])
    with pytest.raises(ValueError, match="differ at id"):
        check_same_tokenizer(shorter, TOKENIZER)
    special = byte_level_tokenizer([" the", " cat"])
    special.add_special_tokens({"additional_special_tokens": ["a"]})
    with pytest.raises(ValueError, match=r"'a'.: it is a special token of the draft only"):
        check_same_tokenizer(special, TOKENIZER)


def test_a_tokenizer_that_loses_spaces_is_refused_with_the_text(target_folder, tmp_path):
    # Case C7: after an upgrade a tokenizer may read its own file differently.
    shutil.copytree(target_folder, tmp_path / "target")
    path = tmp_path / "target" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "WhitespaceSplit"},
            content["pre_tokenizer"],
        ],
    }
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="'  two spaces ahead' into 'twospacesahead'"):
        load_target(tmp_path / "target")


def test_ids_without_a_string_are_found():
    assert real_vocab_size(TOKENIZER) == len(TOKENIZER)
    assert unused_token_ids(TOKENIZER) == ()

    class Gapped:
        def get_vocab(self):
            return {"a": 0, "b": 3}

    assert unused_token_ids(Gapped()) == (1, 2)
    assert real_vocab_size(Gapped()) == 4


def test_what_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        load_target(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_target(save_model(tmp_path / "bare", 0, tokenizer=None))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no configuration .* and no weights"):
        load_target(tmp_path / "empty")
    torn = save_model(tmp_path / "torn", 0)
    weights = load_file(torn / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, torn / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 weights are missing, model.layers.1.mlp.up_proj"):
        load_target(torn)
    pickled = save_model(tmp_path / "pickled", 0)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no model can be loaded"):
        load_target(pickled)
    large = byte_level_tokenizer([f" w{n}" for n in range(30)])
    with pytest.raises(ValueError, match="the model only"):
        load_target(save_model(tmp_path / "small", 0, tokenizer=large))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float99"}, "dtype is 'float99'"),
        ({"device": "gpu0"}, "device is gpu0"),
        ({"engine": "fast"}, "engine is 'fast', expected one of auto, native, eager, compiled"),
        ({"model_arguments": {"nonsense": 1}}, "no model can be loaded .*'nonsense'"),
    ],
)
def test_bad_arguments_of_a_target_are_named(target_folder, arguments, message):
    with pytest.raises(ValueError, match=message):
        load_target(target_folder, **arguments)


def test_a_head_on_another_models_states_is_no_target(target, tmp_path):
    head = write_drafter(
        tmp_path / "head", tiny_llama(0), manifest(target, kind="eagle3"), tokenizer=TOKENIZER
    )
    with pytest.raises(ValueError, match="of kind 'eagle3', which is no model by itself"):
        load_target(head)


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ("lookup", {"ngram": 3}, "ngram is no setting of a prompt_lookup drafter.*max_ngram"),
        ("{folder}", {"tempature": 1.0}, "tempature is no setting of a causal_lm drafter"),
        ("composite:{folder}", {"ngram": 3}, "ngram is no setting of a causal_lm drafter"),
        ("early_exit", {"temperature": -1.0}, "the draft temperature is -1.0"),
        ("early_exit", {"exit_layer": "a"}, "exit_layer is 'a'"),
        ("", {}, "the drafter is ''.*early_exit"),
        (None, {}, "the drafter is None"),
    ],
)
def test_bad_settings_of_a_drafter_are_named(target, target_folder, spec, settings, message):
    named = spec.format(folder=target_folder) if spec else spec
    with pytest.raises(ValueError, match=message):
        load_drafter(named, target, **settings)


def test_the_fastest_engine_that_can_is_chosen():
    module = tiny_llama(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = make_model(module)
    assert isinstance(chosen, native.NativeModel if native.available() else HFModel)
    assert isinstance(make_model(module, engine="eager"), HFModel)
    half = tiny_llama(0).half()
    with pytest.raises(ValueError, match=r"engine=native cannot run this model.*use engine=eager"):
        make_model(half, engine="native")
    engines._warn_once.cache_clear()  # another test may have been told already
    with pytest.warns(UserWarning, match="slower on a CPU"):
        assert isinstance(make_model(half), HFModel)
