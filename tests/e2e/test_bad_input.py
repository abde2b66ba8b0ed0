"""Bad input gets a clear error, and nothing is lost: files that do not load, stores that are not there, secrets."""

from __future__ import annotations

import json

import pytest

from tests.e2e.scene import AIRLINE_PASSWORD, SOON, Scene

pytestmark = pytest.mark.together


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("twins.py", "twin"),
        ("long_dag.py", "236"),
        ("long_task.py", "237"),
        ("forgotten.py", "compensate"),
        ("lambdas.py", "lambda"),
    ],
)
def test_file_that_declares_wrongly_does_not_load_and_says_why(scene: Scene, file: str, says: str) -> None:
    trace = scene.airflow.wait_for(
        lambda: scene.airflow.import_errors().get(f"broken/{file}"), SOON, f"{file} is an import error"
    )

    assert says in trace.splitlines()[-1]
    assert "airflow_saga.core.errors." in trace


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("missing", r"AIRFLOW_CONN_SAGA_MISSING"),
        ("unmigrated", r"airflow saga db migrate"),
        ("away", r"does not answer"),
    ],
)
def test_step_without_a_store_calls_nothing_and_airflow_tries_again(
    scene: Scene, what: str, says: str
) -> None:
    trip = scene.trip(f"store_{what}").start(a=["flights"])

    assert trip.wait_run() == "failed"

    assert trip.calls() == []
    assert trip.task("a")["try_number"] == 2
    assert says in trip.log("a", 2)
    assert trip.state in ("no saga", "PENDING", "COMPLETED", "CANCELLED")


def test_c52_secret_reaches_the_service_and_nothing_that_is_kept(scene: Scene) -> None:
    trip = scene.trip("secretive")
    trip.tell("token", "payments", token=AIRLINE_PASSWORD)
    trip.start()

    trip.must_be_undone(calls=1)

    assert trip.task("pay_carelessly")["try_number"] == 1
    assert "nothing was called" in trip.log("pay_carelessly")
    assert "Secret" in trip.log("pay_carelessly")
    kept = trip.read(lambda reader: _everything(reader.connection, "airflow_saga"))
    assert trip.run_id in kept
    assert AIRLINE_PASSWORD not in kept
    shown = json.dumps(scene.metadata("SELECT value::text FROM xcom WHERE run_id = %s", trip.run_id))
    assert "pay" in shown
    assert AIRLINE_PASSWORD not in shown
    for path in [*scene.airflow.task_logs.rglob("*.log"), *scene.airflow.component_logs.glob("*.log")]:
        assert AIRLINE_PASSWORD not in path.read_text(errors="replace"), path


def _everything(connection, schema: str) -> str:
    """Every row of every table of a schema, as text."""
    tables = connection.execute(
        "SELECT format('%%I.%%I', schemaname, tablename) FROM pg_tables WHERE schemaname = %s", (schema,)
    ).fetchall()
    rows = (connection.execute(f"SELECT t::text FROM {table} t".encode()).fetchall() for (table,) in tables)
    return "\n".join(text for each in rows for (text,) in each)
