"""The C++ decoder: agrees with transformers, and with itself to the bit however it is called."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from specdec_runtime import native
from specdec_runtime.hf_model import HFModel
from specdec_runtime.int8_grid import round_matrices
from specdec_runtime.native import NativeLinear, NativeModel, build

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))

# Sizes that divide by nothing: padding of heads, hidden size, MLP and vocabulary all matters.
TINY = {
    "vocab_size": 131, "hidden_size": 42, "intermediate_size": 72, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12,
    "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**TINY),
    "llama_biases_tied": LlamaConfig(
        **TINY, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama3_rope": LlamaConfig(**TINY, rope_parameters=LLAMA3_ROPE),
    "mistral_window": MistralConfig(**TINY, sliding_window=7),
    "qwen2": Qwen2Config(**TINY),
    "qwen3_window": Qwen3Config(
        **TINY, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
}
# float32 against float32; the two differ in the order of their sums. Logits reach about 5.
TOLERANCE = 5e-5


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny models gain nothing from two threads, and other tests may use the other core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_hf(config, seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases start at 0 and norms at 1: those would hide mistakes
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make_native(name="llama", **options):
    return NativeModel.from_hf(make_hf(CONFIGS[name]), **options)


def make_int8(name):
    hf = make_hf(CONFIGS[name]).bfloat16()
    round_matrices(hf)
    return hf


def random_ids(*shape, seed=1):
    return torch.randint(
        0, TINY["vocab_size"], shape, generator=torch.Generator().manual_seed(seed)
    )


def one_by_one(model, ids):
    """[1, S] ids fed a token at a time: the reference of all bit-for-bit tests. Returns [S, V]."""
    cache = model.new_cache(1, ids.shape[1])
    return torch.cat(
        [model.forward(ids[:, i : i + 1], cache).logits[0] for i in range(ids.shape[1])]
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_hidden_states_agree_with_transformers(name):
    hf = make_hf(CONFIGS[name])
    model, ids = NativeModel.from_hf(hf), random_ids(3, 40)
    with torch.no_grad():
        expected = hf(ids, output_hidden_states=True)
    output = model.forward(ids, model.new_cache(3, 40), hidden_layers=(0, 1, 2, -1))
    torch.testing.assert_close(output.logits, expected.logits, atol=TOLERANCE, rtol=0)
    for k in (0, 1, 2, -1):
        torch.testing.assert_close(
            output.hidden[k], expected.hidden_states[k], atol=TOLERANCE, rtol=0
        )
    assert torch.equal(model.logits_of(output.hidden[-1]), output.logits)


def test_weights_that_fit_bfloat16_are_stored_so_and_change_nothing():
    hf = make_hf(CONFIGS["qwen3_window"]).to(torch.bfloat16).float()
    short, full = NativeModel.from_hf(hf), NativeModel.from_hf(hf, weight_dtype=torch.float32)
    assert (short.dtype, full.dtype) == (torch.bfloat16, torch.float32)
    assert make_native().dtype == torch.float32
    ids = random_ids(1, 20)
    assert torch.equal(one_by_one(short, ids), one_by_one(full, ids))


@pytest.mark.parametrize("name", CONFIGS)
def test_matrices_that_fit_int8_are_stored_so_and_change_no_bit(name):
    hf = make_int8(name)
    short, full = NativeModel.from_hf(hf), NativeModel.from_hf(hf, weight_dtype=torch.float32)
    assert (short.matrix_dtype, short.dtype) == (torch.int8, torch.bfloat16)
    ids = random_ids(2, 20)
    logits = [model.forward(ids, model.new_cache(2, 20)).logits for model in (short, full)]
    assert torch.equal(*logits)


def test_one_matrix_that_does_not_fit_int8_keeps_all_of_them_out():
    hf = make_int8("llama")
    with torch.no_grad():
        hf.model.layers[1].mlp.down_proj.weight[3, 5] *= 1 + 2**-7
    assert NativeModel.from_hf(hf).matrix_dtype == torch.bfloat16
    assert NativeModel.from_hf(hf.float()).matrix_dtype == torch.bfloat16


def test_a_single_matrix_gives_the_same_bits_in_int8():
    head = make_int8("llama").lm_head
    x = torch.randn(5, TINY["hidden_size"], generator=torch.Generator().manual_seed(2))
    whole = torch.stack([NativeLinear(head)(row) for row in x])
    assert torch.equal(NativeLinear(head)(x), whole)
    torch.testing.assert_close(whole, x @ head.weight.float().T, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_any_number_of_new_tokens_gives_the_same_bits(name, dtype):
    if dtype is torch.int8:
        model = NativeModel.from_hf(make_int8(name))
    else:
        model = make_native(name, weight_dtype=dtype)
    ids = random_ids(1, 52)
    expected = one_by_one(model, ids)
    for width in range(2, 17):
        cache = model.new_cache(1, 52)
        parts = [model.forward(part, cache).logits[0] for part in ids.split(width, dim=1)]
        assert torch.equal(torch.cat(parts), expected), width
    assert torch.equal(model.forward(ids, model.new_cache(1, 60)).logits[0], expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_likeliest_columns_are_those_of_the_logits_and_the_lowest_of_equal_ones(threads):
    hf, model = tied_heads()
    torch.set_num_threads(threads)
    ids, counts = random_ids(3, 9), torch.tensor([9, 1, 4])
    for num_choices, last_only in ((131, False), (131, True), (60, False), (1, True)):
        arguments = {"num_new": counts, "last_only": last_only, "likeliest_of": num_choices}
        both = model.forward(ids, model.new_cache(3, 9), **arguments)
        alone = model.forward(ids, model.new_cache(3, 9), logits=False, **arguments)
        wanted = both.logits[..., :num_choices].argmax(-1)
        assert torch.equal(both.likeliest, wanted)
        assert alone.logits is None
        assert torch.equal(alone.likeliest, wanted)
        slow = hf.forward(ids, hf.new_cache(3, 9), logits=False, **arguments)
        real = torch.arange(wanted.shape[1]) < (1 if last_only else counts[:, None])
        assert slow.logits is None
        assert torch.equal(slow.likeliest[real.expand_as(wanted)], wanted[real.expand_as(wanted)])


def tied_heads():
    """A model in both engines whose columns 0..59 come again as 60..119."""
    module = make_hf(CONFIGS["llama"])
    with torch.no_grad():
        module.lm_head.weight[60:120] = module.lm_head.weight[:60]
    return HFModel(module), NativeModel.from_hf(module)


def test_the_likeliest_of_no_columns_or_of_more_than_there_are_is_refused():
    model = make_native()
    for num_choices in (0, 132):
        with pytest.raises(ValueError, match="expected 1 to 131 columns"):
            model.forward(random_ids(1, 2), model.new_cache(1, 2), likeliest_of=num_choices)


def test_prompts_longer_than_one_segment():
    config = LlamaConfig(**{**TINY, "num_hidden_layers": 1, "max_position_embeddings": 1024})
    model, ids = NativeModel.from_hf(make_hf(config)), random_ids(2, 600)
    whole = model.forward(ids, model.new_cache(2, 600)).logits
    cache = model.new_cache(2, 600)
    parts = [model.forward(part, cache).logits for part in ids.split(171, dim=1)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_ragged_batches_refilled_rows_and_threads_give_the_same_bits(name):
    model, generator = make_native(name), torch.Generator().manual_seed(5)
    texts = [random_ids(1, 60, seed=seed) for seed in range(9)]
    expected = [one_by_one(model, text) for text in texts]
    cache, fed = model.new_cache(5, 64), {}
    waiting = list(range(9))
    while waiting or fed:
        for row in range(5):
            if row not in fed and waiting:  # a free row takes the next text
                cache.clear([row])
                fed[row] = [waiting.pop(0), 0]
        rows = [row for row in fed if torch.rand((), generator=generator) < 0.8] or list(fed)
        counts = [
            min(int(torch.randint(1, 12, (), generator=generator)), 60 - fed[row][1])
            for row in rows
        ]
        ids = torch.full((len(rows), max(counts)), -1)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            text, start = fed[row]
            ids[i, :count] = texts[text][0, start : start + count]
        torch.set_num_threads(1 + len(rows) % 2)
        output = model.forward(ids, cache, num_new=torch.tensor(counts), rows=rows, last_only=False)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            text, start = fed[row]
            assert torch.equal(output.logits[i, :count], expected[text][start : start + count])
            fed[row][1] += count
            if fed[row][1] == 60:
                del fed[row]


def test_more_threads_than_cores_give_the_same_bits():
    model, ids, counts = make_native(), random_ids(3, 6), torch.tensor([6, 3, 1])
    expected = model.greedy_chain(ids, model.new_cache(3, 16), num_new=counts, steps=5)
    last = model.forward(ids, model.new_cache(3, 16), num_new=counts, last_only=True).logits
    torch.set_num_threads(5)
    for _ in range(10):
        drafted = model.greedy_chain(ids, model.new_cache(3, 16), num_new=counts, steps=5)
        assert torch.equal(drafted, expected)
        again = model.forward(ids, model.new_cache(3, 16), num_new=counts, last_only=True).logits
        assert torch.equal(again, last)


def test_rollback_leaves_no_trace():
    model, ids, wrong = make_native(), random_ids(1, 30), random_ids(1, 40, seed=2)
    expected = one_by_one(model, ids)
    cache = model.new_cache(1, 64)
    for start in range(0, 30, 3):
        model.forward(wrong[:, : 1 + start % 7], cache)
        cache.truncate([start])
        assert torch.equal(
            model.forward(ids[:, start : start + 3], cache).logits[0], expected[start : start + 3]
        )
        cache.truncate([start + 100])
        assert cache.lengths.tolist() == [start + 3]


# A tree of draft tokens as parents; -1 is the last token of the past.
TREE = [-1, -1, 0, 0, 1, 2, 4, 4, 5, 8]


def tree_inputs(parents, past):
    """Depths and ancestor mask of a tree: positions [1, Q], visible [1, Q, Q]."""
    visible = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] |= visible[parent]
    return past + visible.sum(-1)[None] - 1, visible[None]


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen3_window"])
@pytest.mark.parametrize("past", [0, 3, 21])
def test_every_path_of_a_tree_gives_the_bits_of_its_chain(name, past):
    model, prompt, nodes = make_native(name), random_ids(1, past), random_ids(1, len(TREE), seed=4)
    cache = model.new_cache(1, 64)
    if past:
        model.forward(prompt, cache)
    positions, visible = tree_inputs(TREE, past)
    tree = model.forward(nodes, cache, positions=positions, visible=visible).logits[0]
    for leaf in range(len(TREE)):
        path = visible[0, leaf].nonzero().flatten()
        chain = one_by_one(model, torch.cat([prompt, nodes[:, path]], dim=1))
        assert torch.equal(tree[path], chain[past:]), leaf


def test_keeping_a_path_of_a_tree_equals_having_fed_it():
    model, prompt, nodes = make_native(), random_ids(2, 9), random_ids(2, len(TREE), seed=4)
    cache, expected = model.new_cache(2, 64), model.new_cache(2, 64)
    model.forward(prompt, cache)
    positions, visible = (x.expand(2, *x.shape[1:]) for x in tree_inputs(TREE, 9))
    model.forward(nodes, cache, positions=positions, visible=visible)
    path = visible[0, 9].nonzero().flatten()
    cache.keep_path(1, 9, (9 + path).tolist())
    model.forward(torch.cat([prompt, nodes[:, path]], dim=1), expected)
    assert cache.lengths.tolist() == [19, 9 + len(path)]
    for layer in range(3):
        for kept, fed in zip(
            cache.keys_values(layer, 1), expected.keys_values(layer, 1), strict=True
        ):
            assert torch.equal(kept, fed)


def test_cache_holds_the_keys_and_values_of_transformers():
    hf = make_hf(CONFIGS["llama"])
    model, ids = NativeModel.from_hf(hf), random_ids(1, 20)
    cache = model.new_cache(1, 32)
    model.forward(ids, cache)
    with torch.no_grad():
        expected = hf(ids, use_cache=True).past_key_values
    for layer in range(3):
        keys, values = cache.keys_values(layer, 0)
        torch.testing.assert_close(keys, expected.layers[layer].keys[0], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(values, expected.layers[layer].values[0], atol=TOLERANCE, rtol=0)


def test_last_only_and_no_logits():
    model, ids, counts = make_native(), random_ids(3, 7), torch.tensor([7, 2, 5])
    every = model.forward(ids, model.new_cache(3, 8), num_new=counts).logits
    last = model.forward(ids, model.new_cache(3, 8), num_new=counts, last_only=True).logits
    assert torch.equal(last[:, 0], every[torch.arange(3), counts - 1])
    output = model.forward(
        ids, model.new_cache(3, 8), num_new=counts, logits=False, hidden_layers=(-1,)
    )
    assert output.logits is None
    assert torch.equal(model.logits_of(output.hidden[-1])[0], every[0])


def test_layers_can_run_in_two_parts():
    model, ids = make_native("qwen2"), random_ids(2, 11)
    expected = model.forward(ids, model.new_cache(2, 16)).logits
    cache = model.new_cache(2, 16)
    early = model.forward(ids, cache, layers=(0, 2), hidden_layers=(2,))
    assert early.logits is None
    cache.truncate([0, 0])
    assert torch.equal(
        model.forward(ids, cache, layers=(2, 3), hidden_in=early.hidden[2]).logits, expected
    )


def test_early_head_reads_the_early_hidden_state():
    hf = make_hf(CONFIGS["llama"])
    model, ids = NativeModel.from_hf(hf), random_ids(1, 9)
    with torch.no_grad():
        hidden = hf(ids, output_hidden_states=True).hidden_states[1]
        expected = hf.lm_head(hf.model.norm(hidden))
    logits = model.forward(ids, model.new_cache(1, 16), layers=(0, 1), early_head=True).logits
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("layers", [None, (0, 2)])
def test_greedy_chain_drafts_what_single_steps_would(layers):
    model, ids, counts = make_native(), random_ids(3, 6), torch.tensor([6, 3, 1])
    cache = model.new_cache(4, 32)
    drafted = model.greedy_chain(ids, cache, num_new=counts, rows=[3, 0, 1], steps=8, layers=layers)
    assert cache.lengths.tolist() == [10, 8, 0, 13]
    for i, count in enumerate(counts):
        single, latest, expected = model.new_cache(1, 32), ids[i : i + 1, :count], []
        for _ in range(8):
            latest = (
                model.forward(latest, single, layers=layers, early_head=True)
                .logits[:, -1]
                .argmax(-1, keepdim=True)
            )
            expected.append(int(latest))
        assert drafted[i].tolist() == expected


def test_greedy_chain_tells_probabilities_and_ends_where_it_is_told():
    model, ids, counts = make_native(), random_ids(2, 6), torch.tensor([6, 3])
    whole = model.greedy_chain(ids, model.new_cache(2, 32), num_new=counts, steps=6)
    cache, told = model.new_cache(2, 32), []

    def proceed(probabilities):
        told.append(probabilities)
        return len(told) < 4

    drafted = model.greedy_chain(ids, cache, num_new=counts, steps=6, proceed=proceed)
    assert torch.equal(drafted, whole[:, :4])
    assert cache.lengths.tolist() == [6 + 3, 3 + 3]
    for i, count in enumerate(counts):
        text = torch.cat([ids[i, :count], drafted[i]])[None]
        logits = model.forward(text, model.new_cache(1, 32)).logits[0, count - 1 : -1]
        expected = logits.softmax(-1).amax(-1)
        torch.testing.assert_close(torch.tensor(told)[:, i], expected, atol=1e-5, rtol=0)


def test_an_error_in_between_ends_the_chain_and_comes_out():
    model = make_native()

    def proceed(probabilities):
        raise KeyError("a policy of the caller's own")

    with pytest.raises(KeyError, match="of the caller's own"):
        model.greedy_chain(random_ids(1, 4), model.new_cache(1, 16), steps=3, proceed=proceed)


def test_reduced_head_keeps_the_chosen_columns():
    hf, rows = make_hf(CONFIGS["llama"]), torch.tensor([5, 130, 7, 64, 9, 100, 23])
    full, reduced = NativeModel.from_hf(hf), NativeModel.from_hf(hf, head_rows=rows)
    assert reduced.vocab_size == 7
    ids = random_ids(2, 5)
    logits = reduced.forward(ids, reduced.new_cache(2, 16)).logits
    assert torch.equal(logits, full.forward(ids, full.new_cache(2, 16)).logits[..., rows])
    drafted = reduced.greedy_chain(ids, reduced.new_cache(2, 16), steps=2)
    assert torch.equal(drafted[:, 0], rows[logits[:, -1].argmax(-1)])
    assert set(drafted.flatten().tolist()) <= set(rows.tolist())


def test_ties_go_to_the_lowest_id():
    hf = make_hf(CONFIGS["llama"])
    with torch.no_grad():
        hf.lm_head.weight.copy_(hf.lm_head.weight[:1].clone())  # all logits equal
    model = NativeModel.from_hf(hf)
    assert model.greedy_chain(random_ids(1, 4), model.new_cache(1, 8), steps=2).tolist() == [[0, 0]]


BAD_CALLS = {
    "token id 131": {"token_ids": torch.tensor([[131]])},
    "room for 8": {"token_ids": torch.zeros(1, 9, dtype=torch.int64)},
    "different rows": {"token_ids": torch.zeros(2, 1, dtype=torch.int64), "rows": [0, 0]},
    "num_new": {"token_ids": torch.zeros(1, 2, dtype=torch.int64), "num_new": torch.tensor([3])},
    "position 5": {
        "token_ids": torch.zeros(1, 1, dtype=torch.int64),
        "positions": torch.tensor([[5]]),
    },
    "hidden layer 9": {"token_ids": torch.zeros(1, 1, dtype=torch.int64), "hidden_layers": (9,)},
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_a_call_that_does_not_fit_is_refused(message):
    model = make_native()
    options = {"rows": [0], **BAD_CALLS[message]}
    token_ids = options.pop("token_ids")
    with pytest.raises(ValueError, match=message):
        model.forward(token_ids, model.new_cache(2, 8), **options)


def test_unsupported_models_are_named():
    assert "gpt2" in NativeModel.supports(GPT2Config())
    dynamic = LlamaConfig(
        **TINY, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    assert "dynamic" in NativeModel.supports(dynamic)
    assert all(NativeModel.supports(config) is None for config in CONFIGS.values())


def test_build_is_keyed_by_what_it_depends_on(monkeypatch, tmp_path):
    compiler = build.find_compiler()
    key = build.build_key(compiler)
    assert key == build.build_key(compiler)
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-DOTHER"))
    assert key != build.build_key(compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "draftloop" / "native"


def test_a_failed_build_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_FLAGS", ("-no-such-flag",))
    with pytest.raises(build.BuildError, match="did not compile"):
        build.load_library.__wrapped__()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.load_library.__wrapped__()
    assert not list(tmp_path.rglob("*.so"))
