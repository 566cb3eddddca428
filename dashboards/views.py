"""View models: pure functions that arrange the read side's dataclasses the way a page shows them.

Templates only print what these hold; numbers become text in dashboards.formats.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from dashboards.formats import NONE, Quantity, binary_bytes, change, quantity, raw, rule_words, sample, samples_median
from service.catalogue import BY_NAME, METRICS, Family, Metric, Rule
from service.queries import OPEN_FINDING_STATES, Affected, FindingView, MeasurementRow, Point, SeriesRow, SeriesView

MAIN_METRICS = (
    "step_peak_bytes",
    "saved_bytes",
    "traffic_bytes",
    "operations",
    "lp_abs_max",
    "ent_abs_max",
    "g_rel_l2_lp",
    "g_rel_l2_ent",
    "g_mantissa_bits",
    "step_cpu_seconds",
)
HEADINGS = {
    "step_peak_bytes": "peak memory",
    "saved_bytes": "saved memory",
    "traffic_bytes": "traffic",
    "operations": "operations",
    "lp_abs_max": "log-prob error",
    "ent_abs_max": "entropy error",
    "g_rel_l2_lp": "log-prob gradient error",
    "g_rel_l2_ent": "entropy gradient error",
    "g_mantissa_bits": "gradient mantissa",
    "step_cpu_seconds": "CPU time",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One affected series in a finding: from what to what, against which limit, from which raw numbers."""

    case_id: str
    before: Quantity
    after: Quantity
    limit: Quantity
    change: str
    samples: str
    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """A comparison that is part of no finding and has something to say: why it is undecided, or a doubt."""

    state: str
    kernel: str
    case_id: str
    metric: str
    title: str
    step: Step


@dataclass(frozen=True, slots=True)
class MetricSteps:
    """The affected series of one metric."""

    metric: str
    title: str
    rule: str
    has_limit: bool
    has_reason: bool
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One metric of one measurement; a cell without a value has no address either."""

    metric: str
    shown: Quantity
    samples: str


@dataclass(frozen=True, slots=True)
class FailedCheck:
    """A contract check that fails, in words, with the reason that the instrument noted."""

    title: str
    reason: str


@dataclass(frozen=True, slots=True)
class MeasuredCase:
    """A kernel on a case in one run."""

    case_id: str
    outcome: str
    device: str
    attempt: str
    cells: tuple[Cell, ...]
    checks_passed: int
    checks_failed: tuple[FailedCheck, ...]
    notes: tuple[tuple[str, str], ...]
    nonfinite: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelTable:
    """All measurements of one kernel on a commit, with the main metrics that any of them has as columns."""

    kernel: str
    role: str
    columns: tuple[Metric, ...]
    cases: tuple[MeasuredCase, ...]
    has_repetitions: bool


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """One commit in the table behind a chart, newest first."""

    point: Point
    shown: Quantity
    change: str
    samples: str
    new_segment: bool


@dataclass(frozen=True, slots=True)
class Choices:
    """Where one can go from a series: the other metrics, cases and kernels that have values, and the control."""

    metrics: tuple[Metric, ...]
    cases: tuple[str, ...]
    kernels: tuple[str, ...]


def steps_by_metric(affected: Sequence[Affected]) -> tuple[MetricSteps, ...]:
    """Group affected series by metric, keeping the judge's order of metrics (the leading one first)."""
    order = list(dict.fromkeys((item.metric, item.rule) for item in affected))
    return tuple(_metric_steps(metric, rule, affected) for metric, rule in order)


def _metric_steps(metric: str, rule: str, affected: Iterable[Affected]) -> MetricSteps:
    rows = [item for item in affected if (item.metric, item.rule) == (metric, rule)]
    return MetricSteps(
        metric=metric,
        title=BY_NAME[metric].title,
        rule=rule_words(rule),
        has_limit=any(row.limit is not None for row in rows),
        has_reason=any(row.reason for row in rows),
        steps=tuple(_step(item) for item in rows),
    )


def _step(item: Affected) -> Step:
    return Step(
        case_id=item.case_id,
        before=quantity(item.before, item.unit, item.unit_bytes),
        after=quantity(item.after, item.unit, item.unit_bytes),
        limit=_limit(item),
        change=change(item.before, item.after, item.metric),
        samples=raw_samples(item.samples),
        device=item.device,
        reason=item.reason,
    )


def _limit(item: Affected) -> Quantity:
    """The limit; of bytes also as its distance from the baseline, which is often too small to show in U."""
    shown = quantity(item.limit, item.unit, item.unit_bytes)
    if item.unit != "byte" or item.limit is None or item.before is None:
        return shown
    distance = item.limit - item.before
    return Quantity(shown.text, f"{'-' if distance < 0 else '+'}{binary_bytes(abs(distance))}")


def comparison_rows(affected: Sequence[Affected]) -> tuple[ComparisonRow, ...]:
    """Single comparisons, undecided or with a notice, in the judge's order: the most serious first."""
    return tuple(
        ComparisonRow(item.state, item.kernel, item.case_id, item.metric, BY_NAME[item.metric].title, _step(item))
        for item in affected
    )


def raw_samples(samples: Sequence[float]) -> str:
    """Raw samples as text, six digits of each fraction; equal ones are counted: `12582912 x2`."""
    runs = [(value, len(list(group))) for value, group in groupby(samples)]
    return ", ".join(f"{sample(value)} x{count}" if count > 1 else sample(value) for value, count in runs) or NONE


def kernel_tables(rows: Sequence[MeasurementRow]) -> tuple[KernelTable, ...]:
    """One table a kernel, the target's own kernels before their controls."""
    ordered = sorted(rows, key=lambda row: (row.role == "control", row.kernel))
    return tuple(_kernel_table(list(group)) for _, group in groupby(ordered, key=attrgetter("role", "kernel")))


def _kernel_table(rows: Sequence[MeasurementRow]) -> KernelTable:
    present = {name for row in rows for name in (*row.samples, *row.nonfinite)}
    columns = tuple(BY_NAME[name] for name in MAIN_METRICS if name in present)
    ordered = sorted(rows, key=lambda row: (row.case_id, row.finished_at))
    cases = tuple(_measured_case(row, columns) for row in ordered)
    repeated = len({row.case_id for row in rows}) < len(rows)
    return KernelTable(rows[0].kernel, rows[0].role, columns, cases, repeated)


def _measured_case(row: MeasurementRow, columns: Sequence[Metric]) -> MeasuredCase:
    checks = [metric for metric in METRICS if metric.rule is Rule.CHECK and metric.name in row.samples]
    failed = [metric for metric in checks if not all(row.samples[metric.name])]
    explained = {metric.name for metric in failed}
    return MeasuredCase(
        case_id=row.case_id,
        outcome=row.outcome,
        device=row.device,
        attempt=row.attempt,
        cells=tuple(_cell(row, metric) for metric in columns),
        checks_passed=len(checks) - len(failed),
        checks_failed=tuple(FailedCheck(metric.title, row.notes.get(metric.name, "")) for metric in failed),
        notes=tuple((topic, text) for topic, text in sorted(row.notes.items()) if topic not in explained),
        nonfinite=row.nonfinite,
    )


def _cell(row: MeasurementRow, metric: Metric) -> Cell:
    if metric.name in row.nonfinite:
        return Cell(metric.name, Quantity("not finite"), "")
    samples = row.samples.get(metric.name, ())
    return Cell(metric.name, quantity(samples_median(samples), metric.unit, row.unit_bytes), raw_samples(samples))


def history_rows(view: SeriesView) -> tuple[HistoryRow, ...]:
    """The table behind a chart: each commit with its step from the last valued commit of the same segment."""
    rows: list[HistoryRow] = []
    last: dict[str, float] = {}
    met: set[str] = set()
    for point in view.points:
        middle = samples_median(point.samples)
        before = last.get(point.segment)
        rows.append(
            HistoryRow(
                point=point,
                shown=quantity(middle, view.unit, view.unit_bytes),
                change="" if middle is None or before is None else change(before, middle, view.metric),
                samples=raw_samples(point.samples),
                new_segment=bool(rows) and point.segment not in met,
            )
        )
        if middle is not None:
            last[point.segment] = middle
        met.add(point.segment)
    return tuple(reversed(rows))


def findings_in_order(rows: Sequence[FindingView]) -> tuple[FindingView, ...]:
    """Open ones first, then by severity, the newest first."""
    return tuple(sorted(rows, key=_finding_place))


def _finding_place(row: FindingView) -> tuple[bool, bool, int, int]:
    return row.state not in OPEN_FINDING_STATES, row.direction != "regress", Family(row.family).rank, -row.id


def choices(series: Sequence[SeriesRow], *, kernel: str, case_id: str) -> Choices:
    """What else can be looked at from this series; metrics in catalogue order."""
    here = next((row for row in series if (row.kernel, row.case_id) == (kernel, case_id)), None)
    names = set(here.metrics) if here else set()
    return Choices(
        metrics=tuple(metric for metric in METRICS if metric.name in names),
        cases=tuple(sorted({row.case_id for row in series if row.kernel == kernel})),
        kernels=tuple(sorted({row.kernel for row in series if row.case_id == case_id})),
    )


def csv_rows(view: SeriesView) -> list[tuple[str, ...]]:
    """Every raw sample with all its digits, one a row, in base units; a commit without a value has an empty one."""
    header = ("sha", "committed_at", "outcome", "state", "segment", "sample", "value", "unit")
    rows: list[tuple[str, ...]] = [header]
    for point in view.points:
        values = [raw(sample) for sample in point.samples] or [""]
        facts = (point.sha, point.committed_at.isoformat(), point.outcome, point.state or "", point.segment)
        rows += [(*facts, str(index), value, view.unit) for index, value in enumerate(values)]
    return rows
