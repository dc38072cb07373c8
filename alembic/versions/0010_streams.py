"""Streams: batches of messages that are claimed until they are acknowledged."""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import BigId, Json, UTCDateTime, forget, is_applied, record, schema_of

revision = "pgqrs_0010"
down_revision = "pgqrs_0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if is_applied(op, revision):
        return
    op.create_table(
        "pgqrs_streams",
        sa.Column("id", BigId, sa.Identity(), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("queue_id", BigId, nullable=False),
        sa.Column("epoch", BigId, nullable=False),
        sa.Column("worker_id", BigId, nullable=False),
        sa.Column("last_batch", BigId, nullable=False),
        sa.Column("created_at", UTCDateTime, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_pgqrs_streams"),
        sa.UniqueConstraint("name", name="uq_pgqrs_streams_name"),
        sqlite_autoincrement=True,
        sqlite_strict=True,
    )
    op.create_index("ix_pgqrs_streams_queue_id", "pgqrs_streams", ["queue_id"])
    op.create_table(
        "pgqrs_stream_batches",
        sa.Column("stream_id", BigId, nullable=False),
        sa.Column("batch", BigId, nullable=False, autoincrement=False),
        sa.Column("worker_id", BigId, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("held", Json, nullable=False),
        sa.Column("claimed_at", UTCDateTime, nullable=False),
        sa.PrimaryKeyConstraint("stream_id", "batch", name="pk_pgqrs_stream_batches"),
        sa.ForeignKeyConstraint(
            ["stream_id"],
            ["pgqrs_streams.id"],
            name="fk_pgqrs_stream_batches_stream_id",
            ondelete="CASCADE",
        ),
        sqlite_strict=True,
    )
    record(op, revision, __file__)


def downgrade() -> None:
    forget(op, revision)
    schema = schema_of(op)
    op.drop_table("pgqrs_stream_batches", schema=schema)
    op.drop_table("pgqrs_streams", schema=schema)
