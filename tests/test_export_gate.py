"""The gate at the end of a run; that it passes for what was trained, the smoke run shows."""

from pathlib import Path

import pytest

from specdec_runtime.stats import AcceptanceStats
from tests.export_folders import write_causal_lm, write_target
from train.acceptance import AcceptanceConfig
from train.export import gate, run_folder
from train.export.gate import verify_trained
from train.export.observation import Observation
from train.export.parity import compare
from train.export.run_folder import export_formats

CONFIG = AcceptanceConfig(num_prompts=4, max_new_tokens=12)


def test_another_acceptance_or_another_text_fails_the_gate(monkeypatch):
    row = AcceptanceStats()
    row.add_round(3, 1)
    cases: list[tuple[bool, float, str | None]] = [
        (True, 2.0, None),
        (True, 3.0, "what was written is not what was trained"),
        (False, 2.0, "the text decoded with it is not the target's"),
    ]
    for same_text, trained, message in cases:
        seen = Observation([], [[1]], [row] * 4, same_text)
        monkeypatch.setattr(gate, "observed_elsewhere", lambda *_, seen=seen, **__: [seen])
        given = {"target": "t", "target_options": {}, "prompts": [[1]], "config": CONFIG}
        if message is None:
            said = verify_trained(Path("drafter"), trained_length=trained, **given)
            assert "acceptance length 2.000, in training 2.000" in said
            continue
        with pytest.raises(ValueError, match=message):
            verify_trained(Path("drafter"), trained_length=trained, **given)


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
