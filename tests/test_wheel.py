"""What an installed wheel holds: every file that the code reads; and that it starts from anywhere."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, so that the checkout stays clean."""
    copy = tmp_path_factory.mktemp("source")
    packages = ("conf", "distill", "eval", "specdec_runtime", "train")
    tracked = [path for package in packages for path in (ROOT / package).rglob("*")]
    for path in [*tracked, *ROOT.glob("*.toml"), ROOT / "README.md", ROOT / "LICENSE"]:
        if path.is_file() and "__pycache__" not in path.parts:
            target = copy / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    (copy / "README.md").touch()
    out = copy / "out"
    out.mkdir()
    command = [sys.executable, "-c", BUILD, str(out)]
    built = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (built_file,) = out.glob("*.whl")
    return built_file


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize(
    ("package", "pattern"),
    [
        ("conf", "*.yaml"),
        ("conf", "__init__.py"),
        ("specdec_runtime", "*.cpp"),
        ("specdec_runtime", "*.h"),
        ("eval", "*.html"),
        ("eval", "*.css"),
        ("eval", "*.js"),
        ("distill", "*.json"),
        ("distill", "*.jsonl"),
        ("train", "*.py"),
    ],
)
def test_the_wheel_holds_every_file_of_a_kind(wheel_names: set[str], package: str, pattern: str):
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob(pattern)}
    assert wanted - wheel_names == set()


def test_the_wheel_holds_no_tests_and_no_runs(wheel_names: set[str]):
    roots = {name.split("/")[0] for name in wheel_names}
    assert {name for name in roots if ".dist-info" not in name} == {
        "conf",
        "distill",
        "eval",
        "specdec_runtime",
        "train",
    }


STARTS = """
import runpy, sys
from importlib.metadata import entry_points
import train.cli

(command,) = entry_points(group="console_scripts", name="draftloop-train")

def started(start, *arguments):
    sys.argv = ["train", *arguments, "--cfg", "job"]
    try:
        start()
    except SystemExit as ended:
        assert not ended.code, ended.code

started(command.load(), "+experiment=smoke", "seed=51")
started(lambda: runpy.run_module("train", run_name="__main__"), "--config-dir", "own", "+experiment=mine")
print(train.cli.__file__)
"""


@pytest.mark.slow
def test_an_installed_wheel_starts_from_any_folder_with_overrides_and_own_experiments(
    wheel: Path, tmp_path: Path
):
    """Case K1: the console command and `python -m`, without the sources and with an experiment of the
    user's in a folder that `--config-dir` names."""
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(installed)
    (elsewhere / "own" / "experiment").mkdir(parents=True)
    (elsewhere / "own" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - smoke\nname: mine\nseed: 52\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", STARTS],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(installed), "HYDRA_FULL_ERROR": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {"name: smoke", "seed: 51", "name: mine", "seed: 52"} <= set(lines)
    assert Path(lines[-1]).is_relative_to(installed)
    assert [path.name for path in elsewhere.iterdir()] == ["own"]
