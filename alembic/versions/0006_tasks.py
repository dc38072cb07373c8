"""Who waits for results can be told of them; schedules."""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import (
    BigId,
    Flag,
    Json,
    Seconds,
    Small,
    UTCDateTime,
    forget,
    is_applied,
    record,
    schema_of,
)

revision = "pgqrs_0006"
down_revision = "pgqrs_0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if is_applied(op, revision):
        return
    op.add_column(
        "pgqrs_queues",
        sa.Column("results_wanted_until", UTCDateTime, nullable=True),
        schema=schema_of(op),
    )
    op.create_table(
        "pgqrs_schedules",
        sa.Column("id", BigId, sa.Identity(), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("queue_name", sa.Text, nullable=False),
        sa.Column("cron", sa.Text),
        sa.Column("every", Seconds),
        sa.Column("timezone", sa.Text, nullable=False),
        sa.Column("missed", sa.Text, nullable=False),
        sa.Column("paused", Flag, nullable=False),
        sa.Column("starts_at", UTCDateTime, nullable=False),
        sa.Column("next_at", UTCDateTime, nullable=False),
        sa.Column("last_at", UTCDateTime),
        sa.Column("created_at", UTCDateTime, nullable=False),
        sa.Column("priority", Small, nullable=False),
        sa.Column("codec", sa.Text),
        sa.Column("headers", Json),
        sa.Column("payload", Json, nullable=False),
        sa.CheckConstraint(
            "missed IN ('skip', 'one', 'all')", name=op.f("ck_pgqrs_schedules_missed")
        ),
        sa.PrimaryKeyConstraint("id", name="pk_pgqrs_schedules"),
        sa.UniqueConstraint("name", name="uq_pgqrs_schedules_name"),
        sqlite_autoincrement=True,
        sqlite_strict=True,
    )
    op.create_index("ix_pgqrs_schedules_due", "pgqrs_schedules", ["paused", "next_at"])
    record(op, revision, __file__)


def downgrade() -> None:
    forget(op, revision)
    op.drop_table("pgqrs_schedules")
    op.drop_column("pgqrs_queues", "results_wanted_until", schema=schema_of(op))
