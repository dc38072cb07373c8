"""Queues bound leases, and how often a message is given back."""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import Seconds, forget, is_applied, record, schema_of

revision = "pgqrs_0014"
down_revision = "pgqrs_0013"
branch_labels = None
depends_on = None

COLUMNS = {"max_lease": Seconds, "max_releases": sa.Integer()}


def upgrade() -> None:
    if is_applied(op, revision):
        return
    for name, kind in COLUMNS.items():
        op.add_column("pgqrs_queues", sa.Column(name, kind, nullable=True), schema=schema_of(op))
    record(op, revision, __file__)


def downgrade() -> None:
    forget(op, revision)
    for name in COLUMNS:
        op.drop_column("pgqrs_queues", name, schema=schema_of(op))
