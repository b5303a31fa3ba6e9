"""Every drafter kind: lossless in the loop, and good at what it is for."""

import pytest
import torch
from transformers import LogitsProcessor

from specdec_runtime import native
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft_length import ConfidenceThreshold, FixedLength, LengthRound
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.composite import CompositeDrafter
from specdec_runtime.drafters.early_exit import EarlyExitDrafter
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.drafters.suffix_lookup import SuffixLookupDrafter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.occurrences import Occurrences
from specdec_runtime.target import Target
from specdec_runtime.tree_growth import BestFirstTree, StaticTree
from tests.conftest import tiny_llama
from tests.table_model import ScriptedDrafter, TableModel
from tests.test_sampling import make_sampler

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], list(range(20, 37)), [3, 60, 3, 60, 3]]
NUM_TOKENS = 20


def noisy_copy(module, scale):
    """A draft that agrees with the target often, not always."""
    torch.manual_seed(0)
    copy = tiny_llama(0)
    copy.load_state_dict(module.state_dict())
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return copy


MODULE = tiny_llama(0)
DRAFT_MODULE = noisy_copy(MODULE, 0.03)
KEPT = torch.tensor([token for token in range(64) if token % 4])  # a reduced output vocabulary


def engines():
    return ["eager", "native"] if native.available() else ["eager"]


def make_model(module, engine, **settings):
    if engine == "native":
        return native.NativeModel.from_hf(module, **settings)
    return HFModel(module, **settings)


def make_drafter(kind, model, engine):
    draft = make_model(DRAFT_MODULE, engine)
    return {
        "causal_lm": lambda: CausalLMDrafter(draft),
        "causal_lm cool": lambda: CausalLMDrafter(draft, temperature=0.3),
        "causal_lm greedy": lambda: CausalLMDrafter(draft, temperature=0.0),
        "reduced vocabulary": lambda: CausalLMDrafter(
            make_model(DRAFT_MODULE, engine, head_rows=KEPT), draft_vocab=KEPT
        ),
        "prompt_lookup": PromptLookupDrafter,
        "suffix_lookup": SuffixLookupDrafter,
        "early_exit": lambda: EarlyExitDrafter(model, exit_layer=1),
        "composite": lambda: CompositeDrafter(
            SuffixLookupDrafter(min_match=2), CausalLMDrafter(draft)
        ),
    }[kind]()


KINDS = [
    "causal_lm",
    "causal_lm cool",
    "causal_lm greedy",
    "reduced vocabulary",
    "prompt_lookup",
    "suffix_lookup",
    "early_exit",
    "composite",
]


@pytest.fixture(scope="module", params=engines())
def plain(request):
    """(engine, target, plain greedy text)."""
    target = Target(model=make_model(MODULE, request.param), eos_token_ids=(2,))
    texts = SpeculativeDecoder(target).generate(PROMPTS, max_new_tokens=NUM_TOKENS).token_ids
    return request.param, target, texts


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_the_targets_and_sampled_rows_decode_as_alone(plain, kind):
    engine, target, texts = plain
    drafter = make_drafter(kind, target.model, engine)
    for num_draft_tokens in (1, 3):
        decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=num_draft_tokens)
        greedy = decoder.generate(PROMPTS, max_new_tokens=NUM_TOKENS)
        assert greedy.token_ids == texts
    arguments = {"max_new_tokens": 12, "temperature": 1.0}
    together = decoder.generate(PROMPTS, seed=3, **arguments)
    alone = decoder.generate([PROMPTS[2]], seed=3 + 2, **arguments)
    assert together.token_ids[2] == alone.token_ids[0]


class StepByStep:
    """A model of the C++ engine that does not draft by itself."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        if name == "greedy_chain":
            raise AttributeError(name)
        return getattr(self._model, name)


@pytest.mark.skipif(not native.available(), reason="no C++ compiler")
@pytest.mark.parametrize("policy", [ConfidenceThreshold(0.3, 5), FixedLength(3)])
def test_a_draft_made_inside_the_engine_is_the_one_made_step_by_step(policy):
    model, draft = (native.NativeModel.from_hf(module) for module in (MODULE, DRAFT_MODULE))
    rounds = []
    for drafting in (draft, StepByStep(draft)):
        decoder = SpeculativeDecoder(model, CausalLMDrafter(drafting), num_draft_tokens=policy)
        done = decoder.generate(PROMPTS, max_new_tokens=NUM_TOKENS)
        rounds.append([(entry.rows, entry.drafted, entry.accepted) for entry in done.rounds])
    assert rounds[0] == rounds[1]
    assert len({count for _, drafted, _ in rounds[0] for count in drafted}) > 1


class Alternating(LogitsProcessor):
    """Of 5 to 12, odd tokens behind even ones and the reverse; no way on behind two of a kind."""

    def __call__(self, input_ids, scores):
        tokens = torch.arange(scores.shape[1])
        odd, other = tokens % 2 == 1, (tokens < 5) | (tokens > 12)
        last = input_ids[:, -1:] % 2 == 1
        dead_end = last == (input_ids[:, -2:-1] % 2 == 1)
        return scores.masked_fill(other | (odd == last) | dead_end, -torch.inf)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [3, StaticTree((1, 1))])
def test_settings_that_leave_a_draft_no_way_on_do_not_end_the_text(shape, temperature):
    module = HFModel(MODULE)
    reduced = CausalLMDrafter(HFModel(DRAFT_MODULE, head_rows=KEPT), draft_vocab=KEPT)
    outside = {"logit_bias": dict.fromkeys(KEPT.tolist(), -torch.inf)}  # none of its tokens
    lookup = PromptLookupDrafter()  # finds 10 behind 8 and 12 behind 10, and goes on from there
    alternating = {"logits_processors": [Alternating()]}
    prompt = [7, 8, 10, 12, 5, 6, 7]
    for drafter, settings in ((reduced, outside), (lookup, alternating)):
        settings |= {"max_new_tokens": 8, "temperature": temperature, "seed": 0}
        plain = SpeculativeDecoder(module).generate([prompt], **settings)
        drafted = SpeculativeDecoder(module, drafter, num_draft_tokens=shape).generate(
            [prompt], **settings
        )
        assert drafted.stats.num_drafted > 0
        if not temperature:
            assert drafted.token_ids == plain.token_ids
        text = drafted.token_ids[0]
        if drafter is reduced:
            assert all(token % 4 == 0 for token in text)
        else:
            assert all(a % 2 != b % 2 for a, b in zip([7, *text], text, strict=False))


@pytest.mark.parametrize("shape", [3, StaticTree((1, 1))])
def test_a_place_without_a_way_on_is_an_error_where_the_text_comes_to_it(shape):
    only = {7: 9, 9: 12}  # the tokens that may follow these; any other is a dead end

    class Path(LogitsProcessor):
        def __call__(self, input_ids, scores):
            allowed = torch.zeros_like(scores, dtype=torch.bool)
            for row, token in enumerate(input_ids[:, -1].tolist()):
                allowed[row, only.get(token, [])] = True
            return scores.masked_fill(~allowed, -torch.inf)

    decoder = SpeculativeDecoder(HFModel(MODULE), PromptLookupDrafter(), num_draft_tokens=shape)
    prompts, settings = [[7, 9, 12, 3, 7]], {"max_new_tokens": 9, "logits_processors": [Path()]}
    for temperature in (0.0, 1.0):
        settings["temperature"] = temperature
        # The dead end lies behind the end.
        ended = decoder.generate(prompts, eos_token_id=12, **settings)
        assert ended.token_ids == [[9, 12]]
        for prompt in (prompts[0], [3]):
            with pytest.raises(ValueError, match="forbid every token behind"):
                decoder.generate([prompt], eos_token_id=2, **settings)


@pytest.mark.parametrize("kind", [*KINDS, "tree"])
def test_exactly_as_many_tokens_are_written_as_asked_for(plain, kind):
    engine, target, texts = plain
    drafter = make_drafter("causal_lm" if kind == "tree" else kind, target.model, engine)
    length = StaticTree((2, 2, 1)) if kind == "tree" else 4
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=length)
    for num_tokens in (1, 2, 3, 5):
        found = decoder.generate(PROMPTS, max_new_tokens=num_tokens)
        assert found.token_ids == [text[:num_tokens] for text in texts]
        assert set(found.finish_reasons) == {"length"}


@pytest.mark.parametrize("kind", [*KINDS, "tree"])
def test_texts_go_on_past_a_drafters_last_position_and_end_at_the_targets(kind, monkeypatch):
    # Case A5 for every kind: 32 positions of the drafter's model, 48 of the target's.
    monkeypatch.setattr(DRAFT_MODULE.config, "max_position_embeddings", 32)
    monkeypatch.setattr(MODULE.config, "max_position_embeddings", 48)
    engine = engines()[-1]
    target = Target(model=make_model(MODULE, engine))
    drafter = make_drafter("causal_lm" if kind == "tree" else kind, target.model, engine)
    shape = StaticTree((2, 2, 1)) if kind == "tree" else 8
    prompts, settings = [list(range(20, 48)), [5, 6, 7]], {"max_new_tokens": 40}
    plain = SpeculativeDecoder(target).generate(prompts, **settings)
    drafted = SpeculativeDecoder(target, drafter, num_draft_tokens=shape).generate(
        prompts, **settings
    )
    assert drafted.token_ids == plain.token_ids
    assert list(map(len, drafted.token_ids)) == [20, 40]
    assert drafted.finish_reasons == plain.finish_reasons == ["context", "length"]
    if kind not in ("prompt_lookup", "suffix_lookup", "composite", "early_exit"):
        lengths = [29, 4]  # tokens committed in front of a round
        for entry in drafted.rounds:
            for row, count, accepted in zip(entry.rows, entry.drafted, entry.accepted, strict=True):
                assert not count or lengths[row] + count - 1 <= 32
                lengths[row] += accepted + 1


@pytest.mark.parametrize("shape", [StaticTree((3, 2, 1)), BestFirstTree(8, num_passes=3)])
def test_token_trees_keep_the_text_and_accept_more_than_a_chain(plain, shape):
    engine, target, texts = plain
    drafter = CausalLMDrafter(make_model(DRAFT_MODULE, engine))
    chain = SpeculativeDecoder(target, drafter, num_draft_tokens=3)
    tree = SpeculativeDecoder(target, drafter, num_draft_tokens=shape)
    by_chain = chain.generate(PROMPTS, max_new_tokens=NUM_TOKENS)
    by_tree = tree.generate(PROMPTS, max_new_tokens=NUM_TOKENS)
    assert by_tree.token_ids == texts
    assert by_tree.stats.acceptance_length > by_chain.stats.acceptance_length
    assert max(by_tree.rounds[0].drafted) <= 3 < max(by_tree.rounds[0].submitted)
    sampled = tree.generate(PROMPTS, max_new_tokens=10, temperature=[1.0, 0.0, 0.7, 1.0], seed=5)
    assert sampled.token_ids[1] == texts[1][:10]
    alone = tree.generate([PROMPTS[2]], max_new_tokens=10, temperature=0.7, seed=7)
    assert sampled.token_ids[2] == alone.token_ids[0]


def test_trees_of_a_model_with_two_tokens_follow_the_target():
    target, draft = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.1, 0.2, 0.7])
    drafter = CausalLMDrafter(TreeTable(draft))
    decoder = SpeculativeDecoder(TreeTable(target), drafter, num_draft_tokens=StaticTree((2, 2)))
    generation = decoder.generate([[0]] * 100, max_new_tokens=31, temperature=1.0, seed=0)
    tokens = torch.tensor(generation.token_ids).flatten()  # 3,100 draws, sigma 0.009
    shares = torch.bincount(tokens, minlength=3) / len(tokens)
    assert float((shares - target).abs().max()) < 0.035
    # Two of three tokens are tried at the root: far more than one draft's overlap of 0.4.
    assert generation.stats.acceptance_by_position[0] > 0.6


class TreeTable(TableModel):
    """One distribution everywhere; trees need no more of a model than the shape of its output."""

    def __init__(self, probs):
        super().__init__(lambda positions, tokens: probs.log().expand(*tokens.shape, -1), 3)

    def new_cache(self, batch_size, capacity):
        cache = super().new_cache(batch_size, capacity)
        cache.keep_path = lambda row, start, slots: cache.lengths.__setitem__(
            row, start + len(slots)
        )
        return cache


def test_trees_from_a_drafter_of_chains_are_refused_before_any_pass():
    model = TableModel.reciting([1, 2, 3], 8)
    drafter = ScriptedDrafter(lambda prefix, position: 1)
    decoder = SpeculativeDecoder(model, drafter, num_draft_tokens=StaticTree((2,)))
    with pytest.raises(ValueError, match="drafts chains only"):
        decoder.generate([[1]], max_new_tokens=4)
    assert model.num_passes == 0


def test_prompt_lookup_copies_the_newest_occurrence_and_follows_loops():
    #         0  1  2  3  4  5  6  7  8
    tokens = [1, 2, 9, 1, 2, 3, 4, 1, 2]
    session = PromptLookupDrafter(max_ngram=2).begin(1, 100, make_sampler())
    assert proposed(session, tokens, 3) == [3, 4, 1]
    # The text ends inside the match: what was just proposed is copied on.
    session = PromptLookupDrafter().begin(1, 100, make_sampler())
    assert proposed(session, [7, 5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]
    assert proposed(PromptLookupDrafter().begin(1, 100, make_sampler()), [1, 2, 3], 3) == []
    session = PromptLookupDrafter(min_ngram=2).begin(1, 9, make_sampler())
    assert proposed(session, [1, 2, 1], 3) == []


def proposed(session, tokens, count):
    lengths = LengthRound(FixedLength(count).begin(1), [0], [count])
    draft = session.propose([0], [tokens], lengths)
    return draft.token_ids[0, : int(draft.num_drafted[0])].tolist()


def test_suffix_lookup_follows_the_majority_as_far_as_the_match_reaches():
    occurrences = Occurrences(2)
    occurrences.add_text([1, 2, 3, 4, 5, 9])
    occurrences.add_text([1, 2, 3, 4, 6, 9])
    occurrences.add_text([8, 2, 3, 7, 7, 7])
    find = occurrences.continuation
    settings = {"min_survival": 0.5, "tokens_per_match": 1.0}
    # Three tokens match twice, two match three times: the longer match says 4, then they part.
    found = find([1, 2, 3], 8, **settings)
    assert found.token_ids[:2] == [4, 5]
    assert found.survival[:2] == [1.0, 0.5]
    assert len(found.token_ids) <= 3  # as long as the match
    assert find([2, 3], 1, **settings).token_ids == [4]
    assert find([5, 5], 4, **settings).token_ids == []
    assert find([3], 4, **settings).token_ids == []


def test_suffix_lookup_learns_from_earlier_requests():
    text = [3, *range(10, 40)]
    target = Target(model=TableModel.reciting(text, 64))
    drafter = SuffixLookupDrafter(remembers=True)
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=8)
    first = decoder.generate([text[:3]], max_new_tokens=25)
    second = decoder.generate([text[:3]], max_new_tokens=25)
    assert first.token_ids == second.token_ids
    assert first.stats.num_drafted == 0
    assert second.stats.acceptance_rate == 1.0
    # The draft grows with the match: 3 tokens are known at first, then all that was accepted.
    drafted = [entry.drafted[0] for entry in second.rounds]
    assert drafted == sorted(drafted[:-1]) + drafted[-1:]
    assert drafted[0] < 8 == max(drafted)
    forgetful = SuffixLookupDrafter()
    for _ in range(2):
        again = SpeculativeDecoder(target, forgetful, num_draft_tokens=8)
        assert again.generate([text[:3]], max_new_tokens=25).stats.num_drafted == 0


def test_a_composite_asks_the_model_only_where_lookup_found_nothing():
    text = [3, 11, 12, 13, 14, 15, 11, 12, 13, 14, 15, 16, 17]
    model = ScriptedDrafter.knowing([text], kind="perfect", wrong=63)
    drafter = CompositeDrafter(SuffixLookupDrafter(min_match=2), model)
    target = Target(model=TableModel.reciting(text, 64))
    generation = SpeculativeDecoder(target, drafter, num_draft_tokens=2).generate(
        [text[:1]], max_new_tokens=12
    )
    assert generation.token_ids == [text[1:]]
    asked_model = [count for _, _, count in model.asked]
    assert 0 in asked_model  # lookup found the repetition
    assert max(asked_model) == 2  # and the model drafted the rest
    assert generation.stats.acceptance_rate > 0.8


def test_a_composite_with_a_drafter_on_the_targets_cache_is_refused():
    model = HFModel(MODULE)
    drafter = CompositeDrafter(SuffixLookupDrafter(), EarlyExitDrafter(model, exit_layer=1))
    with pytest.raises(ValueError, match="lookup and early exit is not offered"):
        SpeculativeDecoder(model, drafter).generate([[5, 6]], max_new_tokens=4)


@pytest.mark.parametrize("index", [0, 1])
def test_early_exit_computes_nothing_twice(index):
    module = noisy_copy(MODULE, 0.0)
    model, seen = HFModel(module), []

    def count(attention, args, kwargs):
        seen.append(kwargs["hidden_states"].shape[1])

    # Attention is what a skipped layer skips.
    model.layers[index].self_attn.register_forward_pre_hook(count, with_kwargs=True)
    drafter = EarlyExitDrafter(model, exit_layer=1)
    decoder = SpeculativeDecoder(Target(model=model), drafter, num_draft_tokens=3)
    generation = decoder.generate([PROMPTS[0]], max_new_tokens=20)
    submitted = sum(entry.submitted[0] + 1 for entry in generation.rounds)
    assert sum(seen) == len(PROMPTS[0]) + submitted


def test_a_drafter_in_training_takes_over_its_weights_on_refresh():
    module = noisy_copy(MODULE, 0.0)
    with torch.no_grad():
        module.lm_head.weight.mul_(-1.0)  # a useless draft
    module.train()
    drafter = CausalLMDrafter.from_module(module)
    decoder = SpeculativeDecoder(MODULE, drafter, num_draft_tokens=2)
    assert decoder.generate([[5, 6]], max_new_tokens=10).stats.acceptance_rate < 1.0
    with torch.no_grad():
        module.lm_head.weight.mul_(-1.0)
    drafter.refresh()
    assert decoder.generate([[5, 6]], max_new_tokens=10).stats.acceptance_rate == 1.0
    assert module.training


def test_an_early_exit_of_another_model_and_layers_that_it_lacks_are_refused():
    # Its layers would stand in for the target's own: the text would be that of neither.
    target, other = HFModel(MODULE), EarlyExitDrafter(HFModel(DRAFT_MODULE), exit_layer=1)
    with pytest.raises(ValueError, match="made of another model than the target"):
        SpeculativeDecoder(target, other).generate([[5, 6]], max_new_tokens=4)
    again = EarlyExitDrafter(HFModel(MODULE), exit_layer=1)  # the same weights, wrapped again
    assert SpeculativeDecoder(target, again).generate([[5, 6]], max_new_tokens=4).rounds
    reader = ScriptedDrafter(lambda prefix, position: 5)
    reader.hidden_layers = (1, 3)
    with pytest.raises(ValueError, match="hidden states after 3 layers, the target has 2"):
        SpeculativeDecoder(target, reader).generate([[5, 6]], max_new_tokens=4)


@pytest.mark.parametrize("exit_layer", [0, 2])
def test_an_exit_outside_the_model_is_refused(exit_layer):
    with pytest.raises(ValueError, match=f"exit_layer is {exit_layer}, expected 1 to 1"):
        EarlyExitDrafter(HFModel(MODULE), exit_layer=exit_layer)
