"""Prompts: splits that can not leak, mixes by share, nothing of the evaluation in training."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from distill import prompt_sources, self_prompts
from distill.embedded_prompts import mt_bench
from distill.mixture import distinct, mixture, split
from distill.prompt import Prompt, make_prompt, normalised
from distill.prompts import PromptsConfig, load_prompts
from distill.rows import DatasetConfig
from distill.self_prompts import is_usable, whole_sentences
from distill.templates import ChatTemplate
from distill.writer import Text
from tests.chat_templates import SMOLLM2, byte_tokenizer


def asked(text, source="test", about=""):
    return Prompt(f"{source}-{text}", source, ({"role": "user", "content": text},), about)


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_a_prompt_stays_on_its_side_whatever_else_there_is():
    prompts = [asked(f"question {i}") for i in range(400)]
    sides = split(prompts, 0.1)
    assert 20 <= len(sides[True]) <= 60  # binomial(400, 0.1) leaves this once in 10,000
    held_out = {p.id for p in sides[True]}
    for p in split(prompts[100:], 0.1)[True]:
        assert p.id in held_out


def test_prompts_on_one_thing_stay_together():
    prompts = [asked(f"q{i}", about=f"paragraph {i % 20}") for i in range(200)]
    sides = split(prompts, 0.3)
    assert not {p.about for p in sides[True]} & {p.about for p in sides[False]}
    assert sides[True]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_even_a_few_prompts_give_both_sides_something(count):
    sides = split([asked(f"only {i}") for i in range(count)], 0.1)
    assert sides[True]
    assert sides[False]


def test_every_beginning_of_a_mixture_has_the_shares():
    kinds = {kind: [asked(f"{kind}{i}", kind) for i in range(100)] for kind in "abc"}
    mixed = mixture(kinds, {"a": 0.5, "b": 0.3, "c": 0.2}, 100, seed=0)
    for size in (10, 50, 100):
        counted = Counter(p.source for p in mixed[:size])
        for kind, share in {"a": 0.5, "b": 0.3, "c": 0.2}.items():
            assert abs(counted[kind] - share * size) <= 1


def test_a_source_that_runs_out_leaves_its_places_to_the_others():
    kinds = {"a": [asked("x", "a")], "b": [asked(f"b{i}", "b") for i in range(20)]}
    mixed = mixture(kinds, {"a": 0.9, "b": 0.1}, 15, seed=0)
    assert Counter(p.source for p in mixed) == {"a": 1, "b": 14}


def test_repetitions_up_to_case_and_spacing_are_one_prompt():
    prompts = [asked("What is this?"), asked("what  is THIS"), asked("What was this?")]
    assert [normalised(p) for p in distinct(prompts)] == ["whatisthis", "whatwasthis"]


def test_nothing_to_train_on_or_to_evaluate_is_an_error(tmp_path):
    path = write_lines(tmp_path / "mine.jsonl", {"prompt": "the only one"})
    with pytest.raises(ValueError, match="no prompt is left for train"):
        load_prompts(PromptsConfig(file=str(path), suites=[]))


def test_what_the_evaluation_asks_is_left_out_of_training_and_reported(tmp_path, monkeypatch):
    question = "Compose an engaging travel blog post about a recent trip to Hawaii with a friend."
    monkeypatch.setattr(
        "distill.prompts.SUITES", {"mt_bench": lambda: [asked(question, "mt_bench")]}
    )
    near = question.replace("friend", "cousin")
    records = [{"prompt": question.upper()}, {"prompt": near}]
    path = write_lines(
        tmp_path / "mine.jsonl", *records, *[{"prompt": f"do {i}"} for i in range(9)]
    )
    sets = load_prompts(PromptsConfig(file=str(path), num_train=50, num_held_out=2))
    everything = {normalised(p) for p in [*sets.train, *sets.suites["held_out"]]}
    assert not everything & {normalised(asked(question)), normalised(asked(near))}
    assert {one.suite for one in sets.overlaps} <= {"mt_bench"}
    assert all(one.evaluation_id == f"mt_bench-{question}" for one in sets.overlaps)


def test_own_data_sets_are_mixed_with_embedded_sources_by_weight(tmp_path):
    path = write_lines(tmp_path / "mine.jsonl", *[{"prompt": f"do {i}"} for i in range(60)])
    config = PromptsConfig(
        datasets={"mine": DatasetConfig(path=str(path), weight=3)},
        sources={"word_problems": 1.0},
        num_train=40,
        num_held_out=4,
        suites=[],
    )
    counted = Counter(prompt.source for prompt in load_prompts(config).train)
    assert counted == {"mine": 30, "word_problems": 10}


def test_a_users_file_replaces_the_mix_and_needs_no_network(tmp_path):
    path = write_lines(tmp_path / "mine.jsonl", *[{"prompt": f"do {i}"} for i in range(40)])
    config = PromptsConfig(file=str(path), num_train=20, num_held_out=3, suites=[])
    sets = load_prompts(config)
    assert len(sets.train) == 20
    assert sets == load_prompts(config)
    assert not {p.id for p in sets.train} & {p.id for p in sets.suites["held_out"]}


def test_word_problems_are_made_on_the_spot_and_differ():
    sources = {"word_problems": 1.0}
    sets = load_prompts(PromptsConfig(sources=sources, num_train=30, num_held_out=4, suites=[]))
    texts = [normalised(p) for p in [*sets.train, *sets.suites["held_out"]]]
    assert len(set(texts)) == len(texts) == 34


def test_paragraphs_become_questions_readings_summaries_and_tasks(monkeypatch):
    paragraphs = [
        prompt_sources._Paragraph("T", f"Text {i}.", (f"Who {i}?",), ("Marie Curie", "in 1903"))
        for i in range(5)
    ]
    monkeypatch.setattr(prompt_sources, "_squad", lambda: paragraphs)
    assert dict(prompt_sources.squad_questions(3, 0)).keys() <= {f"Who {i}?" for i in range(5)}
    assert all("\n\nWho" in text for text, _ in prompt_sources.squad_reading(5, 0))
    assert all(text.startswith("Summarize") for text, _ in prompt_sources.squad_summaries(5, 0))
    tasks = prompt_sources.squad_tasks(10, 0)
    assert len(tasks) == 5
    assert all("Marie Curie" in text and "1903" not in text for text, _ in tasks)
    assert {about for _, about in tasks} == {p.text for p in paragraphs}


def test_mt_bench_prompts_keep_their_categories_and_their_ids(monkeypatch, tmp_path):
    lines = [
        {"turns": ["Hi", "And now?"], "category": "writing"},
        {"turns": ["2+2?"], "category": "math"},
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(prompt_sources, "fetch", lambda asset: file)
    found = mt_bench()
    assert [prompt.category for prompt in found] == ["writing", "math"]
    bare = [make_prompt("mt_bench", one.messages) for one in found]
    assert [prompt.id for prompt in found] == [prompt.id for prompt in bare]


def test_a_self_prompting_mix_without_a_target_is_refused():
    with pytest.raises(ValueError, match="needs a target"):
        load_prompts(PromptsConfig(sources={"self_prompted": 1.0}, suites=[]))


def test_what_the_target_asks_itself_is_split_like_everything_else():
    config = PromptsConfig(sources={"self_prompted": 1.0}, num_train=20, num_held_out=2, suites=[])
    sets = load_prompts(
        config, self_prompting=lambda count, seed: [f"topic {i} {seed}" for i in range(count)]
    )
    assert len(sets.train) == 20
    assert len(sets.suites["held_out"]) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": {"wikipedia": 1.0}}, r"prompts.sources.wikipedia is not a source"),
        ({"sources": {"tasks": -1.0}}, r"prompts.sources.tasks must be zero or positive"),
        ({"sources": {"tasks": 0.0}}, r"prompts.sources has no positive share"),
        ({"datasets": {"tasks": DatasetConfig(path="x")}}, r"prompts.datasets.tasks has the name"),
        ({"datasets": {"a": {"pth": "x"}}}, r"prompts.datasets.a needs a path"),
        ({"datasets": {"a": {"path": "x", "n": 1}}}, r"prompts.datasets.a.n is no setting"),
        ({"num_train": 0}, r"prompts.num_train must be at least 1"),
        ({"num_held_out": 0}, r"prompts.num_held_out must be at least 1"),
        ({"held_out_fraction": 1.0}, r"prompts.held_out_fraction must be between 0 and 1"),
        ({"suites": ["mmlu"]}, r"prompts.suites holds 'mmlu'"),
    ],
)
def test_a_setting_out_of_range_is_named_by_its_path(settings, message):
    with pytest.raises(ValueError, match=message):
        PromptsConfig(**settings)


def test_the_target_writes_user_turns_behind_their_opening_each_once_and_keeps_them(
    tmp_path, monkeypatch
):
    template = ChatTemplate(byte_tokenizer(SMOLLM2))
    target = SimpleNamespace(eos_token_ids=(2,), fingerprint="f")
    first, second = "What goes into a good soup?", "How do I plant a tree in spring?"
    written = [first, first.upper(), "Hi", "what " * 20, second]

    class Writing:
        def __init__(self, target, **settings):
            assert settings["stop_ids"] == [2]

        def write(self, requests, *, longest_prompt):
            for request in requests:
                assert request.prompt_ids == template.user_opening()
                ids = template.encode(written[request.key % len(written)])
                yield Text(request, [*ids, 2])

    monkeypatch.setenv("DRAFTLOOP_CACHE", str(tmp_path))
    monkeypatch.setattr(self_prompts, "Writer", Writing)
    with pytest.raises(ValueError, match=r"of 73 user turns .* only 2 were usable, 3 are wanted"):
        self_prompts.self_prompts(target, template, 3, seed=0)
    assert self_prompts.self_prompts(target, template, 2, seed=0) == [first, second]
    monkeypatch.delattr(self_prompts, "Writer")  # nothing is written again
    assert self_prompts.self_prompts(target, template, 2, seed=0) == [first, second]


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("Can you suggest a recipe for a vegan breakfast?", True),
        ("Hi", False),
        ("what what what what what what what what what what what", False),
        ("one two three " * 10, False),
        ("x" * 500, False),
        ("A broken \ufffd character in here", False),
    ],
)
def test_texts_that_no_user_would_write_are_filtered(text, usable):
    assert is_usable(text) is usable


def test_a_text_that_broke_off_ends_at_its_last_sentence():
    assert whole_sentences("I need help. Can you? And then I") == "I need help. Can you?"
    assert whole_sentences("no end at all") == ""
