"""The gate at the end of a run; that it passes for what was trained, the smoke run shows."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specdec_runtime.stats import AcceptanceStats
from tests.export_folders import write_causal_lm, write_target
from train.acceptance import AcceptanceConfig
from train.export import gate, run_folder
from train.export.gate import verify_trained
from train.export.observation import Observation
from train.export.parity import compare
from train.export.run_folder import export_formats

CONFIG = AcceptanceConfig(num_prompts=4, max_new_tokens=12)


def verified(monkeypatch, seen: Observation, ours: Observation, **changed) -> str:
    monkeypatch.setattr(gate, "observed_elsewhere", lambda *_, **__: [seen])
    monkeypatch.setattr(gate, "observe", lambda *_, **__: ours)
    given = {
        "drafter": None,
        "target": SimpleNamespace(model=SimpleNamespace(dtype=torch.float32)),
        "target_name": "t",
        "target_options": {},
        "prompts": [[1]],
        "config": CONFIG,
        "trained_length": 2.0,
    }
    return verify_trained(Path("drafter"), **(given | changed))


def seen(*accepted: int, proposals: int = 100, wrong: int = 0, text: int = 1) -> Observation:
    """Four prompts, each with rounds of so many accepted tokens; `wrong` proposals are others."""
    row = AcceptanceStats()
    for number in accepted:
        row.add_round(3, number)
    proposed = [[2]] * wrong + [[1]] * (proposals - wrong)
    return Observation(proposed, [[text]], [row] * 4, same_text=text == 1)


def test_the_folder_of_what_was_trained_passes(monkeypatch):
    said = verified(monkeypatch, seen(1), seen(1))
    assert "proposals at 100.0% of 100 contexts, acceptance length 2.000, in training 2.000" in said
    few = seen(1, proposals=7)  # short prompts hold no more
    assert "100.0% of 7 contexts" in verified(monkeypatch, few, few)


@pytest.mark.parametrize(
    ("found", "changed", "message"),
    [
        (seen(1), {"trained_length": 3.0}, "what was written is not what was trained"),
        (seen(1, text=2), {}, "the text decoded with it is not the target's"),
        (seen(1, wrong=1), {}, "99.0% of 100 contexts have the same proposal, expected 100%"),
        (seen(0, 2), {}, "acceptance at position 1 is 0.500, the drafter's 0.000"),
    ],
)
def test_another_proposal_acceptance_or_text_fails_the_gate(monkeypatch, found, changed, message):
    with pytest.raises(ValueError, match=message):
        verified(monkeypatch, found, seen(1, 1), **changed)


def test_a_rounded_target_and_drawn_texts_are_judged_for_what_they_are(monkeypatch):
    short = SimpleNamespace(model=SimpleNamespace(dtype=torch.bfloat16))
    assert "99.0%" in verified(monkeypatch, seen(1, wrong=1), seen(1), target=short)
    with pytest.raises(ValueError, match=r"98\.0% of 100 contexts"):
        verified(monkeypatch, seen(1, wrong=2), seen(1), target=short)
    drawn = replace(CONFIG, temperature=1.0)
    assert "2.000" in verified(monkeypatch, seen(1, text=2), seen(1), config=drawn)


def test_formats_asked_for_are_exported_verified_and_served_again_and_again(tmp_path, monkeypatch):
    drafter = write_causal_lm(tmp_path / "drafter", write_target(tmp_path / "target"))
    row = AcceptanceStats()
    row.add_round(3, 1)
    seen = Observation([[1]] * 100, [[1]], [row] * 2, same_text=True)
    same = compare(seen, seen, needed=1)
    monkeypatch.setattr(run_folder, "verify", lambda *_, **__: same)
    monkeypatch.setattr(run_folder, "engine_lines", lambda _, folder, form: [f"served {form}"])
    for _ in range(2):  # a continued run exports again
        said: list[str] = []
        export_formats(drafter, tmp_path / "export", ["vllm"], said.append)
        assert said[0] == f"{tmp_path / 'export' / 'vllm'}: written, passes the rules of vllm"
        assert said[1].startswith("parity: 100.0% of 100 contexts")
        assert said[2:] == ["served vllm"]
    with pytest.raises(ValueError, match="cannot be exported to speculators"):
        export_formats(drafter, tmp_path / "export", ["speculators"], said.append)
