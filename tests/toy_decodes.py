"""The exactness kit for the whole decoder: every path through `generate`, with its probability.

The decoder under test is the real one; only its random numbers are replaced. Row r of a batch
takes path r: wherever the loop draws a token or judges a draft, the row makes the choice that its
number says, and its probability is multiplied by that choice's. How likely the outcomes of a
verification are is found by bisection, as in toy_models.py: the rule is a black box. Added up over
the rows, the probabilities are the exact law of the decoded text.

Shapes: n rows of one call, K drafted positions, V vocabulary.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specdec_runtime import verifier
from specdec_runtime.decode import SpeculativeDecoder
from specdec_runtime.noise import UniformStreams
from specdec_runtime.sampling import Sampler, SamplingSettings
from specdec_runtime.verification import Verification
from tests.toy_models import (
    Text,
    count_probs,
    next_token_probs,
    pass_thresholds,
    uniforms_for_count,
)

POSSIBLE = 1e-5  # less is float32 rounding, not a choice
BISECTIONS = 24  # leaves less than that rounding


class Paths:
    """Which choices each of `num_rows` rows makes, and how likely all of them are.

    A row's choices are the digits of its number, each in the base of what there was to choose
    from. So every path belongs to exactly one row, if there are rows enough (`law` checks it),
    and to none if digits are left over.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._digits = torch.arange(num_rows)
        self._mass = torch.ones(num_rows, dtype=torch.float64)

    def choose(self, rows: Tensor, probs: Tensor) -> Tensor:
        """The next choice of each of `rows` [n] among those of positive mass in [n, m]: [n]."""
        possible = probs > POSSIBLE
        count = possible.sum(1)
        digit = self._digits[rows] % count
        self._digits[rows] //= count
        is_chosen = possible & (possible.cumsum(1) - 1 == digit[:, None])
        choice = is_chosen.long().argmax(1)
        probs = probs.double()
        self._mass[rows] *= probs.gather(1, choice[:, None]).squeeze(1) / probs.sum(1)
        return choice

    def law(self, texts: list[list[int]]) -> dict[Text, float]:
        """Probability of every text; `texts` are those of the rows."""
        law: dict[Text, float] = defaultdict(float)
        for text, left, mass in zip(texts, self._digits.tolist(), self._mass.tolist(), strict=True):
            if left == 0:
                law[tuple(text)] += mass
        total = sum(law.values())
        assert abs(total - 1.0) < 1e-4, f"the rows hold {total} of all paths: give more rows"
        return law

    def through(self, rule: Callable, *, block: bool) -> Callable:
        """A verification rule that takes the rows' choices; its uniforms hold row numbers."""

        def verify(
            draft_ids: Tensor,
            draft_probs: Tensor | None,
            target_probs: Tensor,
            num_drafted: Tensor,
            uniforms: Tensor,
        ) -> Verification:
            rows, every = uniforms[:, -1].long(), torch.arange(len(uniforms))
            tokens = torch.nonzero(target_probs.sum((0, 1)) > 0.0).squeeze(1)  # that can follow

            def run(index: Tensor, uniforms: Tensor) -> Tensor:
                q = None if draft_probs is None else draft_probs[index]
                drafts = (draft_ids[index], q, target_probs[index], num_drafted[index])
                verdict = rule(*drafts, uniforms)
                rank = torch.searchsorted(tokens, verdict.next_token_ids)
                return torch.stack([verdict.num_accepted, rank], 1)

            of_kind, kinds = _kinds(draft_ids, draft_probs, target_probs, num_drafted)
            counts = range(draft_ids.shape[1] + 1)
            thresholds = pass_thresholds(
                lambda index, uniforms: run(kinds[index], uniforms),
                len(kinds),
                draft_ids.shape[1],
                block=block,
                steps=BISECTIONS,
            )
            chances = torch.stack([count_probs(thresholds, k, block=block) for k in counts], 1)
            tests = torch.stack([uniforms_for_count(thresholds, k, block=block) for k in counts])
            after = next_token_probs(
                run,
                kinds.repeat(len(counts)),
                tests.flatten(0, 1),
                len(tokens),
                steps=BISECTIONS,
            ).view(len(counts), len(kinds), -1)
            kept = self.choose(rows, chances[of_kind])
            last = torch.full((len(rows), 1), 0.5, dtype=torch.float64)
            found = run(every, torch.cat([tests[kept, of_kind], last], 1))[:, 0]
            assert torch.equal(found, kept), "the rule does not count as its kind does"
            return Verification(kept, tokens[self.choose(rows, after[kept, of_kind])])

        return verify


def _kinds(*parts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows that are alike in all parts: the kind of each row [n], and one row of each kind."""
    wide = [
        part.double().flatten(1) if part.dim() > 1 else part[:, None].double()
        for part in parts
        if part is not None
    ]
    unique, of_kind = torch.cat(wide, 1).unique(dim=0, return_inverse=True)
    kinds = torch.empty(len(unique), dtype=torch.int64)
    kinds[of_kind] = torch.arange(len(of_kind))
    return of_kind, kinds


def generated_law(
    decoder: SpeculativeDecoder, prompt: list[int], length: int, paths: Paths, **settings
) -> dict[Text, float]:
    """The exact law of the decoder's texts of `length` tokens after `prompt`.

    Args:
        paths: fresh, with at least as many rows as there are paths; the law says if not.
        settings: further arguments of `generate`; every row has to sample.
    """

    def row_numbers(self: UniformStreams, rows: list[int], count: int) -> Tensor:
        return torch.tensor(rows, dtype=torch.float64)[:, None].expand(-1, count)

    def draw(self: Sampler, probs: Tensor, rows: list[int]) -> Tensor:
        return paths.choose(torch.tensor(rows), probs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UniformStreams, "take", row_numbers)
        patch.setattr(Sampler, "draw", draw)
        for name in ("verify_speculative", "verify_block"):
            rule = getattr(verifier, name)
            patch.setattr(verifier, name, paths.through(rule, block=name == "verify_block"))
        generation = decoder.generate([prompt] * paths.num_rows, max_new_tokens=length, **settings)
    return paths.law(generation.token_ids)


def plain_law(model, prompt: list[int], length: int, **settings) -> dict[Text, float]:
    """The target's own law, from one pass over every text of `length` tokens."""
    texts = list(itertools.product(range(model.vocab_size), repeat=length))
    tokens = [[*prompt, *text] for text in texts]
    cache = model.new_cache(len(texts), len(tokens[0]))
    with torch.inference_mode():
        logits = model.forward(torch.tensor(tokens), cache).logits
    sampler = Sampler(
        SamplingSettings(**settings),
        batch_size=len(texts),
        prompt_lengths=[len(prompt)] * len(texts),
        eos_token_ids=(),
        real_vocab_size=model.vocab_size,
        device="cpu",
    )
    mass = torch.ones(len(texts), dtype=torch.float64)
    for step in range(length):
        end = len(prompt) + step
        histories = [text[:end] for text in tokens]
        probs = sampler.probs(logits[:, end - 1], range(len(texts)), histories).double()
        mass *= probs[range(len(texts)), [text[step] for text in texts]]
    return dict(zip(texts, mass.tolist(), strict=True))
