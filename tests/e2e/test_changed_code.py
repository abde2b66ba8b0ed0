"""The DAG file changes between a run and what comes after it: Airflow goes on with the newest, whatever the run had.

Each test has a file of its own, in two editions: the second replaces the first while Airflow runs.
"""

from __future__ import annotations

import textwrap
import uuid

import pytest

from tests.e2e.scene import SOON, Scene, Trip
from tests.support.airflow_api import AirflowApiError

pytestmark = pytest.mark.together

HEAD = """
from airflow.sdk import task
from support import travel
from airflow_saga import ActionRecord, CompensationRejected, SagaDAG, action


def cancel(record: ActionRecord) -> None:
    travel.cancel(record.params["kind"], record.result["id"], idempotency_key=record.undo_key)


def wrong(record: ActionRecord) -> None:
    raise CompensationRejected("this is not what the first edition has called")


def book(kind: str, trip: dict, key: str) -> dict:
    return travel.book(kind, {**trip, "trip": trip["id"]}, idempotency_key=key)


def calls(declared, kind):
    return lambda dag_run: declared(kind, dag_run.conf["trip"])
"""


def edition(dag_id: str, body: str, **dag: str) -> str:
    options = "".join(f", {name}={value!r}" for name, value in dag.items())
    text = textwrap.indent(textwrap.dedent(body), "    ")
    declared, _, steps = text.partition("# steps\n")
    return f"{HEAD}\n{textwrap.dedent(declared)}\nwith SagaDAG({dag_id!r}, schedule=None{options}):\n{steps}"


class Edited:
    """A DAG of this test alone."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.dag_id = f"edited_{uuid.uuid4().hex[:8]}"
        self.path = scene.airflow.dags_folder / f"{self.dag_id}.py"

    def write(self, body: str, **dag: str) -> None:
        """Replace the file and wait until Airflow has parsed it."""
        before = self._parsed_at()
        self.path.write_text(edition(self.dag_id, body, **dag))
        self.scene.airflow.wait_for(
            lambda: self._parsed_at() != before, SOON, f"{self.dag_id} is parsed (again)"
        )

    def _parsed_at(self) -> str | None:
        try:
            return str(self.scene.airflow.dag(self.dag_id)["last_parsed_time"])
        except AirflowApiError:
            return None

    def trip(self) -> Trip:
        return self.scene.trip(self.dag_id).start()


def test_c51_actions_of_changed_removed_and_renamed_code_are_undone_or_named(scene: Scene) -> None:
    edited = Edited(scene)
    edited.write("""
        @action(compensate=cancel)
        def flights(kind: str, trip: dict, *, key: str) -> dict:
            return book(kind, trip, key)

        @action(compensate=cancel)
        def hotels(kind: str, trip: dict, *, key: str) -> dict:
            return book(kind, trip, key)

        @action(compensate=cancel)
        def cars(kind: str, trip: dict, *, key: str) -> dict:
            return book(kind, trip, key)

        @action(compensate=cancel)
        def notes(kind: str, trip: dict, *, key: str) -> dict:
            return book(kind, trip, key)
        # steps
        @task.saga
        def first(dag_run=None):
            flights("flights", dag_run.conf["trip"])

        @task.saga
        def second(dag_run=None):
            hotels("hotels", dag_run.conf["trip"])

        @task.saga
        def third(dag_run=None):
            notes("notes", dag_run.conf["trip"])
            cars("cars", dag_run.conf["trip"])

        first() >> second() >> third()
        """)
    trip = edited.trip()
    trip.wait_saga("COMPLETED")
    edited.write("""
        @action(compensate=wrong, version=2, compensations={1: cancel})
        def flights(kind: str, trip: dict, *, key: str) -> dict:
            return book(kind, trip, key)

        @action(compensate=cancel)
        def hotels(kind: str, trip: dict, *, key: str) -> dict:
            return book(kind, trip, key)

        @action(compensate=cancel, aliases=("cars",))
        def motors(kind: str, trip: dict, *, key: str) -> dict:
            return book(kind, trip, key)
        # steps
        @task.saga
        def first(dag_run=None):
            flights("flights", dag_run.conf["trip"])

        @task.saga
        def third(dag_run=None):
            motors("cars", dag_run.conf["trip"])

        first() >> third()
        """)

    trip.mark_failed()

    trip.wait_saga("PARTIALLY_CANCELLED", timeout=2 * SOON)
    assert trip.undo_order == ["cars", "hotels", "flights"], trip.story()
    standing = trip.action("notes")
    assert standing.state == "COMPENSATION_FAILED"
    assert "no action named 'notes' is declared" in str(standing.error)
    assert (trip.net.of("notes"), trip.net.total) == (1, 1)


CHANGED = """
    @action(compensate=cancel)
    def flights(kind: str, trip: dict, *, key: str) -> dict:
        return book(kind, trip, key)

    @action(compensate=cancel)
    def {name}(kind: str, trip: dict, *, key: str) -> dict:
        return book(kind, trip, key)

    @action(compensate=cancel)
    def {other}(kind: str, trip: dict, *, key: str) -> dict:
        return book(kind, trip, key)
    # steps
    @task.saga(on_divergence="{mode}")
    def only(dag_run=None):
        flights("flights", dag_run.conf["trip"])
        {name}("{name}", dag_run.conf["trip"])
        {end}

    only()
    """


@pytest.mark.parametrize("mode", ["undo", "stop"])
def test_c19_step_that_resumes_with_other_code_stops_or_is_undone_from_there(scene: Scene, mode: str) -> None:
    edited = Edited(scene)
    names = {"name": "hotels", "other": "cars", "mode": mode}
    edited.write(CHANGED.format(**names, end="raise RuntimeError('told to fail')"), on_failure="keep")
    trip = edited.trip()
    assert trip.wait_run() == "failed"
    first_version = trip.step("only").dag_version
    names = {"name": "cars", "other": "hotels", "mode": mode}
    edited.write(CHANGED.format(**names, end="pass"), on_failure="keep")

    trip.airflow.clear(trip.dag_id, trip.run_id, ["only"])

    if mode == "stop":
        trip.wait(
            lambda: trip.task("only")["try_number"] == 2 and trip.run_state == "failed", SOON, "it failed"
        )
        log = trip.log("only")
        assert "the log holds hotels" in log
        assert "the step now asks for cars" in log
        assert (trip.net.kinds.get("cars", 0), trip.net.of("hotels"), trip.requests) == (0, 1, ())
        return
    trip.wait(lambda: trip.run_state == "success", 3 * SOON, "it goes on live")
    trip.wait_saga("COMPLETED")
    assert (trip.undo_order, trip.net.of("flights"), trip.net.of("cars")) == (["hotels"], 1, 1), trip.story()
    assert len(trip.calls()) == 3
    assert first_version is not None


# -- the compensation DAG is not to be had ----------------------------------------------------------------------------

ONE = """
    @action(compensate=cancel)
    def flights(kind: str, trip: dict, *, key: str) -> dict:
        return book(kind, trip, key)
    # steps
    @task.saga
    def only(dag_run=None):
        flights("flights", dag_run.conf["trip"])

    only()
    """


def test_c26_paused_compensation_dag_is_said_to_be_and_undoes_once_it_is_not(scene: Scene) -> None:
    edited = Edited(scene)
    edited.write(ONE)
    trip = edited.trip()
    trip.wait_saga("COMPLETED")
    scene.airflow.pause(trip.undo_dag_id)

    told = scene.airflow.cli("saga", "undo", trip.dag_id, trip.run_id)

    assert f"that DAG is paused; run: airflow dags unpause {trip.undo_dag_id}" in told.stdout
    assert (trip.state, trip.undo_calls()) == ("CANCELLING", [])
    scene.airflow.pause(trip.undo_dag_id, False)
    trip.wait_saga("CANCELLED")
    assert trip.net.total == 0


def test_c27_undo_whose_dag_is_gone_for_a_while_is_carried_out_when_it_is_back(scene: Scene) -> None:
    edited = Edited(scene)
    edited.write(ONE)
    trip = edited.trip()
    trip.wait_saga("COMPLETED")
    edited.path.unlink()
    trip.wait(lambda: trip.undo_dag_id not in scene.airflow.dag_ids(), SOON, "Airflow has forgotten the file")

    told = scene.airflow.cli("saga", "undo", trip.dag_id, trip.run_id)

    assert "could not be started now; the reconciler starts it" in told.stdout
    assert (trip.state, trip.requests[-1].state) == ("CANCELLING", "REQUESTED")
    edited.path.write_text(edition(edited.dag_id, ONE))
    trip.wait_saga("CANCELLED", timeout=2 * SOON)
    assert trip.net.total == 0
    assert len(trip.undo_calls()) == 1
