"""What an installed wheel holds: every file that the code reads, not only the modules."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """File names in a wheel built from a copy of the sources, so that the checkout stays clean."""
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
    (wheel,) = out.glob("*.whl")
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
