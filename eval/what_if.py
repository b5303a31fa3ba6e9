"""What would help: the best predicted speedup if one thing changed, and what that takes for granted.

Everything comes from measured acceptance and costs. Another shape of the drafter is charged by the
weights that it reads, compiled passes by the time it takes to read their weights once at the
memory bandwidth measured here. Acceptance is taken to stay as it is, so that a smaller drafter is
promised the most that it could bring. The draft length may always change with the circumstances.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from eval.cost_model import (
    RoundCosts,
    best_length,
    expected_acceptance_length,
    predicted_speedup,
)
from eval.identity import engine_of
from eval.results import CostResult, PassWeights, ReplayedLength, WhatIf
from specdec_runtime.draft import Drafter
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.composite import CompositeDrafter
from specdec_runtime.model import CausalModel
from specdec_runtime.native.weights import head_dim

FEWER_REJECTIONS = 0.2  # what a longer training may bring: one rejection in five avoided
SMALL_VOCABULARY = 8192  # rows of a reduced head; of one that is smaller already: half of it
LLAMA_FAMILY = ("llama", "mistral", "qwen2", "qwen3")  # whose weights are counted here
AS_MEASURED = "as measured"
COPIED_BYTES, NUM_COPIES = 2**27, 4  # larger than any cache

Lengths = Mapping[int, ReplayedLength]
Value = Callable[[ReplayedLength], float]


def memory_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes; the best of a few."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    best = float("inf")
    for _ in range(NUM_COPIES):
        started = time.perf_counter()
        copy.copy_(source)
        copy[-1].item()  # waits for the device
        best = min(best, time.perf_counter() - started)
    return 2 * COPIED_BYTES / best


def pass_weights(model: CausalModel, bandwidth: float) -> PassWeights | None:
    """What a pass of a dense decoder of the Llama family reads; None for others.

    Args:
        bandwidth: bytes a second, from `memory_bandwidth`.
    """
    config = model.config
    if config.model_type not in LLAMA_FAMILY:
        return None
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads)  # q and output, k and v
    attention = config.hidden_size * head_dim(config) * heads
    mlp = 3 * config.hidden_size * config.intermediate_size
    layers, head = model.num_layers * (attention + mlp), model.vocab_size * config.hidden_size
    is_eager = engine_of(model) == "eager"
    return PassWeights(
        num_layers=model.num_layers,
        layer_weights=layers,
        head_rows=model.vocab_size,
        head_weights=head,
        read_s=(layers + head) * model.dtype.itemsize / bandwidth if is_eager else None,
    )


def draft_weights(drafter: Drafter, bandwidth: float) -> PassWeights | None:
    """Of the model that a drafter decodes with, if it is one of its own."""
    if isinstance(drafter, CompositeDrafter):
        return draft_weights(drafter.model, bandwidth)
    return pass_weights(drafter.model, bandwidth) if isinstance(drafter, CausalLMDrafter) else None


def what_if(lengths: Lengths, measured: CostResult) -> list[WhatIf]:
    """The best predicted speedup as things are, and if one thing changed."""
    costs = measured.costs
    flat = replace(costs, verify=(1.0,) * len(costs.verify))
    quiet = replace(costs, overhead=min(costs.overhead, costs.plain_overhead))
    half = replace(costs, draft_cost=costs.draft_cost / 2)
    fewer = _best(lengths, costs, fewer_rejections(lengths))
    perfect = best_length({k: predicted_speedup(k + 1.0, costs, {k: 1}) for k in lengths}).speedup
    same = "acceptance stays as it is"
    return [
        WhatIf(AS_MEASURED, _best(lengths, costs), "the measured acceptance and costs"),
        WhatIf("half the drafting time", _best(lengths, half), f"c halves, {same}"),
        *_smaller(lengths, measured),
        WhatIf("a fifth fewer rejections", fewer, "every position closes a fifth of its gap to 1"),
        WhatIf("verification at the cost of one token", _best(lengths, flat), f"v(K) = 1, {same}"),
        WhatIf(
            "nothing spent outside model passes",
            _best(lengths, quiet),
            f"o falls to the overhead of plain decoding, {same}",
        ),
        WhatIf("a perfect drafter at this cost", perfect, "every drafted token is kept"),
    ]


def fewer_rejections(lengths: Lengths) -> Value:
    """Acceptance length at each K if every conditional acceptance lost a fifth of its gap to 1.

    The conditional rates are those of successive lengths: P(k kept) = L(k) - L(k - 1).
    """
    survival = [1.0]
    improved = [1.0]
    for k in sorted(lengths):
        before = value_of(lengths[k - 1]) if k - 1 in lengths else 1.0
        survival.append(max(value_of(lengths[k]) - before, 0.0))
        rate = survival[-1] / survival[-2] if survival[-2] > 0 else 0.0
        rate = min(rate, 1.0)
        improved.append(improved[-1] * (rate + FEWER_REJECTIONS * (1.0 - rate)))
    return lambda length: expected_acceptance_length(improved[1 : length.num_draft_tokens + 1])


def value_of(length: ReplayedLength) -> float:
    """The acceptance length of a replayed draft length."""
    assert length.acceptance_length.value is not None, "a replay holds at least one round"
    return length.acceptance_length.value


def _smaller(lengths: Lengths, measured: CostResult) -> list[WhatIf]:
    """Other shapes of the drafter, and both models compiled; empty where weights are not known."""
    target, draft = measured.target_weights, measured.draft_weights
    if draft is None:
        return []

    def with_weights(weights: float) -> float:
        draft_cost = measured.costs.draft_cost * weights / draft.weights
        return _best(lengths, replace(measured.costs, draft_cost=draft_cost))

    found = []
    if draft.num_layers > 1:
        fewer = draft.num_layers // 2
        kept = draft.layer_weights * fewer / draft.num_layers
        found.append(
            WhatIf(
                f"half the drafter's layers ({fewer})",
                with_weights(kept + draft.head_weights),
                "c shrinks with the weights read; fewer layers accept less: an upper bound",
            )
        )
    rows = SMALL_VOCABULARY if draft.head_rows > 2 * SMALL_VOCABULARY else draft.head_rows // 2
    found.append(
        WhatIf(
            f"a draft vocabulary of {rows:,} tokens",
            with_weights(draft.layer_weights + draft.head_weights * rows / draft.head_rows),
            "c shrinks with the weights read; tokens left out are never accepted: an upper bound",
        )
    )
    if target is not None and target.read_s is not None and draft.read_s is not None:
        costs = _compiled(measured, target.read_s, draft.read_s)
        found.append(
            WhatIf(
                "both models compiled",
                _best(lengths, costs),
                "a pass takes as long as reading its weights once, plain decoding's too",
            )
        )
    return found


def _compiled(measured: CostResult, target_read_s: float, draft_read_s: float) -> RoundCosts:
    """Costs in units of the faster pass over one token; what more tokens cost stays."""
    costs = measured.costs
    target_s = min(target_read_s, costs.target_s)
    saved, scale = costs.target_s - target_s, costs.target_s / target_s
    return RoundCosts(
        target_s=target_s,
        verify=tuple((v * costs.target_s - saved) / target_s for v in costs.verify),
        draft_cost=min(draft_read_s, measured.draft_token_s) / target_s,
        overhead=costs.overhead * scale,
        plain_overhead=costs.plain_overhead * scale,
    )


def _best(lengths: Lengths, costs: RoundCosts, value: Value = value_of) -> float:
    speedups = {
        k: predicted_speedup(value(length), costs, length.rounds_by_drafted)
        for k, length in lengths.items()
    }
    return best_length(speedups).speedup
