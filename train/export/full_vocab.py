"""A head over the target's whole vocabulary that proposes what the reduced one proposes.

An engine that takes a plain model as its drafter wants as many logits as the target has, and a head
without bias cannot switch a token off. Two ways that come to mind are wrong: the target's own rows can
win, and zero rows win wherever every kept logit is negative.

A row w never beats the kept rows, whatever the hidden state h, exactly if it lies in their convex
hull: inside, w.h is a weighted mean of kept logits, which is at most the largest of them; outside, a
plane separates w from the hull and its normal is an h for which w wins (separating hyperplane
theorem). So every absent token gets a mean of kept rows. Which ones decides only about the
probability that the absent tokens take from the others when tokens are drawn: the mean of *all* rows took 8 %
from a real drafter, the mean of those that are least likely on real text less than 0.1 %.

A mean of several rows ties with the largest logit only if all of those rows have it; rounding to
the stored dtype moves a logit by at most 2^-9 (bfloat16) of the sum of |w_i h_i|, which `check`'s
parity run covers.

Shapes: n kept tokens, V tokens of the target, D hidden size, N positions.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# Enough that their mean cannot tie with one row that happens to win, few enough to be unlikely.
NUM_LEAST_LIKELY = 16


def absent_row(kept: Tensor, hidden: Tensor) -> Tensor:
    """[D] the row of every absent token: a mean of the kept rows [n, D] least likely at [N, D].

    A bias can be passed as one more column of `kept` with ones in `hidden`.
    """
    mean_logits = kept.double() @ hidden.double().mean(0)
    least = mean_logits.argsort()[:NUM_LEAST_LIKELY]
    return kept[least].double().mean(0).to(kept.dtype)


def full_rows(kept: Tensor, token_ids: Tensor, size: int, filler: Tensor) -> Tensor:
    """[V, D] with the kept rows at `token_ids` and `filler` everywhere else."""
    rows = filler.repeat(size, 1)
    rows[token_ids] = kept
    return rows


@torch.no_grad()
def fill_vocabulary(
    module: PreTrainedModel, *, token_ids: Tensor | None, size: int, text_ids: Tensor
) -> None:
    """Give `module` a vocabulary of `size` in which only `token_ids` can be proposed; in place.

    Embeddings are padded, or cut, to `size`; padded ones belong to ids that no tokenizer makes. The
    head is untied where its rows now differ from the embeddings.

    Args:
        token_ids: [n] int64, the rows of its head that count; None = all that it has.
        text_ids: [1, N] any text of the drafter's kind.
    """
    head, embeddings = module.get_output_embeddings(), module.get_input_embeddings()
    assert isinstance(head, nn.Linear)
    assert isinstance(embeddings, nn.Embedding)
    rows = head.weight.shape[0]
    if token_ids is None and rows == size:
        return
    token_ids = torch.arange(min(rows, size)) if token_ids is None else token_ids
    hidden = module.base_model(text_ids).last_hidden_state[0]
    new_head = _new_head(head, token_ids, size, hidden)
    old = embeddings.weight[:size]
    filler = old.double().mean(0, keepdim=True).to(old.dtype)
    padded = torch.cat([old, filler.expand(size - len(old), -1)])
    module.set_input_embeddings(_embedding(padded))
    module.set_output_embeddings(new_head)
    text_config = module.config.get_text_config()
    text_config.vocab_size = module.config.vocab_size = size
    text_config.tie_word_embeddings = module.config.tie_word_embeddings = False


def _new_head(head: nn.Linear, token_ids: Tensor, size: int, hidden: Tensor) -> nn.Linear:
    kept = head.weight[token_ids]
    if head.bias is not None:
        kept = torch.cat([kept, head.bias[token_ids, None]], dim=1)
        hidden = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], dim=1)
    rows = full_rows(kept, token_ids, size, absent_row(kept, hidden))
    new = nn.Linear(head.in_features, size, bias=head.bias is not None, dtype=head.weight.dtype)
    if head.bias is not None:
        new.bias = nn.Parameter(rows[:, -1].clone())
    new.weight = nn.Parameter(rows[:, : head.in_features].clone())
    return new


def _embedding(weight: Tensor) -> nn.Embedding:
    return nn.Embedding.from_pretrained(weight.clone(), freeze=True)
