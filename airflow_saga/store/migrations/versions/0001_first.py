"""The first schema: saga, step, action, undo request, history, and the triggers that refuse illegal moves."""

from __future__ import annotations

from typing import cast

import psycopg
from alembic import op

from airflow_saga.store.migrate import move_triggers, schema_script

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    run = cast(
        psycopg.Connection, op.get_bind().connection.driver_connection
    ).execute  # raw: a `%` in the script is no placeholder
    run(schema_script())
    for statement in move_triggers():
        run(statement)


def downgrade() -> None:
    op.get_bind().exec_driver_sql(
        "DROP TABLE airflow_saga.notice, airflow_saga.component, airflow_saga.event, airflow_saga.undo_scope, "
        "airflow_saga.undo_request, airflow_saga.action, airflow_saga.step, airflow_saga.saga CASCADE"
    )
