"""`ulpwatch demo`: the story repository through a real service and a real daemon, expected beside found.

Starts both as processes of their own, keeps them alive, asks for every commit and prints the table. Measures and
judges nothing itself. Started again in the same directory it goes on where it was.
"""

import fcntl
import json
import secrets
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from pydantic import SecretStr
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runners.checkout import changing_watched_paths, describe, open_repository
from runners.client import Client, ClientError, ServiceUnreachableError
from runners.programs import HOST, Program, ProgramError, free_port, run_command, tail
from runners.story.story import Expected, StoryCommit, story_target, target_file, write_story
from runners.summary import wide_console
from service.catalogue import Family
from service.wire import Commit, JobRequest, Target

PORT = 8751
START_SECONDS = 60.0
POLL_SECONDS = 1.0
SETTLE_SECONDS = 10.0
ASKED_MAX = 3
EVERY_MATCH, SOME_MISMATCH = 0, 1


class DemoError(Exception):
    """The demo cannot go on; the message says why and what to do."""


# --- What is expected and what was found ---------------------------------------------------------------------------


def mismatches(expected: Expected, verdict: Mapping[str, Any]) -> list[str]:
    """What a verdict (the API's JSON) has otherwise than expected, in words; empty if it matches."""
    wrong = []
    if verdict["state"] != expected.state:
        wrong.append(f"state is {verdict['state']}, not {expected.state}")
    found = _families(verdict["findings"], "regress")
    wrong += [f"no {family} finding" for family in sorted(expected.findings - found)]
    wrong += [f"{family} finding" for family in sorted(found - expected.findings - expected.also)]
    recovered = _families(verdict["recovered"], "regress")
    wrong += [f"{family} not recovered" for family in sorted(expected.recovered - recovered)]
    if (verdict["inherited_from"] is not None) != expected.inherited:
        wrong.append("not inherited" if expected.inherited else "inherited")
    return wrong


def _families(findings: Sequence[Mapping[str, Any]], direction: str) -> frozenset[Family]:
    return frozenset(Family(finding["family"]) for finding in findings if finding["direction"] == direction)


def _words(state: str, findings: frozenset[Family], recovered: frozenset[Family], inherited: bool) -> str:
    """`regress: memory; recovered: work`."""
    words = f"{state}: {', '.join(sorted(findings))}" if findings else state
    if inherited:
        words += " (inherited)"
    return words + (f"; recovered: {', '.join(sorted(recovered))}" if recovered else "")


def expected_words(expected: Expected) -> str:
    """An expected verdict in one line; what may regress beside the rest is in brackets."""
    words = _words(expected.state, expected.findings, expected.recovered, expected.inherited)
    return words + (f" (also {', '.join(sorted(expected.also))})" if expected.also else "")


def found_words(verdict: Mapping[str, Any]) -> str:
    """A found verdict in one line, in the words of the expected one."""
    return _words(
        verdict["state"],
        _families(verdict["findings"], "regress"),
        _families(verdict["recovered"], "regress"),
        verdict["inherited_from"] is not None,
    )


def story_table(story: Sequence[StoryCommit], verdicts: Mapping[str, Mapping[str, Any]]) -> Table:
    """Every commit of the story: what was expected, what was found, why, and whether the two match."""
    table = Table(title="The story, commit by commit", show_lines=True, expand=True)
    for column, ratio in (("commit", None), ("subject", 3), ("expected", 3), ("found", 3), ("why", 6), ("", None)):
        table.add_column(column, ratio=ratio, no_wrap=ratio is None)
    for commit in story:
        verdict = verdicts[commit.sha]
        wrong = mismatches(commit.expected, verdict)
        cells = (
            commit.sha[:7],
            commit.subject,
            expected_words(commit.expected),
            found_words(verdict),
            "\n".join([*_why(verdict), *(f"MISMATCH: {words}" for words in wrong)]),
            "MISMATCH" if wrong else "ok",
        )
        table.add_row(*map(Text, cells))
    return table


def _why(verdict: Mapping[str, Any]) -> list[str]:
    """The findings that the verdict's state is about, one a line; of a verdict without such, its reason."""
    about = [finding["sentence"] for finding in verdict["findings"] if finding["direction"] == verdict["state"]]
    return [sentence.removesuffix(f", at {verdict['sha'][:7]}") for sentence in about] or [verdict["reason"]]


# --- The demo ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Demo:
    """What the steps work with."""

    directory: Path
    console: Console
    story: list[StoryCommit]
    target: Target
    commits: list[Commit]
    client: Client
    programs: list[Program]
    rows: dict[str, Any] = field(default_factory=dict)
    verdicts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_as_expected(self) -> bool:
        """Whether every commit has the verdict that it deserves."""
        return not any(mismatches(commit.expected, self.verdicts[commit.sha]) for commit in self.story)


def demo(directory: Path, *, port: int = PORT, fresh: bool = False) -> int:
    """Run the demo in `directory`, which keeps database, story, spool and logs; `fresh` starts from nothing.

    Another port is taken if `port` is in use. Returns 0 if every commit got its expected verdict, else 1.
    """
    console = wide_console()
    directory = directory.absolute()
    try:
        with ExitStack() as stack:
            stack.enter_context(_ends_on_sigterm())
            stack.enter_context(_owned(directory, fresh=fresh))
            return _run(directory, port, console, stack)
    except (DemoError, ProgramError, ClientError, FileExistsError) as error:
        console.print(f"demo: {error}", markup=False)
        return SOME_MISMATCH


def _run(directory: Path, port: int, console: Console, stack: ExitStack) -> int:
    story = write_story(directory / "story")
    target = story_target(directory / "story")
    (directory / "story.toml").write_text(target_file(directory / "story"), encoding="utf-8")
    console.print(f"story     {len(story)} commits in {directory / 'story'}", markup=False)
    database_url = f"sqlite:///{directory / 'ulpwatch.sqlite3'}"
    tokens = _tokens(directory / "tokens.json", database_url)
    port = free_port(port)
    url = f"http://{HOST}:{port}"
    programs = [_service(directory, database_url, port), _runner(directory, url, tokens["runner"])]
    client = stack.enter_context(Client(url, SecretStr(tokens["admin"])))
    for program in programs:
        stack.callback(program.stop)
    opened = open_repository(directory / "story")
    commits = [describe(opened, commit.sha, target.paths) for commit in story]
    run = _Demo(directory, console, story, target, commits, client, programs)
    _start(run, url)
    _persist(run, _ask)
    _wait(run)
    console.print(story_table(story, run.verdicts))
    good = run.is_as_expected
    console.print("every verdict is the expected one" if good else "some verdicts are not the expected ones: MISMATCH")
    console.print(_how_to_look(database_url, port), markup=False, soft_wrap=True)
    return EVERY_MATCH if good else SOME_MISMATCH


def _service(directory: Path, database_url: str, port: int) -> Program:
    arguments = ["serve", "--host", HOST, "--port", str(port), "--database-url", database_url]
    return Program("service", arguments, {"ULPWATCH_PUBLIC_READ": "true"}, directory / "service.log")


def _runner(directory: Path, url: str, token: str) -> Program:
    settings = {
        "ULPWATCH_URL": url,
        "ULPWATCH_TOKEN": token,
        "ULPWATCH_NAME": "demo-cpu",
        "ULPWATCH_SPOOL": str(directory / "spool"),
        "ULPWATCH_CACHE": str(directory / "cache"),
        "ULPWATCH_POLL_SECONDS": "0.5",
        "ULPWATCH_RETRY_SECONDS_MAX": "2",
    }
    return Program("runner", ["runner", "--device", "cpu"], settings, directory / "runner.log")


def _how_to_look(database_url: str, port: int) -> str:
    serve = f"ULPWATCH_PUBLIC_READ=true ulpwatch serve --port {port} --database-url {shlex.quote(database_url)}"
    return f"dashboard http://{HOST}:{port}/ after: {serve}"


@contextmanager
def _owned(directory: Path, *, fresh: bool) -> Iterator[None]:
    """Hold the directory for as long as the demo runs; the lock ends with the process, however it ends."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "demo.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoError(f"another demo runs in {directory}: wait for it, or name another directory") from None
        if fresh:
            _empty(directory, keep=lock)
        yield


def _empty(directory: Path, *, keep: IO[bytes]) -> None:
    """Remove what a demo made, and nothing else that may lie in the directory."""
    for name in ("story", "spool", "cache", ".story.part"):
        shutil.rmtree(directory / name, ignore_errors=True)
    for path in directory.glob("ulpwatch.sqlite3*"):
        path.unlink()
    for name in ("story.toml", "tokens.json", "service.log", "runner.log"):
        (directory / name).unlink(missing_ok=True)
    del keep


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an orderly end, so that the programs are stopped."""

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tokens(path: Path, database_url: str) -> dict[str, str]:
    """The demo's tokens by scope, made once: a runner is known by its token."""
    if path.exists():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    run_command(database_url, "db", "upgrade")
    made = {
        scope: run_command(database_url, "token", "create", "--scope", scope).splitlines()[-1].strip()
        for scope in ("admin", "runner")
    }
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    part.touch(mode=0o600)
    part.write_text(json.dumps(made), encoding="utf-8")
    part.rename(path)
    return made


def _supervise(run: _Demo) -> None:
    """Start what does not run."""
    for program in run.programs:
        if program.keep_alive():
            again = "started" if program.starts == 1 else "started again"
            run.console.print(f"{program.name:<9} {again}, log {program.log}", markup=False, soft_wrap=True)


def _start(run: _Demo, url: str) -> None:
    """Start both programs and wait for the service."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        _supervise(run)
        try:
            run.client.get("/health")
        except ServiceUnreachableError as error:
            if time.monotonic() > deadline:
                log = run.programs[0].log
                raise DemoError(f"{error}; the service's last words in {log}:\n{tail(log)}") from error
            time.sleep(POLL_SECONDS / 4)
        else:
            run.console.print(f"service   answers at {url}", markup=False)
            return


def _persist(run: _Demo, step: Any) -> Any:
    """Take a step again, as a whole, for as long as the service does not answer."""
    while True:
        _supervise(run)
        try:
            return step(run)
        except ServiceUnreachableError:
            time.sleep(POLL_SECONDS)


def _ask(run: _Demo) -> None:
    """Register target and commits, and ask for each commit that changes a watched path and is not asked for yet."""
    run.client.register_target(run.target)
    run.client.post_commits(run.target.name, run.commits, head_of=run.target.branch)
    asked = {job["sha"] for job in _jobs(run) if job["state"] != "failed"}
    for commit in changing_watched_paths(run.commits):
        if commit.sha not in asked:
            run.client.enqueue(JobRequest(target=run.target.name, commit=commit.sha))


def _jobs(run: _Demo) -> list[Any]:
    return list(run.client.get("/jobs", {"target": run.target.name, "limit": "1000"})["items"])


def _wait(run: _Demo) -> None:
    """Wait until every commit has its verdict and no job is open, telling each verdict; one that is not the expected
    one is given SETTLE_SECONDS to change. Raises DemoError if a commit cannot be measured.
    """
    told: dict[str, str] = {}
    deadline: float | None = None
    while True:
        rows = _persist(run, _rows)
        _tell(run, told, rows)
        if any(row["jobs"] for row in rows.values()) or any(
            verdict["state"] == "missing" for verdict in run.verdicts.values()
        ):
            deadline = None
            _persist(run, _ask_again)
        else:
            deadline = deadline or time.monotonic() + SETTLE_SECONDS
            if run.is_as_expected or time.monotonic() > deadline:
                return
        time.sleep(POLL_SECONDS)


def _rows(run: _Demo) -> dict[str, Any]:
    """The commits as the service lists them, by sha; the verdicts are read again when anything in the list has moved,
    and while no job is open.
    """
    listed = run.client.get(f"/targets/{run.target.name}/commits", {"limit": "1000"})["items"]
    rows = {row["sha"]: row for row in listed}
    if rows != run.rows or not any(row["jobs"] for row in rows.values()):
        run.verdicts = {commit.sha: run.client.verdict(run.target.name, commit.sha) for commit in run.story}
        run.rows = rows
    return rows


def _ask_again(run: _Demo) -> None:
    """Ask again for a commit whose job failed (a runner that is killed too often loses it), ASKED_MAX times in all."""
    jobs = _jobs(run)
    open_or_done = {job["sha"] for job in jobs if job["state"] != "failed"}
    failures: dict[str, list[str]] = {}
    for job in jobs:
        if job["sha"] not in open_or_done:
            failures.setdefault(job["sha"], []).append(str(job["failure"]))
    for sha, reasons in failures.items():
        if len(reasons) >= ASKED_MAX:
            raise DemoError(f"commit {sha[:7]} could not be measured: {reasons[-1]}")
        run.client.enqueue(JobRequest(target=run.target.name, commit=sha))


def _tell(run: _Demo, told: dict[str, str], rows: Mapping[str, Any]) -> None:
    """One line for each verdict that is new or has changed, of commits that nobody measures any more."""
    for commit in run.story:
        verdict = run.verdicts[commit.sha]
        words = found_words(verdict)
        if verdict["state"] != "missing" and not rows[commit.sha]["jobs"] and told.get(commit.sha) != words:
            told[commit.sha] = words
            run.console.print(f"verdict   {commit.sha[:7]} {commit.key:<12} {words}", markup=False)
