"""Messages that expire are found by when they do."""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import forget, is_applied, record

revision = "pgqrs_0003"
down_revision = "pgqrs_0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if is_applied(op, revision):
        return
    op.create_index(
        "ix_pgqrs_messages_expiring",
        "pgqrs_messages",
        ["queue_id", "expires_at"],
        postgresql_where=sa.text("expires_at IS NOT NULL"),
        sqlite_where=sa.text("expires_at IS NOT NULL"),
    )
    record(op, revision, __file__)


def downgrade() -> None:
    forget(op, revision)
    op.drop_index("ix_pgqrs_messages_expiring", "pgqrs_messages")
