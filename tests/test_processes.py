"""Many processes: what the main one meets reaches all, and the ready-made configurations are valid."""

import logging
import os
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from distill.batches import Example, collate
from distill.features import FeatureFolder, record_features
from distill.live_signals import LiveSignals
from distill.losses import LossConfig
from distill.recipe import Recipe, trained_kinds
from distill.signals import NoSignal
from specdec_runtime.hf_model import HFModel
from specdec_runtime.target import Target
from tests import test_cross_tokenizer_objective as cross
from tests.conftest import tiny_llama
from tests.test_causal_lm_objective import _examples
from tests.test_config import composed
from tests.test_wiring import recipe_of
from tests.toy_training import (
    ToyBatch,
    ToyTerms,
    as_rank,
    cross_entropy,
    ran_by_two,
    run_toy,
    toy_parts,
)
from train import processes
from train import run as run_module
from train.checkpoint import Checkpoints, TrainState
from train.job import Job
from train.loop import optimizer_step
from train.metrics import MetricSums
from train.optim import OptimConfig
from train.parts import MicroBatches, make_parts
from train.precision import Precision
from train.processes import check_accelerate, from_all, on_main
from train.run import RunResult, check_shares
from train.sharding import is_fsdp

CONFIGS = sorted((Path(__file__).parent.parent / "conf" / "accelerate").glob("*.yaml"))


def of_rank(rank: int) -> SimpleNamespace:
    return SimpleNamespace(num_processes=2, is_main_process=rank == 0)


@pytest.mark.parametrize("error", [ValueError, OSError, RuntimeError])
def test_an_error_of_the_main_process_is_raised_on_every_one(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    sent: list[list[object]] = []

    def broadcast(outcome: list[object]) -> None:
        if sent:
            outcome[:] = sent[0]
        sent.append(list(outcome))

    def fails() -> None:
        raise error("the disk is full")

    monkeypatch.setattr(processes, "broadcast_object_list", broadcast)
    for rank in (0, 1):  # rank 1 does not run the function, and does not wait for it either
        with pytest.raises(error, match="the disk is full"):
            on_main(of_rank(rank), fails)  # type: ignore[arg-type]


def crashing(rank: int, port: int, run_dir: Path) -> None:
    """Trains a toy; rank 1 dies in its third step, without a word to rank 0."""
    as_rank(rank, port)

    def objective(drafter: nn.Module, batch: ToyBatch) -> ToyTerms:
        taken.append(batch)
        if rank == 1 and len(taken) == 3:
            os._exit(9)
        return cross_entropy(drafter, batch)

    taken: list[ToyBatch] = []
    run_toy(run_dir, toy_parts(objective=objective), max_steps=6)


def test_a_rank_that_dies_takes_the_other_with_it_and_leaves_a_good_checkpoint(tmp_path: Path):
    codes = ran_by_two(crashing, tmp_path)
    assert codes[1] == 9
    assert codes[0] not in (0, None)  # None: it would still be waiting
    newest, damaged = Checkpoints(tmp_path, keep_last=2).newest()
    assert newest is None or newest.state.step < 3
    assert damaged == []


def starting(rank: int, port: int, runs_dir: Path) -> None:
    """Opens a run as `python -m train` does; rank 1 is a second late."""
    as_rank(rank, port)
    os.environ["TOY_API_KEY"] = "s3cr3t-value-of-a-key"

    def stages(job: Job) -> RunResult:
        job.log.write("training", 1, {"loss": 1.0})
        job.say("said by all")
        logging.getLogger("distill.answers").info("remark of rank %d", rank)
        warnings.warn(f"doubt of rank {rank}: s3cr3t-value-of-a-key", stacklevel=1)
        (runs_dir / f"seen-by-{rank}").write_text(str(job.run_dir))
        return RunResult(1.0, True, job.run_dir)

    run_module._run_stages = stages
    time.sleep(1.1 * rank)
    config = composed("+experiment=smoke", f"runs_dir={runs_dir / 'runs'}", "target.device=cpu")
    run_module.run(config, "seed: 0\n", ["train"])


def test_all_ranks_share_one_run_folder_even_if_they_start_in_other_seconds(tmp_path: Path):
    assert ran_by_two(starting, tmp_path) == [0, 0]
    (folder,) = (tmp_path / "runs" / "smoke").iterdir()
    assert {path.read_text() for path in tmp_path.glob("seen-by-*")} == {str(folder)}
    names = [path.name for path in folder.iterdir()]
    assert names.count("config.yaml") == 1
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1  # rank 0's alone
    logs = {path.name: path.read_text() for path in (folder / "logs").iterdir()}
    assert sorted(logs) == ["rank0.log", "rank1.log"]
    for rank, text in enumerate((logs["rank0.log"], logs["rank1.log"])):
        assert f"rank {rank} of 2" in text
        assert f"INFO remark of rank {rank}\n" in text
        assert f"WARNING UserWarning: doubt of rank {rank}: <redacted> (" in text
        assert "INFO said by all\n" in text
        assert f"of rank {1 - rank}" not in text


def cut(example: Example, num_tokens: int) -> Example:
    """The text with an answer of so many tokens, without a signal."""
    length = example.prompt_length + num_tokens
    return replace(example, token_ids=example.token_ids[:length], rows=NoSignal(num_tokens))


def made(kind: str, folder: Path) -> tuple[PreTrainedModel, Recipe, MicroBatches]:
    """(target, drafter, batches with the live target's signal); every other text is a token long."""
    if kind == "cross_tokenizer":
        model = cross.tiny(cross.TARGET_TOKENIZER, 0)
        size = len(cross.TARGET_TOKENIZER)
        target = Target(model=model, tokenizer=cross.TARGET_TOKENIZER, real_vocab_size=size)
        recipe: Recipe = cross.recipe_of(target, str(folder / "own"))
        batches = [cross.batch_of(target, [cross.target_ids(cross.TEXT)])]
    else:
        target = Target(model=HFModel(tiny_llama(0, num_layers=3)), real_vocab_size=64)
        recipe = recipe_of(kind, target, target.model.module)
        texts = [
            cut(one, 8 if i % 2 else 1) for i, one in enumerate(_examples(target.model.module, 6))
        ]
        if layers := recipe.feature_layers:
            texts = record_features(target.model, texts, FeatureFolder(folder / kind, layers))
        batches = [collate([text]) for text in texts]
    stream = LiveSignals(lambda number: recipe.prepared(batches[number % len(batches)]), target)
    return target.model.module, recipe, stream


def learning_live(rank: int, port: int, folder: Path) -> None:
    """Three steps of every kind of drafter beside a live target, which stays as it is."""
    as_rank(rank, port)
    accelerator = Accelerator(cpu=True)
    for kind in trained_kinds():
        target, recipe, batches = made(kind, folder)
        before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
        parts = make_parts(
            accelerator,
            recipe.module,
            recipe.objective(LossConfig()),
            batches,
            optim=OptimConfig(),
            accumulation_steps=1,
            precision=Precision.fp32,
        )
        assert isinstance(parts.loss, DistributedDataParallel)
        assert not any(isinstance(part, DistributedDataParallel) for part in target.modules())
        trained = [p for p in parts.loss.parameters() if p.requires_grad]
        assert not {id(p) for p in trained} & {id(p) for p in target.parameters()}
        state = TrainState(max_steps=3)
        for _ in range(3):  # what no loss used would end the second one
            optimizer_step(parts, state, OptimConfig(), MetricSums(), stop_requested=False)
        moments = {k: v for k, v in parts.updates.moments().items() if not k.endswith(".step")}
        assert sum(v.numel() for v in moments.values()) == 2 * sum(p.numel() for p in trained)
        assert all(p.grad is None for p in target.parameters())
        assert all(torch.equal(v, before[name]) for name, v in target.state_dict().items())
        sums = from_all(accelerator, [float(p.detach().double().sum()) for p in trained])
        assert sums[0] == sums[1], kind


def test_no_kind_of_drafter_wraps_trains_or_changes_the_target_on_two_processes(tmp_path: Path):
    """Case H5."""
    cross.tiny(cross.DRAFT_TOKENIZER, 1).module.save_pretrained(tmp_path / "own")
    cross.DRAFT_TOKENIZER.save_pretrained(tmp_path / "own")
    assert ran_by_two(learning_live, tmp_path) == [0, 0]


def test_the_ready_made_configurations_are_accelerates_own():
    found = {path.stem: load_config_from_file(str(path)) for path in CONFIGS}
    assert {name: config.num_processes for name, config in found.items()} == {
        "1gpu": 1,
        "8gpu": 8,
        "8gpu_fsdp2": 8,
        "8gpu_zero": 8,
        "2x8gpu": 16,
    }
    assert found["8gpu_fsdp2"].fsdp_config["fsdp_version"] == 2
    assert found["8gpu_zero"].deepspeed_config["zero_stage"] == 2
    assert found["2x8gpu"].num_machines == 2
    # training.precision decides: with accelerate's own, losses would be scaled twice
    assert {config.mixed_precision for config in found.values()} == {"no"}


@pytest.mark.parametrize(
    ("setting", "own"),
    [
        ({"mixed_precision": "fp16"}, "training.precision"),
        ({"gradient_accumulation_steps": 4}, "training.accumulation_steps"),
        ({"backend": DynamoBackend.INDUCTOR}, "training.compile"),
    ],
)
def test_settings_of_accelerate_that_ours_stand_for_are_refused(setting: dict[str, Any], own: str):
    def accelerator(
        *,
        mixed_precision: str = "no",
        gradient_accumulation_steps: int = 1,
        backend: DynamoBackend = DynamoBackend.NO,
    ) -> Any:
        state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=backend))
        return SimpleNamespace(
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            state=state,
        )

    check_accelerate(accelerator())
    check_accelerate(Accelerator(cpu=True))
    with pytest.raises(ValueError, match=f"{own} decides about that here"):
        check_accelerate(accelerator(**setting))


@pytest.mark.parametrize("setting", ["training.compile=true", "on_policy.fraction=0.5"])
def test_what_needs_the_whole_drafter_is_refused_where_weights_are_shared_out(setting: str):
    config = composed("+experiment=smoke", setting)
    fsdp = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=True)
    ddp = SimpleNamespace(distributed_type=DistributedType.MULTI_GPU)
    check_shares(config, ddp)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{setting.split('=')[0]}=.* does not go with FSDP2"):
        check_shares(config, fsdp)  # type: ignore[arg-type]


def test_fsdp_of_the_first_version_is_refused():
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=False)
    with pytest.raises(ValueError, match="fsdp_version: 2"):
        is_fsdp(accelerator)  # type: ignore[arg-type]
