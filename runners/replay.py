"""Measures a stretch of history on this host, commit by commit. Judges nothing."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from pydantic import ValidationError

from runners.checkout import changing_watched_paths, describe, open_repository
from runners.checkout import commits as commits_of
from runners.job import Limits, environment_here, measure_commit
from runners.suites import suite as cases_of
from service.catalogue import MetricClass
from service.wire import Commit, Environment, Result, Target

# What of a target has no influence on what is measured.
_OF_THE_VERDICT = {"repository", "branch", "paths", "require"}


@dataclass(frozen=True, slots=True)
class Stretch:
    """Commits, ancestors first, and the results of those that were measured: the others changed no watched path."""

    commits: list[Commit]
    results: list[Result]


def measure_range(
    target: Target,
    repository: str | Path,
    span: str,
    *,
    suite: str | None = None,
    keep: Path | None = None,
    on_commit: Callable[[str], None] = lambda _words: None,
    on_progress: Callable[[str], None] = lambda _words: None,
    limits: Limits | None = None,
    cache: Path | None = None,
) -> Stretch:
    """Measure the commits of `span` (A..B, A included). A commit whose watched paths equal those of a parent in the
    span is not measured. With `keep`, results are kept there as files and found again by a later call, as long as
    neither what the target says of measuring, nor the suite's cases, nor this host's environment has changed.
    `on_commit` is told once a commit what becomes of it, `on_progress` more often.

    Raises what runners.job.measure_commit raises, CheckoutError for the span, ValueError for a kept file that is no
    result of that commit and suite.
    """
    suite = suite or target.suite
    opened = open_repository(repository, cache=cache)
    commits = [describe(opened, sha, target.paths) for sha in commits_of(opened, span)]
    measured = changing_watched_paths(commits)
    here: Environment | None = None
    results = []
    for number, commit in enumerate(measured, start=1):
        place = f"commit {number} of {len(measured)}, {commit.sha[:7]}: "
        kept = keep / f"{commit.sha}-{suite}-{_digest(target, suite)}.json" if keep else None
        if kept is not None and kept.exists():
            here = here or environment_here(target, limits=limits)
            found = _read(kept, commit, target, suite)
            if _is_comparable(found.environment, here):
                on_commit(f"{place}measured before on this host, taken from {kept}")
                results.append(found)
                continue
            on_commit(f"{place}measured again, because {kept} is of another environment")
        else:
            on_commit(f"{place}measuring: {commit.subject}")
        result = measure_commit(
            target,
            repository,
            commit.sha,
            attempt=uuid4(),
            suite=suite,
            on_progress=lambda words, place=place: on_progress(place + words),  # type: ignore[misc]
            limits=limits,
            cache=cache,
        )
        results.append(result)
        if kept is not None:
            _write(kept, result)
    return Stretch(commits, results)


def _digest(target: Target, suite: str) -> str:
    """Changes with what is measured, and how."""
    told = target.model_dump(mode="json", exclude=_OF_THE_VERDICT)
    asked = [told, [case.model_dump(mode="json") for case in cases_of(suite)]]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]


def _is_comparable(one: Environment, other: Environment) -> bool:
    """Whether both are the same environment for every class of metric."""
    return all(one.identity(metric_class) == other.identity(metric_class) for metric_class in MetricClass)


def _read(path: Path, commit: Commit, target: Target, suite: str) -> Result:
    try:
        result = Result.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} holds no result: {error.errors()[0]['msg']}; remove it to measure again") from error
    wanted = (commit.sha, target.name, suite)
    if (result.commit.sha, result.target, result.suite) != wanted:
        raise ValueError(f"{path} holds another result than {', '.join(wanted)}; remove it to measure again")
    return result.model_copy(update={"commit": commit})  # the watched paths may have changed


def _write(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(result.model_dump_json(), encoding="utf-8")
    part.replace(path)
