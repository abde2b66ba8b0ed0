"""Brings the store's schema to the version of this code, and tells whether it is there.

The moves that the database allows are rendered from ``core.states``; a migration that changes a table of moves only
has to call :func:`move_triggers` again.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import psycopg
from psycopg import sql
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from airflow_saga.core.errors import StoreNotMigratedError
from airflow_saga.core.states import MOVES, Machine

HEAD = "0004"
_TABLES: dict[Machine, str] = {"saga": "saga", "step": "step", "action": "action", "request": "undo_request"}
MIGRATE_COMMAND = "airflow saga db migrate"


def upgrade(connection: psycopg.Connection | str, revision: str = "head") -> None:
    """Migrate the store that this psycopg connection (or URL) leads to; safe to run again, and from two places at once.

    :raises StoreNotMigratedError: if the store was made by a newer version of this product.
    """
    if isinstance(connection, str):
        with psycopg.connect(connection) as opened:
            return upgrade(opened, revision)
    from alembic import command
    from alembic.config import Config

    found = revision_of(connection)
    if found is not None and found > HEAD:
        raise StoreNotMigratedError(_newer(found))
    connection.rollback()
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(hashtext('airflow_saga.migrate'))")
        connection.execute("CREATE SCHEMA IF NOT EXISTS airflow_saga")
    config = Config()
    config.set_main_option("script_location", str(Path(str(files("airflow_saga.store"))) / "migrations"))
    engine = create_engine("postgresql+psycopg://", creator=lambda: _borrowed(connection), poolclass=NullPool)
    with engine.connect() as bound:
        bound.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('airflow_saga.migrate'))")
        config.attributes["connection"] = bound
        command.upgrade(config, revision)
        bound.commit()


def _borrowed(connection: psycopg.Connection) -> psycopg.Connection:
    return psycopg.connect(connection.info.dsn, password=connection.info.password or None)


def revision_of(connection: psycopg.Connection) -> str | None:
    """The version of the schema that is there, None if there is none."""
    try:
        row = connection.execute("SELECT version_num FROM airflow_saga.alembic_version").fetchone()
    except psycopg.errors.UndefinedTable:
        connection.rollback()  # of nothing, where it is in autocommit
        return None
    return None if row is None else str(row[0])


def check(connection: psycopg.Connection) -> None:
    """:raises StoreNotMigratedError: if the schema is missing, older or newer than this code; says what to run."""
    found = revision_of(connection)
    if found is None:
        raise StoreNotMigratedError(
            f"the saga store (database {connection.info.dbname!r} on {connection.info.host or 'a socket'}) has no "
            f"tables yet. Run: {MIGRATE_COMMAND}"
        )
    if found < HEAD:
        raise StoreNotMigratedError(
            f"the saga store is at version {found}, this code needs {HEAD}. Run: {MIGRATE_COMMAND}"
        )
    if found > HEAD:
        raise StoreNotMigratedError(_newer(found))


def _newer(found: str) -> str:
    return (
        f"the saga store is at version {found}, this code knows only {HEAD}: it was migrated by a newer airflow-saga. "
        f"Install that version here too (pip install -U airflow-saga)."
    )


def schema_script() -> str:
    return files("airflow_saga.store").joinpath("schema.sql").read_text(encoding="utf-8")


_MOVE_CHECK = """
CREATE OR REPLACE FUNCTION airflow_saga.{function}() RETURNS trigger LANGUAGE plpgsql AS $check$
DECLARE move text := CASE WHEN TG_OP = 'INSERT' THEN '' ELSE OLD.state END || '>' || NEW.state;
BEGIN
    {first}
    IF TG_OP = 'UPDATE' AND OLD.state = NEW.state THEN
        RETURN NEW;
    END IF;
    IF NOT move = ANY ({moves}::text[]) THEN
        RAISE EXCEPTION '% may not move %', TG_TABLE_NAME, move
            USING ERRCODE = 'check_violation', CONSTRAINT = 'moves_only_by_its_table';
    END IF;
    {more}
    RETURN NEW;
END $check$
"""
_ACTION_SUMS = """
    IF NEW.state IN ('PENDING', 'DONE') THEN  -- nearly all writes: worth a short way
        NEW.residual := NEW.effect <> 'READ_ONLY';
        NEW.settled := NEW.kept OR NOT NEW.residual;
    ELSE
        NEW.settled := NEW.kept OR NEW.effect = 'READ_ONLY'
            OR NEW.state IN ('FAILED', 'COMPENSATED', 'NON_COMPENSABLE', 'ACCEPTED')
            -- a failed one without an end: a person asked for another undo
            OR (NEW.state = 'COMPENSATION_FAILED' AND NEW.undo_finished_at IS NOT NULL)
            OR (NEW.state = 'IN_DOUBT' AND NEW.probed)
            OR (NEW.state = 'COMPENSATING' AND NEW.reconcile_at IS NOT NULL);
        NEW.residual := NEW.effect <> 'READ_ONLY'
            AND NEW.state IN ('IN_DOUBT', 'COMPENSATING', 'COMPENSATION_FAILED', 'NON_COMPENSABLE');
    END IF;
"""
_ACTION_CHECK = """
    IF NOT (CASE NEW.effect WHEN 'READ_ONLY' THEN NEW.state IN ('DONE', 'FAILED')
                            WHEN 'COMPENSABLE' THEN true WHEN 'NON_COMPENSABLE' THEN true ELSE false END)
       OR (NEW.state = 'PENDING' AND NEW.lands_by IS NULL) THEN
        RAISE EXCEPTION 'action % of effect % may not be %', NEW.seq, NEW.effect, NEW.state
            USING ERRCODE = 'check_violation', CONSTRAINT = 'state_fits_effect';
    END IF;
"""
# plpgsql, not WHEN clauses, CHECKs and generated columns: Postgres parses those again for every statement, which costs
# more than the write.


def move_triggers() -> Iterator[str]:
    """Statements that make the database refuse every move that ``core.states`` does not list."""
    for machine, table in _TABLES.items():
        moves = sorted(f"{move.source or ''}>{move.target}" for move in MOVES[machine])
        function = sql.Identifier(f"check_move_of_{table}")
        on = sql.Identifier("airflow_saga", table)
        yield (
            sql.SQL(_MOVE_CHECK)
            .format(
                function=function,
                moves=sql.Literal(sorted(set(moves))),
                first=sql.SQL(_ACTION_SUMS if table == "action" else ""),
                more=sql.SQL(_ACTION_CHECK if table == "action" else ""),
            )
            .as_string(None)
        )
        yield sql.SQL("DROP TRIGGER IF EXISTS moves_only_by_its_table ON {on}").format(on=on).as_string(None)
        yield (
            sql.SQL(
                "CREATE TRIGGER moves_only_by_its_table BEFORE INSERT OR UPDATE {of} ON {on} "
                "FOR EACH ROW EXECUTE FUNCTION airflow_saga.{function}()"
            )
            .format(on=on, function=function, of=sql.SQL("" if table == "action" else "OF state"))
            .as_string(None)
        )
