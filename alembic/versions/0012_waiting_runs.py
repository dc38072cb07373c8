"""Who waits for which run; what becomes of children; what failed a run; how far a run had come."""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import BigId, Json, Seconds, forget, is_applied, record, schema_of

revision = "pgqrs_0012"
down_revision = "pgqrs_0011"
branch_labels = None
depends_on = None

runs = sa.Table(
    "pgqrs_workflows",
    sa.MetaData(),
    sa.Column("id", BigId),
    sa.Column("parent_id", BigId),
    sa.Column("waiter_ct", sa.Integer),
)
waits = sa.Table(
    "pgqrs_workflow_waits",
    sa.MetaData(),
    sa.Column("awaited_id", BigId),
    sa.Column("waiter_id", BigId),
)


def columns() -> tuple[sa.Column, ...]:
    return (
        sa.Column("waiter_ct", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("parent_close", sa.Text, nullable=True),
        sa.Column("time_limit", Seconds, nullable=True),
        sa.Column("failed_by", Json, nullable=True),
        sa.Column("progress_ct", sa.Integer, nullable=False, server_default=sa.text("0")),
    )


def upgrade() -> None:
    if is_applied(op, revision):
        return
    schema = schema_of(op)
    for column in columns():
        op.add_column("pgqrs_workflows", column, schema=schema)
    op.create_table(
        "pgqrs_workflow_waits",
        sa.Column("awaited_id", BigId, nullable=False),
        sa.Column("waiter_id", BigId, nullable=False),
        sa.PrimaryKeyConstraint("awaited_id", "waiter_id", name="pk_pgqrs_workflow_waits"),
        sqlite_strict=True,
    )
    op.create_index("ix_pgqrs_workflow_waits_waiter_id", "pgqrs_workflow_waits", ["waiter_id"])
    # Parents that wait at this moment were found by their children until now.
    op.execute(
        sa.insert(waits).from_select(
            ["awaited_id", "waiter_id"],
            sa.select(runs.c.id, runs.c.parent_id).where(runs.c.parent_id.is_not(None)),
        )
    )
    op.execute(sa.update(runs).where(runs.c.parent_id.is_not(None)).values(waiter_ct=1))
    record(op, revision, __file__)


def downgrade() -> None:
    forget(op, revision)
    op.drop_table("pgqrs_workflow_waits", schema=schema_of(op))
    for column in reversed(columns()):
        op.drop_column("pgqrs_workflows", column.name, schema=schema_of(op))
