"""Staged messages: many in a row, where there are arrays. What was staged before is written again."""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import (
    BigId,
    Json,
    Small,
    UTCDateTime,
    forget,
    is_applied,
    leave_uncompressed,
    leave_unlogged,
    many,
    record,
    schema_of,
)

revision = "pgqrs_0011"
down_revision = "pgqrs_0010"
branch_labels = None
depends_on = None

COLUMNS = {
    "priority": Small,
    "eta": UTCDateTime,
    "expires_at": UTCDateTime,
    "dedup_key": sa.Text(),
    "group_key": sa.Text(),
    "codec": sa.Text(),
    "headers": Json,
    "payload": Json,
}


def upgrade() -> None:
    if is_applied(op, revision):
        return
    op.drop_table("pgqrs_staged", schema=schema_of(op))
    create_staged({name: many(kind) for name, kind in COLUMNS.items()})
    leave_uncompressed(op, "pgqrs_staged", "payload")
    record(op, revision, __file__)


def downgrade() -> None:
    forget(op, revision)
    op.drop_table("pgqrs_staged", schema=schema_of(op))
    create_staged(COLUMNS)


def create_staged(columns: dict[str, sa.types.TypeEngine]) -> None:
    op.create_table(
        "pgqrs_staged",
        sa.Column("attempt", BigId, nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        *(sa.Column(name, kind, nullable=name != "payload") for name, kind in columns.items()),
        sqlite_strict=True,
    )
    # What a crash of the server would take from here is counted before it is published.
    leave_unlogged(op, "pgqrs_staged")
