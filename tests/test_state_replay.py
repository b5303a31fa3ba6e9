"""Drafters on the target's states are replayed too: counts, expectations and scores of decoding."""

import pytest
import torch

from eval.acceptance import length_interval, measure_acceptance
from eval.asking import asked_along
from eval.inspection import score_answer, weak_prefixes
from eval.policies import policy_stats, record
from eval.replay import proposals, replayed_stats
from eval.sampled_replay import expected_counts, is_recordable, keeps
from eval.suites import EvalPrompt
from eval.target_texts import Answer, TargetStates, target_scores
from specdec_runtime import native
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft_length import ConfidenceThreshold, FixedLength
from specdec_runtime.drafters.composite import CompositeDrafter
from specdec_runtime.drafters.eagle3 import Eagle3Drafter
from specdec_runtime.drafters.early_exit import EarlyExitDrafter
from specdec_runtime.drafters.parallel import ParallelDrafter
from specdec_runtime.drafters.suffix_lookup import SuffixLookupDrafter
from specdec_runtime.eagle3_network import Eagle3Network, eagle3_config
from specdec_runtime.exit_adapter import ExitAdapter
from specdec_runtime.hf_model import HFModel
from specdec_runtime.parallel_network import ParallelNetwork, parallel_config
from specdec_runtime.target import Target
from tests.conftest import tiny_llama

# So few tokens that a random drafter is right now and then, a few times in a row.
VOCAB_SIZE = 8
KEPT = torch.tensor([1, 3, 4, 5, 6, 7])
LONGEST, LENGTH, SEED = 4, 20, 10
MODULE = tiny_llama(0, num_layers=4, vocab_size=VOCAB_SIZE)
PROMPTS = [[5, 6, 7], [3, 4, 5, 6, 7, 1], [1, *([3, 7, 5] * 4)], [6]]
FAST = "native" if native.available() else "eager"


def target_on(engine: str) -> Target:
    model = native.NativeModel.from_hf(MODULE) if engine == "native" else HFModel(MODULE)
    return Target(model=model, eos_token_ids=(2,))


def randomly(network, seed: int):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    return network.eval()


SHAPE = {
    "layer_ids": [1, 2, 3],
    "draft_vocab_size": len(KEPT),
    "num_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
}


def eagle3(target: Target, engine: str, norms: str = "eagle3.1") -> Eagle3Drafter:
    network = randomly(Eagle3Network(eagle3_config(MODULE.config, norms=norms, **SHAPE)), SEED)
    return Eagle3Drafter(network, draft_vocab=KEPT, engine=engine)


def parallel(target: Target, engine: str) -> ParallelDrafter:
    config = parallel_config(MODULE.config, markov_rank=8, block_size=3, **SHAPE)
    return ParallelDrafter(randomly(ParallelNetwork(config), SEED), draft_vocab=KEPT, engine=engine)


def early_exit(target: Target, engine: str) -> EarlyExitDrafter:
    return EarlyExitDrafter(target.model, exit_layer=2)


def adapted_exit(target: Target, engine: str) -> EarlyExitDrafter:
    torch.manual_seed(0)
    adapter = ExitAdapter(MODULE.config.hidden_size, mlp_size=0, norm_eps=1e-6)
    return EarlyExitDrafter(target.model, exit_layer=2, adapter=adapter, draft_vocab=KEPT)


KINDS = {
    "eagle3": eagle3,
    "eagle3 without norms": lambda target, engine: eagle3(target, engine, "eagle3"),
    "parallel": parallel,
    "early exit": early_exit,
    "adapted exit": adapted_exit,
    "lookup, then eagle3": lambda target, engine: CompositeDrafter(
        SuffixLookupDrafter(min_match=3), eagle3(target, engine)
    ),
}


def texts_of(target: Target, prompts=PROMPTS, **sampling) -> list[Answer]:
    found = measure_acceptance(
        target, None, prompts, num_draft_tokens=0, max_new_tokens=LENGTH, **sampling
    )
    return [Answer(p, ids, LENGTH) for p, ids in zip(prompts, found.token_ids, strict=True)]


@pytest.fixture(scope="module")
def setting():
    target = target_on(FAST)
    return FAST, TargetStates(target, SHAPE["layer_ids"]), texts_of(target)


@pytest.mark.parametrize(
    ("kind", "engine"),
    [*((kind, FAST) for kind in KINDS), ("lookup, then eagle3", "eager"), ("parallel", "eager")],
)
def test_replayed_counts_equal_decoded_counts_for_every_draft_length(kind, engine):
    states = TargetStates(target_on(engine), SHAPE["layer_ids"])
    answers, drafter = texts_of(states.target), KINDS[kind](states.target, engine)
    found = [proposals(states, drafter, answer, max_draft_tokens=LONGEST) for answer in answers]
    for k in (1, LONGEST):
        decoded = measure_acceptance(
            states.target, drafter, PROMPTS, num_draft_tokens=k, max_new_tokens=LENGTH
        )
        replayed = [replayed_stats(a, p, k)[0] for a, p in zip(answers, found, strict=True)]
        assert replayed == decoded.prompts
    assert decoded.stats.accepted_by_position[1] > 0, "no draft of two tokens was ever right"


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_asked_at_every_position_says_what_the_replay_says(kind, setting):
    """With confidences, which a policy is replayed by, and without."""
    engine, states, answers = setting
    drafter = KINDS[kind](states.target, engine)
    for answer in answers:
        found = proposals(states, drafter, answer, max_draft_tokens=LONGEST)
        recorded = record(states, drafter, answer, max_draft_tokens=LONGEST)
        assert [draft.num_matching for draft in recorded] == found.num_matching
        fixed = FixedLength(LONGEST).begin(1)
        asked = list(asked_along(states, drafter, answer, fixed, most=LONGEST))
        assert [len(one.token_ids) for one in asked] == found.num_proposed


@pytest.mark.parametrize("kind", ["eagle3", "parallel"])
def test_a_policy_replays_as_it_decodes(kind, setting):
    engine, states, answers = setting
    drafter, policy = KINDS[kind](states.target, engine), ConfidenceThreshold(0.3, LONGEST)
    decoder = SpeculativeDecoder(states.target, drafter, num_draft_tokens=policy)
    for answer in answers:
        recorded = record(states, drafter, answer, max_draft_tokens=LONGEST)
        found = decoder.generate([answer.prompt_ids], max_new_tokens=LENGTH)
        assert policy_stats(policy, answer, recorded)[0] == found.stats


@pytest.mark.parametrize("kind", ["eagle3", "parallel", "adapted exit", "lookup, then eagle3"])
def test_expected_acceptance_is_what_decoding_with_other_draws_has(kind):
    target = target_on(FAST)
    drafter, states = KINDS[kind](target, FAST), TargetStates(target, SHAPE["layer_ids"])
    assert is_recordable(drafter)
    prompts = PROMPTS * 12
    rows = []
    for answer in texts_of(target, prompts, temperature=1.0, batch_size=48, seed=1000):
        known = target_scores(states, answer, temperature=1.0).log_probs
        kept = keeps(states, drafter, answer, known, temperature=1.0, max_draft_tokens=3)
        rows.append(expected_counts(answer, kept, 3))
    decoded = measure_acceptance(
        target, drafter, prompts, num_draft_tokens=3, max_new_tokens=LENGTH, temperature=1.0,
        batch_size=len(prompts),
    )  # fmt: skip
    found, expected = decoded.length_interval(), length_interval(rows)
    # Two half widths of 95 % intervals are four standard errors.
    bound = (found.high - found.low) + (expected.high - expected.low)
    assert expected.value == pytest.approx(found.value, abs=bound)
    assert found.value - 1 > bound, "nothing would be found in such wide intervals"


def test_scores_are_those_of_the_first_token_of_a_draft(setting):
    engine, states, answers = setting
    prompts = [EvalPrompt(str(i), ids) for i, ids in enumerate(PROMPTS)]
    for kind in ("eagle3", "parallel", "early exit"):
        drafter = KINDS[kind](states.target, engine)
        scores = [score_answer(states, drafter, answer) for answer in answers]
        first = [proposals(states, drafter, a, max_draft_tokens=1) for a in answers]
        for score, found, answer in zip(scores, first, answers, strict=True):
            tops = [top.token_ids[0] for top in score.draft]
            matches = [top == token for top, token in zip(tops, answer.token_ids[1:], strict=True)]
            assert matches == [count == 1 for count in found.num_matching]
            assert all(0 < overlap < 1 for overlap in score.overlap)
        assert weak_prefixes(states.target, prompts, answers, scores, drafter=kind, suite="s")


@pytest.mark.parametrize("kind", ["eagle3", "parallel"])
def test_where_the_drafter_has_no_more_positions_it_proposes_what_decoding_does(kind, setting):
    engine, states, answers = setting
    drafter = KINDS[kind](states.target, engine)
    for positions in (4, 14):
        drafter.network.config.max_position_embeddings = positions
        drafter.refresh()
        for answer in answers:
            found = proposals(states, drafter, answer, max_draft_tokens=LONGEST)
            decoded = measure_acceptance(
                states.target, drafter, [answer.prompt_ids],
                num_draft_tokens=LONGEST, max_new_tokens=LENGTH,
            )  # fmt: skip
            assert replayed_stats(answer, found, LONGEST)[0] == decoded.stats


def test_states_are_made_once_and_only_as_many_are_kept_as_fit(monkeypatch):
    target = target_on("eager")
    answers, passes = texts_of(target), []
    real = target.model.forward

    def counted(*arguments, **options):
        passes.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr(target.model, "forward", counted)
    for memory_bytes, num_passes in ((1 << 20, 1), (0, 2)):
        passes.clear()
        states = TargetStates(target, [1], memory_bytes=memory_bytes)
        first = states.head_input(answers[0])
        assert torch.equal(states.head_input(answers[0]), first)
        assert len(passes) == num_passes
    assert len(first) == len(answers[0].token_ids) - 1
