"""Out of memory: which stage it was, and which settings make that stage smaller."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from train.config import TrainConfig
from train.job import Job

CPU_MESSAGE = "can't allocate memory"  # of torch's CPU allocator, which has no exception class


@contextmanager
def memory_advice(job: Job) -> Iterator[None]:
    """Raises a RuntimeError with a remedy in place of the allocator's own words."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise RuntimeError(
            f"out of memory{job.where()}: {advice(job.stage, job.config)}; what is done is kept, "
            f"start again with a new run, or the same settings on more memory with "
            f"resume={job.run_dir}"
        ) from error


def advice(stage: str, config: TrainConfig) -> str:
    """What to lower, with the value it has now."""
    if stage == "training" or stage.startswith("time of"):
        smaller = (
            f"lower training.batch_tokens (now {config.training.batch_tokens}) and raise "
            "training.accumulation_steps by as much"
        )
        if not config.training.gradient_checkpointing:
            smaller += ", or set training.gradient_checkpointing=true"
        return smaller
    if stage.startswith("acceptance"):
        return f"lower acceptance.batch_size (now {config.acceptance.batch_size})"
    if stage in ("answers", "prompts") or stage.startswith("prompts"):
        return f"lower answers.batch_size (now {config.answers.batch_size})"
    if stage == "evaluation":
        return f"lower evaluation.max_new_tokens (now {config.evaluation.max_new_tokens})"
    return "take a smaller target, or target.dtype=bfloat16"


def _is_out_of_memory(error: Exception) -> bool:
    known = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, known) or CPU_MESSAGE in str(error)
