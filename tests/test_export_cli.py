"""The export command line: what it writes, prints and refuses, and what it would publish."""

import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from tests.export_folders import write_causal_lm, write_target
from train.export import hub
from train.export.cli import help_text, main, parse
from train.export.formats import SUMMARIES
from train.export.hub import push
from train.export.registry import FORMATS


@pytest.fixture(scope="module")
def drafter(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("cli")
    return write_causal_lm(root / "drafter", write_target(root / "target"))


def call(*argv: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["export", *argv])
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            try:
                main()
            except SystemExit as ended:
                return int(ended.code or 0), out.getvalue(), err.getvalue()
        return 0, out.getvalue(), err.getvalue()


def test_an_export_prints_the_launch_line_and_a_check_prints_it_again(drafter):
    code, said, _ = call(f"drafter={drafter}", "format=vllm", "num_draft_tokens=5")
    folder = Path(f"{drafter}-vllm")
    launch = next(line for line in said.splitlines() if line.startswith("vllm serve"))
    assert code == 0
    assert '"num_speculative_tokens": 5' in launch
    assert call(f"check={folder}") == (
        0,
        f"{folder}: passes the rules of vllm. To serve it:\n\n{launch}\n",
        "",
    )
    (folder / "tokenizer.json").unlink()
    code, _, said = call(f"check={folder}")
    assert code == 1
    assert said.startswith(f"error: {folder} is wrong for vllm: no tokenizer can be loaded")


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["run=a", "drafter=b"], 2, "give one of run=RUN_FOLDER, drafter=FOLDER and check="),
        (["drafter=b", "fromat=vllm"], 2, "unknown setting 'fromat', expected one of run"),
        (["drafter=b", "dtype=int8"], 2, "dtype=int8, expected one of float32"),
        (["drafter=b", "verify=yes"], 2, "verify=yes, expected true or false"),
        (["drafter=b", "num_draft_tokens=few"], 2, "num_draft_tokens=few, expected 1 to 128"),
        (["drafter=b", "num_draft_tokens=0"], 2, "num_draft_tokens=0, expected 1 to 128"),
        (["drafter=b", "push_to_hub=name"], 2, "push_to_hub=name, expected ORG/NAME"),
        (["drafter=b", "dry_run=true"], 2, "dry_run says what would be uploaded: give push_to_hub"),
        (["drafter=b", "format=onnx"], 1, "format=onnx is not known, expected one of draftloop"),
        (["drafter=/nowhere", "format=vllm"], 1, "/nowhere: no such folder"),
        (["check=/nowhere", "format=vllm"], 1, "/nowhere: no such folder; expected an exported"),
        (["run=/nowhere", "format=vllm"], 1, "/nowhere: no such folder; expected the folder of a"),
    ],
)
def test_wrong_arguments_end_in_one_line(argv, code, message):
    found, _, said = call(*argv)
    assert found == code
    assert re.search(message, said.splitlines()[0])
    assert "Traceback" not in said


def test_help_names_every_format():
    assert list(FORMATS) == list(SUMMARIES)
    assert all(
        f"{name} " in help_text() and said in help_text() for name, said in SUMMARIES.items()
    )
    assert parse(["run=x"]) == {"run": "x"}


def test_a_dry_run_says_what_would_be_uploaded_and_touches_no_network(drafter, tmp_path):
    code, said, _ = call(
        f"drafter={drafter}",
        "format=transformers",
        f"to={tmp_path / 'out'}",
        "push_to_hub=org/name",
        "dry_run=true",
        "license=apache-2.0",
    )
    assert code == 0
    listed = {line.split()[0] for line in said.splitlines() if line.endswith(" bytes")}
    assert listed == {path.name for path in (tmp_path / "out").iterdir()}
    assert {"README.md", "model.safetensors", "tokenizer.json", "draftloop.json"} <= listed
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "\nlicense: apache-2.0\n---\n" in card


def test_a_push_uploads_the_folder_and_leaves_the_token_to_the_hub(drafter, tmp_path, monkeypatch):
    done, secret = [], "hf_not_a_real_token"

    class Hub:
        def create_repo(self, repository, *, exist_ok):
            done.append((repository, exist_ok))

        def upload_folder(self, *, repo_id, folder_path):
            done.append((repo_id, sorted(path.name for path in folder_path.iterdir())))
            if repo_id == "org/closed":
                raise OSError("401 Unauthorized\nand a page of reasons")

    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setattr(hub, "HfApi", Hub)
    out = tmp_path / "out"
    argv = (f"drafter={drafter}", "format=vllm", f"to={out}", "license=apache-2.0")
    code, said, _ = call(*argv, "push_to_hub=org/name")
    assert code == 0
    assert said.endswith("https://huggingface.co/org/name\n")
    assert done == [("org/name", True), ("org/name", sorted(p.name for p in out.iterdir()))]
    assert all(secret.encode() not in path.read_bytes() for path in out.iterdir())
    with pytest.raises(ValueError, match=r"^org/closed was not uploaded: 401 Unauthorized$"):
        push(out, "org/closed", dry_run=False)


def test_pickles_are_not_published_nor_what_states_no_licence(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"weights\.bin is a pickle"):
        push(tmp_path, "org/name", dry_run=True)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ValueError, match=r"states no licence.*give license="):
        push(tmp_path, "org/name", dry_run=True)
