"""What `python -m eval` does with its settings: loads models and prompts, evaluates, prints."""

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from transformers.utils import logging as transformers_logging

from eval.config import EvalConfig
from eval.facts import Flag
from eval.fetched import load_suites
from eval.former_failures import read_failures
from eval.records import read_json
from eval.report_html import main_verdict
from eval.report_tables import summary_table, texts
from eval.results import Results
from eval.run import PROMPTS_FILE, evaluate
from eval.suites import Question, encode, read_questions
from eval.summary import summary_of, tables_of
from eval.trackers import Input, Trackers, check_tracker
from eval.turns import with_later_turns
from eval.verdict import fastest
from specdec_runtime.draft import Drafter
from specdec_runtime.formats import DrafterManifest, is_drafter_folder, read_manifest
from specdec_runtime.loading import load_drafter, load_target
from specdec_runtime.missing_folder import missing_folder
from specdec_runtime.tokenizers import template_hash

log = logging.getLogger(__name__)

RUN_TIME = re.compile(r"\d{4}-\d\d-\d\d_")  # how folders of runs start
COMPOSITE = "composite:"  # in front of a folder: lookup first, that drafter otherwise
DEFAULT_SUITE = "mt_bench"  # where neither a file nor a run has prompts
NOT_EXACT = 3  # exit code where speculative decoding did not return the target's text


def evaluate_from(config: EvalConfig) -> int:
    """Run an evaluation and print its summary; the exit code."""
    transformers_logging.disable_progress_bar()
    check_tracker(config.tracking)
    folder = output_folder(config)
    specs = drafter_specs(config)
    manifest = first_manifest(specs)
    questions = load_questions(config)
    failures = read_failures(Path(config.failures)) if config.failures is not None else []
    target = load_target(
        target_name(config, manifest),
        dtype=config.target.dtype,
        device=config.target.device,
        engine=config.target.engine,
    )
    drafters: dict[str, Drafter | None] = {
        name: load_drafter(spec, target, engine=config.target.engine)
        for name, spec in specs.items()
    }
    options = manifest.template_options if manifest is not None else {}
    notes = [*template_notes(manifest, target.tokenizer), *turn_notes(questions, config.turns)]
    questions = with_later_turns(
        questions,
        target,
        num_turns=config.turns,
        max_new_tokens=config.evaluation.max_new_tokens,
        most=config.evaluation.num_prompts,
        template_options=options,
    )
    prompts = encode(questions, target.tokenizer, options)
    results = evaluate(
        target,
        drafters,
        prompts,
        config.evaluation,
        folder=folder,
        drafter_folders={name: spec for name, spec in specs.items() if Path(spec).exists()},
        failures=failures,
        notes=notes,
    )
    print_summary(results, folder)
    exit_code = 0 if all(one.passed for one in results.exactness) else NOT_EXACT
    track(config, results, folder, exit_code)
    return exit_code


def track(config: EvalConfig, results: Results, folder: Path, exit_code: int) -> None:
    """A run of the tracker that is asked for, with what a training's evaluation has there."""
    trackers = Trackers(folder, config.tracking, name="eval", config=asdict(config.evaluation))
    summary = summary_of(results, results.drafters[0].name)
    trackers.write("evaluation", 0, {k: v for k, v in summary.items() if k != "exact"})
    trackers.write_results(
        folders={"evaluation": folder},
        report=folder / "report.html",
        inputs=[Input("target", results.target.name, results.target.fingerprint)],
        summary=summary,
        tables=tables_of(results),
    )
    trackers.finish(exit_code=exit_code, summary=summary)


def output_folder(config: EvalConfig) -> Path:
    """Where the evaluation goes: a new folder, or one that holds an unfinished evaluation.

    Raises:
        ValueError: the folder holds a finished evaluation, or something else.
    """
    if config.output is None:
        return Path("runs/eval") / time.strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path(config.output)
    if not folder.exists() or not any(folder.iterdir()):
        return folder
    results = folder / "results.json"
    if not results.is_file() and not (folder / PROMPTS_FILE).is_file():
        raise ValueError(f"output={folder} exists and holds no evaluation: choose another folder")
    if results.is_file() and read_json(results, dict[str, Any])["complete"]:
        raise ValueError(
            f"output={folder} holds a finished evaluation: choose another folder or remove it"
        )
    return folder


def drafter_specs(config: EvalConfig) -> dict[str, str]:
    """{name in the report: folder, hub id or kind}; `none` is dropped, lookup comes last."""
    specs: dict[str, str] = {}
    for spec in [config.drafter, *config.drafters, *(["lookup"] if config.lookup else [])]:
        if spec == "none" or spec in specs.values():
            continue
        specs[_unused_name(spec, specs)] = spec
    if not specs:
        raise ValueError("drafter=none and no other: name a drafter, or leave lookup=true")
    return specs


def _unused_name(spec: str, taken: Mapping[str, str]) -> str:
    """A short name: the folder's own; for runs/NAME/TIME/drafter, NAME; of a composite, both."""
    is_composite = spec.startswith(COMPOSITE)
    path = Path(spec.removeprefix(COMPOSITE))
    parts = [part for part in path.parts if part not in ("/", "drafter", "..", ".")]
    named = [part for part in parts if not RUN_TIME.match(part)]
    name = named[-1] if named else spec
    name = first = f"lookup, then {name}" if is_composite else name
    number = 2
    while name in taken:
        name, number = f"{first} ({number})", number + 1
    return name


def first_manifest(specs: Mapping[str, str]) -> DrafterManifest | None:
    """The manifest of the first drafter that has one."""
    for spec in specs.values():
        if is_drafter_folder(spec):
            return read_manifest(spec)
    return None


def target_name(config: EvalConfig, manifest: DrafterManifest | None) -> str:
    """The target to load.

    Raises:
        ValueError: neither the settings nor a drafter folder name one, or there is no such folder.
    """
    if config.target.model is not None:
        return config.target.model
    if ":" not in config.drafter and (problem := missing_folder(config.drafter)):
        raise ValueError(f"drafter={problem}")
    if manifest is None or not manifest.target.name:
        raise ValueError(
            f"drafter={config.drafter} does not say which target it belongs to: give target=..."
        )
    path = Path(manifest.target.name)
    if path.is_absolute() and not path.exists():
        raise ValueError(
            f"drafter={config.drafter} was trained for {path}, which is not on this machine: "
            "give target=..."
        )
    return manifest.target.name


def template_notes(manifest: DrafterManifest | None, tokenizer: Any) -> list[Flag]:
    """A warning where prompts are rendered differently than when the drafter was trained."""
    if manifest is None or not manifest.template_hash:
        return []
    if manifest.template_hash == template_hash(tokenizer):
        return []
    message = (
        "the target's chat template is not the one that the drafter was trained with, which lowers "
        "acceptance: train it again, or restore the template"
    )
    return [Flag("warning", "template_differs", message)]


def turn_notes(questions: Sequence[Question], num_turns: int) -> list[Flag]:
    """A warning where later turns are asked for and no prompt has one."""
    if num_turns == 1 or any(question.later_turns for question in questions):
        return []
    message = (
        f"turns={num_turns}: no prompt has a second turn, so none was evaluated; a run's own prompts "
        "are single turns, suites=[mt_bench] has two"
    )
    return [Flag("warning", "no_later_turns", message)]


def load_questions(config: EvalConfig) -> list[Question]:
    """Prompts: from the file given, else of the suites named, else those beside the drafter.

    Raises:
        ValueError: a file that cannot be used, a suite that is none, or both file and suites.
    """
    if config.prompts_file is not None:
        if config.suites is not None:
            raise ValueError(
                f"prompts={config.prompts_file} and suites={list(config.suites)} are both given: "
                "name the suite in the lines of the file, or leave one of them out"
            )
        path = Path(config.prompts_file)
        return read_questions(path, suite=path.stem)
    kept = Path(config.drafter).resolve().parent / "eval" / PROMPTS_FILE
    own = read_questions(kept) if Path(config.drafter).exists() and kept.is_file() else []
    if config.suites is None and own:
        log.info("prompts: those of the drafter's own run, %s", kept)
        return own
    return load_suites([DEFAULT_SUITE] if config.suites is None else config.suites, own)


def print_summary(results: Results, folder: Path) -> None:
    """The verdict and a table on the terminal."""
    console = Console()
    verdict = main_verdict(results)
    if verdict is not None:
        console.print(f"\n[bold]{verdict.sentence}[/bold]", highlight=False)
    if other := fastest(results):
        console.print(other, highlight=False)
    for flag in results.flags:
        if flag.level != "note":
            console.print(f"{flag.level}: {flag.message}", highlight=False, markup=False)
    console.print(terminal_table(results))
    console.print(f"report: {folder / 'report.html'}", highlight=False, soft_wrap=True)


def terminal_table(results: Results) -> RichTable:
    """The summary as a table for the terminal; training prints it too."""
    summary = summary_table(results)
    table = RichTable(box=None, pad_edge=False)
    for index, column in enumerate(summary.columns):
        is_text = index in summary.text_columns
        table.add_column(column, justify="left" if is_text else "right")
    for row in summary.rows:
        table.add_row(*texts(row))
    return table
