"""An undo from a place on: the saga is SUSPENDED after it, since what came before stays."""

from __future__ import annotations

from alembic import op

from airflow_saga.store.migrate import move_triggers

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for statement in move_triggers():
        op.get_bind().exec_driver_sql(statement.replace("%", "%%"))


def downgrade() -> None:
    """The triggers allow more than the older code does, which does no harm."""
