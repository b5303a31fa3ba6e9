"""The target writes: continuous batches, one noise stream per text, the target's signal on the way.

A batch has a fixed number of rows. A row whose text ends takes the next request at once, so the
batch stays full to the end of the queue. What a text becomes depends on its own prompt, temperature
and seed alone: the noise of position i is a function of the text's seed and i, never of what else
is in the batch, and an interrupted job continues with the same texts. (Exactly so with the C++
engine, whose numbers do not depend on the batch either; other engines round differently in
differently shaped batches, which once in a long while changes a near-tie.)

Shapes: b rows of one pass, Q tokens of each, V real vocabulary, D hidden size, A inner layers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from distill.features import FeatureFolder
from distill.signals import TargetRows
from specdec_runtime.model import Cache, ModelOutput
from specdec_runtime.noise import UniformStreams, draw_by_inversion
from specdec_runtime.sampling import Sampler, SamplingSettings
from specdec_runtime.target import Target

_WRITE_STREAM = 3  # purpose of the noise; drafting and verification own 1 and 2
_PREFILL_TOKENS = 2048  # padded tokens of one prefill pass: bounds its memory
_CHOICE_ROWS = 8  # 8 rows of a 49k vocabulary are 1.6 MB: what a core's cache holds


@dataclass(frozen=True)
class Request:
    """One text to write.

    Attributes:
        key: whatever the caller knows it by.
        prompt_ids: tokens in front of it, at least one.
        temperature: 0 = greedy.
        seed: of its own noise.
    """

    key: int
    prompt_ids: Sequence[int]
    temperature: float
    seed: int


@dataclass
class Text:
    """What became of a request.

    Attributes:
        token_ids: new tokens, the stop token included.
        signal: the target's, one position for each new token; None if not recorded.
    """

    request: Request
    token_ids: list[int]
    signal: TargetRows | None = None


class Writer:
    """Writes texts with one target.

    Args:
        batch_size: rows written at once.
        max_new_tokens: of each text.
        stop_ids: tokens that end a text.
        top_p: of the rows that sample; 1 keeps all tokens.
        record: keep the target's signal of every position.
        inner_states: takes the target's inner states at every token of each text; None = not kept.
    """

    def __init__(
        self,
        target: Target,
        *,
        batch_size: int,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        top_p: float = 1.0,
        record: bool = False,
        inner_states: FeatureFolder | None = None,
    ) -> None:
        self._model = target.model
        self._batch_size = batch_size
        self._max_new_tokens = max_new_tokens
        self._stop_ids = frozenset(stop_ids)
        self._record = record
        self._inner_states = inner_states
        self._inner_layers = inner_states.layers if inner_states is not None else ()
        self._hidden_layers = (*((-1,) if record else ()), *self._inner_layers)
        self._choice = _TokenChoice(target, top_p)

    def write(self, requests: Iterable[Request], *, longest_prompt: int) -> Iterator[Text]:
        """The texts, each as soon as it ends, so in no particular order.

        Requests are taken from the iterable only when a row is free: where it stops, the job ends
        after the texts that have begun.

        Args:
            longest_prompt: tokens of the longest prompt; decides the size of the cache.

        Raises:
            ValueError: if such a prompt leaves the target no room for a text.
        """
        capacity = longest_prompt + self._max_new_tokens
        if capacity > self._model.max_positions:
            raise ValueError(
                f"a prompt of {longest_prompt} tokens and answers.max_new_tokens="
                f"{self._max_new_tokens} exceed the target's {self._model.max_positions} positions"
            )
        batch = _Batch(
            self._model.new_cache(self._batch_size, capacity), self._batch_size, iter(requests)
        )
        try:
            while True:
                yield from self._start(batch)
                if not batch.active:
                    return
                yield from self._step(batch)
        finally:  # what is recorded belongs to texts that have ended
            if self._inner_states is not None:
                self._inner_states.flush()

    def _start(self, batch: "_Batch") -> Iterator[Text]:
        """Fills free rows from the queue and writes their first token; yields what ended there."""
        while fresh := batch.take(self._max_new_tokens):
            for rows in _prefill_groups(fresh):
                new = [torch.tensor(batch.unseen(index)) for index in rows]
                lengths = torch.tensor([len(tokens) for tokens in new])
                output = self._model.forward(
                    pad_sequence(new, batch_first=True),
                    batch.cache,
                    num_new=lengths,
                    rows=rows,
                    last_only=True,
                    hidden_layers=self._hidden_layers,
                )
                yield from self._append(output, lengths - 1, rows, batch)

    def _step(self, batch: "_Batch") -> Iterator[Text]:
        """One token for every active row; yields the texts that ended."""
        rows = sorted(batch.active)
        pending = torch.tensor([[batch.active[index].token_ids[-1]] for index in rows])
        output = self._model.forward(
            pending, batch.cache, rows=rows, hidden_layers=self._hidden_layers
        )
        yield from self._append(output, torch.zeros(len(rows), dtype=torch.int64), rows, batch)

    def _append(
        self, output: ModelOutput, last: Tensor, rows: list[int], batch: "_Batch"
    ) -> Iterator[Text]:
        """Chooses the next token of each row; `last` [b] is where each row's state lies."""
        self._keep_inner_states(output, last, [batch.active[index] for index in rows])
        for index in rows:
            if batch.active[index].is_ended:
                yield self._finished(batch.active.pop(index))
        places = [place for place, index in enumerate(rows) if index in batch.active]
        if not places:
            return
        rows = [rows[place] for place in places]
        self._choose(output, last, places, [batch.active[index] for index in rows])
        for index in rows:
            row = batch.active[index]
            row.is_ended = (
                row.token_ids[-1] in self._stop_ids or len(row.token_ids) == self._max_new_tokens
            )
            # One more pass reads the last token where its inner states are wanted.
            if row.is_ended and self._inner_states is None:
                yield self._finished(batch.active.pop(index))

    def _choose(
        self, output: ModelOutput, last: Tensor, places: list[int], members: "list[_Row]"
    ) -> None:
        """Appends a token to each of the rows, which lie at `places` of the output."""
        assert output.logits is not None
        logits = output.logits[:, 0]
        chosen = self._choice(
            logits if len(places) == len(logits) else logits[places], members, record=self._record
        )
        if self._record:
            hidden = _at(output.hidden[-1], last)
            for number, (place, row) in enumerate(zip(places, members, strict=True)):
                row.hidden.append(hidden[place])
                row.log_sum_exp.append(chosen.log_sum_exp[number])
                row.argmax.append(chosen.argmax[number])
        for row, token in zip(members, chosen.token_ids, strict=True):
            row.token_ids.append(token)

    def _keep_inner_states(self, output: ModelOutput, last: Tensor, members: "list[_Row]") -> None:
        if self._inner_states is None:
            return
        states = torch.cat([output.hidden[layer] for layer in self._inner_layers], dim=-1).cpu()
        for row, of_row, end in zip(members, states, last.tolist(), strict=True):
            row.inner.append(of_row[: end + 1].clone())

    def _finished(self, row: "_Row") -> Text:
        if self._inner_states is not None:
            token_ids = torch.tensor([*row.request.prompt_ids, *row.token_ids])
            self._inner_states.add(token_ids, torch.cat(row.inner))
        return row.text()


def _at(states: Tensor, last: Tensor) -> Tensor:
    """[b, D] of [b, Q, D]; waits for the device."""
    places = torch.arange(len(states), device=states.device)
    return states[places, last.to(states.device)].cpu()


class _Batch:
    """The rows of one `write` call: who writes where, and what the cache of each row holds."""

    def __init__(self, cache: Cache, size: int, queue: Iterator[Request]) -> None:
        self.cache = cache
        self.active: dict[int, _Row] = {}
        self._queue = queue
        self._free_rows = range(size)
        self._last: list[_Row | None] = [None] * size  # who wrote there last, or does

    def take(self, max_new_tokens: int) -> "dict[int, _Row]":
        """Gives every free row its next request; {} if no row is free or none is left.

        What a new prompt has in common with the row's last one, the template's opening at least,
        stays in the cache: with short prompts that is most of them.
        """
        free = [index for index in self._free_rows if index not in self.active]
        fresh = {
            index: _Row(request, max_new_tokens)
            for index, request in zip(free, self._queue, strict=False)
        }
        for index, row in fresh.items():
            last, prompt = self._last[index], row.request.prompt_ids
            before = last.request.prompt_ids if last is not None else ()
            shared = _common_length(before, prompt[:-1])  # one token has to be fed
            self.cache.truncate([shared], [index])
            if last is not None and last.inner and shared:
                row.inner = [torch.cat(last.inner)[:shared]]
            self._last[index] = row
        self.active |= fresh
        return fresh

    def unseen(self, index: int) -> list[int]:
        """The tokens of a fresh row's prompt that its cache does not hold."""
        prompt = self.active[index].request.prompt_ids
        return list(prompt[int(self.cache.lengths[index]) :])


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class _Row:
    """A text being written."""

    def __init__(self, request: Request, max_new_tokens: int) -> None:
        self.request = request
        stream = UniformStreams([request.seed], purpose=_WRITE_STREAM)
        self.noise = stream.take([0], max_new_tokens)[0].tolist()  # one number a position
        self.token_ids: list[int] = []
        self.hidden: list[Tensor] = []  # each [D]
        self.inner: list[Tensor] = []  # each [tokens of a pass, A * D]
        self.is_ended = False
        self.log_sum_exp: list[float] = []
        self.argmax: list[int] = []

    def text(self) -> Text:
        if not self.hidden:
            return Text(self.request, self.token_ids)
        signal = TargetRows(
            torch.stack(self.hidden), torch.tensor(self.log_sum_exp), torch.tensor(self.argmax)
        )
        return Text(self.request, self.token_ids, signal)


class _Chosen(NamedTuple):
    token_ids: list[int]
    argmax: list[int]
    log_sum_exp: list[float]  # empty if not recorded


class _TokenChoice:
    """From logits to the next token of each row, by its temperature and its noise."""

    def __init__(self, target: Target, top_p: float) -> None:
        self._target = target
        self._top_p = top_p
        self._samplers: dict[float, Sampler] = {}

    def __call__(self, logits: Tensor, rows: list[_Row], *, record: bool) -> _Chosen:
        """logits: [b, at least V]. A few rows at a time, so that their numbers stay in the cache."""
        logits = logits[:, : self._target.real_vocab_size]
        argmax, sums, tokens = [], [], []
        for start in range(0, len(rows), _CHOICE_ROWS):
            part = logits[start : start + _CHOICE_ROWS]
            best = part.argmax(-1).tolist()
            argmax += best
            tokens += self._tokens(part, best, rows[start : start + _CHOICE_ROWS])
            if record:
                sums += part.logsumexp(-1).tolist()
        return _Chosen(tokens, argmax, sums)

    def _tokens(self, logits: Tensor, argmax: list[int], rows: list[_Row]) -> list[int]:
        tokens = list(argmax)
        for temperature in {row.request.temperature for row in rows} - {0.0}:
            places = [i for i, row in enumerate(rows) if row.request.temperature == temperature]
            probs = self._sampler(temperature).probs(logits[places], [0] * len(places))
            noise = [rows[place].noise[len(rows[place].token_ids)] for place in places]
            uniforms = torch.tensor(noise, dtype=torch.float64, device=probs.device)
            drawn = draw_by_inversion(probs, uniforms).tolist()
            for place, token in zip(places, drawn, strict=True):
                tokens[place] = token
        return tokens

    def _sampler(self, temperature: float) -> Sampler:
        """The runtime's own processing; one made-up row stands for all of a temperature."""
        if temperature not in self._samplers:
            top_p = self._top_p if self._top_p < 1.0 else None
            self._samplers[temperature] = Sampler(
                SamplingSettings(temperature=temperature, top_p=top_p),
                batch_size=1,
                prompt_lengths=[0],
                eos_token_ids=self._target.eos_token_ids,
                real_vocab_size=self._target.real_vocab_size,
                device=self._target.model.device,
                seed=0,
            )
        return self._samplers[temperature]


def _prefill_groups(fresh: dict[int, _Row]) -> Iterator[list[int]]:
    """Rows with prompts of similar length, a bounded number of padded tokens at a time."""
    group: list[int] = []
    for index in sorted(fresh, key=lambda index: len(fresh[index].request.prompt_ids)):
        width = len(fresh[index].request.prompt_ids)
        if group and (len(group) + 1) * width > _PREFILL_TOKENS:
            yield sorted(group)
            group = []
        group.append(index)
    if group:
        yield sorted(group)
