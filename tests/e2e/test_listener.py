"""The listener in a real Airflow whose metadata holds the connection: to look it up wrongly ends a scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_saga.core.errors import UnknownSagaError
from airflow_saga.store.connect import Address
from airflow_saga.store.reader import Reader, SagaView
from tests.support.airflow import RunningAirflow
from tests.support.airflow_factory import FreshAirflows

DAGS = Path(__file__).parent / "listener_dags"
BROKEN_PASS = r"UNEXPECTED COMMIT|DetachedInstance|[Ee]rror (while )?calling listener|airflow_saga.*Traceback"


@pytest.mark.slow
def test_c30_runs_are_followed_with_the_connection_in_the_metadata_and_the_scheduler_goes_on(
    fresh_airflow: FreshAirflows,
) -> None:
    airflow = fresh_airflow(dags=[DAGS], store_in_metadata=True)
    assert airflow.store_url is not None
    reader = Reader(Address(airflow.store_url).open())

    runs = {dag_id: airflow.trigger(dag_id) for dag_id in ("marked", "failing", "fine", "bystander")}
    airflow.wait_log("marked", runs["marked"], "many", "booked night 1", timeout=120)
    airflow.patch_run("marked", runs["marked"], "failed")

    marked = _closed(airflow, reader, "marked", runs["marked"], "CANCELLED")
    failed = _closed(airflow, reader, "failing", runs["failing"], "CANCELLED")
    fine = _closed(airflow, reader, "fine", runs["fine"], "COMPLETED")
    assert airflow.wait_run("bystander", runs["bystander"]) == "success"

    # No reconciler runs here: each of these was told by a hook, once, and started at once.
    assert [(r.cause, r.actor, r.state) for r in marked.requests] == [
        ("marked_failed", "Anonymous", "SETTLED")
    ]
    assert [(r.cause, r.actor, r.state) for r in failed.requests] == [("failure", "airflow", "SETTLED")]
    assert fine.requests == ()
    assert {action.state for action in marked.actions + failed.actions} == {"COMPENSATED"}
    assert len(marked.actions) < 200
    assert len(airflow.tries("failing", runs["failing"], "fails")) == 2
    assert {row["dag_id"] for row in reader.sagas()} == {"marked", "failing", "fine"}

    kinds = ("api-server", "dag-processor", "scheduler", "triggerer")
    airflow.wait_for(
        lambda: set(kinds) <= {row["kind"] for row in reader.components()},
        60,
        f"{kinds} have shown the plugin",
    )
    assert airflow.components["scheduler"].running
    assert airflow.grep_logs(BROKEN_PASS) == []
    reader.connection.close()


def _closed(airflow: RunningAirflow, reader: Reader, dag_id: str, run_id: str, state: str) -> SagaView:
    def closed() -> SagaView | None:
        try:
            view = reader.view(dag_id, run_id)
        except UnknownSagaError:
            return None
        return view if view.saga.state == state else None

    return airflow.wait_for(closed, 120, f"{dag_id} / {run_id} is {state}")  # type: ignore[return-value]
