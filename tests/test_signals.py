"""Signals: every form of what the target says gives the loss and gradient that the target gives.

Exactly (1e-5) for hidden states, within the stated bracket for a top-k, without bias for draws; each
statement with something that must fail it.
"""

import math
from collections import Counter

import pytest
import torch

from distill.batches import BatchStream, Example
from distill.chunked_head import head_loss
from distill.comparison import Comparison
from distill.draft_vocab import DraftVocab, full_vocab
from distill.live_signals import (
    LiveSignals,
    groups_of,
    lengths_of,
    states_suffice,
    with_live_states,
)
from distill.losses import LOSSES, LossConfig, LossName
from distill.signal_forms import SignalForm, SignalsConfig, require_form
from distill.signals import NoSignal, TargetHead, TargetRows, head_rows
from distill.sparse_signals import SparseComparison, SparseRows, sparse_rows
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target
from tests.conftest import VOCAB_SIZE, tiny_llama

POSITIONS = 60
NUM_DRAWS = 200
REDUCED = DraftVocab(torch.arange(0, VOCAB_SIZE, 2), VOCAB_SIZE)
VOCABS = pytest.mark.parametrize(
    "vocab", [full_vocab(VOCAB_SIZE), REDUCED], ids=["full", "reduced"]
)
OVERLAP_LOSSES = (LossName.total_variation, LossName.neg_log_overlap, LossName.expected_length)


@pytest.fixture(scope="module")
def model():
    return HFModel(tiny_llama(5))


@pytest.fixture(scope="module")
def target(model):
    return Target(model=model, fingerprint="f", eos_token_ids=(2,))


@pytest.fixture(scope="module")
def states(model):
    """[N, D] post-norm states of a text that the target reads."""
    noise = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB_SIZE, (4, POSITIONS // 4), generator=noise)
    output = model.forward(ids, model.new_cache(4, ids.shape[1]), hidden_layers=(-1,))
    return output.hidden[-1].flatten(0, 1)


def sparse(model, states, *, top_k=8, draws=40, first_seed=0, real=VOCAB_SIZE):
    return sparse_rows(
        model,
        states,
        real_vocab_size=real,
        top_k=top_k,
        num_draws=draws,
        seeds=range(first_seed, first_seed + len(states)),
        dtype=torch.float32,
    )


def draft_logits(vocab, seed=1, dtype=torch.float32):
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(POSITIONS, len(vocab), generator=noise, dtype=dtype)


def log_probs(model, states, vocab):
    return model.logits_of(states).log_softmax(-1)[:, vocab.token_ids]


def examples(count=9):
    noise = torch.Generator().manual_seed(3)
    return [
        Example(
            f"a{i}", torch.randint(3, VOCAB_SIZE, (7 + i % 4,), generator=noise), 3, NoSignal(4)
        )
        for i in range(count)
    ]


def test_the_sparse_form_keeps_what_the_target_says(model, states):
    rows = sparse(model, states)
    exact = model.logits_of(states).log_softmax(-1)
    top = exact.topk(8, -1)
    torch.testing.assert_close(rows.top_log_probs, top.values)
    assert rows.top_ids.long().equal(top.indices)
    assert rows.argmax.equal(exact.argmax(-1))
    torch.testing.assert_close(rows.entropy, -(exact.exp() * exact).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows.log_sum_exp, model.logits_of(states).logsumexp(-1))
    assert rows.top_ids.dtype == torch.uint16  # two bytes are enough for 64 tokens
    assert rows.draws.shape == (POSITIONS, 40)


def test_padding_of_the_vocabulary_is_neither_kept_nor_drawn(model, states):
    real = VOCAB_SIZE - 20
    rows = sparse(model, states, real=real, draws=200)
    assert int(rows.top_ids.long().max()) < real
    assert int(rows.draws.long().max()) < real
    kept = sparse(model, states, real=real, top_k=VOCAB_SIZE)
    torch.testing.assert_close(kept.top_log_probs.exp().sum(-1), torch.ones(POSITIONS))


@VOCABS
def test_gradients_of_the_sparse_form_agree_with_finite_differences(model, states, vocab):
    rows = sparse(model, states[:5], top_k=6, draws=9)

    def measures(logits):
        compared = SparseComparison(logits, rows, vocab)
        return compared.kl, compared.overlap

    logits = draft_logits(vocab, dtype=torch.float64)[:5].requires_grad_()
    assert torch.autograd.gradcheck(measures, (logits,))


@VOCABS
def test_all_of_the_vocabulary_kept_is_exact(model, states, vocab):
    rows = sparse(model, states, top_k=VOCAB_SIZE)
    dense = Comparison(draft_logits(vocab), log_probs(model, states, vocab))
    found = SparseComparison(draft_logits(vocab), rows, vocab)
    torch.testing.assert_close(found.overlap, dense.overlap, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.mass, dense.mass, rtol=1e-5, atol=1e-6)
    assert float(found.slack.max()) < 1e-5


@VOCABS
@pytest.mark.parametrize("top_k", [1, 4, 16])
def test_the_overlap_lies_in_the_bracket_that_a_top_k_leaves(model, states, vocab, top_k):
    logits = 3 * draft_logits(vocab)
    exact = Comparison(logits, log_probs(model, states, vocab)).overlap
    rows = sparse(model, states, top_k=top_k)

    def is_bracketed(rows):
        found = SparseComparison(logits, rows, vocab)
        above = exact - found.overlap
        return bool((above > -1e-5).all() and (above < found.slack + 1e-5).all())

    assert is_bracketed(rows)
    if top_k == 16:  # fewer leave so wide a bracket that other tokens fit as well
        assert not is_bracketed(SparseRows(**{**vars(rows), "top_ids": rows.top_ids.roll(7, 0)}))


@VOCABS
@pytest.mark.parametrize("name", OVERLAP_LOSSES)
def test_a_loss_on_the_overlap_lies_in_its_bracket(model, states, vocab, name):
    head = TargetHead.of(model.module, vocab)
    hidden = torch.randn(POSITIONS, 32, generator=torch.Generator().manual_seed(7))
    labels = torch.zeros(POSITIONS, dtype=torch.int64)
    config = LossConfig(name=name, chunk_tokens=17)
    exact = head_rows(model, states, real_vocab_size=VOCAB_SIZE)
    full = head_loss(hidden, head.kept_weight, head, exact, labels, config)
    part = head_loss(hidden, head.kept_weight, head, sparse(model, states), labels, config)
    assert full.overlap_slack is None
    assert part.overlap <= full.overlap + 1e-4 <= part.overlap + part.overlap_slack + 2e-4
    assert part.loss >= full.loss - 1e-4
    if name is LossName.total_variation:
        assert part.loss - full.loss <= part.overlap_slack + 1e-4
    assert part.agreement == full.agreement
    assert part.kept_mass < full.kept_mass


def kl_over_draws(model, states, vocab, *, changed=lambda rows: rows):
    """[NUM_DRAWS, 2]: the KL of each draw, and its gradient along the exact one; and both exactly.

    Args:
        changed: what is done to the rows before they are compared.
    """
    logits = draft_logits(vocab).requires_grad_()
    exact = Comparison(logits, log_probs(model, states, vocab)).kl.sum()
    (direction,) = torch.autograd.grad(exact, logits)
    rows = changed(sparse(model, states.repeat(NUM_DRAWS, 1), draws=12))
    found = []
    for start in range(0, len(rows), POSITIONS):
        part = rows[start : start + POSITIONS]
        estimate = SparseComparison(logits, part, vocab).kl.sum()
        (gradient,) = torch.autograd.grad(estimate, logits)
        found.append(torch.stack([estimate.detach(), (gradient * direction).sum()]))
    return torch.stack(found), torch.stack([exact.detach(), direction.square().sum()])


def is_unbiased(found, expected):
    """Whether the mean lies in the 95 % interval around what is expected."""
    error = found.std(0) / math.sqrt(len(found))
    return ((found.mean(0) - expected).abs() < 1.96 * error).tolist()


def with_draws(rows, draws):
    return SparseRows(**{**vars(rows), "draws": draws})


def test_the_kl_of_draws_is_unbiased_in_value_and_gradient(model, states):
    vocab = full_vocab(VOCAB_SIZE)
    assert is_unbiased(*kl_over_draws(model, states, vocab)) == [True, True]

    def truncated(rows):
        """Drawn from the most probable tokens only: what a renormalised top-k learns from."""
        noise = torch.Generator().manual_seed(0)
        picked = torch.multinomial(rows.top_log_probs.exp(), 12, replacement=True, generator=noise)
        return with_draws(rows, rows.top_ids.long().gather(1, picked))

    found = kl_over_draws(model, states, vocab, changed=truncated)
    assert is_unbiased(*found) == [False, False]


def test_the_gradient_of_draws_is_unbiased_over_a_reduced_vocabulary(model, states):
    assert is_unbiased(*kl_over_draws(model, states, REDUCED))[1]

    def without_outside(rows):
        """Draws that the draft can not say replaced by ones that it can."""
        draws = rows.draws.long()
        return with_draws(rows, torch.where(draws % 2 == 0, draws, rows.argmax[:, None]))

    assert not is_unbiased(*kl_over_draws(model, states, REDUCED, changed=without_outside))[1]


def test_draws_follow_the_target_and_depend_on_their_seed_alone(model, states):
    one = states[:1].expand(50, -1)
    rows = sparse(model, one, draws=100)
    probs = model.logits_of(states[:1]).softmax(-1)[0]
    counts = torch.bincount(rows.draws.long().flatten(), minlength=VOCAB_SIZE)
    error = (probs * (1 - probs) * 5000).sqrt()
    assert bool(((counts - 5000 * probs).abs() < 4.5 * error + 1).all())
    again = sparse(model, states[:7], draws=100)
    assert sparse(model, states[:1], draws=100).draws.long().equal(again.draws.long()[:1])
    assert not rows.draws.long()[0].equal(rows.draws.long()[1])


@VOCABS
@pytest.mark.parametrize("name", list(LossName))
def test_stored_hidden_states_give_the_live_loss_and_gradient(target, vocab, name):
    """To 1e-5, as the head is applied to the same states; from 16 bits to their rounding (a loss
    on the overlap has a kink at p = q, so its gradient may jump there)."""
    cached = with_live_states(target, examples(), max_positions=10**6)
    stream = BatchStream(cached, max_tokens=40, seed=0)
    live = LiveSignals(BatchStream(examples(), max_tokens=40, seed=0), target)
    head = TargetHead.of(target.model.module, vocab)

    def loss_and_gradient(batch, dtype):
        rows = batch.rows
        rows = TargetRows(rows.hidden.to(dtype), rows.log_sum_exp, rows.argmax)
        noise = torch.Generator().manual_seed(11)
        hidden = torch.randn(len(rows), 32, generator=noise).requires_grad_()
        config = LossConfig(name=name, chunk_tokens=5)
        sums = head_loss(hidden, head.kept_weight, head, rows, batch.labels, config)
        (sums.loss / len(rows)).backward()
        return sums.loss.detach() / len(rows), hidden.grad

    for number in range(3):
        assert stream(number).ids == live(number).ids
        expected = loss_and_gradient(live(number), torch.float32)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
            if dtype is torch.float16 and name is LossName.tvd_plus_plus:
                continue  # its value jumps there as well
            found = loss_and_gradient(stream(number), dtype)
            kept = 1 if dtype is torch.float16 else 2
            torch.testing.assert_close(
                found[:kept], expected[:kept], rtol=tolerance, atol=tolerance
            )


@VOCABS
@pytest.mark.parametrize("name", list(LossName))
def test_states_alone_give_every_sum_that_the_whole_signal_gives_or_do_not_suffice(
    target, vocab, name
):
    config = LossConfig(name=name, chunk_tokens=5)
    suffice = states_suffice(target, vocab, config)
    assert suffice == (len(vocab) == VOCAB_SIZE and name is not LossName.hard_labels)
    if not suffice:
        return
    head = TargetHead.of(target.model.module, vocab)
    stream = BatchStream(examples(), max_tokens=40, seed=0)
    found = []
    for states_only in (False, True):
        batch = LiveSignals(stream, target, states_only=states_only)(0)
        hidden = (batch.rows.hidden * 0.9).requires_grad_()
        sums = head_loss(hidden, head.kept_weight, head, batch.rows, batch.labels, config)
        sums.loss.backward()
        assert sums.agreement == len(batch.rows)  # the same first choices, less surely
        found.append([hidden.grad, *(one for one in sums if one is not None)])
    torch.testing.assert_close(found[0], found[1])


def test_the_live_target_is_in_eval_mode_without_gradient_and_outside_of_the_drafter():
    """Case G6: dropout in the configuration, and a trainer that puts modules in train mode."""
    module = tiny_llama(6)
    module.config.attention_dropout = 0.5
    module.train()
    live = LiveSignals(
        BatchStream(examples(), max_tokens=40, seed=0), Target(model=HFModel(module))
    )
    first, second = live(0).target_states, live(0).target_states
    assert first.equal(second)
    assert not first.requires_grad
    assert module.training
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("change", [{"final_logit_softcapping": 30.0}, {"logit_scale": 0.06}])
def test_a_head_whose_logits_are_changed_behind_it_is_refused(change):
    module = tiny_llama(6)
    module.config.update({"logit_scale": 1.0, "final_logit_softcapping": None})
    TargetHead.of(module, full_vocab(VOCAB_SIZE))
    module.config.update(change)
    with pytest.raises(ValueError, match=f"changes its logits .{next(iter(change))}="):
        TargetHead.of(module, full_vocab(VOCAB_SIZE))


def test_a_batch_is_read_up_to_its_last_loss_position_and_grouped_within_its_tokens():
    batch = BatchStream(examples(), max_tokens=1000, seed=0)(0)
    width = batch.token_ids.shape[1]
    for row, length in enumerate(lengths_of(batch).tolist()):
        own = batch.positions[batch.positions // width == row] % width
        assert length == int(own.max()) + 1
    groups = groups_of(examples(), 25)
    assert [e.id for group in groups for e in group] == [e.id for e in examples()]
    assert all(len(g) * max(len(e.token_ids) for e in g) <= 25 for g in groups)
    assert [len(group) for group in groups_of(examples(3), 1)] == [1, 1, 1]


def test_answers_without_a_signal_say_what_to_do():
    batch = BatchStream(examples(), max_tokens=40, seed=0)(0)
    with pytest.raises(ValueError, match=r"no target signal: .*python -m distill.cache"):
        _ = batch.rows.argmax
    with pytest.raises(ValueError, match="hidden states are needed here"):
        _ = batch.target_states


@pytest.mark.parametrize(
    ("loss", "signals", "message"),
    [
        ({"name": LossName.reverse_kl}, {}, "loss.name=reverse_kl with signals.form=sparse"),
        ({"name": LossName.jsd}, {}, "loss.name=jsd with signals.form=sparse"),
        ({"name": LossName.jsd, "beta": 1.0}, {}, "loss.name=jsd with signals.form=sparse"),
        ({"temperature": 2.0}, {}, "loss.temperature=2.0 with signals.form=sparse"),
        ({"name": LossName.forward_kl}, {"draws": 0}, "needs signals.draws above 0: it is biased"),
        ({"name": LossName.lk_hybrid}, {"top_k": 0}, "needs signals.top_k above 0: it is biased"),
        ({"name": LossName.total_variation}, {"top_k": 0}, "needs signals.top_k above 0"),
    ],
)
def test_a_loss_that_a_form_would_bias_is_refused_with_the_reason(loss, signals, message):
    config = SignalsConfig(form=SignalForm.sparse, **signals)
    with pytest.raises(ValueError, match=message):
        require_form(config, LossConfig(**loss))
    for form in (SignalForm.hidden, SignalForm.live):
        require_form(SignalsConfig(form=form), LossConfig(**loss))


def test_every_loss_that_is_let_through_runs_on_the_sparse_form(model, states):
    """And no other one does: the table of what a loss needs is the truth."""
    refused = Counter()
    rows, vocab = sparse(model, states), full_vocab(VOCAB_SIZE)
    for name in LossName:
        config = LossConfig(name=name)
        compared = SparseComparison(draft_logits(vocab), rows, vocab)
        try:
            require_form(SignalsConfig(form=SignalForm.sparse), config)
        except ValueError:
            refused[name] += 1
            with pytest.raises(AttributeError):
                LOSSES[name](compared, rows.argmax, config)
        else:
            assert LOSSES[name](compared, rows.argmax, config).isfinite().all()
    assert set(refused) == {LossName.reverse_kl, LossName.jsd, LossName.tvd_plus_plus}


@pytest.mark.parametrize("setting", [{"top_k": -1}, {"draws": -1}])
def test_a_signal_setting_out_of_range_is_named_by_its_path(setting):
    with pytest.raises(ValueError, match=f"signals.{next(iter(setting))} must be 0 or more"):
        SignalsConfig(**setting)
    with pytest.raises(ValueError, match="keeps nothing"):
        SignalsConfig(form=SignalForm.sparse, top_k=0, draws=0)
