"""Who may import whom: the table of docs/architecture.md, enforced on every import statement."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("conf", "distill", "eval", "specdec_runtime", "train")
RUNTIME = {"torch", "transformers", "safetensors", "numpy", "rich", "jinja2"}
DATA = RUNTIME | {"datasets"}
ALLOWED = {  # package -> what it may import besides itself and the standard library
    "conf": set(),
    "specdec_runtime": RUNTIME | {"cpp_build", "gguf", "tokenizers"},
    "distill": DATA | {"specdec_runtime", "peft", "reasoning_gym"},
    "eval": DATA | {"specdec_runtime", "reasoning_gym"},
    "train": RUNTIME
    | {"specdec_runtime", "distill", "eval", "accelerate", "peft", "gguf", "huggingface_hub"},
}
# What only a few files may import, so that the rest is usable without it.
ENTRY_POINTS = ("cli", "cli_errors", "cli_sweep", "config", "__main__")
CONFIG_TOOLS = {"hydra", "omegaconf"}
# A saved configuration: compared with the present one, and handed to the tracker as plain values.
OMEGACONF_ALSO = {"train/run_dir.py", "train/run.py"}
WANDB_ONLY = {"eval/trackers.py"}
DEEPSPEED_ONLY = {"train/zero.py"}
# Scripts that another environment's interpreter runs: they know the engine and nothing of ours.
DRIVERS = "train/export/drivers/"
ENGINES = RUNTIME | {"vllm", "xllamacpp", "speculators", "triton", "sglang"}

FILES = [path for package in OURS for path in sorted((ROOT / package).rglob("*.py"))]


def imports_of(path: Path) -> set[str]:
    """Top-level names of all imports in a file, those inside functions included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(str(node.module).split(".")[0])
    return names - set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_package_may(path: Path):
    name = path.relative_to(ROOT).as_posix()
    package = name.split("/")[0]
    allowed = ENGINES if name.startswith(DRIVERS) else ALLOWED[package] | {package}
    if path.stem in ENTRY_POINTS:
        allowed |= CONFIG_TOOLS
    if name in OMEGACONF_ALSO:
        allowed |= {"omegaconf"}
    if name in WANDB_ONLY:
        allowed |= {"wandb"}
    if name in DEEPSPEED_ONLY:
        allowed |= {"deepspeed"}
    assert imports_of(path) - allowed == set()


@pytest.mark.parametrize(
    ("path", "package"), [("eval/trackers.py", "wandb"), ("train/zero.py", "deepspeed")]
)
def test_what_may_not_be_installed_is_imported_inside_a_function_only(path: str, package: str):
    tree = ast.parse((ROOT / path).read_text())
    top = [ast.unparse(one) for one in tree.body if isinstance(one, ast.Import | ast.ImportFrom)]
    assert not any(f"import {package}" in one or f"from {package}" in one for one in top)


def test_no_file_of_a_helpers_kind():
    homeless = {"utils", "helpers", "common", "base", "misc"}
    assert [path for path in FILES if path.stem in homeless] == []
