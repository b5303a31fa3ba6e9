"""Rounds of several decoders in turns: the same minute of the machine for all of them.

A machine's speed drifts by more than what a drafter costs. So decoders go on side by side, one
round each in turn, and what a part of a round takes is compared with what the target's own pass took
next to it. The caches hold what they hold in serving too: between two drafts lies a pass that reads
the whole target.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace

from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.results import Generation, Round


def rounds_in_turns(
    decoders: Sequence[SpeculativeDecoder],
    prompts: Sequence[Sequence[int]],
    *,
    num_rounds: int,
    temperature: float = 0.0,
) -> list[list[Round]]:
    """Up to `num_rounds` rounds of each decoder behind the prompts, not ended by an end token.

    Fewer where the target's positions end.
    """
    longest = max(map(len, prompts))
    under_way = []
    for decoder in decoders:
        room = decoder.target.model.max_positions - longest
        setting = decoder.plan.measured(len(prompts), is_sampled=temperature > 0)
        decoding = decoder._begin(
            prompts,
            max_new_tokens=min(2 + num_rounds * (setting.most + 1), room),
            eos_token_id=(),
            temperature=temperature,
            seed=0,
        )
        decoding.prefill()
        under_way.append(decoding)
    for _ in range(num_rounds):
        for decoding in under_way:
            if decoding.active:
                decoding.round()
    return [decoding.rounds for decoding in under_way]


def in_steps(
    decoder: SpeculativeDecoder, prompt: Sequence[int], *, max_new_tokens: int
) -> Generator[int, None, Generation]:
    """Greedy decoding that others may take turns with: it stops behind the prefill and every round.

    Yields the number of tokens so far. The generation's seconds are those of the steps alone.
    """
    decoding = decoder._begin([prompt], max_new_tokens=max_new_tokens)
    decoding.prefill()
    row = decoding.rows[0]
    yield len(row.tokens) - row.prompt_length
    while decoding.active:
        decoding.round()
        yield len(row.tokens) - row.prompt_length
    rounds = sum(one.draft_s + one.verify_s + one.other_s for one in decoding.rounds)
    return replace(decoding.result(), seconds=decoding.prefill_s + rounds)
