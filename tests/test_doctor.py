"""The doctor: every fault has its finding with a remedy, and what is shown is what is trained on."""

import re

import pytest
import torch
from tokenizers import normalizers

from distill.answers.turns import collect_turns
from distill.doctor.cli import run_command
from distill.doctor.data_checks import check_overlap, check_rows
from distill.doctor.estimate import estimate, sizes_of
from distill.doctor.finding import Level
from distill.doctor.pieces import pieces_of
from distill.doctor.rows import Examined, Row
from distill.doctor.statistics import check_statistics, histogram, statistics_of
from distill.doctor.template_checks import check_template
from distill.doctor.tokenizer_checks import check_tokenizer
from distill.prompt import asked
from distill.templates import ChatTemplate
from specdec_runtime.target import as_target
from specdec_runtime.tiny_target import byte_tokenizer as target_tokenizer
from specdec_runtime.tiny_target import random_llama
from tests.chat_templates import KINDS, SMOLLM2, byte_tokenizer, chat_tokenizer
from tests.test_prompts import write_lines
from tests.test_turns import SETTINGS, ScriptedAuthor
from train.material import _require_sound_tokenizer

END = 2  # <|im_end|>
TEMPLATE = ChatTemplate(byte_tokenizer(SMOLLM2))


def codes(findings):
    return {finding.code: finding.level for finding in findings}


def template_codes(text, eos=END, **options):
    tokenizer = byte_tokenizer(text, adds_bos=text is not None and "bos_token" in text)
    return codes(check_template(ChatTemplate(tokenizer, options), [eos]))


def test_a_sound_template_has_no_errors_and_warnings():
    for kind in KINDS:
        tokenizer = chat_tokenizer(kind)
        found = list(check_template(ChatTemplate(tokenizer), [tokenizer.eos_token_id]))
        assert {finding.level for finding in found} <= {Level.note}, (kind, found)


@pytest.mark.parametrize(
    ("text", "options", "code", "level"),
    [
        (None, {}, "no_template", Level.warning),
        ("{{ bos_token }}{{ bos_token }}" + SMOLLM2, {}, "doubled_bos", Level.error),
        ("{# bos_token #}" + SMOLLM2, {}, "missing_bos", Level.warning),
        ("{{ bos_token }}" + SMOLLM2, {}, "bos_twice_as_text", Level.note),
        (SMOLLM2.split("{% if add_gen")[0], {}, "no_generation_prompt", Level.warning),
        (SMOLLM2, {"eos": 5}, "turn_end_is_no_stop", Level.error),
        (SMOLLM2.replace("<|im_end|>", "##"), {}, "no_turn_end", Level.warning),
        (SMOLLM2, {"enable_thinking": False}, "unused_option", Level.warning),
        (SMOLLM2 + "{{ strftime_now('%Y')[:0] }}", {}, "dated", Level.warning),
        (KINDS["qwen3"], {}, "rewrites_history", Level.note),
        (KINDS["markers"], {}, "markers", Level.note),
        (
            SMOLLM2.replace("m in messages", "m in messages if m.role != 'system'"),
            {"system_prompt": "Be brief."},
            "lost_system_prompt",
            Level.error,
        ),
    ],
)
def test_each_fault_of_a_template_is_found(text, options, code, level):
    assert template_codes(text, **options).get(code) is level


def test_a_tokenizer_that_gives_other_text_back_is_an_error_that_shows_it():
    tokenizer = byte_tokenizer(SMOLLM2)
    size = len(tokenizer)
    sizes = {"vocab_size": size, "real_vocab_size": size}
    assert not list(check_tokenizer(ChatTemplate(tokenizer), **sizes))
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    (finding,) = check_tokenizer(ChatTemplate(tokenizer), **sizes)
    assert finding.level is Level.error
    assert "'Hello, world!' and gives back 'hello, world!'" in finding.sentence
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    (finding,) = check_tokenizer(ChatTemplate(tokenizer), **sizes)
    assert finding.level is Level.warning
    small = {"vocab_size": size - 1, "real_vocab_size": size}
    assert codes(check_tokenizer(TEMPLATE, **small)) == {"head_too_small": Level.error}


def test_a_run_stops_at_such_a_tokenizer_before_anything_is_written(tiny_target):
    tokenizer = byte_tokenizer(SMOLLM2)
    target = as_target(tiny_target)
    _require_sound_tokenizer(target, ChatTemplate(tokenizer))
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ValueError, match="gives back 'hello, world!'"):
        _require_sound_tokenizer(target, ChatTemplate(tokenizer))


def row(name, question="what?", answer="because", *, end=(END,), **settings):
    prompt = TEMPLATE.prompt_ids(asked("t", question))
    ids = [*prompt, *TEMPLATE.encode(answer), *end]
    return Row(name, "t", ids, len(prompt), question, **settings)


def found(*rows, **others):
    return codes(check_rows(Examined(True, list(rows), **others), TEMPLATE, [END]))


def test_each_fault_of_the_rows_is_found():
    few = {"few_tokens": Level.warning}
    assert found(row("a"), row("b", "why?")) == few
    assert found(row("a"), row("b", "What")) == few | {"duplicates": Level.warning}
    assert "duplicates" not in found(row("a", is_given=True), row("b", is_given=True))
    empty = row("b", "why?", "", end=())
    assert found(row("a"), empty)["nothing_trained"] is Level.warning
    assert found(empty)["nothing_trained"] is Level.error
    whole = Row("c", "t", [5, 6, 7], 0, "")
    assert found(whole)["everything_trained"] is Level.error
    assert found(Row("d", "t", [0, 0, 7], 2, "x"))["doubled_bos_in_rows"] is Level.error
    assert found(row("e", "say <|im_end|>"))["special_text"] is Level.warning
    assert found(row("f", end=()))["cut_off"] is Level.warning
    assert found(row("g", answer="ha " * 30))["loops"] is Level.warning
    assert found(row("h", is_given=True))["not_the_targets"] is Level.warning
    assert found(row("i"), too_long=["j"])["too_long"] is Level.warning
    assert found(too_long=["j"]) == {"too_long": Level.error}
    assert found(unusable=[("k", "reason")]) == {"unusable": Level.error}


def test_every_error_and_warning_names_a_remedy():
    rows = [
        row("a"),
        row("b"),
        row("e", "say <|im_end|>", "ha " * 30, end=()),
        row("x", "", "", end=()),
    ]
    findings = [
        *check_rows(Examined(True, rows, too_long=["j"]), TEMPLATE, [END]),
        *check_template(ChatTemplate(byte_tokenizer(None)), [END]),
    ]
    assert len(findings) > 5
    assert all(finding.remedy for finding in findings if finding.level is not Level.note)


def test_answers_to_evaluation_prompts_are_an_error_and_near_ones_a_warning():
    question = "Which of the two cities has more people than the other one, Rome or Oslo?"
    suites = {"suite": [asked("suite", question)]}

    def overlap(text):
        return codes(check_overlap(Examined(True, [row("a", text)]), suites, TEMPLATE, []))

    assert overlap(question) == {"overlap": Level.error}
    assert overlap(question.replace("Oslo", "Riga")) == {"near_overlap": Level.warning}
    assert overlap("Another question") == {"no_overlap": Level.note}


def test_statistics_are_those_of_the_batches_that_training_takes():
    rows = [row(str(i), answer="x" * (1 + 7 * i)) for i in range(20)]
    arguments = {"real_vocab_size": len(TEMPLATE.tokenizer), "eos_token_ids": [END]}
    numbers = statistics_of(rows, TEMPLATE, batch_tokens=400, draft_vocab_size=20, **arguments)
    assert numbers.num_trained == sum(1 + 7 * i + 1 for i in range(20))
    assert sum(count for *_, count in histogram(numbers.lengths)) == 20
    assert 0 < numbers.padding < 0.5
    assert numbers.batches * 400 >= numbers.num_tokens
    assert numbers.covered == 1.0
    rare = [row("a", answer="abc"), row("b", answer="xyz" * 30)]
    poor = statistics_of(rare, TEMPLATE, batch_tokens=400, draft_vocab_size=7, **arguments)
    assert codes(check_statistics(poor, 7)) == {"little_covered": Level.warning}


def test_pieces_are_the_text_and_never_half_a_character():
    example = row("a", "na\u00efve \U0001f600?", "\u4f60 b")
    pieces = pieces_of(example, TEMPLATE.tokenizer, TEMPLATE.special)
    assert "".join(p.text for p in pieces) == TEMPLATE.tokenizer.decode(example.token_ids)
    assert not any("\ufffd" in piece.text for piece in pieces)
    trained = "".join(piece.text for piece in pieces if piece.is_trained)
    assert trained == "\u4f60 b<|im_end|>"
    assert [piece.text for piece in pieces if piece.is_special][-1] == "<|im_end|>"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTLOOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_shows_prompts_with_their_own_answers(folder, capsys):
    records = [{"prompt": f"ask {i}", "completion": f"<b>answer</b> {i}"} for i in range(40)]
    path = write_lines(folder / "mine.jsonl", *records)
    common = ["target.model=tiny-random", f"prompts.file={path}", "prompts.suites=[]"]
    assert run_command([*common, "prompts.turns=given"]) == 0
    said = capsys.readouterr().out
    assert "<b>answer</b>" in said
    assert "not written by the target: acceptance is higher" in said.replace("\n", " ")
    page = (folder / "doctor.html").read_text()
    assert "&lt;</span>" in page
    assert re.search(r'<span class="on special">&lt;\|im_end\|&gt;</span>', page)
    assert not re.search(r'(src|href)="', page)
    assert run_command([*common, "html=null", "show=0"]) == 0  # nothing is answered yet
    assert "answers to write" in capsys.readouterr().out


def test_errors_and_wrong_settings_have_their_exit_codes(folder, capsys):
    author = ScriptedAuthor("smollm2", lambda prompt: "yes")
    collect_turns(author, [asked("t", "a"), asked("t", "b")], SETTINGS, folder / "answers")
    common = ["target.model=tiny-random", "prompts.suites=[]"]
    assert run_command([*common, "answers_folder=answers"]) == 1
    said = capsys.readouterr().out.replace("\n", " ")
    assert "error: the answers were written with" in said
    assert run_command([*common, "answers_folder=nowhere"]) == 1
    assert run_command([*common, "htm=x.html"]) == 2
    assert "did you mean html?" in capsys.readouterr().err
    for setting in ("batch_tokens=0", "show=-1", "draft_vocab_size=-5"):
        assert run_command([*common, setting]) == 2
        assert capsys.readouterr().err.startswith(f"error: {setting.split('=')[0]} must be ")


def test_the_estimate_counts_the_targets_own_parameters(folder):
    model = random_llama(target_tokenizer())
    sizes = sizes_of("tiny-random")
    assert sizes.head == model.lm_head.weight.numel()
    assert sizes.body + sizes.head == sum(p.numel() for p in model.parameters())  # tied
    rates = {
        "prompt_tokens": 10, "tokens_to_write": 100, "row_tokens": 110, "draft_layers": 2,
        "draft_vocab_size": 64, "device": torch.device("cpu"),
    }  # fmt: skip
    few, many = (estimate(sizes, trained_tokens=n, **rates) for n in (100, 10_000))
    assert few.answers_s > 0
    assert few.epoch_s * few.flops_per_s < many.epoch_s * many.flops_per_s
