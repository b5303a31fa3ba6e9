"""`python -m eval`: from folders to a report; every mistake ends in one line."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from eval.cli import explain, main, spelled_out
from eval.config import EvalConfig, EvaluationConfig
from eval.parts import Parts, fingerprint_of
from eval.progress import silent_stage
from eval.records import read_json
from eval.results import Results
from eval.run import evaluate
from eval.sampling_check import sampling_checks
from eval.session import (
    drafter_specs,
    first_manifest,
    load_questions,
    output_folder,
    target_name,
    template_notes,
)
from eval.suites import EvalPrompt, encode, fitting, read_questions, spread, write_prompts
from specdec_runtime.drafters.prompt_lookup import PromptLookupDrafter
from specdec_runtime.formats import DrafterManifest, TargetRecord, write_drafter
from specdec_runtime.target import as_target
from specdec_runtime.tiny_target import byte_tokenizer, random_llama
from tests.conftest import tiny_llama, tiny_model

SMALL = {
    "num_prompts": 2,
    "max_new_tokens": 10,
    "num_draft_tokens": 2,
    "max_draft_tokens": 2,
    "speed_prompts": 2,
    "speed_repeats": 1,
    "reference_prompts": 1,
    "num_resamples": 100,
    "trace_prompts": 1,
    "policies": True,
    "rival_prompts": 1,
    "batch_sizes": [1, 2],
    "context_lengths": [16],
}
# What is measured on request only.
NOTHING_EXTRA = {"policies": False, "rival_prompts": 0, "batch_sizes": [], "context_lengths": []}


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch) -> None:
    """The check of the sampling rules is tests/test_sampling_check.py's."""
    few = partial(sampling_checks, num_draws=20_000)
    monkeypatch.setattr("eval.measurements.sampling_checks", few)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    random_llama(tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run_folder(target_folder, tmp_path_factory) -> Path:
    """A run as training leaves it: RUN/drafter and RUN/eval/prompts.jsonl."""
    run = tmp_path_factory.mktemp("runs") / "mine"
    tokenizer = byte_tokenizer()
    manifest = DrafterManifest(
        kind="causal_lm", target=TargetRecord(name=str(target_folder)), template_hash="other"
    )
    write_drafter(run / "drafter", random_llama(tokenizer), manifest, tokenizer=tokenizer)
    prompts = [EvalPrompt("a", [5, 6, 7]), EvalPrompt("b", [9, 10, 11, 12])]
    write_prompts(run / "eval" / "prompts.jsonl", {"held_out": prompts})
    return run


def run_main(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["eval", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_one_command_measures_a_drafter_folder_on_its_runs_prompts(
    run_folder, tmp_path, monkeypatch, capsys
):
    output = tmp_path / "out"
    settings = [f"evaluation.{name}={value}" for name, value in SMALL.items()]
    code = run_main(monkeypatch, f"drafter={run_folder / 'drafter'}", f"output={output}", *settings)
    printed = capsys.readouterr().out
    assert code == 0
    results = read_json(output / "results.json", Results)
    assert results.complete
    assert [drafter.name for drafter in results.drafters] == ["mine", "lookup"]
    assert [suite.name for suite in results.suites] == ["held_out"]
    assert all(certificate.passed for certificate in results.exactness)
    assert all(replayed.exact for replayed in results.replay)
    # The drafter is a copy of the target: it keeps everything.
    assert results.acceptance[0].acceptance_rate.value == 1.0
    assert "template_differs" in {flag.code for flag in results.flags}
    assert {a.temperature for a in results.acceptance} == {0.0, 1.0}
    assert {rival.drafter for rival in results.rivals} == {"mine", "lookup"}
    assert all(rival.num_identical == rival.num_prompts for rival in results.rivals)
    assert len(results.policies) == 6
    # Groups of a kind of place add up to the acceptance beside them, at both temperatures.
    for record in results.acceptance:
        places = (record.drafter, record.suite, record.temperature, "answer position")
        groups = [
            b for b in results.breakdown if (b.drafter, b.suite, b.temperature, b.by) == places
        ]
        assert sum(b.num_accepted for b in groups) <= record.num_accepted + 1e-6
    assert len({one.costs.target_s for one in results.costs}) == 1
    assert all(len(one.parts) == 4 for one in results.predictions if one.deviation is not None)
    assert [(p.batch_size, p.measured) for p in results.sweeps] == [
        *((1, True), (2, True), (1, False))
    ]
    names = {path.name for path in output.iterdir()}
    assert {"report.html", "report.md", "failures.jsonl", "prompts.jsonl"} <= names
    assert "parts" not in names
    assert results.verdicts[0].sentence.split(";")[0] in " ".join(printed.split())


def test_a_drafter_folder_that_is_not_there_is_said_to_be_missing(monkeypatch, capsys):
    assert run_main(monkeypatch, "drafter=./not/there") == 1
    assert "drafter=./not/there: no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluation.num_prompt=3"], "did you mean evaluation.num_prompts?"),
        (["evaluation.num_prompts=1"], "evaluation.num_prompts must be at least 2"),
        (["evaluation.num_prompts=many"], "evaluation.num_prompts"),
        (["suites=[mt_bank]"], "expected one or more of mt_bench"),
        (["prompts=missing.jsonl"], "missing.jsonl does not exist"),
        (["prompts=some.jsonl", "suites=[rag]"], "are both given"),
    ],
)
def test_wrong_settings_end_in_one_line(arguments, message, monkeypatch, capsys, tmp_path):
    output = tmp_path / "out"
    arguments = ["drafter=lookup", f"output={output}", *arguments]
    assert run_main(monkeypatch, *arguments) in (1, 2)
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert message in error
    assert len(error.splitlines()) == 1
    assert not output.exists()


def test_missing_drafter_is_named(monkeypatch, capsys):
    assert run_main(monkeypatch, "target=x") == 2
    assert "drafter" in capsys.readouterr().err


def test_help_needs_no_model(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["eval", "--help"])
    main()
    assert "python -m eval drafter=DIR" in capsys.readouterr().out


def test_drafter_of_another_target_is_refused(run_folder, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other"
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(other)
    random_llama(tokenizer).save_pretrained(other)
    drafter = tmp_path / "run" / "drafter"
    manifest = DrafterManifest(
        kind="causal_lm", target=TargetRecord(name="mine", fingerprint="0" * 64)
    )
    write_drafter(drafter, random_llama(tokenizer), manifest, tokenizer=tokenizer)
    prompts = run_folder / "eval" / "prompts.jsonl"
    code = run_main(monkeypatch, f"drafter={drafter}", f"target={other}", f"prompts={prompts}")
    assert code == 1
    assert "was trained for target 'mine'" in capsys.readouterr().err


def test_shorthands_avoid_the_groups_of_training():
    assert spelled_out("target=x/y") == "target.model=x/y"
    assert spelled_out("prompts=a.jsonl") == "prompts_file=a.jsonl"
    assert spelled_out("target.dtype=auto") == "target.dtype=auto"


def test_unknown_keys_are_explained_with_the_nearest():
    error = ValueError("Could not override 'evaluation.seeed'")
    assert "did you mean evaluation.seed?" in explain(error, EvalConfig)


def settings(**values) -> EvalConfig:
    schema = OmegaConf.structured(EvalConfig)
    return OmegaConf.to_object(OmegaConf.merge(schema, values))


def test_lookup_is_always_shown_and_none_is_no_drafter():
    timed = drafter_specs(settings(drafter="runs/distill/2026-11-29_22-15-58/drafter"))
    assert list(timed) == ["distill", "lookup"]
    assert drafter_specs(settings(drafter="runs/x/drafter")) == {
        "x": "runs/x/drafter",
        "lookup": "lookup",
    }
    composite = settings(drafter="a/m", drafters=["composite:a/m"], lookup=False)
    assert drafter_specs(composite) == {"m": "a/m", "lookup, then m": "composite:a/m"}
    two = drafter_specs(settings(drafter="none", drafters=["a/m", "b/m"], lookup=False))
    assert two == {"m": "a/m", "m (2)": "b/m"}
    with pytest.raises(ValueError, match="name a drafter"):
        drafter_specs(settings(drafter="none", lookup=False))


def test_target_comes_from_the_drafter_folder(run_folder, target_folder):
    specs = {"d": str(run_folder / "drafter")}
    manifest = first_manifest(specs)
    assert target_name(settings(drafter="d"), manifest) == str(target_folder)
    with pytest.raises(ValueError, match="give target="):
        target_name(settings(drafter="lookup"), None)
    gone = replace(manifest, target=TargetRecord(name="/nowhere/target"))
    with pytest.raises(ValueError, match="not on this machine: give target="):
        target_name(settings(drafter="d"), gone)
    assert template_notes(manifest, byte_tokenizer())[0].code == "template_differs"
    assert template_notes(replace(manifest, template_hash=""), byte_tokenizer()) == []


def test_prompts_of_the_run_are_found_beside_the_drafter(run_folder):
    questions = load_questions(settings(drafter=str(run_folder / "drafter")))
    assert [question.token_ids for question in questions] == [[5, 6, 7], [9, 10, 11, 12]]
    assert {question.suite for question in questions} == {"held_out"}


def test_finished_output_is_not_overwritten_and_unfinished_is_continued(tmp_path):
    (tmp_path / "results.json").write_text('{"complete": false}')
    assert output_folder(settings(drafter="x", output=str(tmp_path))) == tmp_path
    (tmp_path / "results.json").write_text('{"complete": true}')
    with pytest.raises(ValueError, match="holds a finished evaluation"):
        output_folder(settings(drafter="x", output=str(tmp_path)))
    (tmp_path / "results.json").unlink()
    (tmp_path / "something").write_text("")
    with pytest.raises(ValueError, match="holds no evaluation"):
        output_folder(settings(drafter="x", output=str(tmp_path)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ('{"text": "x"}', "no prompt found (keys: text)"),
        ('{"prompt": " "}', "prompt must be a non-empty text"),
        ('{"turns": []}', "turns must be a non-empty list"),
        ('{"messages": [{"role": "user"}]}', "role and content"),
        ('{"token_ids": [1, "a"]}', "token_ids must be"),
    ],
)
def test_broken_line_of_a_suite_is_named(line, message, tmp_path):
    path = tmp_path / "suite.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"suite\.jsonl:2: ") as raised:
        read_questions(path)
    assert message in str(raised.value)


def test_empty_suite_is_an_error(tmp_path):
    path = tmp_path / "suite.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_questions(path)


def test_all_known_line_formats_are_read_and_rendered_with_the_template(tmp_path):
    records = [
        {"prompt": "Hi", "id": "one"},
        {"question_id": 7, "category": "math", "turns": ["Hi", "And now?"]},
        {"messages": [{"role": "user", "content": "Hi"}], "suite": "chat"},
        {"token_ids": [1, 2], "text": "shown"},
    ]
    path = tmp_path / "suite.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    suites = encode(read_questions(path, suite="mine"), byte_tokenizer())
    assert [prompt.id for prompt in suites["mine"]] == ["one", "7", "4"]
    assert suites["mine"][0].token_ids == suites["chat"][0].token_ids
    assert byte_tokenizer().decode(suites["mine"][1].token_ids).endswith("assistant\n")
    assert suites["mine"][1].category == "math"
    assert suites["mine"][2] == EvalPrompt("4", [1, 2], None, "shown")


def test_prompts_that_leave_no_room_are_left_out_or_refused():
    prompts = [EvalPrompt("a", [1] * 10), EvalPrompt("b", [1] * 90)]
    kept = fitting(prompts, max_new_tokens=20, max_positions=100, suite="s")
    assert [prompt.id for prompt in kept] == ["a"]
    with pytest.raises(ValueError, match="shortest of 2 prompts has 10 tokens"):
        fitting(prompts, max_new_tokens=95, max_positions=100, suite="s")
    assert [p.id for p in spread([EvalPrompt(str(i), [1]) for i in range(9)], 3)] == ["0", "4", "2"]


def test_finished_parts_are_not_computed_again(tmp_path):
    calls = []

    def compute() -> list[int]:
        calls.append(1)
        return [1, 2]

    parts = Parts(tmp_path, fingerprint_of({"a": 1}))
    assert parts.get("x y/z", list[int], compute) == [1, 2]
    assert Parts(tmp_path, fingerprint_of({"a": 1})).get("x y/z", list[int], compute) == [1, 2]
    assert len(calls) == 1
    Parts(tmp_path, fingerprint_of({"a": 2})).get("x y/z", list[int], compute)
    assert len(calls) == 2
    parts.forget()
    assert not (tmp_path / "parts").exists()


def test_interrupted_evaluation_continues_with_equal_texts(tmp_path):
    target = as_target(tiny_llama(0))
    prompts = {"s": [[1, *range(5 + i, 12 + 2 * i)] for i in range(3)]}
    config = EvaluationConfig(**SMALL | NOTHING_EXTRA)
    stopped_at = []

    def stopping(name: str, total: int):
        if name.startswith("timing"):
            stopped_at.append(name)
            raise KeyboardInterrupt
        return silent_stage(name, total)

    drafters = {"lookup": PromptLookupDrafter()}
    with pytest.raises(KeyboardInterrupt):
        evaluate(target, drafters, prompts, config, folder=tmp_path, stage=stopping)
    partial = read_json(tmp_path / "results.json", Results)
    assert not partial.complete
    assert partial.acceptance
    seen = []

    def noting(name: str, total: int):
        seen.append(name)
        return silent_stage(name, total)

    results = evaluate(target, drafters, prompts, config, folder=tmp_path, stage=noting)
    assert results.complete
    assert results.acceptance == partial.acceptance
    assert [name for name in seen if not name.startswith("timing")] == []


def test_nothing_to_evaluate_is_a_clear_error():
    target = as_target(tiny_llama(0))
    with pytest.raises(ValueError, match="every drafter given is 'none'"):
        evaluate(target, {"none": None}, {"s": [[1, 2]]}, EvaluationConfig())
    with pytest.raises(ValueError, match="no prompts to evaluate on"):
        evaluate(target, {"l": PromptLookupDrafter()}, {}, EvaluationConfig())


def test_drafter_without_proposals_is_n_a_and_one_prompt_has_no_interval():
    target = as_target(tiny_model(0))
    silent = PromptLookupDrafter(min_ngram=50, max_ngram=50)
    config = EvaluationConfig(**SMALL | NOTHING_EXTRA | {"reference_prompts": 0})
    results = evaluate(target, {"silent": silent}, {"s": [[1, 5, 6]]}, config, stage=silent_stage)
    assert results.verdicts[0].headline == "n/a"
    assert results.acceptance[0].acceptance_rate.value is None
    codes = {flag.code for flag in results.flags}
    assert {"nothing_drafted", "no_interval", "no_reference"} <= codes
