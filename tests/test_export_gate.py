"""The gate at the end of a run; that it passes for what was trained, the smoke run shows."""

from pathlib import Path

import pytest

from specdec_runtime.stats import AcceptanceStats
from train.acceptance import AcceptanceConfig
from train.export import gate
from train.export.gate import verify_trained
from train.export.observation import Observation

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
