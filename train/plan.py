"""What a run is about to do and how long each stage will take, said before it starts.

The estimates come from two rates of this machine, measured in about two seconds, and the sizes at
hand; they are right within a factor of two. The training stage is planned by its own time budget.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from distill.signal_forms import SignalForm
from specdec_runtime.assets import cache_folder
from specdec_runtime.machine import matmul_flops_per_s
from specdec_runtime.model_names import DEFAULT_TARGET, TINY_TARGET
from train.config import TrainConfig
from train.progress import duration
from train.provenance import cpu_name

COPY_BYTES = 64 << 20  # larger than the last-level cache that a virtual core gets
# Measured: share of the matrix rate that small products of a decoder reach.
DECODE_EFFICIENCY = 0.35
PREFILL_EFFICIENCY = 0.5

BYTES_EACH = 2  # of a stored weight
FETCH_S, LOAD_S = 60.0, 3.0  # of the embedded target: download and conversion; afterwards
# Tokens of a user turn that the default target writes, and turns for one that is kept.
SELF_PROMPT_TOKENS, SELF_PROMPT_ATTEMPTS = 24, 1.4
WITH_PROMPTS = 1.4  # tokens of the default prompts and their answers / of the answers
_ANY_DEPTH = (
    30  # layers of a target: which ones a drafter reads depends on it, whether any does not
)
KNOWN_PARAMETERS = {DEFAULT_TARGET: 134_515_008, TINY_TARGET: 165_000}


@dataclass(frozen=True)
class Machine:
    """Rates of the device that will do the work."""

    name: str
    flops_per_s: float  # float32 matrix product
    bytes_per_s: float  # reading memory


@dataclass(frozen=True)
class PlannedStage:
    name: str
    seconds: float
    note: str = ""


def measure_machine(device: torch.device) -> Machine:
    """Takes about two seconds."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{os.cpu_count()} cores of {cpu_name()}"
    return Machine(
        name, matmul_flops_per_s(torch.float32, device, seconds=1.0), _bytes_per_s(device)
    )


def decode_s(
    machine: Machine, num_tokens: float, *, num_parameters: int, batch_size: int, bytes_each: int
) -> float:
    """Seconds to write `num_tokens` with a model of `num_parameters`, `batch_size` rows at once:
    a pass reads every weight once and multiplies it with every row."""
    read_s = num_parameters * bytes_each / machine.bytes_per_s
    multiply_s = 2 * num_parameters * batch_size / (machine.flops_per_s * DECODE_EFFICIENCY)
    return num_tokens / batch_size * max(read_s, multiply_s)


def planned_stages(config: TrainConfig, machine: Machine) -> list[PlannedStage]:
    """What will be done and about how long it takes; what is in the cache already takes no time."""
    model = config.target.model
    num_parameters = known_parameters(model)
    fetched = model != DEFAULT_TARGET or any((cache_folder() / "targets").glob(f"{model}-v*"))
    tokens = config.answers.max_tokens or config.prompts.num_train * config.answers.max_new_tokens

    def written_s(num_tokens: float) -> float:
        return decode_s(
            machine,
            num_tokens,
            num_parameters=num_parameters or 0,
            batch_size=config.answers.batch_size,
            bytes_each=BYTES_EACH,
        )

    answers_s = written_s(tokens)
    if config.answers.max_seconds is not None:
        answers_s = min(answers_s, config.answers.max_seconds)
    prompts_s = written_s(SELF_PROMPT_TOKENS * _num_self_prompts(config))
    known = "less where they are in the cache" if num_parameters else "depends on the target's size"
    budget = config.training.budget_minutes
    steps = "" if budget else "as many steps as set; known after the first ones"
    return [
        PlannedStage("target", LOAD_S if fetched else FETCH_S, "fetched and converted once"),
        PlannedStage("prompts", prompts_s, "that the target writes; then from the cache"),
        PlannedStage("answers", answers_s, known),
        *_signals(config, machine, num_parameters or 0, tokens),
        PlannedStage("drafter made and measured", 20.0),
        PlannedStage("training", (budget or 0) * 60, steps),
        PlannedStage("evaluation", config.evaluation.time_limit_s, "of the exported folder"),
    ]


def _signals(
    config: TrainConfig, machine: Machine, num_parameters: int, num_tokens: int
) -> list[PlannedStage]:
    """Reading the answers once more, where their signal was not recorded while they were written."""
    form, answers = config.signals.form, config.answers
    written_here = answers.server.url is None and config.answers_folder is None
    rate = machine.flops_per_s * PREFILL_EFFICIENCY
    seconds = 2 * num_parameters * num_tokens / rate
    note = "of all answers; then from the cache"
    stages = []
    recorded = answers.keep_states and written_here
    if form is not SignalForm.live and not (form is SignalForm.hidden and recorded):
        stages.append(PlannedStage("signals", seconds, note))
    reads_states = bool(config.draft.feature_layers(_ANY_DEPTH))
    if reads_states and not (written_here and answers.drafter is None):
        stages.append(PlannedStage("inner states", seconds * WITH_PROMPTS, note))
    return stages


def _num_self_prompts(config: TrainConfig) -> float:
    """Prompts that the target is asked to write itself, those that are filtered out included."""
    shares = config.prompts.shares
    share = shares.get("self_prompted", 0.0) / sum(shares.values())
    return share * config.prompts.num_train * SELF_PROMPT_ATTEMPTS


def known_parameters(model: str) -> int | None:
    """Parameters of a target before it is loaded; None if it is not on this machine yet."""
    if model in KNOWN_PARAMETERS:
        return KNOWN_PARAMETERS[model]
    files = list(Path(model).expanduser().glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) // BYTES_EACH or None


def describe(machine: Machine, stages: list[PlannedStage]) -> str:
    """The plan as lines of text."""
    width = max(len(stage.name) for stage in stages)
    lines = [
        f"  {stage.name:{width}}  about {duration(stage.seconds):>12}   {stage.note}".rstrip()
        for stage in stages
    ]
    total = duration(sum(stage.seconds for stage in stages))
    head = f"Plan on {machine.name} ({machine.flops_per_s / 1e9:.0f} GFLOP/s): about {total}"
    return "\n".join([head, *lines])


def _bytes_per_s(device: torch.device, *, seconds: float = 0.5) -> float:
    """Reading rate of memory, best of the repeats."""
    block = torch.ones(COPY_BYTES // 4, device=device)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        block.sum()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return COPY_BYTES / min(times)
