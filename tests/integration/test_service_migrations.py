"""The tables that the migrations make are those of the models, on both engines."""

import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect

from service.db import alembic_config, open_engine, require_current_schema, upgrade
from service.errors import SchemaBehind
from service.models import Base

ROOT = Path(__file__).resolve().parents[2]


def test_the_migrated_tables_equal_the_models(blank_database_url: str) -> None:
    upgrade(blank_database_url)
    engine = open_engine(blank_database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
        checks = {
            (table, check["name"])
            for table in inspect(connection).get_table_names()
            for check in inspect(connection).get_check_constraints(table)
        }
    engine.dispose()
    wanted = {
        (table.name, str(constraint.name))
        for table in Base.metadata.tables.values()
        for constraint in table.constraints
        if str(constraint.name).startswith("ck_")
    }
    assert checks == wanted


def test_a_downgrade_to_nothing_leaves_nothing(blank_database_url: str) -> None:
    upgrade(blank_database_url)
    engine = open_engine(blank_database_url, foreign_keys=False)
    with engine.begin() as connection:
        command.downgrade(alembic_config(connection), "base")
    with engine.connect() as connection:
        assert inspect(connection).get_table_names() == ["alembic_version"]
    engine.dispose()


def test_a_schema_that_is_behind_is_refused_with_the_command_that_helps(blank_database_url: str) -> None:
    engine = open_engine(blank_database_url)
    with pytest.raises(SchemaBehind, match="ulpwatch db upgrade"):
        require_current_schema(engine)
    upgrade(blank_database_url)
    require_current_schema(engine)
    engine.dispose()


def test_two_upgrades_at_once_both_succeed(blank_database_url: str) -> None:
    program = f"from service.db import upgrade; upgrade({blank_database_url!r})"
    running = [
        subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)
    ]
    assert [process.communicate()[1] for process in running] == ["", ""]
    assert [process.returncode for process in running] == [0, 0]
