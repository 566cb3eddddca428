"""The three pages in a real browser, from a real server over a real SQLite database: no network beyond it."""

import hashlib
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

from dashboards.app import create_app
from dashboards.routes import IMAGE_WIDTH
from service import ingest, judge, wire
from service.catalogue import BY_NAME
from service.db import open_engine, reading_session_factory, session_factory, upgrade

CHROMIUM = Path("/usr/bin/chromium")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
START = datetime(2026, 3, 2, tzinfo=UTC)
CASE = wire.Case(tokens=64, vocabulary=4096)
U = CASE.logits_unit_bytes
SUBJECTS = ("Legacy pair", "Fuse both, in a <b>hurry</b>", "Reuse the softmax buffer")
PEAKS = (4.5 * U, 5.0 * U, 2.0 * U)

pytestmark = pytest.mark.browser
expect.set_options(timeout=30_000)  # the first chart makes the script bundle; a small machine may be busy


def sha(index: int) -> str:
    return hashlib.sha1(SUBJECTS[index].encode()).hexdigest()


def result(index: int) -> wire.Result:
    """The measurements of one commit of the story, with the real cost of a step as noise."""
    values = {
        "callable": [1.0],
        "completes": [1.0],
        "step_peak_bytes": [PEAKS[index]] * 2,
        "g_rel_l2_lp": [3.1e-8],
        "step_cpu_seconds": [2.0e-3, 2.1e-3, 2.3e-3],
    }
    facts = {"isa": "AVX512", "threads": 1}
    return wire.Result(
        attempt=uuid.uuid5(uuid.NAMESPACE_URL, sha(index)),
        target="story",
        commit=wire.Commit(
            sha=sha(index),
            parents=[sha(index - 1)] if index else [],
            author="Ada",
            subject=SUBJECTS[index],
            committed_at=START + timedelta(hours=index),
        ),
        suite="demo",
        environment=wire.Environment(device_class="cpu", device="Test CPU", exact=facts, numeric=facts, timing=facts),
        started_at=START,
        finished_at=START,
        units={name: BY_NAME[name].unit for name in values},
        measurements=[wire.Measurement(kernel="fused", case=CASE, values=values)],
    )


TARGET = wire.Target.model_validate(
    {
        "name": "story",
        "repository": "/srv/story.git",
        "paths": ["lossfn.py"],
        "suite": "demo",
        "kernels": [
            {
                "name": "fused",
                "entry": "lossfn:log_prob",
                "arguments": {"logits": "logits", "targets": "tokens"},
                "returns": ["log_prob"],
            }
        ],
    }
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a server with the judged story listens."""
    url = f"sqlite:///{tmp_path_factory.mktemp('dashboard')}/ulpwatch.sqlite3"
    upgrade(url)
    engine = open_engine(url)
    writing = session_factory(engine)
    with writing.begin() as session:
        ingest.register_target(session, TARGET, registered_by="test")
        for index in range(len(SUBJECTS)):
            ingest.ingest(session, result(index), body_digest=sha(index).ljust(64, "0"), posted_by="test")
    judge.judge_pending(writing)
    app = create_app(reading_session_factory(engine), public_read=True, authenticate=None)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()
    engine.dispose()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium."""
    if not CHROMIUM.exists():
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=QUIET)
        yield browser
        browser.close()


def watched(context: BrowserContext) -> tuple[Page, list[str]]:
    """A page, and what its console complains of: errors, warnings and refusals of the content policy alike."""
    complaints: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    page = context.new_page()
    page.on("console", note)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    return page, complaints


def fits(page: Page) -> bool:
    """Neither the page nor a table on it has to be pushed sideways."""
    boxes = "[document.documentElement, ...document.querySelectorAll('.scroll, pre')]"
    return bool(page.evaluate(f"{boxes}.every(box => box.scrollWidth <= box.clientWidth)"))


@pytest.fixture(params=[("light", 1440), ("dark", 390)], ids=["light-wide", "dark-narrow"])
def context(request: pytest.FixtureRequest, browser: Browser) -> Iterator[BrowserContext]:
    """A reader at a desk and one with a telephone in the dark."""
    scheme, width = request.param
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    yield context
    context.close()


def test_one_walks_from_commits_to_a_commit_to_the_history_of_its_metric(address: str, context: BrowserContext) -> None:
    page, complaints = watched(context)
    page.goto(address)
    page.get_by_role("link", name="story", exact=True).click()
    expect(page.get_by_role("heading", name="story")).to_be_visible()
    expect(page.locator("tbody .state-regress")).to_have_text("regress")
    expect(page.get_by_role("link", name="Fuse both, in a <b>hurry</b>")).to_be_visible()
    assert fits(page)

    page.get_by_role("link", name="Fuse both").click()
    expect(page.get_by_label("Verdict")).to_contain_text("CI fails (exit 1)")
    finding = page.locator(".finding")
    expect(finding).to_contain_text("4.50 U")
    expect(finding).to_contain_text("5.00 U")
    assert fits(page)

    finding.get_by_role("link", name=CASE.id).click()
    expect(page.get_by_role("heading", name="peak memory, forward + backward")).to_be_visible()
    expect(page.locator(".plot svg .mark-symbol path").first).to_be_visible()
    assert fits(page)
    assert complaints == []


def test_a_commits_mark_tells_of_it_and_leads_to_it(address: str, context: BrowserContext) -> None:
    page, complaints = watched(context)
    page.goto(f"{address}/targets/story/series/fused/{CASE.id}/step_peak_bytes")
    marks = page.locator(".plot svg .layer_2_marks path")
    expect(marks).to_have_count(len(SUBJECTS))
    marks.nth(1).hover()
    tip = page.locator("#vg-tooltip-element")
    expect(tip).to_be_visible()
    expect(tip).to_contain_text("5.00 U (5.00 MiB)")
    expect(tip).to_contain_text("in a <b>hurry</b>")
    marks.nth(1).click()
    page.wait_for_url(f"**/commits/{sha(1)}")
    assert complaints == []


def test_the_form_leads_to_another_metric(address: str, context: BrowserContext) -> None:
    page, complaints = watched(context)
    page.goto(f"{address}/targets/story/series/fused/{CASE.id}/step_peak_bytes")
    page.get_by_label("Metric").select_option("step_cpu_seconds")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("heading", name="process CPU time, forward + backward")).to_be_visible()
    expect(page.locator(".plot svg")).to_be_visible()
    assert complaints == []


def test_without_javascript_the_server_draws_the_chart(address: str, browser: Browser) -> None:
    context = browser.new_context(java_script_enabled=False)
    page, complaints = watched(context)
    page.goto(f"{address}/targets/story/series/fused/{CASE.id}/step_peak_bytes")
    image = page.locator(".plot img")
    expect(image).to_be_visible()
    assert page.request.get(f"{address}{image.get_attribute('src')}").text().startswith("<svg")
    expect(page.locator("tbody tr")).to_have_count(len(SUBJECTS))
    assert complaints == []
    context.close()


def test_where_drawing_fails_the_servers_image_takes_its_place(address: str, context: BrowserContext) -> None:
    page, _ = watched(context)
    page.route("**/chart.json*", lambda route: route.abort())
    page.goto(f"{address}/targets/story/series/fused/{CASE.id}/step_peak_bytes")
    image = page.locator(".plot img")
    expect(image).to_be_visible()
    expect(image).to_have_js_property("naturalWidth", IMAGE_WIDTH)


def test_no_page_asks_another_host(address: str, context: BrowserContext) -> None:
    page, _ = watched(context)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    paths: Sequence[str] = (
        "/",
        "/targets/story",
        f"/targets/story/commits/{sha(1)}",
        f"/targets/story/series/fused/{CASE.id}/step_peak_bytes",
        "/targets/story/series",
        "/findings",
        "/runners",
    )
    for path in paths:
        page.goto(address + path, wait_until="networkidle")
        assert fits(page), path
    assert len(asked) > len(paths)
    assert [url for url in asked if not url.startswith(address)] == []
