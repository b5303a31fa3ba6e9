"""What the gate says of an engine's text and counts; the engines themselves are in tests/serving."""

import pytest

from specdec_runtime.stats import AcceptanceStats
from tests.export_folders import write_causal_lm, write_target
from train.export import engine_parity
from train.export.drawn_text import DrawnText
from train.export.engine_parity import EngineParity, by_position, engine_lines, verify_engine
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


def test_a_position_that_was_never_accepted_has_an_interval():
    """Resampled prompts show none: 0 of 24 and 1 of 24 would differ."""
    rare = rows(0, 0, 0)
    rare[0].add_round(3, 1)
    assert EngineParity("vllm", 1.0, [], rows(0, 0, 0), rare).problems() == []
    (interval, *_) = by_position(rows(0, 0, 0))
    assert interval.low == 0
    assert interval.high == pytest.approx(0.138, abs=1e-3)  # Wilson, 0 of 24
    assert EngineParity("vllm", 1.0, [], rows(0, 0, 0), rows(1, 0, 0)).problems()


def test_draws_of_the_engine_excuse_what_they_leave_open():
    ours, theirs = rows(2, 0), [*rows(2, 1)[:2], *rows(2, 0)[2:]]  # 2 more of 16 tokens
    (said,) = EngineParity("vllm", 1.0, [], ours, theirs).problems()
    assert said.startswith("acceptance length is 2.125")
    assert EngineParity("transformers", 1.0, [], ours, theirs, chance=2.0).problems() == []
    nothing = [AcceptanceStats()] * 8
    (said,) = EngineParity("transformers", 1.0, [], ours, nothing, chance=2.0).problems()
    assert said == "nothing was drafted, by one of them"


def test_drawn_text_that_is_not_the_targets_is_named():
    wrong = DrawnText("log p", -14.32, -6.51, -57.8)
    right = DrawnText("its likeliest draft", 0.26, 0.24, 0.6)
    both = EngineParity("vllm", 1.0, [], rows(2, 0), rows(2, 0), (right, wrong))
    (said,) = both.problems()
    assert said == "its drawn text is not the target's: log p -14.32, expected -6.51 (-57.8 s.e.)"
    passes = EngineParity("vllm", 1.0, [], rows(2, 0), rows(2, 0), (right,))
    assert passes.problems() == []
    assert "drawn: its likeliest draft 0.26, expected 0.24 (+0.6 s.e.)" in passes.row()


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
