"""${message}"""

import sqlalchemy as sa
from alembic import op

from pgqrs.frozen import forget, is_applied, record
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    if is_applied(op, revision):
        return
    ${upgrades if upgrades else "pass"}
    record(op, revision, __file__)


def downgrade() -> None:
    forget(op, revision)
    ${downgrades if downgrades else "pass"}
