"""Verification rules: what is kept, what follows, and with which probability."""

import pytest
import torch

from specdec_runtime.draft_length import FixedLength
from specdec_runtime.noise import UniformStreams, draw_by_inversion
from specdec_runtime.verification import verify_block, verify_greedy, verify_speculative
from tests.toy_models import ToyDrafter, chain_round_laws, enumerate_drafts, random_table

SAMPLING_RULES = [verify_speculative, verify_block]
# Case B1: a target and a draft whose overlap is 0.8.
TARGET, DRAFT = torch.tensor([0.6, 0.4]), torch.tensor([0.8, 0.2])


def ids(*rows):
    return torch.tensor(rows, dtype=torch.int64)


def one_hot(token_ids, vocab_size):
    return torch.nn.functional.one_hot(token_ids, vocab_size).float()


@pytest.mark.parametrize("drafts_off_target", [0, 1, 2, 3])
def test_nothing_behind_the_first_refusal_is_accepted(drafts_off_target):
    # Case N1: flags [yes, no, yes, yes] are one accepted token, not three.
    target_ids = ids([5, 6, 7, 8, 9])
    draft_ids = target_ids[:, :4].clone()
    draft_ids[0, drafts_off_target] = 0
    assert verify_greedy(draft_ids[0].tolist(), target_ids[0].tolist()) == drafts_off_target
    for rule in SAMPLING_RULES:
        verdict = rule(
            draft_ids, None, one_hot(target_ids, 10), torch.tensor([4]), torch.rand(1, 5).double()
        )
        assert verdict.num_accepted.tolist() == [drafts_off_target]
        assert verdict.next_token_ids.tolist() == [5 + drafts_off_target]


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_rows_of_different_draft_lengths_are_judged_by_their_own(rule):
    target_ids = ids([1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3])
    draft_ids = target_ids[:, :2].clone()
    draft_ids[3, 0] = 9
    num_drafted = torch.tensor([0, 1, 2, 2])
    verdict = rule(draft_ids, None, one_hot(target_ids, 10), num_drafted, _uniforms(4, 3))
    assert verdict.num_accepted.tolist() == [0, 1, 2, 0]
    assert verdict.next_token_ids.tolist() == [1, 2, 3, 1]


@pytest.mark.parametrize("rule", SAMPLING_RULES)
@pytest.mark.parametrize("certain", [True, False])
def test_padding_is_never_looked_at(rule, certain):
    table = random_table(2, vocab_size=5)
    draft_ids = torch.randint(5, (64, 4), generator=torch.Generator().manual_seed(0))
    num_drafted = torch.arange(64) % 5
    draft_probs = None if certain else table[draft_ids]
    target_probs, uniforms = table[torch.cat([draft_ids[:, :1], draft_ids], 1)], _uniforms(64, 5)
    expected = rule(draft_ids, draft_probs, target_probs, num_drafted, uniforms)
    padding = torch.arange(4) >= num_drafted[:, None]
    garbage = None if certain else torch.where(padding[..., None], 7.0, draft_probs)
    after = torch.nn.functional.pad(padding, (1, 0))[..., None]
    found = rule(
        draft_ids.masked_fill(padding, 3),
        garbage,
        torch.where(after, 9.0, target_probs),
        num_drafted,
        uniforms,
    )
    assert torch.equal(expected.num_accepted, found.num_accepted)
    assert torch.equal(expected.next_token_ids, found.next_token_ids)
    assert (found.num_accepted <= num_drafted).all()


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_without_drafts_the_next_token_is_the_targets_own(rule):
    probs = random_table(1, vocab_size=6)[:, None]
    uniforms = _uniforms(6, 1)
    verdict = rule(
        torch.zeros(6, 0, dtype=torch.int64), None, probs, torch.zeros(6).long(), uniforms
    )
    assert torch.equal(verdict.next_token_ids, draw_by_inversion(probs[:, 0], uniforms[:, 0]))


@pytest.mark.parametrize("rule", SAMPLING_RULES)
@pytest.mark.parametrize("greedy_drafter", [False, True])
def test_output_frequencies_are_the_targets_whatever_the_drafter(rule, greedy_drafter):
    # Case B1; a greedy drafter claiming its soft probabilities would give 0.75 here.
    first = _b1_rounds(rule, num_rounds=100_000, greedy_drafter=greedy_drafter).first_tokens
    assert abs((first == 0).double().mean() - 0.6) < 0.006


def test_acceptance_of_a_sampled_draft_is_the_overlap():
    # Case B4: dropping q would give 0.56 (comparing samples) or p(x).
    rounds = _b1_rounds(verify_speculative, num_rounds=100_000, greedy_drafter=False)
    assert abs(rounds.num_accepted.double().mean() - 0.8) < 0.01


def test_acceptance_of_a_certain_draft_is_the_targets_probability_of_it():
    rounds = _b1_rounds(verify_speculative, num_rounds=100_000, greedy_drafter=True)
    assert abs(rounds.num_accepted.double().mean() - 0.6) < 0.01


def test_four_readings_of_acceptance_are_those_of_the_case():
    # Case N3: per token .800, per round 2.362, tokens per round 3.362, accepted/drafted .590.
    num_accepted = _b1_rounds(verify_speculative, num_rounds=200_000, num_drafted=4).num_accepted
    by_position = [(num_accepted > i).double().mean().item() for i in range(4)]
    assert by_position == pytest.approx([0.800, 0.640, 0.512, 0.4096], abs=0.005)
    assert num_accepted.double().mean().item() + 1 == pytest.approx(3.3616, abs=0.015)
    assert num_accepted.sum().item() / (4 * len(num_accepted)) == pytest.approx(0.590, abs=0.005)


@pytest.mark.parametrize("rule", SAMPLING_RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_distributions_keep_everything_and_give_no_nan(rule, dtype):
    table = torch.tensor([[1.0, 0.0, 0.0], [0.3, 0.7, 0.0], [1 / 3, 1 / 3, 1 / 3]]).to(dtype)
    draft_ids = ids([0, 0, 1], [1, 2, 2], [2, 1, 0])
    draft_probs = torch.stack([table[[0, 1, 1]], table[[2, 2, 2]], table[[2, 1, 0]]])
    target_probs = torch.cat([draft_probs, table[:, None]], dim=1)
    for uniforms in (torch.zeros(3, 4), torch.full((3, 4), 1.0 - 2.0**-53, dtype=torch.float64)):
        verdict = rule(
            draft_ids, draft_probs, target_probs, torch.tensor([3, 3, 3]), uniforms.double()
        )
        assert verdict.num_accepted.tolist() == [3, 3, 3]
        assert (target_probs[range(3), 3, verdict.next_token_ids] > 0.0).all()


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_distributions_that_share_nothing_refuse_and_recover(rule):
    draft_probs = torch.tensor([[[1.0, 0.0, 0.0]] * 2])
    target_probs = torch.tensor([[[0.0, 0.5, 0.5]] * 3])
    verdict = rule(ids([0, 0]), draft_probs, target_probs, torch.tensor([2]), _uniforms(1, 3))
    assert verdict.num_accepted.item() == 0
    assert verdict.next_token_ids.item() in (1, 2)


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_nearly_equal_distributions_still_give_tokens_of_the_target(rule):
    # Rounding leaves a residual of a few 1e-8 or none at all; either way a token is drawn.
    generator = torch.Generator().manual_seed(0)
    target_probs = torch.rand(1000, 2, 50, generator=generator).softmax(-1)
    draft_probs = (target_probs[:, :1] * (1.0 + 1e-7)).clone()
    uniforms = torch.tensor([[1.0 - 2.0**-53, 0.7]], dtype=torch.float64).repeat(1000, 1)
    draft_ids = draw_by_inversion(draft_probs[:, 0], _uniforms(1000, 1)[:, 0])[:, None]
    verdict = rule(draft_ids, draft_probs, target_probs, torch.ones(1000).long(), uniforms)
    assert ((verdict.next_token_ids >= 0) & (verdict.next_token_ids < 50)).all()


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_certain_drafts_are_the_one_hot_case(rule):
    table = random_table(4, vocab_size=5)
    draft_ids = torch.randint(5, (500, 3), generator=torch.Generator().manual_seed(1))
    target_probs = table[torch.cat([draft_ids[:, :1], draft_ids], 1)]
    num_drafted = torch.arange(500) % 4
    rest = (target_probs, num_drafted, _uniforms(500, 4))
    certain = rule(draft_ids, None, *rest)
    explicit = rule(draft_ids, one_hot(draft_ids, 5).double(), *rest)
    assert torch.equal(certain.num_accepted, explicit.num_accepted)
    assert torch.equal(certain.next_token_ids, explicit.next_token_ids)


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_greedy_rows_of_a_mixed_batch_are_verified_greedily(rule):
    target_ids = torch.randint(4, (300, 4), generator=torch.Generator().manual_seed(2))
    draft_ids = target_ids[:, :3].clone()
    draft_ids[::2, 1] = (draft_ids[::2, 1] + 1) % 4
    num_drafted = torch.arange(300) % 4
    draft_probs = random_table(3, vocab_size=4).float()[draft_ids]  # a drafter that sampled
    verdict = rule(draft_ids, draft_probs, one_hot(target_ids, 4), num_drafted, _uniforms(300, 4))
    expected = [
        verify_greedy(drafted[:count], chosen)
        for drafted, chosen, count in zip(
            draft_ids.tolist(), target_ids.tolist(), num_drafted.tolist(), strict=True
        )
    ]
    assert verdict.num_accepted.tolist() == expected
    following = target_ids.gather(1, verdict.num_accepted[:, None]).squeeze(1)
    assert torch.equal(verdict.next_token_ids, following)


@pytest.mark.parametrize("num_drafted", [1, 2, 3])
def test_block_verification_never_keeps_fewer_tokens_than_token_by_token(num_drafted):
    gains = []
    for seed in range(2):
        target, drafter = random_table(seed), ToyDrafter(random_table(seed + 50))
        drafts = enumerate_drafts(drafter, FixedLength(num_drafted).begin(1))
        means = [
            [
                sum(len(burst) * prob for burst, prob in law.items())
                for law in chain_round_laws(rule, target, drafter, drafts, block=block)
            ]
            for rule, block in ((verify_speculative, False), (verify_block, True))
        ]
        gains += [after - before for before, after in zip(*means, strict=True)]
    assert min(gains) > -1e-9
    assert (max(gains) > 0.01) == (num_drafted > 1)  # with one token there is no chain to judge


def test_long_chains_neither_underflow_nor_overflow():
    # 64 tokens at a ratio of 1e-4, then of 1e4: the product spans 1e-256.
    ratios = torch.cat([torch.full((64,), 1e-4), torch.full((64,), 1e4)])
    q = torch.where(ratios < 1.0, 0.5, 0.5e-4)
    draft_probs = torch.stack([q, 1.0 - q], -1)[None]
    p = q * ratios
    target_probs = torch.stack([p, 1.0 - p], -1)[None]
    target_probs = torch.cat([target_probs, target_probs[:, -1:]], 1)
    for uniform in (1e-300, 0.999):
        verdict = verify_block(
            torch.zeros(1, 128, dtype=torch.int64),
            draft_probs,
            target_probs,
            torch.tensor([128]),
            torch.full((1, 129), uniform, dtype=torch.float64),
        )
        # By the end the chain is as likely under the target as under the draft (P = 1), and
        # the float32 rounding of the ratios is all that keeps it from certain.
        assert verdict.num_accepted.item() == 128


@pytest.mark.parametrize("rule", SAMPLING_RULES)
def test_shapes_that_do_not_fit_are_named(rule):
    probs = random_table(0, vocab_size=3)
    with pytest.raises(ValueError, match="target_probs has shape"):
        rule(ids([0, 1]), None, probs[None, :2], torch.tensor([2]), _uniforms(1, 3))
    with pytest.raises(ValueError, match=r"draft_probs has shape.*one vocabulary"):
        rule(ids([0, 1]), probs[None, :2, :2], probs[None], torch.tensor([2]), _uniforms(1, 3))


class _Rounds:
    def __init__(self, draft_ids, verdict):
        self.num_accepted = verdict.num_accepted
        bursts = torch.nn.functional.pad(draft_ids, (0, 1))
        bursts.scatter_(1, verdict.num_accepted[:, None], verdict.next_token_ids[:, None])
        self.first_tokens = bursts[:, 0]


def _b1_rounds(rule, *, num_rounds, num_drafted=1, greedy_drafter=False):
    """Many rounds with the target and draft of case B1 at every position."""
    shape = (num_rounds, num_drafted)
    if greedy_drafter:
        draft_ids, draft_probs = torch.zeros(shape, dtype=torch.int64), None
    else:
        draft_probs = DRAFT.expand(*shape, 2)
        drawn = draw_by_inversion(
            draft_probs.flatten(0, 1), _uniforms(num_rounds, num_drafted, purpose=1).flatten()
        )
        draft_ids = drawn.view(shape)
    target_probs = TARGET.expand(num_rounds, num_drafted + 1, 2)
    counts = torch.full((num_rounds,), num_drafted)
    return _Rounds(
        draft_ids,
        rule(draft_ids, draft_probs, target_probs, counts, _uniforms(num_rounds, num_drafted + 1)),
    )


def _uniforms(num_rows, count, *, purpose=2):
    return UniformStreams(range(num_rows), purpose=purpose).take(range(num_rows), count)
