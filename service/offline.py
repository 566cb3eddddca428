"""Judges results without a running service: the same ingest and the same judge, on a database that lives as long as a
call.

One path decides everywhere: what `ulpwatch replay` and `ulpwatch compare` say is what the service would say.
"""

import hashlib
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

from sqlalchemy.orm import Session, sessionmaker

from service import queries
from service.db import open_engine, session_factory, upgrade
from service.detection.levels import State
from service.ingest import ingest, register_commits, register_target
from service.judge import judge_pending
from service.wire import Commit, Result, Target, TargetKernel

_POSTED_BY = "offline"


def judge_history(target: Target, commits: Sequence[Commit], results: Sequence[Result]) -> list[queries.VerdictView]:
    """The verdict of every commit, in the order given; the last one is the branch's head. What was before the first is
    left out, so that it begins the history."""
    known = {commit.sha for commit in commits}
    commits = [_within(known, commit) for commit in commits]
    results = [result.model_copy(update={"commit": _within(known, result.commit)}) for result in results]
    with _database() as factory:
        with factory.begin() as session:
            register_target(session, target, registered_by=_POSTED_BY)
            register_commits(session, target.name, commits, branch=target.branch, head=commits[-1].sha)
            for result in results:
                _ingest(session, result)
        judge_pending(factory)
        with factory() as session:
            return [queries.verdict(session, target.name, commit.sha) for commit in commits]


def _within(known: Collection[str], commit: Commit) -> Commit:
    """The commit with those of its parents that are known."""
    return commit.model_copy(update={"parents": [parent for parent in commit.parents if parent in known]})


def regressed_metrics(verdict: queries.VerdictView) -> frozenset[str]:
    """The metrics that a commit's own findings of direction regress are made of."""
    regressions = [finding for finding in verdict.findings if finding.direction == str(State.REGRESS)]
    return frozenset(affected.metric for finding in regressions for affected in finding.affected)


def compare_results(baseline: Result, candidate: Result, target: Target | None = None) -> queries.VerdictView:
    """The verdict of one result against another, as if the candidate's commit followed the baseline's.

    Without `target` the usual is required and nothing declared. Raises ValueError if they are of different targets or
    are the same attempt.
    """
    if target is not None and target.name != candidate.target:
        raise ValueError(f"the results are of target {candidate.target!r}, the target file is of {target.name!r}")
    if baseline.target != candidate.target:
        raise ValueError(f"the results are of different targets: {baseline.target!r} and {candidate.target!r}")
    if baseline.attempt == candidate.attempt:
        raise ValueError(f"both files hold the same attempt, {baseline.attempt}: name two different results")
    first = _placed(baseline, sha=_sha_of(baseline, other=candidate), parents=[])
    second = _placed(candidate, sha=candidate.commit.sha, parents=[first.commit.sha])
    return judge_history(target or _target_of(candidate, baseline), [first.commit, second.commit], [first, second])[-1]


def _sha_of(baseline: Result, *, other: Result) -> str:
    """The baseline's commit; where both results are of one commit, a name of its own, made of its attempt."""
    if baseline.commit.sha != other.commit.sha:
        return baseline.commit.sha
    return hashlib.sha1(baseline.attempt.bytes, usedforsecurity=False).hexdigest()


def _placed(result: Result, *, sha: str, parents: list[str]) -> Result:
    """The result without its job, at a place in the graph of its own."""
    commit = result.commit.model_copy(update={"sha": sha, "parents": parents, "watched_digest": None})
    return result.model_copy(update={"commit": commit, "job": None})


def _target_of(result: Result, *others: Result) -> Target:
    """What a verdict on the results' kernels needs; how to call them does not matter any more."""
    rows = [row for measured in (result, *others) for row in measured.measurements]
    names, controls = (sorted({row.kernel for row in rows if row.role == role}) for role in ("kernel", "control"))
    kernels = [
        TargetKernel(
            name=name or f"unmeasured-{number}",  # a kernel has one control, and nothing more is asked of it here
            entry="measured:already",
            arguments={"logits": "x", "targets": "y"},
            returns=["log_prob"],
            control=control,
        )
        for number, (name, control) in enumerate(zip_longest(names, controls))
    ]
    return Target(name=result.target, repository="measured-already", paths=["."], suite=result.suite, kernels=kernels)


def _ingest(session: Session, result: Result) -> None:
    digest = hashlib.sha256(result.model_dump_json().encode()).hexdigest()
    ingest(session, result, body_digest=digest, posted_by=_POSTED_BY)


@contextmanager
def _database() -> Iterator[sessionmaker[Session]]:
    with tempfile.TemporaryDirectory(prefix="ulpwatch-") as directory:
        url = f"sqlite:///{Path(directory) / 'offline.sqlite3'}"
        upgrade(url)
        engine = open_engine(url)
        try:
            yield session_factory(engine)
        finally:
            engine.dispose()
