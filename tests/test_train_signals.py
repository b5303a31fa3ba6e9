"""A run learns from whatever form of signal it is told to, and all of them tell it the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from distill.objective import Terms
from distill.signals import NoSignal
from tests.toy_prompts import write_prompts
from train.config import TrainConfig
from train.interrupts import StopRequest
from train.job import Job
from train.material import Material, prepare
from train.plan import Machine, planned_stages
from train.run_log import RunLog
from train.stages import Training, load_training

SMALL = [
    "+experiment=smoke",
    "prompts.file=asked.jsonl",
    "prompts.num_train=12",
    "answers.max_new_tokens=10",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's cache of its own, for all runs of this file."""
    root = tmp_path_factory.mktemp("signals")
    write_prompts(root / "asked.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("DRAFTLOOP_CACHE", str(root / "cache"))
        yield root


def composed(*overrides: str) -> TrainConfig:
    with initialize_config_module("conf", version_base="1.3"):
        config = OmegaConf.to_object(compose("train", overrides=[*SMALL, *overrides]))
    assert isinstance(config, TrainConfig)
    return config


@contextmanager
def prepared(run_dir: Path, *overrides: str) -> Iterator[tuple[Job, Material]]:
    """A run that has everything that its drafter learns from."""
    config = composed(*overrides)
    run_dir.mkdir()
    with StopRequest() as stop:
        log = RunLog(run_dir, config.tracking, is_main=True, name=config.name, config={})
        accelerator = Accelerator(cpu=True)
        job = Job(config=config, log=log, accelerator=accelerator, run_dir=run_dir, stop=stop)
        yield job, prepare(job)


def first_terms(training: Training) -> Terms:
    training.parts.drafter.eval()
    with torch.no_grad():
        return training.parts.loss(training.parts.micro_batches(0))


def overlap(terms: Terms, name: str = "overlap") -> float:
    return float(terms.counts[name][0] / terms.counts[name][1])


def test_a_run_learns_the_same_from_every_form(folder: Path):
    """Of answers without recorded states, as a server writes them."""
    found, answers = {}, {}
    for form in ("hidden", "sparse", "live"):
        settings = [f"signals.form={form}", "answers.keep_states=false"]
        if form == "live":  # the folder that the other runs wrote into, by its path
            settings.append(f"answers_folder={next((folder / 'cache' / 'answers').iterdir())}")
        with prepared(folder / form, *settings) as (job, material):
            found[form] = first_terms(load_training(job, material))
            answers[form] = [answer.id for answer in material.answers.answers]
        assert all(isinstance(answer.rows, NoSignal) for answer in material.answers.answers)
    assert sorted(answers["hidden"]) == sorted(answers["sparse"]) == sorted(answers["live"])
    assert len({path.name for path in (folder / "cache" / "signals").iterdir()}) == 2
    lower, upper = overlap(found["sparse"]), overlap(found["sparse"], "overlap_upper")
    assert lower - 1e-3 <= overlap(found["hidden"]) <= upper + 1e-3


def test_a_change_of_training_reuses_the_signals(folder: Path):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("signals-*.safetensors")}
    settings = ["signals.form=sparse", "answers.keep_states=false", "optim.learning_rate=1e-5"]
    with prepared(folder / "again", *settings, "loss=total_variation"):
        pass
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("signals-*.safetensors")}
    assert before


def test_answers_of_another_template_are_refused(folder: Path):
    written = next((folder / "cache" / "answers").iterdir())
    settings = [f"answers_folder={written}", "+target.template_options.thinking=true"]
    with (
        pytest.raises(ValueError, match=r"was written with template \w+, the target is served"),
        prepared(folder / "other", *settings),
    ):
        pass


def test_a_loss_that_the_form_would_bias_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match=r"jsd with signals\.form=sparse"):
        composed("loss=jsd", "signals.form=sparse")


@pytest.mark.parametrize(
    ("setting", "is_read_again"),
    [
        ("signals.form=hidden", False),
        ("signals.form=live", False),
        ("signals.form=sparse", True),
        ("answers.keep_states=false", True),
        ("answers.server.url=http://localhost:8000/v1", True),
    ],
)
def test_the_plan_names_the_reading_of_answers_without_signal(setting: str, is_read_again: bool):
    machine = Machine("some", flops_per_s=1e11, bytes_per_s=1e10)
    names = [stage.name for stage in planned_stages(composed(setting), machine)]
    assert ("signals" in names) is is_read_again
