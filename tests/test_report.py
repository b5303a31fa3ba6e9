"""The report: one self-contained page, a Markdown twin, and JSON without NaN."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eval.charts import Axes, Point, Series, line_chart
from eval.conclusions import withheld
from eval.cost_model import RoundCosts
from eval.groups import BreakdownResult, CategoryResult
from eval.intervals import Interval
from eval.prediction import predict
from eval.records import read_json, to_json
from eval.report import write_report
from eval.report_markdown import render_markdown
from eval.report_tables import speed_table
from eval.results import (
    AcceptanceResult,
    BaselineCandidate,
    Certificate,
    CostResult,
    DrafterFacts,
    Flag,
    IdentityCheck,
    ReplayedLength,
    ReplayResult,
    Results,
    RivalResult,
    SpeedResult,
    SuiteFacts,
    SweepPoint,
    TargetFacts,
)
from eval.trace import Trace, TraceRound, TraceToken, WeakPrefix
from eval.verdict import judge


def acceptance(
    drafter: str, suite: str, temperature: float, rates: list[float]
) -> AcceptanceResult:
    rounds = 400
    accepted = [int(rounds * rate) for rate in rates]
    return AcceptanceResult(
        drafter=drafter,
        suite=suite,
        temperature=temperature,
        num_draft_tokens=len(rates),
        num_prompts=24,
        num_looping=1,
        num_rounds=rounds,
        num_drafted=rounds * len(rates),
        num_accepted=sum(accepted),
        num_tokens=rounds + sum(accepted) + 24,
        acceptance_rate=Interval(sum(rates) / len(rates), 0.3, 0.4),
        acceptance_length=Interval(1 + sum(rates), 0.95 + sum(rates), 1.05 + sum(rates)),
        macro_acceptance_rate=Interval(sum(rates) / len(rates), 0.3, 0.4),
        macro_acceptance_length=Interval(1 + sum(rates), 0.95 + sum(rates), 1.05 + sum(rates)),
        acceptance_by_position=[Interval(r, 0.93 * r, 1.07 * r) for r in rates],
        conditional_acceptance_by_position=[Interval(r, 0.93 * r, 1.07 * r) for r in rates],
        seconds=4.0,
        prompts=[],
    )


def replay(drafter: str, suite: str, rate: float) -> ReplayResult:
    lengths = []
    for k in range(1, 9):
        value = 1 + sum(rate**i for i in range(1, k + 1))
        lengths.append(
            ReplayedLength(
                num_draft_tokens=k,
                num_rounds=400,
                num_accepted=int(400 * (value - 1)),
                acceptance_length=Interval(value, value - 0.1, value + 0.1),
                rounds_by_drafted={k: 400},
            )
        )
    return ReplayResult(
        drafter=drafter,
        suite=suite,
        num_draft_tokens=3,
        num_positions=2000,
        agreement=Interval(rate + 0.05, rate, rate + 0.1),
        overlap=Interval(rate - 0.05, rate - 0.1, rate),
        round_start_agreement=Interval(rate, rate - 0.05, rate + 0.05),
        decoded_first_acceptance=Interval(rate, rate - 0.05, rate + 0.05),
        agrees=True,
        exact=True,
        lengths=lengths,
    )


def speed(drafter: str, suite: str, k: int, value: float) -> SpeedResult:
    return SpeedResult(
        drafter=drafter,
        suite=suite,
        num_draft_tokens=k,
        num_prompts=6,
        num_repeats=3,
        num_tokens=570,
        plain_s=14.0,
        speculative_s=14.0 / value,
        plain_prefill_s=1.0,
        prefill_s=1.0,
        plain_tokens_per_s=40.7,
        tokens_per_s=40.7 * value,
        plain_ms_per_token=24.6,
        ms_per_token=24.6 / value,
        plain_first_token_ms=160.0,
        first_token_ms=164.0,
        speedup=Interval(value, value - 0.07, value + 0.06),
        decode_speedup=Interval(value + 0.02, value - 0.06, value + 0.09),
        mean_prompt_speedup=value + 0.01,
        repeat_speedups=[value - 0.01, value, value + 0.01],
        acceptance_length=1.9,
        rounds_by_drafted={k: 300},
    )


COSTS = RoundCosts(
    target_s=0.0236,
    verify=(1.0, 1.04, 1.08, 1.12, 1.16, 1.2, 1.24, 1.28, 1.31),
    draft_cost=0.11,
    overhead=0.06,
    plain_overhead=0.04,
)


def a_trace() -> Trace:
    words = ["The", "square", "root", "of", "16", "is", "4", ",", "because", "4", "times", "4"]
    kinds = ["first", "accepted", "accepted", "corrected", "bonus"]
    tokens = [
        TraceToken(
            f" {word}" if i else word,
            kinds[i % 5],
            i // 3,
            [(word, 0.81), ("</script>", 0.1)],
            [("a", 0.4), (word, 0.3)],
        )
        for i, word in enumerate(words * 4)
    ]
    rounds = [TraceRound(3, i % 4, 0.0071, 0.0264, 0.0011) for i in range(22)]
    return Trace(
        drafter="distilled",
        suite="held_out",
        prompt_id="squad/17",
        prompt="What is the square root of 16 & why <b>?",
        tokens=tokens,
        rounds=rounds,
    )


def a_weak_prefix() -> WeakPrefix:
    return WeakPrefix(
        drafter="distilled",
        suite="held_out",
        prompt_id="squad/17",
        position=12,
        token_ids=[5, 6, 7],
        tail="the Treaty of Versailles was signed in",
        target_token_id=3,
        target_text=" June",
        draft_token_id=4,
        draft_text=" 1",
        target_probability=0.62,
        overlap=0.07,
    )


def breakdown_of(suite: str) -> list[BreakdownResult]:
    groups = {
        "token class": {"code": 0.7, "number": 0.4, "word start": 0.45, "continuation": 0.8},
        "category": {"qa": 0.5, "math": 0.6},
        "target entropy": {"< 0.1": 0.9, "0.1 to 0.5": 0.7, "0.5 to 1": 0.5, ">= 3": 0.1},
        "answer position": {"< 16": 0.4, "16 to 32": 0.5, "32 to 64": 0.55},
    }
    return [
        BreakdownResult(
            drafter="distilled",
            suite=suite,
            temperature=temperature,
            by=by,
            group=group,
            num_positions=220,
            num_rounds=150.0,
            num_drafted=200.0,
            num_accepted=200 * (value - 0.05),
            acceptance_rate=Interval(value - 0.05, value - 0.1, value),
            conditional_acceptance=Interval(value - 0.02, value - 0.1, value),
            acceptance_length=Interval(1 + value, 0.9 + value, 1.1 + value),
            agreement=None if temperature else Interval(value, value - 0.05, value + 0.05),
            overlap=None if temperature else Interval(value - 0.1, value - 0.15, value - 0.05),
        )
        for temperature in (0.0, 1.0)
        for by, values in groups.items()
        for group, value in values.items()
    ]


def category_of(drafter: str, suite: str, temperature: float) -> CategoryResult:
    return CategoryResult(
        drafter=drafter,
        suite=suite,
        temperature=temperature,
        num_draft_tokens=3,
        category="reading comprehension",
        num_prompts=12,
        num_rounds=200,
        num_drafted=600,
        num_accepted=180,
        acceptance_rate=Interval(0.3, 0.25, 0.35),
        acceptance_length=Interval(1.9, 1.8 + temperature / 20, 2.0),
    )


def sample_results() -> Results:
    names, suites = ["distilled", "lookup"], ["held_out", "mt_bench"]
    rates = {"distilled": [0.62, 0.38, 0.22], "lookup": [0.21, 0.15, 0.11]}
    speeds = {"distilled": (3, 1.31), "lookup": (4, 1.05)}
    results = Results(
        created="2026-11-29T20:30:00+00:00",
        complete=True,
        target=TargetFacts(
            name="smollm2-135m-instruct",
            revision=None,
            fingerprint="f00d",
            engine="native",
            dtype="float32",
            num_layers=30,
            hidden_size=576,
            vocab_size=49152,
        ),
        machine={"processor": "AMD EPYC, 2 cores"},
        settings={"max_new_tokens": 96, "num_draft_tokens": 3},
        suites=[
            SuiteFacts(
                name=s,
                num_prompts=24,
                num_too_long=0,
                mean_prompt_tokens=71.0,
                categories={"qa": 12, "reading comprehension": 12},
            )
            for s in suites
        ],
        drafters=[
            DrafterFacts(name=n, kind="causal_lm", folder=None, free=n == "lookup") for n in names
        ],
        flags=[Flag("warning", "noise", "repeats of plain decoding differ by 12 %")],
        baselines=[
            BaselineCandidate(name="native", tokens_per_s=40.7, used=True),
            BaselineCandidate(name="transformers eager", tokens_per_s=23.1, used=False),
        ],
    )
    results.breakdown = breakdown_of("held_out") + breakdown_of("mt_bench")
    results.categories = [
        category_of(name, suite, temperature)
        for name in names
        for suite in suites
        for temperature in (0.0, 1.0)
    ]
    for name in names:
        check = IdentityCheck(
            name="speculative against plain decoding",
            num_prompts=48,
            num_identical=48,
            num_tokens=4500,
            tolerance=0.0,
            divergences=[],
        )
        certificate = Certificate(
            drafter=name,
            engine="native",
            dtype="float32",
            checks=[check],
            self_draft_acceptance=1.0,
            passed=True,
            summary="48 of 48 texts identical",
        )
        results.exactness.append(certificate)
        cost = CostResult(
            drafter=name,
            context_tokens=128,
            verify_s=[0.0236],
            draft_token_s=0.0026,
            draft_start_s=0.0001,
            outside_s=0.0014,
            costs=COSTS,
        )
        results.costs.append(cost)
        for suite in suites:
            for temperature in (0.0, 1.0):
                results.acceptance.append(acceptance(name, suite, temperature, rates[name]))
            measured = speed(name, suite, *speeds[name])
            replayed = replay(name, suite, rates[name][0])
            prediction = predict(name, suite, replayed.lengths, cost, measured)
            results.speed.append(measured)
            results.replay.append(replayed)
            results.predictions.append(prediction)
            results.verdicts.append(judge(certificate, measured, prediction, cost))
    return results


class Page(HTMLParser):
    """Collects what the tests ask of a page."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.headings: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        """<line/> and the like are closed already."""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_report(tmp_path, sample_results(), [a_trace()], [a_weak_prefix()])
    return tmp_path


def test_page_is_well_formed_and_needs_no_network(folder):
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.links == []
    assert not re.search(r"https?://|@import|url\(", text)
    assert "{{" not in text


def test_page_opens_with_the_verdict(folder):
    headings = Page((folder / "report.html").read_text()).headings
    assert headings[0].startswith("1.31 x faster at num_draft_tokens=3")
    assert "Does it pay?" in headings[1]


def test_page_has_plots_tables_traces_and_both_colour_schemes(folder):
    text = (folder / "report.html").read_text()
    assert text.count("<svg") >= 6
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert 'class="accepted' in text
    assert "the Treaty of Versailles" in text


def test_model_text_cannot_break_out_of_the_page(folder):
    text = (folder / "report.html").read_text()
    assert "why <b>" not in text
    assert text.count("</script>") == 2  # the data and the viewer; not the token that says it
    data = re.search(r'id="traces">(.*?)</script>', text, re.DOTALL)[1]
    assert json.loads(data)[0]["tokens"][0]["target"][1][0] == "</script>"


def test_results_are_valid_json_and_read_back_equal(folder):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads((folder / "results.json").read_text(), parse_constant=refuse)
    assert read_json(folder / "results.json", Results) == sample_results()


def test_undefined_numbers_are_null_and_read_n_a(tmp_path):
    results = sample_results()
    nothing = replace(
        acceptance("lookup", "held_out", 0.0, [0.0]),
        acceptance_rate=Interval(float("nan")),
        num_drafted=0,
    )
    results.acceptance = [nothing]
    write_report(tmp_path, results, [], [])
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["acceptance"][0]["acceptance_rate"]["value"] is None
    reread = read_json(tmp_path / "results.json", Results)
    assert "n/a" in render_markdown(reread)


def test_withheld_speedups_are_called_withheld_everywhere(tmp_path):
    results = sample_results()
    results.speed = [withheld(s) for s in results.speed]
    write_report(tmp_path, results, [], [])
    table = speed_table(results)
    assert {row[2].text for row in table.rows} == {"withheld"}
    assert "withheld" in (tmp_path / "report.html").read_text()


def test_markdown_has_the_verdict_and_the_tables(folder):
    text = (folder / "report.md").read_text()
    assert text.splitlines()[2].startswith("**1.31 x faster")
    for title in (
        "Speed",
        "Acceptance at temperature 0",
        "Acceptance at temperature 1",
        "Acceptance length by category",
    ):
        assert f"## {title}" in text
    assert "| reading comprehension | 12 | 1.90 (1.80 to 2.00) | 1.90 (1.85 to 2.00) |" in text


def test_every_failure_is_a_prefix_to_train_on(folder):
    lines = (folder / "failures.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["token_ids"] == [5, 6, 7]


def test_every_key_of_the_results_is_in_the_schema_document():
    document = Path("docs/results-schema.md").read_text()
    for key in to_json(sample_results()):
        assert f"`{key}`" in document, key


@pytest.mark.parametrize("top", [0.3, 0.99, 1.0, 1.11, 1.7, 2.0, 9.0, 48.0, 130.0])
def test_axis_ends_on_a_tick_above_the_data(top):
    points = [Point(1, 0.0), Point(2, top)]
    svg = line_chart("t", [Series("a", points, 0)], Axes("x", "y"))
    ticks = [float(t) for t in re.findall(r'text-anchor="end">([\d.]+)</text>', svg)]
    assert max(ticks) >= top
    assert 3 <= len(ticks) <= 8


def test_page_renders_in_a_browser(folder):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    # A pointer that comes over the fourth token.
    over = """<script>document.querySelector('[data-token="3"]').dispatchEvent(
        new PointerEvent("pointerover", { bubbles: true }));</script></body>"""
    page = folder / "pointed_at.html"
    page.write_text((folder / "report.html").read_text().replace("</body>", over))
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [browser, *flags, profile, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert 'id="peek"' in done.stdout, "the viewer's script did not run"
    shown = done.stdout.split('id="peek"')[1]
    for said in ("the target's correction", "round 2: 1 of 3 kept; draft 7.1 ms, verify 26.4 ms",
                 "<code>of</code><span>81 %</span>", "<code>a</code><span>40 %</span>"):  # fmt: skip
        assert said in shown, said


def test_what_is_measured_on_request_has_its_own_tables():
    results = sample_results()
    assert "The same drafter in another program" not in render_markdown(results)
    results.rivals = [
        RivalResult(
            drafter="distilled",
            suite="held_out",
            program="transformers, float32",
            num_draft_tokens=3,
            num_prompts=4,
            num_identical=4,
            ms_per_token=20.0,
            rival_ms_per_token=50.0,
        )
    ]
    results.sweeps = [
        SweepPoint(
            drafter="distilled",
            batch_size=8,
            context_tokens=100,
            num_draft_tokens=3,
            plain_tokens_per_s=100.0,
            tokens_per_s=80.0,
            speedup=0.8,
            measured=True,
        )
    ]
    text = render_markdown(results)
    assert "| distilled | transformers, float32 | 3 | 50.0 | 20.0 | 2.50 | 4 of 4 |" in text
    assert "| distilled | 8 | 100 | 3 | 100.0 | 80.0 | 0.80 |" in text


def test_a_faster_drafter_than_the_one_of_the_page_is_named():
    results = sample_results()
    assert "Fastest" not in render_markdown(results)
    results.drafters.reverse()
    assert "Fastest on held_out: distilled, 1.31 x at num_draft_tokens=3." in (
        render_markdown(results)
    )
    results.speed = [withheld(speed) for speed in results.speed]
    assert "Fastest" not in render_markdown(results)
