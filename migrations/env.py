"""Runs migrations: on the connection that service.db hands over, or, from alembic's own command line, on the
configured database. Makes no decision about the tables; those are in service.models and in versions/.
"""

from typing import Any, Literal

from alembic import context
from alembic.autogenerate.api import AutogenContext
from sqlalchemy import Connection

from service.db import open_engine
from service.models import Base, Instant
from service.settings import Settings


def _plain_type(kind: str, item: Any, _context: AutogenContext) -> str | Literal[False]:
    """Revisions name plain types, so that they stay true when the models change."""
    return "sa.DateTime(timezone=True)" if kind == "type" and isinstance(item, Instant) else False


def _migrate(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=True,  # SQLite changes a table by copying it
        transactional_ddl=True,  # all or nothing, on both engines
        render_item=_plain_type,
    )
    with context.begin_transaction():
        context.run_migrations()


def _migrate_configured_database() -> None:
    engine = open_engine(Settings().database_url, foreign_keys=False)
    with engine.begin() as connection:
        _migrate(connection)
    engine.dispose()


given: Connection | None = context.config.attributes.get("connection")
if given is None:
    _migrate_configured_database()
else:
    _migrate(given)
