"""The pages: each opens a session, asks service.queries, arranges the answer and renders it. Nothing is written."""

import csv
import io
from collections.abc import Callable
from http import HTTPStatus

from sqlalchemy.orm import Session
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from dashboards import drawing, views
from dashboards.assets import asset, edition
from dashboards.charts import PALETTES, Spec, draws_zeros_apart, history
from dashboards.formats import RULES
from dashboards.pages import page, path_for
from service import queries
from service.catalogue import BY_NAME
from service.queries import SeriesView

COMMITS_A_PAGE = 100
FINDINGS_A_PAGE = 100
OPEN_FINDINGS_SHOWN = 1000  # above the closed ones; the list of open ones alone has pages
JOBS_SHOWN = 100
IMAGE_WIDTH = 960
LARGEST_ID = 2**31 - 1
FOREVER = {"Cache-Control": "public, max-age=31536000, immutable"}


def targets(request: Request) -> Response:
    """All targets with the state of their newest judged commit."""
    with _reading(request) as session:
        return page(request, "targets.html", targets=queries.targets(session))


def commits(request: Request) -> Response:
    """A target's commits with their verdicts, newest first."""
    target = request.path_params["target"]
    with _reading(request) as session:
        rows = queries.commits(session, target, limit=COMMITS_A_PAGE, before=request.query_params.get("before"))
        definition = queries.target_definition(session, target) or {}
    older = rows[-1].sha if len(rows) == COMMITS_A_PAGE else None
    return page(request, "commits.html", target=target, definition=definition, commits=rows, older=older)


def commit(request: Request) -> Response:
    """A commit: its verdict, what it changed, what is undecided, and everything that was measured."""
    target, sha = request.path_params["target"], request.path_params["sha"]
    with _reading(request) as session:
        row = queries.commit(session, target, sha)
        if row is None:
            raise _not_found(f"target {target!r} has no commit {sha!r}")
        if row.sha != sha:
            return RedirectResponse(path_for(request, "commit", target=target, sha=row.sha), HTTPStatus.SEE_OTHER)
        verdict = queries.verdict(session, target, row.sha)
        measurements = queries.measurements(session, target, row.sha)
        definition = queries.target_definition(session, target) or {}
    return page(
        request,
        "commit.html",
        target=target,
        definition=definition,
        commit=row,
        verdict=verdict,
        findings=[(finding, views.steps_by_metric(finding.affected)) for finding in verdict.findings],
        undecided=views.comparison_rows(verdict.undecided),
        notices=views.comparison_rows(verdict.notices),
        tables=views.kernel_tables(measurements),
        headings=views.HEADINGS,
    )


def series_index(request: Request) -> Response:
    """The series of a target; with kernel, case and metric in the query, on to that history."""
    target = request.path_params["target"]
    wanted = {name: request.query_params.get(name, "") for name in ("kernel", "case_id", "metric")}
    if all(value and "/" not in value for value in wanted.values()):
        return RedirectResponse(path_for(request, "series", target=target, **wanted), HTTPStatus.SEE_OTHER)
    with _reading(request) as session:
        rows = queries.series(session, target)
    return page(request, "series_index.html", target=target, series=rows, headings=views.HEADINGS)


def series(request: Request) -> Response:
    """The history of one metric of one series: the chart and the table behind it."""
    with _reading(request) as session:
        view = _points(request, session)
        rows = queries.series(session, view.target)
    return page(
        request,
        "series.html",
        target=view.target,
        view=view,
        metric=BY_NAME[view.metric],
        rows=views.history_rows(view),
        zeros=draws_zeros_apart(view),
        gaps=any(not point.samples for point in view.points),
        segments=len({point.segment for point in view.points}) > 1,
        choices=views.choices(rows, kernel=view.kernel, case_id=view.case_id),
        rule=RULES[BY_NAME[view.metric].rule],
    )


def chart_json(request: Request) -> Response:
    """The chart as a Vega-Lite specification that fills the width it is given."""
    return JSONResponse(_chart(request, width="container"), headers={"Cache-Control": "no-store"})


def chart_svg(request: Request) -> Response:
    """The chart as an SVG image, from the same specification."""
    return Response(drawing.svg(_chart(request, width=IMAGE_WIDTH)), media_type="image/svg+xml")


def chart_png(request: Request) -> Response:
    """The chart as a PNG image, from the same specification."""
    return Response(drawing.png(_chart(request, width=IMAGE_WIDTH)), media_type="image/png")


def series_csv(request: Request) -> Response:
    """Every raw sample of a series as CSV (RFC 4180), in base units."""
    with _reading(request) as session:
        view = _points(request, session)
    text = io.StringIO()
    csv.writer(text).writerows(views.csv_rows(view))
    name = f"{view.target}-{view.kernel}-{view.case_id}-{view.metric}.csv"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=headers)


def findings(request: Request) -> Response:
    """The open findings of all targets or of one, and if `all` is asked for the others below them. A page holds the
    newest of what it goes through, the most serious first.
    """
    target = request.query_params.get("target") or None
    every = "all" in request.query_params
    before = _whole(request, "before")
    states = queries.CLOSED_FINDING_STATES if every else queries.OPEN_FINDING_STATES
    with _reading(request) as session:
        rows = queries.findings(session, target, states, limit=FINDINGS_A_PAGE, before=before)
        opened = (
            queries.findings(session, target, queries.OPEN_FINDING_STATES, limit=OPEN_FINDINGS_SHOWN)
            if every and before is None
            else ()
        )
    older = rows[-1].id if len(rows) == FINDINGS_A_PAGE else None
    ordered = views.findings_in_order((*opened, *rows))
    return page(request, "findings.html", findings=ordered, target=target, every=every, older=older)


def finding(request: Request) -> Response:
    """One finding with its evidence and its life so far."""
    number = request.path_params["id"]
    with _reading(request) as session:
        row = queries.finding(session, number) if number <= LARGEST_ID else None
    if row is None:
        raise _not_found(f"there is no finding {number}")
    return page(request, "finding.html", finding=row, groups=views.steps_by_metric(row.affected))


def runners(request: Request) -> Response:
    """The runners and the newest jobs."""
    with _reading(request) as session:
        return page(
            request,
            "runners.html",
            runners=queries.runners(session),
            jobs=queries.jobs(session, limit=JOBS_SHOWN),
        )


def static(request: Request) -> Response:
    """An asset, compressed for whoever takes that; its address changes with its content."""
    name = request.path_params["name"]
    try:
        found = asset(name) if edition(name) == request.path_params["edition"] else None
    except KeyError:
        found = None
    if found is None:
        raise _not_found(f"there is no file {name!r} of this edition")
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(found.body, media_type=found.media_type, headers=FOREVER | {"Vary": "Accept-Encoding"})
    headers = FOREVER | {"Vary": "Accept-Encoding", "Content-Encoding": "gzip"}
    return Response(found.compressed, media_type=found.media_type, headers=headers)


def _reading(request: Request) -> Session:
    """A session for one page. No database holds a NUL in a text, and PostgreSQL fails on being asked for one."""
    if any("\0" in str(value) for value in (*request.path_params.values(), *request.query_params.values())):
        raise _not_found("no name holds a NUL character")
    factory: Callable[[], Session] = request.app.state.session_factory
    return factory()


def _not_found(detail: str) -> HTTPException:
    return HTTPException(HTTPStatus.NOT_FOUND, detail)


def _whole(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is not None and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"{name} is a whole number, not {text!r}")
    return None if text is None else int(text)


def _points(request: Request, session: Session) -> SeriesView:
    target, kernel, case_id, metric = (request.path_params[name] for name in ("target", "kernel", "case_id", "metric"))
    view = queries.points(session, target, kernel, case_id, metric)
    if not any(point.samples or point.nonfinite for point in view.points):
        raise _not_found(f"kernel {kernel!r} has no value of {metric!r} on case {case_id!r}")
    return view


def _chart(request: Request, *, width: int | str) -> Spec:
    with _reading(request) as session:
        view = _points(request, session)
    theme = request.query_params.get("theme", "light")
    if theme not in PALETTES:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"theme is one of {', '.join(PALETTES)}, not {theme!r}")

    def commit_address(sha: str) -> str:
        return path_for(request, "commit", target=view.target, sha=sha)

    return history(view, palette=PALETTES[theme], commit_address=commit_address, width=width)


_SERIES = "/targets/{target}/series/{kernel}/{case_id}/{metric}"

ROUTES: list[BaseRoute] = [
    Route("/", targets, name="targets"),
    Route("/targets/{target}", commits, name="commits"),
    Route("/targets/{target}/commits/{sha}", commit, name="commit"),
    Route("/targets/{target}/series", series_index, name="series_index"),
    Route(_SERIES, series, name="series"),
    Route(f"{_SERIES}/chart.json", chart_json, name="chart_json"),
    Route(f"{_SERIES}/chart.svg", chart_svg, name="chart_svg"),
    Route(f"{_SERIES}/chart.png", chart_png, name="chart_png"),
    Route(f"{_SERIES}/samples.csv", series_csv, name="series_csv"),
    Route("/findings", findings, name="findings"),
    Route("/findings/{id:int}", finding, name="finding"),
    Route("/runners", runners, name="runners"),
    Route("/static/{edition}/{name}", static, name="asset"),
]
