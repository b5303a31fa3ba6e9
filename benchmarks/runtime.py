"""Our decoding loop beside transformers' own, on the machine at hand.

    python -m benchmarks.runtime TARGET --drafter DIR --compiled --exactness

Five tables, which --sections selects from: tokens per second of every way to decode the same
prompts with the same drafter (`speed`); what a round spends outside the models (`overhead`); what a
longer context costs (`contexts`); what a batch gains (`batches`); and whether every drafter's
greedy text is the plain one (`exactness`). Medians with the range beside them.

Our own engine computes in float32 whatever the weights are stored in, so it stands once beside
both of transformers' precisions. --minutes bounds the repetitions: no turn begins after it.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.variants import Prompts, Variant, measured, our_variants, their_variants
from distill.embedded_prompts import mt_bench
from specdec_runtime import SpeculativeDecoder, load_drafter, load_target
from specdec_runtime.draft import Drafter
from specdec_runtime.results import Chunk
from specdec_runtime.target import Target

K = 4  # drafted tokens a round; transformers' assistant gets the same
BATCH = 8
CONTEXTS = (128, 256, 512, 1024, 2048)
CONTEXT_TOKENS = 24  # decoded at each context length
EXACT_PROMPTS, EXACT_BATCH, EXACT_TOKENS = 20, 4, 48
DTYPES = ("float32", "bfloat16")


def main() -> None:
    options = parse_arguments()
    deadline = time.monotonic() + 60.0 * options.minutes
    target = load_target(options.target)
    drafters = {"lookup": load_drafter("lookup", target)}
    if options.drafter:
        drafters["model"] = load_drafter(options.drafter, target)
    prompts = encoded_prompts(target, max(EXACT_PROMPTS, BATCH))
    print(
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{type(target.model).__name__}, {options.new_tokens} new tokens, K={K}\n"
    )
    sections: dict[str, Callable[[], None]] = {
        "speed": lambda: print_speeds(options, target, drafters, prompts, deadline),
        "overhead": lambda: print_overhead(target, drafters, prompts[:4], options.new_tokens),
        "contexts": lambda: print_contexts(target),
        "batches": lambda: print_batches(target, drafters, prompts[:BATCH], options.new_tokens),
        "exactness": lambda: print_exactness(target, drafters, prompts, options.drafter),
    }
    for name in options.sections or sections:
        if name != "exactness" or options.exactness or options.sections:
            sections[name]()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder, hub id or name of an embedded target")
    parser.add_argument("--drafter", help="drafter folder, or a causal LM with its tokenizer")
    parser.add_argument("--prompts", type=int, default=3, help="prompts of the speed table")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3, help="turns after the warm-up")
    parser.add_argument("--minutes", type=float, default=8.0, help="of repeated turns")
    parser.add_argument("--compiled", action="store_true", help="also generate with compilation")
    parser.add_argument("--exactness", action="store_true", help="also compare 20 texts a drafter")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="of theirs")
    names = ("speed", "overhead", "contexts", "batches", "exactness")
    parser.add_argument("--sections", nargs="+", choices=names, help="only these tables")
    return parser.parse_args()


def encoded_prompts(target: Target, count: int) -> Prompts:
    return [
        target.tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for prompt in mt_bench()[:count]
    ]


def print_speeds(
    options: argparse.Namespace,
    target: Target,
    drafters: dict[str, Drafter],
    prompts: Prompts,
    deadline: float,
) -> None:
    # The longest first: what a warm-up sizes to it serves the others.
    chosen = sorted(prompts[: options.prompts], key=len, reverse=True)
    longest = len(chosen[0]) + options.new_tokens
    variants = our_variants(target, drafters, options.new_tokens, K)
    for dtype in options.dtypes:
        variants += their_variants(
            options.target,
            options.drafter,
            getattr(torch, dtype),
            new_tokens=options.new_tokens,
            num_draft_tokens=K,
            compiled_length=longest if options.compiled else None,
        )
    seconds = measured(variants, chosen, repeats=options.repeats, deadline=deadline)
    tokens = len(chosen) * options.new_tokens
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    turns = min(map(len, seconds.values()))
    print(f"Speed: {len(chosen)} prompts, {turns} turns; speedup over the fastest of theirs\n")
    print("| variant | tok/s | range | speedup |\n|---|---|---|---|")
    for variant in variants:
        values = sorted(seconds[variant.name])
        spread = f"{tokens / values[-1]:.1f} to {tokens / values[0]:.1f}"
        speedup = _over_theirs(variant, variants, medians)
        print(f"| {variant.name} | {tokens / medians[variant.name]:.1f} | {spread} | {speedup} |")
    print()


def _over_theirs(variant: Variant, variants: list[Variant], medians: dict[str, float]) -> str:
    """How much faster ours is than the fastest of theirs of the same kind."""
    if not variant.is_ours:
        return ""
    theirs = [one.name for one in variants if one.kind == variant.kind and not one.is_ours]
    return f"{min(medians[name] for name in theirs) / medians[variant.name]:.2f}"


class Timed:
    """A model that adds up the seconds spent in its passes.

    As in `Spent` they are the main thread's CPU time, which other jobs on the machine disturb less
    than the wall clock.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if name not in ("forward", "greedy_chain"):
            return value

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return value(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start

        return run


class Spent:
    """Seconds and rounds of decoding, the prefill left out."""

    def __init__(self, models: list[Timed]) -> None:
        self.models = models
        self.rounds = self.tokens = 0
        self.seconds = self.inside = 0.0

    def follow(self, chunks: Iterator[Chunk]) -> None:
        next(chunks)  # the prefill
        start, before = time.thread_time(), self._in_models()
        for chunk in chunks:
            self.rounds += 1
            self.tokens += len(chunk.token_ids)
        self.seconds += time.thread_time() - start
        self.inside += self._in_models() - before

    def _in_models(self) -> float:
        return sum(model.seconds for model in self.models)


def print_overhead(
    target: Target, drafters: dict[str, Drafter], prompts: Prompts, new_tokens: int
) -> None:
    print(f"Outside the models' passes, K={K}, batch 1, the main thread's time\n")
    print("| drafter | ms a round | share | tokens a round |\n|---|---|---|---|")
    for name, drafter in drafters.items():
        timed = Timed(target.model)
        models = [timed]
        original = getattr(drafter, "model", None)
        if original is not None:
            models.append(Timed(original))
            drafter.model = models[-1]  # type: ignore[attr-defined]
        decoder = SpeculativeDecoder(_with_model(target, timed), drafter, num_draft_tokens=K)
        decoder.generate(prompts[:1], max_new_tokens=8)
        spent = Spent(models)
        for prompt in prompts:
            spent.follow(decoder.stream([prompt], max_new_tokens=new_tokens, eos_token_id=[]))
        if original is not None:
            drafter.model = original  # type: ignore[attr-defined]
        outside = spent.seconds - spent.inside
        print(
            f"| {name} | {outside / spent.rounds * 1000:.2f} | {outside / spent.seconds:.1%} "
            f"| {spent.tokens / spent.rounds:.2f} |"
        )
    print()


def _with_model(target: Target, model: Any) -> Target:
    return Target(**{**vars(target), "model": model})


def print_contexts(target: Target) -> None:
    """Plain decoding behind longer and longer prompts.

    Attention has to grow with the context, in proportion to it: its share is the slope of a line
    through the passes' times, and shown as memory read a second, so that anything else that grew
    would stand out. What is left has to be flat.
    """
    timed = Timed(target.model)
    decoder = SpeculativeDecoder(_with_model(target, timed))
    longest = target.model.max_positions - CONTEXT_TOKENS
    contexts = [context for context in CONTEXTS if context <= longest]
    points = []
    for context in contexts:
        runs = []
        for _ in range(3):
            spent = Spent([timed])
            prompt = [i % (target.real_vocab_size // 2) for i in range(context)]
            spent.follow(decoder.stream([prompt], max_new_tokens=CONTEXT_TOKENS, eos_token_id=[]))
            runs.append((spent.seconds / spent.tokens, spent.inside / spent.tokens))
        points.append(sorted(runs)[1])
    passes = [inside for _, inside in points]
    slope, _ = statistics.linear_regression(contexts, passes)
    config = target.model.config  # type: ignore[attr-defined]
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    bytes_a_token = target.model.num_layers * 2 * heads * width * 4
    print(f"Context, batch 1, plain: attention reads {bytes_a_token / slope / 1e9:.1f} GB/s\n")
    print("| context | ms a token | in passes | outside | without attention | over the first |")
    print("|---|---|---|---|---|---|")
    first = points[0][0] - slope * contexts[0]
    for context, (total, inside) in zip(contexts, points, strict=True):
        rest = total - slope * context
        print(
            f"| {context} | {total * 1000:.2f} | {inside * 1000:.2f} "
            f"| {(total - inside) * 1000:.2f} | {rest * 1000:.2f} | {rest / first:.2f} |"
        )
    print()


def print_batches(
    target: Target, drafters: dict[str, Drafter], prompts: Prompts, new_tokens: int
) -> None:
    print(f"Batch, {new_tokens} new tokens a row, after the prompts are read\n")
    print(f"| drafter | K | tok/s batch 1 | tok/s batch {BATCH} | ratio |\n|---|---|---|---|---|")
    variants: list[tuple[str, Drafter | None, int]] = [("plain", None, 0)]
    variants += [(name, drafter, length) for name, drafter in drafters.items() for length in (1, K)]
    for name, drafter, length in variants:
        decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=length)
        arguments: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": []}
        decoder.generate(prompts[:1], **{**arguments, "max_new_tokens": 4})
        rates = []
        for size in (1, BATCH):
            done = [
                decoder.generate(prompts[first : first + size], **arguments)
                for first in range(0, len(prompts), size)
            ]
            seconds = sum(one.seconds - one.prefill_s for one in done)
            rates.append(len(prompts) * (new_tokens - 1) / seconds)
        ratio = rates[1] / rates[0]
        print(f"| {name} | {length} | {rates[0]:.1f} | {rates[1]:.1f} | {ratio:.2f} |", flush=True)
    print()


def print_exactness(
    target: Target, drafters: dict[str, Drafter], prompts: Prompts, draft_name: str | None
) -> None:
    """Greedy texts of all drafters, in batches, against plain decoding one by one."""
    prompts = prompts[:EXACT_PROMPTS]
    plain = greedy_texts(target, None, prompts, batch=1)
    kinds = ["suffix_lookup", "early_exit"]
    if draft_name:
        kinds += [f"composite:{draft_name}", f"cross_tokenizer:{draft_name}"]
    more = {kind.partition(":")[0]: load_drafter(kind, target) for kind in kinds}
    print(
        f"Greedy texts, {len(prompts)} prompts, {EXACT_TOKENS} tokens, batches of {EXACT_BATCH}\n\n"
        "| drafter | identical to plain decoding | tokens a round |\n|---|---|---|"
    )
    for name, drafter in {**drafters, **more}.items():
        texts = greedy_texts(target, drafter, prompts, batch=EXACT_BATCH)
        same = sum(ours == theirs for (ours, _), (theirs, _) in zip(texts, plain, strict=True))
        length = statistics.mean(length for _, length in texts)
        print(f"| {name} | {same} of {len(prompts)} | {length:.2f} |", flush=True)
    print()


def greedy_texts(
    target: Target, drafter: Drafter | None, prompts: Prompts, *, batch: int
) -> list[tuple[list[int], float]]:
    """New tokens and acceptance length of every prompt."""
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=K)
    found = []
    for first in range(0, len(prompts), batch):
        done = decoder.generate(prompts[first : first + batch], max_new_tokens=EXACT_TOKENS)
        lengths = [stats.acceptance_length for stats in done.row_stats]
        found += list(zip(done.token_ids, lengths, strict=True))
    return found


if __name__ == "__main__":
    main()
