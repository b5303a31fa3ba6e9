"""A second causal language model as the drafter, with the target's tokenizer.

Its cache follows the committed text by lengths alone. After a round it has seen one token less
than the target if every draft was kept (it never feeds its own last proposal), else exactly what
was kept; the next draft starts by feeding what it has not seen, one or two tokens.

Shapes: b rows of one call, K drafted positions, V the target's real vocabulary, n rows of a
reduced head.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdec_runtime.draft import Draft, no_draft
from specdec_runtime.draft_length import LengthRound
from specdec_runtime.engines import Engine, make_model
from specdec_runtime.formats import read_draft_vocab
from specdec_runtime.model import Cache, CausalModel
from specdec_runtime.sampling import Sampler
from specdec_runtime.target import Target
from specdec_runtime.tokenizers import check_same_tokenizer


class CausalLMDrafter:
    """Drafts with a causal LM, greedily where the row is greedy, else from its own distribution.

    Args:
        model: the drafting model. With a reduced output vocabulary its logits have n columns.
        draft_vocab: [n] int64, the target id of each logit column; None = column i is id i.
        temperature: replaces the temperature of rows that sample, while drafting (any value is
            lossless; 0 drafts the likeliest token).
        module: the transformers module behind `model`, if training changes it; see `refresh`.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: CausalModel,
        *,
        draft_vocab: Tensor | None = None,
        temperature: float | None = None,
        module: PreTrainedModel | None = None,
    ) -> None:
        if draft_vocab is not None and len(draft_vocab) != model.vocab_size:
            raise ValueError(
                f"the draft vocabulary names {len(draft_vocab)} tokens, the head has "
                f"{model.vocab_size} rows: expected one row a token"
            )
        self.model = model
        self.draft_vocab = draft_vocab
        self.temperature = temperature
        self.module = module
        self.max_positions: int | None = model.max_positions
        self._engine: Engine | str = Engine.auto

    @classmethod
    def from_module(
        cls,
        module: PreTrainedModel,
        *,
        draft_vocab: Tensor | None = None,
        temperature: float | None = None,
        engine: Engine | str = Engine.auto,
    ) -> "CausalLMDrafter":
        """A drafter from a loaded module; with `draft_vocab` only those rows of its head count."""
        model = make_model(module, engine=engine, head_rows=draft_vocab)
        drafter = cls(model, draft_vocab=draft_vocab, temperature=temperature, module=module)
        drafter._engine = engine
        return drafter

    def refresh(self) -> None:
        """Take over the weights that `module` has now; between `generate` calls only."""
        assert self.module is not None, "only a drafter made by from_module can be refreshed"
        self.model = make_model(self.module, engine=self._engine, head_rows=self.draft_vocab)

    def begin(self, batch_size: int, capacity: int, sampler: Sampler) -> "CausalLMSession":
        cache = self.model.new_cache(batch_size, capacity)
        return CausalLMSession(self, cache, sampler)


def load(
    folder: str | Path | None, target: Target, *, engine: Engine | str, settings: dict[str, Any]
) -> CausalLMDrafter:
    """The drafter in `folder` (or of a hub id), checked to share the target's tokenizer.

    Settings: `temperature`.

    Raises:
        ValueError: if there is no such model, or its tokenizer reads an id differently.
    """
    if folder is None:
        raise ValueError("a causal_lm drafter needs a model: give its folder or hub id")
    temperature = settings.get("temperature")
    _check_tokenizer(folder, target)
    device = target.model.device
    module = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    module.to(device=device)
    draft_vocab = read_draft_vocab(folder)
    return CausalLMDrafter.from_module(
        module, draft_vocab=draft_vocab, temperature=temperature, engine=engine
    )


def _check_tokenizer(folder: str | Path, target: Target) -> None:
    if target.tokenizer is None:
        raise ValueError("the target has no tokenizer to compare the drafter's with: load_target")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"no drafter can be loaded from {str(folder)!r}: {reason}") from error
    check_same_tokenizer(tokenizer, target.tokenizer)


class CausalLMSession:
    """The drafting model's cache for one batch."""

    def __init__(self, drafter: CausalLMDrafter, cache: Cache, sampler: Sampler) -> None:
        self.cache = cache
        self._model = drafter.model
        self._sampler = sampler
        self._temperature = drafter.temperature
        self._vocab = _DraftVocabulary(drafter.draft_vocab, drafter.model, sampler.vocab_size)
        self._max_positions = drafter.model.max_positions

    def propose(
        self,
        rows: list[int],
        committed: list[list[int]],
        lengths: LengthRound,
        features: dict[int, Tensor] | None = None,
    ) -> Draft:
        for member, tokens in enumerate(committed):
            # Drafting k tokens feeds everything committed and k - 1 drafts.
            lengths.cap(member, self._max_positions - len(tokens) + 1)
        if self._can_chain(lengths):
            return self._greedy_chain(rows, committed, lengths)
        return self._step_by_step(rows, committed, lengths)

    def commit(self, rows: list[int], committed: list[list[int]]) -> None:
        self.cache.truncate([len(tokens) - 1 for tokens in committed], rows)

    def _can_chain(self, lengths: LengthRound) -> bool:
        """Whether the model can draft by itself: greedily, over ids that all have a string."""
        return (
            hasattr(self._model, "greedy_chain")
            and self._sampler.is_plain_greedy
            and not lengths.needs_confidence
            and self._vocab.is_proposable
        )

    def _greedy_chain(
        self, rows: list[int], committed: list[list[int]], lengths: LengthRound
    ) -> Draft:
        while lengths.ask():  # nothing is told, so the lengths do not depend on the tokens
            lengths.tell(None)
        active = [member for member, count in enumerate(lengths.num_drafted) if count]
        if not active:
            return no_draft(len(rows))
        token_ids, num_new = self._unseen(active, rows, committed)
        chain = self._model.greedy_chain(  # type: ignore[attr-defined]
            token_ids,
            self.cache,
            num_new=num_new,
            rows=[rows[member] for member in active],
            steps=max(lengths.num_drafted),
        )
        drafted = chain.new_zeros(len(rows), chain.shape[1])
        drafted[active] = chain
        return Draft(drafted, torch.tensor(lengths.num_drafted))

    def _step_by_step(
        self, rows: list[int], committed: list[list[int]], lengths: LengthRound
    ) -> Draft:
        """One pass a token over the rows that still draft."""
        members = lengths.ask()
        if not members:
            return no_draft(len(rows))
        histories = [list(tokens) for tokens in committed] if self._sampler.needs_history else None
        num_new: Tensor | None
        token_ids, num_new = self._unseen(members, rows, committed)
        steps = []
        while members:
            batch = [rows[member] for member in members]
            context = None if histories is None else [histories[member] for member in members]
            logits = self._next_logits(token_ids, num_new, batch)
            step = self._draw(logits, members, batch, context)
            steps.append(step)
            lengths.tell(_confidences(logits, step.tokens) if lengths.needs_confidence else None)
            if context is not None:
                for history, token in zip(context, step.tokens.tolist(), strict=True):
                    history.append(token)
            members = lengths.ask()
            going_on = [step.members.index(member) for member in members]
            token_ids, num_new = step.tokens[going_on, None], None
        return _assemble(steps, len(rows), lengths.num_drafted)

    def _next_logits(self, token_ids: Tensor, num_new: Tensor | None, batch: list[int]) -> Tensor:
        """[N, V] over the target's vocabulary, after feeding `token_ids`."""
        output = self._model.forward(
            token_ids, self.cache, num_new=num_new, rows=batch, last_only=True
        )
        assert output.logits is not None
        return self._vocab.to_target(output.logits[:, 0])

    def _draw(
        self,
        logits: Tensor,
        members: list[int],
        batch: list[int],
        context: list[list[int]] | None,
    ) -> "_Step":
        """The next token of each member from [N, V] logits, with the distribution it came from."""
        if self._sampler.all_greedy:
            return _Step(members, self._sampler.argmax(logits, batch, context), None)
        probs = self._sampler.probs(logits, batch, context, temperature=self._temperature)
        return _Step(members, self._sampler.draw(probs, batch), probs)

    def _unseen(
        self, members: list[int], rows: list[int], committed: list[list[int]]
    ) -> tuple[Tensor, Tensor]:
        """Committed tokens that are not in the cache yet, right-padded: [b, Q], counts [b]."""
        seen = self.cache.lengths.tolist()
        unseen = [committed[member][seen[rows[member]] :] for member in members]
        width = max(map(len, unseen))
        padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in unseen]
        return torch.tensor(padded), torch.tensor([len(tokens) for tokens in unseen])


class _Step(NamedTuple):
    """One drafted token of each of the members that drafted at this step."""

    members: list[int]
    tokens: Tensor  # [N] int64
    probs: Tensor | None  # [N, V]


class _DraftVocabulary:
    """Maps the drafting model's logit columns to the target's real vocabulary."""

    def __init__(self, draft_vocab: Tensor | None, model: CausalModel, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._ids = None if draft_vocab is None else draft_vocab.to(model.device)
        self._num_columns = model.vocab_size
        # No column stands for an id beyond the vocabulary.
        self.is_proposable = draft_vocab is not None or model.vocab_size <= vocab_size

    def to_target(self, logits: Tensor) -> Tensor:
        """[N, n] -> [N, V]; tokens that the drafter does not know get no mass."""
        if self._ids is None:
            if self._num_columns >= self._vocab_size:
                return logits[:, : self._vocab_size]
            return torch.nn.functional.pad(
                logits, (0, self._vocab_size - self._num_columns), value=float("-inf")
            )
        full = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        return full.index_copy_(1, self._ids, logits)


def _confidences(logits: Tensor, tokens: Tensor) -> list[float]:
    """The drafter's probability of each token drawn, at temperature 1; waits for the device."""
    return logits.softmax(-1).gather(1, tokens[:, None]).squeeze(1).tolist()


def _assemble(steps: list[_Step], num_rows: int, num_drafted: list[int]) -> Draft:
    """The steps side by side, as one draft of all rows."""
    token_ids = steps[0].tokens.new_zeros(num_rows, len(steps))
    for position, step in enumerate(steps):
        token_ids[step.members, position] = step.tokens
    if steps[0].probs is None:
        return Draft(token_ids, torch.tensor(num_drafted))
    probs = steps[0].probs.new_zeros(num_rows, len(steps), steps[0].probs.shape[-1])
    for position, step in enumerate(steps):
        assert step.probs is not None
        probs[step.members, position] = step.probs
    return Draft(token_ids, torch.tensor(num_drafted), probs)
