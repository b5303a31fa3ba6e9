"""Training the default drafter from cached signals, and beside the live target.

    python -m benchmarks.signals TARGET [--draft eagle3] [--answers 96] [--rounds 5]

The target answers questions, its signals are cached in both forms, and one drafter is then trained
from each form in turn: every round takes the same batches from all of them, so that a disturbance
hits all. Tokens are those that are learned from. Medians over rounds, ratios within rounds. The
inner states that some kinds read are recorded for all forms.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from distill.answers.config import AnswersConfig
from distill.answers.dataset import AnswerSet
from distill.answers.manifest import fingerprint
from distill.answers.write import write_answers
from distill.batches import Batch, BatchStream
from distill.cache.write import write_signals
from distill.draft_vocab import DraftVocab, most_frequent
from distill.features import FeatureFolder, record_features
from distill.live_signals import LiveSignals
from distill.losses import LossConfig
from distill.objective import Objective
from distill.prompt import asked
from distill.prompt_sources import squad_questions
from distill.recipe import DraftSettings, TargetParts, make_recipe, settings_of
from distill.signal_forms import SignalForm, SignalsConfig
from distill.signals import TargetHead
from specdec_runtime.loading import load_module, load_target
from specdec_runtime.target import Target

BATCH_TOKENS = 1024  # of the default job
STEPS = 2  # of each form in a round
WARM_UP = 1  # rounds; the first steps allocate


def main() -> None:
    options = parse_arguments()
    target = load_target(options.target)
    settings = settings_of(options.draft)(kind=options.draft)
    with tempfile.TemporaryDirectory() as folder:
        streams = signal_streams(target, settings, options, Path(folder))
        module, objective = drafter(target, settings, streams.pop("answers"))
        print(
            f"{torch.get_num_threads()} threads, torch {torch.__version__}, "
            f"{type(target.model).__name__}; {options.draft}, {BATCH_TOKENS} padded tokens a step\n"
        )
        print_rates(rates(streams, module, objective, options.rounds))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", help="folder, hub id or name of an embedded target")
    parser.add_argument("--draft", default="eagle3", choices=("eagle3", "causal_lm"))
    parser.add_argument("--answers", type=int, default=96)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def signal_streams(
    target: Target, settings: DraftSettings, options: argparse.Namespace, folder: Path
) -> dict:
    """Name of a form -> its batches, the same ones; and the answers that they are made of."""
    prompts = [asked("questions", text) for text, _ in squad_questions(options.answers, 0)]
    config = AnswersConfig(max_new_tokens=options.max_new_tokens, keep_states=False)
    answers = write_answers(target, prompts, config, folder / "answers")
    streams: dict = {"answers": answers}
    layers = settings.feature_layers(target.model.num_layers)
    kept = FeatureFolder(folder / "features", layers)
    for form in (SignalForm.hidden, SignalForm.sparse):
        cache = write_signals(
            target,
            answers.answers,
            SignalsConfig(form=form),
            folder / form.value,
            answers_fingerprint=fingerprint(answers.manifest),
            say=lambda text, name=form.value: print(f"{name}: {text}"),
        )
        examples = cache.attach(answers.answers)
        examples = record_features(target.model, examples, kept) if layers else examples
        streams[form.value] = BatchStream(examples, max_tokens=BATCH_TOKENS, seed=0)
    examples = list(answers.answers)
    examples = record_features(target.model, examples, kept) if layers else examples
    plain = BatchStream(examples, max_tokens=BATCH_TOKENS, seed=0)
    return streams | {"live": LiveSignals(plain, target)}


def drafter(
    target: Target, settings: DraftSettings, answers: AnswerSet
) -> tuple[nn.Module, Objective]:
    """A drafter with random weights for eagle3's layer, which is as fast as a solved one; its loss."""
    module = load_module(target.source, device="cpu")
    assert settings.draft_vocab_size is not None
    vocab: DraftVocab = most_frequent(
        answers.token_counts(),
        min(settings.draft_vocab_size, target.real_vocab_size),
        always=target.eos_token_ids,
        real_size=target.real_vocab_size,
    )
    head = TargetHead.of(module, vocab, real_vocab_size=target.real_vocab_size)
    recipe = make_recipe(settings, TargetParts(target, module, vocab, head))
    return recipe.module.train(), recipe.objective(LossConfig())


def rates(
    streams: dict[str, Callable[[int], Batch]],
    module: nn.Module,
    objective: Objective,
    rounds: int,
) -> dict[str, list[float]]:
    """Name of a form -> tokens per second in each round."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    found: dict[str, list[float]] = {name: [] for name in streams}
    for turn in range(WARM_UP + rounds):
        for name, stream in streams.items():
            num_tokens, start = 0, time.perf_counter()
            for number in range(turn * STEPS, (turn + 1) * STEPS):
                terms = objective(module, stream(number))
                (terms.loss_sum / terms.num_tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
                num_tokens += terms.num_tokens
            found[name].append(num_tokens / (time.perf_counter() - start))
    return {name: values[WARM_UP:] for name, values in found.items()}


def print_rates(found: dict[str, list[float]]) -> None:
    print(f"{'form':8} {'tokens/s':>18} {'of the live form':>22}")
    for name, values in found.items():
        ratios = [one / live for one, live in zip(values, found["live"], strict=True)]
        print(
            f"{name:8} {statistics.median(values):7.0f} ({min(values):.0f} to {max(values):.0f})"
            f"{statistics.median(ratios):10.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
