"""Queues, workers, messages and their archive."""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import (
    BigId,
    Flag,
    Json,
    Seconds,
    Small,
    UTCDateTime,
    is_applied,
    record,
    tune_for_postgres,
)

revision = "pgqrs_0001"
down_revision = None
branch_labels = ("pgqrs",)
depends_on = None


def upgrade() -> None:
    if is_applied(op, revision):
        return
    op.create_table(
        "pgqrs_schema_history",
        sa.Column("revision", sa.Text, nullable=False),
        sa.Column("checksum", sa.Text, nullable=False),
        sa.Column("applied_at", UTCDateTime, nullable=False),
        sa.PrimaryKeyConstraint("revision", name="pk_pgqrs_schema_history"),
        sqlite_strict=True,
    )
    op.create_table(
        "pgqrs_queues",
        sa.Column("id", BigId, sa.Identity(), nullable=False),
        sa.Column("queue_name", sa.Text, nullable=False),
        sa.Column("created_at", UTCDateTime, nullable=False),
        sa.Column("lease", Seconds, nullable=False),
        sa.Column("max_read_ct", sa.Integer, nullable=False),
        sa.Column("retention", Seconds, nullable=True),
        sa.Column("paused", Flag, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_pgqrs_queues"),
        sa.UniqueConstraint("queue_name", name="uq_pgqrs_queues_queue_name"),
        sqlite_autoincrement=True,
        sqlite_strict=True,
    )
    op.create_table(
        "pgqrs_workers",
        sa.Column("id", BigId, sa.Identity(), nullable=False),
        sa.Column("queue_id", BigId, nullable=True),
        sa.Column("hostname", sa.Text, nullable=False),
        sa.Column("port", sa.Integer, nullable=False),
        sa.Column("pid", sa.Integer, nullable=True),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("last_heartbeat", UTCDateTime, nullable=False),
        sa.Column("created_at", UTCDateTime, nullable=False),
        sa.CheckConstraint(
            "status IN ('ready', 'suspended', 'stopped')", name=op.f("ck_pgqrs_workers_status")
        ),
        sa.ForeignKeyConstraint(
            ["queue_id"], ["pgqrs_queues.id"], name="fk_pgqrs_workers_queue_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_pgqrs_workers"),
        sqlite_autoincrement=True,
        sqlite_strict=True,
    )
    op.create_index("ix_pgqrs_workers_queue_id", "pgqrs_workers", ["queue_id"])
    op.create_table(
        "pgqrs_messages",
        sa.Column("id", BigId, sa.Identity(), nullable=False),
        sa.Column("queue_id", BigId, nullable=False),
        sa.Column("priority", Small, nullable=False),
        sa.Column("ready", Flag, nullable=False),
        sa.Column("vt", UTCDateTime, nullable=False),
        sa.Column("read_ct", sa.Integer, nullable=False),
        sa.Column("released_ct", sa.Integer, nullable=False),
        sa.Column("enqueued_at", UTCDateTime, nullable=False),
        sa.Column("dequeued_at", UTCDateTime, nullable=True),
        sa.Column("expires_at", UTCDateTime, nullable=True),
        sa.Column("producer_worker_id", BigId, nullable=True),
        sa.Column("consumer_worker_id", BigId, nullable=True),
        sa.Column("dedup_key", sa.Text, nullable=True),
        sa.Column("group_key", sa.Text, nullable=True),
        sa.Column("codec", sa.Text, nullable=True),
        sa.Column("payload_ref", sa.Text, nullable=True),
        sa.Column("headers", Json, nullable=True),
        sa.Column("payload", Json, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_pgqrs_messages"),
        sqlite_autoincrement=True,
        sqlite_strict=True,
    )
    op.create_index(
        "ix_pgqrs_messages_ready",
        "pgqrs_messages",
        ["queue_id", sa.text("priority DESC"), "id"],
        postgresql_where=sa.text("ready"),
        sqlite_where=sa.text("ready = 1"),
    )
    op.create_index(
        "ix_pgqrs_messages_waiting",
        "pgqrs_messages",
        ["queue_id", "vt"],
        postgresql_where=sa.text("NOT ready"),
        sqlite_where=sa.text("ready = 0"),
    )
    # Every message is updated once and deleted soon after: leave room on its page, and vacuum
    # by count, not by share.
    tune_for_postgres(
        op,
        "pgqrs_messages",
        fillfactor=70,
        autovacuum_vacuum_scale_factor=0.01,
        autovacuum_vacuum_cost_delay=0,
        autovacuum_analyze_scale_factor=0.02,
    )
    op.create_table(
        "pgqrs_archive",
        sa.Column("id", BigId, sa.Identity(), nullable=False),
        sa.Column("original_message_id", BigId, nullable=False),
        sa.Column("queue_id", BigId, nullable=False),
        sa.Column("archive_reason", sa.Text, nullable=False),
        sa.Column("priority", Small, nullable=False),
        sa.Column("read_ct", sa.Integer, nullable=False),
        sa.Column("released_ct", sa.Integer, nullable=False),
        sa.Column("enqueued_at", UTCDateTime, nullable=False),
        sa.Column("dequeued_at", UTCDateTime, nullable=True),
        sa.Column("expires_at", UTCDateTime, nullable=True),
        sa.Column("archived_at", UTCDateTime, nullable=False),
        sa.Column("producer_worker_id", BigId, nullable=True),
        sa.Column("consumer_worker_id", BigId, nullable=True),
        sa.Column("replayed_as", BigId, nullable=True),
        sa.Column("dedup_key", sa.Text, nullable=True),
        sa.Column("group_key", sa.Text, nullable=True),
        sa.Column("codec", sa.Text, nullable=True),
        sa.Column("payload_ref", sa.Text, nullable=True),
        sa.Column("headers", Json, nullable=True),
        sa.Column("payload", Json, nullable=False),
        sa.Column("result", Json, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.CheckConstraint(
            "archive_reason IN ('completed', 'failed', 'expired', 'manual')",
            name=op.f("ck_pgqrs_archive_archive_reason"),
        ),
        sa.PrimaryKeyConstraint("id", name="pk_pgqrs_archive"),
        sa.UniqueConstraint("original_message_id", name="uq_pgqrs_archive_original_message_id"),
        sqlite_autoincrement=True,
        sqlite_strict=True,
    )
    op.create_index(
        "ix_pgqrs_archive_ended", "pgqrs_archive", ["queue_id", "archive_reason", "archived_at"]
    )
    record(op, revision, __file__)


def downgrade() -> None:
    for table in ("archive", "messages", "workers", "queues", "schema_history"):
        op.drop_table(f"pgqrs_{table}")
