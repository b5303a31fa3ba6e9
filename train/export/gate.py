"""The gate at the end of every training run: the folder is accepted as often as the drafter was.

The acceptance that chose the best checkpoint was measured on the module in training; here another process
loads what was exported, and nothing else, and measures the same prompts in the same way.
"""

from pathlib import Path
from typing import Any

from eval.acceptance import length_interval
from specdec_runtime.stats import AcceptanceStats
from train.acceptance import AcceptanceConfig
from train.export.parity import observed_elsewhere

# Besides the interval: float32 in training against the shorter dtype of the folder.
ROUNDING = 0.05


def verify_trained(
    folder: Path,
    *,
    target: str,
    target_options: dict[str, str],
    prompts: list[list[int]],
    config: AcceptanceConfig,
    trained_length: float,
) -> str:
    """A line that says how the folder compares with what training measured.

    Args:
        prompts: those of the measurement, as token ids.
        trained_length: acceptance length when the best checkpoint was written.

    Raises:
        ValueError: the acceptance is another, or the text is not the target's.
    """
    settings: dict[str, Any] = {
        "num_draft_tokens": config.num_draft_tokens,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "seed": config.seed,
        "batch_size": config.batch_size,
    }
    (seen,) = observed_elsewhere(
        target,
        [folder],
        settings=settings,
        target_options=target_options,
        prompts=prompts,
        asks=False,
    )
    found = sum(seen.rows, AcceptanceStats()).acceptance_length
    interval = length_interval(seen.rows)
    low = found if interval.low is None else interval.low
    high = found if interval.high is None else interval.high
    if not min(low, found - ROUNDING) <= trained_length <= max(high, found + ROUNDING):
        raise ValueError(
            f"{folder} is accepted with length {found:.3f} ({low:.3f} to {high:.3f}) where the drafter "
            f"in training had {trained_length:.3f} on the same prompts: what was written is not what "
            "was trained"
        )
    if config.temperature == 0 and not seen.same_text:
        raise ValueError(f"{folder}: the text decoded with it is not the target's")
    return (
        f"exported folder in another process: acceptance length {found:.3f}, in training "
        f"{trained_length:.3f} on the same prompts"
    )
