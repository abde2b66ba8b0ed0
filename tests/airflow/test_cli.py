"""The commands as users run them, as processes: one story from an empty database to a settled saga."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_saga.metadata import run_of
from airflow_saga.store.migrate import HEAD
from tests.airflow.conftest import Command
from tests.store.scene import Scene
from tests.support.postgres import PostgresServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_command_without_the_connection_says_how_to_make_it(airflow_process: Command) -> None:
    said = airflow_process("saga", "list")
    assert (said.code, said.out) == (1, "")
    assert "AIRFLOW_CONN_SAGA_DEFAULT='postgres://" in said.err
    assert "airflow connections add saga_default" in said.err
    assert "Traceback" not in said.err


def test_the_tables_are_made_and_checked(airflow_process: Command, postgres_server: PostgresServer) -> None:
    url = postgres_server.create_database("unmigrated")
    env = {"AIRFLOW_CONN_SAGA_DEFAULT": url}
    refused = airflow_process("saga", "db", "check", env=env)
    assert refused.code == 1
    assert "airflow saga db migrate" in refused.err
    made = airflow_process("saga", "db", "migrate", "--output", "json", env=env)
    assert made.code == 0, made.err
    assert json.loads(made.out)["before"] is None
    assert json.loads(made.out)["after"] == HEAD
    checked = airflow_process("saga", "db", "check", env=env)
    assert checked.code == 0, checked.err
    assert HEAD in checked.out
    postgres_server.drop_database("unmigrated")


def test_a_connection_in_airflows_metadata_is_found(
    airflow_process: Command, database_url: str, add_connection: Callable[..., str]
) -> None:
    parts = conninfo_to_dict(database_url)
    place = {"host": parts["host"], "port": int(str(parts["port"])), "schema": parts["dbname"]}
    conn_id = add_connection(conn_type="postgres", login=parts["user"], **place)
    said = airflow_process("saga", "list", env={"AIRFLOW__SAGA__CONN_ID": conn_id})
    assert (said.code, said.out) == (0, "no sagas\n"), said.err


def test_a_saga_is_cancelled_shown_and_resolved(
    scene: Scene, airflow_run: Callable[..., None], airflow_process: Command
) -> None:
    airflow_run(*scene.run)
    scene.stopped("flight", 1)

    cancelled = airflow_process("saga", "cancel", *scene.run, "--reason", "wrong dates")
    assert cancelled.code == 0, cancelled.err
    assert scene.saga.state == "CANCELLING"
    assert scene.request.actor.startswith("cli:")
    assert scene.request.reason == "wrong dates"
    assert scene.request.triggered_at is not None
    undo_run = f"undo__{scene.request.request_uuid}"
    assert f"book_trip__compensation / {undo_run} carries it out" in cancelled.out
    assert run_of("book_trip__compensation", undo_run) is not None

    scene.freeze()
    undo = scene.undo_of()
    scene.compensate(undo, undo.open_actions[0], "COMPENSATION_FAILED", failed=True, error="502")
    assert scene.settle() is not None

    shown = airflow_process("saga", "show", *scene.run, "--output", "json")
    assert shown.code == 0, shown.err
    data = json.loads(shown.out)
    assert data["saga"]["state"] == "PARTIALLY_CANCELLED"
    (standing,) = data["standing"]
    assert standing["why"] == "its compensation gave up after 1 try: 502"
    command = next(move["command"] for move in standing["next"] if "--undone" in (move["command"] or ""))

    resolved = airflow_process(*command.split()[1:-3], "called the airline")
    assert resolved.code == 0, resolved.err
    assert "is CANCELLED now" in resolved.out
    assert scene.saga.state == "CANCELLED"


def test_no_airflow_command_loads_the_store_to_show_its_help(airflow_home: Path) -> None:
    program = (
        "import sys\n"
        "from airflow.cli import cli_parser\n"
        "cli_parser.get_parser()\n"
        "assert 'saga' in cli_parser.ALL_COMMANDS_DICT\n"
        "loaded = [name for name in ('psycopg', 'alembic.command', 'airflow_saga.store', 'airflow_saga.cli.commands')"
        " if name in sys.modules]\n"
        "print(loaded)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr[-3000:]
