"""The variants that `benchmarks.train` compares: a process each, a step for each line it is sent."""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

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
from distill.signal_forms import SignalForm, SignalsConfig
from distill.signals import NoSignal, TargetHead
from distill.sparse_signals import sparse_rows
from specdec_runtime import load_target
from specdec_runtime.loading import load_module
from specdec_runtime.target import Target
from train.allocator import freed_memory_kept
from train.checkpoint import TrainState
from train.loop import optimizer_step
from train.metrics import MetricSums
from train.optim import OptimConfig
from train.parts import make_parts
from train.precision import Precision
from train.rng import seed_everything
from train.throughput import peak_memory_bytes

CPU = torch.device("cpu")
WARM_UP = 1  # the first step allocates
REDUCED = 8192  # of the default drafter
PROMPT_TOKENS, ANSWER_TOKENS = 80, 100  # at most; the default data has about so many
LOSS = LossConfig(name=LossName.forward_kl)
SPARSE = SignalsConfig(form=SignalForm.sparse)


class Settings(NamedTuple):
    """What the variants have in common, see `benchmarks.train`."""

    target: str
    steps: int
    batch_tokens: int
    layers: str


class Amount(NamedTuple):
    """What a variant's mean step works on, what it learned in its first one, and its peak memory."""

    num_tokens: float
    num_positions: float
    flops: float
    first_loss: float = 0.0
    peak_bytes: int = 0


class Setup(NamedTuple):
    """The pair and the data, the same for every variant."""

    target: Target
    module: PreTrainedModel
    recipe: Recipe
    head: TargetHead
    batches: list[Batch]


class Variant(NamedTuple):
    """Ours, with one form of the signal; form None is TRL's."""

    form: SignalForm | None
    vocab_size: int | None = None

    @property
    def is_cached(self) -> bool:
        return self.form in (SignalForm.hidden, SignalForm.sparse)


VARIANTS = {
    "live": Variant(SignalForm.live),
    "cached": Variant(SignalForm.hidden),
    "sparse": Variant(SignalForm.sparse),
    "trl": Variant(None),
    "live-8192": Variant(SignalForm.live, REDUCED),
    "cached-8192": Variant(SignalForm.hidden, REDUCED),
}


class Worker:
    """One variant in its process: it takes a step for each line on standard input."""

    def __init__(self, settings: Settings, variant: Variant) -> None:
        self.settings, self.variant = settings, variant
        self.losses: list[float] = []  # of each step, a token
        # What libraries print does not come between the numbers.
        self.channel: IO[str] = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def run(self) -> None:
        take_steps = trl_steps if self.variant.form is None else our_steps
        take_steps(self)
        peak = peak_memory_bytes(CPU)
        self.say(self.amount._replace(first_loss=self.losses[0], peak_bytes=peak)._asdict())

    def set_up(self) -> Setup:
        """What the steps need; notes how much they work on."""
        setup = set_up(self.settings, self.variant)
        timed = setup.batches[WARM_UP:]
        num_tokens = sum(batch.num_tokens for batch in timed) / len(timed)
        num_positions = sum(batch.token_ids.numel() for batch in timed) / len(timed)
        flops = flops_of(setup, self.variant, num_tokens=num_tokens, num_positions=num_positions)
        self.amount = Amount(num_tokens, num_positions, flops)
        return setup

    def ready(self) -> None:
        """The set-up is done; what it needed at most does not count."""
        with contextlib.suppress(OSError):  # Linux
            Path("/proc/self/clear_refs").write_text("5")
        self.say("ready")

    def begin(self) -> None:
        sys.stdin.readline()
        self.started = time.perf_counter()

    def end(self) -> None:
        self.say(time.perf_counter() - self.started)

    def say(self, value: object) -> None:
        print(json.dumps(value), file=self.channel, flush=True)


def set_up(settings: Settings, variant: Variant) -> Setup:
    """The pair and its batches, with the target's signals where they are cached."""
    seed_everything(0)
    target = load_target(settings.target)
    module = load_module(target.source, device="cpu")
    examples = make_examples(target)
    vocab = make_vocab(target, examples, variant.vocab_size)
    head = TargetHead.of(module, vocab, real_vocab_size=target.real_vocab_size)
    layers = [int(layer) for layer in settings.layers.split(",")]
    draft = causal_lm.CausalLMSettings(layers=layers, draft_vocab_size=variant.vocab_size)
    recipe = make_recipe(draft, TargetParts(target, module, vocab, head))
    stream = BatchStream(examples, max_tokens=settings.batch_tokens, seed=0)
    source = LiveSignals(stream, target) if variant.is_cached else stream
    batches = [source(number) for number in range(WARM_UP + settings.steps)]
    if variant.form is SignalForm.sparse:
        batches = [with_sparse_rows(batch, target) for batch in batches]
    return Setup(target, module, recipe, head, batches)


def with_sparse_rows(batch: Batch, target: Target) -> Batch:
    rows = sparse_rows(
        target.model,
        batch.rows.hidden,
        real_vocab_size=target.real_vocab_size,
        top_k=SPARSE.top_k,
        num_draws=SPARSE.draws,
        seeds=range(batch.num_tokens),
        dtype=SPARSE.dtype.torch,
    )
    return replace(batch, rows=rows)


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


def our_steps(worker: Worker) -> None:
    """Ours."""
    setup = worker.set_up()
    source: Callable[[int], Batch] = setup.batches.__getitem__
    if not worker.variant.is_cached:
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
    num_steps, optim = len(setup.batches), OptimConfig()
    state = TrainState(max_steps=num_steps)
    del setup  # the target's module is not kept by a run either
    parts.drafter.train()
    worker.ready()
    with freed_memory_kept("cpu"):
        for _ in range(num_steps):
            worker.begin()
            step = optimizer_step(parts, state, optim, MetricSums(), stop_requested=False)
            step.grad_norm.item()
            worker.end()
            worker.losses.append(float(step.loss) / step.num_tokens)


def flops_of(setup: Setup, variant: Variant, *, num_tokens: float, num_positions: float) -> float:
    """Operations of the matrix products that a step needs."""
    trained = sum(p.numel() for p in setup.recipe.module.parameters() if p.requires_grad)
    rows, width = setup.head.kept_weight.shape
    # The draft head forwards and backwards to its input; the target's head forwards.
    of_head = 2 * rows * width * num_tokens
    flops = 6 * trained * num_positions + 2 * of_head
    if variant.form is not SignalForm.sparse:
        flops += of_head
    if not variant.is_cached:
        embeddings = setup.module.get_input_embeddings().weight
        of_layers = sum(p.numel() for p in setup.module.parameters()) - embeddings.numel()
        flops += 2 * of_layers * num_positions
        if variant.vocab_size is not None:  # log-sum-exp and argmax over all tokens
            flops += 2 * setup.target.real_vocab_size * width * num_tokens
    return flops


def trl_steps(worker: Worker) -> None:
    """TRL's, on the same batches."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    class Turns(TrainerCallback):
        def on_step_begin(self, *given: Any, **named: Any) -> None:
            worker.begin()

        def on_step_end(self, *given: Any, **named: Any) -> None:
            worker.end()

    class Noting(GKDTrainer):
        def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
            loss = super().training_step(*given, **named)
            worker.losses.append(float(loss))
            return loss

    setup = worker.set_up()
    drafter, teacher = setup.recipe.module, setup.module.float()
    tokenizer, in_order = setup.target.tokenizer, iter([padded(one) for one in setup.batches])
    num_steps = len(setup.batches)
    del setup  # with our engine's copy of the target
    with tempfile.TemporaryDirectory() as folder:
        optim = OptimConfig()
        config = GKDConfig(
            output_dir=folder,
            per_device_train_batch_size=1,
            max_steps=num_steps,
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
        trainer = Noting(
            model=drafter,
            teacher_model=teacher,
            args=config,
            data_collator=lambda rows: next(in_order),  # its sampler shuffles
            train_dataset=Dataset.from_dict({"number": list(range(num_steps))}),
            processing_class=tokenizer,
            callbacks=[Turns()],
        )
        worker.ready()
        trainer.train()


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
