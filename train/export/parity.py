"""The parity gate: an exported folder, loaded by another process, does what its drafter does.

Only folders are compared, never a model in memory with itself: what was lost in writing shows. The same
proposals on 100 fixed contexts (all of them in float32 arithmetic), the same acceptance by
position, the same text as plain decoding. A difference is an error that lists its likely causes.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.acceptance import position_intervals
from eval.intervals import Interval
from specdec_runtime.stats import AcceptanceStats
from train.export.causes import likely_causes
from train.export.observation import NUM_CONTEXTS, Observation
from train.export.registry import format_named
from train.export.runtime_folder import runtime_folder
from train.export.source import Source

EXACT = 1.0
ROUNDED = 0.99  # where weights or arithmetic were rounded on the way


@dataclass(frozen=True)
class Parity:
    """How an exported folder compares with the drafter it was made from.

    agreement: share of contexts with the same proposal; needed: what it has to be. num_wanted: contexts
    to compare at least.
    """

    num_contexts: int
    agreement: float
    needed: float
    same_text: bool
    ours: list[Interval]
    theirs: list[Interval]
    lengths: tuple[float, float]
    causes: list[str]
    num_wanted: int = NUM_CONTEXTS

    @property
    def passed(self) -> bool:
        return not self.problems()

    def problems(self) -> list[str]:
        """What differs, one line each."""
        found = []
        if self.num_contexts < self.num_wanted:
            found.append(f"only {self.num_contexts} contexts were compared, of {self.num_wanted}")
        if self.agreement < self.needed:
            found.append(
                f"{self.agreement:.1%} of {self.num_contexts} contexts have the same proposal, "
                f"expected {self.needed:.0%}"
            )
        if not self.same_text:
            found.append("the text decoded with it is not the target's")
        for i, (ours, theirs) in enumerate(zip(self.ours, self.theirs, strict=False)):
            if ours.overlaps(theirs) is False:
                found.append(
                    f"acceptance at position {i} is {theirs.value:.3f}, the drafter's {ours.value:.3f}"
                )
        return found

    def describe(self) -> str:
        """One line for the terminal."""
        return (
            f"parity: {self.agreement:.1%} of {self.num_contexts} contexts, acceptance length "
            f"{self.lengths[1]:.3f} ({self.lengths[0]:.3f} before export), text "
            f"{'as plain decoding' if self.same_text else 'DIFFERS from plain decoding'}"
        )


def compare(
    ours: Observation, theirs: Observation, *, needed: float, causes: list[str] | None = None
) -> Parity:
    """Two observations on the same contexts.

    Where everything has to be equal, whole drafts are compared; else their first tokens, since one
    that differs by rounding changes all that follow it.
    """
    pairs = list(zip(ours.proposals, theirs.proposals, strict=False))
    length = None if needed == EXACT else 1
    same = sum(a[:length] == b[:length] for a, b in pairs)
    return Parity(
        num_contexts=len(pairs),
        agreement=same / len(pairs) if pairs else 0.0,
        needed=needed,
        same_text=ours.texts == theirs.texts and theirs.same_text,
        ours=position_intervals(ours.rows),
        theirs=position_intervals(theirs.rows),
        lengths=(_length(ours), _length(theirs)),
        causes=causes or [],
    )


def verify(source: Source, folder: Path, *, engine: str, same_dtype: bool = True) -> Parity:
    """Compare an exported folder with the drafter it was made from, both loaded elsewhere.

    Raises:
        ValueError: they differ; the message lists what was looked at.
    """
    with tempfile.TemporaryDirectory() as work:
        folders = [
            runtime_folder(source.files.folder, source, Path(work) / "source", engine="draftloop"),
            runtime_folder(folder, source, Path(work) / "exported", engine=engine),
        ]
        ours, theirs = observed_elsewhere(
            source.target.record,
            folders,
            settings={"num_draft_tokens": source.num_draft_tokens},
            template_options=source.manifest.template_options,
        )
    parity = compare(ours, theirs, needed=EXACT if same_dtype else ROUNDED)
    if problems := parity.problems():
        causes = likely_causes(source, folder, format_named(engine))
        raise ValueError(
            f"{folder} does not do what its drafter does: {'; '.join(problems)}. Looked at: "
            + "; ".join(causes)
        )
    return parity


def observed_elsewhere(
    target: str,
    folders: list[Path],
    *,
    settings: dict[str, Any],
    template_options: dict[str, Any] | None = None,
    target_options: dict[str, str] | None = None,
    prompts: list[list[int]] | None = None,
) -> list[Observation]:
    """What the drafters in `folders` do, seen by a fresh process that loads them from disk.

    Args:
        settings: of `observe`: num_draft_tokens and others.
        target_options: of `load_target`: dtype, device, engine.
        prompts: token ids; None = the fixed questions under `template_options`.

    Raises:
        ValueError: the process could not load one of them; the message is its last line.
    """
    request = {
        "target": target,
        "folders": [str(folder) for folder in folders],
        "settings": settings,
        "template_options": template_options or {},
        "target_options": target_options or {},
        "prompts": prompts,
    }
    done = subprocess.run(
        [sys.executable, "-m", "train.export.parity_process"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise ValueError(lines[-1].removeprefix("error: ") if lines else "the process died")
    return [Observation.of_json(content) for content in json.loads(done.stdout)]


def _length(observed: Observation) -> float:
    return sum(observed.rows, AcceptanceStats()).acceptance_length
