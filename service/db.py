"""Connects to the database: engines, session factories, the schema's version. Knows no table and no query.

SQLite runs in WAL mode. A writing transaction begins IMMEDIATE there, so that one writer at a time reads and changes
the rows; a reading one begins DEFERRED and waits for nobody.
"""

import sqlite3
import time
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.orm import Session, sessionmaker

from service.errors import SchemaBehind

MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"
_BUSY_TIMEOUT_SECONDS = 30
_UPGRADE_LOCK = 0x756C7077  # "ulpw": the PostgreSQL advisory lock that serialises upgrades

SessionFactory = sessionmaker[Session]


def open_engine(database_url: str, *, foreign_keys: bool = True) -> Engine:
    """An engine for a SQLite file or PostgreSQL. Makes the directory of a SQLite file, never a table."""
    url = make_url(database_url)
    if url.get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True)
    if url.database in {None, "", ":memory:"}:
        raise ValueError(f"{database_url}: the service needs a SQLite file, as in sqlite:///./ulpwatch.sqlite3")
    Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, connect_args={"timeout": _BUSY_TIMEOUT_SECONDS})
    _prepare_sqlite(engine, foreign_keys=foreign_keys)
    return engine


def _prepare_sqlite(engine: Engine, *, foreign_keys: bool) -> None:
    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None  # the driver begins no transaction of its own; `begin` below does
        _enter_wal(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        reading = connection.get_execution_options().get("reading", False)
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _enter_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to WAL, for good. SQLite does not wait for the lock that the first switch needs, so this does."""
    deadline = time.monotonic() + _BUSY_TIMEOUT_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def session_factory(engine: Engine) -> SessionFactory:
    """Sessions for transactions that may write."""
    return sessionmaker(engine, expire_on_commit=False)


def reading_session_factory(engine: Engine) -> SessionFactory:
    """Sessions for transactions that only read: they never wait for a writer; PostgreSQL refuses a write in them."""
    reading = engine.execution_options(reading=True)
    if engine.dialect.name == "postgresql":
        reading = reading.execution_options(postgresql_readonly=True)
    return sessionmaker(reading, expire_on_commit=False)


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, independent of the working directory and of alembic.ini."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def upgrade(database_url: str, revision: str = "head") -> None:
    """Make or upgrade the tables, in one transaction. Two at once wait for each other, then find nothing to do."""
    engine = open_engine(database_url, foreign_keys=False)  # SQLite can only change a table by copying it
    try:
        with engine.begin() as connection:
            if engine.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
            command.upgrade(alembic_config(connection), revision)
    finally:
        engine.dispose()


def require_current_schema(engine: Engine) -> None:
    """Raise SchemaBehind, naming the command that helps, unless the tables are those of this version."""
    wanted = ScriptDirectory.from_config(alembic_config()).get_current_head()
    with engine.connect().execution_options(reading=True) as connection:
        found = MigrationContext.configure(connection).get_current_revision()
    if found != wanted:
        raise SchemaBehind(
            f"the database's tables are at revision {found or 'none'} and this version needs {wanted}: "
            "run `ulpwatch db upgrade`"
        )
