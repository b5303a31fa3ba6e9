"""Weighted positions: chunked equals written out, for frozen and trained heads; what is selected."""

import itertools

import pytest
import torch

from distill.batches import Batch
from distill.chunked_head import head_loss, position_overlaps
from distill.comparison import Comparison
from distill.draft_vocab import DraftVocab
from distill.drafted_steps import drafted_terms
from distill.losses import LOSSES, LossConfig, LossName, SelectionConfig, overlap
from distill.position_weights import BlocksOfText, WeightScheme, WeightsConfig, mean_one
from distill.signals import TargetHead, TargetRows
from distill.weighing import PerPosition, learnable, weigh_texts

VOCAB = DraftVocab(torch.tensor([0, 1, 2, 5, 8, 13, 21, 22, 30, 39]), 40)
POSITIONS = torch.cat([torch.arange(3, 20), torch.arange(25, 40)])  # two texts


def head_case():
    noise = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 8, generator=noise)
    hidden = torch.randn(len(POSITIONS), 8, generator=noise)
    logits = hidden @ weight.T
    rows = TargetRows(hidden, logits.logsumexp(-1), logits.argmax(-1))
    labels = torch.randint(0, 40, (len(POSITIONS),), generator=noise)
    draft = hidden + 0.7 * torch.randn(hidden.shape, generator=noise)
    return draft, TargetHead(weight, VOCAB), rows, labels


def written_out(draft, head, case, config):
    """The loss of plain logits, with weights made by loops over blocks."""
    _, target, rows, labels = case
    log_probs = (rows.hidden @ target._full.T).log_softmax(-1)[:, VOCAB.token_ids]
    logits = draft @ head.T
    alphas = overlap(logits, log_probs)
    k = config.weights.block_tokens
    blocks = [
        [j for j in range(i, min(i + k, len(POSITIONS))) if POSITIONS[j] - POSITIONS[i] == j - i]
        for i in range(len(POSITIONS))
    ]
    if config.name is LossName.expected_length:
        shares = [
            sum(alphas[block[:m]].prod() for m in range(1, len(block) + 1)) / len(block)
            for block in blocks
        ]
        return sum(1 - share for share in shares)
    agrees = logits.argmax(-1) == VOCAB.to_draft(rows.argmax)
    token = VOCAB.to_draft(labels)
    weights = torch.zeros(len(POSITIONS))
    for block in blocks:
        refused = next((i for i, j in enumerate(block) if not agrees[j]), len(block))
        for i, j in enumerate(block):
            if config.weights.scheme is WeightScheme.decay:
                weights[j] += 0.8**i
            elif config.weights.scheme is WeightScheme.first_rejection:
                weights[j] += 0.8 ** max(0, i - refused)
            else:
                probs = [
                    0.1 + 0.9 * float(logits[b].detach().softmax(-1)[token[b]]) * (token[b] >= 0)
                    for b in block
                ]
                reached = list(itertools.accumulate(probs, lambda a, b: a * b))
                weights[j] += float(sum(reached[i:]))
    loss = LOSSES[config.name](Comparison(logits, log_probs), token, config)
    return (loss * mean_one(weights)).sum()


CONFIGS = [
    LossConfig(name=name, chunk_tokens=7, weights=WeightsConfig(scheme=scheme, block_tokens=3))
    for name, scheme in [
        (LossName.lk_hybrid, WeightScheme.decay),
        (LossName.lk_hybrid, WeightScheme.first_rejection),
        (LossName.forward_kl, WeightScheme.d_pace),
        (LossName.hard_labels, WeightScheme.first_rejection),
        (LossName.expected_length, WeightScheme.uniform),
    ]
]


@pytest.mark.parametrize("trained_head", [False, True], ids=["frozen head", "trained head"])
@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.name.value} {c.weights.scheme.value}"
)
def test_chunked_and_weighted_equals_written_out(config, trained_head):
    case = draft, target, rows, labels = head_case()
    grads = []
    values = []
    for chunked in (True, False):
        states = draft.clone().requires_grad_()
        head = target.kept_weight.clone().requires_grad_(trained_head)
        if chunked:
            weigh = weigh_texts(config, POSITIONS)
            loss = head_loss(states, head, target, rows, labels, config, weigh=weigh).loss
        else:
            loss = written_out(states, head, case, config)
        (loss / len(draft)).backward()
        values.append(loss.detach())
        grads.append([states.grad, head.grad if trained_head else torch.zeros(1)])
    torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


DRAFTED = 3  # steps
STEP_CONFIGS = [
    LossConfig(name=name, chunk_tokens=7, weights=WeightsConfig(scheme=scheme, decay=0.8))
    for name, scheme in [
        (LossName.lk_hybrid, WeightScheme.uniform),
        (LossName.lk_hybrid, WeightScheme.decay),
        (LossName.lk_hybrid, WeightScheme.first_rejection),
        (LossName.forward_kl, WeightScheme.d_pace),
        (LossName.expected_length, WeightScheme.uniform),
    ]
]


def drafts_written_out(steps, head, case, config):
    """The loss of drafts of three tokens, by loops over the drafts that begin behind a prompt."""
    _, target, rows, labels = case
    log_probs = (rows.hidden @ target._full.T).log_softmax(-1)[:, VOCAB.token_ids]
    token, wanted = VOCAB.to_draft(labels), VOCAB.to_draft(rows.argmax)
    logits = [states @ head.T for states in steps]
    alphas = [overlap(one, log_probs) for one in logits]
    losses = [LOSSES[config.name](Comparison(one, log_probs), token, config) for one in logits]
    if config.weights.scheme is WeightScheme.uniform and config.name is LossName.lk_hybrid:
        shares = torch.tensor([0.5**k for k in range(DRAFTED)])  # of the decay that is given
        return sum(w * one.sum() for w, one in zip(shares / shares.sum(), losses, strict=True))
    value, weights = 0.0, torch.zeros(DRAFTED, len(POSITIONS))
    for i in range(len(POSITIONS)):
        draft = [
            (k, i + k)
            for k in range(DRAFTED)
            if i + k < len(POSITIONS) and POSITIONS[i + k] - POSITIONS[i] == k
        ]
        reached = list(itertools.accumulate((alphas[k][j] for k, j in draft), lambda a, b: a * b))
        value += 1 - sum(reached) / len(draft)
        agrees = [bool(logits[k][j].argmax() == wanted[j]) for k, j in draft]
        refused = next((k for k, right in enumerate(agrees) if not right), len(draft))
        probs = [
            0.1 + 0.9 * float(logits[k][j].detach().softmax(-1)[token[j]]) * (token[j] >= 0)
            for k, j in draft
        ]
        kept = list(itertools.accumulate(probs, lambda a, b: a * b))
        for k, j in draft:
            weights[k, j] = {
                WeightScheme.decay: 0.8**k,
                WeightScheme.first_rejection: 0.8 ** max(0, k - refused),
                WeightScheme.d_pace: float(sum(kept[k:])),
                WeightScheme.uniform: 0.0,
            }[config.weights.scheme]
    if config.name is LossName.expected_length:
        return value
    weights *= len(POSITIONS) / weights.sum()
    return sum((weights[k] * losses[k]).sum() for k in range(DRAFTED))


@pytest.mark.parametrize("trained_head", [False, True], ids=["frozen head", "trained head"])
@pytest.mark.parametrize(
    "config", STEP_CONFIGS, ids=lambda c: f"{c.name.value} {c.weights.scheme.value}"
)
def test_drafts_weighted_by_what_they_would_be_kept_for_equal_loops_over_them(config, trained_head):
    case = draft, target, rows, labels = head_case()
    batch = Batch([], torch.zeros(1, 41), POSITIONS, labels, [], rows)
    noise = torch.Generator().manual_seed(1)
    steps = [draft + k * torch.randn(draft.shape, generator=noise) for k in range(DRAFTED)]
    values, grads = [], []
    for ours in (True, False):
        states = [one.clone().requires_grad_() for one in steps]
        head = target.kept_weight.clone().requires_grad_(trained_head)
        if ours:
            loss = drafted_terms(states, head, target, batch, config, decay=0.5).loss_sum
        else:
            loss = drafts_written_out(states, head, case, config)
        (loss / len(draft)).backward()
        values.append(loss.detach())
        grads.append([one.grad for one in states] + ([head.grad] if trained_head else []))
    torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=1e-5)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_uniform_positions_need_no_weights():
    assert weigh_texts(LossConfig(), POSITIONS) is None


def test_a_certain_drafter_has_no_expected_length_to_gain():
    _, target, rows, labels = head_case()
    config = LossConfig(name=LossName.expected_length)
    full = TargetHead(target._full, DraftVocab(torch.arange(40), 40))
    weigh = weigh_texts(config, POSITIONS)
    sums = head_loss(rows.hidden, full.kept_weight, full, rows, labels, config, weigh=weigh)
    assert sums.loss.item() == pytest.approx(0.0, abs=1e-3)


def test_the_positions_furthest_behind_the_reference_are_learnt_from():
    reference, draft = torch.tensor([0.9, 0.5, 0.8, 0.2]), torch.tensor([0.8, 0.1, 0.2, 0.6])
    assert learnable(reference, draft, 0.5).tolist() == [0.0, 1.0, 1.0, 0.0]
    assert learnable(reference, draft, 0.01).sum() == 1
    config = LossConfig(selection=SelectionConfig(share=0.5, reference="folder"))
    weigh = weigh_texts(config, torch.arange(4), reference_overlap=reference)
    weighed = weigh(PerPosition(torch.ones(4, dtype=torch.bool), draft, torch.zeros(4)))
    assert weighed.weights.tolist() == [0.0, 2.0, 2.0, 0.0]


def test_positions_that_are_left_out_move_nothing():
    draft, target, rows, labels = head_case()
    config = LossConfig(selection=SelectionConfig(share=0.25, reference="folder"))
    reference = position_overlaps(rows.hidden, target.kept_weight, target, rows, config)
    states = draft.clone().requires_grad_()
    weigh = weigh_texts(config, POSITIONS, reference_overlap=reference)
    head_loss(states, target.kept_weight, target, rows, labels, config, weigh=weigh).loss.backward()
    assert int(states.grad.abs().sum(-1).gt(0).sum()) == round(0.25 * len(POSITIONS))


def test_blocks_and_batch_positions_agree_on_where_texts_end():
    blocks = BlocksOfText(POSITIONS, 4)
    ends = (~blocks.valid[:, 1]).nonzero().flatten().tolist()
    assert ends == [16, 31]


@pytest.mark.parametrize("settings", [{"share": 0.0}, {"share": 0.5}, {"reference": "folder"}])
def test_a_selection_without_its_other_half_is_refused(settings):
    with pytest.raises(ValueError, match=r"loss\.selection\.share"):
        SelectionConfig(**settings)
