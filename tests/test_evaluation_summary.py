"""What a run keeps of its evaluation."""

from dataclasses import replace

from tests.test_report import sample_results
from train.evaluation_summary import summary_of, tables_of


def test_tables_of_a_tracker_are_rectangular_and_hold_every_drafter():
    results = sample_results()
    tables = tables_of(results)
    for name, rows in tables.items():
        assert rows.data, name
        assert {len(row) for row in rows.data} == {len(rows.columns)}, name
    assert {row[0] for row in tables["speedup"].data} == {"distilled", "lookup"}
    # Three positions of two drafters on two suites at two temperatures.
    assert len(tables["acceptance_by_position"].data) == 3 * 2 * 2 * 2


def test_a_withheld_speedup_is_withheld_from_trackers_and_summaries():
    results = sample_results()
    results.speed = [replace(one, speedup=None) for one in results.speed]
    value = tables_of(results)["speedup"].columns.index("value")
    assert {row[value] for row in tables_of(results)["speedup"].data} == {None}
    assert summary_of(results, "distilled")["speedup"] is None
