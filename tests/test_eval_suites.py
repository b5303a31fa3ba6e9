"""Suites of several turns, and those that arrive inside packages."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from eval import fetched
from eval.acceptance import measure_acceptance
from eval.progress import silent_stage
from eval.session import turn_notes
from eval.suites import Question, encode, read_questions
from eval.turns import with_later_turns
from specdec_runtime.loading import load_target
from specdec_runtime.target import Target
from specdec_runtime.tiny_target import byte_tokenizer, random_llama


@pytest.fixture(scope="module")
def eval_target(tmp_path_factory) -> Target:
    folder = tmp_path_factory.mktemp("models") / "target"
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    random_llama(tokenizer).save_pretrained(folder)
    return load_target(str(folder))


def _file(tmp_path: Path, *lines: dict) -> Path:
    path = tmp_path / "suite.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_a_file_in_the_format_of_spec_bench_or_speed_bench_keeps_its_later_turns(tmp_path):
    path = _file(
        tmp_path,
        {"question_id": 7, "category": "qa", "turns": ["first", "second", "third"]},
        {"question_id": 8, "category": "qa", "sub_category": "x", "turns": ["alone"], "source": ""},
    )
    first, alone = read_questions(path, suite="spec_bench")
    assert first.messages == [{"role": "user", "content": "first"}]
    assert first.later_turns == ("second", "third")
    assert alone.later_turns == ()


@pytest.mark.parametrize("turns", [[], [""], ["fine", 3], "text"])
def test_broken_turns_are_an_error_with_the_line(tmp_path, turns):
    with pytest.raises(ValueError, match=r"suite\.jsonl:1: turns must be"):
        read_questions(_file(tmp_path, {"turns": turns}))


def test_a_second_turn_continues_from_the_targets_own_answer(eval_target):
    question = Question("q", "s", None, [{"role": "user", "content": "a"}], later_turns=("b",))
    first, second = with_later_turns(
        [question], eval_target, num_turns=2, max_new_tokens=6, most=8, stage=silent_stage
    )
    prompt = encode([first], eval_target.tokenizer)["s"][0].token_ids
    answer = measure_acceptance(
        eval_target, None, [prompt], num_draft_tokens=0, max_new_tokens=6
    ).token_ids[0]
    said = eval_target.tokenizer.decode(answer, skip_special_tokens=True)
    assert second.id == "q/turn 2"
    assert [m["role"] for m in second.messages] == ["user", "assistant", "user"]
    assert [m["content"] for m in second.messages] == ["a", said, "b"]


def test_one_turn_leaves_the_questions_alone_and_needs_no_target():
    question = Question("q", "s", None, [{"role": "user", "content": "a"}], later_turns=("b",))
    assert with_later_turns([question], None, num_turns=1, max_new_tokens=4, most=8) == [question]


def test_of_a_large_suite_only_the_questions_that_are_wanted_are_continued(eval_target):
    questions = [
        Question(str(i), "s", None, [{"role": "user", "content": f"{i}"}], later_turns=("b",))
        for i in range(50)
    ]
    found = with_later_turns(
        questions, eval_target, num_turns=2, max_new_tokens=2, most=6, stage=silent_stage
    )
    assert [q.id for q in found] == ["0", "0/turn 2", "16", "16/turn 2", "33", "33/turn 2"]


def _assets(tmp_path, monkeypatch):
    """Small files in the format of the real ones."""
    passage = "Berlin is the capital of Germany and one of its sixteen federal states. It is large."
    files = {
        fetched.HUMANEVAL: json.dumps({"prompt": "def f(x):\n"}),
        fetched.SQUAD: json.dumps({"data": [{"paragraphs": [{"context": passage}] * 9}]}),
        fetched.HOTPOTQA: json.dumps(
            [{"question": "Who?", "context": [["Title", ["One. ", "Two."]]]}] * 3
        ),
        fetched.MT_BENCH: json.dumps({"question_id": 81, "turns": ["a", "b"], "category": "x"}),
    }

    def fetch(asset):
        path = tmp_path / asset.file_name
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "wt") as file:
            file.write(files[asset])
        return path

    monkeypatch.setattr(fetched, "fetch", fetch)


def test_every_fetched_suite_gives_distinct_ids_under_its_own_name(tmp_path, monkeypatch):
    _assets(tmp_path, monkeypatch)
    questions = fetched.load_suites(["mt_bench", "humaneval", "rag", "summary", "translation"])
    assert len({question.id for question in questions}) == len(questions)
    assert {question.suite for question in questions} == {
        *("mt_bench", "humaneval", "rag", "summary", "translation")
    }
    assert all(question.messages[0]["content"].strip() for question in questions)
    assert {q.category for q in questions if q.suite == "translation"} == {
        *("German", "French", "Spanish")
    }


def test_suites_of_a_run_are_named_beside_fetched_ones_which_come_first(tmp_path, monkeypatch):
    _assets(tmp_path, monkeypatch)
    own = [
        Question(f"own/{suite}", suite, None, None, [1, 2]) for suite in ("mt_bench", "held_out")
    ]
    found = fetched.load_suites(["held_out", "mt_bench"], own)
    assert found[0] == own[1]
    assert [question.suite for question in found[1:]] == ["mt_bench"] * len(found[1:])
    assert own[0] not in found
    with pytest.raises(ValueError, match=r"mt_bench, .*, held_out, or give prompts"):
        fetched.load_suites(["held"], own)


def test_turns_that_no_prompt_has_are_a_warning():
    single = Question("1", "s", None, [{"role": "user", "content": "a"}])
    double = replace(single, later_turns=("b",))
    assert turn_notes([single], 1) == turn_notes([single, double], 2) == []
    [flag] = turn_notes([single], 2)
    assert flag.level == "warning"
    assert "turns=2: no prompt has a second turn" in flag.message


def test_an_unknown_suite_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"suites=\['mtbench'\].*mt_bench, humaneval, rag"):
        fetched.load_suites(["mtbench"])
