"""Rows of a batch do not see each other, nor padding: nothing is packed, and packing would have to
prove the same (case F7)."""

import pytest
import torch

from distill.batches import Example, collate
from distill.objectives.causal_lm import states
from distill.signals import NoSignal
from tests.conftest import VOCAB_SIZE, tiny_llama

TOLERANCE = 1e-5  # float32 sums in another order


def examples():
    generator = torch.Generator().manual_seed(0)
    lengths = [(5, 2), (23, 9), (14, 13)]
    return [
        Example(str(length), torch.randint(3, VOCAB_SIZE, (length,), generator=generator), prompt,
                NoSignal(length - prompt))
        for length, prompt in lengths
    ]  # fmt: skip


def losses_and_gradient(module, batches):
    """([N] loss of every trained token, all gradients of their sum as one vector)."""
    module.zero_grad()
    found = []
    for batch in batches:
        logits = module.lm_head(states(module, batch))
        found.append(torch.nn.functional.cross_entropy(logits, batch.labels, reduction="none"))
    losses = torch.cat(found)
    losses.sum().backward()
    return losses.detach(), torch.cat([p.grad.flatten() for p in module.parameters()])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_row_gives_in_a_batch_the_loss_and_gradient_that_it_gives_alone(attention):
    module = tiny_llama(0)
    module.set_attn_implementation(attention)
    alone = losses_and_gradient(module, [collate([example]) for example in examples()])
    together = losses_and_gradient(module, [collate(examples())])
    torch.testing.assert_close(together[0], alone[0], rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(together[1], alone[1], rtol=TOLERANCE, atol=10 * TOLERANCE)


def test_conversations_that_share_a_row_would_not():
    module, (first, second, _) = tiny_llama(0), examples()
    joined = Example(
        "joined",
        torch.cat([first.token_ids, second.token_ids]),
        len(first.token_ids) + second.prompt_length,
        NoSignal(second.num_tokens),
    )
    alone, _ = losses_and_gradient(module, [collate([second])])
    packed, _ = losses_and_gradient(module, [collate([joined])])
    assert float((packed - alone).abs().max()) > 100 * TOLERANCE
