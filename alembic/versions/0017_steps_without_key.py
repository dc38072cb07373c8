"""Steps refer to their run without a foreign key, whose check cost a tenth of each step."""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import BigId, JsonText, UTCDateTime, forget, is_applied, record, schema_of

revision = "pgqrs_0017"
down_revision = "pgqrs_0016"
branch_labels = None
depends_on = None

STEPS = "pgqrs_workflow_steps"
RUNS = "pgqrs_workflows"
KEY = "fk_pgqrs_workflow_steps_workflow_id"
COLUMNS = (
    "id, workflow_id, step_id, status, output, error, started_at, completed_at, wake_at, position, "
    "attempts, seq, digest"
)


def upgrade() -> None:
    if is_applied(op, revision):
        return
    if op.get_context().dialect.name == "sqlite":
        rewrite_steps()
    else:
        op.drop_constraint(KEY, STEPS, type_="foreignkey", schema=schema_of(op))
    record(op, revision, __file__)


def downgrade() -> None:
    forget(op, revision)
    op.execute(
        sa.text(
            f"DELETE FROM {qualified(STEPS)} WHERE workflow_id NOT IN "
            f"(SELECT id FROM {qualified(RUNS)})"
        )
    )
    if op.get_context().dialect.name == "sqlite":
        rewrite_steps(
            sa.ForeignKeyConstraint(["workflow_id"], [f"{RUNS}.id"], name=KEY, ondelete="CASCADE")
        )
    else:
        schema = schema_of(op)
        op.create_foreign_key(
            *(KEY, STEPS, RUNS, ["workflow_id"], ["id"]),
            ondelete="CASCADE",
            source_schema=schema,
            referent_schema=schema,
        )


def qualified(table: str) -> str:
    schema = schema_of(op)
    quote = op.get_context().dialect.identifier_preparer.quote
    return table if schema is None else f"{quote(schema)}.{table}"


def rewrite_steps(*further: sa.Constraint) -> None:
    """SQLite cannot change the constraints of a table that is there."""
    op.create_table(
        "pgqrs_new_steps",
        sa.Column("id", BigId, sa.Identity(), nullable=False),
        sa.Column("workflow_id", BigId, nullable=False),
        sa.Column("step_id", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("output", JsonText, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.Column("started_at", UTCDateTime, nullable=True),
        sa.Column("completed_at", UTCDateTime, nullable=True),
        sa.Column("wake_at", UTCDateTime, nullable=True),
        sa.Column("position", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("attempts", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("seq", BigId, nullable=True),
        sa.Column("digest", BigId, nullable=True),
        sa.CheckConstraint(
            "status IN ('pending', 'running', 'completed', 'failed', 'cancelled')",
            name=op.f("ck_pgqrs_workflow_steps_status"),
        ),
        *further,
        sa.PrimaryKeyConstraint("id", name="pk_pgqrs_workflow_steps"),
        sa.UniqueConstraint(
            "workflow_id", "step_id", name="uq_pgqrs_workflow_steps_workflow_id_step_id"
        ),
        sqlite_autoincrement=True,
        sqlite_strict=True,
    )
    op.execute(sa.text(f"INSERT INTO pgqrs_new_steps ({COLUMNS}) SELECT {COLUMNS} FROM {STEPS}"))
    op.drop_table(STEPS)
    op.rename_table("pgqrs_new_steps", STEPS)
