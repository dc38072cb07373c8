"""Schedules start workflows, say why they cannot tick, and resume a backfill."""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import Json, UTCDateTime, forget, is_applied, record, schema_of

revision = "pgqrs_0016"
down_revision = "pgqrs_0015"
branch_labels = None
depends_on = None

COLUMNS = {
    "workflow": sa.Text(),
    "options": Json,
    "error": sa.Text(),
    "failing_since": UTCDateTime,
    "retry_at": UTCDateTime,
    "backfill": sa.Text(),
}


def upgrade() -> None:
    if is_applied(op, revision):
        return
    for name, kind in COLUMNS.items():
        op.add_column("pgqrs_schedules", sa.Column(name, kind, nullable=True), schema=schema_of(op))
    record(op, revision, __file__)


def downgrade() -> None:
    forget(op, revision)
    # Before, a schedule could enqueue messages only.
    schedules = sa.table("pgqrs_schedules", sa.column("workflow"), schema=schema_of(op))
    op.execute(sa.delete(schedules).where(schedules.c.workflow.is_not(None)))
    for name in reversed(COLUMNS):
        op.drop_column("pgqrs_schedules", name, schema=schema_of(op))
