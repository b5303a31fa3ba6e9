"""Custom logits processors that remember: each position sees the state of plain decoding.

transformers calls a processor once a token, so it may count, accumulate or look at its last call.
Here positions are scored that are then refused, several at once, and by a drafter too. So the
processors are copied: the copies of a position continue those of the position in front of it, and
what was called for a refused token is forgotten with it. Per row the state is what a batch of
that one prompt, decoded without a drafter, has at the same tokens.

A copy is `copy.deepcopy`: what a processor shares with the outside (a global, a closure, a file) is
not copied and has to be constant.

Shapes: N positions of any rows, V vocabulary.
"""

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    ClassifierFreeGuidanceLogitsProcessor,
    LogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

# Of transformers' own, the one that remembers; the others are functions of their arguments.
_REMEMBERING = (SynthIDTextWatermarkLogitsProcessor,)
_REFUSED = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "runs a model of its own on every call",
    ClassifierFreeGuidanceLogitsProcessor: "needs a second batch without the prompt",
    PrefixConstrainedLogitsProcessor: "asks for the row of a batch, which positions do not have",
}


_KEPT_TOKENS = 256  # of each row's newest, with their states: deeper than any draft


def remembers(processor: LogitsProcessor) -> bool:
    """Whether a processor may change when it is called; of unknown ones that is assumed."""
    is_known = type(processor).__module__.startswith("transformers.")
    return not is_known or isinstance(processor, _REMEMBERING)


def check_processors(processors: Sequence[LogitsProcessor]) -> None:
    """Raise a ValueError for a processor that cannot follow drafts."""
    for processor in processors:
        for kind, reason in _REFUSED.items():
            if isinstance(processor, kind):
                raise ValueError(
                    f"logits_processors holds a {type(processor).__name__}, which {reason}: "
                    "decode with transformers' own generate"
                )
        if remembers(processor):
            _copied(processor)


class ProcessorStates:
    """The custom processors of one `generate` call, with what they remember at every position.

    Args:
        processors: as given by the user; they are copied and stay as they are.
    """

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._fresh = list(processors)
        # row -> tokens in front of a position -> the processors after the call for it
        self._after: dict[int, dict[tuple[int, ...], list[Any]]] = defaultdict(dict)

    def __call__(
        self, rows: Sequence[int], histories: Sequence[Sequence[int]], scores: Tensor
    ) -> Tensor:
        """Process positions, [N, V] -> [N, V]; those in front of others may be among them."""
        processed = torch.empty_like(scores)
        # In text order. A padded position may repeat a real one in front of it, which counts.
        called: set[tuple[int, tuple[int, ...]]] = set()
        for index in sorted(range(len(rows)), key=lambda i: len(histories[i])):
            row, tokens = rows[index], tuple(histories[index])
            known = self._after[row]
            is_first = not known or (row, tokens) in called
            assert tokens[:-1] in known or is_first, "the position in front was forgotten"
            processors = _copied(known.get(tokens[:-1], self._fresh))
            score = scores[index : index + 1]
            input_ids = torch.tensor([tokens], dtype=torch.int64, device=scores.device)
            for processor in processors:
                score = processor(input_ids, score)
            processed[index] = score[0]
            if (row, tokens) not in called:
                called.add((row, tokens))
                known[tokens] = processors
        self._forget(rows, histories)
        return processed

    def _forget(self, rows: Sequence[int], histories: Sequence[Sequence[int]]) -> None:
        """Drop what lies too far back to be the start of a draft that is under way."""
        shortest: dict[int, int] = {}
        for row, history in zip(rows, histories, strict=True):
            shortest[row] = min(len(history), shortest.get(row, len(history)))
        for row, length in shortest.items():
            known = self._after[row]
            for tokens in [tokens for tokens in known if len(tokens) < length - _KEPT_TOKENS]:
                del known[tokens]


def _copied(processors: Any) -> Any:
    try:
        return copy.deepcopy(processors)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"a logits processor cannot be copied, which following drafts takes: {error}; give it "
            "a __deepcopy__, or make it a function of its arguments"
        ) from error
