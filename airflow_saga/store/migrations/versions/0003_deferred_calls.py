"""Calls that wait in Airflow's triggerer: a deferrable operator as a step."""

from __future__ import annotations

from typing import cast

import psycopg
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_ADDED = """
-- A PENDING call that has no process: it waits in the triggerer, and no sweep takes it for lost.
ALTER TABLE airflow_saga.action ADD COLUMN deferred boolean NOT NULL DEFAULT false;
-- What its trigger was told, the id of the remote work above all; kept until the call is done.
ALTER TABLE airflow_saga.action ADD COLUMN deferral text;
"""


def upgrade() -> None:
    cast(psycopg.Connection, op.get_bind().connection.driver_connection).execute(_ADDED)


def downgrade() -> None:
    op.get_bind().exec_driver_sql(
        "ALTER TABLE airflow_saga.action DROP COLUMN deferred, DROP COLUMN deferral"
    )
