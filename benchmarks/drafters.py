"""Drafter kinds and losses side by side: the same target, answers and minutes of training.

    python -m benchmarks.drafters --output runs/drafters --minutes 2
    python -m benchmarks.drafters --output runs/curve --curve 100000 200000 400000 --minutes 10 \\
        --runs eagle3/lk_hybrid --set answers.max_tokens=400000 prompts.num_train=5000

The first trains every kind with every loss and two seeds on what `+experiment=distill` trains on, and
two kinds without a draft vocabulary. Measured on held-out prompts that chose no checkpoint: overlap
with the target's distribution (sampled text, teacher-forced), acceptance length at K = 4, also on the
other suites, what a drafted token costs (c), and the greedy speedup, timed beside plain decoding in one
interleaved session at the draft length that the cost model finds best. Lookup drafters need no training
and are always there. Below the table stands what follows from it, with paired intervals.

The second trains one drafter a number of answer tokens, the first ones of the same answers, and notes
acceptance while training: the scaling curve against tokens and against minutes, as tables and plots.

How long it takes is said first (--plan stops there). It may be killed at any time: the same command
goes on where it was, and with fewer --runs or --seeds it makes the table of what is there.

A choice may carry settings: `--runs eagle3:draft.steps=3/lk_hybrid:loss.eta=10`; --set gives those of
all runs (`--set answers_folder=FOLDER`).
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from benchmarks.drafter_cells import (
    DRAFTER,
    OVERHEAD_S,
    Bench,
    Cell,
    Choice,
    cell_folder,
    digest_of,
    find_cell,
    measured,
    prepare_bench,
)
from benchmarks.drafter_plots import curve_plots
from benchmarks.drafter_table import Row, curve_table, findings, minutes_table, rows_of, table
from eval.speed import Timing, speculative_decode, time_prompt, warm_up
from specdec_runtime import load_drafter
from specdec_runtime.draft import Drafter, without_learning
from train.interrupts import Interrupted, StopRequest
from train.material import HELD_OUT
from train.run_dir import write_atomically

KINDS = ("causal_lm", "early_exit", "eagle3", "parallel")
LOSSES = ("lk_hybrid", "forward_kl")
# The draft vocabulary on and off, in measured speed.
WHOLE = [f"{kind}:draft.draft_vocab_size=null/lk_hybrid" for kind in ("causal_lm", "eagle3")]
FREE = ("lookup", "suffix_lookup")  # need no training
PLAIN = "plain"


def main() -> None:
    options = parse_arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()
    try:
        with StopRequest() as stop:
            lines = run(options, stop)
    except Interrupted as stopped:
        print(f"{stopped}; the same command goes on from here", file=sys.stderr)
        sys.exit(128 + stopped.signum)
    if lines:
        write_atomically(options.output / "table.md", "\n".join(lines) + "\n")
        print("\n".join(lines))


def run(options: argparse.Namespace, stop: StopRequest) -> list[str]:
    """The lines of the result; none where only the plan was asked for."""
    bench = prepare_bench(options, stop)
    choices = choices_of(options)
    say(plan(bench, choices))
    if options.plan:
        return []
    cells = find_cells(bench, choices, stop)
    rows = rows_of(choices, cells)
    if options.curve:
        for name, svg in curve_plots(rows).items():
            write_atomically(options.output / name, svg)
        return [heading(bench), "", *curve_table(rows), "", *minutes_table(rows)]
    free = [Row(name, "", cells=[measured(bench, loaded(bench, name))]) for name in FREE]
    plain = time_rows(bench, [*free, *rows])
    lines = [heading(bench, plain), "", *table([*free, *rows], plain)]
    return [*lines, "", *findings([*free, *rows], plain)]


def choices_of(options: argparse.Namespace) -> list[Choice]:
    """What is trained, seed by seed, so that an early end leaves whole tables of fewer seeds."""
    runs = [run.rpartition("/")[::2] for run in options.runs]
    return [
        Choice(kind, loss, seed, tokens)
        for seed in range(options.seeds)
        for tokens in options.curve or [None]
        for kind, loss in runs
    ]


def plan(bench: Bench, choices: Sequence[Choice]) -> str:
    """How long what is still to be done takes, from a measured token and what a cell usually costs."""
    options = bench.options
    missing = sum(not is_done(bench, choice) for choice in choices)
    decodes = (len(bench.prompts) + 1) * options.prompts * options.new_tokens
    cell_s = 60 * (options.minutes or 0) + OVERHEAD_S + decodes * bench.seconds_a_token
    timed = 0 if options.curve else len(choices) + len(FREE) + 1
    timed *= options.timed_prompts * options.repeats * options.new_tokens
    timing_s = timed * bench.seconds_a_token
    total = (missing * cell_s + timing_s) / 60
    return (
        f"{len(choices)} cells, {missing} to be done: about {total:.0f} min ({cell_s / 60:.1f} each, "
        f"{timing_s / 60:.1f} to time them); a token of plain decoding takes "
        f"{1000 * bench.seconds_a_token:.1f} ms"
    )


def find_cells(bench: Bench, choices: Sequence[Choice], stop: StopRequest) -> list[Cell]:
    """All cells in order; those that are missing are made, with a word on how long the rest takes."""
    cells: list[Cell] = []
    made, begun = 0, time.monotonic()
    for number, choice in enumerate(choices, start=1):
        was_there = is_done(bench, choice)
        cells.append(find_cell(bench, choice, stop))
        if was_there:
            continue
        made += 1
        left = sum(not is_done(bench, later) for later in choices[number:])
        rest = left * (time.monotonic() - begun) / made / 60
        say(
            f"{number} of {len(choices)}: {choice.kind} {choice.loss} seed {choice.seed}"
            f"{f', {choice.tokens} tokens' if choice.tokens else ''}; the other cells take about "
            f"{rest:.0f} min"
        )
        write_atomically(bench.options.output / "so_far.md", so_far(choices[:number], cells))
    return cells


def is_done(bench: Bench, choice: Choice) -> bool:
    return (cell_folder(bench.options, choice) / "result.json").is_file()


def so_far(choices: Sequence[Choice], cells: Sequence[Cell]) -> str:
    """The table without speeds, for whoever looks in before the end."""
    rows = rows_of(choices, cells)
    return "\n".join([*table(rows, None), "", *findings(rows, None)]) + "\n"


def loaded(bench: Bench, source: str | Path) -> Drafter:
    """A drafter that learns nothing from the texts it is measured on: they come again."""
    drafter = load_drafter(source, bench.target)
    assert drafter is not None
    return without_learning(drafter)


def time_rows(bench: Bench, rows: Sequence[Row]) -> np.ndarray:
    """Times all drafters beside plain decoding, taking turns; notes the times in the rows.

    A repeat that was finished is kept. Where texts differ (16 bit, other engines than ours) a time
    counts by its tokens.

    Returns:
        [T, P] seconds of plain decoding.
    """
    options = bench.options
    ways = {PLAIN: speculative_decode(bench.target, None, 0)}
    places: list[tuple[Row, str]] = []
    for row in rows:
        for seed, cell in enumerate(row.cells):
            choice = Choice(row.kind, row.loss, seed, row.tokens)
            source = cell_folder(options, choice) / DRAFTER if row.loss else row.kind
            drafter = loaded(bench, source)
            name = f"{row.name} {seed}"
            ways[name] = speculative_decode(bench.target, drafter, cell.draft_tokens)
            places.append((row, name))
    prompts = bench.prompts[HELD_OUT][: options.timed_prompts]
    lengths = [[cell.draft_tokens for cell in row.cells] for row in rows]
    settings = [list(ways), lengths, len(prompts), options.new_tokens]
    folder = options.output / "timing" / digest_of(settings)
    folder.mkdir(parents=True, exist_ok=True)
    seconds: list[dict[str, list[float]]] = []
    for repeat in range(options.repeats):
        path = folder / f"{repeat}.json"
        if not path.is_file():
            say(f"timing {len(ways)} ways to decode, repeat {repeat + 1} of {options.repeats}")
            warm_up(ways, prompts[0])
            timed = [
                time_prompt(ways, prompt, max_new_tokens=options.new_tokens, turn=repeat + i)
                for i, prompt in enumerate(prompts)
            ]
            write_atomically(path, json.dumps(seconds_by_way(timed)))
        seconds.append(json.loads(path.read_text()))
    for row, name in places:
        row.seconds.append(np.array([repeat[name] for repeat in seconds]))
    return np.array([repeat[PLAIN] for repeat in seconds])


def seconds_by_way(timed: Sequence[dict[str, Timing]]) -> dict[str, list[float]]:
    """{way: [P] seconds for as many tokens as plain decoding wrote}."""
    return {
        name: [
            of[name].seconds * len(of[PLAIN].token_ids) / len(of[name].token_ids) for of in timed
        ]
        for name in timed[0]
    }


def heading(bench: Bench, plain: np.ndarray | None = None) -> str:
    """What all rows share, in one line."""
    options = bench.options
    timed = ""
    if plain is not None:
        timed = f"; timed on {plain.shape[1]} of them, {plain.shape[0]} repeats"
    minutes = (
        "as long as the experiment says" if options.minutes is None else f"{options.minutes:g} min"
    )
    return (
        f"{bench.target.name}, {bench.material.answers.num_tokens} answer tokens; trained {minutes}, "
        f"{options.seeds} seeds; {options.prompts} prompts a suite, {options.new_tokens} new tokens"
        f"{timed}; plain decoding {1000 * bench.seconds_a_token:.1f} ms a token; "
        f"{torch.get_num_threads()} threads. Several figures in a cell are those of the seeds."
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder; kept between calls")
    parser.add_argument(
        "--minutes", type=float, help="of training, each; default: the experiment's"
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--losses", nargs="+", default=list(LOSSES))
    parser.add_argument("--runs", nargs="+", help="KIND/LOSS: these, not --kinds with --losses")
    parser.add_argument("--curve", nargs="+", type=int, help="numbers of answer tokens to train on")
    parser.add_argument("--prompts", type=int, default=16, help="measured on, of every suite")
    parser.add_argument("--new-tokens", type=int, default=48, help="of every measured answer")
    parser.add_argument("--timed-prompts", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--experiment", default="distill", help="whose settings all runs have")
    parser.add_argument("--set", nargs="*", default=[], help="key=value settings of every run")
    parser.add_argument("--plan", action="store_true", help="say how long it takes, and stop")
    options = parser.parse_args(arguments)
    if options.runs is None:
        pairs = [f"{kind}/{loss}" for kind in options.kinds for loss in options.losses]
        options.runs = ["eagle3/lk_hybrid"] if options.curve else [*pairs, *WHOLE]
    return options


if __name__ == "__main__":
    main()
