"""Measures a stretch of history on this host, commit by commit. Judges nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from pydantic import ValidationError

from runners.checkout import changing_watched_paths, describe, open_repository
from runners.checkout import commits as commits_of
from runners.job import Limits, measure_commit
from service.wire import Commit, Result, Target


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
    on_progress: Callable[[str], None] = lambda _words: None,
    limits: Limits | None = None,
    cache: Path | None = None,
) -> Stretch:
    """Measure the commits of `span` (A..B, A included). A commit whose watched paths equal those of a parent in the
    span is not measured. With `keep`, results are kept there as files and found again by a later call.

    Raises what runners.job.measure_commit raises, CheckoutError for the span, ValueError for a kept file that is no
    result of that commit and suite.
    """
    opened = open_repository(repository, cache=cache)
    commits = [describe(opened, sha, target.paths) for sha in commits_of(opened, span)]
    measured = changing_watched_paths(commits)
    results = []
    for number, commit in enumerate(measured, start=1):
        kept = keep / f"{commit.sha}-{suite or target.suite}.json" if keep else None
        if kept is not None and kept.exists():
            results.append(_read(kept, commit, target, suite))
            continue
        place = f"commit {number} of {len(measured)}, {commit.sha[:7]}: "
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


def _read(path: Path, commit: Commit, target: Target, suite: str | None) -> Result:
    try:
        result = Result.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} holds no result: {error.errors()[0]['msg']}; remove it to measure again") from error
    wanted = (commit.sha, target.name, suite or target.suite)
    if (result.commit.sha, result.target, result.suite) != wanted:
        raise ValueError(f"{path} holds another result than {', '.join(wanted)}; remove it to measure again")
    return result


def _write(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(result.model_dump_json(), encoding="utf-8")
    part.replace(path)
