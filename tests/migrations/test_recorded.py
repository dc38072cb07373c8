"""Revisions stand on their own: they import nothing that may change, and lead to what is recorded.

The recorded schemas are `schema_sqlite.txt` and `schema_postgresql.txt`. After a new revision, and
for no other reason, write them again and look at the difference:

    PGQRS_RECORD_SCHEMA=1 python -m pytest tests/migrations/test_recorded.py
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from pgqrs import frozen, schema
from pgqrs.config import parse_dsn
from pgqrs.models import Base
from tests.migrations.describing import describe

HERE = Path(__file__).parent
SCRIPTS = sorted(schema.versions_path().glob("*.py"))
ALLOWED = {"sqlalchemy", "alembic.op", "pgqrs.frozen"}


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            # `from alembic import op` and `from pgqrs import schema` import a module, too.
            whole = base in ("alembic", "pgqrs")
            yield from (f"{base}.{name.name}" for name in node.names) if whole else [base]
        elif isinstance(node, ast.Name) and node.id in ("__import__", "import_module"):
            yield node.id


def of_others(modules: Iterator[str], allowed: set[str]) -> set[str]:
    return {
        module
        for module in modules
        if not any(module == name or module.startswith(f"{name}.") for name in allowed)
    }


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_revision_imports_nothing_that_may_change(script: Path) -> None:
    assert of_others(imported(script), ALLOWED) == set()


def test_what_revisions_are_made_of_imports_nothing_of_pgqrs() -> None:
    modules = of_others(imported(Path(frozen.__file__)), {"sqlalchemy", "alembic.operations"})
    assert not {module for module in modules if module.startswith((".", "pgqrs"))}


@pytest.mark.parametrize(
    "line",
    [
        "from pgqrs.models import Base",
        "from pgqrs import schema",
        "import pgqrs.sqltypes",
        "import pgqrs",
        "from alembic import context",
        "from . import other",
        "def f():\n    from pgqrs.types import X",
        "m = __import__('pgqrs.models')",
    ],
)
def test_other_imports_are_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "0001_a.py").write_text(line)
    assert of_others(imported(tmp_path / "0001_a.py"), ALLOWED)


def test_the_whole_history_leads_to_the_recorded_schema(database: str) -> None:
    engine = create_engine(parse_dsn(database))
    recorded = HERE / f"schema_{engine.dialect.name}.txt"
    with engine.begin() as connection:
        schema.upgrade(connection)
        reached = describe(connection)
    engine.dispose()
    if os.environ.get("PGQRS_RECORD_SCHEMA"):
        recorded.write_text(reached, encoding="utf-8")
    assert reached.splitlines() == recorded.read_text(encoding="utf-8").splitlines()


def test_the_recorded_schemas_have_the_tables_of_the_models() -> None:
    for recorded in HERE.glob("schema_*.txt"):
        lines = recorded.read_text(encoding="utf-8").splitlines()
        tables = {line.split()[1] for line in lines if line.startswith("table ")}
        assert tables == set(Base.metadata.tables)
