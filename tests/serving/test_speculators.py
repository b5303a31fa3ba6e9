"""The speculators library reads an exported EAGLE-3 folder and drafts what our runtime drafts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval.acceptance import measure_acceptance
from specdec_runtime.loading import load_drafter, load_target
from tests.export_folders import write_eagle3, write_target
from tests.serving.target_states import states_along
from train.export.engines import call_driver, python_of
from train.export.exporting import export
from train.export.observation import fixed_prompts, proposals

pytestmark = pytest.mark.serving

NUM_DRAFT_TOKENS, NUM_PROMPTS, MAX_NEW_TOKENS = 3, 6, 24
MEASURE = {"num_draft_tokens": NUM_DRAFT_TOKENS, "max_new_tokens": MAX_NEW_TOKENS}


@pytest.fixture(autouse=True)
def _installed():
    if python_of("vllm") is None:
        pytest.skip("the speculators library is not installed: make serving-env")


def their_drafts(folder: Path, texts: Path) -> list[list[list[int]]]:
    """[prompt][place][K] of the library, for the texts in a file."""
    request = {
        "folder": str(folder),
        "texts": str(texts),
        "num_draft_tokens": NUM_DRAFT_TOKENS,
    }
    return call_driver("vllm", request, script="drive_speculators.py")


def agreement(texts: list[list[int]], ours: list, theirs: list) -> tuple[int, int]:
    """(equal, compared) draft tokens; those whose predecessors were drafted as the text goes on."""
    equal = compared = 0
    for text, our_drafts, their_places in zip(texts, ours, theirs, strict=True):
        first = len(text) + 1 - len(our_drafts)  # tokens in front of the first draft
        for end, draft in enumerate(our_drafts, start=first):
            place = end - 2  # the pair of the token before last's state and the last token
            for k, token in enumerate(draft):
                if draft[:k] != text[end : end + k] or place >= len(their_places):
                    break
                equal += token == their_places[place][k]
                compared += 1
    return equal, compared


@pytest.mark.parametrize("norms", ["eagle3", "eagle3.1"])
def test_the_library_drafts_what_our_runtime_drafts(tmp_path, norms):
    folder = write_target(tmp_path / "target")
    drafter = write_eagle3(tmp_path / "drafter", folder, norms=norms)
    out = export(drafter, tmp_path / "out", engine="speculators").folder
    target = load_target(folder, dtype=torch.float32)
    head = load_drafter(drafter, target)
    prompts = fixed_prompts(target, {})[:NUM_PROMPTS]
    answers = measure_acceptance(target, None, prompts, **MEASURE).token_ids
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    pairs = zip(prompts, answers, strict=True)
    ours = [proposals(target, head, prompt, answer, NUM_DRAFT_TOKENS) for prompt, answer in pairs]
    save_file(states_along(target, head, texts), tmp_path / "texts.safetensors")
    found = agreement(texts, ours, their_drafts(out, tmp_path / "texts.safetensors"))
    assert found[0] == found[1] >= NUM_PROMPTS * MAX_NEW_TOKENS
    _absolute_d2t(out)  # a folder that means another thing is read as another thing
    equal, compared = agreement(texts, ours, their_drafts(out, tmp_path / "texts.safetensors"))
    assert equal < 0.5 * compared
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Eagle3Speculator"]


def _absolute_d2t(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["d2t"] = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).clamp_max(100)
    save_file(tensors, path, metadata={"format": "pt"})
