"""Sampling: from logits to the one distribution that draft and target are both processed into.

Every setting means what it means in transformers' `generate`, whose own processors do the work,
in the same order. Each position is processed with exactly the tokens in front of it (prompt,
committed, drafted), passed in by the caller, so a refused draft leaves no trace; what a custom
`LogitsProcessor` remembers follows the text likewise (processor_states.py).

Not here: which drafted tokens are kept (verification.py), when to stop (the decode loop).

Shapes: N positions of any rows, V the real vocabulary (padding of the logits is cut off).
"""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_runtime.noise import UniformStreams, draw_by_inversion
from specdec_runtime.processor_states import ProcessorStates, check_processors, remembers
from specdec_runtime.processors import make_processors, make_warpers, needs_history
from specdec_runtime.sampling_settings import SamplingSettings, is_whole_number

__all__ = ["Sampler", "SamplingSettings"]

_Process = Callable[..., Tensor]  # (tokens [n, length] int64, scores [n, V]) -> scores [n, V]
_DRAFT_STREAM, _VERIFY_STREAM = 1, 2  # purposes of the noise, see noise.py
NO_TOKEN = -1  # stands for the token of a place where the settings forbid every one


class Sampler:
    """Applies the settings of one `generate` call to the logits of draft and target.

    Reproducible per row: a row's noise depends on its own seed and on how much of it the row has
    used. With `seed` an integer, row i has the seed `seed + i`: it draws what a batch of that one
    prompt draws with that seed, on any device, as long as the models return the same logits.

    Args:
        settings: checked settings.
        batch_size: rows of the call.
        prompt_lengths: tokens of each row's prompt.
        eos_token_ids: what `min_new_tokens` forbids.
        real_vocab_size: ids at or above it have no string; they are cut off the logits.
        device: where the noise is made.
        seed: an integer, one per row, or None to draw one from torch's global generator.

    Raises:
        ValueError: settings that name tokens outside the vocabulary, forbid an end-of-text token
            or give values for another number of rows; a processor that cannot follow drafts.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        *,
        batch_size: int,
        prompt_lengths: Sequence[int],
        eos_token_ids: Sequence[int],
        real_vocab_size: int,
        device: torch.device | str,
        seed: int | Sequence[int] | None = None,
    ):
        assert len(prompt_lengths) == batch_size, (len(prompt_lengths), batch_size)
        _check_vocabulary(settings, eos_token_ids, real_vocab_size)
        self.settings = settings
        self.vocab_size = real_vocab_size
        self.temperatures = settings.temperatures(batch_size)
        self.greedy = torch.tensor(self.temperatures, device=device) == 0.0  # [batch]
        self.all_greedy = not any(self.temperatures)
        self.needs_history = needs_history(settings)
        self._has_processors = self.needs_history or bool(
            settings.logit_bias or settings.bad_words_ids
        )
        # argmax of the raw logits is all there is to it: a model may draft by itself.
        self.is_plain_greedy = self.all_greedy and not self._has_processors
        self._prompt_lengths = list(prompt_lengths)
        self._eos_token_ids = list(eos_token_ids)
        check_processors(settings.logits_processors)
        remembering = [p for p in settings.logits_processors if remembers(p)]
        # Custom processors keep their order: if one of them remembers, all go its way.
        self._states = ProcessorStates(settings.logits_processors) if remembering else None
        self._processors: dict[tuple[int, torch.device], _Process] = {}
        # Of the last call, the positions where the settings forbid every token.
        self.impossible: frozenset[int] = frozenset()
        self._warpers: _Process = make_warpers(settings)
        seeds = _row_seeds(seed, batch_size)
        self._draft_noise = UniformStreams(seeds, purpose=_DRAFT_STREAM, device=device)
        self._verify_noise = UniformStreams(seeds, purpose=_VERIFY_STREAM, device=device)

    def probs(
        self,
        logits: Tensor,
        rows: Sequence[int],
        histories: Sequence[Sequence[int]] | None = None,
        *,
        temperature: float | None = None,
    ) -> Tensor:
        """The distribution of each position: [N, V] float32. Greedy positions are one-hot.

        Args:
            logits: [N, at least V], any float dtype.
            rows: [N], the batch row of each position; a row may occur many times.
            histories: the tokens in front of each position; needed if `needs_history`.
            temperature: replaces the temperature of the rows that sample, for a drafter of its
                own temperature (0: it drafts its likeliest token). Greedy rows stay greedy.
        """
        scores = self._processed(logits, rows, histories)
        temperatures = [self.temperatures[row] for row in rows]
        if temperature is not None:
            temperatures = [temperature if value else 0.0 for value in temperatures]
        if not any(temperatures):
            return _one_hot(scores)
        divisor = torch.tensor([value or 1.0 for value in temperatures], device=scores.device)
        no_tokens = torch.empty(len(rows), 0, dtype=torch.int64)  # the warpers read none
        probs = self._warpers(no_tokens, scores / divisor[:, None]).softmax(-1)
        if all(temperatures):
            return probs
        greedy = torch.tensor([value == 0.0 for value in temperatures], device=scores.device)
        return torch.where(greedy[:, None], _one_hot(scores), probs)

    def soft_probs(
        self,
        logits: Tensor,
        rows: Sequence[int],
        histories: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """As `probs` at temperature 1 for every row, and without top-k, top-p and the like.

        For ranking tokens and measuring confidence; what a token is drawn from is `probs`.
        """
        return self._processed(logits, rows, histories).softmax(-1)

    def argmax(
        self,
        logits: Tensor,
        rows: Sequence[int],
        histories: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """The likeliest token of each position: [N] int64. Arguments as `probs`."""
        return likeliest_columns(self._processed(logits, rows, histories))

    def draw(self, probs: Tensor, rows: Sequence[int]) -> Tensor:
        """Draft one token for each of the given (distinct) rows from [N, V]: [N] int64."""
        uniforms = self._draft_noise.take(rows, 1).squeeze(1)
        return draw_by_inversion(probs, uniforms.to(probs.device))

    def draft_uniforms(self, rows: Sequence[int], count: int) -> Tensor:
        """Noise for drafts that are not single draws (trees): [N, count] float64."""
        return self._draft_noise.take(rows, count)

    def verify_uniforms(self, rows: Sequence[int], count: int) -> Tensor:
        """Noise for the verification rules: [N, count] float64."""
        return self._verify_noise.take(rows, count)

    def _processed(
        self,
        logits: Tensor,
        rows: Sequence[int],
        histories: Sequence[Sequence[int]] | None,
    ) -> Tensor:
        """Real-vocabulary logits in float32 after every setting but the warpers: [N, V]."""
        assert len(rows) == len(logits), "one batch row is needed for each position"
        scores = logits[:, : self.vocab_size].float()
        if not self._has_processors:
            return scores
        if self.needs_history:
            assert histories is not None, "these settings read the tokens in front of a position"
        else:
            histories = [()] * len(rows)
        # Positions with equally long prompts and histories form one rectangle, without padding
        # that a processor could mistake for tokens.
        groups = defaultdict(list)
        for index, (row, history) in enumerate(zip(rows, histories, strict=True)):
            groups[self._prompt_lengths[row], len(history)].append(index)
        processed = torch.empty_like(scores)
        for (prompt_length, _), members in groups.items():
            tokens = torch.tensor([list(histories[index]) for index in members])
            run = self._processors_for(prompt_length, scores.device)
            processed[members] = run(tokens.long().to(scores.device), scores[members])
        if self._states is not None:
            processed = self._states(rows, histories, processed)
        places = (processed.amax(-1) == -math.inf).nonzero()[:, 0]
        self.impossible = frozenset(places.tolist())
        if self.impossible:
            # Behind a drafted token that will be refused, or over a drafter's few tokens, that says
            # nothing of the text, and any token will do; the verifier looks where it does.
            processed[places, scores[places].argmax(-1)] = 0.0
        return processed

    def _processors_for(self, prompt_length: int, device: torch.device) -> _Process:
        """Made once per prompt length (some count new tokens) and device (some hold tensors)."""
        key = (prompt_length, device)
        if key not in self._processors:
            self._processors[key] = make_processors(
                self.settings, self._eos_token_ids, prompt_length, device
            )
        return self._processors[key]


def likeliest_columns(scores: Tensor) -> Tensor:
    """[...] of [..., n]; the lowest of equal ones."""
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    # Ten times as fast as torch's on a CPU, and no barrier of threads; the same ids.
    return torch.from_numpy(scores.detach().numpy().argmax(-1))


def _check_vocabulary(
    settings: SamplingSettings, eos_token_ids: Sequence[int], vocab_size: int
) -> None:
    words = settings.bad_words_ids or []
    bad_tokens = [token for word in words for token in word]
    named = {"logit_bias": list(settings.logit_bias or {}), "bad_words_ids": bad_tokens}
    for name, tokens in named.items():
        if tokens and max(tokens) >= vocab_size:
            raise ValueError(
                f"{name} names token {max(tokens)}, but the vocabulary has {vocab_size} tokens: "
                "use ids of the target's tokenizer"
            )
    for word in words:
        if len(word) == 1 and word[0] in eos_token_ids:
            raise ValueError(
                f"bad_words_ids forbids {word[0]}, an end-of-text token: use min_new_tokens to "
                "delay it, or eos_token_id to change it"
            )


def _row_seeds(seed: int | Sequence[int] | None, batch_size: int) -> list[int]:
    if seed is None:
        seed = int(torch.randint(2**62, ()))  # so that torch.manual_seed governs it
    if is_whole_number(seed):
        return [operator.index(seed) + row for row in range(batch_size)]
    if not isinstance(seed, Sequence) or not all(map(is_whole_number, seed)):
        raise ValueError(f"seed is {seed!r}, expected an integer, or one per prompt")
    if len(seed) != batch_size:
        raise ValueError(
            f"seed has {len(seed)} values for {batch_size} prompts: give one, or one per prompt"
        )
    return list(map(operator.index, seed))


def _one_hot(scores: Tensor) -> Tensor:
    """All mass on the likeliest token: [N, V] float32."""
    return torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1.0)
