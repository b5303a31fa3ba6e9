"""Starting a training, or continuing one exactly where its newest good checkpoint stands."""

from collections.abc import Callable
from pathlib import Path

from distill.on_policy import Proposer
from train.checkpoint import (
    Checkpoints,
    TrainState,
    read_checkpoint,
    restore,
)
from train.on_policy import proposer_tensors, restore_proposer
from train.parts import Parts, gather_whole
from train.processes import from_all, on_main
from train.rng import capture_rng, restore_rng
from train.sharding import trained_weights


def resume(
    checkpoints: Checkpoints,
    parts: Parts,
    *,
    identity: dict[str, str],
    say: Callable[[str], None],
    proposer: Proposer | None = None,
    refresh_every: int = 1,
) -> TrainState | None:
    """Restores weights, moments and random states from the newest complete checkpoint.

    Returns None where there is no checkpoint yet. `say` is told about damaged ones.

    Raises:
        ValueError: if the checkpoint belongs to another target, data set, drafter or number of
            processes; none of them can be continued exactly.
    """

    def newest() -> Path | None:
        checkpoint, passed_over = checkpoints.newest()
        for sentence in passed_over:
            say(sentence)
        if passed_over and checkpoint is None:
            say("no complete checkpoint is left: training starts from its beginning")
        return checkpoint.folder if checkpoint else None

    folder = on_main(parts.accelerator, newest)
    if folder is None:
        return None
    checkpoint = read_checkpoint(folder)
    _require_same_run(checkpoint.state, identity, parts.accelerator.num_processes)
    rng = restore(checkpoint, parts)
    if proposer is not None:
        restore_proposer(proposer, checkpoint, refresh_every=refresh_every)
    if parts.accelerator.is_main_process:
        checkpoints.point_best(checkpoint.state)
    if parts.scaler.is_enabled():
        parts.scaler.load_state_dict(checkpoint.state.scaler)
    restore_rng(rng)
    say(f"continuing after step {checkpoint.state.step} of {checkpoint.state.max_steps}")
    return checkpoint.state


def save(
    checkpoints: Checkpoints,
    parts: Parts,
    state: TrainState,
    write_drafter: Callable[[Path], object],
    *,
    proposer: Proposer | None = None,
) -> None:
    """Writes a checkpoint from the main process, with the random states of all.

    Every process calls it: where weights are sharded, all of them are needed for whole tensors.
    """
    rng = from_all(parts.accelerator, capture_rng())
    weights = trained_weights(gather_whole(parts))
    moments = parts.updates.moments() | proposer_tensors(proposer)
    state.scaler = parts.scaler.state_dict()

    def write() -> Path:
        return checkpoints.save(
            state,
            weights=weights,
            moments=moments,
            param_groups=parts.updates.param_groups(),
            rng=rng,
            write_drafter=write_drafter,
        )

    on_main(parts.accelerator, write)


def _require_same_run(state: TrainState, identity: dict[str, str], processes: int) -> None:
    if state.processes != processes:
        raise ValueError(
            f"the run was started with {state.processes} processes and would continue with "
            f"{processes}: its random states belong to processes; start the same number"
        )
    for name, own in identity.items():
        if state.identity.get(name) != own:
            raise ValueError(
                f"{name} is {own} here and was {state.identity.get(name)} when the run started: "
                "start a new run without resume"
            )
