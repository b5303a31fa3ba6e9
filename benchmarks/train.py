"""Training speed: live and cached signals, against the machine's arithmetic and against TRL.

    python -m benchmarks.train TARGET [--steps 6] [--batch-tokens 1024] [--layers 0,1] [--no-trl]

TRL's trainer is GKDTrainer without its own sampling (lmbda=0): the one that learns from given
answers. It gets the same drafter, the very same padded batches, the same loss (forward KL), AdamW
and float32. Every variant runs in a process of its own, one after the other, so that peak memory is
its own; the first steps warm up; tokens are those that are learned from.

The limit is what the matrix products that a variant needs would take at the rate of one large
product, measured here: layers forwards and backwards (6 operations a weight and position; 2 for the
target's), heads at the loss positions only. Attention itself and everything elementwise is not
counted. TRL: pip install trl (its dependencies are those of this product).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from distill.batches import Batch, BatchStream, Example
from distill.draft_vocab import DraftVocab, full_vocab, most_frequent, token_counts
from distill.embedded_prompts import mt_bench
from distill.live_signals import LiveSignals, states_suffice
from distill.losses import LossConfig, LossName
from distill.objectives import causal_lm
from distill.recipe import Recipe, TargetParts, make_recipe
from distill.signals import NoSignal, TargetHead
from specdec_runtime import load_target
from specdec_runtime.loading import load_module
from specdec_runtime.machine import matmul_flops_per_s
from specdec_runtime.target import Target
from train.allocator import freed_memory_kept
from train.checkpoint import TrainState
from train.loop import optimizer_step
from train.metrics import MetricSums
from train.optim import OptimConfig
from train.parts import make_parts
from train.precision import Precision
from train.prefetch import Prefetching
from train.rng import seed_everything
from train.throughput import peak_memory_bytes

CPU = torch.device("cpu")
WARM_UP = 2  # the first steps allocate
REDUCED = 8192  # of the default drafter
PROMPT_TOKENS, ANSWER_TOKENS = 80, 100  # at most; the default data has about so many
LOSS = LossConfig(name=LossName.forward_kl)


class Result(NamedTuple):
    """One variant: seconds of its median step, what the step works on, and its peak memory."""

    name: str
    step_s: float
    num_tokens: float
    num_positions: float
    flops: float | None
    peak_bytes: int


class Setup(NamedTuple):
    """The pair and the data, the same for every variant."""

    target: Target
    module: PreTrainedModel
    recipe: Recipe
    head: TargetHead
    batches: list[Batch]


def main() -> None:
    arguments = parse_arguments()
    if arguments.variant:
        print(json.dumps(VARIANTS[arguments.variant](arguments)._asdict()))
        return
    rate = matmul_flops_per_s(torch.float32, CPU, seconds=2.0)
    print(
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, {rate / 1e9:.0f} GFLOP/s; "
        f"layers {arguments.layers}, {arguments.batch_tokens} padded tokens a step\n"
    )
    print(f"{'variant':22} {'tokens/s':>9} {'positions/s':>12} {'of limit':>9} {'peak GiB':>9}")
    for name in VARIANTS:
        if arguments.trl or name != "trl":
            print_row(run_apart(name, arguments), rate)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("target", help="folder or hub id")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--layers", default="0,1")
    parser.add_argument("--no-trl", dest="trl", action="store_false")
    parser.add_argument("--variant", help=argparse.SUPPRESS)  # what a process of its own runs
    return parser.parse_args()


def run_apart(name: str, arguments: argparse.Namespace) -> Result:
    """The variant in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.train", arguments.target, "--variant", name]
    command += ["--steps", str(arguments.steps), "--batch-tokens", str(arguments.batch_tokens)]
    command += ["--layers", arguments.layers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def print_row(one: Result, rate: float) -> None:
    limit = f"{one.flops / rate / one.step_s:.0%}" if one.flops is not None else "-"
    print(
        f"{one.name:22} {one.num_tokens / one.step_s:9.0f} "
        f"{one.num_positions / one.step_s:12.0f} {limit:>9} {one.peak_bytes / 2**30:9.2f}",
        flush=True,
    )


def set_up(arguments: argparse.Namespace, *, vocab_size: int | None, cached: bool) -> Setup:
    """The pair and its batches; `cached` computes the target's states now, outside the clock."""
    seed_everything(0)
    target = load_target(arguments.target)
    module = load_module(target.source, device="cpu")
    examples = make_examples(target)
    vocab = make_vocab(target, examples, vocab_size)
    head = TargetHead.of(module, vocab, real_vocab_size=target.real_vocab_size)
    layers = [int(layer) for layer in arguments.layers.split(",")]
    settings = causal_lm.CausalLMSettings(layers=layers, draft_vocab_size=vocab_size)
    recipe = make_recipe(settings, TargetParts(target, module, vocab, head))
    stream = BatchStream(examples, max_tokens=arguments.batch_tokens, seed=0)
    source = LiveSignals(stream, target) if cached else stream
    batches = [source(number) for number in range(WARM_UP + arguments.steps)]
    return Setup(target, module, recipe, head, batches)


def make_examples(target: Target) -> list[Example]:
    """MT-bench questions, each followed by another one as its answer: text of ordinary lengths."""
    texts = [str(prompt.messages[-1]["content"]) for prompt in mt_bench()]
    ids = [target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    examples = []
    for number, prompt in enumerate(ids):
        answer = (ids[number - 1] + ids[number - 2] + ids[number - 3])[:ANSWER_TOKENS]
        kept = prompt[:PROMPT_TOKENS]
        examples.append(
            Example(f"{number}", torch.tensor(kept + answer), len(kept), NoSignal(len(answer)))
        )
    return examples


def make_vocab(target: Target, examples: Sequence[Example], size: int | None) -> DraftVocab:
    real, rows = target.real_vocab_size, target.model.vocab_size
    if size is None or size >= real:
        return full_vocab(real, target_size=rows)
    counts = token_counts([example.token_ids for example in examples], rows)
    return most_frequent(counts, size, always=set(target.eos_token_ids), real_size=real)


def ours(name: str, *, vocab_size: int | None, cached: bool) -> Callable[..., Result]:
    """Our training step on these batches."""

    def run(arguments: argparse.Namespace) -> Result:
        setup = set_up(arguments, vocab_size=vocab_size, cached=cached)
        source: Callable[[int], Batch] = setup.batches.__getitem__
        if cached:
            source = Prefetching(
                lambda number: setup.batches[number % len(setup.batches)], stride=1, device=CPU
            )
        else:
            suffice = states_suffice(setup.target, setup.head.vocab, LOSS)
            source = LiveSignals(source, setup.target, states_only=suffice)
        parts = make_parts(
            Accelerator(cpu=True),
            setup.recipe.module,
            setup.recipe.objective(LOSS),
            source,
            optim=OptimConfig(),
            accumulation_steps=1,
            precision=Precision.fp32,
        )
        state, optim = TrainState(max_steps=len(setup.batches)), OptimConfig()
        parts.drafter.train()
        times = []
        with freed_memory_kept("cpu"):
            for _ in setup.batches:
                started = time.perf_counter()
                step = optimizer_step(parts, state, optim, MetricSums(), stop_requested=False)
                step.grad_norm.item()
                times.append(time.perf_counter() - started)
        return result_of(name, times, setup, flops_of(setup, cached=cached))

    return run


def flops_of(setup: Setup, *, cached: bool) -> float:
    """Operations of the matrix products that a mean step needs."""
    timed = setup.batches[WARM_UP:]
    positions = sum(batch.token_ids.numel() for batch in timed) / len(timed)
    tokens = sum(batch.num_tokens for batch in timed) / len(timed)
    trained = sum(p.numel() for p in setup.recipe.module.parameters() if p.requires_grad)
    rows, width = setup.head.kept_weight.shape
    # The draft head forwards and backwards to its input; the target's head forwards.
    flops = 6 * trained * positions + (4 + 2) * rows * width * tokens
    if not cached:
        embeddings = setup.module.get_input_embeddings().weight
        of_layers = sum(p.numel() for p in setup.module.parameters()) - embeddings.numel()
        everything = setup.target.real_vocab_size * width  # log-sum-exp and argmax
        flops += 2 * of_layers * positions + 2 * everything * tokens
    return flops


def trl(arguments: argparse.Namespace) -> Result:
    """TRL's step on the same batches."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    setup = set_up(arguments, vocab_size=None, cached=False)
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *given: Any, **named: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *given: Any, **named: Any) -> None:
            times.append(time.perf_counter() - self.started)

    with tempfile.TemporaryDirectory() as folder:
        optim = OptimConfig()
        config = GKDConfig(
            output_dir=folder,
            per_device_train_batch_size=1,
            max_steps=len(setup.batches),
            lmbda=0.0,
            beta=0.0,  # forward KL
            temperature=1.0,
            learning_rate=optim.learning_rate,
            max_grad_norm=optim.max_grad_norm,
            optim="adamw_torch_fused",
            bf16=False,
            fp16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GKDTrainer(
            model=setup.recipe.module,
            teacher_model=setup.module.float(),
            args=config,
            data_collator=lambda rows: padded(setup.batches[rows[0]["number"]]),
            train_dataset=Dataset.from_dict({"number": list(range(len(setup.batches)))}),
            processing_class=setup.target.tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    return result_of("trl", times, setup, None)


def padded(batch: Batch) -> dict[str, torch.Tensor]:
    """A batch of ours as TRL's collator gives it; padding at the right, where it is masked."""
    rows, width = batch.token_ids.shape
    labels = torch.full((rows, width), -100)
    labels.view(-1)[batch.positions + 1] = batch.labels
    last = (labels != -100).int() * torch.arange(width)
    lengths = last.amax(1, keepdim=True) + 1
    return {
        "input_ids": batch.token_ids,
        "attention_mask": (torch.arange(width) < lengths).long(),
        "labels": labels,
    }


def result_of(name: str, times: Sequence[float], setup: Setup, flops: float | None) -> Result:
    timed = setup.batches[WARM_UP:]
    return Result(
        name,
        median(times[WARM_UP:]),
        sum(batch.num_tokens for batch in timed) / len(timed),
        sum(batch.token_ids.numel() for batch in timed) / len(timed),
        flops,
        peak_memory_bytes(CPU),
    )


VARIANTS: dict[str, Callable[[argparse.Namespace], Result]] = {
    "cached": ours("cached", vocab_size=None, cached=True),
    "live": ours("live", vocab_size=None, cached=False),
    "trl": trl,
    "cached, 8192 tokens": ours("cached, 8192 tokens", vocab_size=REDUCED, cached=True),
    "live, 8192 tokens": ours("live, 8192 tokens", vocab_size=REDUCED, cached=False),
}


if __name__ == "__main__":
    main()
