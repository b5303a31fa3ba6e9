"""The parity gate: passes for what was exported, fails for a drafter that proposes something else."""

import json
import shutil
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_runtime.drafters.early_exit import EarlyExitDrafter
from specdec_runtime.loading import load_target
from specdec_runtime.stats import AcceptanceStats
from tests.export_folders import (
    observed_here,
    request_for,
    write_causal_lm,
    write_eagle3,
    write_target,
)
from train.export import parity
from train.export.causes import likely_causes
from train.export.exporting import export
from train.export.observation import NUM_CONTEXTS, Observation, proposals
from train.export.parity import EXACT, compare
from train.export.parity_process import main
from train.export.registry import FORMATS
from train.export.runtime_folder import runtime_folder


def answered(request: dict) -> list[dict]:
    """What the clean process writes; run in this one, since its start alone takes seconds.

    The smoke run of tests/test_train_cli.py starts a real one.
    """
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as said:
        patch.setattr("sys.stdin", StringIO(json.dumps(request)))
        main()
    return json.loads(said.getvalue())


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """Name -> what the gate's process saw of it: drafters, their exports, wrong ones."""
    root = tmp_path_factory.mktemp("parity")
    target = write_target(root / "target")
    folders = {
        "causal_lm": write_causal_lm(root / "causal_lm", target),
        "eagle3": write_eagle3(root / "eagle3", target),
    }
    for kind, engine in (
        ("causal_lm", "transformers"),
        ("causal_lm", "llamacpp"),
        ("eagle3", "vllm"),
    ):
        name = f"{kind} {engine}"
        done = export(folders[kind], root / name.replace(" ", "-"), engine=engine)
        folders[name] = runtime_folder(
            done.folder, done.source, root / f"back {name}", engine=engine
        )
    folders["unfilled head"] = root / "unfilled"
    shutil.copytree(folders["causal_lm"], folders["unfilled head"])
    (folders["unfilled head"] / "draft_vocab.safetensors").unlink()
    for name, change in {
        "layer ids + 1": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        "norm flag": {"norm_output": True},
    }.items():
        folders[name] = root / name
        shutil.copytree(folders["eagle3"], folders[name])
        path = folders[name] / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    folders["absolute d2t"] = root / "absolute"
    shutil.copytree(folders["eagle3"], folders["absolute d2t"])
    path = folders["absolute d2t"] / "draft_vocab.safetensors"
    shifted = load_file(path)
    shifted["d2t"] = (shifted["d2t"] + 3).clamp_max(100)
    save_file(shifted, path)
    request = request_for(target, list(folders.values()))
    found = [Observation.of_json(content) for content in answered(request)]
    return dict(zip(folders, found, strict=True))


# The other forms give the same tensors: tests/test_export.py.
@pytest.mark.parametrize("name", ["causal_lm transformers", "causal_lm llamacpp", "eagle3 vllm"])
def test_every_exported_folder_proposes_what_its_drafter_does(observed, name):
    found = compare(observed[name.split()[0]], observed[name], needed=EXACT)
    assert found.problems() == []
    assert found.num_contexts >= NUM_CONTEXTS
    assert found.lengths[0] == found.lengths[1]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("causal_lm", "unfilled head"),
        ("eagle3", "layer ids + 1"),
        ("eagle3", "norm flag"),
        ("eagle3", "absolute d2t"),
    ],
)
def test_another_forward_pass_fails_the_gate(observed, kind, name):
    found = compare(observed[kind], observed[name], needed=EXACT)
    if name == "norm flag":  # it changes what is handed on, so not the first proposal
        assert observed[kind].proposals != observed[name].proposals
    assert not found.passed


def test_verifying_passes_what_was_exported_and_lists_causes_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "observed_elsewhere", observed_here)
    target = write_target(tmp_path / "target")
    done = export(write_eagle3(tmp_path / "eagle3", target), tmp_path / "out", engine="vllm")
    found = parity.verify(done.source, done.folder, engine="vllm")
    assert found.passed
    assert found.describe().startswith("parity: 100.0% of ")
    path = done.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 10.0}))
    with pytest.raises(ValueError, match=r"have the same proposal.*Looked at: template: the one"):
        parity.verify(done.source, done.folder, engine="vllm")


def test_early_layers_of_the_target_are_asked_on_its_own_cache(tmp_path):
    target = load_target(write_target(tmp_path / "target"), dtype=torch.float32)
    drafter = EarlyExitDrafter(target.model, exit_layer=3)
    text = list(range(5, 30))
    found = proposals(target, drafter, text[:20], text[20:], 2)
    assert {len(draft) for draft in found} == {2}
    places = range(12, 26)  # eight in the prompt, five in the answer and its end
    tokens, cache = torch.tensor([text]), target.model.new_cache(1, 32)
    logits = target.model.forward(tokens, cache, layers=(0, 3), early_head=True).logits
    assert [draft[0] for draft in found] == logits[0].argmax(-1)[[n - 1 for n in places]].tolist()


def test_acceptance_beyond_the_interval_and_other_text_are_problems():
    row = AcceptanceStats()
    for accepted in (2, 2, 1):
        row.add_round(3, accepted)
    none = AcceptanceStats()
    for _ in range(3):
        none.add_round(3, 0)
    proposals = [[1]] * NUM_CONTEXTS
    ours = Observation(proposals, [[1]], [row] * 4, same_text=True)
    theirs = Observation(proposals, [[2]], [none] * 4, same_text=False)
    found = compare(ours, theirs, needed=EXACT).problems()
    assert found[0] == "the text decoded with it is not the target's"
    assert found[1].startswith("acceptance at position 0 is 0.000, the drafter's 1.000")


def test_the_process_names_a_folder_that_does_not_load(tmp_path):
    request = request_for(write_target(tmp_path / "target"), [tmp_path / "gone"])
    with pytest.raises(SystemExit, match=r"^error: .*gone"):
        answered(request)


def test_likely_causes_name_the_one_that_differs(tmp_path):
    target = write_target(tmp_path / "target")
    drafter = write_eagle3(tmp_path / "eagle3", target)
    done = export(drafter, tmp_path / "out", engine="vllm")
    path = done.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"norm_output": True}))
    causes = likely_causes(done.source, done.folder, FORMATS["vllm"])
    wrong = [cause for cause in causes if not cause.endswith(": as exported")]
    assert any(
        cause.startswith("norm flags: config.json means norm_output=True") for cause in wrong
    )
    assert "offsets: as exported" in causes
    assert "template: the one of training" in causes
