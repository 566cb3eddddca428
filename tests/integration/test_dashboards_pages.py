"""The pages over a real database of each engine: what they say, whom they let in, what they refuse."""

import asyncio
import csv
import io
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, select, update
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp

from dashboards.app import create_app
from service import ingest, job_queue, judge
from service.db import SessionFactory, reading_session_factory
from service.models import Finding, Job

GOOD = "ulpw_good"
SERIES = "/targets/demo/series/fused/n64-v4096-float32-gradient"


def values(payloads: SimpleNamespace, **changes: Any) -> dict[str, Any]:
    return dict(payloads.values) | changes


@pytest.fixture
def story(session_factory: SessionFactory, payloads: SimpleNamespace) -> SimpleNamespace:
    """Four commits: the first, one with 3 U instead of 2, documentation on top, and one that cannot be imported."""
    fat = values(payloads, step_peak_bytes=[3145728.0, 3145728.0])
    base = payloads.commit("base", minute=0)
    grown = payloads.commit("grown", ["base"], minute=1).model_copy(
        update={"subject": "<script>alert(1)</script> & more", "author": "<b>Eve</b>"}
    )
    docs = payloads.commit("docs", ["grown"], watched="grown", minute=2)
    broken = payloads.commit("broken", ["docs"], minute=3)
    cannot = payloads.measurement(
        outcome="unmeasurable",
        values={"callable": [0.0]},
        notes={"outcome": "ModuleNotFoundError: No module named 'lossfn'"},
    )
    control = payloads.measurement(kernel="legacy", role="control")
    with session_factory.begin() as session:
        ingest.register_target(session, payloads.target(), registered_by="test")
        ingest.register_target(session, payloads.target("idle"), registered_by="test")
        ingest.register_commits(session, "demo", [docs])
        for commit, rows in (
            (base, [payloads.measurement(), control]),
            (grown, [payloads.measurement(values=fat), control]),
            (broken, [cannot, control]),
        ):
            result = payloads.result(commit, rows)
            ingest.ingest(session, result, body_digest=str(result.attempt).replace("-", "") * 2, posted_by="test")
    judge.judge_pending(session_factory)
    return SimpleNamespace(**{name: payloads.sha(name) for name in ("base", "grown", "docs", "broken")})


@dataclass(frozen=True)
class Reader:
    """A client of an ASGI app in this process."""

    app: ASGIApp

    def get(self, path: str, *, method: str = "GET", follow_redirects: bool = True, **fields: Any) -> httpx.Response:
        """The answer to one request; a fault of the app is an answer too."""

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://pages") as client:
                return await client.request(method, path, follow_redirects=follow_redirects, **fields)

        return asyncio.run(ask())


def pages(engine: Engine, *, token: str | None = None) -> Reader:
    """The pages, public unless only one token may read them."""

    def authenticate(presented: str) -> bool:
        return presented == token

    factory = reading_session_factory(engine)
    return Reader(create_app(factory, public_read=token is None, authenticate=authenticate))


@pytest.fixture
def client(engine: Engine) -> Reader:
    """Public pages."""
    return pages(engine)


def test_targets_show_the_newest_verdict_and_what_is_open(client: Reader, story: SimpleNamespace) -> None:
    text = client.get("/").text
    assert 'href="/targets/demo"' in text
    assert "unjudged" in text  # the idle target
    assert 'href="/findings?target=demo"' in text


def test_commits_show_state_subject_and_baseline(client: Reader, story: SimpleNamespace) -> None:
    text = client.get("/targets/demo").text
    assert text.index(story.broken[:7]) < text.index(story.docs[:7]) < text.index(story.base[:7])
    assert text.count("state-regress") == 2  # the memory and the import
    assert "state-no-baseline" in text
    assert "state-pass" in text


def test_older_commits_are_a_page_away(client: Reader, story: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dashboards.routes.COMMITS_A_PAGE", 2)
    first = client.get("/targets/demo").text
    assert f"/targets/demo?before={story.docs}" in first
    assert f"/commits/{story.base}" not in first
    second = client.get(f"/targets/demo?before={story.docs}").text
    assert f"/commits/{story.base}" in second
    assert f"/commits/{story.broken}" not in second


def test_a_commits_page_has_its_finding_with_before_after_limit_rule_and_raw_numbers(
    client: Reader, story: SimpleNamespace
) -> None:
    text = client.get(f"/targets/demo/commits/{story.grown}").text
    assert "CI fails (exit 1)" in text
    for expected in ("2.00 U", "3.00 U", "2.00 MiB", "1.50x more memory", "3145728 x2", "max(4 KiB, 0.1 %)"):
        assert expected in text, expected
    assert "ulpwatch measure --target demo.toml" in text
    assert "control, measured beside and never judged" in text


def test_what_a_commit_says_stays_text(client: Reader, story: SimpleNamespace) -> None:
    for path in ("/targets/demo", f"/targets/demo/commits/{story.grown}", f"{SERIES}/step_peak_bytes"):
        text = client.get(path).text
        assert "<script>alert" not in text
        assert "<b>Eve</b>" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text


def test_a_commit_that_inherits_says_from_whom_and_lists_the_open_finding(
    client: Reader, story: SimpleNamespace
) -> None:
    text = client.get(f"/targets/demo/commits/{story.docs}").text
    assert "inherits the measurements of" in text
    assert "not this one's doing" in text
    assert "ulpwatch job add" in text


def test_a_commit_that_cannot_be_measured_says_why(client: Reader, story: SimpleNamespace) -> None:
    text = client.get(f"/targets/demo/commits/{story.broken}").text
    assert "unmeasurable" in text
    assert "ModuleNotFoundError" in text


def test_the_first_measurement_is_undecided_and_not_pass(client: Reader, story: SimpleNamespace) -> None:
    text = client.get(f"/targets/demo/commits/{story.base}").text
    assert "no-baseline" in text
    assert "exit 2" in text
    assert "CI passes" not in text


def test_a_prefix_leads_to_the_whole_commit_id(client: Reader, story: SimpleNamespace) -> None:
    answer = client.get(f"/targets/demo/commits/{story.grown[:8]}", follow_redirects=False)
    assert answer.status_code == 303
    assert answer.headers["location"].endswith(f"/targets/demo/commits/{story.grown}")


def test_a_series_page_has_its_values_and_the_way_to_the_others(client: Reader, story: SimpleNamespace) -> None:
    text = client.get(f"{SERIES}/step_peak_bytes").text
    assert "1.50x more memory" in text
    assert '<option value="operations">' in text
    assert f"{SERIES}/step_peak_bytes/chart.svg" in text
    chosen = {"kernel": "fused", "case_id": "n64-v4096-float32-gradient", "metric": "operations"}
    answer = client.get("/targets/demo/series", params=chosen, follow_redirects=False)
    assert answer.headers["location"].endswith(f"{SERIES}/operations")
    assert f"{SERIES}/operations" in client.get("/targets/demo/series").text


def test_a_chart_comes_as_specification_image_and_csv(client: Reader, story: SimpleNamespace) -> None:
    spec = client.get(f"{SERIES}/step_peak_bytes/chart.json").json()
    assert [row["value"] for row in spec["datasets"]["valued"]] == [2.0, 3.0]
    assert spec["datasets"]["valued"][1]["address"] == f"/targets/demo/commits/{story.grown}"
    svg = client.get(f"{SERIES}/step_peak_bytes/chart.svg?theme=dark")
    assert svg.headers["content-type"] == "image/svg+xml"
    assert svg.text.startswith("<svg")
    assert client.get(f"{SERIES}/step_peak_bytes/chart.png").content.startswith(b"\x89PNG")
    lines = list(csv.DictReader(io.StringIO(client.get(f"{SERIES}/step_peak_bytes/samples.csv").text)))
    assert [line["value"] for line in lines] == ["2097152", "2097152", "3145728", "3145728", ""]
    assert {line["unit"] for line in lines} == {"byte"}


def test_findings_are_listed_and_each_has_its_page(client: Reader, story: SimpleNamespace) -> None:
    text = client.get("/findings").text
    assert "-&gt; 3.00 U" in text
    number = text.partition('href="/findings/')[2].partition('"')[0]
    one = client.get(f"/findings/{number}").text
    assert "What happened to it" in one
    assert "No open finding" in client.get("/findings?target=idle").text


def test_a_recovered_finding_says_when_and_stands_below_the_open_ones(
    client: Reader, story: SimpleNamespace, session_factory: SessionFactory, payloads: SimpleNamespace
) -> None:
    mended = payloads.commit("mended", ["broken"], minute=4)
    worse = values(payloads, operations=[48.0])
    again = payloads.commit("again", ["mended"], minute=5)
    with session_factory.begin() as session:
        for number, commit, measured in (("7", mended, None), ("8", again, worse)):
            rows = [payloads.measurement(values=measured or payloads.values)]
            ingest.ingest(session, payloads.result(commit, rows), body_digest=number * 64, posted_by="test")
    judge.judge_pending(session_factory)
    text = client.get("/findings?all=1").text
    items = text.split("<li>")[1:]
    assert ["recovered at" in item for item in items] == [False, True, True]
    assert f">{again.sha[:7]}<" in items[0]
    assert 'recovered at <time class="nowrap" datetime="20' in items[1]
    assert client.get("/findings").text.count("<li>") == 1
    number = items[1].partition('href="/findings/')[2].partition('"')[0]
    assert "recovered at <time" in client.get(f"/findings/{number}").text


def test_closed_findings_have_pages_of_their_own(
    client: Reader, story: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, session_factory: SessionFactory
) -> None:
    with session_factory.begin() as session:
        first, second = session.scalars(select(Finding.id).order_by(Finding.id)).all()
        session.execute(update(Finding).values(state="dismissed"))
    monkeypatch.setattr("dashboards.routes.FINDINGS_A_PAGE", 1)
    newest = client.get("/findings?all=1").text
    assert (f"/findings/{second}" in newest, f"/findings/{first}" in newest) == (True, False)
    assert f"?before={second}&amp;all=1" in newest or f"?before={second}&all=1" in newest
    assert f"/findings/{first}" in client.get(f"/findings?before={second}&all=1").text


def test_only_a_job_that_runs_shows_its_progress(
    client: Reader, story: SimpleNamespace, session_factory: SessionFactory
) -> None:
    with session_factory.begin() as session:
        queued = job_queue.enqueue(session, target="demo", commit=story.base)
        lease = {"state": "leased", "lease_expires_at": datetime.now(UTC), "progress": "case 3 of 9"}
        session.execute(update(Job).where(Job.id == queued.id).values(**lease, failure="no network"))
    text = client.get("/runners").text
    assert ("case 3 of 9" in text, "no network" in text) == (True, False)
    with session_factory.begin() as session:
        ended = {"state": "failed", "lease_expires_at": None, "open_key": None}
        session.execute(update(Job).where(Job.id == queued.id).values(**ended))
    text = client.get("/runners").text
    assert ("case 3 of 9" in text, "no network" in text) == (False, True)


def test_empty_pages_say_what_to_do_next(client: Reader) -> None:
    assert "ulpwatch target add" in client.get("/").text
    assert "ulpwatch demo" in client.get("/findings").text
    assert "ulpwatch runner" in client.get("/runners").text


def test_a_target_without_commits_says_what_to_do_next(client: Reader, story: SimpleNamespace) -> None:
    assert "ulpwatch job add" in client.get("/targets/idle").text
    assert "ulpwatch job add" in client.get("/targets/idle/series").text


ABSENT = {
    "/nothing": 404,
    "/targets/nobody": 404,
    "/targets/nobody/series": 404,
    "/targets/demo/commits/0123456789": 404,
    "/targets/demo/commits/zzz": 404,
    "/targets/demo%00": 404,
    "/targets/demo?before=nowhere": 404,
    "/targets/demo?before=%00": 404,
    f"{SERIES}/colour": 404,
    f"{SERIES}/ent_abs_max": 404,
    f"{SERIES}/step_peak_bytes/chart.svg?theme=pink": 400,
    "/targets/demo/series/ghost/n64/operations": 404,
    "/targets/demo/series?kernel=a/b&case_id=c&metric=d": 200,
    "/findings/999999": 404,
    "/findings/99999999999999999999": 404,
    "/findings?before=x": 400,
    "/findings?before=%C2%B2": 400,
    "/findings?target=nobody": 404,
    "/static/0/style.css": 404,
    "/static/0/..%2Fapp.py": 404,
}


def test_what_is_not_there_is_a_page_that_says_so(client: Reader, story: SimpleNamespace) -> None:
    answers = {path: client.get(path) for path in ABSENT}
    assert {path: answer.status_code for path, answer in answers.items()} == ABSENT
    assert all("</html>" in answer.text for answer in answers.values())


def test_pages_are_only_read(client: Reader, story: SimpleNamespace) -> None:
    assert client.get("/targets/demo", method="POST").status_code == 405


def test_every_answer_forbids_inline_scripts_and_other_origins(client: Reader, story: SimpleNamespace) -> None:
    for path in ("/", "/nothing", "/runners", f"{SERIES}/operations/chart.json"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy, path
        assert "unsafe" not in policy, path
        assert "http" not in policy, path
        assert headers["x-content-type-options"] == "nosniff", path


def test_a_fault_of_ours_shows_no_internals(
    client: Reader, story: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(session: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("service.queries.targets", fail)
    answer = client.get("/")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_assets_may_be_kept_for_ever_and_come_compressed(client: Reader) -> None:
    text = client.get("/").text
    address = "/static/" + text.partition('href="/static/')[2].partition('"')[0]
    plain = client.get(address, headers={"accept-encoding": "identity"})
    assert "immutable" in plain.headers["cache-control"]
    packed = client.get(address)
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == plain.content
    assert int(packed.headers["content-length"]) < len(plain.content) / 2


def test_private_pages_want_a_token_and_say_how_to_get_one(engine: Engine, story: SimpleNamespace) -> None:
    client = pages(engine, token=GOOD)
    for path in ("/", "/targets/demo", f"{SERIES}/step_peak_bytes/samples.csv", "/nothing"):
        refused = client.get(path)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic")
        assert "ulpwatch token create --scope read" in refused.text
        assert "demo" not in refused.text
        assert client.get(path, auth=("me", "ulpw_bad")).status_code == 401
        known = 404 if path == "/nothing" else 200
        assert client.get(path, auth=("me", GOOD)).status_code == known
        assert client.get(path, headers={"authorization": f"Bearer {GOOD}"}).status_code == known


def test_the_page_that_refuses_has_its_style(engine: Engine) -> None:
    client = pages(engine, token=GOOD)
    address = "/static/" + client.get("/").text.partition('href="/static/')[2].partition('"')[0]
    assert client.get(address).status_code == 200
    assert client.get("/static/../targets").status_code == 401


def test_the_pages_work_below_another_path(engine: Engine, story: SimpleNamespace) -> None:
    client = Reader(Starlette(routes=[Mount("/watch", pages(engine, token=GOOD).app)]))
    assert 'href="/watch/targets/demo"' in client.get("/watch/", auth=("me", GOOD)).text
    assert client.get("/watch/targets/demo", auth=("me", GOOD)).status_code == 200
    assert client.get("/watch/targets/demo").status_code == 401
