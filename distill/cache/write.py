"""The job: the target reads every answer once and its signals are written down.

Before a file is written, size, free disk and time are known and said. What is in a finished shard is
done; a job that was killed goes on behind it and leaves the same signals as one that was not.
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from distill.batches import Example, collate
from distill.cache.manifest import SIGNALS, bytes_per_position, make_manifest
from distill.cache.read import SignalCache
from distill.cache.shards import (
    ROWS,
    Rows,
    read_entries,
    remove_unfinished,
    shard_paths,
    text_hash,
    write_shard,
)
from distill.live_signals import groups_of, lengths_of
from distill.progress import Progress
from distill.signal_forms import SignalForm, SignalsConfig
from distill.signals import NoSignal, TargetRows, head_rows, split_rows, target_states
from distill.sparse_signals import sparse_rows
from specdec_runtime.file_lock import exclusive
from specdec_runtime.target import Target

_BATCH_TOKENS = 4096  # padded tokens of one pass of the target
_SHARD_BYTES = 64 << 20  # what a killed job loses at most, about
_FREE_SHARE = 0.95  # of the free disk that may be filled
# Of kept mass: with less the bracket of the overlap is wide, and its lower end is what is trained on.
_ENOUGH = 0.95
_TOO_LITTLE = ": raise signals.top_k, or choose signals.form=hidden"


def write_signals(
    target: Target,
    examples: Sequence[Example],
    config: SignalsConfig,
    folder: Path,
    *,
    answers_fingerprint: str,
    say: Callable[[str], None],
    progress: Progress | None = None,
    wait: bool = False,
) -> SignalCache:
    """Writes the signals that a folder lacks for these answers, and opens it.

    Args:
        answers_fingerprint: of the folder that the answers are in.
        say: is told size, free disk and time before anything is written.
        progress: called after every pass of the target, in positions.
        wait: for another process that writes the folder; otherwise that is an error.

    Raises:
        ValueError: for a folder of other signals, one that another process writes, a tokenizer that
            is not the answers', or too little disk.
    """
    if config.form not in ROWS:
        raise ValueError(f"signals.form={config.form.value} keeps nothing: choose hidden or sparse")
    folder.mkdir(parents=True, exist_ok=True)
    manifest = make_manifest(target, config, answers_fingerprint=answers_fingerprint)
    with exclusive(folder / ".lock", wait=wait):
        SIGNALS.claim(folder, manifest)
        remove_unfinished(folder)
        done = {
            (name, entry.text_hash)
            for path in shard_paths(folder)
            for name, entry in read_entries(path).items()
        }
        missing = [e for e in examples if e.num_tokens and (e.id, text_hash(e)) not in done]
        if missing:
            _Job(target, config, folder, missing, say, progress).run()
    return SignalCache.open(folder, wanted=manifest)


class _Job:
    """The writing of what is missing."""

    def __init__(
        self,
        target: Target,
        config: SignalsConfig,
        folder: Path,
        missing: Sequence[Example],
        say: Callable[[str], None],
        progress: Progress | None,
    ) -> None:
        self.target, self.config, self.folder = target, config, folder
        self.missing, self.say, self.progress = missing, say, progress
        self.each = bytes_per_position(target, config)
        self.total = sum(example.num_tokens for example in missing)

    def run(self) -> None:
        started, written, kept = time.monotonic(), 0, 0.0
        for shard in self._shards():
            examples: list[Example] = []
            rows: list[Rows] = []
            by_length = sorted(shard, key=lambda example: len(example.token_ids))
            for group in groups_of(by_length, _BATCH_TOKENS):
                examples += group
                rows += self._signals(group)
                kept += sum(_kept_mass(part) for part in rows[-len(group) :])
                if not written:
                    self._announce(
                        time.monotonic() - started, sum(example.num_tokens for example in group)
                    )
                written += sum(example.num_tokens for example in group)
                if self.progress is not None:
                    rate = written / max(time.monotonic() - started, 1e-9)
                    self.progress(written, self.total, f"{rate:.0f} positions/s")
            write_shard(self.folder, examples, rows, self.config)
        if self.config.form is SignalForm.sparse:
            self.say(
                f"the {self.config.top_k} most probable tokens hold {kept / self.total:.2%} of the "
                f"target's probability{_TOO_LITTLE if kept < _ENOUGH * self.total else ''}"
            )

    def _shards(self) -> Iterator[list[Example]]:
        """Consecutive answers, as many as a shard is to hold; one at least."""
        shard: list[Example] = []
        size = 0
        for example in self.missing:
            shard.append(example)
            size += example.num_tokens * self.each
            if size >= _SHARD_BYTES:
                yield shard
                shard, size = [], 0
        if shard:
            yield shard

    def _announce(self, seconds: float, num_positions: int) -> None:
        """Says what is to come, from the first pass; refuses what does not fit."""
        size, free = self.total * self.each, shutil.disk_usage(self.folder).free
        left_s = seconds * self.total / max(num_positions, 1)
        self.say(
            f"signals: {self.total} positions of {self.each} bytes, {size / 1e6:.1f} MB; "
            f"{free / 1e9:.1f} GB are free; about {left_s:.0f} s"
        )
        if size > _FREE_SHARE * free:
            raise ValueError(
                f"the signals need {size / 1e9:.2f} GB and {free / 1e9:.2f} GB are free in "
                f"{self.folder}: free some, choose another folder, or keep less (signals.form=sparse "
                f"with a smaller signals.top_k and draws, or signals.form=live)"
            )

    def _signals(self, group: Sequence[Example]) -> list[Rows]:
        """One pass of the target over some answers."""
        batch = collate([replace(example, rows=NoSignal(example.num_tokens)) for example in group])
        model, real = self.target.model, self.target.real_vocab_size
        hidden = target_states(model, batch.token_ids, lengths_of(batch), batch.positions)
        rows: Rows
        if self.config.form is SignalForm.hidden:
            rows = head_rows(model, hidden, real_vocab_size=real)
        else:
            rows = sparse_rows(
                model,
                hidden,
                real_vocab_size=real,
                top_k=self.config.top_k,
                num_draws=self.config.draws,
                seeds=[seed for example in group for seed in self._seeds(example)],
                dtype=self.config.dtype.torch,
            )
        return split_rows(rows, [example.num_tokens for example in group])

    def _seeds(self, example: Example) -> list[int]:
        """Of each position's draws: they depend on the text and the seed, not on the batch."""
        content = f"{self.config.seed}\x1f{text_hash(example)}"
        first = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")
        return [first + place for place in range(example.num_tokens)]


def _kept_mass(rows: Rows) -> float:
    """Sum over the positions of the probability that a top-k holds."""
    if isinstance(rows, TargetRows):
        return float(len(rows))
    return float(rows.top_log_probs.float().exp().sum())
