"""Runs have a message, news, forks; steps have positions and attempts; signals and events."""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import BigId, Json, UTCDateTime, forget, is_applied, record, schema_of

revision = "pgqrs_0005"
down_revision = "pgqrs_0004"
branch_labels = None
depends_on = None

HAS_PARENT = sa.text("parent_id IS NOT NULL")


def upgrade() -> None:
    if is_applied(op, revision):
        return
    schema = schema_of(op)
    for column in (
        sa.Column("started_at", UTCDateTime, nullable=True),
        sa.Column("ended_at", UTCDateTime, nullable=True),
        sa.Column("queue_id", BigId, nullable=True),
        sa.Column("message_id", BigId, nullable=True),
        sa.Column("nudge_ct", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("failed_step", sa.Text, nullable=True),
        sa.Column("forked_from", BigId, nullable=True),
    ):
        op.add_column("pgqrs_workflows", column, schema=schema)
    for column in (
        sa.Column("position", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("attempts", sa.Integer, nullable=False, server_default=sa.text("0")),
    ):
        op.add_column("pgqrs_workflow_steps", column, schema=schema)
    op.drop_index("ix_pgqrs_workflows_parent_id", "pgqrs_workflows")
    op.drop_index("ix_pgqrs_workflows_status", "pgqrs_workflows")
    op.create_index(
        "ix_pgqrs_workflows_parent_id",
        "pgqrs_workflows",
        ["parent_id"],
        postgresql_where=HAS_PARENT,
        sqlite_where=HAS_PARENT,
    )
    op.create_index("ix_pgqrs_workflows_status", "pgqrs_workflows", ["status", "id"])
    op.create_index("ix_pgqrs_workflows_message_id", "pgqrs_workflows", ["message_id"], unique=True)
    op.create_table(
        "pgqrs_workflow_events",
        sa.Column("id", BigId, sa.Identity(), nullable=False),
        sa.Column("workflow_id", BigId, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("payload", Json, nullable=True),
        sa.Column("created_at", UTCDateTime, nullable=False),
        sa.Column("consumed_by", sa.Text, nullable=True),
        sa.CheckConstraint(
            "kind IN ('signal', 'event')", name=op.f("ck_pgqrs_workflow_events_kind")
        ),
        sa.ForeignKeyConstraint(
            ["workflow_id"],
            ["pgqrs_workflows.id"],
            name="fk_pgqrs_workflow_events_workflow_id",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name="pk_pgqrs_workflow_events"),
        sqlite_autoincrement=True,
        sqlite_strict=True,
    )
    op.create_index(
        "ix_pgqrs_workflow_events_run",
        "pgqrs_workflow_events",
        ["workflow_id", "kind", "name", "id"],
    )
    record(op, revision, __file__)


def downgrade() -> None:
    forget(op, revision)
    schema = schema_of(op)
    op.drop_table("pgqrs_workflow_events")
    for index in ("message_id", "status", "parent_id"):
        op.drop_index(f"ix_pgqrs_workflows_{index}", "pgqrs_workflows")
    op.create_index("ix_pgqrs_workflows_parent_id", "pgqrs_workflows", ["parent_id"])
    op.create_index("ix_pgqrs_workflows_status", "pgqrs_workflows", ["status", "wake_at"])
    for column in ("attempts", "position"):
        op.drop_column("pgqrs_workflow_steps", column, schema=schema)
    for column in (
        "forked_from",
        "failed_step",
        "nudge_ct",
        "message_id",
        "queue_id",
        "ended_at",
        "started_at",
    ):
        op.drop_column("pgqrs_workflows", column, schema=schema)
