"""Rows of data sets: every form and format, errors that name file and row, nothing invented."""

import json

import datasets
import pytest

from distill.conversations import Turns
from distill.prompts import read_dataset
from distill.rows import DatasetConfig, read_rows
from tests.test_prompts import write_lines

TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "written by somebody else"},
]


def prompts(path, turns=Turns.last, **settings):
    return read_dataset(DatasetConfig(path=str(path), **settings), "mine", turns)


def said(prompt):
    return [(m["role"], m["content"]) for m in prompt.messages]


def test_every_form_of_a_row_is_read(tmp_path):
    path = write_lines(
        tmp_path / "mine.jsonl",
        {"prompt": "caf\u00e9?", "tools": None},
        {"messages": TWO_TURNS, "prompt": "not this one"},
        {"turns": ["first", "second"]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
        {"prompt": "q", "completion": "a", "system": "s"},
        {"text": "This is plain text, half of which the target continues."},
    )
    found = prompts(path)
    assert [said(prompt) for prompt in found] == [
        [("user", "caf\u00e9?")],
        [(m["role"], m["content"]) for m in TWO_TURNS[:4]],
        [("user", "first")],
        [("user", "hi")],
        [("system", "s"), ("user", "q")],
        [],
    ]
    assert found[-1].text == "This is plain text, half of"
    assert {p.source for p in found} == {"mine"}


def test_names_of_any_kind_are_declared(tmp_path):
    path = write_lines(
        tmp_path / "mine.jsonl",
        {
            "dialog": [{"who": "client", "words": "help"}, {"who": "bot", "words": "no"}],
            "text": "x",
        },
    )
    columns = {"messages": "dialog", "role": "who", "content": "words"}
    roles = {"client": "user", "bot": "assistant"}
    (prompt,) = prompts(path, Turns.given, columns=columns, roles=roles)
    assert said(prompt) == [("user", "help")]
    assert prompt.answer == {"role": "assistant", "content": "no"}
    with pytest.raises(ValueError, match=r"mine.jsonl:1: message 0 is by 'client'.*roles"):
        prompts(path, columns=columns)
    with pytest.raises(ValueError, match="columns names 'question', expected some of messages"):
        DatasetConfig(path="x", columns={"question": "prompt"})


def test_the_target_answers_each_turn_or_the_data_sets_answers_are_kept(tmp_path):
    path = write_lines(tmp_path / "mine.jsonl", {"messages": TWO_TURNS}, {"turns": ["a", "b", "c"]})
    chat, turns = prompts(path, Turns.each)
    assert said(chat) == [("system", "Be brief."), ("user", "one")]
    assert [[m["content"] for m in later] for later in chat.later] == [["two"]]
    assert [[m["content"] for m in later] for later in turns.later] == [["b"], ["c"]]
    given = prompts(write_lines(path, {"messages": TWO_TURNS}), Turns.given)
    assert [len(prompt.messages) for prompt in given] == [2, 4]
    assert [prompt.answer["content"] for prompt in given] == ["1", "written by somebody else"]
    assert len({prompt.about for prompt in given}) == 1  # they stay on one side of the split
    with pytest.raises(ValueError, match=r"mine.jsonl:1: prompts.turns=given .* has none"):
        prompts(write_lines(path, {"prompt": "a"}), Turns.given)


def test_a_reply_of_a_tool_to_a_call_that_the_target_did_not_make_ends_what_is_asked(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    chat = [{"role": "user", "content": "u"}, call, {"role": "tool", "content": "7"}]
    path = write_lines(tmp_path / "p.jsonl", {"messages": chat})
    (prompt,) = prompts(path, Turns.each)
    assert (said(prompt), prompt.later) == ([("user", "u")], ())
    (prompt,) = prompts(path)
    assert said(prompt) == [("user", "u"), ("assistant", ""), ("tool", "7")]
    assert prompt.messages[1]["tool_calls"] == [{"function": {"name": "f"}}]


def test_parquet_saved_folders_csv_and_arrays_hold_the_same_as_json_lines(tmp_path):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    records = [
        {"messages": TWO_TURNS[:2], "tools": [tool]},
        {
            "messages": [
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "c", "tool_calls": [{"name": "g", "n": 1}]},
                {"role": "user", "content": "NA"},
            ],
            "tools": None,
        },
    ]
    lines = write_lines(tmp_path / "a.jsonl", *records)
    (tmp_path / "b.json").write_text(json.dumps(records, indent=1))
    table = datasets.Dataset.from_list(records)  # fills every absent key with a null
    table.to_parquet(tmp_path / "c.parquet")
    table.save_to_disk(tmp_path / "saved")
    (tmp_path / "d.csv").write_text(
        "messages,tools\n"
        + "".join(
            ",".join('"' + json.dumps(r[k]).replace('"', '""') + '"' for k in ("messages", "tools"))
            + "\n"
            for r in records
        ).replace('"null"', "")
    )
    wanted = prompts(lines)
    assert wanted[0].tools == (tool,)
    assert "tool_calls" not in wanted[0].messages[0]
    for name in ("b.json", "c.parquet", "d.csv", "saved"):
        assert prompts(tmp_path / name) == wanted, name


def test_a_folder_is_all_of_its_files_and_rows_can_be_limited(tmp_path):
    (tmp_path / "deep").mkdir()
    write_lines(tmp_path / "deep" / "b.jsonl", {"prompt": "b"}, {"prompt": "c"})
    write_lines(tmp_path / "a.jsonl", {"prompt": "a"})
    (tmp_path / "notes.txt").write_text("not read")
    assert [said(p)[0][1] for p in prompts(tmp_path)] == ["a", "b", "c"]
    assert len(prompts(tmp_path, max_rows=2)) == 2


def test_a_hub_id_is_given_to_datasets_as_it_is(monkeypatch):
    calls = []

    def load_dataset(path, subset, **settings):
        calls.append((path, subset, settings))
        rows = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": None}, {"prompt": "b"}])
        return datasets.IterableDatasetDict(test=rows.to_iterable_dataset())

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (prompt,) = prompts("owner/chats", subset="en", streaming=True, max_rows=1)
    assert said(prompt) == [("user", "a")]
    assert calls == [("owner/chats", "en", {"split": None, "streaming": True})]
    with pytest.raises(ValueError, match="owner/chats row 2: expected a column"):
        prompts("owner/chats")
    assert len(prompts("owner/chats", skip_bad_rows=True)) == 2
    with pytest.raises(ValueError, match="no split 'train_sft': set split to one of test"):
        prompts("owner/chats", split="train_sft")
    with pytest.raises(ValueError, match="streamed without an end: give its max_rows"):
        DatasetConfig(path="owner/chats", streaming=True)


def test_a_hub_that_can_not_be_reached_is_said_so():
    with pytest.raises(
        ValueError, match="owner/chats is no file or folder here, and as a data set"
    ):
        prompts("owner/chats")


def test_the_id_of_a_prompt_depends_on_what_is_rendered_alone(tmp_path):
    one = prompts(write_lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"}))
    other = prompts(write_lines(tmp_path / "p.jsonl", {"prompt": "b"}))
    tooled = prompts(write_lines(tmp_path / "p.jsonl", {"prompt": "b", "tools": [{"name": "f"}]}))
    assert len({one[0].id, one[1].id, tooled[0].id}) == 3
    assert one[1].id == other[0].id


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"mine.jsonl:2: not JSON \(.* at column 2\)"),
        ("[1]", r"mine.jsonl:2: expected a column messages, .*, got list"),
        ('{"txt": "x"}', r"mine.jsonl:2: expected a column .* got txt: .* columns"),
        ('{"prompt": "  "}', r"mine.jsonl:2: no user says anything"),
        ('{"messages": [{"role": "user"}]}', r"mine.jsonl:2: message 0 needs a content"),
        ('{"messages": [{"role": "system", "content": "x"}]}', r"mine.jsonl:2: no user says"),
        ('{"messages": [{"role": "user", "content": [{"image": "x"}]}]}', r"2: .* must be text"),
        ('{"messages": "hello"}', r"mine.jsonl:2: messages must be a list"),
        ('{"turns": []}', r"mine.jsonl:2: no user says"),
        ('{"turns": [3]}', r"mine.jsonl:2: turns must be a list of texts"),
        ('{"prompt": 3}', r"mine.jsonl:2: prompt must be a text or a list of messages, got int"),
        ('{"prompt": "x", "tools": ["f"]}', r"mine.jsonl:2: tools must be a list of objects"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, line, message):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        prompts(path)
    if "not JSON" not in message:
        assert len(prompts(path, skip_bad_rows=True)) == 1


def test_a_byte_order_mark_is_no_part_of_the_text_and_one_object_is_one_row(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [said(p)[0][1] for p in prompts(tmp_path / "p.jsonl")] == ["a", "b"]
    (tmp_path / "q.json").write_bytes(b'\xef\xbb\xbf{\n "prompt": "a"\n}\n')
    assert len(prompts(tmp_path / "q.json")) == 1
    (tmp_path / "q.json").write_text('{\n "data": [{"prompt": "a"}]\n}\n')
    with pytest.raises(
        ValueError, match=r"q.json item 1: expected a column .* got data: .* columns"
    ):
        prompts(tmp_path / "q.json")


def test_a_missing_empty_or_binary_file_is_refused(tmp_path):
    for path in (tmp_path / "nowhere.jsonl", tmp_path / "no" / "folder"):
        with pytest.raises(ValueError, match="no such file"):
            prompts(path)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        prompts(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"{}\n\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary\.jsonl:2: not UTF-8"):
        prompts(tmp_path / "binary.jsonl")
    (tmp_path / "p.parquet").write_bytes(b"not a table")
    with pytest.raises(ValueError, match="no readable Parquet file"):
        prompts(tmp_path / "p.parquet")
    (tmp_path / "p.xlsx").write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected a .jsonl, .json, .parquet, .csv, .tsv file"):
        prompts(tmp_path / "p.xlsx")


def test_a_csv_column_that_occurs_twice_is_refused(tmp_path):
    (tmp_path / "p.csv").write_text("prompt,n,prompt\na,1,b\n")
    with pytest.raises(ValueError, match=r"p.csv:1: two columns are called 'prompt'"):
        list(read_rows(DatasetConfig(path=str(tmp_path / "p.csv"))))


def test_a_csv_row_with_other_fields_than_its_header_is_named(tmp_path):
    (tmp_path / "p.csv").write_text('prompt,n\n"a\nb",1\nc,2,3\n')
    rows = read_rows(DatasetConfig(path=str(tmp_path / "p.csv")))
    assert next(rows).value == {"prompt": "a\nb", "n": "1"}
    with pytest.raises(ValueError, match=r"p.csv:4: expected 2 fields"):
        next(rows)
