"""Steps have an order and a digest of their arguments, may be cancelled, and keep JSON as it was."""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import (
    BigId,
    Json,
    JsonText,
    UTCDateTime,
    alter_type,
    forget,
    is_applied,
    record,
    schema_of,
)

revision = "pgqrs_0015"
down_revision = "pgqrs_0014"
branch_labels = None
depends_on = None

STEPS = "pgqrs_workflow_steps"
CHECK = "ck_pgqrs_workflow_steps_status"
BEFORE = "status IN ('pending', 'running', 'completed', 'failed')"
AFTER = "status IN ('pending', 'running', 'completed', 'failed', 'cancelled')"
SHARED = (
    "id, workflow_id, step_id, status, output, error, started_at, completed_at, wake_at, position, "
    "attempts"
)


def added() -> tuple[sa.Column, ...]:
    return (
        sa.Column("seq", BigId, nullable=True),
        sa.Column("digest", BigId, nullable=True),
    )


def upgrade() -> None:
    if is_applied(op, revision):
        return
    if op.get_context().dialect.name == "sqlite":
        rewrite_steps(AFTER, added())
    else:
        for column in added():
            op.add_column(STEPS, column, schema=schema_of(op))
        change_check(AFTER)
        # JSONB sorts the keys of objects: a replayed step would return them in another order.
        alter_type(op, STEPS, "output", JsonText)
        alter_type(op, "pgqrs_workflows", "input", JsonText)
    record(op, revision, __file__)


def downgrade() -> None:
    forget(op, revision)
    # Before, a call that was cut short left no record.
    op.execute(sa.text(f"DELETE FROM {qualified(STEPS)} WHERE status = 'cancelled'"))
    if op.get_context().dialect.name == "sqlite":
        rewrite_steps(BEFORE, ())
    else:
        alter_type(op, "pgqrs_workflows", "input", Json)
        alter_type(op, STEPS, "output", Json)
        change_check(BEFORE)
        for column in reversed(added()):
            op.drop_column(STEPS, column.name, schema=schema_of(op))


def qualified(table: str) -> str:
    schema = schema_of(op)
    quote = op.get_context().dialect.identifier_preparer.quote
    return table if schema is None else f"{quote(schema)}.{table}"


def change_check(condition: str) -> None:
    op.drop_constraint(op.f(CHECK), STEPS, schema=schema_of(op))
    op.create_check_constraint(op.f(CHECK), STEPS, condition, schema=schema_of(op))


def rewrite_steps(condition: str, further: tuple[sa.Column, ...]) -> None:
    """SQLite cannot change a CHECK of a table that is there."""
    op.create_table(
        "pgqrs_new_steps",
        sa.Column("id", BigId, sa.Identity(), nullable=False),
        sa.Column("workflow_id", BigId, nullable=False),
        sa.Column("step_id", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("output", Json, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.Column("started_at", UTCDateTime, nullable=True),
        sa.Column("completed_at", UTCDateTime, nullable=True),
        sa.Column("wake_at", UTCDateTime, nullable=True),
        sa.Column("position", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("attempts", sa.Integer, nullable=False, server_default=sa.text("0")),
        *further,
        sa.CheckConstraint(condition, name=op.f(CHECK)),
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
    op.execute(sa.text(f"INSERT INTO pgqrs_new_steps ({SHARED}) SELECT {SHARED} FROM {STEPS}"))
    op.drop_table(STEPS)
    op.rename_table("pgqrs_new_steps", STEPS)
