"""The parallel drafter in the runtime: lossless, the same on both engines, at home in its folder."""

import pytest
import torch
from torch import Tensor

from specdec_runtime import native
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft_length import ConfidenceThreshold
from specdec_runtime.drafters.parallel import ParallelDrafter, load
from specdec_runtime.formats import DRAFT_VOCAB_NAME, DrafterManifest, TargetRecord, write_drafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.parallel_network import ParallelNetwork, load_parallel, parallel_config
from specdec_runtime.target import Target
from tests.conftest import tiny_llama

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], list(range(20, 37)), [3, 60, 3, 60, 3]]
KEPT = torch.tensor([token for token in range(64) if token % 4])
LAYERS = [1, 2, 3]
TARGET = tiny_llama(0, num_layers=4)
needs_native = pytest.mark.skipif(not native.available(), reason="no C++ compiler")
ENGINES = ["eager", pytest.param("native", marks=needs_native)]


def network(module=TARGET, draft_vocab_size: int = len(KEPT), seed: int = 0) -> ParallelNetwork:
    config = parallel_config(
        module.config,
        layer_ids=LAYERS,
        draft_vocab_size=draft_vocab_size,
        num_heads=5,
        head_dim=8,
        intermediate_size=48,
        markov_rank=8,
        block_size=3,
    )
    torch.manual_seed(seed)
    made = ParallelNetwork(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():  # norms of ones would hide a wrong norm
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    return made


def target(engine: str) -> Target:
    model = native.NativeModel.from_hf(TARGET) if engine == "native" else HFModel(TARGET)
    return Target(model=model, eos_token_ids=(2,))


@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_text_is_the_targets_and_sampled_rows_decode_as_alone(engine):
    goal = target(engine)
    drafter = ParallelDrafter(network(), draft_vocab=KEPT, engine=engine)
    plain = SpeculativeDecoder(goal).generate(PROMPTS, max_new_tokens=12).token_ids
    for count in (3, ConfidenceThreshold(0.5, 4)):
        decoder = SpeculativeDecoder(goal, drafter, num_draft_tokens=count)
        assert decoder.generate(PROMPTS, max_new_tokens=12).token_ids == plain
    arguments = {"max_new_tokens": 10, "temperature": 1.0}
    together = decoder.generate(PROMPTS, seed=3, **arguments)
    assert together.token_ids[2] == decoder.generate([PROMPTS[2]], seed=5, **arguments).token_ids[0]
    assert together.stats.num_accepted > 0


@pytest.mark.parametrize(
    ("engine", "temperature"),
    [("eager", 1.0), pytest.param("native", 0.0, marks=needs_native)],
)
def test_a_round_drafts_what_the_network_says_from_scratch(engine, temperature):
    """Caches and roll-backs against a recomputation, and every token from the distribution that is
    verified against: that behind the tokens drafted before."""
    made, seen = network(), []
    drafter = ParallelDrafter(made, draft_vocab=KEPT, engine=engine)
    real_begin = drafter.begin

    def begin(*arguments):
        session = real_begin(*arguments)
        real_propose = session.propose

        def propose(rows, committed, lengths, features=None):
            draft = real_propose(rows, committed, lengths, features)
            seen.append((list(committed[0]), draft))
            return draft

        session.propose = propose
        return session

    drafter.begin = begin
    decoder = SpeculativeDecoder(target(engine), drafter, num_draft_tokens=3)
    decoder.generate([PROMPTS[1]], max_new_tokens=12, temperature=temperature, seed=1)
    assert len(seen) > 3
    for tokens, draft in seen:
        if not (drafted := draft.token_ids[0].tolist()):
            continue  # the last round of the text
        logits = scratch_logits(made, tokens, drafted)
        if temperature == 0:
            assert drafted == [int(KEPT[int(line.argmax())]) for line in logits]
        else:
            assert torch.allclose(draft.probs[0][:, KEPT], logits.softmax(-1), atol=1e-4)


@torch.no_grad()
def scratch_logits(made: ParallelNetwork, tokens: list[int], drafted: list[int]) -> Tensor:
    """[K, n] behind `tokens`, the last of which the target has not seen, and what was drafted."""
    output = TARGET(torch.tensor([tokens[:-1]]), output_hidden_states=True)
    features = torch.cat([output.hidden_states[k] for k in LAYERS], dim=-1)
    masks = made.mask_embedding.expand(len(drafted) - 1, -1)
    block = torch.cat([made.model.embed_tokens.weight[tokens[-1:]], masks])
    entering = torch.cat([made.fuse(features)[0], block])
    hidden = made.model(inputs_embeds=entering[None]).last_hidden_state[0, -len(drafted) :]
    before = torch.tensor([tokens[-1], *drafted[:-1]])
    return made.lm_head(hidden) + made.markov_w2(made.markov_w1(before))


@needs_native
def test_a_row_has_its_bits_in_any_batch_and_block():
    drafter = ParallelDrafter(network(), draft_vocab=KEPT, engine="native")
    decoder = SpeculativeDecoder(target("native"), drafter, num_draft_tokens=3)
    together = decoder.generate(PROMPTS, max_new_tokens=12)
    for row, prompt in enumerate(PROMPTS):
        alone = decoder.generate([prompt], max_new_tokens=12)
        assert alone.row_stats[0] == together.row_stats[row]


def test_the_length_follows_the_confidence_head_and_not_the_token_drawn():
    """Confidences told are those of the head for [state; token before], whatever is drawn."""
    made, told = network(), []

    class Noting(ConfidenceThreshold):
        def begin(self, batch_size):
            session = super().begin(batch_size)
            real_end = session.end_round

            def end_round(row, confidences, num_accepted):
                told.append(list(confidences))
                real_end(row, confidences, num_accepted)

            session.end_round = end_round
            return session

    def first_round(temperature: float, seed: int) -> list[float]:
        told.clear()
        drafter = ParallelDrafter(made, draft_vocab=KEPT, engine="eager", temperature=temperature)
        decoder = SpeculativeDecoder(target("eager"), drafter, num_draft_tokens=Noting(0.0, 3))
        settings = {"temperature": 1.0, "seed": seed, "max_new_tokens": 3, "top_k": 1}
        decoder.generate([PROMPTS[1]], **settings)
        return told[0]

    rounds = [first_round(3.0, seed) for seed in range(3)]
    assert len({confidences[0] for confidences in rounds}) == 1
    goal = target("eager")
    for threshold, length in ((0.0, 4), (1.0, 1)):
        policy = ConfidenceThreshold(threshold, 4)
        drafter = ParallelDrafter(made, draft_vocab=KEPT, engine="eager")
        decoder = SpeculativeDecoder(goal, drafter, num_draft_tokens=policy)
        rounds = decoder.generate([PROMPTS[1]], max_new_tokens=7).rounds
        assert rounds[0].drafted == [length]


def test_the_folder_holds_the_serving_engines_names_and_loads_again(tmp_path):
    made = network()
    manifest = DrafterManifest(kind="parallel", target=TargetRecord(name="tiny"))
    d2t = KEPT - torch.arange(len(KEPT))
    write_drafter(tmp_path / "drafter", made, manifest, tensors={DRAFT_VOCAB_NAME: {"d2t": d2t}})
    drafter = load(tmp_path / "drafter", target("eager"), engine="eager", settings={})
    assert torch.equal(drafter.draft_vocab, KEPT)
    assert drafter.hidden_layers == tuple(LAYERS)
    read = load_parallel(tmp_path / "drafter")
    for name, tensor in made.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name
    from safetensors.torch import load_file

    names = set(load_file(tmp_path / "drafter" / "model.safetensors"))
    assert {"fc.weight", "norm.weight", "layers.0.self_attn.q_norm.weight"} < names
    assert {"markov_head.markov_w1.weight", "confidence_head.proj.bias"} < names


def test_a_folder_of_another_kind_or_size_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_parallel(tmp_path)
    TARGET.save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="expected a parallel drafter"):
        load_parallel(tmp_path / "target")
    made = network()
    made.config.markov_rank = 4
    made.save_pretrained(tmp_path / "rank")
    with pytest.raises(ValueError, match="does not fit its configuration"):
        load_parallel(tmp_path / "rank")
    network().save_pretrained(tmp_path / "whole")
    shallow = Target(model=HFModel(tiny_llama(0, num_layers=2)), eos_token_ids=(2,))
    with pytest.raises(ValueError, match="expected a drafter trained for this target"):
        load(tmp_path / "whole", shallow, engine="eager", settings={})
    with pytest.raises(ValueError, match="one row a token"):
        ParallelDrafter(network(), draft_vocab=KEPT[1:], engine="eager")
    for wrong in ([0], [4], [2, 1], []):
        with pytest.raises(ValueError, match="ascending numbers from 1 to 3"):
            parallel_config(
                TARGET.config, layer_ids=wrong, draft_vocab_size=8, num_heads=4, head_dim=8,
                intermediate_size=8, markov_rank=4, block_size=3,
            )  # fmt: skip
