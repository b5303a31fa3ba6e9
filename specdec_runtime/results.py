"""What `generate` returns: tokens, reasons, per-round records, counts and times."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specdec_runtime.stats import AcceptanceStats


class Chunk(NamedTuple):
    """Tokens of one row that have just become final: one round's worth, at least one."""

    row: int
    token_ids: list[int]
    num_accepted: int  # the first so many were drafted; the one after them is the target's
    num_drafted: int  # as submitted in this round; 0 in the prefill
    finish_reason: str | None = None  # set on the row's last chunk
    excess_chars: int = 0  # characters of the last token's text that lie behind a stop string

    @property
    def kinds(self) -> list[str]:
        """Per token: "accepted", "recovered", "bonus", or "target" where nothing was drafted."""
        kinds = ["accepted"] * self.num_accepted
        if len(self.token_ids) > self.num_accepted:
            refused = self.num_accepted < self.num_drafted
            own = "recovered" if refused else "bonus" if self.num_drafted else "target"
            kinds.append(own)
        return kinds


@dataclass
class Round:
    """One draft and one target pass. The lists run parallel to `rows`.

    Seconds are wall time of the host; the pass includes the wait for its result.
    """

    rows: list[int]
    limits: list[int]  # most tokens that could be drafted
    drafted: list[int]  # longest drafted path; of a chain: its length
    accepted: list[int]  # as returned
    submitted: list[int]  # drafted tokens in the target pass; of a tree: its nodes
    draft_s: float
    verify_s: float
    other_s: float


@dataclass
class Generation:
    """The result of one `generate` call.

    Attributes:
        token_ids: new tokens of each row, end-of-text included.
        finish_reasons: "eos", "stop" (stop string or criterion), "length" (max_new_tokens) or
            "context" (the target's positions are used up).
        rounds: one record per target pass after the prefill.
        row_stats: acceptance of each row.
        prefill_s: seconds until every row had its first token.
        seconds: wall time of the whole call.
    """

    token_ids: list[list[int]]
    finish_reasons: list[str]
    rounds: list[Round]
    row_stats: list[AcceptanceStats]
    prefill_s: float
    seconds: float
    tokenizer: Any = field(default=None, repr=False)
    excess_chars: list[int] = field(default_factory=list)

    @property
    def stats(self) -> AcceptanceStats:
        """Acceptance over all rows."""
        return sum(self.row_stats, AcceptanceStats())

    def text(self, row: int = 0) -> str:
        """New text of a row, special tokens skipped, ending with the stop string if one ended it.

        Raises:
            ValueError: if the target has no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("the target has no tokenizer: read token_ids, or use load_target")
        return final_text(self.tokenizer, self.token_ids[row], self.excess_chars[row])


def final_text(tokenizer: Any, token_ids: Sequence[int], excess_chars: int) -> str:
    """Text of `token_ids` without the characters that follow a stop string."""
    text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text[: len(text) - excess_chars]
