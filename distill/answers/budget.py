"""How much is written, how much may be, and how fast it goes.

Answers are begun in the order of the prompts, and those that have begun are finished: stopping them
would leave the short ones only. A budget of tokens ends with the first prompts that hold so many, so
what it buys does not depend on interruptions; a budget of time does, as the machine's speed does.
"""

import time
from collections.abc import Iterator, Mapping, Sequence

from distill.answers.config import AnswersConfig
from distill.progress import Progress


class Budget:
    """The state of one job.

    Args:
        order: ids of all prompts of the job.
        done: id -> tokens of every answer that the folder already holds.
        progress: told tokens where a budget of tokens is given, else answers.
    """

    def __init__(
        self,
        config: AnswersConfig,
        order: Sequence[str],
        done: Mapping[str, int],
        progress: Progress | None,
    ) -> None:
        self._order = order
        self._num_tokens = {prompt_id: done[prompt_id] for prompt_id in order if prompt_id in done}
        self._max_tokens, self._max_seconds = config.max_tokens, config.max_seconds
        self._dropped: set[str] = set()
        self._under_way = 0
        self._written_now, self._start = 0, time.monotonic()
        self._progress = progress

    def is_missing(self, prompt_id: str) -> bool:
        return prompt_id not in self._num_tokens and prompt_id not in self._dropped

    def allows_another(self) -> bool:
        """Whether one more answer may begin; those under way count with the average length."""
        late = self._max_seconds is not None and (
            time.monotonic() - self._start >= self._max_seconds
        )
        if late and (self._num_tokens or self._under_way):  # one answer at least
            return False
        if self._max_tokens is None:
            return True
        total = sum(self._num_tokens.values())
        mean = total / len(self._num_tokens) if self._num_tokens else 0.0
        return total + mean * self._under_way < self._max_tokens

    def begin(self, ids: Mapping[int, str]) -> Iterator[int]:
        """The keys of the answers to begin, one after the other, as long as the budget lasts."""
        for key in ids:
            if not self.allows_another():
                return
            self._under_way += 1
            yield key

    def drop(self, prompt_id: str) -> None:
        """An answer has ended and can not be used; it is not asked for again in this job."""
        self._under_way -= 1
        self._dropped.add(prompt_id)

    def add(self, prompt_id: str, num_tokens: int) -> None:
        """An answer has ended."""
        self._under_way -= 1
        self._num_tokens[prompt_id] = num_tokens
        self._written_now += num_tokens
        if self._progress is None:
            return
        total = sum(self._num_tokens.values())
        per_s = self._written_now / max(time.monotonic() - self._start, 1e-9)
        note = f"{total} tokens, {per_s:.0f} tokens/s"
        if self._max_tokens is not None:
            self._progress(min(total, self._max_tokens), self._max_tokens, note)
        else:
            self._progress(len(self._num_tokens), len(self._order), note)

    def answered(self) -> list[str]:
        """Ids of the answers that the job has bought, in the order of the prompts."""
        bought, total = [], 0
        for prompt_id in self._order:
            if self._max_tokens is not None and total >= self._max_tokens:
                break
            if prompt_id in self._num_tokens:
                bought.append(prompt_id)
                total += self._num_tokens[prompt_id]
        return bought
