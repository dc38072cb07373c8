"""Installing, upgrading and verifying the tables.

The revisions are Alembic's, one linear history for both databases, in `alembic/versions` (inside a
wheel: `pgqrs/_alembic`). Each revision, when applied, writes its own checksum into
`pgqrs_schema_history`. That table, not Alembic's version table, is what a store looks at when it
opens: it is there whoever ran the revisions (`admin.install()`, `alembic upgrade head`, or the
application's own Alembic environment), and reading it needs no Alembic.
"""

from __future__ import annotations

import atexit
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Table, func, inspect, select, text
from sqlalchemy.schema import CreateSchema

from pgqrs import schema_differences
from pgqrs.drivers import join_transaction
from pgqrs.errors import (
    RevisionAltered,
    RevisionMissing,
    RevisionUnknown,
    SchemaNotInstalled,
    SchemaTooNew,
    TablesAltered,
    UpgradeRequired,
)
from pgqrs.frozen import checksum_of
from pgqrs.migrating import one_at_a_time
from pgqrs.models import schema_history

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

VERSION_TABLE = "pgqrs_alembic_version"
INSTALL_LOCK = 0x7067717273  # "pgqrs": any constant, the same in every process


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision script that this pgqrs carries."""

    id: str
    checksum: str


def _scripts() -> Traversable:
    """The same, also inside of a zip: Spark sends packages to executors and servers as such."""
    package = files("pgqrs")
    shipped = package / "_alembic"
    return shipped if shipped.is_dir() else Path(__file__).parent.parent / "alembic"


@cache
def scripts_path() -> Path:
    """The directory with Alembic's `env.py` and `versions`. Alembic needs files: from a zip they are
    copied to a directory of this process.
    """
    found = _scripts()
    if isinstance(found, Path):
        return found
    copied = Path(mkdtemp(prefix="pgqrs-alembic-"))
    atexit.register(rmtree, copied, ignore_errors=True)
    _copy(found, copied)
    return copied


def _copy(source: Traversable, target: Path) -> None:
    for found in source.iterdir():
        if found.is_dir():
            (target / found.name).mkdir()
            _copy(found, target / found.name)
        else:
            (target / found.name).write_bytes(found.read_bytes())


def versions_path() -> Path:
    """The directory an application adds to its own Alembic `version_locations`."""
    return scripts_path() / "versions"


@cache
def revisions() -> tuple[Revision, ...]:
    """The revisions this pgqrs carries, oldest first."""
    return read_revisions(_scripts() / "versions")


def read_revisions(directory: Traversable) -> tuple[Revision, ...]:
    """The revisions of a directory, in the order of their numbered file names."""
    found = {each.name: each for each in directory.iterdir() if _SCRIPT.fullmatch(each.name)}
    return tuple(_read_revision(found[name]) for name in sorted(found))


_SCRIPT = re.compile(r"[0-9].*_.*\.py")


def _read_revision(script: Traversable) -> Revision:
    source = script.read_text(encoding="utf-8")
    declared = re.search(r'^revision = "([^"]+)"$', source, re.MULTILINE)
    if declared is None:
        raise ValueError(f"{script} declares no revision")
    return Revision(declared[1], checksum_of(source))


def applied(connection: Connection) -> dict[str, str]:
    """What the database records: revision → checksum, oldest first. Empty before the first install."""
    if not _exists(connection, schema_history):
        return {}
    return _recorded(connection)


def _recorded(connection: Connection) -> dict[str, str]:
    recorded = select(schema_history.c.revision, schema_history.c.checksum)
    rows = connection.execute(recorded.order_by(schema_history.c.revision))
    return {row.revision: row.checksum for row in rows}


def check(connection: Connection) -> None:
    """Raise if the recorded history does not fit, or a table, an index or a function is missing.

    Two queries: for opening a store.
    """
    names = schema_differences.names(connection, _translated_schema(connection))
    compare(_recorded(connection) if schema_history.name in names else {}, revisions())
    _refuse(schema_differences.missing(names, connection.dialect.name))


def store_id(connection: Connection) -> str:
    """What tells a store from others, by whatever URL it was opened: when its tables were made."""
    first = select(func.min(schema_history.c.applied_at, type_=schema_history.c.applied_at.type))
    made: datetime | None = connection.execute(first).scalar()
    if made is None:
        raise SchemaNotInstalled
    return made.isoformat()


def verify(connection: Connection) -> None:
    """Raise the error that says how the database differs from what this pgqrs needs.

    The recorded history is compared with the revisions, and every table and function with the models.
    """
    compare(applied(connection), revisions())
    _refuse(schema_differences.differences(connection, _translated_schema(connection)))


def _refuse(differences: list[str]) -> None:
    if differences:
        raise TablesAltered(differences)


def compare(recorded: dict[str, str], known: tuple[Revision, ...]) -> None:
    """Raise for the first difference between a recorded history and the known revisions."""
    if not recorded:
        raise SchemaNotInstalled
    head = known[-1].id
    ids = [revision.id for revision in known]
    for id in recorded:
        if id not in ids:
            raise SchemaTooNew(id) if id > head else RevisionUnknown(id)
    last = max(ids.index(id) for id in recorded)
    for revision in known[: last + 1]:
        if revision.id not in recorded:
            raise RevisionMissing(revision.id)
        if recorded[revision.id] != revision.checksum:
            raise RevisionAltered(revision.id)
    if last + 1 < len(known):
        raise UpgradeRequired(current=ids[last], wanted=head)


def upgrade(connection: Connection, *, schema: str | None = None, to: str = "head") -> None:
    """Apply what is missing, in the transaction of this connection. Nothing to do is fine.

    A history that was tampered with is refused before anything is changed. This also works inside
    an application's own Alembic environment.
    """
    with in_schema(connection, schema):
        prepare(connection, schema)
        recorded = applied(connection)
        if recorded:
            try:
                compare(recorded, revisions())
            except UpgradeRequired:
                pass
            else:
                return
        _run(connection, schema, lambda script, current: script._upgrade_revs(to, current))


def downgrade(connection: Connection, *, to: str, schema: str | None = None) -> None:
    """Go back to a revision, or to "base": nothing of pgqrs remains but an empty version table."""
    with in_schema(connection, schema):
        _run(connection, schema, lambda script, current: script._downgrade_revs(to, current))


def _run(
    connection: Connection, schema: str | None, steps: Callable[[ScriptDirectory, Any], Any]
) -> None:
    """Run revisions without Alembic's `env.py`, which cannot run inside another one."""
    from alembic.operations import Operations
    from alembic.script import ScriptDirectory

    script = ScriptDirectory(str(scripts_path()))
    context = _migration_context(connection, schema, fn=lambda rev, _: steps(script, rev))
    with one_at_a_time(), Operations.context(context):
        context.run_migrations()


def _migration_context(
    connection: Connection, schema: str | None, **options: Any
) -> MigrationContext:
    from alembic.migration import MigrationContext

    return MigrationContext.configure(
        connection,
        opts={"version_table": VERSION_TABLE, "version_table_schema": schema, **options},
    )


@contextmanager
def in_schema(connection: Connection, schema: str | None) -> Iterator[None]:
    """Let our tables be in this schema for the statements inside, and leave no trace of it."""
    if schema is None:
        yield
        return
    before = connection.get_execution_options().get("schema_translate_map")
    connection.execution_options(schema_translate_map={None: schema})
    try:
        yield
    finally:
        connection.execution_options(schema_translate_map=before)


def prepare(connection: Connection, schema: str | None) -> None:
    """Before any revision runs: one installer at a time, the schema there, Alembic told of our
    history.
    """
    join_transaction(connection)
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": INSTALL_LOCK})
        if schema is not None and not inspect(connection).has_schema(schema):
            connection.execute(CreateSchema(schema, if_not_exists=True))
    _stamp_from_history(connection, schema)


def _stamp_from_history(connection: Connection, schema: str | None) -> None:
    """When somebody else's Alembic ran our revisions, let ours know how far it came."""
    recorded = applied(connection)
    if not recorded:
        return
    from alembic.script import ScriptDirectory

    context = _migration_context(connection, schema)
    if not context.get_current_heads():
        context.stamp(ScriptDirectory(str(scripts_path())), max(recorded))


def include_name(name: str | None, kind: str, _parents: Any) -> bool:
    """Alembic's filter: in a shared database only our tables are our business."""
    return kind != "table" or (name or "").startswith("pgqrs_")


def exclude_name(name: str | None, kind: str, _parents: Any) -> bool:
    """The opposite, for an application's own Alembic environment: leave pgqrs' tables alone."""
    return kind != "table" or not (name or "").startswith("pgqrs_")


def _translated_schema(connection: Connection) -> str | None:
    translations = connection.get_execution_options().get("schema_translate_map") or {}
    translated = translations.get(None)
    return None if translated is None else str(translated)


def _exists(connection: Connection, table: Table) -> bool:
    return inspect(connection).has_table(table.name, schema=_translated_schema(connection))
