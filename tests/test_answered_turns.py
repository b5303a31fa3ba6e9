"""Rows of conversations that have their answers: as served, then as the target would write them."""

import dataclasses

import pytest

from distill.answered_turns import answered_turn
from distill.conversations import Turns
from distill.prompt import make_prompt
from distill.prompts import read_dataset
from distill.rows import DatasetConfig
from distill.templates import ChatTemplate
from tests.chat_templates import BOS_ADDED, END, KINDS, byte_tokenizer, chat_tokenizer
from tests.test_prompts import write_lines

CHAT = [
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": "2"},
]
THINKING = [
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "<think>\nhm 1\n</think>\n\none"},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": "two", "reasoning_content": "hm 2"},
]


def template_of(kind, **options):
    return ChatTemplate(chat_tokenizer(kind), options)


def turns(template, chat):
    """(prompt as text, answer as text) of every assistant turn."""
    found = []
    for index, message in enumerate(chat):
        if message["role"] == "assistant":
            prompt = make_prompt("t", chat[:index], answer=message)
            row = answered_turn(template, prompt)
            assert row.prompt_ids == template.prompt_ids(prompt)
            found.append(tuple(map(template.tokenizer.decode, row)))
    return found


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("gpt_oss", "r1", "qwen3")])
def test_each_turn_is_trained_from_its_first_token_to_its_end(kind):
    (_, first), (prompt, second) = turns(template_of(kind), CHAT)
    assert (first, second) == (f"first answer{END[kind]}", f"2{END[kind]}")
    assert f"first answer{END[kind]}" in prompt


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_one_beginning_of_text_and_the_ids_of_the_template(kind):
    template = template_of(kind)
    prompt = make_prompt("t", CHAT[:1])
    ids = template.prompt_ids(prompt)
    assert ids.count(0) == (1 if kind in BOS_ADDED else 0)
    served = template.tokenizer.apply_chat_template(
        CHAT[:1], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    assert ids == served["input_ids"]


def test_thinking_is_trained_where_it_was_written_and_gone_from_later_prompts():
    (before, first), (prompt, second) = turns(template_of("qwen3"), THINKING)
    assert before.endswith("<|im_start|>assistant\n")
    assert first == "<think>\nhm 1\n</think>\n\none<|im_end|>"
    assert second == "<think>\nhm 2\n</think>\n\ntwo<|im_end|>"
    assert "think" not in prompt


def test_without_thinking_the_prompt_closes_it_and_the_answer_is_the_rest():
    rows = turns(template_of("qwen3", enable_thinking=False), CHAT)
    assert [answer for _, answer in rows] == ["first answer<|im_end|>", "2<|im_end|>"]
    assert all(prompt.endswith("<think>\n\n</think>\n\n") for prompt, _ in rows)


def test_a_template_that_begins_to_think_gets_the_thinking_without_its_opening():
    rows = turns(template_of("r1"), THINKING)
    assert [answer for _, answer in rows] == [
        "hm 1\n</think>\n\none<|eot|>",
        "hm 2\n</think>\n\ntwo<|eot|>",
    ]
    for prompt, answer in rows:  # no orphaned marker
        assert (prompt + answer).count("<think>") == (prompt + answer).count("</think>") == 1
    with pytest.raises(ValueError, match="and this answer brings no thinking"):
        turns(template_of("r1"), CHAT)


def test_channels_are_part_of_the_answer_and_the_last_turn_ends_as_served():
    thinking = [CHAT[0], {"role": "assistant", "content": "yes", "thinking": "hm"}]
    ((prompt, answer),) = turns(template_of("gpt_oss", reasoning_effort="low"), thinking)
    assert prompt.startswith("<|start|>system<|message|>Reasoning: low<|end|>")
    assert prompt.endswith("<|start|>assistant")
    assert answer == (
        "<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant<|channel|>final<|message|>yes<|return|>"
    )


def test_markers_that_leave_out_the_end_of_the_turn_do_not_hide_it():
    text = KINDS["markers"].replace(
        "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"
    )
    template = ChatTemplate(byte_tokenizer(text))
    assert template.has_markers
    assert [answer for _, answer in turns(template, CHAT)] == [
        "first answer<|im_end|>",
        "2<|im_end|>",
    ]


def test_markers_that_mark_nothing_are_an_error():
    text = KINDS["markers"].replace("m.role == 'assistant'", "m.role == 'nobody'")
    with pytest.raises(ValueError, match="marks nothing of the last answer"):
        turns(ChatTemplate(byte_tokenizer(text)), CHAT)


def test_a_system_prompt_option_is_there_unless_the_conversation_has_one():
    template = template_of("gemma3", system_prompt="Be brief.")
    (prompt, _), _ = turns(template, CHAT)
    assert prompt == "<s><|start|>user\nBe brief.\n\nfirst question<|eot|>\n<|start|>model\n"
    own = [{"role": "system", "content": "Own."}, *CHAT]
    assert "Be brief" not in turns(template, own)[0][0]
    assert template.hash != template_of("gemma3").hash


def test_a_conversation_that_the_template_refuses_is_an_error_with_its_reason():
    chat = [*CHAT[:1], *CHAT[:1]]
    with pytest.raises(ValueError, match=r"refuses a conversation of user, user: roles must alter"):
        template_of("gemma3").prompt_ids(make_prompt("t", chat))


def test_tools_and_null_columns_render_as_their_own_json_would(tmp_path):
    import datasets

    tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}]
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"name": "f", "arguments": {"x": 1}}],
    }
    chat = [CHAT[0], call, {"role": "tool", "content": "7"}, CHAT[3]]
    records = [{"messages": chat, "tools": tools}, {"messages": CHAT, "tools": None}]
    template = template_of("llama3")
    served = template.render([CHAT[0], {**call, "content": ""}, chat[2]], tools)
    lines = write_lines(tmp_path / "a.jsonl", *records)
    datasets.Dataset.from_list(
        [{**record, "tools": str(record["tools"] or "").replace("'", '"')} for record in records]
    ).to_parquet(tmp_path / "a.parquet")
    for path in (lines, tmp_path / "a.parquet"):
        prompts = read_dataset(DatasetConfig(path=str(path)), "mine", Turns.given)
        assert template.prompt_ids(prompts[1]) == served, path
        text = template.tokenizer.decode(template.prompt_ids(prompts[3]))
        assert "None" not in text
        assert "null" not in text


def test_plain_text_is_trained_behind_its_beginning():
    template = ChatTemplate(byte_tokenizer(None, adds_bos=True))
    answer = {"role": "assistant", "content": " two three"}
    prompt = dataclasses.replace(make_prompt("t", (), text="one"), answer=answer)
    row = answered_turn(template, prompt)
    assert row.prompt_ids + row.answer_ids == template.tokenizer("one two three").input_ids
    assert template.tokenizer.decode(row.answer_ids) == " two three"
