"""The gate at the end of every training run: the folder drafts what the trained drafter drafts.

Another process loads what was exported, and nothing else. At the same contexts it has to propose what the
trained weights, still in memory, propose; on the prompts that chose the best checkpoint it has to be
accepted as often at every position, as often as training had measured, with the target's text.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eval.acceptance import length_interval
from specdec_runtime.draft import Drafter
from specdec_runtime.stats import AcceptanceStats
from specdec_runtime.target import Target
from train.acceptance import AcceptanceConfig
from train.export.observation import NUM_CONTEXTS, Observation, observe
from train.export.parity import EXACT, ROUNDED, Parity, compare, observed_elsewhere

# Besides the interval: float32 in training against the shorter dtype of the folder.
ROUNDING = 0.05


def verify_trained(
    folder: Path,
    *,
    drafter: Drafter,
    target: Target,
    target_name: str,
    target_options: dict[str, str],
    prompts: list[list[int]],
    config: AcceptanceConfig,
    trained_length: float,
) -> str:
    """A line that says how the folder compares with what was trained.

    Args:
        drafter: of the trained weights in memory, rounded as they were written.
        target: in memory; `target_name` and `target_options` load it elsewhere.
        prompts: those of the measurement, as token ids.
        trained_length: acceptance length when the best checkpoint was written.

    Raises:
        ValueError: it proposes something else, the acceptance is another, or the text is not the target's.
    """
    settings: dict[str, Any] = {
        "num_draft_tokens": config.num_draft_tokens,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "seed": config.seed,
        "batch_size": config.batch_size,
    }
    (seen,) = observed_elsewhere(
        target_name,
        [folder],
        settings=settings,
        target_options=target_options,
        prompts=prompts,
    )
    _require_trained_length(folder, seen, trained_length)
    ours = observe(target, drafter, prompts, seen.plain, settings)
    is_exact = target.model.dtype == torch.float32
    parity = _compared(ours, seen, is_exact=is_exact, temperature=config.temperature)
    if problems := parity.problems():
        raise ValueError(f"{folder} does not do what was trained: {'; '.join(problems)}")
    return (
        f"exported folder in another process: the trained drafter's proposals at {parity.agreement:.1%} "
        f"of {parity.num_contexts} contexts, acceptance length {_length(seen):.3f}, in training "
        f"{trained_length:.3f} on the same prompts"
    )


def _compared(
    ours: Observation, seen: Observation, *, is_exact: bool, temperature: float
) -> Parity:
    """Short prompts with short answers may not hold the wanted number of contexts."""
    parity = compare(ours, seen, needed=EXACT if is_exact else ROUNDED)
    parity = replace(parity, num_wanted=min(NUM_CONTEXTS, len(ours.proposals)))
    # A drawn text is not that of plain decoding, only drawn from the same distribution.
    return replace(parity, same_text=True) if temperature else parity


def _require_trained_length(folder: Path, seen: Observation, trained: float) -> None:
    found, interval = _length(seen), length_interval(seen.rows)
    low = found if interval.low is None else interval.low
    high = found if interval.high is None else interval.high
    if not min(low, found - ROUNDING) <= trained <= max(high, found + ROUNDING):
        raise ValueError(
            f"{folder} is accepted with length {found:.3f} ({low:.3f} to {high:.3f}) where the drafter "
            f"in training had {trained:.3f} on the same prompts: what was written is not what was "
            "trained"
        )


def _length(seen: Observation) -> float:
    return sum(seen.rows, AcceptanceStats()).acceptance_length
