"""Undoing a part of a step, save-points, and the tombstones of sagas whose actions were pruned."""

from __future__ import annotations

from typing import cast

import psycopg
from alembic import op

from airflow_saga.store.migrate import move_triggers

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_ADDED = """
-- An effect that the last undo of its step has left standing on purpose: its step goes on from there.
ALTER TABLE airflow_saga.action ADD COLUMN kept boolean NOT NULL DEFAULT false;
-- Of the first action after the checkpoint: a body that goes on from it asks for none of those before.
ALTER TABLE airflow_saga.step ADD COLUMN checkpoint_seq integer NOT NULL DEFAULT 0;
-- Its index is no more, since the mapping has become shorter: nobody waits for it once it is undone.
ALTER TABLE airflow_saga.step ADD COLUMN removed boolean NOT NULL DEFAULT false;
-- The checkpoint that was the newest one at the place an undo goes back to.
ALTER TABLE airflow_saga.undo_scope ADD COLUMN checkpoint text;
-- Since when the actions of this saga are gone.
ALTER TABLE airflow_saga.saga ADD COLUMN pruned_at timestamptz;

CREATE TABLE airflow_saga.savepoint (
    savepoint_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    step_id bigint NOT NULL REFERENCES airflow_saga.step ON DELETE CASCADE,
    generation integer NOT NULL,
    seq integer NOT NULL,  -- of the first action after it
    name text NOT NULL,
    checkpoint text,
    made_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT one_savepoint_of_a_name UNIQUE (step_id, generation, name)
);
"""


def upgrade() -> None:
    run = cast(psycopg.Connection, op.get_bind().connection.driver_connection).execute
    run(_ADDED)
    for statement in move_triggers():
        run(statement)


def downgrade() -> None:
    op.get_bind().exec_driver_sql(
        "DROP TABLE airflow_saga.savepoint; ALTER TABLE airflow_saga.saga DROP COLUMN pruned_at; "
        "ALTER TABLE airflow_saga.undo_scope DROP COLUMN checkpoint; "
        "ALTER TABLE airflow_saga.step DROP COLUMN checkpoint_seq, DROP COLUMN removed; "
        "ALTER TABLE airflow_saga.action DROP COLUMN kept"
    )
