"""Hub ids through `datasets` itself, downloaded and streamed, from a hub on this machine."""

import datasets
import huggingface_hub.constants as hub
import pytest

from distill.prompts import read_dataset
from distill.rows import DatasetConfig
from tests.stub_hub import COMMIT, REPOSITORY, hub_of

CARD = """---
configs:
- config_name: en
  data_files:
  - {split: train_sft, path: data/train-*}
  - {split: test_sft, path: data/test-*}
---
"""
ROWS = [{"prompt": "a", "system": None}, {"prompt": "b", "system": "s"}]


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What the hub is asked for; its data set has two splits in Parquet."""
    root = tmp_path / "repository"
    (root / "data").mkdir(parents=True)
    (root / "README.md").write_text(CARD)
    datasets.Dataset.from_list(ROWS).to_parquet(root / "data" / "train-0.parquet")
    datasets.Dataset.from_list([{"prompt": "c"}]).to_parquet(root / "data" / "test-0.parquet")
    with hub_of(root) as (address, asked):
        monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "ENDPOINT", address)
        url = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(hub, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
        yield asked


def said(**settings):
    prompts = read_dataset(DatasetConfig(path=REPOSITORY, **settings), "mine")
    return [[message["content"] for message in prompt.messages] for prompt in prompts]


def test_a_hub_id_is_downloaded_or_streamed_by_datasets_itself(asked):
    file = f"/datasets/{REPOSITORY}/resolve/{COMMIT}/data/train-0.parquet"
    assert said(split="train_sft", streaming=True, max_rows=1) == [["a"]]
    assert f"GET {file}" in asked
    assert not any("test-0" in path for path in asked)  # nothing but the split was looked at
    assert said(split="train_sft") == [["a"], ["s", "b"]]
    assert said(subset="en", split="test_sft") == [["c"]]
    with pytest.raises(ValueError, match="no split 'train': set split to one of train_sft, test"):
        said()
    with pytest.raises(ValueError, match=r"'fr' not found. Available: \['en'\].*check the name"):
        said(subset="fr")


def test_a_hub_id_that_is_not_there_is_said_so(asked):
    with pytest.raises(ValueError, match="owner/none is no file or folder here, and as a data set"):
        read_dataset(DatasetConfig(path="owner/none"), "mine")
    assert any("owner/none" in path for path in asked)
