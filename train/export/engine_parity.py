"""The parity gate in the serving engine itself: its text and acceptance beside our runtime's.

Same prompts, same draft length, everything in float32. Greedy text has to be that of plain decoding,
near-ties apart; drawn text has to be drawn from the target's distribution (drawn_text.py), since
engines draw in other ways than we do. Acceptance length and acceptance by position have to agree within
their intervals.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eval.acceptance import length_interval, measure_acceptance, position_intervals
from eval.intervals import Interval, proportion_interval
from specdec_runtime.loading import load_drafter, load_target
from specdec_runtime.stats import AcceptanceStats
from specdec_runtime.target import Target
from train.export.causes import likely_causes
from train.export.drawn_text import DrawnText, drawn_text
from train.export.engines import ENGINES, Served, environments, python_of, serve
from train.export.observation import fixed_prompts
from train.export.registry import format_named
from train.export.runtime_folder import runtime_folder
from train.export.source import Source

NEAR_TIE = 2e-3  # of logits around 20: 1e-4 of them, as sums in another order differ
ALLOWED = 0.1  # of acceptance length, where both decoded the same text
MAX_NEW_TOKENS = 40
TEMPERATURES = (0.0, 1.0)
# They draft their likeliest token at any temperature: so does ours, beside them.
DRAFTS_GREEDILY = ("llamacpp", "vllm")


@dataclass(frozen=True)
class EngineParity:
    """An engine beside our runtime, at one temperature.

    differences: (prompt, position, top-two gap of the target there) of each greedy text that is not
    the plain one. ours, theirs: counts of each prompt. drawn: the engine's text at T > 0.
    """

    engine: str
    temperature: float
    differences: list[tuple[int, int, float]]
    ours: list[AcceptanceStats]
    theirs: list[AcceptanceStats]
    drawn: DrawnText | None = None

    def problems(self) -> list[str]:
        """What differs beyond near-ties and intervals, one line each."""
        found = [
            f"prompt {number} has another text from token {position} on, where the target's two "
            f"best logits are {gap:.2g} apart"
            for number, position, gap in self.differences
            if gap > NEAR_TIE
        ]
        if self.drawn is not None and not self.drawn.is_the_targets:
            found.append(f"its drawn text is not the target's: {self.drawn.describe()}")
        ours, theirs = length_interval(self.ours), length_interval(self.theirs)
        assert ours.value is not None
        assert theirs.value is not None
        is_far = self.temperature == 0 and abs(ours.value - theirs.value) > ALLOWED
        if is_far or ours.overlaps(theirs) is False:
            found.append(f"acceptance length is {_shown(theirs)}, ours {_shown(ours)}")
        positions = zip(by_position(self.ours), by_position(self.theirs), strict=False)
        for i, (here, there) in enumerate(positions):
            if here.overlaps(there) is False:
                found.append(f"acceptance at position {i} is {_shown(there)}, ours {_shown(here)}")
        return found

    def row(self) -> str:
        """A line of the table in docs/serving.md."""
        num_prompts = len(self.ours)
        text = f"{num_prompts - len(self.differences)} of {num_prompts}"
        if self.differences:
            gaps = ", ".join(f"{gap:.1e}" for _, _, gap in self.differences)
            text += f" (top-two gap where the others part: {gaps})"
        cells = [
            self.engine,
            f"T={self.temperature:g}",
            text if self.drawn is None else f"drawn: {self.drawn.describe()}",
            f"{_shown(length_interval(self.theirs))}, {_shown(length_interval(self.ours))}",
            f"{self._by_position(self.theirs)}, {self._by_position(self.ours)}",
        ]
        return f"| {' | '.join(cells)} |"

    @staticmethod
    def _by_position(rows: list[AcceptanceStats]) -> str:
        found = [f"{one.value:.3f}" for one in by_position(rows)]
        return " ".join(found) or "not reported"


def by_position(rows: list[AcceptanceStats]) -> list[Interval]:
    """Acceptance by position; the wider of the intervals over prompts and over rounds.

    Where a position was never accepted, resampling prompts finds no width.
    """
    found = []
    rounds = sum(row.num_rounds for row in rows)
    for over_prompts in position_intervals(rows):
        assert over_prompts.value is not None
        over_rounds = proportion_interval(over_prompts.value * rounds, rounds)
        lows = [x.low for x in (over_prompts, over_rounds) if x.low is not None]
        highs = [x.high for x in (over_prompts, over_rounds) if x.high is not None]
        found.append(Interval(over_prompts.value, min(lows), max(highs)))
    return found


HEADER = (
    "| engine | temperature | same text as plain greedy | acceptance length, ours | "
    "by position, ours |\n|---|---|---|---|---|"
)


def verify_engine(
    source: Source,
    folder: Path,
    form: str,
    *,
    num_prompts: int | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperatures: Sequence[float] = TEMPERATURES,
) -> list[EngineParity]:
    """An exported folder in its engine, beside the drafter in our runtime.

    Args:
        form: the folder's format; its engine has to be installed.
        num_prompts: of the fixed questions; None = all.

    Raises:
        ValueError: they differ; the message lists the likely causes with what was found.
        RuntimeError: the engine failed.
    """
    target = load_target(source.target.record, dtype=torch.float32)
    prompts = fixed_prompts(target, source.manifest.template_options)[:num_prompts]
    settings: dict[str, Any] = {
        "num_draft_tokens": source.num_draft_tokens,
        "max_new_tokens": max_new_tokens,
    }
    plain = measure_acceptance(target, None, prompts, **settings).token_ids
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        own = runtime_folder(source.files.folder, source, work / "own", engine="draftloop")
        found = []
        all_served = serve(
            source,
            folder,
            form,
            prompts,
            work,
            max_new_tokens=max_new_tokens,
            temperatures=temperatures,
        )
        for temperature, served in zip(temperatures, all_served, strict=True):
            greedily = bool(temperature) and ENGINES[form] in DRAFTS_GREEDILY
            drawing: dict[str, Any] = {"temperature": 0.0} if greedily else {}
            drafter = load_drafter(own, target, **drawing)
            ours = measure_acceptance(target, drafter, prompts, temperature=temperature, **settings)
            found.append(
                EngineParity(
                    ENGINES[form],
                    temperature,
                    [] if temperature else first_differences(target, prompts, plain, served),
                    ours.prompts,
                    served.rows,
                    drawn_text(target, prompts, served.token_ids, temperature)
                    if temperature
                    else None,
                )
            )
    _require_parity(found, source, folder, form)
    return found


def engine_lines(source: Source, folder: Path, form: str) -> list[str]:
    """For the terminal: the folder in its engine beside our runtime; or why it was not served.

    Raises:
        ValueError, RuntimeError: see `verify_engine`.
    """
    if form not in ENGINES:
        return [f"no engine on this machine reads {form} folders: not served"]
    if python_of(ENGINES[form]) is None:
        return [f"{ENGINES[form]} is not installed in {environments()}: not served"]
    return [HEADER, *(parity.row() for parity in verify_engine(source, folder, form))]


def _require_parity(found: list[EngineParity], source: Source, folder: Path, form: str) -> None:
    problems = [problem for parity in found for problem in parity.problems()]
    if problems:
        causes = likely_causes(source, folder, format_named(form))
        raise ValueError(
            f"{ENGINES[form]} does not do with {folder} what our runtime does: "
            f"{'; '.join(problems)}. Looked at: {'; '.join(causes)}"
        )


def first_differences(
    target: Target, prompts: Sequence[list[int]], plain: list[list[int]], served: Served
) -> list[tuple[int, int, float]]:
    """(prompt, position, top-two gap of the target there) of each text that is not the plain one.

    A text that only ends elsewhere (an engine that keeps or drops the end token) is the same.
    """
    found = []
    texts = zip(prompts, plain, served.token_ids, strict=True)
    for number, (prompt, ours, theirs) in enumerate(texts):
        pairs = enumerate(zip(ours, theirs, strict=False))
        position = next((i for i, (a, b) in pairs if a != b), None)
        if position is not None:
            tokens = torch.tensor([[*prompt, *ours[:position]]])
            cache = target.model.new_cache(1, tokens.shape[1])
            logits = target.model.forward(tokens, cache, last_only=True).logits
            assert logits is not None
            top = logits[0, 0].topk(2).values
            found.append((number, position, float(top[0] - top[1])))
    return found


def _shown(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.value:.3f}"
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"
