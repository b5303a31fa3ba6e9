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
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria

from specdec_runtime.draft import Draft, Drafter, DraftSession, TargetSharing, no_draft
from specdec_runtime.draft_length import DraftLength
from specdec_runtime.model import CausalModel
from specdec_runtime.planning import ChainSetting, DraftPlan, TreeSetting, as_draft_plan
from specdec_runtime.request import Request, check_request
from specdec_runtime.results import Chunk, Generation, Round
from specdec_runtime.sampling import NO_TOKEN, Sampler
from specdec_runtime.stats import AcceptanceStats
from specdec_runtime.stopping import Ending
from specdec_runtime.target import Target, as_target
from specdec_runtime.tree_growth import TreeShape
from specdec_runtime.verifier import Rule, Verdict, Verifier

__all__ = ["Rule", "SpeculativeDecoder"]


class SpeculativeDecoder:
    """Decodes a target, helped by a drafter.

    Args:
        target: a `Target`, a `CausalModel`, or a loaded transformers model.
        drafter: anything with the `Drafter` protocol; None decodes plainly.
        num_draft_tokens: tokens drafted a round; "auto" = what pays on this machine, measured at
            the first call (auto_length.py); a policy from draft_length.py; or the shape of a
            token tree from tree_growth.py.
        rule: verification of sampled chains.

    Raises:
        ValueError: num_draft_tokens below 0; anything that is not what is named above.
    """

    def __init__(
        self,
        target: Target | CausalModel | PreTrainedModel,
        drafter: Drafter | None = None,
        *,
        num_draft_tokens: int | DraftLength | TreeShape | str = 3,
        rule: Rule | str = Rule.block,
    ) -> None:
        if drafter is not None and not hasattr(drafter, "begin"):
            raise ValueError(f"drafter is {drafter!r}, expected what load_drafter gives, or None")
        self.target = as_target(target)
        self.drafter = drafter
        self.plan = as_draft_plan(num_draft_tokens, self.target, drafter)
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

        Raises:
            ValueError: as `stream`.
        """
        if on_tokens is not None and not callable(on_tokens):
            raise ValueError(f"on_tokens is {on_tokens!r}, expected a function of a Chunk")
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
        # Costs are measured in front of the clock of this call.
        batch_size = len(request.prompts)
        is_sampled = any(request.settings.temperatures(batch_size))
        setting = self.plan.measured(batch_size, is_sampled=is_sampled)
        return _Decoding(self, setting, request, seed)


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
        """Append the kept drafts and the target's token, up to wherever the row ends.

        Raises:
            ValueError: the settings allow no token where the row goes on.
        """
        before = len(self.tokens)
        for token in (*kept, next_token):
            if token == NO_TOKEN:
                raise ValueError(
                    f"the sampling settings forbid every token behind the first {len(self.tokens)} "
                    "of a row: relax bad_words_ids, logit_bias, min_new_tokens or logits_processors"
                )
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
        self,
        decoder: SpeculativeDecoder,
        setting: ChainSetting | TreeSetting,
        request: Request,
        seed: int | Sequence[int] | None,
    ) -> None:
        self.started = time.perf_counter()
        self.target = decoder.target
        self.rows = [_Row(index, request) for index in range(len(request.prompts))]
        self.active = list(self.rows)
        self.rounds: list[Round] = []
        self.prefill_s = 0.0
        self.features: dict[int, Tensor] = {}  # what the target saw since the last draft
        batch_size, model = len(self.rows), decoder.target.model
        self.sampler = Sampler(
            request.settings,
            batch_size=batch_size,
            prompt_lengths=[row.prompt_length for row in self.rows],
            eos_token_ids=request.eos_token_ids,
            real_vocab_size=self.target.real_vocab_size,
            device=model.device,
            seed=seed,
        )
        most = setting.most
        # A drafter that runs ahead in a batch needs room past the longest row's end.
        capacity = max(row.end.max_length for row in self.rows) + most + 1
        self.cache = model.new_cache(batch_size, capacity)
        self.plan: DraftPlan | None = None
        self.session: DraftSession | None = None
        hidden_layers: tuple[int, ...] = ()
        if decoder.drafter is not None and most > 0:
            self.session = decoder.drafter.begin(batch_size, capacity, self.sampler)
            self.plan = setting.begin(batch_size, self.session)
            hidden_layers = decoder.drafter.hidden_layers
            _check_layers(hidden_layers, model)
            if isinstance(self.session, TargetSharing):
                self.session.share(model, self.cache)
        self.verifier = Verifier(
            model,
            self.cache,
            self.sampler,
            rule=decoder.rule,
            most=most,
            hidden_layers=hidden_layers,
        )

    def chunks(self) -> Iterator[Chunk]:
        yield from self.prefill()
        while self.active:
            yield from self.round()

    @torch.inference_mode()
    def prefill(self) -> list[Chunk]:
        """Read the prompts; the first new token of every row."""
        rows = [row.index for row in self.active]
        verdict = self.verifier.prefill(rows, [row.tokens for row in self.active])
        chunks = self.keep(verdict)
        self.prefill_s = time.perf_counter() - self.started
        return chunks

    @torch.inference_mode()
    def round(self) -> list[Chunk]:
        """One draft and one target pass over all running rows."""
        start = time.perf_counter()
        rows = [row.index for row in self.active]
        limits = [row.limit for row in self.active]
        committed = [row.tokens for row in self.active]
        draft = self.draft(rows, committed, limits)
        drafted = time.perf_counter()
        verdict = self.verifier.verify(rows, committed, draft)
        verified = time.perf_counter()
        counted = list(zip(self.active, verdict.num_drafted, strict=True))
        chunks = self.keep(verdict)
        for chunk, (row, num_drafted) in zip(chunks, counted, strict=True):
            row.stats.add_round(_judged(chunk, num_drafted), chunk.num_accepted)
        self.roll_back(rows, committed)
        if self.plan is not None:
            self.plan.learn([len(kept) for kept in verdict.kept])
        self.rounds.append(
            Round(
                rows=rows,
                limits=limits,
                drafted=verdict.num_drafted,
                accepted=[chunk.num_accepted for chunk in chunks],
                submitted=draft.num_drafted.tolist(),
                draft_s=drafted - start,
                verify_s=verified - drafted,
                other_s=time.perf_counter() - verified,
            )
        )
        return chunks

    def draft(self, rows: list[int], committed: list[list[int]], limits: list[int]) -> Draft:
        if self.plan is None:
            return no_draft(len(rows))
        return self.plan.propose(rows, committed, limits, self.features)

    def keep(self, verdict: Verdict) -> list[Chunk]:
        """Append what was kept to every row; rows that ended take no further part."""
        chunks = [
            row.extend(kept, next_token, num_drafted)
            for row, kept, next_token, num_drafted in zip(
                self.active, verdict.kept, verdict.next_tokens, verdict.num_drafted, strict=True
            )
        ]
        going_on = [i for i, row in enumerate(self.active) if row.ending is None]
        self.features = verdict.features
        if len(going_on) < len(self.active):
            self.features = {k: hidden[going_on] for k, hidden in self.features.items()}
            self.active = [self.active[i] for i in going_on]
        return chunks

    def roll_back(self, rows: list[int], committed: list[list[int]]) -> None:
        """Both caches forget what was refused; the pending token has not been seen yet."""
        self.cache.truncate([len(tokens) - 1 for tokens in committed], rows)
        if self.session is not None:
            self.session.commit(rows, committed)

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


def _check_layers(hidden_layers: tuple[int, ...], model: CausalModel) -> None:
    wrong = [k for k in hidden_layers if not -1 <= k <= model.num_layers]
    if wrong:
        raise ValueError(
            f"the drafter reads hidden states after {wrong[0]} layers, the target has "
            f"{model.num_layers}: expected a drafter made for this target"
        )


def _judged(chunk: Chunk, num_drafted: int) -> int:
    """Drafted tokens that count: an end on an accepted one leaves those behind it out (stats.py)."""
    ended_on_accepted = len(chunk.token_ids) == chunk.num_accepted
    return chunk.num_accepted if ended_on_accepted else num_drafted
