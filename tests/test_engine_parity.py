"""What the gate says of an engine's text and counts; the engines themselves are in tests/serving."""

import pytest

from specdec_runtime.stats import AcceptanceStats
from tests.export_folders import write_causal_lm, write_target
from train.export import engine_parity
from train.export.engine_parity import EngineParity, engine_lines, verify_engine
from train.export.engines import Served
from train.export.exporting import export


def rows(*accepted: int) -> list[AcceptanceStats]:
    """Counts of as many prompts, each with rounds of so many accepted tokens of three."""
    found = []
    for _ in range(8):
        row = AcceptanceStats()
        for number in accepted:
            row.add_round(3, number)
        found.append(row)
    return found


@pytest.mark.parametrize(
    ("temperature", "differences", "theirs", "says"),
    [
        (0.0, [], (2, 0), []),
        (0.0, [(3, 5, 1e-3)], (2, 0), []),
        (0.0, [(3, 5, 0.4)], (2, 0), ["prompt 3 has another text from token 5 on"]),
        (0.0, [], (2, 2), ["acceptance length is 3.000", "at position 0", "at position 1"]),
        (1.0, [], (1, 1), ["acceptance at position 0", "acceptance at position 1"]),
    ],
)
def test_only_near_ties_and_intervals_excuse_a_difference(temperature, differences, theirs, says):
    found = EngineParity("vllm", temperature, differences, rows(2, 0), rows(*theirs)).problems()
    assert len(found) == len(says)
    assert all(part in line for part, line in zip(says, found, strict=True))


def test_an_engine_that_drafts_otherwise_is_an_error_with_its_causes(tmp_path, monkeypatch):
    drafter = write_causal_lm(tmp_path / "drafter", write_target(tmp_path / "target"))
    done = export(drafter, tmp_path / "out", engine="vllm")
    none = rows(0, 0)[:3]
    monkeypatch.setattr(engine_parity, "serve", lambda *_, **__: [Served([[5], [5], [5]], none)])
    small = {"num_prompts": 3, "max_new_tokens": 4, "temperatures": [0.0]}
    with pytest.raises(
        ValueError, match=r"^vllm does not do with .*another text from token 0"
    ) as e:
        verify_engine(done.source, done.folder, "vllm", **small)
    assert "Looked at: template: the one of training; BOS: none is added; layer ids: " in str(
        e.value
    )


def test_a_format_without_an_engine_here_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTLOOP_SERVING_ENVS", str(tmp_path))
    assert engine_lines(None, tmp_path, "sglang") == [
        "no engine on this machine reads sglang folders: not served"
    ]
    assert engine_lines(None, tmp_path, "vllm") == [
        f"vllm is not installed in {tmp_path}: not served"
    ]
