"""The stages of a run after its material is there: training, export, evaluation; and the plan."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.batches import BatchStream
from distill.live_signals import LiveSignals, states_suffice
from distill.losses import LossConfig, LossName
from distill.on_policy import Proposer
from distill.recipe import Recipe, RefreshableDrafter
from distill.signal_forms import SignalForm
from eval.former_failures import read_failures
from eval.run import evaluate
from eval.session import print_summary
from eval.summary import measured_values, recommended_values, summary_of
from specdec_runtime.drafters.early_exit import EarlyExitDrafter
from specdec_runtime.formats import DrafterManifest
from specdec_runtime.loading import load_drafter
from specdec_runtime.target import Target
from train.acceptance import evenly, interval, measure, measured_round_cost
from train.allocator import freed_memory_kept
from train.checkpoint import TrainState, read_checkpoint, restore_weights
from train.config import TrainConfig
from train.drafter_folder import DrafterWriter, add_measurements, manifest_for
from train.drafter_start import Start, start_drafter
from train.export.gate import verify_trained
from train.export.run_folder import export_best, export_formats
from train.job import Job
from train.loop import Intervals, Measurement, measured_step_s, steps_in, train
from train.material import Material
from train.on_policy import make_proposer, objective_of, with_rollouts
from train.parts import (
    MicroBatches,
    Parts,
    checkpoint_layers,
    gather_whole,
    make_parts,
)
from train.precision import Precision, resolved
from train.prefetch import Prefetching
from train.processes import on_main
from train.rng import rng_untouched, seed_everything
from train.run_dir import write_atomically
from train.session import resume, save
from train.wiring import check_wiring, wiring_values

PRECISION = "precision.json"
EVALUATION = "eval"
EXPORT = "export"


@dataclass(frozen=True)
class Training:
    """Everything the training stage works with."""

    parts: Parts
    start: Start
    stream: BatchStream
    writer: DrafterWriter
    drafter: RefreshableDrafter
    selection: list[list[int]]
    identity: dict[str, str]
    proposer: Proposer | None


def load_training(job: Job, material: Material) -> Training:
    """Makes the drafter and what trains it."""
    config = job.config
    seed_everything(config.seed, job.accelerator.process_index)
    start = start_drafter(job, material)
    stream = BatchStream(start.examples, max_tokens=config.training.batch_tokens, seed=config.seed)
    recipe = start.recipe
    recipe.module.to(job.accelerator.device)
    objective = objective_of(config, recipe)
    proposer = make_proposer(job, recipe)
    precision = on_main(job.accelerator, lambda: chosen_precision(job))
    if config.training.gradient_checkpointing:
        checkpoint_layers(recipe.module)
    if config.training.compile:
        recipe.compile()
    parts = make_parts(
        job.accelerator,
        recipe.module,
        objective,
        _batches(job, start, material.target, proposer),
        optim=config.optim,
        accumulation_steps=config.training.accumulation_steps,
        precision=precision,
    )
    writer = DrafterWriter(
        recipe,
        _manifest(config, material, recipe.kind_config()),
        tokenizer=recipe.tokenizer or material.target.tokenizer,
        dtype=start.target_dtype,
        draft_vocab=start.vocab_tensors,
    )
    drafter = recipe.drafter(engine=config.target.engine)
    identity = {
        "target": material.target.fingerprint,
        "answers": material.answers.fingerprint,
        "draft vocabulary": start.fingerprint,
    }
    selection = material.selection_prompts(config.acceptance.num_prompts)
    job.say(_describe(start, stream, precision))
    return Training(parts, start, stream, writer, drafter, selection, identity, proposer)


def _batches(job: Job, start: Start, target: Target, proposer: Proposer | None) -> MicroBatches:
    """The batches of a run, ahead of time; with a live target's signal where that is asked for, and
    some of them from the runtime."""
    accelerator, config = job.accelerator, job.config

    def stream() -> BatchStream:
        return BatchStream(
            start.examples, max_tokens=config.training.batch_tokens, seed=config.seed
        )

    loaded = stream()
    made: MicroBatches = Prefetching(
        lambda number: start.recipe.prepared(loaded(number)),
        stride=accelerator.num_processes,
        device=accelerator.device,
    )
    if config.signals.form is SignalForm.live:
        states_only = states_suffice(target, start.vocab, config.loss)
        made = LiveSignals(made, target, states_only=states_only)
    return with_rollouts(job, made, stream(), target=target, recipe=start.recipe, proposer=proposer)


def chosen_precision(job: Job) -> Precision:
    """The arithmetic of the run; what was measured when it started holds until its end."""
    note = job.run_dir / PRECISION
    if not note.is_file():
        found = resolved(job.config.training.precision, job.accelerator.device)
        write_atomically(note, json.dumps({"precision": found.value}))
    return Precision(json.loads(note.read_text())["precision"])


def train_drafter(job: Job, material: Material, training: Training) -> TrainState:
    """Trains to the end, from the start or from the newest checkpoint."""
    with freed_memory_kept(job.accelerator.device.type):
        return _train_drafter(job, material, training)


def _train_drafter(job: Job, material: Material, training: Training) -> TrainState:
    config, parts = job.config, training.parts

    def measured() -> Measurement:
        return measure(
            job.accelerator,
            material.target,
            training.drafter,
            gather_whole(parts),
            training.selection,
            config.acceptance,
            round_cost=job.state.round_cost if job.state else None,
        )

    def save_now(state: TrainState) -> None:
        save(job.checkpoints, parts, state, training.writer, proposer=training.proposer)

    state = resume(
        job.checkpoints,
        parts,
        identity=training.identity,
        say=job.say,
        proposer=training.proposer,
        refresh_every=config.on_policy.refresh_every,
    )
    job.log.continue_after(state.step if state is not None else -1)
    if state is None:
        state = _first_state(job, material, training, measured)
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
            patience=config.acceptance.patience,
            run_log=job.log,
            measure=measured,
            save=save_now,
            stop=job.stop,
            progress=progress,
        )
    job.say(_trained(state))
    return state


def export(job: Job) -> Path:
    """The drafter folder of the run, from its best checkpoint."""
    job.stage = "export"
    folder = job.run_dir / "drafter"
    if folder.exists():
        shutil.rmtree(folder)  # of an earlier session; the checkpoint that it came from is here
    return export_best(job.run_dir, folder)


def check_folder(job: Job, material: Material, training: Training, folder: Path) -> None:
    """The wiring gate: training's view of what was written against the runtime's.

    Raises:
        ValueError: if they disagree.
    """
    job.stage = "wiring"
    recipe, config = training.start.recipe, job.config
    written = _written(job, training)
    written.module.float()
    drafter = load_drafter(
        folder, material.target, engine=config.target.engine, **recipe.scored_settings
    )
    assert drafter is not None
    found = check_wiring(
        material.target,
        drafter,
        written.objective(LossConfig(name=LossName.forward_kl, temperature=1.0)),
        written.module,
        training.selection,
        feature_layers=recipe.feature_layers,
        num_draft_tokens=config.acceptance.num_draft_tokens,
        max_new_tokens=config.acceptance.max_new_tokens,
        device=job.accelerator.device,
    )
    assert job.state is not None
    for one in found:
        job.say(f"first drafted token, {one}")
    job.log.write("wiring", job.state.step, wiring_values(found))


def _written(job: Job, training: Training) -> Recipe:
    """The best checkpoint's drafter in memory, with its weights as they were written."""
    recipe = training.start.recipe
    restore_weights(read_checkpoint(job.run_dir / "best"), training.parts.whole)
    # Frozen parts are read when the objective is made: also they have to be those that were written.
    written = recipe.snapshot()
    written.module = recipe.written(training.start.target_dtype)
    return written


def verify_folder(
    job: Job, material: Material, training: Training, folder: Path, state: TrainState
) -> None:
    """Another process loads what was written: it drafts what the trained drafter drafts, and is
    accepted as often.

    Raises:
        ValueError: if it does not, or its text is not the target's.
    """
    if not job.config.verify_export or state.best_score is None:
        return
    job.stage = "verification"
    config = job.config
    said = verify_trained(
        folder,
        drafter=_written(job, training).drafter(engine=config.target.engine),
        target=material.target,
        target_name=config.target.model,
        target_options={
            "dtype": config.target.dtype,
            "device": config.target.device,
            "engine": config.target.engine.value,
        },
        prompts=training.selection,
        config=config.acceptance,
        trained_length=state.best_score,
    )
    job.say(said)


def export_for_engines(job: Job, folder: Path) -> None:
    """The formats asked for, with the draft length that the evaluation recommends.

    Raises:
        ValueError, RuntimeError: see `export_formats`.
    """
    if job.config.export_formats:
        job.stage = "export"
        export_formats(folder, job.run_dir / EXPORT, job.config.export_formats, job.say)


def evaluate_folder(
    job: Job, material: Material, folder: Path, state: TrainState
) -> dict[str, Any]:
    """Measures what was written, as anyone would who loads it; returns the run's summary."""
    job.stage = "evaluation"
    name = job.config.name
    drafters = {name: load_drafter(folder, material.target, engine=job.config.target.engine)}
    if job.config.evaluate_lookup:
        drafters["lookup"] = load_drafter("lookup", material.target)
        if not isinstance(drafters[name], EarlyExitDrafter):
            drafters[f"lookup, then {name}"] = load_drafter(f"composite:{folder}", material.target)
    output, prefixes = job.run_dir / EVALUATION, job.config.prompts.prefixes
    results = evaluate(
        material.target,
        drafters,
        material.evaluation_prompts(job.config.acceptance.num_prompts),
        job.config.evaluation,
        folder=output,
        drafter_folders={name: str(folder)},
        failures=read_failures(Path(prefixes)) if prefixes is not None else (),
    )
    add_measurements(
        folder,
        measured=measured_values(results, name),
        recommended=recommended_values(results, name),
    )
    print_summary(results, output)
    summary = summary_of(results, name)
    job.log.write("evaluation", state.step, {k: v for k, v in summary.items() if k != "exact"})
    return summary | {"steps": state.step, "trained_tokens": state.num_tokens}


def _first_state(
    job: Job, material: Material, training: Training, measured: Callable[[], Measurement]
) -> TrainState:
    """Acceptance before training, and from measured times how many steps there will be."""
    config, parts = job.config, training.parts
    with job.progress("acceptance before training"), rng_untouched():
        before = measured()
        round_cost = on_main(
            job.accelerator,
            lambda: measured_round_cost(material.target, training.drafter, config.acceptance),
        )
    job.say(
        f"acceptance length before training: {before.score:.3f} ({before.seconds:.1f} s); a round "
        f"costs {round_cost:.2f} tokens of plain decoding here, so that much is break-even"
    )
    num_micro_batches = _num_micro_batches(config, training.stream)
    step_s = 1.0
    if config.training.budget_minutes is not None or config.acceptance.every is None:
        with job.progress("time of a training step"):
            step_s = measured_step_s(parts, config.optim)
        job.say(f"a training step takes {step_s:.2f} s")
    every = interval(config.acceptance, step_s=step_s, acceptance_s=before.seconds)
    max_steps = _max_steps(job, num_micro_batches, step_s, before.seconds, every)
    every = evenly(config.acceptance, every, max_steps=max_steps)
    state = TrainState(
        max_steps=max_steps,
        num_micro_batches=num_micro_batches,
        acceptance_every=every,
        round_cost=round_cost,
        processes=job.accelerator.num_processes,
        identity=training.identity,
    )
    state.is_best(before.score)
    values = before.values | {"predicted_speedup": before.score / round_cost}
    job.log.write("acceptance", 0, values | {"seconds": before.seconds})
    job.log.write_samples(0, before.samples)
    measuring_s = math.ceil(max_steps / every) * before.seconds
    share = measuring_s / (measuring_s + max_steps * step_s)
    job.say(
        f"training: {state.max_steps} steps, acceptance every {every} steps, "
        f"about {share:.0%} of the time"
    )
    return state


def _max_steps(
    job: Job, num_micro_batches: int | None, step_s: float, acceptance_s: float, every: int
) -> int:
    """The smallest of the limits that are set."""
    config = job.config.training
    limits = [config.max_steps] if config.max_steps is not None else []
    if config.budget_minutes is not None:
        budget_s = 60 * config.budget_minutes
        limits.append(
            steps_in(budget_s, step_s=step_s, acceptance_s=acceptance_s, acceptance_every=every)
        )
    if num_micro_batches is not None:
        a_step = config.accumulation_steps * job.accelerator.num_processes
        limits.append(math.ceil(num_micro_batches / a_step))
    return min(limits)


def _num_micro_batches(config: TrainConfig, stream: BatchStream) -> int | None:
    """Where training.num_epochs ends; None without that limit."""
    if config.training.num_epochs is None:
        return None
    number = 0
    while stream.epoch_of(number) == 0:
        number += 1
    return max(1, math.ceil(config.training.num_epochs * number))


def _manifest(
    config: TrainConfig, material: Material, kind_config: dict[str, Any]
) -> DrafterManifest:
    return manifest_for(
        material.target,
        kind=config.draft.kind,
        target_name=material.target.name,
        training_data_fingerprint=material.answers.fingerprint,
        num_draft_tokens=config.acceptance.num_draft_tokens,
        template_options=dict(config.target.template_options),
        kind_config=kind_config,
    )


def _trained(state: TrainState) -> str:
    share = state.acceptance_s / max(state.acceptance_s + state.seconds, 1e-9)
    early = f" (early: {state.num_worse} measurements without a better one)"
    return (
        f"trained {state.step} steps{early if state.ended_early else ''} on {state.num_tokens} "
        f"tokens; acceptance length {state.first_score:.3f} before, {state.best_score:.3f} at step "
        f"{state.best_step}, the best; {state.num_measurements} measurements took "
        f"{state.acceptance_s:.0f} s, {share:.0%} of the time"
    )


def _describe(start: Start, stream: BatchStream, precision: Precision) -> str:
    trained = sum(p.numel() for p in start.recipe.module.parameters() if p.requires_grad)
    left_out = stream.num_dropped
    dropped = f"; {left_out} without a token to learn from are left out" if left_out else ""
    return (
        f"drafter: {trained / 1e6:.1f} M trained parameters, {len(start.vocab)} tokens to propose, "
        f"{precision.value}; {len(stream.examples)} examples, {stream.num_tokens} tokens an epoch"
        f"{dropped}"
    )
