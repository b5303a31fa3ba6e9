"""Drafter kinds and losses side by side: the same target, answers and minutes of training.

    python -m benchmarks.drafters --minutes 2 --seeds 2 --kinds causal_lm early_exit \\
        --losses lk_hybrid forward_kl --output drafters.json

Every kind is trained with every loss and seed, from what `+experiment=distill` trains on, and measured
on held-out prompts that chose no checkpoint: overlap with the target's distribution (sampled text,
teacher-forced), acceptance length at K = 4, what a drafted token costs, and the greedy speedup, timed
beside plain decoding in one interleaved session at the draft length that the cost model finds best.
`lookup` needs no training and is always measured. Intervals are 95 % over prompts, seeds pooled.

A choice may carry settings: `--kinds causal_lm causal_lm:draft.draft_vocab_size=null`; --set gives
those of all runs (`--set answers.max_tokens=50000`).
"""

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from distill.batches import Example, collate
from distill.live_signals import with_live_states
from distill.losses import LossConfig, LossName
from distill.recipe import trained_kinds
from distill.signals import NoSignal
from eval.acceptance import MeasuredAcceptance, length_interval, measure_acceptance
from eval.intervals import Interval, ratio_interval
from eval.speed import Timing, speculative_decode, speed_result, time_interleaved
from specdec_runtime import SpeculativeDecoder, load_drafter
from specdec_runtime.auto_length import measured_policy
from specdec_runtime.draft import Drafter
from specdec_runtime.draft_length import CostAware
from specdec_runtime.stats import AcceptanceStats
from specdec_runtime.target import Target
from train.checkpoint import read_checkpoint, restore_weights
from train.config import TrainConfig
from train.features import with_features
from train.interrupts import StopRequest
from train.job import Job
from train.material import HELD_OUT, Material, prepare
from train.run_log import RunLog
from train.stages import export, load_training, train_drafter

K = 4  # drafted tokens a round of the acceptance figures


@dataclass
class Row:
    """One kind with one loss, over its seeds; the lists run parallel to them, prompts inside."""

    name: str
    loss: str
    overlaps: list[tuple[float, int]] = field(default_factory=list)  # of a text: sum, positions
    greedy: list[AcceptanceStats] = field(default_factory=list)
    sampled: list[AcceptanceStats] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # draft tokens that are timed
    timings: list[list[list[Timing]]] = field(default_factory=list)  # [seed][repeat][prompt]
    steps: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """What all rows share."""

    target: Target
    prompts: list[list[int]]
    texts: list[Example]  # sampled by the target, with its states
    options: argparse.Namespace


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as folder, StopRequest() as stop:
        rows, plain = run(options, Path(folder), stop)
    print_table(rows, plain, options)
    if options.output:
        Path(options.output).write_text(json.dumps([record(row, plain) for row in rows], indent=1))


def run(
    options: argparse.Namespace, folder: Path, stop: StopRequest
) -> tuple[list[Row], list[list[Timing]]]:
    first = job_of(options, folder / "material", stop, kind="causal_lm", loss="lk_hybrid", seed=0)
    material = prepare(first)
    bench = bench_of(material, first.config.acceptance.num_prompts, options)
    rows = [lookup_row(bench)]
    decoders = {"lookup": (rows[0], load_drafter("lookup", bench.target))}
    for kind, loss in choices(options):
        row = Row(kind, loss)
        rows.append(row)
        for seed in range(options.seeds):
            place = folder / f"{len(rows)}-{seed}"
            job = job_of(options, place, stop, kind=kind, loss=loss, seed=seed)
            drafter = trained(job, material, row, bench)
            note_acceptance(row, drafter, bench)
            decoders[f"{len(rows)}-{seed}"] = (row, drafter)
            print(f"{kind} {loss} seed {seed}: {summary(row)}", file=sys.stderr, flush=True)
    return rows, timed(bench, decoders)


def choices(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(kind, loss) of each row."""
    if options.runs:
        return [(kind, loss) for kind, _, loss in (run.rpartition("/") for run in options.runs)]
    return [(kind, loss) for kind in options.kinds for loss in options.losses]


def job_of(
    options: argparse.Namespace,
    run_dir: Path,
    stop: StopRequest,
    *,
    kind: str,
    loss: str,
    seed: int,
) -> Job:
    kind, *own = kind.split(":")
    loss, *more = loss.split(":")
    overrides = ["+experiment=distill", f"draft={kind}", f"loss={loss}", f"seed={seed}"]
    overrides += [f"training.budget_minutes={options.minutes}", *own, *more, *options.set]
    with initialize_config_module("conf", version_base="1.3"):
        config = OmegaConf.to_object(compose("train", overrides=overrides))
    assert isinstance(config, TrainConfig)
    run_dir.mkdir(parents=True)
    log = RunLog(run_dir, config.tracking, is_main=True, name=config.name, config={})
    return Job(
        config=config,
        log=log,
        accelerator=Accelerator(cpu=config.target.device == "cpu"),
        run_dir=run_dir,
        stop=stop,
    )


def bench_of(material: Material, num_selecting: int, options: argparse.Namespace) -> Bench:
    """Held-out prompts that choose no checkpoint, and a text of each that the target samples."""
    prompts = [
        list(prompt.token_ids) for prompt in material.evaluation_prompts(num_selecting)[HELD_OUT]
    ][: options.prompts]
    decoded = SpeculativeDecoder(material.target).generate(
        prompts, max_new_tokens=options.new_tokens, temperature=1.0, seed=0
    )
    texts = [
        Example(str(i), torch.tensor([*prompt, *new]), len(prompt), NoSignal(len(new)))
        for i, (prompt, new) in enumerate(zip(prompts, decoded.token_ids, strict=True))
    ]
    total = sum(text.num_tokens for text in texts)
    whole = with_live_states(material.target, texts, max_positions=total)
    return Bench(material.target, prompts, whole, options)


def trained(job: Job, material: Material, row: Row, bench: Bench) -> Drafter:
    """Trains, notes the overlap of the best checkpoint, and loads its folder."""
    training = load_training(job, material)
    state = train_drafter(job, material, training)
    row.steps.append(state.step)
    folder = export(job)
    objective = training.start.recipe.objective(
        LossConfig(name=LossName.forward_kl, temperature=1.0)
    )
    module = training.start.recipe.module.eval()
    restore_weights(read_checkpoint(job.run_dir / "best"), module)
    texts = with_features(job, bench.target, training.start.recipe.feature_layers, bench.texts)
    with torch.no_grad():
        for text in texts:
            batch = collate([text]).to(job.accelerator.device)
            overlap, positions = objective(module, batch).counts["overlap"]
            row.overlaps.append((float(overlap), int(positions)))
    drafter = load_drafter(folder, bench.target)
    assert drafter is not None
    return drafter


def lookup_row(bench: Bench) -> Row:
    row = Row("lookup", "-")
    drafter = load_drafter("lookup", bench.target)
    assert drafter is not None
    note_acceptance(row, drafter, bench)
    return row


def note_acceptance(row: Row, drafter: Drafter, bench: Bench) -> None:
    """Acceptance at K, greedy and sampled; cost of a drafted token; the length to time."""
    greedy, sampled = (measured(bench, drafter, temperature) for temperature in (0.0, 1.0))
    row.greedy += greedy.prompts
    row.sampled += sampled.prompts
    costs = measured_policy(bench.target, drafter, max_draft_tokens=K)
    row.costs.append(costs.draft_cost)
    row.lengths.append(best_length(greedy.stats, costs))


def measured(bench: Bench, drafter: Drafter, temperature: float) -> MeasuredAcceptance:
    return measure_acceptance(
        bench.target,
        drafter,
        bench.prompts,
        num_draft_tokens=K,
        max_new_tokens=bench.options.new_tokens,
        temperature=temperature,
    )


def best_length(stats: AcceptanceStats, costs: CostAware) -> int:
    """The draft length with the largest predicted speedup, at least 1."""
    kept = stats.acceptance_by_position

    def speedup(length: int) -> float:
        cost = costs.verify_cost[length] + costs.draft_start + length * costs.draft_cost
        return (1 + sum(kept[:length])) / cost

    return max(range(1, len(kept) + 1), key=speedup)


def timed(bench: Bench, decoders: dict[str, tuple[Row, Drafter]]) -> list[list[Timing]]:
    """Times all drafters beside plain decoding; returns plain's timings."""
    ways = {"plain": speculative_decode(bench.target, None, 0)}
    seen: dict[int, int] = defaultdict(int)
    for name, (row, drafter) in decoders.items():
        number = seen[id(row)]
        seen[id(row)] += 1
        ways[name] = speculative_decode(bench.target, drafter, row.lengths[number])
    timings = time_interleaved(
        ways,
        bench.prompts[: bench.options.timed_prompts],
        max_new_tokens=bench.options.new_tokens,
        num_repeats=bench.options.repeats,
    )
    for name, (row, _) in decoders.items():
        row.timings.append(timings[name])
    return timings["plain"]


def record(row: Row, plain: list[list[Timing]]) -> dict[str, object]:
    """The figures of a row, as plain values."""
    overlap = ratio_interval([a for a, _ in row.overlaps], [float(b) for _, b in row.overlaps])
    speeds = [
        speed_result(
            plain, t, drafter=row.name, suite=HELD_OUT, num_draft_tokens=k, num_resamples=1000
        )
        for t, k in zip(row.timings, row.lengths, strict=True)
    ]
    return {
        "kind": row.name,
        "loss": row.loss,
        "steps": row.steps,
        "overlap": asdict(overlap),
        "acceptance_length_t0": asdict(length_interval(row.greedy)),
        "acceptance_length_t1": asdict(length_interval(row.sampled)),
        "acceptance_length_t0_by_seed": by_seed(row.greedy, len(row.lengths)),
        "acceptance_length_t1_by_seed": by_seed(row.sampled, len(row.lengths)),
        "draft_cost": row.costs,
        "draft_lengths": row.lengths,
        "speedup": [asdict(speed.speedup) if speed.speedup else None for speed in speeds],
    }


def by_seed(prompts: Sequence[AcceptanceStats], seeds: int) -> list[float]:
    size = len(prompts) // seeds
    parts = [prompts[i * size : (i + 1) * size] for i in range(seeds)]
    return [round(sum(part, AcceptanceStats()).acceptance_length, 3) for part in parts]


def summary(row: Row) -> str:
    greedy, sampled = (sum(part, AcceptanceStats()) for part in (row.greedy, row.sampled))
    return (
        f"acceptance length {greedy.acceptance_length:.3f} greedy, {sampled.acceptance_length:.3f} "
        f"sampled (seeds so far), draft cost {row.costs[-1]:.3f}"
    )


def print_table(
    rows: Sequence[Row], plain: list[list[Timing]], options: argparse.Namespace
) -> None:
    ms = 1000 * sum(t.seconds for t in plain[0]) / sum(len(t.token_ids) for t in plain[0])
    print(
        f"{options.minutes:g} minutes of training, {options.seeds} seeds, {options.prompts} held-out "
        f"prompts; plain decoding {ms:.1f} ms a token; {torch.get_num_threads()} threads\n"
    )
    print(
        "| drafter | loss | steps | overlap | length T=0, K=4 | length T=1, K=4 | c | greedy speedup |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        found = record(row, plain)
        speeds = ", ".join(
            f"{text(speed)} at {k}"
            for speed, k in zip(found["speedup"], row.lengths, strict=True)  # type: ignore[call-overload]
        )
        cells = [
            row.name,
            row.loss,
            ", ".join(map(str, row.steps)) or "-",
            text(found["overlap"]),
            text(found["acceptance_length_t0"]),
            text(found["acceptance_length_t1"]),
            ", ".join(f"{cost:.3f}" for cost in row.costs),
            speeds,
        ]
        print("| " + " | ".join(cells) + " |")


def text(interval: object) -> str:
    assert isinstance(interval, dict)
    found = Interval(**interval)
    if found.value is None:
        return "-"
    if found.low is None or found.high is None:
        return f"{found.value:.2f}"
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=2.0, help="of training, each")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=trained_kinds())
    parser.add_argument("--losses", nargs="+", default=["lk_hybrid", "forward_kl"])
    parser.add_argument("--runs", nargs="+", help="KIND/LOSS: these, not --kinds with --losses")
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts measured on")
    parser.add_argument("--new-tokens", type=int, default=48, help="of every measured answer")
    parser.add_argument("--timed-prompts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", help="JSON file of all figures")
    parser.add_argument("--set", nargs="*", default=[], help="key=value settings of every run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
