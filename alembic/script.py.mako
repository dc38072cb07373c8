"""${message}"""

import sqlalchemy as sa
from alembic import op
from pgqrs.schema import forget, record
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}
    record(op, revision)


def downgrade() -> None:
    forget(op, revision)
    ${downgrades if downgrades else "pass"}
