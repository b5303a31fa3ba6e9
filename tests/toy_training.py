"""A drafter of a few hundred weights, with dropout, and an endless stream of uneven batches.

Real training sessions on it (start or resume, train, save) take milliseconds.
"""

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from eval.trackers import TrackingConfig
from train.checkpoint import Checkpoints, TrainState
from train.interrupts import StopRequest
from train.loop import Intervals, Measurement, train
from train.optim import OptimConfig
from train.parts import Parts, make_parts
from train.precision import Precision
from train.progress import StageProgress
from train.rng import seed_everything
from train.run_log import RunLog
from train.session import resume, save
from train.sharding import shard_on_cpu
from train.zero import start_zero

VOCAB_SIZE = 11
BATCHES_PER_EPOCH = 5
HANGS_AFTER_S = 300.0  # what takes seconds, on a machine that does much else
# What takes seconds to import (an optimizer imports torch._dynamo).
PRELOADED = ["accelerate", "torch._dynamo", "torch.distributed.fsdp", "pytest", "train.session"]


def forked(function: Callable[..., None], *arguments: object) -> BaseProcess:
    """A started process that has imported everything: the fork of a server that did nothing else.

    (A fork of this one would start at once, and hangs now and then: tests have left threads in it.)
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_on_one_thread, args=(function, *arguments))
    process.start()
    return process


@contextmanager
def free_port() -> Iterator[int]:
    """For a group of processes; held meanwhile, so that the system gives it to nobody else."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # theirs will listen beside it
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def exit_codes(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Once they have ended; None of one that hangs, which is killed."""
    for process in processes:
        process.join(HANGS_AFTER_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def as_rank(rank: int, port: int, processes: int = 2) -> None:
    """Makes this process one of a group, as torchrun would."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def ran_by_two(worker: Callable[..., None], *arguments: object) -> list[int | None]:
    """Exit codes of `worker(rank, port, *arguments)` as both ranks of a group."""
    with free_port() as port:
        return exit_codes([forked(worker, rank, port, *arguments) for rank in (0, 1)])


def _on_one_thread(function: Callable[..., None], *arguments: object) -> None:
    torch.set_num_threads(1)
    function(*arguments)


@dataclass
class ToyBatch:
    ids: list[str]
    token_ids: Tensor  # [n] int64: predict the next one from each

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) - 1

    def to(self, device: torch.device) -> "ToyBatch":
        return ToyBatch(self.ids, self.token_ids.to(device))


@dataclass
class ToyTerms:
    loss_sum: Tensor
    num_tokens: int
    counts: dict[str, tuple[Tensor, Tensor]]


class ToyDrafter(nn.Module):
    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, VOCAB_SIZE)
        self.head.weight = nn.Parameter(self.embed.weight.detach().clone())

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.head(self.dropout(self.embed(token_ids)))


def cross_entropy(drafter: nn.Module, batch: ToyBatch) -> ToyTerms:
    logits = drafter(batch.token_ids[:-1])
    loss = nn.functional.cross_entropy(logits, batch.token_ids[1:], reduction="sum")
    right = (logits.argmax(-1) == batch.token_ids[1:]).sum()
    return ToyTerms(loss, batch.num_tokens, {"agreement": (right, torch.tensor(len(logits)))})


def micro_batch(number: int) -> ToyBatch:
    """Epochs of a few batches of uneven length, in an order that depends on the epoch."""
    epoch, index = divmod(number, BATCHES_PER_EPOCH)
    order = torch.randperm(BATCHES_PER_EPOCH, generator=torch.Generator().manual_seed(epoch))
    example = int(order[index])
    generator = torch.Generator().manual_seed(1000 + example)
    token_ids = torch.randint(VOCAB_SIZE, (3 + 4 * example,), generator=generator)
    return ToyBatch([f"example-{example}"], token_ids)


def toy_parts(
    *,
    dropout: float = 0.5,
    accumulation_steps: int = 1,
    objective: Callable[[nn.Module, ToyBatch], ToyTerms] = cross_entropy,
    micro_batches: Callable[[int], ToyBatch] = micro_batch,
    precision: Precision = Precision.fp32,
    max_grad_norm: float = 1.0,
) -> Parts:
    seed_everything(3)
    accelerator = Accelerator(cpu=True)
    shard_on_cpu(accelerator)
    start_zero(accelerator)
    return make_parts(
        accelerator,
        ToyDrafter(dropout),
        objective,
        micro_batches,
        optim=OptimConfig(max_grad_norm=max_grad_norm),
        accumulation_steps=accumulation_steps,
        precision=precision,
    )


def write_toy_drafter(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def score_of(parts: Parts) -> float:
    """Stands for the acceptance length: depends on the weights alone."""
    return float(parts.drafter.state_dict()["head.weight"].sum())


def run_toy(
    run_dir: Path,
    parts: Parts,
    *,
    max_steps: int,
    save_every: int = 3,
    log_every: int = 1,
    patience: int | None = None,
    stop: StopRequest | None = None,
    write_drafter: Callable[[Path], None] = write_toy_drafter,
    score: Callable[[Parts], float] = score_of,
) -> TrainState:
    """A session of a toy run: starts or resumes, trains, saves."""
    checkpoints = Checkpoints(run_dir, keep_last=2)
    state = resume(checkpoints, parts, identity={"data": "toy"}, say=lambda sentence: None)
    accelerator = parts.accelerator
    is_main = accelerator.is_main_process
    log = RunLog(run_dir, TrackingConfig(), is_main=is_main, name="toy", config={})
    log.continue_after(state.step if state else -1)
    if state is None:
        state = TrainState(
            max_steps=max_steps, processes=accelerator.num_processes, identity={"data": "toy"}
        )
    try:
        train(
            parts,
            state,
            optim=OptimConfig(),
            every=Intervals(log=log_every, save=save_every, acceptance=15),
            patience=patience,
            run_log=log,
            measure=lambda: Measurement(score(parts), {}, seconds=torch.rand(1).item()),
            save=lambda now: save(checkpoints, parts, now, write_drafter),
            stop=stop or StopRequest(),
            progress=StageProgress(),
        )
    finally:
        log.finish(exit_code=0)
    return state


def weights(parts: Parts) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in parts.drafter.state_dict().items()}
