"""On-policy batches as part of a run: which weights propose, and how a continued run gets them back."""

from safetensors.torch import load_file
from torch import Tensor

from distill.batches import BatchStream
from distill.objective import Objective
from distill.on_policy import OnPolicyStream, Proposer, replay_loss, with_replay
from distill.recipe import Recipe
from specdec_runtime.target import Target
from train.checkpoint import OPTIMIZER, Checkpoint
from train.config import TrainConfig
from train.job import Job
from train.parts import MicroBatches

PREFIX = "proposer."  # of its weights in a checkpoint


def make_proposer(job: Job, recipe: Recipe) -> Proposer | None:
    """The drafter that proposes; None where no batch comes from the runtime."""
    if not job.config.on_policy.fraction:
        return None
    copied = recipe.snapshot()
    return Proposer(copied.module, copied.drafter(engine=job.config.target.engine))


def with_rollouts(
    job: Job,
    answers: MicroBatches,
    stream: BatchStream,
    *,
    target: Target,
    recipe: Recipe,
    proposer: Proposer | None,
) -> MicroBatches:
    """The micro-batches of a run, some of them from the runtime.

    Args:
        answers: number -> batch of answers.
        stream: of the same answers, for their prompts; nothing else may call it.
    """
    if proposer is None:
        return answers
    config = job.config
    return OnPolicyStream(
        answers,
        stream.examples_of,
        target=target,
        proposer=proposer,
        trained=recipe.module,
        config=config.on_policy,
        per_step=job.accelerator.num_processes * config.training.accumulation_steps,
        seed=config.seed,
    )


def objective_of(config: TrainConfig, recipe: Recipe) -> Objective:
    """The objective of a run: on refused drafts too where there are any."""
    own = recipe.objective(config.loss)
    if not config.on_policy.fraction:
        return own
    replay = recipe.objective(replay_loss(config.loss))
    return with_replay(own, replay, config.on_policy.replay_weight)


def proposer_tensors(proposer: Proposer | None) -> dict[str, Tensor]:
    """What a checkpoint has to hold of it."""
    if proposer is None or proposer.step is None:
        return {}
    return {PREFIX + name: tensor.contiguous() for name, tensor in proposer.state().items()}


def restore_proposer(proposer: Proposer, checkpoint: Checkpoint, *, refresh_every: int) -> None:
    """Gives it back the weights that it proposed with when the checkpoint was written."""
    tensors = load_file(checkpoint.folder / OPTIMIZER)
    own = {k.removeprefix(PREFIX): v for k, v in tensors.items() if k.startswith(PREFIX)}
    if own:
        last = checkpoint.state.step - 1
        proposer.restore(own, last - last % refresh_every)
