"""Judges commits: history -> detection -> stored verdicts, level sets and findings.

A verdict is a function of the commit graph, the target's definition, the commit's own results and the level set that
its baseline left; so judging a commit reads two commits, and a late result re-judges only what it changes. Works out
what to judge from the tables alone: a crash at any point leaves work that the next call does.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session, sessionmaker

from service import queries
from service.assessment import Assessment, assess, inherit, keys_in_force, lasting_state, plain
from service.catalogue import BY_NAME, MetricClass
from service.detection.commits import (
    BUDGET,
    ENDINGS,
    GATES,
    Comparison,
    Measured,
    Observation,
    apply_decisions,
    judge_commit,
)
from service.detection.gates import GateFacts, beyond_gates
from service.detection.level_sets import Roster, Rosters, Standing, dump, load, segment
from service.detection.levels import Decision, State
from service.detection.rules import NONFINITE, RULE_VERSION, Reading, cost, cross, worst
from service.errors import Invalid, NotFound
from service.findings import (
    end_dismissals,
    first_state,
    has_ended_dismissals,
    reproduce,
    settle_findings,
    store_findings,
)
from service.history import Ancestor, first_parents, forks, nearest
from service.job_queue import enqueue
from service.models import Commit, Environment, Job, LevelSet, Measurement, Run, Series, Target, Verdict
from service.plans import History, Plan, SeriesFacts, load_history, planned, tips
from service.samples import unpack

# Checks that are read off other values here, and never taken from a runner.
DERIVED = (*ENDINGS, GATES, BUDGET)


@dataclass(frozen=True, slots=True)
class _Header:
    """What is needed of a stored verdict to see whether it still holds. `lasting` is the state that a commit which
    changes nothing takes over."""

    id: int
    baseline_id: int | None
    distance: int | None
    inherited_from_id: int | None
    level_set_id: int
    rule_version: int
    lasting: State


def judge_pending(factory: sessionmaker[Session]) -> int:
    """Judge every commit whose inputs changed, and the descendants that this changes; the number of commits judged.

    One transaction per target. Raises an ExceptionGroup of what kept targets from being judged, after the others.
    Safe to call from several processes: on PostgreSQL a target that another one is judging is left to it, on SQLite
    writers take turns.
    """
    now = datetime.now(UTC)
    with factory() as session:
        session.connection(execution_options={"reading": True})
        over = has_ended_dismissals(session, now)
    if over:
        with factory.begin() as session:
            end_dismissals(session, now)
    with factory() as session:
        session.connection(execution_options={"reading": True})
        waiting = session.scalars(
            select(Commit.target_id)
            .where(Commit.judge_generation != Commit.judged_generation)
            .distinct()
            .order_by(Commit.target_id)
        ).all()
    judged, failures = 0, []
    for target_id in waiting:
        try:
            judged += _judge_target(factory, target_id)
        except Exception as error:  # noqa: BLE001 (one target's trouble must not keep the others waiting)
            failures.append(error)
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {len(waiting)} targets could not be judged", failures)
    return judged


def _judge_target(factory: sessionmaker[Session], target_id: int) -> int:
    with factory.begin() as session:
        claim = select(Target).where(Target.id == target_id).with_for_update(key_share=True, skip_locked=True)
        target = session.scalars(claim).first()
        if target is None:
            return 0
        history = load_history(session, target)
        headers = _headers(session, target_id)
        judged = _judge_dirty(session, history, headers)
        settle_findings(session, history, _in_force(session, history, headers))
        _ask_for_bases(session, history)
        _catch_up(session, history)
        return judged


def _headers(session: Session, target_id: int) -> dict[str, _Header]:
    rows = session.execute(
        select(
            Commit.sha,
            Verdict.id,
            Verdict.baseline_commit_id,
            Verdict.baseline_distance,
            Verdict.inherited_from_id,
            Verdict.level_set_id,
            Verdict.rule_version,
            Verdict.state,
            Verdict.counts,
        )
        .join(Commit, Commit.id == Verdict.commit_id)
        .where(Verdict.target_id == target_id)
    ).all()
    return {
        row.sha: _Header(
            id=row.id,
            baseline_id=row.baseline_commit_id,
            distance=row.baseline_distance,
            inherited_from_id=row.inherited_from_id,
            level_set_id=row.level_set_id,
            rule_version=row.rule_version,
            lasting=lasting_state(row.state, row.counts),
        )
        for row in rows
    }


# --- Judging ----------------------------------------------------------------------------------------------------------


def _judge_dirty(session: Session, history: History, headers: dict[str, _Header]) -> int:
    """Judge, parents first, the commits whose inputs changed. `headers` is brought up to date."""
    moved: set[str] = set()  # commits of which what stands after them changed in this pass
    judged = 0
    for sha in history.order:
        header = headers.get(sha)
        plan = history.plans.get(sha)
        if plan is None:
            if header is not None:
                _withdraw(session, history, sha, header)
                del headers[sha]
            continue
        if not _is_dirty(history, sha, plan, header, moved):
            continue
        stored = headers[sha] = _judge_one(session, history, headers, sha)
        judged += 1
        if header is None or (header.level_set_id, header.lasting) != (stored.level_set_id, stored.lasting):
            moved.add(sha)
    return judged


def _is_dirty(history: History, sha: str, plan: Plan, header: _Header | None, moved: set[str]) -> bool:
    if header is None or header.rule_version != RULE_VERSION:
        return True
    if history.commits[sha].pending or history.commits[plan.source].pending:
        return True
    if plan.baseline is None:  # it says whether its ancestors are known
        return any(commit.pending for commit in history.commits.values())
    if plan.baseline.sha in moved:
        return True
    return planned(history, sha, plan) != (header.baseline_id, header.distance, header.inherited_from_id)


def _judge_one(session: Session, history: History, headers: Mapping[str, _Header], sha: str) -> _Header:
    plan = history.plans[sha]
    base = headers.get(plan.baseline.sha) if plan.baseline else None
    standing = _standing(session, base.level_set_id) if base else Standing()
    if base and plan.baseline and plan.source == plan.baseline.sha:
        assessment = inherit(history, plan, standing, base.lasting)
    else:
        measured = _measured(session, history, history.commits[plan.source].runs)
        assessment = _assess(history, plan, standing, measured, sha)
    previous = headers.get(sha)
    stored = _store_verdict(session, history, sha, assessment, previous)
    store_findings(session, history, sha, assessment.clusters)
    if previous and previous.level_set_id != stored.level_set_id:
        _drop_unused(session, previous.level_set_id)
    return stored


def _assess(history: History, plan: Plan, standing: Standing, measured: Measured, sha: str) -> Assessment:
    """Judge what was measured of a commit against what stood before it. Of kernels that the target no longer declares
    nothing is expected."""
    declared = {kernel["name"] for kernel in history.definition["kernels"]}
    rosters = {
        suite: Roster(roster.digest, {one for one in roster.series if history.series[one].kernel in declared})
        for suite, roster in standing.rosters.items()
    }
    judgement = judge_commit(
        Standing(standing.levels, rosters),
        measured,
        sha,
        baseline=plan.baseline.sha if plan.baseline else "",
        required=history.definition["suite"],
    )
    judgement = apply_decisions(judgement, partial(_decided, history, sha))
    return assess(history, plan, judgement, measured.observations, sha)


def _decided(history: History, sha: str, item: Comparison) -> Decision | None:
    """What was decided about this regression: at this commit, or at one with the same watched content that is none of
    its own ancestors (going back to what was accepted once is no landing of it). What is worse than what was decided
    on, or was not there, is not decided."""
    series, metric = history.series[item.series], BY_NAME[item.metric]
    about = series.kernel, str(metric.family)
    commit = history.commits[sha]
    found = [*history.decisions.get((sha, *about), ())]
    if commit.vouched and commit.watched_digest and (commit.watched_digest, *about) in history.decisions:
        line = first_parents(history.parents, sha)
        elsewhere = history.decisions[commit.watched_digest, *about]
        found += [one for one in elsewhere if one.culprit not in line]
    for one in reversed(found):
        for value in one.values.get((series.case_id, item.metric), ()):
            accepted = NONFINITE if value is None else cost(metric, value)
            if item.reading and not cross(metric, accepted, worst(metric, item.reading), 0.0).worse:
                return one.decision
    return None


def _standing(session: Session, level_set_id: int) -> Standing:
    return load(session.scalars(select(LevelSet.levels).where(LevelSet.id == level_set_id)).one())


def _in_force(session: Session, history: History, headers: Mapping[str, _Header]) -> set[str]:
    """The keys of the findings that stand at the newest measured commits."""
    newest = [headers[sha] for sha in tips(history) if sha in headers]
    return {key for header in newest for key in keys_in_force(history, _standing(session, header.level_set_id).levels)}


def _measured(session: Session, history: History, run_ids: Sequence[int]) -> Measured:
    """What the runs saw of the target's own kernels, repetitions in one environment pooled; controls are left out."""
    rows = session.execute(
        select(Measurement, Environment, Run.suite, Run.suite_digest)
        .join(Run, Run.id == Measurement.run_id)
        .join(Environment, Environment.id == Run.environment_id)
        .join(Series, Series.id == Measurement.series_id)
        .where(Measurement.run_id.in_(run_ids), Series.role == "kernel")
    ).all()
    declared = {kernel["name"]: kernel for kernel in history.definition["kernels"]}
    pooled: dict[tuple[int, str], dict[str, list[Reading]]] = {}
    devices: dict[tuple[int, str], str] = {}
    for measurement, environment, _, _ in rows:
        keys = {
            metric_class: (measurement.series_id, _segment(measurement, environment, metric_class))
            for metric_class in MetricClass
        }
        for key in keys.values():
            devices[key] = min(environment.device, devices.get(key, environment.device))
        series = history.series[measurement.series_id]
        for name, reading in _readings(measurement, series, declared.get(series.kernel, {})).items():
            pooled.setdefault(keys[BY_NAME[name].metric_class], {}).setdefault(name, []).append(reading)
    observations = tuple(
        Observation(
            series=series_id,
            segment=where,
            device=devices[series_id, where],
            dtype=history.series[series_id].case["dtype"],
            readings={name: _pool(parts) for name, parts in readings.items()},
        )
        for (series_id, where), readings in sorted(pooled.items())
    )
    ran = [(environment.device_class, suite, digest, row.series_id) for row, environment, suite, digest in rows]
    return Measured(observations, _rosters(ran))


def _rosters(ran: Sequence[tuple[str, str, str | None, int]]) -> Rosters:
    """By device class and suite what was measured, of rows (device class, suite, suite's digest, series).

    Of runs of one commit that ask for different things under one name, the suite is what the greatest digest names: any
    choice will do that does not depend on the order of arrival.
    """
    digests: dict[tuple[str, str], str | None] = {}
    series: dict[tuple[str, str], set[int]] = {}
    for device, suite, digest, series_id in ran:
        digests[device, suite] = max(digests.get((device, suite)) or "", digest or "") or None
        series.setdefault((device, suite), set()).add(series_id)
    return {key: Roster(digests[key], frozenset(series[key])) for key in series}


def _segment(measurement: Measurement, environment: Environment, metric_class: MetricClass) -> str:
    identity = queries.identity(environment, metric_class)
    return segment(environment.device_class, identity, metric_class, measurement.inputs_digest)


def _readings(measurement: Measurement, series: SeriesFacts, declared: Mapping[str, Any]) -> dict[str, Reading]:
    """The readings of one measurement. How it ended is read off the outcome; a case that did not end well has no other
    values that could be trusted. What the target declares of the kernel adds the checks of its gates and its budget."""
    notes: Mapping[str, str] = measurement.notes or {}
    outcome = measurement.outcome
    ending = notes.get("outcome", "")
    readings = {"callable": Reading((float(outcome != "unmeasurable"),), note=ending)}
    if outcome != "unmeasurable":
        readings["completes"] = Reading((float(outcome == "ok"),), note=f"{outcome}: {ending}" if ending else "")
    if outcome != "ok":
        return readings
    samples, nonfinite = unpack(measurement.samples)
    for name in (*samples, *nonfinite):
        if name not in DERIVED and BY_NAME[name].metric_class is not MetricClass.TIMING:
            readings[name] = Reading(samples.get(name, ()), name in nonfinite, notes.get(name, ""))
    if contract := declared.get("contract"):
        readings |= _gated(samples, series.case, contract)
    if budget := declared.get("budget"):
        readings |= _budgeted(samples, series.unit_bytes, budget)
    return readings


def _budgeted(samples: Mapping[str, Sequence[float]], unit_bytes: int, budget: Mapping[str, Any]) -> dict[str, Reading]:
    """The check that memory lies within what is declared, where any of it was measured."""
    most = {name: one["units"] * unit_bytes + one["slack_bytes"] for name, one in budget.items() if name in samples}
    over = [
        f"{name} {max(samples[name]):,.0f} bytes over {limit:,.0f}"
        for name, limit in sorted(most.items())
        if max(samples[name]) > limit
    ]
    return {BUDGET: Reading((float(not over),), note=", ".join(over))} if most else {}


def _gated(
    samples: Mapping[str, Sequence[float]], case: Mapping[str, Any], contract: Mapping[str, Any]
) -> dict[str, Reading]:
    """The check that errors lie within the gates of the kernel's declared contract, where anything is gated."""
    worst = {name: max(values, key=abs) for name, values in samples.items()}
    if "logits_abs_max" not in worst:
        return {}
    facts = GateFacts(
        distribution=case["distribution"],
        logits_abs_max=worst["logits_abs_max"],
        vocabulary=case["vocabulary"],
        peer_target_error=worst.get("peer_tgt_rel_max", 0.0),
    )
    over = beyond_gates(worst, facts, dtype=case["dtype"], gradient=contract.get("gradient", "float32"))
    return {} if over is None else {GATES: Reading((float(not over),), note=over)}


def _pool(readings: Sequence[Reading]) -> Reading:
    """Repetitions as one reading, whatever their order."""
    return Reading(
        samples=tuple(sorted(sample for reading in readings for sample in reading.samples)),
        nonfinite=any(reading.nonfinite for reading in readings),
        note=min((reading.note for reading in readings if reading.note), default=""),
    )


# --- Storing ----------------------------------------------------------------------------------------------------------


def _store_verdict(
    session: Session, history: History, sha: str, assessment: Assessment, previous: _Header | None
) -> _Header:
    plan = history.plans[sha]
    baseline_id, distance, inherited_from_id = planned(history, sha, plan)
    level_set_id = _level_set_id(session, history.target_id, assessment.standing)
    row = session.get(Verdict, previous.id) if previous else None
    if row is None:
        row = Verdict(target_id=history.target_id, commit_id=history.commits[sha].id)
        session.add(row)
    row.state = str(assessment.state)
    row.reason = assessment.reason
    row.baseline_commit_id = baseline_id
    row.baseline_distance = distance
    row.inherited_from_id = inherited_from_id
    row.rule_version = RULE_VERSION
    row.counts = assessment.counts
    row.document = assessment.document
    row.level_set_id = level_set_id
    row.judged_at = datetime.now(UTC)
    session.flush()
    lasting = lasting_state(row.state, row.counts)
    return _Header(row.id, baseline_id, distance, inherited_from_id, level_set_id, RULE_VERSION, lasting)


def _level_set_id(session: Session, target_id: int, standing: Standing) -> int:
    """The row of what stands; equal ones of a target share it, and the target is locked."""
    digest, compressed = dump(standing)
    own = hashlib.sha256(f"{target_id} {digest}".encode()).hexdigest()
    found = session.scalars(select(LevelSet.id).where(LevelSet.digest == own)).first()
    if found is not None:
        return found
    row = LevelSet(digest=own, levels=compressed)
    session.add(row)
    session.flush()
    return row.id


def _drop_unused(session: Session, level_set_id: int) -> None:
    used = select(Verdict.id).where(Verdict.level_set_id == level_set_id).exists()
    session.execute(delete(LevelSet).where(LevelSet.id == level_set_id, ~used))


def _withdraw(session: Session, history: History, sha: str, header: _Header) -> None:
    """A commit that inherited and no longer does has no verdict until it is measured."""
    session.execute(delete(Verdict).where(Verdict.id == header.id))
    _drop_unused(session, header.level_set_id)
    store_findings(session, history, sha, ())


def _catch_up(session: Session, history: History) -> None:
    """Note what was judged. A result that came meanwhile has raised the generation again and stays pending."""
    for commit in sorted(history.commits.values(), key=lambda item: item.id):
        if commit.pending:
            session.execute(update(Commit).where(Commit.id == commit.id).values(judged_generation=commit.generation))


def _ask_for_bases(session: Session, history: History) -> None:
    """Queue the merge bases that newly measured commits off the default branch should be compared with, where they are
    not measured and nobody ever asked. Once each, whatever becomes of the job."""
    fresh = {commit.sha for commit in history.commits.values() if commit.pending and commit.runs}
    bases = forks(history.order, history.parents, history.trunk)
    lacking = {bases[sha].sha for sha in fresh if sha in bases and not _may_be_base(history, bases[sha].sha)}
    ids = {history.commits[sha].id: sha for sha in lacking}
    asked = session.scalars(select(Job.commit_id).where(Job.commit_id.in_(ids))).all() if ids else ()
    for commit_id in sorted(ids.keys() - set(asked)):
        for device_class in history.definition["require"]["devices"]:
            enqueue(session, target=history.target, commit=ids[commit_id], device_class=device_class)


def _may_be_base(history: History, sha: str) -> bool:
    plan = history.plans.get(sha)
    return plan is not None and (plan.source != sha or history.commits[sha].trusted)


# --- Without storing --------------------------------------------------------------------------------------------------


def compare(session: Session, target: str, base_sha: str, sha: str) -> queries.VerdictView:
    """The verdict of a commit against a base of the caller's choice, from what is stored of both; stores nothing.

    The base's own results are the accepted values, whatever findings are open. Shas may be unique prefixes. A side
    without results makes the verdict `missing`. NotFound if target or commits are unknown, Invalid if the base has
    only quarantined results.
    """
    found = session.scalars(select(Target).where(Target.name == target)).first()
    if found is None:
        raise NotFound(f"there is no target {target!r}")
    base, candidate = (_known(session, target, name) for name in (base_sha, sha))
    history = load_history(session, found)
    for name in (base, candidate):
        if name not in history.plans:
            return queries.missing_verdict(target, candidate, f"commit {name[:7]} has no results to compare")
    sources = [history.plans[name].source for name in (base, candidate)]
    if not history.commits[sources[0]].trusted:
        raise Invalid(f"the results of base {base[:7]} are quarantined: they are no baseline")
    plan = Plan(_ancestor(history, base, candidate), sources[1])
    before, after = (_measured(session, history, history.commits[source].runs) for source in sources)
    standing = _assess(history, Plan(None, sources[0]), Standing(), before, base).standing
    assessment = _assess(history, plan, standing, after, candidate)
    return _view(history, base, candidate, plan, assessment)


def _known(session: Session, target: str, sha: str) -> str:
    row = queries.commit(session, target, sha)
    if row is None:
        raise NotFound(f"target {target!r} has no commit {sha!r}")
    return row.sha


def _ancestor(history: History, base: str, sha: str) -> Ancestor:
    """The chosen base; distance 0 if it is no ancestor."""
    found = nearest(history.order, history.parents, lambda name: name == base).get(sha)
    return found or Ancestor(base, 0)


def _view(history: History, base: str, sha: str, plan: Plan, assessment: Assessment) -> queries.VerdictView:
    now = datetime.now(UTC)
    findings = tuple(
        queries.FindingView(
            id=0,
            target=history.target,
            kernel=item.kernel,
            family=str(item.family),
            direction=str(item.direction),
            state=first_state(item),
            sentence=item.sentence,
            culprit_sha=sha,
            culprit_subject="",
            baseline_sha=base,
            baseline_distance=plan.baseline.distance if plan.baseline else None,
            rule_version=RULE_VERSION,
            affected=tuple(queries.affected(plain(change)) for change in item.changes),
            events=(),
            reproduce=reproduce(history, sha, item),
            required=item.required,
            created_at=now,
            updated_at=now,
            until=None,
        )
        for item in assessment.clusters
    )
    return queries.VerdictView(
        target=history.target,
        sha=sha,
        state=str(assessment.state),
        reason=assessment.reason,
        baseline_sha=base,
        baseline_distance=plan.baseline.distance if plan.baseline else None,
        inherited_from=plan.source if plan.source != sha else None,
        counts=assessment.counts,
        findings=findings,
        inherited=(),
        recovered=(),
        undecided=tuple(queries.affected(item) for item in assessment.document["undecided"]),
        rule_version=RULE_VERSION,
        judged_at=now,
        notices=tuple(queries.affected(item) for item in assessment.document["notices"]),
        ci=queries.ci_result(str(assessment.state), history.definition["ci"]),
    )
