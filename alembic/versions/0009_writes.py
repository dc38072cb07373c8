"""Writes in bulk, by many at once: prepared in parts, and made exactly once."""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import (
    BigId,
    Json,
    Small,
    UTCDateTime,
    forget,
    is_applied,
    leave_unlogged,
    record,
    schema_of,
)

revision = "pgqrs_0009"
down_revision = "pgqrs_0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if is_applied(op, revision):
        return
    op.create_table(
        "pgqrs_writes",
        sa.Column("write_id", sa.Text, nullable=False),
        sa.Column("queue_id", BigId, nullable=False),
        sa.Column("mode", sa.Text, nullable=False),
        sa.Column("parts", sa.Integer, nullable=True),
        sa.Column("message_ct", BigId, nullable=True),
        sa.Column("created_at", UTCDateTime, nullable=False),
        sa.Column("finished_at", UTCDateTime, nullable=True),
        sa.CheckConstraint("mode IN ('staged', 'part-key')", name=op.f("ck_pgqrs_writes_mode")),
        sa.PrimaryKeyConstraint("write_id", name="pk_pgqrs_writes"),
        sqlite_strict=True,
    )
    op.create_table(
        "pgqrs_write_parts",
        sa.Column("write_id", sa.Text, nullable=False),
        sa.Column("part", sa.Integer, nullable=False),
        sa.Column("attempt", BigId, nullable=False),
        sa.Column("message_ct", BigId, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("stored_at", UTCDateTime, nullable=False),
        sa.PrimaryKeyConstraint("write_id", "part", "attempt", name="pk_pgqrs_write_parts"),
        sqlite_strict=True,
    )
    op.create_table(
        "pgqrs_staged",
        sa.Column("attempt", BigId, nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("priority", Small, nullable=True),
        sa.Column("eta", UTCDateTime, nullable=True),
        sa.Column("expires_at", UTCDateTime, nullable=True),
        sa.Column("dedup_key", sa.Text, nullable=True),
        sa.Column("group_key", sa.Text, nullable=True),
        sa.Column("codec", sa.Text, nullable=True),
        sa.Column("headers", Json, nullable=True),
        sa.Column("payload", Json, nullable=False),
        sqlite_strict=True,
    )
    # What a crash of the server would take from here is counted before it is published.
    leave_unlogged(op, "pgqrs_staged")
    record(op, revision, __file__)


def downgrade() -> None:
    forget(op, revision)
    for table in ("staged", "write_parts", "writes"):
        op.drop_table(f"pgqrs_{table}", schema=schema_of(op))
