"""The command line: the one file that knows all the programs. Everything heavy is imported by the command that needs
it.
"""

import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Never

import typer

if TYPE_CHECKING:
    from pydantic import ValidationError
    from starlette.applications import Starlette

    from runners.client import Client
    from runners.job import Limits
    from runners.settings import RunnerSettings
    from service.settings import Settings
    from service.wire import Result, Target

app = typer.Typer(
    name="ulpwatch",
    help="Finds precision and memory regressions of log-prob/entropy kernels at the commit, before it merges.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
token_app = typer.Typer(no_args_is_help=True, help="API tokens.")
db_app = typer.Typer(no_args_is_help=True, help="The database's tables.")
target_app = typer.Typer(no_args_is_help=True, help="Targets: repositories under watch.")
job_app = typer.Typer(no_args_is_help=True, help="Jobs: commits to be measured.")
finding_app = typer.Typer(no_args_is_help=True, help="Findings: what was found, and what people decide about it.")
app.add_typer(token_app, name="token")
app.add_typer(db_app, name="db")
app.add_typer(target_app, name="target")
app.add_typer(job_app, name="job")
app.add_typer(finding_app, name="finding")

UNDECIDED, UNREACHABLE = 2, 3
GATE_POLL_SECONDS = 300.0  # what one request waits at most; the service caps it too

DatabaseUrl = Annotated[
    str | None, typer.Option("--database-url", help="Database; default ULPWATCH_DATABASE_URL, else a SQLite file.")
]
Suite = Annotated[str | None, typer.Option("--suite", help="Named set of cases; default: the target file's.")]
TargetFile = Annotated[Path, typer.Option("--target", help="Target file (TOML).", exists=True, dir_okay=False)]


class Format(StrEnum):
    """How a verdict is printed."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"
    JUNIT = "junit"


Form = Annotated[Format, typer.Option("--format", help="How to print the verdict.")]


class Device(StrEnum):
    """A device class."""

    CPU = "cpu"
    CUDA = "cuda"


class Scope(StrEnum):
    """What a token allows."""

    READ = "read"
    CI = "ci"
    RUNNER = "runner"
    ADMIN = "admin"


# --- Measuring and deciding here, without a service -------------------------------------------------------------------


@app.command()
def measure(
    target: TargetFile,
    commit: Annotated[str, typer.Option("--commit", help="Commit, branch or tag.")],
    repo: Annotated[str | None, typer.Option("--repo", help="Path or URL; default: the target file's.")] = None,
    suite: Suite = None,
    kernel: Annotated[list[str] | None, typer.Option("--kernel", help="Only this kernel; repeatable.")] = None,
    case: Annotated[list[str] | None, typer.Option("--case", help="Only this case id; repeatable.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the result as JSON to this file.")] = None,
) -> None:
    """Measure the kernels of one commit on this host. No service is needed."""
    from uuid import uuid4

    from runners.job import measure_commit
    from runners.summary import summary, wide_console

    with _told_plainly():
        if out is not None:
            _require_writable(out)
        loaded, settings = _load_target(target), _runner_settings()
        result = measure_commit(
            loaded,
            repo or loaded.repository,
            commit,
            attempt=uuid4(),
            suite=suite,
            kernels=kernel or None,
            case_ids=case or None,
            on_progress=_progress,
            limits=_limits(settings),
            cache=settings.cache,
        )
        if out is not None:
            out.write_text(result.model_dump_json(), encoding="utf-8")
    wide_console().print(summary(result))


@app.command()
def compare(
    baseline: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Result file of `measure --out`.")],
    candidate: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Result file to compare with it.")],
    target: Annotated[
        Path | None,
        typer.Option(
            "--target", help="Target file: what it requires and declares, and how to measure again.", exists=True
        ),
    ] = None,
    repo: Annotated[str | None, typer.Option("--repo", help="Path or URL; default: the target file's.")] = None,
    form: Form = Format.TEXT,
) -> None:
    """Decide on two local measurements. Exits 0 for pass or improve, 1 for regress, 2 for undecided."""
    from service.offline import compare_results
    from service.reports import document

    if repo is not None and target is None:
        _abort("--repo is for the command that reproduces a finding, which needs --target too")
    with _told_plainly():
        declared = None if target is None else _load_target(target)
        verdict = document(compare_results(_read_result(baseline), _read_result(candidate), declared))
        where = None if target is None or declared is None else (target, repo or declared.repository)
    for finding in (*verdict["findings"], *verdict["inherited"], *verdict["recovered"]):
        finding["reproduce"] = "" if where is None else _measure_again(finding, verdict["sha"], *where)
    _answer(verdict, form)


def _measure_again(finding: Mapping[str, Any], sha: str, target: Path, repo: str) -> str:
    """The command that measures a finding's first case at the candidate: a result does not say where it comes from."""
    case = finding["affected"][0]["case_id"]
    words = ["--target", str(target), "--repo", repo, "--commit", sha, "--kernel", finding["kernel"], "--case", case]
    return shlex.join(["ulpwatch", "measure", *words])


@app.command()
def replay(
    target: TargetFile,
    repo: Annotated[str, typer.Option("--repo", help="Path or URL of the repository.")],
    span: Annotated[str, typer.Option("--range", help="A..B: the baseline and the last commit.")],
    suite: Suite = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Keep results in this directory and reuse those found there.")
    ] = None,
) -> None:
    """Measure and judge a stretch of history on this host: a row a commit, the baseline A first."""
    from runners.replay import measure_range
    from runners.terminal import plain
    from service.offline import judge_history

    with _told_plainly():
        loaded, settings = _load_target(target), _runner_settings()
        stretch = measure_range(
            loaded,
            repo,
            span,
            suite=suite,
            keep=keep,
            on_commit=_line,
            on_progress=_progress,
            limits=_limits(settings),
            cache=settings.cache,
        )
        verdicts = judge_history(loaded, stretch.commits, stretch.results)
    for commit, verdict in zip(stretch.commits, verdicts, strict=True):
        typer.echo(plain(f"{commit.sha[:7]}  {verdict.state:<12}  {commit.subject}"))
        for finding in verdict.findings:
            typer.echo(plain(f"{'':9}{finding.direction}: {finding.sentence}"))
        for finding in verdict.recovered:
            typer.echo(plain(f"{'':9}recovered: {finding.sentence}"))
        if verdict.state not in ("pass", "regress", "improve"):
            typer.echo(plain(f"{'':9}{verdict.reason}"))


@app.command()
def selftest(
    fault: Annotated[list[str] | None, typer.Option("--fault", help="Only this seeded fault; repeatable.")] = None,
) -> None:
    """Measure and judge seeded faults of the built-in kernel `fused`. Exits 1 if one is missed or falsely flagged."""
    from runners.selftest import TARGET, Finding, chosen, report
    from runners.selftest import measure as measure_faults
    from service.offline import judge_history, regressed_metrics

    with _told_plainly():
        measured = measure_faults(chosen(fault or ()), on_progress=_progress, limits=_limits(_runner_settings()))
        verdicts = judge_history(TARGET, measured.commits, measured.results)
    findings = [
        Finding(fault, verdict.state, regressed_metrics(verdict))
        for fault, verdict in zip(measured.faults, verdicts, strict=True)
    ]
    typer.echo(report(findings))
    raise typer.Exit(0 if all(finding.as_wanted for finding in findings) else 1)


@app.command()
def demo(
    directory: Annotated[Path, typer.Option("--directory", help="Where it keeps everything.")] = Path(".ulpwatch/demo"),
    port: Annotated[int, typer.Option("--port", help="The dashboard's port; another is taken if it is in use.")] = 8751,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget an earlier run of the demo.")] = False,
) -> None:
    """Measure and judge the bundled story repository through a real service and a real daemon."""
    from runners.demo import demo as run_demo

    raise typer.Exit(run_demo(directory, port=port, fresh=fresh))


# --- Asking a service -------------------------------------------------------------------------------------------------


@app.command()
def submit(
    result: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Result file of `measure --out`.")],
) -> None:
    """Post a local measurement with a ci token (ULPWATCH_URL, ULPWATCH_TOKEN)."""
    with _told_plainly(), _client() as client:
        loaded = _read_result(result)
        client.post_result(result.read_bytes())
    typer.echo(f"stored {loaded.target} {loaded.commit.sha} as attempt {loaded.attempt}")


@app.command()
def gate(
    target: Annotated[str, typer.Option("--target", help="The target's name.")],
    commit: Annotated[str, typer.Option("--commit", help="Commit id, full or at least 7 digits.")],
    base: Annotated[str | None, typer.Option("--base", help="Judge against this commit.")] = None,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for a verdict.")] = 0.0,
    form: Form = Format.TEXT,
) -> None:
    """Ask for a commit's verdict. Exits 0 pass or improve, 1 regress, 2 undecided, 3 service unreachable."""
    from runners.client import RefusedError, ServiceUnreachableError
    from runners.terminal import plain

    try:
        with _client() as client:
            verdict = _await_verdict(client, target, commit.lower(), base, wait)
    except ServiceUnreachableError as error:
        typer.echo(plain(f"unreachable: {error}"), err=True)
        raise typer.Exit(UNREACHABLE) from None
    except RefusedError as error:
        typer.echo(plain(f"undecided: {error}"), err=True)
        raise typer.Exit(UNDECIDED) from None
    link = f"{_runner_settings().url.rstrip('/')}/targets/{target}/commits/{verdict['sha']}"
    _answer(verdict, form, link=link)


def _await_verdict(client: "Client", target: str, commit: str, base: str | None, wait: float) -> Mapping[str, Any]:
    """The verdict, asked again while it is missing and there is time left."""
    deadline = time.monotonic() + wait
    while True:
        left = max(0.0, deadline - time.monotonic())
        asked = time.monotonic()
        verdict: Mapping[str, Any] = client.verdict(target, commit, base=base, wait=min(left, GATE_POLL_SECONDS))
        waited_in_vain = time.monotonic() - asked < 1.0  # the service sees no use in waiting
        if verdict["state"] != "missing" or time.monotonic() >= deadline or waited_in_vain:
            return verdict


@target_app.command("add")
def target_add(file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Target file (TOML).")]) -> None:
    """Register a target at the service, or a new version of it (admin token)."""
    with _told_plainly(), _client() as client:
        loaded = _load_target(file)
        client.register_target(loaded)
    typer.echo(f"registered {loaded.name}")


@job_app.command("add")
def job_add(
    target: TargetFile,
    span: Annotated[str, typer.Option("--range", help="A..B: those after A, up to B; or one commit.")],
    repo: Annotated[str | None, typer.Option("--repo", help="Path or URL; default: the target file's.")] = None,
    device: Annotated[Device, typer.Option("--device", help="Where to measure.")] = Device.CPU,
    head: Annotated[bool, typer.Option("--head", help="The last commit is the head of the target's branch.")] = False,
) -> None:
    """Tell the service of commits and ask for each that changes a watched path to be measured (ci token). A itself is
    told and not measured: name it alone for that.
    """
    from runners.checkout import changing_watched_paths, describe, open_repository
    from runners.checkout import commits as commits_of
    from service.wire import JobRequest

    with _told_plainly(), _client() as client:
        loaded = _load_target(target)
        opened = open_repository(repo or loaded.repository, cache=_runner_settings().cache)
        commits = [describe(opened, sha, loaded.paths) for sha in commits_of(opened, span)]
        client.post_commits(loaded.name, commits, head_of=loaded.branch if head else None)
        wanted = commits[1:] if ".." in span else commits  # the first is A, told for its place in the graph
        changed = [commit for commit in changing_watched_paths(commits) if commit in wanted]
        for commit in changed:
            client.enqueue(JobRequest(target=loaded.name, commit=commit.sha, device_class=device.value))
    typer.echo(f"{_counted(len(commits), 'commit')} told, {len(changed)} to be measured")


FindingId = Annotated[
    int, typer.Argument(min=1, help="The finding's number, as `finding list` and the dashboard show it.")
]
Reason = Annotated[str, typer.Option("--reason", help="Why; kept with the finding.")]


@finding_app.command("list")
def finding_list(
    target: Annotated[str | None, typer.Option("--target", help="Only of this target.")] = None,
    state: Annotated[list[str] | None, typer.Option("--state", help="Only in this state; repeatable.")] = None,
) -> None:
    """Findings, newest first, at most a hundred: number, state, direction, what and where."""
    from runners.terminal import plain

    with _told_plainly(), _client() as client:
        query: dict[str, str | list[str]] = {"limit": "100", "state": state or ["open", "acknowledged"]}
        found = client.get("/findings", query | ({"target": target} if target else {}))["items"]
    for one in found:
        typer.echo(plain(f"{one['id']:>6}  {one['state']:<12}  {one['target']}  {one['direction']}: {one['sentence']}"))


@finding_app.command("acknowledge")
def finding_acknowledge(finding: FindingId, reason: Reason) -> None:
    """Say that somebody looks after it; it stays a regression (admin token, like all decisions)."""
    _decide(finding, "acknowledge", reason)


@finding_app.command("accept")
def finding_accept(finding: FindingId, reason: Reason) -> None:
    """Make its values the new baseline, here and where the same content lands."""
    _decide(finding, "accept", reason)


@finding_app.command("dismiss")
def finding_dismiss(
    finding: FindingId,
    reason: Reason,
    until: Annotated[str | None, typer.Option("--until", help="When it opens again, as 2027-01-31T00:00:00Z.")] = None,
) -> None:
    """Say that it is no regression; the baseline stays as it was."""
    _decide(finding, "dismiss", reason, until)


@finding_app.command("reopen")
def finding_reopen(finding: FindingId, reason: Reason) -> None:
    """Take a decision back."""
    _decide(finding, "reopen", reason)


def _decide(finding: int, action: str, reason: str, until: str | None = None) -> None:
    from runners.terminal import plain

    with _told_plainly(), _client() as client:
        after = client.decide(finding, action, reason, until=until)
    typer.echo(plain(f"finding {finding} is {after['state']}: {after['sentence']}"))


# --- Programs ---------------------------------------------------------------------------------------------------------


@app.command()
def serve(
    host: Annotated[str | None, typer.Option("--host", help="Address; default ULPWATCH_HOST or 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port; default ULPWATCH_PORT or 8750.")] = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Run the API and the dashboards in one process. A SQLite file is made or upgraded first."""
    import uvicorn

    from service import db
    from service.errors import ServiceError

    settings = _service_settings(host=host, port=port, database_url=database_url)
    try:
        if settings.database_url.startswith("sqlite"):
            db.upgrade(settings.database_url)
        uvicorn.run(build_app(settings), host=settings.host, port=settings.port, log_level="info", server_header=False)
    except ServiceError as error:
        _abort(error.detail)


def build_app(settings: "Settings") -> "Starlette":
    """The API under /api/v1 and the dashboards at /, on one database."""
    from dashboards.app import create_app as create_dashboards
    from service.app import add_pages
    from service.app import create_app as create_service
    from service.auth import authenticate

    service = create_service(settings)
    read = service.state.storage.read

    def may_read(secret: str) -> bool:
        with read() as session:
            caller = authenticate(session, secret)
        return caller is not None and caller.target is None and caller.may("read")

    pages = create_dashboards(read, public_read=settings.public_read, authenticate=may_read)
    add_pages(service, pages)
    return service


@app.command()
def runner(
    once: Annotated[bool, typer.Option("--once", help="End after one job, or if there is none.")] = False,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda:K; default ULPWATCH_DEVICE.")] = None,
) -> None:
    """Run the daemon: claim a job, measure it, spool and post its result, repeat (runner token)."""
    import logging

    from runners.daemon import run
    from runners.spool import SpoolBusyError
    from runners.terminal import PlainFormatter

    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        code = run(_runner_settings(**({} if device is None else {"device": device})), once=once)
    except SpoolBusyError as error:
        _abort(str(error))
    raise typer.Exit(code)


@db_app.command("upgrade")
def db_upgrade(database_url: DatabaseUrl = None) -> None:
    """Make or upgrade the tables."""
    from service import db

    db.upgrade(_service_settings(database_url=database_url).database_url)
    typer.echo("the database is up to date")


@token_app.command("create")
def token_create(
    scope: Annotated[Scope, typer.Option("--scope", help="What it allows.")],
    target: Annotated[str | None, typer.Option("--target", help="Only for this target.")] = None,
    label: Annotated[str, typer.Option("--label", help="Whose it is; shown where it is used.")] = "",
    database_url: DatabaseUrl = None,
) -> None:
    """Make an API token and print it, alone on the last line. It is shown this once."""
    from service.auth import create_token
    from service.db import open_engine, require_current_schema, session_factory
    from service.errors import ServiceError

    engine = open_engine(_service_settings(database_url=database_url).database_url)
    try:
        require_current_schema(engine)
        with session_factory(engine).begin() as session:
            created = create_token(session, scope.value, target=target, label=label)
    except ServiceError as error:
        _abort(error.detail)
    typer.echo(created.secret)


# --- What the commands share ------------------------------------------------------------------------------------------


@contextmanager
def _told_plainly() -> Iterator[None]:
    """Turn the errors that a person can act on into a line and exit code 2."""
    from pydantic import ValidationError

    from runners.checkout import CheckoutError
    from runners.client import ClientError
    from runners.job import JobError

    try:
        yield
    except ValidationError as error:
        _abort(_in_words(error))
    except (CheckoutError, ClientError, JobError, KeyError, OSError, ValueError) as error:
        _abort(str(error.args[0]) if isinstance(error, KeyError) else str(error))


def _in_words(error: "ValidationError") -> str:
    """The first faults of an input, each with its field."""
    faults = error.errors()[:5]
    return "; ".join(": ".join(filter(None, (".".join(map(str, fault["loc"])), fault["msg"]))) for fault in faults)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _abort(message: str) -> Never:
    from runners.terminal import plain_lines

    typer.echo(plain_lines(f"ulpwatch: {message}"), err=True)
    raise typer.Exit(UNDECIDED)


def _load_target(path: Path) -> "Target":
    from runners.targets import load_target

    return load_target(path)


def _read_result(path: Path) -> "Result":
    from pydantic import ValidationError

    from service.wire import Result

    try:
        return Result.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} holds no result of `ulpwatch measure --out`: {_in_words(error)}") from error


def _runner_settings(**given: Any) -> "RunnerSettings":
    from runners.settings import RunnerSettings

    return RunnerSettings(**given)


def _service_settings(**given: Any) -> "Settings":
    from service.settings import Settings

    return Settings(**{name: value for name, value in given.items() if value is not None})


def _limits(settings: "RunnerSettings") -> "Limits":
    from runners.process import Limits

    return Limits.of(settings)


def _client() -> "Client":
    from runners.client import Client

    settings = _runner_settings()
    return Client(settings.url, settings.token, request_seconds=settings.request_seconds)


def _progress(words: str) -> None:
    """What is being done now, where a terminal can show it in place."""
    from runners.terminal import plain

    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{plain(words)[:160]}")
        sys.stderr.flush()


def _line(words: str) -> None:
    """A step of a long command, for a log as for a terminal."""
    from runners.terminal import plain

    sys.stderr.write(("\r\x1b[2K" if sys.stderr.isatty() else "") + plain(words) + "\n")
    sys.stderr.flush()


def _require_writable(path: Path) -> None:
    """Raise OSError now if a file could not be written later."""
    existed = path.exists()
    path.open("ab").close()
    if not existed:
        path.unlink()


def _answer(verdict: Mapping[str, Any], form: Format, *, link: str | None = None) -> None:
    """Print a verdict and exit with its code. The forms that a person reads show what a terminal would obey."""
    from runners.terminal import plain_document
    from service.reports import exit_code, render

    shown = plain_document(verdict) if form in (Format.TEXT, Format.MARKDOWN) else verdict
    typer.echo(render(shown, form.value, link=link))
    raise typer.Exit(exit_code(verdict))


def main() -> None:
    """The entry point of the `ulpwatch` command. A failure of ours exits 2: 1 is kept for a regression."""
    try:
        app()
    except Exception:  # noqa: BLE001 (whatever it is, it is no verdict)
        traceback.print_exc()
        raise SystemExit(UNDECIDED) from None


if __name__ == "__main__":
    main()
