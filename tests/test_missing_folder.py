"""A mistyped folder is told with the nearest one; names that mean something else are left alone."""

from pathlib import Path

import pytest

from specdec_runtime.drafter_files import read
from specdec_runtime.missing_folder import missing_folder
from specdec_runtime.model_names import resolve_model


def test_a_mistyped_folder_is_told_with_the_nearest_and_no_hub_is_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "distill" / "drafter").mkdir(parents=True)
    right = "runs/distill/drafter"
    for name in ("./run/distil/drafterr", "run/distill/drafter", "runs/distill/draftr"):
        assert missing_folder(name) == f"{name}: no such folder, the nearest is {right}"
    assert missing_folder("runs/destill") == (
        "runs/destill: no such folder, the nearest is runs/distill"
    )  # one slash, as a hub id has, but its first part is a folder here
    assert missing_folder("runs/other") == "runs/other: no such folder"
    for name in (right, ".", "lookup", "owner/name"):
        assert missing_folder(name) is None
    with pytest.raises(ValueError, match=r"runs/destill: no such folder, the nearest is"):
        resolve_model("runs/destill")
    with pytest.raises(ValueError, match=r"no such folder, the nearest is .*runs/distill/drafter:"):
        read(Path("runs/distill/draft"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file is a file: expected a Hugging Face model folder"):
        read(Path("file"))
