"""One cell of the drafters' table: a drafter trained with one loss and seed, and what it is accepted.

A cell is a run of `python -m train` without its evaluation, in a folder of its own. What was found
is written last, so that a cell is there or it is not; one that was stopped on the way goes on from
its newest checkpoint, with the steps that it planned when it began.
"""

import argparse
import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from distill.answers.dataset import AnswerSet
from distill.batches import Example, collate
from distill.live_signals import with_live_states
from distill.losses import LossConfig, LossName
from distill.signals import NoSignal
from eval.acceptance import measure_acceptance
from eval.speed import speculative_decode, tokens_per_s
from specdec_runtime import SpeculativeDecoder, load_drafter
from specdec_runtime.auto_length import measured_policy
from specdec_runtime.draft import Drafter
from specdec_runtime.draft_length import CostAware
from specdec_runtime.stats import AcceptanceStats
from specdec_runtime.target import Target
from train.checkpoint import read_checkpoint, restore_weights
from train.config import TrainConfig
from train.features import with_features
from train.interrupts import StopRequest
from train.job import Job
from train.material import HELD_OUT, Material, prepare
from train.run_dir import write_atomically
from train.run_log import RunLog, read_metrics
from train.stages import Training, export, load_training, train_drafter

K = 4  # drafted tokens a round of the acceptance figures
RESULT, DRAFTER, RUN, SETUP = "result.json", "drafter", "run", "setup.json"
# Of a cell on two cores: the start solved for, a step's and a round's time measured, files written.
OVERHEAD_S = 75.0


@dataclass(frozen=True)
class Choice:
    """What is trained; kind and loss may carry settings behind colons.

    tokens: of the answers, from the first one on; None = all.
    """

    kind: str
    loss: str
    seed: int
    tokens: int | None = None

    @property
    def overrides(self) -> list[str]:
        kind, *own = self.kind.split(":")
        loss, *more = self.loss.split(":")
        return [f"draft={kind}", f"loss={loss}", f"seed={self.seed}", *own, *more]


@dataclass(frozen=True)
class Moment:
    """A measurement while training: greedy, on the selection prompts, at the run's draft length."""

    step: int
    tokens: int  # trained so far
    minutes: float  # of training, without measurements
    acceptance_length: float


@dataclass(frozen=True)
class Cell:
    """What was found; the lists run parallel to the prompts of a suite.

    overlaps: of each text that the target sampled, sum of min(target, draft) and positions.
    acceptance: by "suite T=temperature".
    draft_cost: of a drafted token in passes of the target over one token, at K drafted tokens.
    draft_tokens: the length that the cost model finds best, at least 1.
    start_s, training_s: up to the first step; in the loop, measurements included.
    """

    overlaps: list[tuple[float, int]]
    acceptance: dict[str, list[AcceptanceStats]]
    draft_cost: float
    draft_tokens: int
    steps: int = 0
    trained_tokens: int = 0
    answer_tokens: int = 0
    start_s: float = 0.0
    training_s: float = 0.0
    moments: tuple[Moment, ...] = ()


@dataclass(frozen=True)
class Bench:
    """What all cells share.

    prompts: token ids by suite; held-out ones that chose no checkpoint, and the others.
    texts: sampled by the target behind the held-out prompts, with its states.
    seconds_a_token: of plain decoding.
    """

    options: argparse.Namespace
    material: Material
    prompts: dict[str, list[list[int]]]
    texts: list[Example]
    seconds_a_token: float

    @property
    def target(self) -> Target:
        return self.material.target


def prepare_bench(options: argparse.Namespace, stop: StopRequest) -> Bench:
    """Loads the target, has it write what is missing, and samples the texts of the overlap."""
    folder = options.output / f"material-{digest_of([options.experiment, sorted(options.set)])}"
    job = job_of(options, Choice("causal_lm", "lk_hybrid", 0), folder, stop)
    material = prepare(job)
    suites = material.evaluation_prompts(job.config.acceptance.num_prompts)
    prompts = {
        name: [list(prompt.token_ids) for prompt in suite[: options.prompts]]
        for name, suite in suites.items()
    }
    held_out = prompts[HELD_OUT]
    decoded = SpeculativeDecoder(material.target).generate(
        held_out, max_new_tokens=options.new_tokens, temperature=1.0, seed=0
    )
    texts = [
        Example(str(i), torch.tensor([*prompt, *new]), len(prompt), NoSignal(len(new)))
        for i, (prompt, new) in enumerate(zip(held_out, decoded.token_ids, strict=True))
    ]
    total = sum(text.num_tokens for text in texts)
    whole = with_live_states(material.target, texts, max_positions=total)
    plain = speculative_decode(material.target, None, 0)
    rate = tokens_per_s(plain, held_out[:2], max_new_tokens=options.new_tokens)
    return Bench(options, material, prompts, whole, 1 / rate)


def job_of(options: argparse.Namespace, choice: Choice, run_dir: Path, stop: StopRequest) -> Job:
    """A training job with these settings, in a folder that may hold its earlier sessions."""
    overrides = [f"+experiment={options.experiment}", *choice.overrides, *options.set]
    if options.minutes is not None:
        overrides.append(f"training.budget_minutes={options.minutes}")
    with initialize_config_module("conf", version_base="1.3"):
        config = OmegaConf.to_object(compose("train", overrides=overrides))
    assert isinstance(config, TrainConfig)
    run_dir.mkdir(parents=True, exist_ok=True)
    log = RunLog(run_dir, config.tracking, is_main=True, name=config.name, config={})
    return Job(
        config=config,
        log=log,
        accelerator=Accelerator(cpu=config.target.device == "cpu"),
        run_dir=run_dir,
        stop=stop,
    )


def cell_folder(options: argparse.Namespace, choice: Choice) -> Path:
    """Where a cell is kept: another one for every setting that changes its figures."""
    settings = [asdict(choice), options.experiment, options.minutes, sorted(options.set)]
    settings += [options.prompts, options.new_tokens]
    name = f"{choice.kind.partition(':')[0]}-{choice.loss.partition(':')[0]}-{choice.seed}"
    return Path(options.output) / "cells" / f"{name}-{digest_of(settings)}"


def digest_of(settings: Sequence[Any]) -> str:
    """A short name for what was set."""
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]


def find_cell(bench: Bench, choice: Choice, stop: StopRequest) -> Cell:
    """The cell, trained and measured where it is not there yet."""
    folder = cell_folder(bench.options, choice)
    if (folder / RESULT).is_file():
        return read_cell(folder)
    job = job_of(bench.options, choice, folder / RUN, stop)
    material = first_tokens(bench.material, choice.tokens)
    begun = time.perf_counter()
    training = load_training(job, material)
    start_s = noted_once(folder / SETUP, time.perf_counter() - begun)
    state = train_drafter(job, material, training)
    shutil.rmtree(folder / DRAFTER, ignore_errors=True)  # of a session that was stopped here
    shutil.copytree(export(job), folder / DRAFTER)
    drafter = load_drafter(folder / DRAFTER, bench.target)
    assert drafter is not None
    cell = replace(
        measured(bench, drafter),
        overlaps=overlaps_of(job, training, bench),
        steps=state.step,
        trained_tokens=state.num_tokens,
        answer_tokens=material.answers.num_tokens,
        start_s=start_s,
        training_s=state.seconds + state.acceptance_s,
        moments=moments_of(read_metrics(job.run_dir)),
    )
    job.log.finish(exit_code=0)
    write_atomically(folder / RESULT, json.dumps(asdict(cell), indent=1))
    shutil.rmtree(folder / RUN)  # checkpoints are large
    return cell


def first_tokens(material: Material, number: int | None) -> Material:
    """The material with the first answers, up to so many tokens of them.

    Raises:
        ValueError: if there are fewer.
    """
    if number is None:
        return material
    answers = material.answers.answers
    sums = torch.tensor([answer.num_tokens for answer in answers]).cumsum(0)
    if int(sums[-1]) < number:
        raise ValueError(
            f"--curve {number}: the answers have {int(sums[-1])} tokens; raise answers.max_tokens "
            "and prompts.num_train with --set, or ask for fewer"
        )
    count = int((sums < number).sum()) + 1
    return replace(
        material,
        answers=AnswerSet(answers[:count], material.answers.manifest),
        examples=material.examples[:count],
    )


def noted_once(path: Path, value: float) -> float:
    """The value of the first session that came this far."""
    if not path.is_file():
        write_atomically(path, json.dumps(value))
    return float(json.loads(path.read_text()))


def overlaps_of(job: Job, training: Training, bench: Bench) -> list[tuple[float, int]]:
    """Of the best checkpoint, teacher-forced, on each text that the target sampled."""
    recipe = training.start.recipe
    module = recipe.module.eval()
    restore_weights(read_checkpoint(job.run_dir / "best"), module)
    objective = recipe.objective(LossConfig(name=LossName.forward_kl, temperature=1.0))
    found = []
    with torch.no_grad():
        for text in with_features(job, bench.target, recipe.feature_layers, bench.texts):
            batch = recipe.prepared(collate([text])).to(job.accelerator.device)
            overlap, positions = objective(module, batch).counts["overlap"]
            found.append((float(overlap), int(positions)))
    return found


def measured(bench: Bench, drafter: Drafter) -> Cell:
    """Acceptance of a drafter at K, greedy on every suite and sampled on the held-out prompts, what a
    drafted token costs, and the length to time."""
    acceptance = {}
    for suite, prompts in bench.prompts.items():
        for temperature in (0.0, 1.0) if suite == HELD_OUT else (0.0,):
            acceptance[key(suite, temperature)] = measure_acceptance(
                bench.target,
                drafter,
                prompts,
                num_draft_tokens=K,
                max_new_tokens=bench.options.new_tokens,
                temperature=temperature,
            ).prompts
    costs = measured_policy(bench.target, drafter, max_draft_tokens=K)
    greedy = sum(acceptance[key(HELD_OUT, 0.0)], AcceptanceStats())
    cost = costs.draft_cost + costs.draft_start / K
    return Cell([], acceptance, cost, best_length(greedy, costs))


def key(suite: str, temperature: float) -> str:
    return f"{suite} T={temperature:g}"


def best_length(stats: AcceptanceStats, costs: CostAware) -> int:
    """The draft length with the largest predicted speedup, at least 1."""
    kept = stats.acceptance_by_position

    def speedup(length: int) -> float:
        cost = costs.verify_cost[length] + costs.draft_start + length * costs.draft_cost
        return (1 + sum(kept[:length])) / cost

    return max(range(1, len(kept) + 1), key=speedup, default=1)


def moments_of(metrics: Sequence[Mapping[str, Any]]) -> tuple[Moment, ...]:
    """The measurements in the log of a run, from the one before its first step on."""
    return tuple(
        Moment(
            step=record["step"],
            tokens=record.get("trained_tokens", 0),
            minutes=record.get("trained_minutes", 0.0),
            acceptance_length=record["acceptance_length"],
        )
        for record in metrics
        if record["kind"] == "acceptance"
    )


def read_cell(folder: Path) -> Cell:
    """A finished cell."""
    record = json.loads((folder / RESULT).read_text())
    record["overlaps"] = [(float(top), int(bottom)) for top, bottom in record["overlaps"]]
    record["acceptance"] = {
        name: [AcceptanceStats(**row) for row in rows]
        for name, rows in record["acceptance"].items()
    }
    record["moments"] = tuple(Moment(**moment) for moment in record["moments"])
    return Cell(**record)
