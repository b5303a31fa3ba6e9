"""The loop: draft, verify in one target pass, keep what the rule keeps, roll back the rest.

    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=4)
    generation = decoder.generate(["The capital of France is"], max_new_tokens=64)

Whatever the drafter proposes, the text follows the target's distribution exactly (at temperature
0: is the target's greedy text). Without a drafter it is the same loop with drafts of length 0.

Rows of a batch accept different numbers of tokens; none waits, moves or is padded again. Token ids
live in Python lists on the host; a round waits for the device once, for its verdict.

Shapes: b rows still running, K positions of the round's longest draft, V vocabulary.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria

from specdec_runtime.draft import Draft, Drafter, DraftSession, no_draft
from specdec_runtime.draft_length import DraftLength, LengthRound, as_draft_length
from specdec_runtime.model import CausalModel, ModelOutput
from specdec_runtime.request import Request, check_request
from specdec_runtime.results import Chunk, Generation, Round
from specdec_runtime.sampling import Sampler
from specdec_runtime.stats import AcceptanceStats
from specdec_runtime.stopping import Ending
from specdec_runtime.target import Target, as_target
from specdec_runtime.verification import (
    Verification,
    verify_block,
    verify_greedy,
    verify_speculative,
)


class Rule(Enum):
    """How sampled drafts are verified; greedy rows are compared, whatever the rule."""

    speculative = "speculative"  # token by token
    block = "block"  # the whole chain at once: never fewer tokens in expectation


class SpeculativeDecoder:
    """Decodes a target, helped by a drafter.

    Args:
        target: a `Target`, a `CausalModel`, or a loaded transformers model.
        drafter: anything with the `Drafter` protocol; None decodes plainly.
        num_draft_tokens: tokens drafted a round, or a policy from draft_length.py.
        rule: verification of sampled rows.

    Raises:
        ValueError: num_draft_tokens below 0.
    """

    def __init__(
        self,
        target: Target | CausalModel | PreTrainedModel,
        drafter: Drafter | None = None,
        *,
        num_draft_tokens: int | DraftLength = 3,
        rule: Rule | str = Rule.block,
    ) -> None:
        self.target = as_target(target)
        self.drafter = drafter
        self.draft_length = as_draft_length(num_draft_tokens)
        self.rule = Rule(rule)

    def generate(
        self,
        prompts: Sequence[Sequence[int]] | Sequence[str],
        *,
        on_tokens: Callable[[Chunk], None] | None = None,
        **arguments: Any,
    ) -> Generation:
        """Decode all prompts to their ends. Arguments as `stream`.

        Args:
            on_tokens: called with every chunk of tokens as it becomes final.
        """
        decoding = self._begin(prompts, **arguments)
        for chunk in decoding.chunks():
            if on_tokens is not None:
                on_tokens(chunk)
        return decoding.result()

    def stream(
        self, prompts: Sequence[Sequence[int]] | Sequence[str], **arguments: Any
    ) -> Iterator[Chunk]:
        """Yield the tokens of every row as they become final.

        Args:
            prompts: texts, or lists of token ids; rows of one batch.
            max_new_tokens: most new tokens a row.
            eos_token_id: ids that end a text; None = the target's.
            stop_strings: end a row with the token that completes one of them.
            stopping_criteria: transformers `StoppingCriteria`, called row by row.
            seed: makes sampling reproducible: row i draws with seed + i, alone or in a batch.
            **sampling: the fields of `SamplingSettings`: temperature (0 = greedy, the default;
                or one per row), top_k, top_p, min_p, ...

        Raises:
            ValueError: before any forward pass, for whatever is wrong with the arguments.
        """
        return self._begin(prompts, **arguments).chunks()

    def _begin(
        self,
        prompts: Sequence[Sequence[int]] | Sequence[str],
        *,
        max_new_tokens: int,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        stopping_criteria: Sequence[StoppingCriteria] | None = None,
        seed: int | Sequence[int] | None = None,
        **sampling: Any,
    ) -> "_Decoding":
        request = check_request(
            self.target,
            prompts,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            stop_strings=stop_strings,
            stopping_criteria=stopping_criteria,
            sampling=sampling,
        )
        return _Decoding(self, request, seed)


class _Row:
    """One sequence: its tokens (the last one is pending) and how it fares."""

    def __init__(self, index: int, request: Request) -> None:
        self.index = index
        self.prompt_length = len(request.prompts[index])
        self.tokens = list(request.prompts[index])
        self.stats = AcceptanceStats()
        self.ending: Ending | None = None
        self.end = request.stopping.for_row(
            self.tokens, request.budgets[index], is_context_bound=request.is_context_bound[index]
        )

    @property
    def limit(self) -> int:
        """Most tokens worth drafting: the target adds one of its own, within the budget."""
        return self.end.max_length - len(self.tokens) - 1

    def extend(self, kept: list[int], next_token: int, num_drafted: int) -> Chunk:
        """Append the kept drafts and the target's token, up to wherever the row ends."""
        before = len(self.tokens)
        for token in (*kept, next_token):
            self.tokens.append(token)
            self.ending = self.end.check(self.tokens)
            if self.ending is not None:
                break
        new = self.tokens[before:]
        return Chunk(
            row=self.index,
            token_ids=new,
            num_accepted=min(len(kept), len(new)),
            num_drafted=num_drafted,
            finish_reason=self.ending.reason if self.ending else None,
            excess_chars=self.ending.excess_chars if self.ending else 0,
        )


class _Decoding:
    """One `generate` call under way."""

    def __init__(
        self, decoder: SpeculativeDecoder, request: Request, seed: int | Sequence[int] | None
    ) -> None:
        self.started = time.perf_counter()
        self.target = decoder.target
        self.model = decoder.target.model
        self.rule = decoder.rule
        self.policy = decoder.draft_length
        self.rows = [_Row(index, request) for index in range(len(request.prompts))]
        self.active = list(self.rows)
        batch_size = len(self.rows)
        self.sampler = Sampler(
            request.settings,
            batch_size=batch_size,
            prompt_lengths=[row.prompt_length for row in self.rows],
            eos_token_ids=request.eos_token_ids,
            real_vocab_size=self.target.real_vocab_size,
            device=self.model.device,
            seed=seed,
        )
        # A drafter that runs ahead in a batch needs room past the longest row's end.
        capacity = max(row.end.max_length for row in self.rows) + self.policy.num_draft_tokens + 1
        self.cache = self.model.new_cache(batch_size, capacity)
        self.lengths = self.policy.begin(batch_size)
        self.session: DraftSession | None = None
        self.hidden_layers: tuple[int, ...] = ()
        if decoder.drafter is not None and self.policy.num_draft_tokens > 0:
            self.session = decoder.drafter.begin(batch_size, capacity, self.sampler)
            self.hidden_layers = decoder.drafter.hidden_layers
        self.features: dict[int, Tensor] = {}  # what the target saw since the last draft
        self.rounds: list[Round] = []
        self.prefill_s = 0.0

    def chunks(self) -> Iterator[Chunk]:
        yield from self.prefill()
        while self.active:
            yield from self.round()

    @torch.inference_mode()
    def prefill(self) -> list[Chunk]:
        """Read the prompts; the first new token of every row."""
        prompts = [row.tokens for row in self.active]
        width = max(map(len, prompts))
        padded = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        output = self.model.forward(
            padded,
            self.cache,
            num_new=torch.tensor([len(prompt) for prompt in prompts]),
            last_only=True,
            hidden_layers=self.hidden_layers,
        )
        self.features = output.hidden
        verdict = self.judge(no_draft(len(self.active)), output)
        next_tokens = verdict.next_token_ids.tolist()  # waits for the device
        chunks = [
            row.extend([], token, 0) for row, token in zip(self.active, next_tokens, strict=True)
        ]
        self.drop_finished()
        self.prefill_s = time.perf_counter() - self.started
        return chunks

    @torch.inference_mode()
    def round(self) -> list[Chunk]:
        """One draft and one target pass over all running rows."""
        start = time.perf_counter()
        rows = [row.index for row in self.active]
        limits = [row.limit for row in self.active]
        lengths = LengthRound(
            self.lengths, rows, limits, needs_confidence=self.policy.needs_confidence
        )
        draft = self.draft(rows, lengths)
        drafted = time.perf_counter()
        output = self.verify_pass(rows, draft)
        verdict = self.judge(draft, output)
        kept, num_accepted, next_tokens = _to_host(draft, verdict)
        verified = time.perf_counter()
        num_drafted = draft.num_drafted.tolist()
        chunks = []
        for i, row in enumerate(self.active):
            chunk = row.extend(kept[i][: num_accepted[i]], next_tokens[i], num_drafted[i])
            # An end on an accepted token leaves the drafts behind it unjudged (stats.py).
            is_cut = len(chunk.token_ids) <= num_accepted[i]
            row.stats.add_round(
                chunk.num_accepted if is_cut else num_drafted[i], chunk.num_accepted
            )
            chunks.append(chunk)
        self.features = output.hidden
        self.roll_back(rows)
        lengths.finish(num_accepted)
        self.drop_finished()
        self.rounds.append(
            Round(
                rows=rows,
                limits=limits,
                drafted=num_drafted,
                accepted=[chunk.num_accepted for chunk in chunks],
                draft_s=drafted - start,
                verify_s=verified - drafted,
                other_s=time.perf_counter() - verified,
            )
        )
        return chunks

    def draft(self, rows: list[int], lengths: LengthRound) -> Draft:
        if self.session is None:
            return no_draft(len(rows))
        committed = [row.tokens for row in self.active]
        return self.session.propose(rows, committed, lengths, self.features)

    def verify_pass(self, rows: list[int], draft: Draft) -> ModelOutput:
        """The target over the pending token and the drafts: logits [b, K + 1, V]."""
        pending = torch.tensor([[row.tokens[-1]] for row in self.active])
        token_ids = pending
        if draft.token_ids.shape[1]:
            token_ids = torch.cat([pending.to(draft.token_ids.device), draft.token_ids], dim=1)
        return self.model.forward(
            token_ids,
            self.cache,
            num_new=draft.num_drafted + 1,
            rows=rows,
            hidden_layers=self.hidden_layers,
        )

    def judge(self, draft: Draft, output: ModelOutput) -> Verification:
        """What the rule keeps of `draft` and the token that follows, for every running row."""
        logits = output.logits
        assert logits is not None
        num_rows, width, _ = logits.shape  # width = K + 1
        device = logits.device
        rows = [row.index for row in self.active for _ in range(width)]
        histories = self.histories(draft, width) if self.sampler.needs_history else None
        draft_ids = draft.token_ids.to(device)
        num_drafted = draft.num_drafted.to(device)
        if self.sampler.all_greedy:
            choices = self.sampler.argmax(logits.flatten(0, 1), rows, histories)
            return verify_greedy(draft_ids, choices.view(num_rows, width), num_drafted)
        probs = self.sampler.probs(logits.flatten(0, 1), rows, histories)
        # The same amount of noise a round for every row, so that a row's text does not depend on
        # how much the others drafted.
        most = self.policy.num_draft_tokens
        noise = self.sampler.verify_uniforms([row.index for row in self.active], most + 1)
        noise = torch.cat([noise[:, : width - 1], noise[:, -1:]], dim=1).to(device)
        verify = verify_block if self.rule is Rule.block else verify_speculative
        return verify(
            draft_ids,
            None if draft.probs is None else draft.probs.to(device),
            probs.view(num_rows, width, -1),
            num_drafted,
            noise,
        )

    def histories(self, draft: Draft, width: int) -> list[list[int]]:
        """The tokens in front of every position of the pass, row by row."""
        drafted = draft.token_ids.tolist()
        return [
            [*row.tokens, *drafted[i][:position]]
            for i, row in enumerate(self.active)
            for position in range(width)
        ]

    def roll_back(self, rows: list[int]) -> None:
        """Both caches forget the refused drafts; the pending token has not been seen yet."""
        committed = [row.tokens for row in self.active]
        self.cache.truncate([len(tokens) - 1 for tokens in committed], rows)
        if self.session is not None:
            self.session.commit(rows, committed)

    def drop_finished(self) -> None:
        going_on = [i for i, row in enumerate(self.active) if row.ending is None]
        if len(going_on) < len(self.active):
            self.features = {k: hidden[going_on] for k, hidden in self.features.items()}
            self.active = [self.active[i] for i in going_on]

    def result(self) -> Generation:
        for row in self.rows:
            row.stats.num_tokens = len(row.tokens) - row.prompt_length
        endings = [row.ending for row in self.rows]
        return Generation(
            token_ids=[row.tokens[row.prompt_length :] for row in self.rows],
            finish_reasons=[ending.reason for ending in endings if ending],
            rounds=self.rounds,
            row_stats=[row.stats for row in self.rows],
            prefill_s=self.prefill_s,
            seconds=time.perf_counter() - self.started,
            tokenizer=self.target.tokenizer,
            excess_chars=[ending.excess_chars for ending in endings if ending],
        )


def _to_host(draft: Draft, verdict: Verification) -> tuple[list[list[int]], list[int], list[int]]:
    """Drafted ids, accepted counts and next tokens, in one transfer."""
    device = verdict.next_token_ids.device
    columns = [verdict.num_accepted[:, None], verdict.next_token_ids[:, None]]
    table = torch.cat([*columns, draft.token_ids.to(device)], dim=1).tolist()
    return [line[2:] for line in table], [line[0] for line in table], [line[1] for line in table]
