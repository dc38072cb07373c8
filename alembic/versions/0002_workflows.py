"""Workflow runs and their steps."""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import BigId, Json, UTCDateTime, forget, is_applied, record

revision = "pgqrs_0002"
down_revision = "pgqrs_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if is_applied(op, revision):
        return
    op.create_table(
        "pgqrs_workflows",
        sa.Column("id", BigId, sa.Identity(), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=True),
        sa.Column("parent_id", BigId, nullable=True),
        sa.Column("version", sa.Text, nullable=True),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("input", Json, nullable=False),
        sa.Column("output", Json, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.Column("created_at", UTCDateTime, nullable=False),
        sa.Column("updated_at", UTCDateTime, nullable=False),
        sa.Column("wake_at", UTCDateTime, nullable=True),
        sa.Column("deadline_at", UTCDateTime, nullable=True),
        sa.CheckConstraint(
            "status IN ('pending', 'running', 'suspended', 'paused', 'cancelling', 'cancelled', "
            "'completed', 'failed')",
            name=op.f("ck_pgqrs_workflows_status"),
        ),
        sa.ForeignKeyConstraint(
            ["parent_id"],
            ["pgqrs_workflows.id"],
            name="fk_pgqrs_workflows_parent_id",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name="pk_pgqrs_workflows"),
        sa.UniqueConstraint("name", "key", name="uq_pgqrs_workflows_name_key"),
        sqlite_autoincrement=True,
        sqlite_strict=True,
    )
    op.create_index("ix_pgqrs_workflows_parent_id", "pgqrs_workflows", ["parent_id"])
    op.create_index("ix_pgqrs_workflows_status", "pgqrs_workflows", ["status", "wake_at"])
    op.create_table(
        "pgqrs_workflow_steps",
        sa.Column("id", BigId, sa.Identity(), nullable=False),
        sa.Column("workflow_id", BigId, nullable=False),
        sa.Column("step_id", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("output", Json, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.Column("started_at", UTCDateTime, nullable=True),
        sa.Column("completed_at", UTCDateTime, nullable=True),
        sa.Column("wake_at", UTCDateTime, nullable=True),
        sa.CheckConstraint(
            "status IN ('pending', 'running', 'completed', 'failed')",
            name=op.f("ck_pgqrs_workflow_steps_status"),
        ),
        sa.ForeignKeyConstraint(
            ["workflow_id"],
            ["pgqrs_workflows.id"],
            name="fk_pgqrs_workflow_steps_workflow_id",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name="pk_pgqrs_workflow_steps"),
        sa.UniqueConstraint(
            "workflow_id", "step_id", name="uq_pgqrs_workflow_steps_workflow_id_step_id"
        ),
        sqlite_autoincrement=True,
        sqlite_strict=True,
    )
    record(op, revision, __file__)


def downgrade() -> None:
    forget(op, revision)
    op.drop_table("pgqrs_workflow_steps")
    op.drop_table("pgqrs_workflows")
