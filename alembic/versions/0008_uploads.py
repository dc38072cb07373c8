"""A store in a bucket remembers the last upload of each who wrote to it."""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import BigId, UTCDateTime, forget, is_applied, record, schema_of

revision = "pgqrs_0008"
down_revision = "pgqrs_0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if is_applied(op, revision):
        return
    op.create_table(
        "pgqrs_uploads",
        sa.Column("writer", sa.Text, nullable=False),
        sa.Column("number", BigId, nullable=False),
        sa.Column("uploaded_at", UTCDateTime, nullable=False),
        sa.PrimaryKeyConstraint("writer", name="pk_pgqrs_uploads"),
        sqlite_strict=True,
    )
    record(op, revision, __file__)


def downgrade() -> None:
    forget(op, revision)
    op.drop_table("pgqrs_uploads", schema=schema_of(op))
