"""A reduced vocabulary at full size: absent tokens cannot win, whatever the hidden state."""

import torch

from tests.conftest import tiny_llama
from train.export.full_vocab import absent_row, fill_vocabulary, full_rows

SIZE, WIDTH, KEPT = 200, 16, 40


def kept_rows(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # A common component, as in real heads: all kept logits can be negative at once.
    return torch.randn(KEPT, WIDTH, generator=generator) + 2.0


def largest_lead(row: torch.Tensor, kept: torch.Tensor, *, steps: int = 120) -> float:
    """How far `row` can get above the best kept row, over unit hidden states: gradient ascent."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(64, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([hidden], lr=0.05)
    for _ in range(steps):
        unit = hidden / hidden.norm(dim=-1, keepdim=True)
        lead = unit @ row.double() - (unit @ kept.double().T).amax(-1)
        optimizer.zero_grad()
        (-lead.sum()).backward()
        optimizer.step()
    return float(lead.detach().max())


def test_no_hidden_state_lets_an_absent_token_win():
    kept = kept_rows()
    text = torch.randn(30, WIDTH, generator=torch.Generator().manual_seed(2))
    assert largest_lead(absent_row(kept, text), kept) < 0


def test_zero_rows_and_foreign_rows_do_win_somewhere():
    """The negative control: the search finds a winning state where one exists."""
    kept = kept_rows()
    assert largest_lead(torch.zeros(WIDTH), kept) > 0.1
    foreign = torch.randn(WIDTH, generator=torch.Generator().manual_seed(3)) * 3
    assert largest_lead(foreign, kept) > 0.1


def test_kept_rows_stay_where_they_were():
    kept, ids = kept_rows(), torch.arange(0, SIZE, SIZE // KEPT)[:KEPT]
    rows = full_rows(kept, ids, SIZE, kept.mean(0))
    assert torch.equal(rows[ids], kept)
    assert rows.shape == (SIZE, WIDTH)


def test_a_tied_model_gets_a_head_of_its_own_and_its_other_outputs_stay():
    module = tiny_llama(0)
    module.config.tie_word_embeddings = True
    module.lm_head.weight = module.model.embed_tokens.weight
    text = torch.arange(3, 40)[None]
    kept = torch.arange(1, 64, 2)
    before = module(text).logits[0][:, kept]
    fill_vocabulary(module, token_ids=kept, size=70, text_ids=text)
    after = module(text).logits[0]
    assert after.shape[-1] == module.config.vocab_size == 70
    assert not module.config.tie_word_embeddings
    assert torch.allclose(after[:, kept], before)
    assert torch.equal(after.argmax(-1), kept[before.argmax(-1)])


def test_the_same_vocabulary_changes_nothing():
    module = tiny_llama(0)
    head = module.lm_head
    fill_vocabulary(module, token_ids=None, size=64, text_ids=torch.arange(9)[None])
    assert module.lm_head is head
