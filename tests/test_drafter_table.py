"""The drafters' table: seeds pooled by prompt, differences told from chance, cells kept by settings."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from benchmarks.drafter_cells import (
    RESULT,
    Cell,
    Choice,
    Moment,
    best_length,
    cell_folder,
    first_tokens,
    moments_of,
    read_cell,
)
from benchmarks.drafter_plots import curve_plots
from benchmarks.drafter_table import (
    GREEDY,
    SAMPLED,
    Row,
    curve_table,
    findings,
    length_difference,
    minutes_table,
    rows_of,
    speed_ratio,
    table,
)
from benchmarks.drafters import choices_of, parse_arguments
from distill.answers.dataset import AnswerSet
from distill.answers.shards import Answer
from distill.signals import NoSignal
from specdec_runtime.draft_length import CostAware
from specdec_runtime.stats import AcceptanceStats
from train.material import Material

PROMPTS = 12


def stats(accepted: int, rounds: int = 20) -> AcceptanceStats:
    counts = AcceptanceStats(num_tokens=accepted + rounds)
    for i in range(rounds):
        counts.add_round(4, accepted // rounds + (i < accepted % rounds))
    return counts


def cell(gain: int = 0, *, noise: int = 0, **settings) -> Cell:
    """Prompts differ a lot from each other, and a drafter's gain is the same on all."""
    counts = [stats(5 + 4 * i + gain + (noise if i % 2 else -noise)) for i in range(PROMPTS)]
    moments = (Moment(0, 0, 0.0, 1.1), Moment(8, 900, 2.5, 1.4))
    return Cell(
        overlaps=[(4.0 + i, 10) for i in range(PROMPTS)],
        acceptance={GREEDY: counts, SAMPLED: counts},
        draft_cost=0.1,
        draft_tokens=2,
        steps=8,
        trained_tokens=900,
        answer_tokens=settings.pop("answer_tokens", 600),
        training_s=150.0,
        moments=moments,
        **settings,
    )


def rows(*named: tuple[str, str, list[Cell]]) -> list[Row]:
    return [Row(kind, loss, cells=cells) for kind, loss, cells in named]


def test_a_gain_on_every_prompt_is_found_although_prompts_differ_more():
    kl, lk, same = rows(
        ("eagle3", "forward_kl", [cell(), cell(1)]),
        ("eagle3", "lk_hybrid", [cell(3), cell(4)]),
        ("eagle3", "ce_tv", [cell(noise=3), cell(1, noise=3)]),
    )
    found = length_difference(kl, lk, SAMPLED)
    assert found.value == pytest.approx(3 / 20)
    assert found.low == pytest.approx(found.high)  # the gain is the same on all prompts
    nothing = length_difference(kl, same, SAMPLED)
    assert nothing.low < 0 < nothing.high
    [line] = [line for line in findings([kl, lk], None) if "T=1" in line]
    assert "0.150 (0.150 to 0.150), by seed +0.150, +0.150: above" in line
    assert (
        "below"
        in findings([replace(kl, loss="lk_hybrid"), replace(lk, loss="forward_kl")], None)[0]
    )


def test_speeds_are_compared_over_the_same_prompts_and_repeats():
    plain = np.array([[4.0, 8.0, 6.0], [4.2, 8.2, 6.2], [3.9, 7.9, 6.1]])
    whole = Row("eagle3:draft.draft_vocab_size=null", "lk_hybrid", cells=[cell(), cell()])
    cut = Row("eagle3", "lk_hybrid", cells=[cell(), cell()])
    free = Row("lookup", "", cells=[replace(cell(), steps=0, overlaps=[])])
    whole.seconds = [plain / 1.25, plain / 1.25]
    cut.seconds = [plain / 1.5, plain / 1.5]
    free.seconds = [plain / 1.1]
    assert cut.speedup(plain).value == pytest.approx(1.5)
    assert speed_ratio(free, cut).value == pytest.approx(1.5 / 1.1)
    said = findings([free, whole, cut], plain)
    assert any(
        "over eagle3:draft.draft_vocab_size=null" in line and "above" in line for line in said
    )
    assert any(line.startswith("- Fastest: eagle3 lk_hybrid, 1.50") for line in said)
    lines = table([free, whole, cut], plain)
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| lookup | - | - | - | - |")


def test_the_default_table_has_every_kind_and_loss_and_the_vocabulary_on_and_off():
    choices = choices_of(parse_arguments(["--output", "x"]))
    assert len(choices) == 20
    assert [choice.seed for choice in choices] == [0] * 10 + [1] * 10  # whole tables of fewer seeds
    kinds = {choice.kind.partition(":")[0] for choice in choices}
    assert kinds == {"causal_lm", "early_exit", "eagle3", "parallel"}
    assert choices[-1].overrides == [
        "draft=eagle3",
        "loss=lk_hybrid",
        "seed=1",
        "draft.draft_vocab_size=null",
    ]


def test_a_finished_cell_is_found_again_and_only_under_its_settings(tmp_path):
    options = parse_arguments(["--output", str(tmp_path), "--minutes", "1"])
    folder = cell_folder(options, Choice("eagle3", "lk_hybrid", 0))
    folder.mkdir(parents=True)
    (folder / RESULT).write_text(json.dumps(asdict(cell(2))))
    assert read_cell(folder) == cell(2)
    others = [
        cell_folder(options, Choice("eagle3", "lk_hybrid", 1)),
        cell_folder(options, Choice("eagle3", "lk_hybrid", 0, tokens=600)),
        cell_folder(options, Choice("eagle3:draft.steps=3", "lk_hybrid", 0)),
        *(
            cell_folder(
                parse_arguments(["--output", str(tmp_path), *changed]),
                Choice("eagle3", "lk_hybrid", 0),
            )
            for changed in (
                ["--minutes", "2"],
                ["--minutes", "1", "--set", "optim.learning_rate=1"],
            )
        ),
    ]
    assert len({folder, *others}) == 6


def test_the_curve_has_a_point_for_every_number_of_tokens_and_minute():
    choices = [
        Choice("eagle3", "lk_hybrid", seed, tokens) for seed in (0, 1) for tokens in (600, 1200)
    ]
    cells = [cell(choice.tokens // 300, answer_tokens=choice.tokens) for choice in choices]
    found = rows_of(choices, cells)
    assert [(row.tokens, len(row.cells)) for row in found] == [(600, 2), (1200, 2)]
    assert "| 600 | 900, 900 | 1.5, 1.5 | 2.5, 2.5 |" in curve_table(found)[2]
    assert "0.0: 1.100, 2.5: 1.400" in minutes_table(found)[2]
    plots = curve_plots(found)
    assert all(svg.startswith('<svg xmlns="') and "lk_hybrid" in svg for svg in plots.values())
    assert plots["curve_tokens.svg"].count("<circle") == 4  # two suites


def test_measurements_while_training_are_read_from_the_log():
    log = [
        {"kind": "acceptance", "step": 0, "acceptance_length": 1.2},
        {"kind": "training", "step": 10, "loss": 1.0},
        {
            "kind": "acceptance",
            "step": 10,
            "acceptance_length": 1.5,
            "trained_tokens": 700,
            "trained_minutes": 0.5,
        },
    ]
    assert moments_of(log) == (Moment(0, 0, 0.0, 1.2), Moment(10, 700, 0.5, 1.5))


def test_the_first_tokens_of_the_answers_are_taken_whole():
    answers = [
        Answer(str(i), torch.arange(12), 2, NoSignal(10), source="", temperature=1.0)
        for i in range(5)
    ]
    material = Material(None, None, None, AnswerSet(answers, {}), answers)
    part = first_tokens(material, 25)
    assert [one.id for one in part.examples] == ["0", "1", "2"]
    assert part.answers.num_tokens == 30
    assert first_tokens(material, None) is material
    with pytest.raises(ValueError, match="the answers have 50 tokens"):
        first_tokens(material, 51)


def test_the_timed_length_is_the_one_that_the_costs_favour():
    counts = stats(40)  # two of four are kept in every round
    assert best_length(counts, CostAware(draft_cost=0.1, verify_cost=(1.0,) * 5)) == 2
    assert best_length(counts, CostAware(draft_cost=1.5, verify_cost=(1.0,) * 5)) == 1
    assert best_length(AcceptanceStats(), CostAware(draft_cost=0.1, verify_cost=(1.0, 1.0))) == 1
