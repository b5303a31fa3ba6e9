"""What drafting costs with a drafting model or an EAGLE-3 head, and what it brings.

    python -m benchmarks.drafting TARGET DRAFTER

The drafter takes turns with plain decoding over the same MT-bench prompts, greedily; a causal LM does
so twice, in bfloat16 and rounded to int8 (specdec_runtime/int8_grid.py). Printed are the machine's
ceilings; one bare draft step, with the drafter's weights in the cache and behind a pass of the target;
where a round's time goes, as in eval's cost model (c per drafted token, o per round); and acceptance
length and speed at each draft length, the speed with the range over the turns.
"""

import argparse
import copy
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch

from benchmarks.native import best_of, memory_bandwidth, print_machine
from benchmarks.runtime import encoded_prompts
from specdec_runtime import SpeculativeDecoder, load_drafter, load_target
from specdec_runtime.auto_length import fit_line
from specdec_runtime.drafters.causal_lm import CausalLMDrafter
from specdec_runtime.drafters.eagle3 import Eagle3Drafter
from specdec_runtime.formats import read_draft_vocab
from specdec_runtime.int8_grid import round_matrices
from specdec_runtime.native import NativeModel
from specdec_runtime.pretrained import load_module
from specdec_runtime.results import Generation
from specdec_runtime.target import Target

LENGTHS = (1, 2, 4)  # drafted tokens a round
CONTEXT = 128  # tokens in front of a bare draft step
CHAIN = 8  # steps of a bare chain
PASSES = 15


@dataclass
class Decoded:
    """What one way of decoding did: seconds and new tokens of each turn, and its rounds."""

    seconds: list[float] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for one in self.generations for ids in one.token_ids)


def main() -> None:
    options = parse_arguments()
    target = load_target(options.target)
    drafters = drafter_forms(options.drafter, target)
    print_machine()
    print(f"copy of a large array {copy_bandwidth() / 1e9:.1f} GB/s, read and write together\n")
    print_steps(target, drafters)
    prompts = encoded_prompts(target, options.prompts)
    found = decoded(target, drafters, prompts, options)
    print_rounds(found)
    print_speeds(found)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder, hub id or name of an embedded target")
    parser.add_argument("drafter", help="folder of a drafter of kind causal_lm or eagle3")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=2)
    return parser.parse_args()


def drafter_forms(folder: str, target: Target) -> dict[str, CausalLMDrafter | Eagle3Drafter]:
    """The drafter as stored; a causal LM with its weights in bfloat16, and rounded."""
    stored = load_drafter(folder, target)
    if isinstance(stored, Eagle3Drafter):
        assert isinstance(stored.model, NativeModel), "the C++ engine does not run it"
        return {str(stored.model.matrix_dtype).removeprefix("torch."): stored}
    module, vocab = load_module(folder, device="cpu"), read_draft_vocab(folder)
    whole = copy.deepcopy(module)
    round_matrices(whole)
    models = {
        "bf16": NativeModel.from_hf(module, head_rows=vocab, weight_dtype=torch.bfloat16),
        "int8": NativeModel.from_hf(whole, head_rows=vocab),
    }
    assert models["int8"].matrix_dtype == torch.int8, "its embeddings do not fit bfloat16"
    return {name: CausalLMDrafter(model, draft_vocab=vocab) for name, model in models.items()}


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy of an array much larger than the caches."""
    source = torch.ones(64 * 2**20)
    copied = torch.empty_like(source)
    return 2 * source.nbytes / best_of(lambda: copied.copy_(source))


def print_steps(target: Target, drafters: dict[str, CausalLMDrafter | Eagle3Drafter]) -> None:
    """Bare draft steps; `cold` behind a pass of the target, which reads more than the cache holds."""
    cases: dict[str, Callable[[], object]] = {}
    weights = {}
    for name, drafter in drafters.items():
        model = drafter.model
        assert isinstance(model, NativeModel)
        weights[name] = matrix_bytes(model)
        hands_on = getattr(drafter, "hands_on", None)
        cases[f"{name} chain"] = chain(model, CHAIN, hands_on)
        cases[f"{name} one"] = chain(model, 1, hands_on)
    between = one_pass(target)
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(PASSES + 1):
        for name, run in cases.items():
            for state, prepare in (("cold", between), ("warm", run)):
                prepare()
                start = time.perf_counter()
                run()
                if turn:
                    seconds[f"{name} {state}"].append(time.perf_counter() - start)
    bandwidth = memory_bandwidth()
    print("| weights | MB | ms to read them from memory | step, cached | first step, cold |")
    print("|---|---|---|---|---|")
    for name in drafters:
        times = {key: 1e3 * median(values) for key, values in seconds.items()}
        step = (times[f"{name} chain warm"] - times[f"{name} one warm"]) / (CHAIN - 1)
        print(
            f"| {name} | {weights[name] / 1e6:.1f} | {1e3 * weights[name] / bandwidth:.2f} "
            f"| {step:.2f} | {times[f'{name} one cold']:.2f} |"
        )
    print()


def matrix_bytes(model: NativeModel) -> int:
    """Bytes of weights that a pass reads."""
    packed = model._packed
    matrices = [packed.model.head]
    for layer in packed.layers:
        matrices += [layer.qkv, layer.attention_out, layer.gate_up, layer.down]
    return sum(one.outputs * one.inputs for one in matrices) * model.matrix_dtype.itemsize


def chain(model: NativeModel, steps: int, hands_on: int | None) -> Callable[[], object]:
    cache = model.new_cache(1, CONTEXT + steps)
    ids = torch.arange(CONTEXT)[None]
    states = None if hands_on is None else torch.randn(1, CONTEXT, model.hidden_size)
    model.forward(ids, cache, logits=False, hidden_in=states)
    entering = None if states is None else states[:, :1]

    def run() -> None:
        cache.truncate([CONTEXT])
        model.greedy_chain(ids[:, :1], cache, steps=steps, hidden_in=entering, hands_on=hands_on)

    return run


def one_pass(target: Target) -> Callable[[], object]:
    cache, ids = target.model.new_cache(1, CONTEXT + 1), torch.arange(CONTEXT)[None]
    target.model.forward(ids, cache, logits=False)

    def run() -> None:
        cache.truncate([CONTEXT])
        target.model.forward(ids[:, :1], cache)

    return run


def decoded(
    target: Target,
    drafters: dict[str, CausalLMDrafter | Eagle3Drafter],
    prompts: list[list[int]],
    options: argparse.Namespace,
) -> dict[tuple[str, int], Decoded]:
    """Every (form, draft length) over all prompts, prompt by prompt in turn; plain = length 0."""
    cases = [("plain", 0), *((name, length) for length in LENGTHS for name in drafters)]
    decoders = {
        case: SpeculativeDecoder(target, drafters.get(case[0]), num_draft_tokens=case[1])
        for case in cases
    }
    for decoder in decoders.values():  # warms up
        decoder.generate(prompts[:1], max_new_tokens=8)
    found = {case: Decoded() for case in cases}
    for _ in range(options.turns):
        for one in found.values():
            one.seconds.append(0.0)
        for prompt in prompts:
            texts = set()
            for case, decoder in decoders.items():
                done = decoder.generate([prompt], max_new_tokens=options.new_tokens)
                found[case].generations.append(done)
                found[case].seconds[-1] += done.seconds - done.prefill_s
                texts.add(tuple(done.token_ids[0]))
            assert len(texts) == 1, "a drafter has changed the target's text"
    return found


def print_rounds(found: dict[tuple[str, int], Decoded]) -> None:
    """c and o of each form; units: passes of the target over one token, as in eval/cost_model.py."""
    target_s = median(r.verify_s for g in found["plain", 0].generations for r in g.rounds)
    print(f"A pass of the target over one token: {1e3 * target_s:.2f} ms\n")
    print("| weights | c | o | of it the start of a draft | of it outside | draft of 1, ms |")
    print("|---|---|---|---|---|---|")
    for name in dict.fromkeys(name for name, _ in found if name != "plain"):
        draft_s: dict[int, list[float]] = defaultdict(list)
        outside = []
        for length in LENGTHS:
            for one in found[name, length].generations:
                for entry in one.rounds[1:]:  # in the first the drafter reads the prompt
                    draft_s[entry.drafted[0]].append(entry.draft_s)
                    outside.append(entry.other_s)
        medians = {k: median(seconds) for k, seconds in draft_s.items() if k in LENGTHS}
        start, token = fit_line(medians)
        rest = median(outside)
        print(
            f"| {name} | {token / target_s:.3f} | {(start + rest) / target_s:.3f} "
            f"| {start / target_s:.3f} | {rest / target_s:.3f} | {1e3 * medians[1]:.2f} |"
        )
    print()


def print_speeds(found: dict[tuple[str, int], Decoded]) -> None:
    plain = found["plain", 0]
    print("| weights | drafted | acceptance length | tokens/s | over plain, turn by turn |")
    print("|---|---|---|---|---|")
    for (name, length), one in found.items():
        stats = [row for done in one.generations for row in done.row_stats]
        rounds = sum(row.num_rounds for row in stats)
        accepted = 1 + sum(row.num_accepted for row in stats) / rounds
        rate = one.num_tokens / sum(one.seconds)
        pairs = zip(plain.seconds, one.seconds, strict=True)
        ratios = sorted(ours / theirs for ours, theirs in pairs)
        print(
            f"| {name} | {length} | {accepted:.3f} | {rate:.1f} "
            f"| {median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) |"
        )


if __name__ == "__main__":
    main()
