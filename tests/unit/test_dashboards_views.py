"""View models: how the read side's rows are arranged for a page."""

from datetime import UTC, datetime
from typing import Any

from dashboards import views
from service.catalogue import BY_NAME, Family
from service.queries import Affected, FindingView, MeasurementRow, Point, SeriesRow, SeriesView

U = 64 * 4096 * 4
AT = datetime(2026, 3, 2, tzinfo=UTC)


def affected(metric: str, case_id: str = "n64", **changes: Any) -> Affected:
    known = BY_NAME[metric]
    fields: dict[str, Any] = {
        "case_id": case_id,
        "metric": metric,
        "unit": known.unit,
        "rule": str(known.rule),
        "state": "regress",
        "before": 2.0 * U,
        "after": 3.0 * U,
        "limit": 2.002 * U,
        "effect": 0.58,
        "unit_bytes": U,
        "reason": "grew",
        "samples": (3.0 * U, 3.0 * U),
        "device": "CPU",
        "kernel": "fused",
    }
    return Affected(**(fields | changes))


def row(**changes: Any) -> MeasurementRow:
    fields: dict[str, Any] = {
        "kernel": "fused",
        "role": "kernel",
        "case_id": "n64",
        "unit_bytes": U,
        "outcome": "ok",
        "notes": {},
        "samples": {"step_peak_bytes": (2.0 * U, 2.0 * U), "callable": (1.0,)},
        "nonfinite": (),
        "attempt": "a",
        "device": "CPU",
        "finished_at": AT,
    }
    return MeasurementRow(**(fields | changes))


def point(sha: str, *samples: float, segment: str = "a", outcome: str = "ok") -> Point:
    return Point(sha, f"commit {sha}", "Ada", AT, samples, False, outcome, segment, "pass")


def view(*points: Point) -> SeriesView:
    return SeriesView("story", "fused", "n64", "operations", "operation", "operations", U, points)


def finding(number: int, family: str, state: str = "open", direction: str = "regress") -> FindingView:
    return FindingView(
        id=number,
        target="story",
        kernel="fused",
        family=family,
        direction=direction,
        state=state,
        sentence="worse",
        culprit_sha="a",
        culprit_subject="one",
        baseline_sha=None,
        baseline_distance=None,
        rule_version=1,
        affected=(),
        events=(),
        reproduce="",
        required=True,
        created_at=AT,
        updated_at=AT,
        until=None,
    )


def test_findings_stand_open_ones_first_then_by_severity_then_newest_first() -> None:
    rows = [
        finding(9, "memory", "recovered"),
        finding(8, "memory", "accepted", "improve"),
        finding(7, "time"),
        finding(6, "memory", "acknowledged"),
        finding(5, "memory"),
        finding(4, "precision"),
        finding(3, "precision", "dismissed"),
    ]
    first = sorted(("memory", "precision", "time"), key=lambda family: Family(family).rank)
    order = [row.id for row in views.findings_in_order(rows)]
    by_family = {"memory": [6, 5], "precision": [4], "time": [7]}
    opened = [number for family in first for number in by_family[family]]
    assert order[:4] == opened
    assert set(order[4:6]) == {9, 3}
    assert order[6] == 8


def test_a_finding_keeps_the_judges_order_of_metrics_and_gathers_their_cases() -> None:
    groups = views.steps_by_metric(
        [affected("step_peak_bytes"), affected("saved_bytes"), affected("step_peak_bytes", "n7")]
    )
    assert [(group.metric, [step.case_id for step in group.steps]) for group in groups] == [
        ("step_peak_bytes", ["n64", "n7"]),
        ("saved_bytes", ["n64"]),
    ]
    step = groups[0].steps[0]
    assert (str(step.before), str(step.after)) == ("2.00 U (2.00 MiB)", "3.00 U (3.00 MiB)")
    assert step.change == "1.50x more memory"
    assert step.samples == "3145728 x2"


def test_a_column_for_limits_appears_only_where_there_is_one() -> None:
    with_limit, without = views.steps_by_metric([affected("step_peak_bytes"), affected("saved_bytes", limit=None)])
    assert with_limit.has_limit
    assert not without.has_limit


def test_a_limit_in_bytes_says_how_far_it_lies_from_the_baseline() -> None:
    def limit(**changes: Any) -> str:
        (group,) = views.steps_by_metric([affected("step_peak_bytes", **changes)])
        return str(group.steps[0].limit)

    assert limit(limit=2.0 * U + 4096) == "2.00 U (+4.00 KiB)"
    assert limit(limit=2.0 * U - 4096, state="improve") == "2.00 U (-4.00 KiB)"
    assert limit(before=None) == "2.00 U (2.00 MiB)"
    assert limit(limit=None) == "–"


def test_a_column_for_reasons_appears_only_where_there_is_one() -> None:
    with_reason, without = views.steps_by_metric([affected("step_peak_bytes"), affected("saved_bytes", reason="")])
    assert with_reason.has_reason
    assert not without.has_reason


def test_different_samples_are_all_shown_in_their_order() -> None:
    assert views.raw_samples((1.0, 2.0, 2.0, 1.0)) == "1, 2 x2, 1"


def test_the_targets_kernels_come_before_their_controls() -> None:
    tables = views.kernel_tables([row(kernel="a_control", role="control"), row(kernel="fused"), row(kernel="eager")])
    assert [table.kernel for table in tables] == ["eager", "fused", "a_control"]


def test_a_table_has_only_columns_that_some_case_has_a_value_for() -> None:
    (table,) = views.kernel_tables([row(), row(case_id="n7", samples={}, nonfinite=("lp_abs_max",))])
    assert [metric.name for metric in table.columns] == ["step_peak_bytes", "lp_abs_max"]
    first, second = table.cases
    assert [str(cell.shown) for cell in first.cells] == ["2.00 U (2.00 MiB)", "–"]
    assert [str(cell.shown) for cell in second.cells] == ["–", "not finite"]


def test_a_failing_check_takes_its_reason_from_the_notes_and_the_note_is_not_repeated() -> None:
    samples = {"callable": (1.0,), "gradient_defined": (1.0, 0.0)}
    notes = {"gradient_defined": "logits.grad is None", "threads": "2"}
    (table,) = views.kernel_tables([row(samples=samples, notes=notes)])
    (case,) = table.cases
    assert case.checks_passed == 1
    assert [(check.title, check.reason) for check in case.checks_failed] == [
        ("each output used alone gives a defined gradient", "logits.grad is None")
    ]
    assert case.notes == (("threads", "2"),)


def test_repetitions_of_a_case_are_told_apart() -> None:
    once, twice = views.kernel_tables([row(kernel="eager"), row(), row(attempt="b")])
    assert not once.has_repetitions
    assert twice.has_repetitions


def test_a_history_is_newest_first_and_each_step_is_from_the_last_value_of_its_segment() -> None:
    points = (point("1", 10.0), point("2", outcome="timeout"), point("3", 20.0), point("4", 40.0, segment="b"))
    rows = views.history_rows(view(*points))
    assert [(item.point.sha, item.change, item.new_segment) for item in rows] == [
        ("4", "", True),
        ("3", "2.00x more operations", False),
        ("2", "", False),
        ("1", "", False),
    ]


def test_choices_are_what_has_values() -> None:
    series = [
        SeriesRow("fused", "kernel", "n64", ("operations", "step_peak_bytes")),
        SeriesRow("fused", "kernel", "n7", ("operations",)),
        SeriesRow("legacy", "control", "n64", ("operations",)),
    ]
    found = views.choices(series, kernel="fused", case_id="n64")
    assert [metric.name for metric in found.metrics] == ["step_peak_bytes", "operations"]
    assert found.cases == ("n64", "n7")
    assert found.kernels == ("fused", "legacy")


def test_csv_has_every_sample_and_a_line_for_a_commit_without_one() -> None:
    lines = views.csv_rows(view(point("1", 10.0, 0.1), point("2", outcome="timeout")))
    assert [line[-3:-1] for line in lines] == [("sample", "value"), ("0", "10"), ("1", "0.1"), ("0", "")]
    assert lines[-1][2] == "timeout"


def test_csv_holds_no_text_that_a_stranger_wrote() -> None:
    text = repr(views.csv_rows(view(point("1", 10.0))))
    assert "commit 1" not in text
    assert "Ada" not in text
