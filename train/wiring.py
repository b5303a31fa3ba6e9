"""The wiring gate: what training says about a drafter, and what the runtime does with its folder.

Both look at the same places, the first drafted token of every round that the runtime decoded. Training
scores them teacher-forced, in one pass of the weights that were written; the runtime has proposed
there, with its cache, and the target has judged. Greedy, the shares are equal up to near-ties; when
sampling, a token is kept with a probability of exactly the overlap, so that they are equal up to
chance. Anything else means that training and serving do not see the same model or the same text,
which is what most drafters that disappoint in use suffer from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from distill.batches import Batch, Example, collate
from distill.features import FeatureFolder, record_features
from distill.live_signals import groups_of, with_live_states
from distill.objective import Objective
from distill.signals import NoSignal, TargetRows, rows_at
from specdec_runtime.decode import Rule, SpeculativeDecoder
from specdec_runtime.draft import Drafter
from specdec_runtime.results import Chunk
from specdec_runtime.target import Target

# Standard errors: those of the 95 % interval that is reported, and those that end a run. One run in
# 20,000 ends for no reason; at 500 rounds a difference of .09 is found.
REPORTED, ENDING = 1.96, 4.0
_BATCH_TOKENS = 2048


@dataclass(frozen=True)
class FirstTokens:
    """Shares of the rounds whose first drafted token is right, at one temperature.

    Attributes:
        decoded: kept by the runtime / rounds.
        teacher_forced: greedy: agreements / rounds; sampled: mean overlap.
    """

    temperature: float
    num_rounds: int
    decoded: float
    teacher_forced: float

    @property
    def standard_error(self) -> float:
        """Of `decoded` around `teacher_forced`; for the overlaps an upper bound (Jensen)."""
        share = min(max(self.teacher_forced, 1 / self.num_rounds), 1 - 1 / self.num_rounds)
        return math.sqrt(share * (1 - share) / self.num_rounds)

    def agree(self, standard_errors: float = ENDING) -> bool:
        """Whether both are the same up to chance; greedy, up to the 95 % interval in any case."""
        if self.temperature == 0:
            standard_errors = min(standard_errors, REPORTED)
        difference = abs(self.decoded - self.teacher_forced)
        return difference <= standard_errors * self.standard_error + 1e-9

    def __str__(self) -> str:
        half = REPORTED * self.standard_error
        return (
            f"temperature {self.temperature:g}: teacher-forced {self.teacher_forced:.3f}, decoded "
            f"{self.decoded:.3f} (95 % interval +-{half:.3f}, {self.num_rounds} rounds)"
        )


@dataclass(frozen=True)
class DecodedText:
    """A text that the runtime decoded: where its rounds began, and whether their first token was kept."""

    token_ids: list[int]
    prompt_length: int
    starts: list[int]
    kept: list[bool]


def check_wiring(
    target: Target,
    drafter: Drafter,
    objective: Objective,
    module: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    device: torch.device,
    feature_layers: Sequence[int] = (),
    seed: int = 0,
) -> list[FirstTokens]:
    """Both figures at temperature 0 and 1.

    Args:
        drafter: loaded from the folder that is served.
        objective: of the kind, at temperature 1.
        module: with the weights that were written, in float32.
        feature_layers: of the target's states that the objective reads.

    Raises:
        ValueError: if they disagree beyond chance.
    """
    found = []
    for temperature in (0.0, 1.0):
        texts = decode_texts(
            target,
            drafter,
            prompts,
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
        )
        kept = [flag for text in texts for flag in text.kept]
        if not kept:
            continue
        agreement, overlap = teacher_forced(
            target, objective, module, texts, device, feature_layers=feature_layers
        )
        forced = overlap if temperature else agreement
        found.append(FirstTokens(temperature, len(kept), sum(kept) / len(kept), forced / len(kept)))
    require_agreement(found)
    return found


def require_agreement(found: Sequence[FirstTokens]) -> None:
    """Raise a ValueError if training and runtime disagree at any temperature."""
    wrong = [one for one in found if not one.agree()]
    if wrong:
        raise ValueError(
            f"training and runtime disagree about the first drafted token ({wrong[0]}): they do not "
            "see the same model or text; the drafter folder is not usable, look for what differs "
            "(positions, norms, template, draft vocabulary)"
        )


def wiring_values(found: Sequence[FirstTokens]) -> dict[str, float]:
    """The figures for the log of a run."""
    values: dict[str, float] = {}
    for one in found:
        place = f"t{one.temperature:g}"
        values[f"decoded_{place}"] = one.decoded
        values[f"teacher_forced_{place}"] = one.teacher_forced
        values[f"interval_{place}"] = REPORTED * one.standard_error
    return values


def decode_texts(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    num_draft_tokens: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> list[DecodedText]:
    """Decodes the prompts; token by token verification, whose first step is the overlap exactly."""
    texts = [DecodedText(list(prompt), len(prompt), [], []) for prompt in prompts]

    def note(chunk: Chunk) -> None:
        text = texts[chunk.row]
        if chunk.num_drafted:
            text.starts.append(len(text.token_ids))
            text.kept.append(chunk.num_accepted > 0)
        text.token_ids.extend(chunk.token_ids)

    decoder = SpeculativeDecoder(
        target, drafter, num_draft_tokens=num_draft_tokens, rule=Rule.speculative
    )
    decoder.generate(
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=[seed + row for row in range(len(prompts))],
        on_tokens=note,
    )
    return texts


@torch.no_grad()
def teacher_forced(
    target: Target,
    objective: Objective,
    module: nn.Module,
    texts: Sequence[DecodedText],
    device: torch.device,
    *,
    feature_layers: Sequence[int] = (),
) -> tuple[float, float]:
    """Sums of (greedy agreement, overlap) at the first positions of the texts' rounds."""
    module.to(device).eval()
    agreement = overlap = 0.0
    for batch in _batches(target, texts, feature_layers):
        counts = objective(module, batch.to(device)).counts
        agreement += float(counts["greedy_agreement"][0])
        overlap += float(counts["overlap"][0])
    return agreement, overlap


def _batches(
    target: Target, texts: Sequence[DecodedText], feature_layers: Sequence[int]
) -> list[Batch]:
    """The texts with the target's signal, only the first positions of rounds among the positions."""
    used = [text for text in texts if text.starts]
    examples = [
        Example(
            str(number),
            torch.tensor(text.token_ids),
            text.prompt_length,
            NoSignal(len(text.token_ids) - text.prompt_length),
        )
        for number, text in enumerate(used)
    ]
    whole = with_live_states(target, examples, max_positions=sum(e.num_tokens for e in examples))
    if feature_layers:
        with TemporaryDirectory() as folder:
            kept = FeatureFolder(Path(folder), feature_layers)
            whole = record_features(target.model, whole, kept)
    starts = {example.id: text.starts for example, text in zip(whole, used, strict=True)}
    return [
        _only(collate(group), [starts[example.id] for example in group], group)
        for group in groups_of(whole, _BATCH_TOKENS)
    ]


def _only(batch: Batch, starts: list[list[int]], examples: Sequence[Example]) -> Batch:
    """The batch with those of its loss positions that predict the tokens at `starts`."""
    kept: list[Tensor] = []
    before = 0
    for example, places in zip(examples, starts, strict=True):
        kept.append(torch.tensor(places) - example.prompt_length + before)
        before += example.num_tokens
    index = torch.cat(kept)
    assert isinstance(batch.rows, TargetRows)
    return Batch(
        ids=batch.ids,
        token_ids=batch.token_ids,
        positions=batch.positions[index],
        labels=batch.labels[index],
        spans=[(min(places) - 1, max(places) - 1) for places in starts],
        rows=rows_at(batch.rows, index),
        features=batch.features,
    )
