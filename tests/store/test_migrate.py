"""The schema comes with one command, twice is harmless, and what is missing is said together with the command."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator

import psycopg
import pytest

from airflow_saga.core.errors import StoreNotMigratedError
from airflow_saga.store.migrate import HEAD, check, revision_of, upgrade
from tests.store.scene import Scene, connect
from tests.support.postgres import PostgresServer


@pytest.fixture
def empty_url(each_postgres_server: PostgresServer) -> Iterator[str]:
    """A database that nobody has migrated."""
    name = f"empty_{uuid.uuid4().hex}"
    yield each_postgres_server.create_database(name)
    each_postgres_server.drop_database(name)


def catalogue(url: str) -> list[tuple[str, ...]]:
    """Every table, column, constraint, index, trigger and function of the schema, as text."""
    with connect(url) as connection:
        return connection.execute(
            "SELECT 'column', table_name, column_name, data_type, coalesce(column_default, '') "
            "FROM information_schema.columns WHERE table_schema = 'airflow_saga' "
            "UNION ALL SELECT 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid), '' "
            "FROM pg_constraint WHERE connamespace = 'airflow_saga'::regnamespace "
            "UNION ALL SELECT 'index', tablename, indexname, indexdef, '' FROM pg_indexes "
            "WHERE schemaname = 'airflow_saga' "
            "UNION ALL SELECT 'trigger', tgrelid::regclass::text, tgname, pg_get_triggerdef(oid), '' FROM pg_trigger "
            "WHERE NOT tgisinternal "
            "UNION ALL SELECT 'function', proname, '', prosrc, '' FROM pg_proc "
            "WHERE pronamespace = 'airflow_saga'::regnamespace ORDER BY 1, 2, 3, 4"
        ).fetchall()


def test_an_empty_database_is_migrated_and_used(empty_url: str) -> None:
    upgrade(empty_url)
    with connect(empty_url) as connection:
        check(connection)
        assert revision_of(connection) == HEAD
    scene = Scene(empty_url)
    scene.ran("flight", 1)
    scene.freeze(scene.ask())
    scene.undo_step()
    assert scene.settle() is not None
    scene.close()
    assert {row[1] for row in catalogue(empty_url) if row[0] == "trigger"} == {
        *("airflow_saga.saga", "airflow_saga.step", "airflow_saga.action", "airflow_saga.undo_request"),
    }


def test_everything_is_in_a_schema_of_its_own(empty_url: str) -> None:
    with connect(empty_url) as connection:
        before = connection.execute("SELECT count(*) FROM pg_tables").fetchone()
        upgrade(connection)
        others = connection.execute(
            "SELECT count(*) FROM pg_tables WHERE schemaname <> 'airflow_saga'"
        ).fetchone()
        assert others == before
        assert connection.execute("SELECT count(*) FROM airflow_saga.alembic_version").fetchone() == (1,)


@pytest.mark.parametrize("autocommit", [True, False])
def test_migrating_twice_changes_nothing(empty_url: str, autocommit: bool) -> None:
    upgrade(empty_url)
    with connect(empty_url) as connection:
        connection.execute(
            "INSERT INTO airflow_saga.saga (dag_id, run_id, state) VALUES ('d', 'r', 'PENDING')"
        )
    before = catalogue(empty_url)
    with psycopg.connect(empty_url, autocommit=autocommit) as connection:
        upgrade(connection)
        assert connection.info.transaction_status.name == "IDLE"
    assert catalogue(empty_url) == before
    with connect(empty_url) as connection:
        assert connection.execute("SELECT count(*) FROM airflow_saga.saga").fetchone() == (1,)


def test_several_processes_migrate_at_once(empty_url: str) -> None:
    program = "import sys; from airflow_saga.store.migrate import upgrade; upgrade(sys.argv[1])"
    processes = [
        subprocess.Popen([sys.executable, "-c", program, empty_url], stderr=subprocess.PIPE) for _ in range(3)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    with connect(empty_url) as connection:
        check(connection)


def test_a_migration_that_fails_leaves_nothing_behind(empty_url: str) -> None:
    with connect(empty_url) as connection:
        connection.execute("CREATE SCHEMA airflow_saga")
        connection.execute(
            "CREATE TABLE airflow_saga.notice (id integer)"
        )  # in the way, half-way through the script
    with pytest.raises(Exception, match="notice"):
        upgrade(empty_url)
    with connect(empty_url) as connection:
        assert revision_of(connection) is None
        assert connection.execute("SELECT to_regclass('airflow_saga.saga')").fetchone() == (None,)
        connection.execute("DROP TABLE airflow_saga.notice")
    upgrade(empty_url)
    with connect(empty_url) as connection:
        check(connection)


def test_an_unmigrated_database_is_told_from_a_migrated_one(empty_url: str) -> None:
    with connect(empty_url) as connection:
        assert revision_of(connection) is None
        with pytest.raises(
            StoreNotMigratedError, match=r"has no tables yet\. Run: airflow saga db migrate"
        ) as error:
            check(connection)
        assert repr(connection.info.dbname) in str(error.value)
        connection.execute("CREATE SCHEMA airflow_saga")
        with pytest.raises(StoreNotMigratedError, match="airflow saga db migrate"):
            check(connection)


def test_an_older_database_is_told_to_be_migrated(empty_url: str) -> None:
    upgrade(empty_url)
    with connect(empty_url) as connection:
        connection.execute("UPDATE airflow_saga.alembic_version SET version_num = '0000'")
        with pytest.raises(
            StoreNotMigratedError, match=rf"at version 0000, this code needs {HEAD}\. Run: airflow saga"
        ):
            check(connection)


def test_a_newer_database_is_left_alone_and_says_which_version_to_install(empty_url: str) -> None:
    upgrade(empty_url)
    with connect(empty_url) as connection:
        connection.execute("UPDATE airflow_saga.alembic_version SET version_num = '9999'")
        before = catalogue(empty_url)
        for refuse in (check, upgrade):
            with pytest.raises(
                StoreNotMigratedError, match=r"migrated by a newer airflow-saga.*pip install -U"
            ):
                refuse(connection)
        assert catalogue(empty_url) == before
        assert revision_of(connection) == "9999"
