"""The stages of a run after its material is there: training, export, evaluation; and the plan."""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.batches import BatchStream
from distill.objectives import causal_lm
from eval.run import evaluate
from eval.session import print_summary
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.formats import DrafterManifest
from specdec_runtime.loading import load_drafter
from train.acceptance import interval, measure
from train.checkpoint import TrainState
from train.config import TrainConfig
from train.drafter_folder import DrafterWriter, add_measurements, manifest_for
from train.drafter_start import KIND, Start, start_drafter
from train.evaluation_summary import measured_values, recommended_values, summary_of
from train.export import export_best
from train.job import Job
from train.loop import Intervals, Measurement, Parts, make_parts, measured_step_s, steps_in, train
from train.material import Material
from train.precision import Precision, resolved
from train.processes import on_main
from train.rng import rng_untouched, seed_everything
from train.run_dir import write_atomically
from train.run_log import RunLog
from train.session import resume, save

PRECISION = "precision.json"


@dataclass(frozen=True)
class Training:
    """Everything the training stage works with."""

    parts: Parts
    start: Start
    stream: BatchStream
    writer: DrafterWriter
    drafter: CausalLMDrafter
    selection: list[list[int]]
    identity: dict[str, str]


def load_training(job: Job, material: Material) -> Training:
    """Makes the drafter and what trains it."""
    config = job.config
    seed_everything(config.seed, job.accelerator.process_index)
    start = start_drafter(job, material)
    stream = BatchStream(
        material.answers.answers, max_tokens=config.training.batch_tokens, seed=config.seed
    )
    device = job.accelerator.device
    head = start.target_head.to(device)
    objective = causal_lm.objective(start.module, head, config.loss)
    precision = on_main(job.accelerator, lambda: chosen_precision(job))
    if config.training.compile:
        body = getattr(start.module, start.module.base_model_prefix)
        body.compile(dynamic=True)  # in place: no wrapper and no prefix in any key
    parts = make_parts(
        job.accelerator,
        start.module,
        objective,
        stream,
        optim=config.optim,
        accumulation_steps=config.training.accumulation_steps,
        precision=precision,
    )
    writer = DrafterWriter(
        start.module,
        _manifest(config, material),
        tokenizer=material.target.tokenizer,
        dtype=start.target_dtype,
        draft_vocab=start.vocab_tensors,
    )
    drafter = CausalLMDrafter.from_module(
        start.module, draft_vocab=start.head_rows, engine=config.target.engine
    )
    identity = {
        "target": material.target.fingerprint,
        "answers": material.answers.fingerprint,
        "draft vocabulary": start.fingerprint,
    }
    selection = material.selection_prompts(config.acceptance.num_prompts)
    job.say(_describe(start, stream, precision))
    return Training(parts, start, stream, writer, drafter, selection, identity)


def chosen_precision(job: Job) -> Precision:
    """The arithmetic of the run; what was measured when it started holds until its end."""
    note = job.run_dir / PRECISION
    if not note.is_file():
        found = resolved(job.config.training.precision, job.accelerator.device)
        write_atomically(note, json.dumps({"precision": found.value}))
    return Precision(json.loads(note.read_text())["precision"])


def train_drafter(job: Job, material: Material, training: Training) -> TrainState:
    """Trains to the end, from the start or from the newest checkpoint."""
    config, parts = job.config, training.parts

    def measured() -> Measurement:
        module = training.start.module
        return measure(
            material.target, training.drafter, module, training.selection, config.acceptance
        )

    def save_now(state: TrainState) -> None:
        save(job.checkpoints, parts, state, training.writer)

    state = resume(job.checkpoints, parts, identity=training.identity, say=job.say)
    _open_log(job, state)
    if state is None:
        state = _first_state(job, training, measured)
        save_now(state)  # what can not be saved should be known before the work is done
    job.state = state
    every = Intervals(
        log=config.training.log_every,
        save=config.training.save_every,
        acceptance=state.acceptance_every,
    )
    with job.progress("training", state.max_steps) as progress:
        train(
            parts,
            state,
            optim=config.optim,
            every=every,
            run_log=job.run_log,
            measure=measured,
            save=save_now,
            stop=job.stop,
            progress=progress,
        )
    job.say(
        f"trained {state.step} steps on {state.num_tokens} tokens; acceptance length "
        f"{state.first_score:.3f} before, {state.best_score:.3f} at step {state.best_step}, the best"
    )
    return state


def export(job: Job) -> Path:
    """The drafter folder of the run, from its best checkpoint."""
    job.stage = "export"
    folder = job.run_dir / "drafter"
    if folder.exists():
        shutil.rmtree(folder)  # of an earlier session; the checkpoint that it came from is here
    return export_best(job.run_dir, folder)


def evaluate_folder(
    job: Job, material: Material, folder: Path, state: TrainState
) -> dict[str, Any]:
    """Measures what was written, as anyone would who loads it; returns the run's summary."""
    job.stage = "evaluation"
    name = job.config.name
    drafters = {name: load_drafter(folder, material.target, engine=job.config.target.engine)}
    if job.config.evaluate_lookup:
        drafters["lookup"] = load_drafter("lookup", material.target)
    output = job.run_dir / "eval"
    results = evaluate(
        material.target,
        drafters,
        material.evaluation_prompts(job.config.acceptance.num_prompts),
        job.config.evaluation,
        folder=output,
        drafter_folders={name: str(folder)},
    )
    add_measurements(
        folder,
        measured=measured_values(results, name),
        recommended=recommended_values(results, name),
    )
    print_summary(results, output)
    summary = summary_of(results, name)
    job.run_log.write("evaluation", state.step, {k: v for k, v in summary.items() if k != "exact"})
    return summary | {"steps": state.step, "trained_tokens": state.num_tokens}


def _first_state(job: Job, training: Training, measured: Any) -> TrainState:
    """Acceptance before training, and from measured times how many steps there will be."""
    config, parts = job.config, training.parts
    with job.progress("acceptance before training"), rng_untouched():
        before = on_main(job.accelerator, measured)
    job.say(f"acceptance length before training: {before.score:.3f} ({before.seconds:.1f} s)")
    step_s = 1.0
    if config.training.budget_minutes is not None or config.acceptance.every is None:
        with job.progress("time of a training step"):
            step_s = measured_step_s(parts, config.optim)
        job.say(f"a training step takes {step_s:.2f} s")
    every = interval(config.acceptance, step_s=step_s, acceptance_s=before.seconds)
    state = TrainState(
        max_steps=_max_steps(job, training.stream, step_s, before.seconds, every),
        acceptance_every=every,
        processes=job.accelerator.num_processes,
        identity=training.identity,
    )
    state.is_best(before.score)
    job.run_log.write("acceptance", 0, before.values | {"seconds": before.seconds})
    job.say(f"training: {state.max_steps} steps, acceptance every {every} steps")
    return state


def _max_steps(
    job: Job, stream: BatchStream, step_s: float, acceptance_s: float, every: int
) -> int:
    """The smallest of the limits that are set."""
    config = job.config.training
    limits = [config.max_steps] if config.max_steps is not None else []
    if config.budget_minutes is not None:
        budget_s = 60 * config.budget_minutes
        limits.append(
            steps_in(budget_s, step_s=step_s, acceptance_s=acceptance_s, acceptance_every=every)
        )
    if config.num_epochs is not None:
        number = 0
        while stream.epoch_of(number) == 0:
            number += 1
        a_step = config.accumulation_steps * job.accelerator.num_processes
        limits.append(max(1, math.ceil(config.num_epochs * number / a_step)))
    return min(limits)


def _open_log(job: Job, state: TrainState | None) -> None:
    job.log = RunLog(
        job.run_dir,
        job.config.tracking,
        is_main=job.accelerator.is_main_process,
        name=job.config.name,
        config=job.settings,
        resumed_step=state.step if state is not None else None,
    )


def _manifest(config: TrainConfig, material: Material) -> DrafterManifest:
    return manifest_for(
        material.target,
        kind=KIND,
        target_name=material.target.name,
        training_data_fingerprint=material.answers.fingerprint,
        num_draft_tokens=config.acceptance.num_draft_tokens,
        template_options=dict(config.target.template_options),
        kind_config={},
    )


def _describe(start: Start, stream: BatchStream, precision: Precision) -> str:
    trained = sum(p.numel() for p in start.module.parameters() if p.requires_grad)
    return (
        f"drafter: {trained / 1e6:.1f} M trained parameters, {len(start.vocab)} tokens to propose, "
        f"{precision.value}; {len(stream.examples)} examples, {stream.num_tokens} tokens an epoch"
    )
