"""The run folder: made once, never mixed up, and free of secrets."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from train.provenance import command_line, provenance, redacted
from train.run import _keep_traceback
from train.run_dir import SUMMARY, RunChoice, choose_run, open_run, write_atomically

CONFIG_YAML = "name: toy\ndraft:\n  kind: causal_lm\noptim:\n  learning_rate: 0.1\ntracking:\n  tracker: none\n"
ARGV = ["train", "+experiment=toy"]


def choose(runs_dir: Path, *, run_dir: Path | None = None, resume: str | None = None) -> RunChoice:
    return choose_run(name="toy", runs_dir=runs_dir, run_dir=run_dir, resume=resume)


def started(runs_dir: Path, *, resume: str | None = None, config: str = CONFIG_YAML) -> RunChoice:
    choice = choose(runs_dir, resume=resume)
    open_run(choice, config, ARGV).close()
    return choice


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path):
    folders = [choose(tmp_path).path for _ in range(3)]  # as jobs of a sweep, side by side
    assert len(set(folders)) == 3
    assert {folder.parent for folder in folders} == {tmp_path / "toy"}


def test_a_folder_in_use_is_refused_and_an_empty_one_taken(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    assert choose(tmp_path, run_dir=tmp_path / "mine").path == tmp_path / "mine"
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"not empty: choose another folder.*resume="):
        choose(tmp_path, run_dir=tmp_path / "mine")


def test_auto_takes_the_newest_run_and_starts_one_where_there_is_none(tmp_path: Path):
    assert not choose(tmp_path, resume="auto").resumed
    started(tmp_path)
    newest = started(tmp_path)
    assert choose(tmp_path, resume="auto") == RunChoice(newest.path, resumed=True)


def test_a_finished_run_is_known_by_its_summary(tmp_path: Path):
    choice = started(tmp_path)
    assert not choice.finished
    write_atomically(choice.path / SUMMARY, "{}")
    assert choose(tmp_path, resume="auto").finished


def test_resuming_what_is_no_run_says_what_to_give(tmp_path: Path):
    with pytest.raises(ValueError, match="no run folder"):
        choose(tmp_path, resume=str(tmp_path / "nowhere"))


def test_other_settings_are_refused_by_name_and_free_ones_are_not(tmp_path: Path):
    choice = started(tmp_path)
    with pytest.raises(ValueError, match=r"optim\.learning_rate is 0\.2 here and 0\.1 in"):
        started(tmp_path, resume="auto", config=CONFIG_YAML.replace("0.1", "0.2"))
    assert started(tmp_path, resume="auto", config=CONFIG_YAML.replace("none", "wandb")) == (
        RunChoice(choice.path, resumed=True)
    )
    sessions = json.loads((choice.path / "provenance.json").read_text())["sessions"]
    assert len(sessions) == 2


def test_a_folder_that_another_process_holds_is_refused(tmp_path: Path):
    choice = choose(tmp_path)
    lock = open_run(choice, CONFIG_YAML, ARGV)
    with pytest.raises(ValueError, match="in use by another process"):
        open_run(RunChoice(choice.path, resumed=True), CONFIG_YAML, ARGV)
    lock.close()
    open_run(RunChoice(choice.path, resumed=True), CONFIG_YAML, ARGV).close()


def test_secrets_of_the_environment_are_struck_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOY_API_KEY", "s3cr3t-value-of-a-key")
    config = CONFIG_YAML + "url: http://s3cr3t-value-of-a-key@host\n"
    choice = choose(tmp_path)
    open_run(choice, config, [*ARGV, "url=s3cr3t-value-of-a-key"]).close()
    written = "".join(path.read_text() for path in choice.path.iterdir())
    assert "s3cr3t" not in written
    assert "<redacted>" in written
    assert redacted("nothing here") == "nothing here"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("api_key: abcdefgh1", "api_key: <redacted>"),
        ("+answers.server.extra.token=abcdefgh1", "+answers.server.extra.token=<redacted>"),
        ("'x={password: abcdefgh1, n: 3}'", "'x={password: <redacted>, n: 3}'"),
        ("Authorization: Bearer abcdefgh1", "Authorization: Bearer <redacted>"),
        ("api_key_variable: OPENAI_API_KEY", "api_key_variable: OPENAI_API_KEY"),
        ("max_tokens: 123456789", "max_tokens: 123456789"),
        ("pad_token_id=123456789", "pad_token_id=123456789"),
    ],
)
def test_a_setting_with_the_name_of_a_secret_is_struck_out(text: str, kept: str):
    assert redacted(text) == redacted(kept) == kept


def test_a_file_that_can_not_be_written_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "summary.json"
    write_atomically(path, "before")
    monkeypatch.setattr("train.run_dir.os.fsync", full)
    with pytest.raises(OSError, match=r"summary\.json could not be written.*No space left"):
        write_atomically(path, "behind")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["before"]


def test_no_secret_is_kept_with_an_error(tmp_path: Path):
    for rank, name in ((0, "traceback.txt"), (1, "rank1-traceback.txt")):
        try:
            raise ValueError("no answer from https://user:pass-word@host/path")
        except ValueError:
            accelerator = SimpleNamespace(process_index=rank)
            _keep_traceback(SimpleNamespace(accelerator=accelerator, run_dir=tmp_path))  # type: ignore[arg-type]
        kept = (tmp_path / name).read_text()
        assert "no answer from https://<redacted>@host/path" in kept
        assert "pass-word" not in kept


@pytest.mark.parametrize(
    "secret", ["hf_" + "a1B2" * 8, "https://user:pass-word@host/path", "sk-" + "0123456789" * 4]
)
def test_what_looks_like_a_secret_is_struck_out(secret: str):
    assert "<redacted>" in redacted(f"url: {secret}")
    assert (
        redacted("https://host/path: a:b@c, mask-aware") == "https://host/path: a:b@c, mask-aware"
    )


def test_the_command_can_be_typed_again():
    assert command_line(["/x/train/__main__.py", "+experiment=a b"]) == (
        "python -m train '+experiment=a b'"
    )


def test_provenance_names_versions_and_hardware():
    found = provenance(ARGV)
    assert found["versions"]["torch"]
    assert found["hardware"]["cores"] >= 1
