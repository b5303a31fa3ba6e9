"""Where speculation stops paying: batch sizes, measured, and context lengths, from measured costs.

Verification of K tokens for b rows is a pass over b (K + 1) tokens: it grows out of its free range
as the batch does, so every drafter has a batch size above which plain decoding is faster. With the
context only attention grows, on both sides.
"""

from collections.abc import Sequence
from statistics import median

from eval.cost_model import length_to_use, predicted_speedup
from eval.costs import measure_costs
from eval.on_request import SweepPoint
from eval.results import ReplayedLength
from eval.suites import EvalPrompt
from specdec_runtime.auto_length import time_passes
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft import Drafter
from specdec_runtime.target import Target

NUM_REPEATS = 2


def batch_sweep(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[EvalPrompt],
    *,
    name: str,
    batch_sizes: Sequence[int],
    num_draft_tokens: Sequence[int],
    max_new_tokens: int,
) -> list[SweepPoint]:
    """Tokens a second of plain and of speculative decoding, interleaved, at each batch size."""
    points = []
    for batch_size in batch_sizes:
        rows = [prompts[i % len(prompts)].token_ids for i in range(batch_size)]
        decoders = {
            length: SpeculativeDecoder(target, drafter if length else None, num_draft_tokens=length)
            for length in (0, *num_draft_tokens)
        }
        rates: dict[int, list[float]] = {length: [] for length in decoders}
        for turn in range(NUM_REPEATS + 1):
            for length, decoder in decoders.items():
                amount = max_new_tokens if turn else 4  # the first turn warms up
                generation = decoder.generate(rows, max_new_tokens=amount, eos_token_id=())
                if turn:
                    seconds = generation.seconds - generation.prefill_s
                    rates[length].append(batch_size * (amount - 1) / seconds)
        plain = median(rates[0])
        points += [
            SweepPoint(
                drafter=name,
                batch_size=batch_size,
                context_tokens=round(sum(map(len, rows)) / batch_size),
                num_draft_tokens=length,
                plain_tokens_per_s=plain,
                tokens_per_s=median(rates[length]),
                speedup=median(rates[length]) / plain,
                measured=True,
            )
            for length in num_draft_tokens
        ]
    return points


def context_sweep(
    target: Target,
    drafter: Drafter,
    text: Sequence[int],
    lengths: Sequence[ReplayedLength],
    *,
    name: str,
    context_lengths: Sequence[int],
    max_draft_tokens: int,
) -> list[SweepPoint]:
    """The best draft length and its predicted speedup behind contexts of each length.

    Args:
        text: tokens that contexts are made of, repeated as needed.
        lengths: measured acceptance by draft length, taken to hold at every context.
    """
    points: list[SweepPoint] = []
    if not any(one.num_rounds for one in lengths):
        return points
    for size in context_lengths:
        context = [text[i % len(text)] for i in range(size)]
        pass_s = time_passes(target.model, context, max_draft_tokens=max_draft_tokens)
        costs = measure_costs(
            target,
            {name: drafter},
            [context],
            max_draft_tokens=max_draft_tokens,
            pass_s=pass_s,
        )[0].costs
        speedups = {
            one.num_draft_tokens: predicted_speedup(
                one.acceptance_length.value, costs, one.rounds_by_drafted
            )
            for one in lengths
            if one.num_rounds and one.acceptance_length.value is not None
        }
        length = length_to_use(speedups)  # of a drafter that does not pay: where it loses least
        plain = 1 / (costs.target_s * (1 + costs.plain_overhead))
        points.append(
            SweepPoint(
                drafter=name,
                batch_size=1,
                context_tokens=size,
                num_draft_tokens=length,
                plain_tokens_per_s=plain,
                tokens_per_s=plain * speedups[length],
                speedup=speedups[length],
                measured=False,
            )
        )
    return points
