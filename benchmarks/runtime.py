"""Our decoding loop beside transformers' own, on the machine at hand.

    python -m benchmarks.runtime TARGET --drafters DIR [DIR] --compiled --exactness

Five tables, which --sections selects from: tokens per second of every way to decode the same
prompts with the same drafters (`speed`; transformers' own runs those that are causal LMs); what a
round spends outside the models (`overhead`); what a longer context costs (`contexts`); what a batch
gains (`batches`); and whether every drafter's greedy text is the plain one (`exactness`). Medians
with the range beside them.

Our own engine computes in float32 whatever the weights are stored in, so it stands once beside
both of transformers' precisions. --minutes bounds the repetitions: no turn begins after it.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel

from benchmarks.variants import Prompts, Variant, measured, our_variants, their_variants
from distill.embedded_prompts import mt_bench
from specdec_runtime import SpeculativeDecoder, load_drafter, load_target
from specdec_runtime.draft import Drafter
from specdec_runtime.formats import is_drafter_folder, read_manifest
from specdec_runtime.pretrained import load_module
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
    drafters |= {_kind(folder): load_drafter(folder, target) for folder in options.drafters}
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
        "exactness": lambda: print_exactness(target, drafters, prompts, options.drafters),
    }
    for name in options.sections or sections:
        if name != "exactness" or options.exactness or options.sections:
            sections[name]()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder, hub id or name of an embedded target")
    parser.add_argument(
        "--drafters", nargs="*", default=[], help="drafter folders, or causal LMs: one of a kind"
    )
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


def _kind(folder: str) -> str:
    return read_manifest(folder).kind if is_drafter_folder(folder) else "causal_lm"


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
    stock = {kind: name for name in options.drafters if (kind := _kind(name)) == "causal_lm"}
    for dtype in options.dtypes:
        variants += their_variants(
            options.target,
            stock.get("causal_lm"),
            getattr(torch, dtype),
            new_tokens=options.new_tokens,
            num_draft_tokens=K,
            compiled_length=longest if options.compiled else None,
        )
    seconds = measured(variants, chosen, repeats=options.repeats, deadline=deadline)
    tokens = len(chosen) * options.new_tokens
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    turns, plain = min(map(len, seconds.values())), medians[variants[0].name]
    print(f"Speed: {len(chosen)} prompts, {turns} turns; medians, and how much faster than\n")
    print(
        "| variant | tok/s | range | the fastest of theirs | ours, plain |\n|---|---|---|---|---|"
    )
    for variant in variants:
        values = sorted(seconds[variant.name])
        spread = f"{tokens / values[-1]:.1f} to {tokens / values[0]:.1f}"
        rate = tokens / medians[variant.name]
        over = f"{_over_theirs(variant, variants, medians)} | {plain / medians[variant.name]:.2f}"
        print(f"| {variant.name} | {rate:.1f} | {spread} | {over} |")
    print()


def _over_theirs(variant: Variant, variants: list[Variant], medians: dict[str, float]) -> str:
    """How much faster ours is than the fastest of theirs of the same kind, if they have any."""
    theirs = [one.name for one in variants if one.kind == variant.kind and not one.is_ours]
    if not variant.is_ours or not theirs:
        return ""
    return f"{min(medians[name] for name in theirs) / medians[variant.name]:.2f}"


class Clock(NamedTuple):
    """Seconds on the wall, and of the main thread's CPU time, which other jobs disturb less."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Clock":
        return cls(time.perf_counter(), time.thread_time())

    def since(self, start: "Clock") -> "Clock":
        return Clock(self.wall - start.wall, self.cpu - start.cpu)


class Passes:
    """Adds up the seconds spent in the models' passes."""

    def __init__(self) -> None:
        self.spent = Clock(0.0, 0.0)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = Clock.now()
            try:
                return function(*args, **kwargs)
            finally:
                taken = Clock.now().since(start)
                self.spent = Clock(self.spent.wall + taken.wall, self.spent.cpu + taken.cpu)

        return run


class Timed:
    """A model whose passes are added up."""

    def __init__(self, model: Any, passes: Passes) -> None:
        self._model = model
        self._passes = passes

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        return self._passes.around(value) if name in ("forward", "greedy_chain") else value


class Rounds:
    """What each round of some decodings took, the prefill left out."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self.all: list[Clock] = []
        self.inside: list[Clock] = []
        self.num_tokens = 0

    def follow(self, chunks: Iterator[Chunk]) -> None:
        """Decodes one prompt to its end."""
        next(chunks)  # the prefill
        start, before = Clock.now(), self._passes.spent
        for chunk in chunks:
            self.num_tokens += len(chunk.token_ids)
            self.all.append(Clock.now().since(start))
            self.inside.append(self._passes.spent.since(before))
            start, before = Clock.now(), self._passes.spent

    def medians(self, clock: str) -> tuple[float, float]:
        """(seconds of a round, seconds of it outside the passes), by one of the clocks."""
        whole = [getattr(taken, clock) for taken in self.all]
        inside = [getattr(taken, clock) for taken in self.inside]
        outside = [a - b for a, b in zip(whole, inside, strict=True)]
        return statistics.median(whole), statistics.median(outside)


def print_overhead(
    target: Target, drafters: dict[str, Drafter], prompts: Prompts, new_tokens: int
) -> None:
    print(f"Outside the models' passes, K={K}, batch 1: medians over the rounds\n")
    print("| drafter | ms a round | outside, wall clock | outside, CPU time | tokens a round |")
    print("|---|---|---|---|---|")
    for name, drafter in drafters.items():
        passes = Passes()
        timed = _with_model(target, Timed(target.model, passes))
        decoder = SpeculativeDecoder(timed, _timed_drafter(drafter, passes), num_draft_tokens=K)
        decoder.generate(prompts[:1], max_new_tokens=8)
        rounds = Rounds(passes)
        for prompt in prompts:
            rounds.follow(decoder.stream([prompt], max_new_tokens=new_tokens, eos_token_id=[]))
        cells = []
        for clock in Clock._fields:
            whole, outside = rounds.medians(clock)
            cells.append(f"{outside * 1000:.2f} ms, {outside / whole:.1%}")
        ms = rounds.medians("wall")[0] * 1000
        length = rounds.num_tokens / len(rounds.all)
        print(f"| {name} | {ms:.1f} | {cells[0]} | {cells[1]} | {length:.2f} |", flush=True)
    print()


def _timed_drafter(drafter: Drafter, passes: Passes) -> Drafter:
    """The same drafter, its model's passes and its fusion of the target's states added up."""
    timed: Any = copy.copy(drafter)
    if hasattr(drafter, "model"):
        timed.model = Timed(drafter.model, passes)
    if hasattr(drafter, "fuse"):
        timed.fuse = passes.around(drafter.fuse)
    return cast(Drafter, timed)


def _with_model(target: Target, model: Any) -> Target:
    return Target(**{**vars(target), "model": model})


def print_contexts(target: Target) -> None:
    """Plain decoding behind longer and longer prompts, in the main thread's CPU time.

    Attention has to grow with the context, in proportion to it: its share is the slope of a line
    through the passes' times, and shown as memory read a second, so that anything else that grew
    would stand out. What is left has to be flat.
    """
    passes = Passes()
    decoder = SpeculativeDecoder(_with_model(target, Timed(target.model, passes)))
    longest = target.model.max_positions - CONTEXT_TOKENS
    contexts = [context for context in CONTEXTS if context <= longest]
    points = []
    for context in contexts:
        rounds = Rounds(passes)
        prompt = [i % (target.real_vocab_size // 2) for i in range(context)]
        for _ in range(3):
            rounds.follow(decoder.stream([prompt], max_new_tokens=CONTEXT_TOKENS, eos_token_id=[]))
        points.append(rounds.medians("cpu"))
    slope, _ = statistics.linear_regression(contexts, [all_ - out for all_, out in points])
    config = target.model.config  # type: ignore[attr-defined]
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    bytes_a_token = target.model.num_layers * 2 * heads * width * 4
    print(f"Context, batch 1, plain: attention reads {bytes_a_token / slope / 1e9:.1f} GB/s\n")
    print("| context | ms a token | in passes | outside | without attention | over the first |")
    print("|---|---|---|---|---|---|")
    first = points[0][0] - slope * contexts[0]
    for context, (total, outside) in zip(contexts, points, strict=True):
        rest = total - slope * context
        print(
            f"| {context} | {total * 1000:.2f} | {(total - outside) * 1000:.2f} "
            f"| {outside * 1000:.2f} | {rest * 1000:.2f} | {rest / first:.2f} |"
        )
    print()


def print_batches(
    target: Target, drafters: dict[str, Drafter], prompts: Prompts, new_tokens: int
) -> None:
    print(f"Batch, {new_tokens} new tokens a row, after the prompts are read\n")
    print(f"| drafter | K | tok/s batch 1 | tok/s batch {BATCH} | ratio |\n|---|---|---|---|---|")
    variants: list[tuple[str, Drafter | None, int | str]] = [("plain", None, 0)]
    lengths = (1, K, "auto")
    variants += [
        (name, drafter, length) for name, drafter in drafters.items() for length in lengths
    ]
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
    target: Target, drafters: dict[str, Drafter], prompts: Prompts, folders: list[str]
) -> None:
    """Greedy texts of all drafters, in batches, against plain decoding one by one."""
    prompts = prompts[:EXACT_PROMPTS]
    plain = greedy_texts(target, None, prompts, batch=1)
    module = load_module(target.source, dtype=torch.float32, device="cpu")
    more = {kind: load_drafter(kind, target) for kind in ("suffix_lookup", "early_exit")}
    for folder in folders:
        kind = _kind(folder)
        more[f"lookup, then {kind}"] = load_drafter(f"composite:{folder}", target)
        if kind == "causal_lm":
            for front in ("", "composite:"):
                name = "lookup, then cross_tokenizer" if front else "cross_tokenizer"
                more[name] = load_drafter(f"{front}cross_tokenizer:{folder}", target)
    print(
        f"Greedy texts, {len(prompts)} prompts, {EXACT_TOKENS} tokens, batches of {EXACT_BATCH}\n\n"
        "| drafter | identical to plain decoding | tokens a round |\n|---|---|---|"
    )
    same = sum(
        _is_their_greedy(module, ids, text) for ids, (text, _) in zip(prompts, plain, strict=True)
    )
    print(f"| plain, beside transformers' logits | {same} of {len(prompts)} | 1.00 |", flush=True)
    for name, drafter in {**drafters, **more}.items():
        texts = greedy_texts(target, drafter, prompts, batch=EXACT_BATCH)
        same = sum(ours == theirs for (ours, _), (theirs, _) in zip(texts, plain, strict=True))
        length = statistics.mean(length for _, length in texts)
        print(f"| {name} | {same} of {len(prompts)} | {length:.2f} |", flush=True)
    print()


@torch.inference_mode()
def _is_their_greedy(module: PreTrainedModel, prompt: list[int], text: list[int]) -> bool:
    """Whether `generate` of transformers would write this text: every token leads its logits."""
    logits = module(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
    return bool(logits.argmax(-1).tolist() == text)


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
