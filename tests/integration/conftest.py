"""For the integration tier: an empty, migrated database on each engine, and builders of wire payloads.

A test that takes `database_url` (or what is built on it) runs once on SQLite and once on PostgreSQL.
"""

import hashlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psycopg
import pytest
import uvicorn
from psycopg import sql
from sqlalchemy import Engine, make_url
from sqlalchemy.orm import Session

from service import wire
from service.app import create_app
from service.auth import SCOPES, create_token
from service.catalogue import BY_NAME
from service.db import SessionFactory, open_engine, session_factory, upgrade
from service.models import Base
from service.settings import Settings

POSTGRES_URL = os.environ.get("ULPWATCH_TEST_POSTGRES_URL", "postgresql+psycopg://postgres@127.0.0.1:5432/postgres")
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


# --- Databases ------------------------------------------------------------------------------------------------------


def _administer(*statements: sql.Composed, database: str | None = None) -> None:
    """Run statements in one transaction each, or all in one on a named database."""
    url = make_url(POSTGRES_URL).set(drivername="postgresql")
    url = url if database is None else url.set(database=database)
    with psycopg.connect(
        url.render_as_string(hide_password=False), autocommit=database is None, connect_timeout=3
    ) as connection:
        for statement in statements:
            connection.execute(statement)


def _create(name: str) -> str:
    _administer(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    return make_url(POSTGRES_URL).set(database=name).render_as_string(hide_password=False)


def _empty(name: str) -> None:
    """Delete every row and end what other connections were at: 40 times faster than another database."""
    others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = {} AND pid <> pg_backend_pid()"
    tables = [
        sql.SQL("DELETE FROM {}").format(sql.Identifier(table.name)) for table in reversed(Base.metadata.sorted_tables)
    ]
    _administer(sql.SQL(others).format(sql.Literal(name)), *tables, database=name)


def _drop(name: str) -> None:
    _administer(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def postgres_database() -> Iterator[str]:
    """The name of a migrated PostgreSQL database, one a test process."""
    name = f"ulpwatch_test_{uuid.uuid4().hex}"
    try:
        url = _create(name)
    except psycopg.OperationalError:
        pytest.skip("no PostgreSQL answered")
    upgrade(url)
    yield name
    _drop(name)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy."""
    path = tmp_path_factory.mktemp("template") / "ulpwatch.sqlite3"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def postgres_url(postgres_database: str) -> Iterator[str]:
    """An empty, migrated PostgreSQL database. Its ids do not begin at 1."""
    yield make_url(POSTGRES_URL).set(database=postgres_database).render_as_string(hide_password=False)
    _empty(postgres_database)


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """An empty, migrated SQLite database."""
    path = tmp_path / "ulpwatch.sqlite3"
    shutil.copy(sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """An empty, migrated database of each engine."""
    name = {"sqlite": "sqlite_url", "postgresql": "postgres_url"}[request.param]
    return str(request.getfixturevalue(name))


@pytest.fixture
def blank_postgres_url() -> Iterator[str]:
    """A PostgreSQL database without tables."""
    name = f"ulpwatch_blank_{uuid.uuid4().hex}"
    try:
        url = _create(name)
    except psycopg.OperationalError:
        pytest.skip("no PostgreSQL answered")
    yield url
    _drop(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def blank_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables, of each engine."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/blank.sqlite3"
    return str(request.getfixturevalue("blank_postgres_url"))


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """An engine on the migrated database."""
    engine = open_engine(database_url)
    yield engine
    engine.dispose()


@pytest.fixture(name="session_factory")
def writing_session_factory(engine: Engine) -> SessionFactory:
    """Makes sessions that may write: `with session_factory.begin() as session:`."""
    return session_factory(engine)


@pytest.fixture
def session(session_factory: SessionFactory) -> Iterator[Session]:
    """One session; a test that needs its rows in another one commits."""
    with session_factory() as session:
        yield session


# --- The service ----------------------------------------------------------------------------------------------------


@contextmanager
def serve(settings: Settings) -> Iterator[httpx.Client]:
    """A client of the service on a free port, judge included; the server is gone afterwards."""
    server = uvicorn.Server(uvicorn.Config(create_app(settings), port=0, log_level="critical", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the service did not start"
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, verify=False, trust_env=False) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def running_service() -> Callable[[Settings], AbstractContextManager[httpx.Client]]:
    """Starts a service with settings of the test's own: `with running_service(settings) as client:`."""
    return serve


@pytest.fixture
def settings(database_url: str) -> Settings:
    """The service's settings on the migrated database; limits are small, so that tests can reach them."""
    return Settings(database_url=database_url, body_bytes_max=1 << 20, judge_interval_seconds=0.05)


@pytest.fixture
def client(settings: Settings) -> Iterator[httpx.Client]:
    """A client of the running service. Authenticate with `headers`."""
    with serve(settings) as client:
        yield client


@pytest.fixture
def headers(session_factory: SessionFactory) -> dict[str, dict[str, str]]:
    """The request headers of a token of each scope."""
    with session_factory.begin() as session:
        secrets = {scope: create_token(session, scope).secret for scope in SCOPES}
    return {scope: {"Authorization": f"Bearer {secret}"} for scope, secret in secrets.items()}


# --- Payloads -------------------------------------------------------------------------------------------------------


def sha(name: str) -> str:
    """A full commit id for a short name."""
    return hashlib.sha1(name.encode()).hexdigest()


def commit(name: str, parents: Sequence[str] = (), *, watched: str | None = None, minute: int = 0) -> wire.Commit:
    """A commit by short names; `watched` names the content of its watched paths, its own name by default."""
    return wire.Commit(
        sha=sha(name),
        parents=[sha(parent) for parent in parents],
        author="Ada",
        subject=f"commit {name}",
        committed_at=EPOCH + timedelta(minutes=minute),
        watched_digest=hashlib.sha256((watched or name).encode()).hexdigest(),
    )


def target(name: str = "demo", **changes: Any) -> wire.Target:
    """A target with one kernel, `fused`, and `legacy` as its control."""
    kernel = {
        "name": "fused",
        "entry": "lossfn:log_prob",
        "arguments": {"logits": "logits", "targets": "tokens"},
        "returns": ["log_prob"],
        "control": "legacy",
    }
    fields: dict[str, Any] = {"name": name, "repository": "/srv/demo.git", "paths": ["lossfn.py"], "kernels": [kernel]}
    return wire.Target.model_validate(fields | {"suite": "demo"} | changes)


def environment(*, torch: str = "2.13.0", mhz: float = 2400.0, device_class: Any = "cpu") -> wire.Environment:
    """A host; another `torch` is another identity, another `mhz` is not."""
    facts = {"isa": "AVX512", "threads": 1, "torch": torch}
    return wire.Environment(
        device_class=device_class,
        device="Test CPU",
        exact=dict(facts),
        numeric={**facts, "oracle": "1"},
        timing={**facts, "model": "Test CPU"},
        volatile={"mhz": mhz},
    )


VALUES: Mapping[str, Sequence[float]] = {
    "callable": [1.0],
    "completes": [1.0],
    "step_peak_bytes": [2097152.0, 2097152.0],
    "operations": [24.0],
    "g_rel_l2_lp": [3.1e-8],
}


def measurement(
    *,
    kernel: str = "fused",
    role: Any = "kernel",
    case: wire.Case | None = None,
    outcome: Any = "ok",
    values: Mapping[str, Sequence[float]] = VALUES,
    nonfinite: Sequence[str] = (),
    notes: Mapping[str, str] | None = None,
    inputs: str = "inputs",
) -> wire.Measurement:
    """A kernel on a case, by default a healthy one."""
    return wire.Measurement(
        kernel=kernel,
        role=role,
        case=case or wire.Case(tokens=64, vocabulary=4096),
        outcome=outcome,
        inputs_digest=hashlib.sha256(inputs.encode()).hexdigest(),
        values={name: list(samples) for name, samples in values.items()},
        nonfinite=list(nonfinite),
        notes=dict(notes or {}),
    )


def result(
    of: wire.Commit,
    measurements: Sequence[wire.Measurement] | None = None,
    *,
    target: str = "demo",
    attempt: uuid.UUID | None = None,
    job: int | None = None,
    host: wire.Environment | None = None,
    suite: str = "demo",
) -> wire.Result:
    """A whole result; by default one healthy measurement."""
    rows = [measurement()] if measurements is None else list(measurements)
    names = {name for row in rows for name in row.values}
    return wire.Result(
        attempt=attempt or uuid.uuid4(),
        job=job,
        target=target,
        commit=of,
        suite=suite,
        environment=host or environment(),
        started_at=EPOCH,
        finished_at=EPOCH + timedelta(seconds=30),
        units={name: BY_NAME[name].unit for name in sorted(names)},
        measurements=rows,
    )


@pytest.fixture(scope="session")
def payloads() -> SimpleNamespace:
    """The builders above, for test modules: `payloads.result(payloads.commit("a"))`."""
    return SimpleNamespace(
        sha=sha,
        commit=commit,
        target=target,
        environment=environment,
        measurement=measurement,
        result=result,
        values=VALUES,
    )
