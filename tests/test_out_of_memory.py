"""Running out of memory: the message names the stage and what to lower there."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.test_config import composed
from train.out_of_memory import CPU_MESSAGE, advice, memory_advice


@pytest.fixture(scope="module")
def job() -> SimpleNamespace:
    return SimpleNamespace(
        config=composed("+experiment=smoke"),
        run_dir=Path("runs/smoke/now"),
        stage="training",
        where=lambda: " after step 3 of 30",
    )


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError(CPU_MESSAGE)],
    ids=["device", "python", "torch on a CPU"],
)
def test_the_message_says_where_and_what_to_lower(job: SimpleNamespace, error: Exception):
    with (
        pytest.raises(
            RuntimeError, match=r"after step 3 of 30: lower training\.batch_tokens \(now"
        ),
        memory_advice(job),  # type: ignore[arg-type]
    ):
        raise error


def test_other_errors_pass_as_they_are(job: SimpleNamespace):
    with pytest.raises(RuntimeError, match=r"^something else$"), memory_advice(job):  # type: ignore[arg-type]
        raise RuntimeError("something else")


def test_every_stage_has_its_own_remedy(job: SimpleNamespace):
    stages = ("training", "acceptance before training", "answers", "evaluation", "target")
    said = {advice(stage, job.config) for stage in stages}
    assert len(said) == len(stages)
    assert "gradient_checkpointing" not in advice(
        "training", composed("+experiment=smoke", "training.gradient_checkpointing=true")
    )
