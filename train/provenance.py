"""What produced a run: command, source version, package versions, hardware. Never a secret."""

import os
import platform
import re
import shlex
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("draftloop", "torch", "transformers", "datasets", "accelerate", "hydra-core", "numpy")
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
MIN_SECRET_LENGTH = 8  # shorter values would strike out ordinary words
# What is a secret by its looks: keys of the hubs and trackers in use, and passwords within URLs.
SECRET_LOOK = re.compile(
    r"\b(?:hf_\w{20,}|wandb_v1_\w{20,}|sk-[\w-]{20,}|ghp_\w{20,})|(?<=://)[^/\s@:]*:[^/\s@]+(?=@)"
)
# What is a secret by the name of its setting, as in YAML and on a command line.
SECRET_SETTING = re.compile(
    r"(\b[\w.-]*(?:api_?key|token|secret|password|passwd|credentials?|authorization)['\"]?\s*[:=]\s*"
    r"['\"]?(?:Bearer\s+|Basic\s+)?)(?!<redacted>)[^\s'\",}\]]{8,}",
    re.IGNORECASE,
)


def provenance(argv: list[str]) -> dict[str, Any]:
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": redacted(command_line(argv)),
        "git": _git(Path(__file__).parent),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "hardware": hardware(),
    }


def command_line(argv: list[str]) -> str:
    """The command as one can type it again, whatever the interpreter's path."""
    return shlex.join(["python", "-m", "train", *argv[1:]])


def redacted(text: str) -> str:
    """`text` without what looks like a secret, and without the value of any setting or environment
    variable that is named like one."""
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and len(value) >= MIN_SECRET_LENGTH:
            text = text.replace(value, "<redacted>")
    return SECRET_SETTING.sub(r"\1<redacted>", SECRET_LOOK.sub("<redacted>", text))


def hardware() -> dict[str, Any]:
    gpus = range(torch.cuda.device_count())
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
        "system": platform.system(),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit and whether files differ from it; None where the code is no checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None
