"""Turns: the target goes on from what it wrote, data sets keep their answers, prefixes go on."""

import json
import logging

import pytest

from distill.answers.config import AnswersConfig
from distill.answers.shards import GIVEN
from distill.answers.turns import collect_turns
from distill.batches import BatchStream, collate
from distill.conversations import Turns
from distill.mixture import split
from distill.prompt import asked, make_prompt
from distill.prompts import PromptsConfig, load_prompts, read_dataset
from distill.rows import DatasetConfig
from distill.signals import NoSignal
from distill.templates import ChatTemplate
from distill.writer import Text
from eval.records import to_json
from eval.trace import WeakPrefix
from tests.chat_templates import END, chat_tokenizer
from tests.test_prompts import write_lines

SETTINGS = AnswersConfig(max_new_tokens=60, max_prompt_tokens=400)


class ScriptedAuthor:
    """Gives the next of some texts to every prompt, with the end of a turn behind it."""

    max_positions = 1000
    bytes_per_token = bytes_per_prompt_token = 4

    def __init__(self, kind, reply):
        self.template = ChatTemplate(chat_tokenizer(kind))
        self.end = self.template.encode(END[kind])
        self.reply, self.prompts = reply, []

    @property
    def manifest(self):
        return {"format_version": 1, "target": "scripted", "template_hash": self.template.hash}

    def writer(self, num_requests):
        return self

    def write(self, requests, *, longest_prompt):
        for request in requests:
            prompt = self.template.tokenizer.decode(request.prompt_ids)
            self.prompts.append(prompt)
            ids = [*self.template.encode(self.reply(prompt)), *self.end]
            yield Text(request, ids[: SETTINGS.max_new_tokens])


def turns_prompt(*texts):
    later = tuple(({"role": "user", "content": text},) for text in texts[1:])
    return make_prompt("t", [{"role": "user", "content": texts[0]}], later=later)


def test_each_turn_is_answered_on_the_answers_before_it_and_once(tmp_path):
    author = ScriptedAuthor("smollm2", lambda prompt: f"answer {prompt.count('user')}")
    prompts = [turns_prompt("a", "b", "c"), turns_prompt("x")]
    answers = collect_turns(author, prompts, SETTINGS, tmp_path)
    assert len(author.prompts) == len(answers.answers) == 4
    assert author.prompts[-1].count("<|im_end|>") == 6  # system, three users, two answers
    assert "answer 1<|im_end|>\n<|im_start|>user\nb<|im_end|>" in author.prompts[-1]
    again = collect_turns(author, prompts, SETTINGS, tmp_path)
    assert len(author.prompts) == 4
    assert again.fingerprint == answers.fingerprint


def test_thinking_of_earlier_answers_is_gone_from_later_prompts(tmp_path):
    author = ScriptedAuthor("qwen3", lambda prompt: "<think>\nhm\n</think>\n\nyes")
    collect_turns(author, [turns_prompt("a", "b")], SETTINGS, tmp_path)
    assert "yes<|im_end|>" in author.prompts[1]
    assert "think" not in author.prompts[1]


def test_a_conversation_ends_where_its_answer_was_cut_off_or_can_not_be_shown(tmp_path, caplog):
    author = ScriptedAuthor("smollm2", lambda prompt: "x" * 200)
    collect_turns(author, [turns_prompt("a", "b")], SETTINGS, tmp_path / "cut")
    assert len(author.prompts) == 1
    author = ScriptedAuthor("gpt_oss", lambda prompt: "<|channel|>analysis<|message|>no end")
    with caplog.at_level(logging.WARNING):
        collect_turns(author, [turns_prompt("a", "b")], SETTINGS, tmp_path / "channels")
    assert len(author.prompts) == 1
    assert "1 conversations end early" in caplog.text


def test_a_budget_is_shared_by_all_turns(tmp_path):
    author = ScriptedAuthor("smollm2", lambda prompt: "nine chars")
    prompts = [turns_prompt(f"first {i}", "second") for i in range(20)]
    config = AnswersConfig(max_new_tokens=60, max_prompt_tokens=400, max_tokens=110)
    answers = collect_turns(author, prompts, config, tmp_path)
    turns = [prompt.count("<|im_start|>user") for prompt in author.prompts]
    assert 110 <= answers.num_tokens <= 132
    assert turns.count(1) == turns.count(2) == 5


def given(path, records, **settings):
    dataset = DatasetConfig(path=str(write_lines(path, *records)), **settings)
    return read_dataset(dataset, "mine", Turns.given)


def test_the_data_sets_own_answers_become_rows_without_a_signal(tmp_path):
    author = ScriptedAuthor("markers", lambda prompt: "written")
    records = [{"prompt": "q", "completion": "a"}, {"prompt": "long", "completion": "y" * 99}]
    prompts = [*given(tmp_path / "a.jsonl", records), asked("other", "asked")]
    answers = collect_turns(author, prompts, SETTINGS, tmp_path / "answers").answers
    decode = author.template.tokenizer.decode
    assert [decode(one.token_ids[one.prompt_length :]) for one in answers] == [
        "a<|im_end|>",
        "y" * 60,
        "written<|im_end|>",
    ]
    assert [one.temperature == GIVEN for one in answers] == [True, True, False]
    assert all(isinstance(one.rows, NoSignal) for one in answers)
    assert len(author.prompts) == 1


def test_a_row_without_a_trainable_token_is_dropped_counted_and_never_the_only_one(
    tmp_path, caplog
):
    author = ScriptedAuthor("r1", lambda prompt: "")
    thinking = {"prompt": "q", "completion": "<think>\nhm\n</think>\n\na"}
    prompts = given(tmp_path / "a.jsonl", [{"prompt": "p", "completion": "no thoughts"}, thinking])
    with caplog.at_level(logging.WARNING):
        answers = collect_turns(author, prompts, SETTINGS, tmp_path / "some").answers
    assert len(answers) == 1
    assert "1 prompts are left out" in caplog.text
    with pytest.raises(ValueError, match="and this answer brings no thinking"):
        collect_turns(author, prompts[:1], SETTINGS, tmp_path / "none")
    long = [asked("t", "z" * 200)] * 8
    config = AnswersConfig(max_prompt_tokens=64)
    with pytest.raises(ValueError, match="none of the 8 prompts fits into 64 tokens"):
        collect_turns(author, long, config, tmp_path / "long")


def test_of_eight_conversations_the_seven_that_do_not_fit_are_counted_and_one_is_answered(
    tmp_path, caplog
):
    author = ScriptedAuthor("r1", lambda prompt: "yes")
    seven = [asked(f"long {number}", f"{number}" + "z" * 200) for number in range(7)]
    with caplog.at_level(logging.WARNING):
        answers = collect_turns(
            author,
            [*seven, asked("short", "z")],
            AnswersConfig(max_new_tokens=60, max_prompt_tokens=64),
            tmp_path,
        ).answers
    assert [answer.id for answer in answers] == [asked("short", "z").id]
    assert "7 of 8 prompts are left out" in caplog.text


def weak(prompt, template, tail):
    ids = [*template.prompt_ids(prompt), *template.encode(tail)]
    record = WeakPrefix(
        drafter="d", suite="s", prompt_id=prompt.id, position=1, token_ids=ids, tail=tail,
        target_token_id=1, target_text="", draft_token_id=2, draft_text="",
        target_probability=0.5, overlap=0.1,
    )  # fmt: skip
    return to_json(record)


def test_places_where_a_drafter_failed_are_continued_and_never_evaluated_on(
    tmp_path, monkeypatch, caplog
):
    author = ScriptedAuthor("smollm2", lambda prompt: f"goes on from {prompt[-3:]}")
    template, suite = author.template, asked("mt_bench", "a question of the suite")
    monkeypatch.setattr("distill.prompts.SUITES", {"mt_bench": lambda: [suite]})
    path = write_lines(tmp_path / "mine.jsonl", *[{"prompt": f"do {i}"} for i in range(60)])
    dataset = read_dataset(DatasetConfig(path=str(path)), "file")
    failed = split(dataset, 0.3)[True][:2]
    records = [weak(prompt, template, "It is") for prompt in [*failed, suite]]
    write_lines(tmp_path / "failures.jsonl", *records)
    config = PromptsConfig(
        file=str(path), num_train=20, num_held_out=50, held_out_fraction=0.3,
        prefixes=str(tmp_path), prefix_share=0.5,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        sets = load_prompts(config, template=template)
    assert "1 of 3 prefixes are not trained on: they begin with prompts of mt_bench" in caplog.text
    assert not {p.id for p in sets.suites["held_out"]} & {p.id for p in failed}
    prefixes = [prompt for prompt in sets.train if prompt.source == "prefixes"]
    assert {p.token_ids for p in prefixes} == {tuple(r["token_ids"]) for r in records[:2]}
    assert {p.source for p in sets.train[:4]} == {"prefixes", "file"}

    answers = collect_turns(author, prefixes, SETTINGS, tmp_path / "answers")
    for answer in answers.answers:
        text = template.tokenizer.decode(answer.token_ids)
        assert text.endswith("It isgoes on from  is<|im_end|>")
    batch = collate(answers.answers[:1])
    assert batch.labels.tolist() == answers.answers[0].token_ids[-batch.num_tokens :].tolist()
    assert len(BatchStream(answers.answers, max_tokens=2000, seed=0).examples) == 2


def test_prefixes_of_another_tokenizer_or_evaluation_are_refused(tmp_path):
    template = ChatTemplate(chat_tokenizer("smollm2"))
    prompt = asked("mine", "only this")
    path = write_lines(tmp_path / "mine.jsonl", {"prompt": "a"}, {"prompt": "b"})
    config = {"file": str(path), "suites": [], "prefixes": str(tmp_path / "failures.jsonl")}
    with pytest.raises(ValueError, match=r"no such file, and no folder with failures\.jsonl"):
        load_prompts(PromptsConfig(**config), template=template)
    for record, message in (
        (
            weak(prompt, template, "It is") | {"tail": "Es war"},
            r"failures.jsonl:1: .* another tokenizer",
        ),
        (weak(prompt, template, "It is") | {"token_ids": [9999]}, r"failures.jsonl:1: .* another"),
        ({"prompt": "x"}, r"failures.jsonl:1: expected what python -m eval writes"),
    ):
        (tmp_path / "failures.jsonl").write_text(json.dumps(record))
        with pytest.raises(ValueError, match=message):
            load_prompts(PromptsConfig(**config), template=template)
