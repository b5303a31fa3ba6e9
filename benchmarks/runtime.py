"""Our decoding loop beside transformers' own, on the machine at hand.

    python -m benchmarks.runtime TARGET [--drafter DIR] [--prompts 4] [--repeats 3]

Five questions, each a table: tokens per second of every way to decode the same prompts with the same
drafter; what a round spends outside the models; what a longer context costs; what a batch gains;
and whether every drafter's text is the plain one. All variants take turns, so that a disturbance of
the machine hits all of them; medians with the range beside them; the first turn warms up.

Texts never end early (end-of-text is ignored), so all variants decode equally many tokens.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, CompileConfig, PreTrainedModel

from distill.prompts import mt_bench
from specdec_runtime import SpeculativeDecoder, load_drafter, load_target
from specdec_runtime.draft import Drafter
from specdec_runtime.results import Generation
from specdec_runtime.target import Target

K = 4  # drafted tokens a round; transformers' assistant gets the same
BATCH = 8
CONTEXTS = (128, 256, 512, 1024, 2048)


class Variant(NamedTuple):
    """One way to decode a prompt; `baseline` names the row its speed is compared with."""

    name: str
    decode: Callable[[list[int]], object]
    baseline: str


def main() -> None:
    arguments = parse_arguments()
    target = load_target(arguments.target)
    prompts = encoded_prompts(target, 20)
    drafters = {"lookup": load_drafter("lookup", target)}
    if arguments.drafter:
        drafters["model"] = load_drafter(arguments.drafter, target)
    print(
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{type(target.model).__name__}, {arguments.new_tokens} new tokens, K={K}\n"
    )
    few = prompts[: arguments.prompts]
    print_speeds(arguments, target, drafters, few)
    print_overhead(target, drafters, few, arguments.new_tokens)
    print_contexts(target)
    print_batches(target, drafters, prompts, arguments.new_tokens)
    if arguments.exactness:
        print_exactness(target, drafters, prompts)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder or hub id")
    parser.add_argument("--drafter", help="drafter folder, or a causal LM with its tokenizer")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of the speed table")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="turns after the warm-up")
    parser.add_argument("--compiled", action="store_true", help="also generate with compilation")
    parser.add_argument("--exactness", action="store_true", help="also compare 20 texts a drafter")
    return parser.parse_args()


def encoded_prompts(target: Target, count: int) -> list[list[int]]:
    return [
        target.tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for prompt in mt_bench()[:count]
    ]


def print_speeds(
    arguments: argparse.Namespace,
    target: Target,
    drafters: dict[str, Drafter],
    prompts: list[list[int]],
) -> None:
    variants = [ours("ours, plain", target, None, arguments.new_tokens)]
    for name, drafter in drafters.items():
        variants.append(ours(f"ours, {name}", target, drafter, arguments.new_tokens))
    for dtype in (torch.float32, torch.bfloat16):
        variants += theirs(arguments, dtype, drafters)
    seconds = measure(variants, prompts, arguments.repeats)
    tokens = len(prompts) * arguments.new_tokens
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    plain = [name for name in medians if name.startswith("generate")]
    fastest = min(plain, key=medians.__getitem__)
    print(f"{'variant':34}{'tok/s':>8}{'range':>16}{'time / theirs':>15}")
    for variant in variants:
        values = sorted(seconds[variant.name])
        baseline = variant.baseline
        if baseline == "fastest plain":
            baseline = fastest
        elif baseline == "fastest assisted":
            kind = variant.name.removeprefix("ours, ")
            baseline = min(
                (name for name in medians if name.startswith(f"assisted {kind}")),
                key=medians.__getitem__,
            )
        ratio = f"{medians[variant.name] / medians[baseline]:.2f}" if baseline else ""
        spread = f"{tokens / values[-1]:.1f}-{tokens / values[0]:.1f}"
        print(f"{variant.name:34}{tokens / medians[variant.name]:8.1f}{spread:>16}{ratio:>15}")
    print(f"(plain against {fastest}, drafts against the faster of theirs of the same kind)\n")


def ours(name: str, target: Target, drafter: Drafter | None, new_tokens: int) -> Variant:
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=K)
    baseline = "fastest assisted" if drafter else "fastest plain"
    return Variant(
        name,
        lambda prompt: decoder.generate([prompt], max_new_tokens=new_tokens, eos_token_id=[]),
        baseline,
    )


def theirs(
    arguments: argparse.Namespace, dtype: torch.dtype, drafters: dict[str, Drafter]
) -> list[Variant]:
    """transformers' generate: plain, compiled, and assisted by the same drafters."""
    module = loaded(arguments.target, dtype)
    label = str(dtype).removeprefix("torch.")
    variants = [Variant(f"generate {label}", generation(module, arguments), "")]
    if arguments.compiled:
        config = CompileConfig()
        config._compile_all_devices = True  # otherwise CPUs are left out
        options = {"cache_implementation": "static", "compile_config": config}
        variants.append(
            Variant(
                f"generate {label} compiled",
                generation(loaded(arguments.target, dtype), arguments, **options),
                "",
            )
        )
    lookup = generation(module, arguments, prompt_lookup_num_tokens=K)
    variants.append(Variant(f"assisted lookup {label}", lookup, ""))
    if "model" in drafters:
        draft = loaded(arguments.drafter, dtype)
        draft.generation_config.num_assistant_tokens = K
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        assisted = generation(module, arguments, assistant_model=draft)
        variants.append(Variant(f"assisted model {label}", assisted, ""))
    return variants


def loaded(name: str, dtype: torch.dtype) -> PreTrainedModel:
    module: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
    module.generation_config.eos_token_id = None
    return module


def generation(
    module: PreTrainedModel, arguments: argparse.Namespace, **options: Any
) -> Callable[[list[int]], object]:
    def decode(prompt: list[int]) -> object:
        ids = torch.tensor([prompt])
        return module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=arguments.new_tokens,
            pad_token_id=0,
            **options,
        )

    return decode


def measure(
    variants: Sequence[Variant], prompts: list[list[int]], repeats: int
) -> dict[str, list[float]]:
    """Seconds over all prompts, per variant and turn."""
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for turn in range(repeats + 1):
        for variant in variants:
            start = time.perf_counter()
            for prompt in prompts if turn else prompts[:1]:
                variant.decode(prompt)
            if turn:
                seconds[variant.name].append(time.perf_counter() - start)
    return seconds


class Timed:
    """A model that adds up the seconds spent in its passes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if name not in ("forward", "greedy_chain"):
            return value

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return value(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return run


def print_overhead(
    target: Target, drafters: dict[str, Drafter], prompts: list[list[int]], new_tokens: int
) -> None:
    print(f"{'outside the models, K=4':34}{'ms/round':>9}{'share':>8}{'acceptance length':>19}")
    for name, drafter in drafters.items():
        models = [Timed(target.model)]
        original = getattr(drafter, "model", None)
        if original is not None:
            models.append(Timed(original))
            drafter.model = models[-1]  # type: ignore[attr-defined]
        timed = Target(**{**vars(target), "model": models[0]})
        decoder = SpeculativeDecoder(timed, drafter, num_draft_tokens=K)
        decoder.generate(prompts[:1], max_new_tokens=8)
        rounds, seconds, inside = 0, 0.0, 0.0
        for prompt in prompts:
            before = sum(model.seconds for model in models)
            chunks = decoder.stream([prompt], max_new_tokens=new_tokens, eos_token_id=[])
            next(chunks)  # the prefill
            start, first = time.perf_counter(), sum(model.seconds for model in models)
            rounds += sum(1 for _ in chunks)
            seconds += time.perf_counter() - start
            inside += sum(model.seconds for model in models) - max(before, first)
        if original is not None:
            drafter.model = original  # type: ignore[attr-defined]
        tokens_a_round = len(prompts) * (new_tokens - 1) / rounds
        outside = seconds - inside
        print(
            f"{name:34}{outside / rounds * 1000:9.2f}{outside / seconds:8.1%}{tokens_a_round:19.2f}"
        )
    print()


def print_contexts(target: Target) -> None:
    """A pass over one token: what the cached context adds should be its attention, and linear."""
    model, repeats = target.model, 15
    print(f"{'context':>8}{'ms/pass':>10}{'us per 1000 cached tokens':>28}")
    cache = model.new_cache(1, max(CONTEXTS) + repeats + 1)
    first = None
    for context in CONTEXTS:
        missing = context - int(cache.lengths[0])
        model.forward(torch.full((1, missing), 5), cache, logits=False)
        values = []
        for _ in range(repeats):
            start = time.perf_counter()
            model.forward(torch.tensor([[5]]), cache)
            values.append(time.perf_counter() - start)
            cache.truncate([context])
        milliseconds = statistics.median(values) * 1000
        first = milliseconds if first is None else first
        added = (
            ""
            if context == CONTEXTS[0]
            else (f"{(milliseconds - first) * 1e6 / (context - CONTEXTS[0]):.0f}")
        )
        print(f"{context:8}{milliseconds:10.2f}{added:>28}")
    print()


def print_batches(
    target: Target, drafters: dict[str, Drafter], prompts: list[list[int]], new_tokens: int
) -> None:
    print(f"{'batch':34}{'tok/s 1':>9}{f'tok/s {BATCH}':>9}{'ratio':>7}")
    for name, drafter in {"plain": None, **drafters}.items():
        decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=K)
        rates = []
        for size in (1, BATCH):
            batches = [prompts[i : i + size] for i in range(0, BATCH, size)]
            start = time.perf_counter()
            done = [
                decoder.generate(batch, max_new_tokens=new_tokens, eos_token_id=[])
                for batch in batches
            ]
            rates.append(num_tokens(done) / (time.perf_counter() - start))
        print(f"{name:34}{rates[0]:9.1f}{rates[1]:9.1f}{rates[1] / rates[0]:7.2f}")
    print()


def num_tokens(generations: Sequence[Generation]) -> int:
    return sum(len(tokens) for done in generations for tokens in done.token_ids)


def print_exactness(target: Target, drafters: dict[str, Drafter], prompts: list[list[int]]) -> None:
    """Greedy texts of all drafters, in batches of 4, against plain decoding one by one."""
    plain = [
        SpeculativeDecoder(target).generate([prompt], max_new_tokens=48).token_ids[0]
        for prompt in prompts
    ]
    more = {
        "suffix_lookup": load_drafter("suffix_lookup", target),
        "early_exit": load_drafter("early_exit", target),
    }
    print(f"{'identical greedy texts':34}{'of':>4}")
    for name, drafter in {**drafters, **more}.items():
        decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=K)
        texts = [
            text
            for first in range(0, len(prompts), 4)
            for text in decoder.generate(prompts[first : first + 4], max_new_tokens=48).token_ids
        ]
        same = sum(a == b for a, b in zip(texts, plain, strict=True))
        print(f"{name:31}{same:3}{len(prompts):4}")


if __name__ == "__main__":
    main()
