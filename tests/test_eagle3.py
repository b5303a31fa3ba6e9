"""The EAGLE-3 drafter in the runtime: lossless, the same on both engines, at home in its folder."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdec_runtime import native
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.drafters.eagle3 import Eagle3Drafter, load
from specdec_runtime.eagle3_network import Eagle3Network, eagle3_config, load_eagle3
from specdec_runtime.formats import DRAFT_VOCAB_NAME, DrafterManifest, TargetRecord, write_drafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.loading import load_drafter
from specdec_runtime.target import Target
from tests.conftest import tiny_llama

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], list(range(20, 37)), [3, 60, 3, 60, 3]]
KEPT = torch.tensor([token for token in range(64) if token % 4])
TARGET = tiny_llama(0, num_layers=4)
needs_native = pytest.mark.skipif(not native.available(), reason="no C++ compiler")
ENGINES = ["eager", pytest.param("native", marks=needs_native)]


def network(norms: str = "eagle3", seed: int = 0, **changes: object) -> Eagle3Network:
    config = eagle3_config(
        TARGET.config,
        layer_ids=[1, 2, 3],
        draft_vocab_size=len(KEPT),
        num_heads=4,
        head_dim=8,
        intermediate_size=48,
        norms=norms,
    )
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    made = Eagle3Network(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():  # norms of ones would hide a wrong norm
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    return made


def target(engine: str) -> Target:
    model = native.NativeModel.from_hf(TARGET) if engine == "native" else HFModel(TARGET)
    return Target(model=model, eos_token_ids=(2,))


@pytest.mark.parametrize("norms", ["eagle3", "eagle3.1"])
@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_text_is_the_targets_and_sampled_rows_decode_as_alone(engine, norms):
    goal = target(engine)
    drafter = Eagle3Drafter(network(norms), draft_vocab=KEPT, engine=engine)
    plain = SpeculativeDecoder(goal).generate(PROMPTS, max_new_tokens=20).token_ids
    for count in (1, 3):
        decoder = SpeculativeDecoder(goal, drafter, num_draft_tokens=count)
        assert decoder.generate(PROMPTS, max_new_tokens=20).token_ids == plain
    arguments = {"max_new_tokens": 12, "temperature": 1.0}
    together = decoder.generate(PROMPTS, seed=3, **arguments)
    assert together.token_ids[2] == decoder.generate([PROMPTS[2]], seed=5, **arguments).token_ids[0]
    assert together.stats.num_accepted > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_drafting_stops_where_the_heads_positions_end(engine):
    # Case A5: heads of other trainers are often made for shorter texts than their targets.
    short = Eagle3Drafter(network(max_position_embeddings=24), draft_vocab=KEPT, engine=engine)
    drafter = Eagle3Drafter(network(), draft_vocab=KEPT, engine=engine)
    texts = [
        SpeculativeDecoder(target(engine), one, num_draft_tokens=3).generate(
            PROMPTS, max_new_tokens=30
        )
        for one in (None, drafter, short)
    ]
    assert texts[0].token_ids == texts[1].token_ids == texts[2].token_ids
    assert texts[2].stats.num_drafted < texts[1].stats.num_drafted
    rows = {row: len(prompt) + 1 for row, prompt in enumerate(PROMPTS)}  # tokens committed
    for entry in texts[2].rounds:
        for row, count, accepted in zip(entry.rows, entry.drafted, entry.accepted, strict=True):
            assert not count or rows[row] + count - 2 <= 24
            rows[row] += accepted + 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_drafts_what_the_network_says_step_by_step(engine):
    """The session's caches and roll-backs against a recomputation from scratch, round by round."""
    made, seen = network(), []
    drafter = Eagle3Drafter(made, draft_vocab=KEPT, engine=engine)
    real_begin = drafter.begin

    def begin(*arguments):
        session = real_begin(*arguments)
        real_propose = session.propose

        def propose(rows, committed, lengths, features=None):
            draft = real_propose(rows, committed, lengths, features)
            seen.append((list(committed[0]), draft.token_ids[0].tolist()))
            return draft

        session.propose = propose
        return session

    drafter.begin = begin
    decoder = SpeculativeDecoder(target(engine), drafter, num_draft_tokens=3)
    decoder.generate([PROMPTS[1]], max_new_tokens=16)
    assert len(seen) > 4
    for tokens, drafted in seen:
        assert drafted == scratch_draft(made, tokens, len(drafted))


@torch.no_grad()
def scratch_draft(made: Eagle3Network, tokens: list[int], count: int) -> list[int]:
    """A greedy draft after `tokens`, the last of which the target has not seen."""
    output = TARGET(torch.tensor([tokens[:-1]]), output_hidden_states=True)
    features = torch.cat([output.hidden_states[k] for k in (1, 2, 3)], dim=-1)
    states, ids, drafted = made.model.fuse(features), torch.tensor([tokens[1:]]), []
    for _ in range(count):
        logits, residuals = run_layer(made, ids, states)
        drafted.append(int(KEPT[int(logits[0, -1].argmax())]))
        ids = torch.cat([ids, torch.tensor([drafted[-1:]])], dim=1)
        states = torch.cat([states, residuals[:, -1:]], dim=1)
    return drafted


def run_layer(made: Eagle3Network, ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    model = HFModel(made)
    cache = model.new_cache(len(ids), ids.shape[1])
    output = model.forward(ids, cache, hidden_in=states, layers=(0, 1), hidden_layers=(1,))
    return output.logits, output.hidden[1]


@needs_native
def test_the_engines_agree_and_a_row_has_its_bits_in_any_batch():
    made = network()
    model = native.NativeModel.from_hf(made, head_token_ids=KEPT)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (3, 40), generator=generator)
    states = torch.randn(3, 40, 32, generator=generator)

    def run(part: slice, columns: slice, cache, rows):
        return model.forward(
            ids[part, columns], cache, rows=rows, hidden_in=states[part, columns], layers=(0, 1)
        ).logits

    together = run(slice(0, 3), slice(0, 40), model.new_cache(3, 40), None)
    assert torch.allclose(together, run_layer(made, ids, states)[0], atol=1e-3)
    cache = model.new_cache(1, 40)
    alone = [run(slice(1, 2), slice(i, i + 8), cache, [0]) for i in range(0, 40, 8)]
    assert torch.equal(torch.cat(alone, dim=1)[0], together[1])
    linear = native.NativeLinear(made.model.fc)
    features = torch.randn(5, 96, generator=generator)
    assert torch.equal(linear(features)[2], linear(features[2]))
    assert torch.allclose(linear(features), made.model.fc(features), atol=1e-4)


@needs_native
@pytest.mark.parametrize("size", [32, 40])  # of each state: whole panels of 16, and not
def test_states_are_normed_and_fused_in_one_call(size):
    norms = [LlamaRMSNorm(size, eps=1e-5) for _ in range(3)]
    for factor, norm in enumerate(norms, start=1):
        nn.init.normal_(norm.weight, std=factor)
    fc = nn.Linear(3 * size, 24, bias=False)
    states = torch.randn(4, 5, 3 * size) * 100
    fused = native.NativeLinear(fc, norms)
    normed = [norm(part) for norm, part in zip(norms, states.chunk(3, dim=-1), strict=True)]
    assert torch.allclose(fused(states), fc(torch.cat(normed, dim=-1)), atol=1e-4)
    assert torch.equal(fused(states)[2, 3], fused(states[2, 3]))
    assert not torch.allclose(fused(states), native.NativeLinear(fc)(states), atol=1)


@needs_native
def test_states_of_an_odd_size_are_padded_in_both_halves():
    odd = tiny_llama(3, num_layers=4)
    odd.config.hidden_size = 40
    config = eagle3_config(
        odd.config, layer_ids=[1], draft_vocab_size=64, num_heads=4, head_dim=10, intermediate_size=24,
        norms="eagle3",
    )  # fmt: skip
    made = Eagle3Network(config).eval()
    model = native.NativeModel.from_hf(made)
    ids, states = torch.arange(7)[None], torch.randn(1, 7, 40)
    found = model.forward(ids, model.new_cache(1, 7), hidden_in=states, layers=(0, 1)).logits
    assert torch.allclose(found, run_layer(made, ids, states)[0], atol=1e-4)


def test_the_folder_holds_the_serving_engines_names_and_loads_again(tmp_path):
    made = network("eagle3.1")
    manifest = DrafterManifest(kind="eagle3", target=TargetRecord(name="tiny"))
    d2t = KEPT - torch.arange(len(KEPT))
    write_drafter(tmp_path / "drafter", made, manifest, tensors={DRAFT_VOCAB_NAME: {"d2t": d2t}})
    goal = target("eager")
    drafter = load(tmp_path / "drafter", goal, engine="eager", settings={})
    assert torch.equal(drafter.draft_vocab, KEPT)
    behind_lookup = load_drafter(f"composite:eagle3:{tmp_path / 'drafter'}", goal, min_match=2)
    assert isinstance(behind_lookup.model, Eagle3Drafter)
    assert (behind_lookup.lookup.min_match, behind_lookup.lookup.min_survival) == (2, 0.5)
    for drafts in (drafter, behind_lookup):
        decoder = SpeculativeDecoder(goal, drafts, num_draft_tokens=3)
        texts = decoder.generate(PROMPTS, max_new_tokens=20).token_ids
        assert texts == SpeculativeDecoder(goal).generate(PROMPTS, max_new_tokens=20).token_ids
    assert drafter.hidden_layers == (1, 2, 3)
    read = load_eagle3(tmp_path / "drafter")
    for name, tensor in made.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name
    from safetensors.torch import load_file

    names = set(load_file(tmp_path / "drafter" / "model.safetensors"))
    assert {"fc.weight", "fc_norm.0.weight", "norm.weight", "lm_head.weight"} < names
    assert {name for name in names if name.startswith("midlayer.")} == {
        f"midlayer.{name}.weight"
        for name in (
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
            "hidden_norm", "input_layernorm", "post_attention_layernorm",
        )
    }  # fmt: skip


@pytest.mark.parametrize(
    ("layer_ids", "message"),
    [([4], "from 0 to 3"), ([2, 1], "ascending"), ([], "ascending"), ([-1], "from 0 to 3")],
)
def test_layers_that_the_target_lacks_are_refused(layer_ids, message):
    with pytest.raises(ValueError, match=message):
        eagle3_config(
            TARGET.config, layer_ids=layer_ids, draft_vocab_size=8, num_heads=4,
            head_dim=8, intermediate_size=8, norms="eagle3",
        )  # fmt: skip


def test_a_folder_of_another_kind_or_size_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no EAGLE-3 drafter"):
        load_eagle3(tmp_path)
    network(target_hidden_size=16, num_aux_hidden_states=3)
    made = network()
    made.config.target_hidden_size = 16
    made.save_pretrained(tmp_path / "other")
    with pytest.raises(RuntimeError):
        load_eagle3(tmp_path / "other")
    network().save_pretrained(tmp_path / "whole")
    shallow = Target(model=HFModel(tiny_llama(0, num_layers=2)), eos_token_ids=(2,))
    with pytest.raises(ValueError, match="expected a drafter trained for this target"):
        load(tmp_path / "whole", shallow, engine="eager", settings={})
    with pytest.raises(ValueError, match="one row a token"):
        Eagle3Drafter(network(), draft_vocab=KEPT[1:], engine="eager")
