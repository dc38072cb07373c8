"""Unique keys, groups, and limits of queues."""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import (
    BigId,
    Json,
    Seconds,
    Small,
    UTCDateTime,
    forget,
    is_applied,
    record,
    schema_of,
)

revision = "pgqrs_0007"
down_revision = "pgqrs_0006"
branch_labels = None
depends_on = None

LIMITS = {
    "max_in_flight": sa.Integer,
    "max_in_flight_per_key": sa.Integer,
    "rate_limit": sa.Integer,
    "rate_period": Seconds,
    "rate_taken": Json,
}
WAITING = ("ix_pgqrs_messages_waiting", "pgqrs_messages", ["queue_id", "vt"])


def upgrade() -> None:
    if is_applied(op, revision):
        return
    schema = schema_of(op)
    for name, kind in LIMITS.items():
        op.add_column("pgqrs_queues", sa.Column(name, kind, nullable=True), schema=schema)
    op.add_column(
        "pgqrs_messages",
        sa.Column("blocked", Small, nullable=False, server_default="0"),
        schema=schema,
    )
    op.drop_index(WAITING[0], WAITING[1], schema=schema)
    op.create_index(
        *WAITING,
        postgresql_where=sa.text("NOT ready AND blocked = 0"),
        sqlite_where=sa.text("ready = 0 AND blocked = 0"),
    )
    op.create_index(
        "ix_pgqrs_messages_group",
        "pgqrs_messages",
        ["queue_id", "group_key", "id"],
        postgresql_where=sa.text("group_key IS NOT NULL"),
        sqlite_where=sa.text("group_key IS NOT NULL"),
    )
    op.create_index(
        "ix_pgqrs_messages_parked",
        "pgqrs_messages",
        ["queue_id", "dedup_key", "id"],
        postgresql_where=sa.text("blocked = 2"),
        sqlite_where=sa.text("blocked = 2"),
    )
    op.create_table(
        "pgqrs_groups",
        sa.Column("queue_id", BigId, nullable=False),
        sa.Column("group_key", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("queue_id", "group_key", name="pk_pgqrs_groups"),
        sqlite_strict=True,
    )
    op.create_table(
        "pgqrs_keys",
        sa.Column("queue_id", BigId, nullable=False),
        sa.Column("dedup_key", sa.Text, nullable=False),
        sa.Column("message_id", BigId, nullable=False),
        sa.Column("scope", sa.Text, nullable=False),
        sa.Column("window_after", Seconds, nullable=False),
        sa.Column("look_at", UTCDateTime, nullable=False),
        sa.CheckConstraint("scope IN ('queued', 'unfinished')", name=op.f("ck_pgqrs_keys_scope")),
        sa.PrimaryKeyConstraint("queue_id", "dedup_key", name="pk_pgqrs_keys"),
        sqlite_strict=True,
    )
    op.create_index("ix_pgqrs_keys_look", "pgqrs_keys", ["queue_id", "look_at"])
    op.create_table(
        "pgqrs_slots",
        sa.Column("message_id", BigId, nullable=False, autoincrement=False),
        sa.Column("queue_id", BigId, nullable=False),
        sa.Column("dedup_key", sa.Text, nullable=True),
        sa.Column("read_ct", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("message_id", name="pk_pgqrs_slots"),
        sqlite_strict=True,
    )
    op.create_index("ix_pgqrs_slots_queue", "pgqrs_slots", ["queue_id", "dedup_key"])
    record(op, revision, __file__)


def downgrade() -> None:
    forget(op, revision)
    schema = schema_of(op)
    for table in ("slots", "keys", "groups"):
        op.drop_table(f"pgqrs_{table}", schema=schema)
    for index in ("parked", "group", "waiting"):
        op.drop_index(f"ix_pgqrs_messages_{index}", "pgqrs_messages", schema=schema)
    op.drop_column("pgqrs_messages", "blocked", schema=schema)
    op.create_index(
        *WAITING, postgresql_where=sa.text("NOT ready"), sqlite_where=sa.text("ready = 0")
    )
    for name in LIMITS:
        op.drop_column("pgqrs_queues", name, schema=schema)
