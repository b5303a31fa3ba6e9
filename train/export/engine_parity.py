"""The parity gate in the serving engine itself: its text and acceptance beside our runtime's.

Same prompts, same draft length, everything in float32. Greedy text has to be that of plain decoding,
near-ties apart. Engines draw in other ways than we do: drawn text has to be drawn from the target's
distribution (drawn_text.py), and acceptance is compared with what ours would be along that same text
(along_text.py), so that two draws are never compared with each other.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eval.acceptance import Counts, length_interval, measure_acceptance, position_intervals
from eval.intervals import Interval, proportion_interval
from eval.target_texts import Answer
from eval.text_drafts import ScoredDrafter
from specdec_runtime.loading import load_drafter, load_target
from specdec_runtime.stats import AcceptanceStats
from specdec_runtime.target import Target
from train.export.along_text import expected_along, likeliest_drafts
from train.export.causes import likely_causes
from train.export.drawn_text import DrawnText, drawn_text
from train.export.engines import ENGINES, Served, environments, python_of, serve
from train.export.observation import fixed_prompts
from train.export.registry import format_named
from train.export.runtime_folder import runtime_folder
from train.export.source import Source

NEAR_TIE = 2e-3  # of logits around 20: 1e-4 of them, as sums in another order differ
ALLOWED = 0.1  # of acceptance length, along the same text: near-ties, and the round it ends on
CHANCE = 4.0  # standard errors of what an engine's own draws leave open: 1 in 10,000 checks
MAX_NEW_TOKENS = 40
TEMPERATURES = (0.0, 1.0)
# They draft their likeliest token at any temperature; the others draw their drafts.
DRAFTS_GREEDILY = ("llamacpp", "vllm")
DRAFTS_BEFORE_PREFILL = ("transformers",)


@dataclass(frozen=True)
class EngineParity:
    """An engine beside our runtime, at one temperature.

    differences: (prompt, position, top-two gap of the target there) of each greedy text that is not
    the plain one. ours, theirs: counts of each prompt; ours at T > 0 those to be expected along the
    engine's texts. drawn: what these texts say of the distribution they were drawn from. chance:
    standard error of the number of tokens accepted along them.
    """

    engine: str
    temperature: float
    differences: list[tuple[int, int, float]]
    ours: Sequence[Counts]
    theirs: Sequence[AcceptanceStats]
    drawn: tuple[DrawnText, ...] = ()
    chance: float = 0.0

    def problems(self) -> list[str]:
        """What differs beyond near-ties and intervals, one line each."""
        found = [
            f"prompt {number} has another text from token {position} on, where the target's two "
            f"best logits are {gap:.2g} apart"
            for number, position, gap in self.differences
            if gap > NEAR_TIE
        ]
        found += [
            f"its drawn text is not the target's: {one.describe()}"
            for one in self.drawn
            if not one.is_the_targets
        ]
        ours, theirs = length_interval(self.ours), length_interval(self.theirs)
        if ours.value is None or theirs.value is None:
            return [*found, "nothing was drafted, by one of them"]
        # A token more that is accepted makes a round less: length = tokens / (tokens - accepted).
        one_token = ours.value / sum(row.num_rounds for row in self.ours)
        if abs(ours.value - theirs.value) > max(ALLOWED, CHANCE * self.chance * one_token):
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
            f"drawn: {'; '.join(one.describe() for one in self.drawn)}" if self.drawn else text,
            f"{_shown(length_interval(self.theirs))}, {_shown(length_interval(self.ours))}",
            f"{self._by_position(self.theirs)}, {self._by_position(self.ours)}",
        ]
        return f"| {' | '.join(cells)} |"

    @staticmethod
    def _by_position(rows: Sequence[Counts]) -> str:
        found = [f"{one.value:.3f}" for one in by_position(rows)]
        return " ".join(found) or "not reported"


def by_position(rows: Sequence[Counts]) -> list[Interval]:
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
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        all_served = serve(
            source,
            folder,
            form,
            prompts,
            work,
            max_new_tokens=max_new_tokens,
            temperatures=temperatures,
        )
        beside = _Beside(
            target,
            prompts,
            runtime_folder(source.files.folder, source, work / "own", engine="draftloop"),
            runtime_folder(folder, source, work / "served", engine=form),
            source.num_draft_tokens,
            max_new_tokens,
        )
        found = [
            beside.drawing(ENGINES[form], served, temperature)
            if temperature
            else beside.greedily(ENGINES[form], served)
            for temperature, served in zip(temperatures, all_served, strict=True)
        ]
    _require_parity(found, source, folder, form)
    return found


@dataclass(frozen=True)
class _Beside:
    """Our runtime beside an engine.

    own: the drafter that was exported. served: what is served, as our runtime reads it; tokens that its
    form has besides take some of the probability that it draws with.
    """

    target: Target
    prompts: Sequence[list[int]]
    own: Path
    served: Path
    num_draft_tokens: int
    max_new_tokens: int

    def greedily(self, engine: str, served: Served) -> EngineParity:
        """Both decode at T=0."""
        drafter = load_drafter(self.own, self.target)
        plain, ours = (
            measure_acceptance(
                self.target,
                one,
                self.prompts,
                num_draft_tokens=self.num_draft_tokens,
                max_new_tokens=self.max_new_tokens,
            )
            for one in (None, drafter)
        )
        differences = first_differences(self.target, self.prompts, plain.token_ids, served)
        return EngineParity(engine, 0.0, differences, ours.prompts, served.rows)

    def drawing(self, engine: str, served: Served, temperature: float) -> EngineParity:
        """The engine draws, ours is followed along its texts."""
        draws_at = 0.0 if engine in DRAFTS_GREEDILY else temperature
        drafter = load_drafter(self.served, self.target, temperature=draws_at)
        assert isinstance(drafter, ScoredDrafter)  # all that an engine reads are
        given: dict[str, Any] = {"temperature": temperature}
        answers = self._answers(served, from_prompt=engine in DRAFTS_BEFORE_PREFILL)
        expected = expected_along(
            self.target, drafter, answers, num_draft_tokens=self.num_draft_tokens, **given
        )
        drawn = (
            drawn_text(self.target, self.prompts, served.token_ids, **given),
            likeliest_drafts(self.target, drafter, answers, **given),
        )
        return EngineParity(
            engine, temperature, [], expected.rows, served.rows, drawn, expected.chance
        )

    def _answers(self, served: Served, *, from_prompt: bool) -> list[Answer]:
        """Texts whose first token is no draft; `from_prompt`: the prompt's last one is that token."""
        return [
            Answer(prompt[:-1], [prompt[-1], *text], self.max_new_tokens + 1)
            if from_prompt
            else Answer(prompt, text, self.max_new_tokens)
            for prompt, text in zip(self.prompts, served.token_ids, strict=True)
        ]


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
