"""The read side: frozen dataclasses out of the tables, for the API, the reports and the dashboards.

Functions take a session and never write. Summaries are computed here, when reading; nothing stored is averaged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class TargetRow:
    """A target in a list, with the state of its newest judged commit."""

    name: str
    repository: str
    branch: str
    commits: int
    newest_sha: str | None
    newest_state: str | None
    open_findings: int


@dataclass(frozen=True, slots=True)
class CommitRow:
    """A commit in a list. `state` is None as long as nothing was judged; `jobs` counts its open jobs."""

    sha: str
    parents: tuple[str, ...]
    subject: str
    author: str
    committed_at: datetime
    state: str | None
    reason: str
    baseline_sha: str | None
    baseline_distance: int | None
    new_findings: int
    jobs: int


@dataclass(frozen=True, slots=True)
class Affected:
    """One series that a finding or a verdict speaks of. Values are in the metric's base unit; `effect` is after/before
    as log2, None where one of them is 0 or missing. `unit_bytes` is the case's U."""

    case_id: str
    metric: str
    unit: str
    rule: str
    state: str
    before: float | None
    after: float | None
    limit: float | None
    effect: float | None
    unit_bytes: int
    reason: str
    samples: tuple[float, ...]
    device: str


@dataclass(frozen=True, slots=True)
class FindingEventRow:
    """One step in a finding's life."""

    at: datetime
    actor: str
    action: str
    reason: str


@dataclass(frozen=True, slots=True)
class FindingView:
    """A finding with its evidence. `reproduce` is the command that measures its worst case again."""

    id: int
    target: str
    kernel: str
    family: str
    direction: str
    state: str
    sentence: str
    culprit_sha: str
    culprit_subject: str
    baseline_sha: str | None
    baseline_distance: int | None
    rule_version: int
    affected: tuple[Affected, ...]
    events: tuple[FindingEventRow, ...]
    reproduce: str
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class VerdictView:
    """The verdict of a commit. `findings` are its own, `inherited` the open ones of its ancestors; `undecided` are the
    comparisons that are neither pass nor part of a finding; `counts` counts comparisons by state."""

    target: str
    sha: str
    state: str
    reason: str
    baseline_sha: str | None
    baseline_distance: int | None
    inherited_from: str | None
    counts: Mapping[str, int]
    findings: tuple[FindingView, ...]
    inherited: tuple[FindingView, ...]
    recovered: tuple[FindingView, ...]
    undecided: tuple[Affected, ...]
    rule_version: int
    judged_at: datetime | None


@dataclass(frozen=True, slots=True)
class MeasurementRow:
    """One kernel on one case as measured in one run; `samples` by metric name, raw."""

    kernel: str
    role: str
    case_id: str
    unit_bytes: int
    outcome: str
    notes: Mapping[str, str]
    samples: Mapping[str, tuple[float, ...]]
    nonfinite: tuple[str, ...]
    attempt: str
    device: str
    finished_at: datetime


@dataclass(frozen=True, slots=True)
class SeriesRow:
    """A series in a list: a kernel on a case, and the metrics that it has values of."""

    kernel: str
    role: str
    case_id: str
    metrics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One commit's raw samples of one metric, in commit order; `segment` changes where values stop being comparable."""

    sha: str
    subject: str
    author: str
    committed_at: datetime
    samples: tuple[float, ...]
    nonfinite: bool
    outcome: str
    segment: str
    state: str | None


@dataclass(frozen=True, slots=True)
class SeriesView:
    """The history of one metric of one series, topological order, oldest first."""

    target: str
    kernel: str
    case_id: str
    metric: str
    unit: str
    title: str
    unit_bytes: int
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job in a list."""

    id: int
    target: str
    sha: str
    kind: str
    suite: str
    device_class: str
    state: str
    attempts_used: int
    leased_by: str | None
    progress: str
    failure: str | None
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class RunnerRow:
    """A runner in a list."""

    name: str
    device_class: str
    registered_at: datetime
    last_seen_at: datetime
    working_on: int | None
