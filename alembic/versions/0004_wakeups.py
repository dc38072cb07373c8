"""Queues tell producers whether anybody waits for a message."""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import UTCDateTime, forget, is_applied, record, schema_of

revision = "pgqrs_0004"
down_revision = "pgqrs_0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if is_applied(op, revision):
        return
    op.add_column(
        "pgqrs_queues",
        sa.Column("waiting_until", UTCDateTime, nullable=True),
        schema=schema_of(op),
    )
    record(op, revision, __file__)


def downgrade() -> None:
    forget(op, revision)
    op.drop_column("pgqrs_queues", "waiting_until", schema=schema_of(op))
