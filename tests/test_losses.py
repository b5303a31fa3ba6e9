"""Losses: closed forms, identities, gradients, reduced vocabularies, chunks."""

import math
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distill import chunked_head
from distill.chunked_head import head_loss
from distill.comparison import Comparison
from distill.draft_vocab import DraftVocab, full_vocab, most_frequent, token_counts
from distill.losses import (
    LOSSES,
    LossConfig,
    LossName,
    forward_kl,
    greedy_agreement,
    hard_labels,
    jsd,
    lk_hybrid,
    neg_log_overlap,
    overlap,
    reverse_kl,
    total_variation,
    tvd_plus_plus,
)
from distill.position_weights import WeightScheme, WeightsConfig
from distill.signals import TargetHead, TargetRows
from distill.weighing import weigh_texts

ALL = list(LossName)
KINKED = (
    LossName.total_variation,
    LossName.neg_log_overlap,
    LossName.tvd_plus_plus,
    LossName.lk_hybrid,
    LossName.expected_length,
)
TARGET = torch.tensor([[0.9, 0.1]]).log()
DRAFT = torch.tensor([[0.5, 0.5]]).log()


def random_pair(seed, n=12, rows=7, dtype=torch.float64):
    noise = torch.Generator().manual_seed(seed)
    draft = torch.randn(rows, n, generator=noise, dtype=dtype)
    target = (2 * torch.randn(rows, n, generator=noise, dtype=dtype)).log_softmax(-1)
    labels = torch.randint(0, n, (rows,), generator=noise)
    return draft, target, labels


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (forward_kl(DRAFT, TARGET), 0.368064),
        (reverse_kl(DRAFT, TARGET), 0.510826),
        (jsd(DRAFT, TARGET), 0.101749),
        (jsd(DRAFT, TARGET, beta=0.999), 0.00051),
        (total_variation(DRAFT, TARGET), 0.4),
        (overlap(DRAFT, TARGET), 0.6),
        (neg_log_overlap(DRAFT, TARGET), -math.log(0.6)),
        (forward_kl(DRAFT / 2, (TARGET / 2).log_softmax(-1)), 0.130812),
    ],
)
def test_losses_of_two_tokens_are_the_hand_calculated_ones(value, expected):
    assert value.item() == pytest.approx(expected, abs=2e-6)


def test_jsd_at_its_ends_is_the_documented_kl():
    draft, target, _ = random_pair(0)
    torch.testing.assert_close(jsd(draft, target, beta=0.0), forward_kl(draft, target))
    torch.testing.assert_close(jsd(draft, target, beta=1.0), reverse_kl(draft, target))


def test_jsd_close_to_an_end_tends_to_that_kl_when_divided_by_its_weight():
    draft, target, _ = random_pair(1)
    small = 1e-6
    torch.testing.assert_close(
        jsd(draft, target, beta=small) / small, forward_kl(draft, target), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        jsd(draft, target, beta=1 - small) / small, reverse_kl(draft, target), rtol=1e-4, atol=1e-5
    )


def test_lk_hybrid_mixes_by_the_mean_overlap_of_the_batch_without_its_gradient():
    draft, target, _ = random_pair(2)
    weight = math.exp(-3.0 * overlap(draft, target).mean())
    expected = weight * forward_kl(draft, target) + (1 - weight) * total_variation(draft, target)
    torch.testing.assert_close(lk_hybrid(draft, target, eta=3.0), expected)

    draft.requires_grad_()
    lk_hybrid(draft, target, eta=3.0).sum().backward()
    (frozen,) = torch.autograd.grad(
        (weight * forward_kl(draft, target) + (1 - weight) * total_variation(draft, target)).sum(),
        draft,
    )
    torch.testing.assert_close(draft.grad, frozen)


@pytest.mark.parametrize(
    "name", [name for name in ALL if name not in (LossName.ce_tv, LossName.hard_labels)]
)
def test_equal_distributions_have_no_loss_and_no_gradient(name):
    _, target, labels = random_pair(3)
    logits = (target + 1.5).requires_grad_()  # the same distribution, other logits
    loss = LOSSES[name](Comparison(logits, target), labels, LossConfig(name=name))
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.zeros_like(loss), atol=1e-9, rtol=0)
    assert logits.grad is not None
    if name in KINKED:
        return  # min(p, q) has a kink at p = q, where rounding decides for a side
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits.grad), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", [4, 5])
def test_losses_are_not_negative_and_a_positive_one_falls_along_its_gradient(name, seed):
    draft, target, labels = random_pair(seed)
    config = LossConfig(name=name)
    draft.requires_grad_()
    loss = LOSSES[name](Comparison(draft, target), labels, config)
    assert loss.shape == labels.shape
    assert (loss >= 0).all()
    loss.sum().backward()
    after = LOSSES[name](Comparison(draft.detach() - 1e-3 * draft.grad, target), labels, config)
    assert after.sum() < loss.sum()


@pytest.mark.parametrize("name", [name for name in ALL if name is not LossName.tvd_plus_plus])
def test_gradients_agree_with_finite_differences(name):
    draft, target, labels = random_pair(6, n=5, rows=3)
    config = LossConfig(name=name, eta=0.0)  # eta 0: the weight's missing gradient is no error
    draft.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda logits: LOSSES[name](Comparison(logits, target), labels, config), (draft,)
    )


def test_the_gradient_of_the_kl_is_draft_minus_target():
    draft, target, _ = random_pair(7)
    draft.requires_grad_()
    forward_kl(draft, target).sum().backward()
    torch.testing.assert_close(draft.grad, draft.detach().softmax(-1) - target.exp())


def test_the_gradient_of_the_total_variation_is_half_draft_times_centred_sign():
    draft, target, _ = random_pair(9)
    draft.requires_grad_()
    total_variation(draft, target).sum().backward()
    q = draft.detach().softmax(-1)
    sign = (q - target.exp()).sign()
    expected = 0.5 * q * (sign - (q * sign).sum(-1, keepdim=True))
    torch.testing.assert_close(draft.grad, expected)


def test_the_gradient_of_tvd_plus_plus_is_the_policy_gradient_of_normalised_advantages():
    draft, target, _ = random_pair(10)
    draft.requires_grad_()
    tvd_plus_plus(draft, target).sum().backward()
    q = draft.detach().softmax(-1)
    reward = (target.exp() > q).double()
    mean = (q * reward).sum(-1, keepdim=True)
    advantage = (reward - mean) / (q * (reward - mean) ** 2).sum(-1, keepdim=True).sqrt()
    # -E_q[A grad log q] with grad log q(x) = onehot(x) - q and E_q A = 0.
    torch.testing.assert_close(draft.grad, -q * advantage)


def test_the_gradient_of_neg_log_overlap_is_that_of_the_total_variation_over_the_overlap():
    draft, target, _ = random_pair(11)
    draft.requires_grad_()
    (of_log,) = torch.autograd.grad(neg_log_overlap(draft, target).sum(), draft)
    (of_tv,) = torch.autograd.grad(total_variation(draft, target).sum(), draft)
    torch.testing.assert_close(of_log, of_tv / overlap(draft, target).detach()[:, None])


def test_from_scratch_the_total_variation_has_no_gradient_to_speak_of_and_its_log_has():
    """Gradient norms of a uniform draft over V tokens when the target wants k of them: about
    1 / sqrt(k) for the KL and -log overlap, sqrt(k) / V for the total variation (arXiv:2602.23881)."""
    size, wanted = 4000, 16
    target = torch.full((1, size), -torch.inf, dtype=torch.float64)
    target[0, :wanted] = -math.log(wanted)
    norms = []
    for loss in (forward_kl, neg_log_overlap, total_variation):
        draft = torch.zeros(1, size, dtype=torch.float64, requires_grad=True)
        loss(draft, target).sum().backward()
        norms.append(float(draft.grad.norm()))
    assert norms[0] == pytest.approx(wanted**-0.5, rel=0.01)
    assert norms[1] == pytest.approx(wanted**-0.5, rel=0.01)
    assert norms[2] == pytest.approx(wanted**0.5 / size, rel=0.01)


def test_neg_log_overlap_of_a_one_hot_target_is_the_cross_entropy():
    draft, _, labels = random_pair(8)
    one_hot = torch.full_like(draft, -torch.inf).scatter(1, labels[:, None], 0.0)
    torch.testing.assert_close(neg_log_overlap(draft, one_hot), hard_labels(draft, labels))


@pytest.mark.parametrize("name", ALL)
def test_losses_are_float32_for_bfloat16_logits(name):
    draft, target, labels = random_pair(9, dtype=torch.float32)
    loss = LOSSES[name](Comparison(draft.bfloat16(), target), labels, LossConfig(name=name))
    assert loss.dtype == torch.float32


def test_overlap_is_one_minus_half_the_absolute_difference():
    draft, target, _ = random_pair(10)
    difference = (draft.softmax(-1) - target.exp()).abs().sum(-1) / 2
    torch.testing.assert_close(total_variation(draft, target), difference)


class TestReducedVocabulary:
    """p = (.5, .2, .3) over the full vocabulary, the draft knows the first two tokens."""

    target = torch.tensor([[0.5, 0.2]], dtype=torch.float64).log()
    draft = torch.tensor([[0.4, 0.6]], dtype=torch.float64).log()

    def test_kl_compares_with_the_renormalised_target_and_weights_by_the_kept_mass(self):
        expected = 0.7 * (5 / 7 * math.log(5 / 7 / 0.4) + 2 / 7 * math.log(2 / 7 / 0.6))
        assert forward_kl(self.draft, self.target).item() == pytest.approx(expected)

    def test_the_gradient_of_the_kl_is_that_of_the_truncated_cross_entropy(self):
        logits = self.draft.clone().requires_grad_()
        forward_kl(logits, self.target).sum().backward()
        expected = 0.7 * self.draft.exp() - self.target.exp()
        torch.testing.assert_close(logits.grad, expected)

    def test_mass_outside_can_not_overlap(self):
        assert overlap(self.draft, self.target).item() == pytest.approx(0.4 + 0.2)

    def test_a_position_with_no_kept_mass_moves_nothing_in_a_kl(self):
        for loss in (forward_kl, reverse_kl, jsd):
            logits = self.draft.clone().requires_grad_()
            value = loss(logits, self.target - 40.0)
            value.sum().backward()
            assert value.item() == pytest.approx(0.0, abs=1e-12)
            assert logits.grad.abs().max() < 1e-12

    def test_a_label_outside_carries_no_loss_and_an_argmax_outside_is_a_miss(self):
        labels = torch.tensor([1, -1])
        logits = torch.cat([self.draft, self.draft])
        assert hard_labels(logits, labels).tolist() == pytest.approx([-math.log(0.6), 0.0])
        assert greedy_agreement(logits, labels).tolist() == [True, False]


def head_case(seed, *, vocab=None, positions=50, size=40, width=8):
    noise = torch.Generator().manual_seed(seed)
    weight = torch.randn(size, width, generator=noise)
    states = torch.randn(positions, width, generator=noise)
    logits = states @ weight.T
    rows = TargetRows(states, logits.logsumexp(-1), logits.argmax(-1))
    vocab = full_vocab(size) if vocab is None else vocab
    target = TargetHead(weight, vocab)
    hidden = torch.randn(positions, width, generator=noise)
    labels = torch.randint(0, size, (positions,), generator=noise)
    return hidden, target, rows, labels


SOME = DraftVocab(torch.tensor([0, 1, 2, 5, 8, 13, 21, 22, 30, 39]), 40)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("vocab", [None, SOME], ids=["full", "reduced"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_loss_and_gradients_equal_the_unchunked_ones(name, vocab, temperature):
    hidden, target, rows, labels = head_case(11, vocab=vocab)
    config = LossConfig(name=name, chunk_tokens=7, temperature=temperature)
    states, head = hidden.clone().requires_grad_(), target.kept_weight.clone().requires_grad_()
    sums = head_loss(states, head, target, rows, labels, config)
    (sums.loss / len(hidden)).backward()

    plain, plain_head = hidden.clone().requires_grad_(), target.kept_weight.clone().requires_grad_()
    log_probs = (rows.hidden @ target._full.T / temperature).log_softmax(-1)
    log_probs = log_probs[:, target.vocab.token_ids]
    logits = plain @ plain_head.T / temperature
    loss = LOSSES[name](Comparison(logits, log_probs), target.vocab.to_draft(labels), config).sum()
    (loss / len(hidden)).backward()

    torch.testing.assert_close(sums.loss, loss, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(states.grad, plain.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head.grad, plain_head.grad, rtol=1e-5, atol=1e-6)
    if name is not LossName.hard_labels:
        torch.testing.assert_close(
            sums.overlap, overlap(logits, log_probs).sum().detach(), rtol=1e-5, atol=1e-5
        )
        assert sums.num_compared == len(hidden)
        torch.testing.assert_close(sums.kept_mass, log_probs.exp().sum(), rtol=1e-5, atol=1e-5)


class LargestTensors(TorchDispatchMode):
    """Notes the number of elements of every tensor that is made while it is active."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        parts = made if isinstance(made, tuple | list) else [made]
        self.sizes += [part.numel() for part in parts if isinstance(part, torch.Tensor)]
        return made


@pytest.mark.parametrize("name", [LossName.lk_hybrid, LossName.jsd, LossName.expected_length])
@pytest.mark.parametrize("bound", ["tokens", "bytes"])
def test_no_more_than_a_chunk_of_logits_ever_exists(name, bound, monkeypatch):
    positions, size, chunk = 96, 500, 8
    hidden, target, rows, labels = head_case(17, positions=positions, size=size)
    config = LossConfig(name=name, chunk_tokens=chunk if bound == "tokens" else positions)
    if bound == "bytes":
        monkeypatch.setattr(chunked_head, "MAX_LOGITS_BYTES", 4 * size * (chunk + 1) - 1)
    states = hidden.clone().requires_grad_()
    weigh = weigh_texts(config, torch.arange(positions))
    with LargestTensors() as seen:
        head_loss(
            states, target.kept_weight, target, rows, labels, config, weigh=weigh
        ).loss.backward()
    assert max(seen.sizes) == chunk * size
    # The rows that the softmax sees are the loss positions, each of them once a model.
    made = sum(count == chunk * size for count in seen.sizes)
    assert made >= 2 * positions // chunk


def test_a_frozen_head_gets_no_gradient_and_no_gradient_is_computed_without_autograd():
    hidden, target, rows, labels = head_case(12)
    states = hidden.clone().requires_grad_()
    head_loss(states, target.kept_weight, target, rows, labels, LossConfig()).loss.backward()
    assert states.grad is not None
    assert target.kept_weight.grad is None
    with torch.no_grad():
        assert not head_loss(
            states, target.kept_weight, target, rows, labels, LossConfig()
        ).loss.requires_grad


def test_a_draft_that_reads_the_targets_state_overlaps_and_agrees_fully():
    _, target, rows, labels = head_case(13)
    sums = head_loss(rows.hidden, target.kept_weight, target, rows, labels, LossConfig())
    assert sums.overlap.item() == pytest.approx(50, abs=1e-3)
    assert sums.agreement.item() == 50


def test_padding_rows_of_the_head_have_no_probability():
    """Case C3: 40 real tokens and 8 rows of padding give what 40 rows give."""
    hidden, target, rows, labels = head_case(14)
    padded = torch.cat([target._full, 100 * torch.ones(8, 8)])
    reference = head_loss(hidden, target.kept_weight, target, rows, labels, LossConfig())
    vocab = full_vocab(40, target_size=48)
    with_padding = TargetHead(padded, vocab, real_vocab_size=40)
    found = head_loss(hidden, with_padding.kept_weight, with_padding, rows, labels, LossConfig())
    torch.testing.assert_close(found.loss, reference.loss)


def test_states_of_another_target_are_refused():
    _, target, rows, _ = head_case(15)
    target.check(rows)
    _, other, _, _ = head_case(16)
    with pytest.raises(ValueError, match="write the answers again"):
        other.check(rows)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": 0.0}, "loss.temperature must be positive"),
        ({"beta": 1.5}, "loss.beta must be between 0 and 1"),
        ({"eta": -1.0}, "loss.eta must be zero or positive"),
        (
            {"name": LossName.expected_length, "weights": WeightsConfig(scheme=WeightScheme.decay)},
            "loss.name=expected_length weighs the positions by itself",
        ),
        ({"ce_weight": 2.0}, "loss.ce_weight must be between"),
        ({"chunk_tokens": 0}, "loss.chunk_tokens must be at least 1"),
    ],
)
def test_a_setting_out_of_range_is_named_by_its_path(setting, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**setting)


def test_a_jsd_that_is_almost_zero_everywhere_is_warned_about():
    with pytest.warns(UserWarning, match="use exactly 0"):
        LossConfig(name=LossName.jsd, beta=0.999)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LossConfig(name=LossName.jsd, beta=1.0)


def test_the_draft_vocabulary_holds_the_most_frequent_tokens_and_those_that_must_be_there():
    counts = token_counts([torch.tensor([3, 3, 3, 7, 7, 9])], 12)
    vocab = most_frequent(counts, 4, always=[2], real_size=10)
    assert vocab.token_ids.tolist() == [2, 3, 7, 9]
    assert (torch.arange(4) + vocab.d2t).tolist() == [2, 3, 7, 9]
    assert vocab.t2d.nonzero().flatten().tolist() == [2, 3, 7, 9]
    assert vocab.to_draft(torch.tensor([[9, 0], [2, 3]])).tolist() == [[3, -1], [0, 1]]
    with pytest.raises(ValueError, match=r"draft.draft_vocab_size must be between 1 .* and 10"):
        most_frequent(counts, 11, always=[2], real_size=10)
