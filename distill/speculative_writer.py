"""Answers written with a drafter's help: the runtime's own loop in the place of writer.py.

Worth it where a pass over few tokens costs about as much as one over a single token, which on most
machines means small batches: measure before choosing it (benchmarks/answers.py does). Greedy text is
the plain text; sampled text has the same distribution and other noise, so it is other text, and the
drafter is part of the answers' fingerprint. The batch is not refilled: its rows end together.

The target's signal is read afterwards, in one pass over each batch of finished texts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from distill.batches import Example, collate
from distill.live_signals import lengths_of
from distill.signals import NoSignal, TargetRows, live_rows, split_rows
from distill.writer import Request, Text
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.draft import Drafter
from specdec_runtime.target import Target


@dataclass(frozen=True)
class SpeculativeWriter:
    """Writes texts with one target and one drafter.

    Attributes:
        batch_size: rows written at once.
        max_new_tokens: of each text.
        num_draft_tokens: drafted a round.
        top_p: of the rows that sample; 1 keeps all tokens.
        record: read the target's signal of every position.
    """

    target: Target
    drafter: Drafter
    batch_size: int
    max_new_tokens: int
    num_draft_tokens: int
    top_p: float = 1.0
    record: bool = False

    def write(self, requests: Iterable[Request], *, longest_prompt: int) -> Iterator[Text]:
        """The texts, batch by batch, in the order of the requests.

        Args:
            longest_prompt: tokens of the longest prompt.

        Raises:
            ValueError: if such a prompt leaves the target no room for a text.
        """
        decoder = SpeculativeDecoder(
            self.target, self.drafter, num_draft_tokens=self.num_draft_tokens
        )
        queue = iter(requests)
        while batch := list(islice(queue, self.batch_size)):
            generation = decoder.generate(
                [list(request.prompt_ids) for request in batch],
                max_new_tokens=self.max_new_tokens,
                temperature=[request.temperature for request in batch],
                seed=[request.seed for request in batch],
                top_p=self.top_p if self.top_p < 1.0 else None,
            )
            written = generation.token_ids
            signals = self._signals(batch, written) if self.record else []
            for place, (request, ids) in enumerate(zip(batch, written, strict=True)):
                yield Text(request, ids, signals[place] if signals else None)

    def _signals(
        self, requests: Sequence[Request], written: Sequence[list[int]]
    ) -> list[TargetRows]:
        """What the target says at each new token of some texts."""
        batch = collate(
            [
                Example(
                    str(request.key),
                    torch.tensor([*request.prompt_ids, *ids]),
                    len(request.prompt_ids),
                    NoSignal(len(ids)),
                )
                for request, ids in zip(requests, written, strict=True)
            ]
        )
        rows = live_rows(
            self.target.model,
            batch.token_ids,
            lengths_of(batch),
            batch.positions,
            real_vocab_size=self.target.real_vocab_size,
        )
        return split_rows(rows, [len(ids) for ids in written])
