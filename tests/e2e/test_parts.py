"""A part is undone, one compensation is tried again, probes are asked: by the API of a real Airflow, as by the tab."""

from __future__ import annotations

import signal
from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_saga.store.reader import SagaView
from tests.e2e.scene import SOON, Scene, Trip

pytestmark = pytest.mark.together


def ask(trip: Trip, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """A verb with a body, or, without one, what there is to see."""
    method = "GET" if body is None else "POST"
    status, answer = trip.airflow.saga(method, trip.dag_id, trip.run_id, verb, body)
    assert status == 200, answer
    said: dict[str, Any] = answer
    return said


def test_c101_a_part_is_undone_and_the_run_goes_on_from_there_when_cleared(scene: Scene) -> None:
    trip = scene.trip("line").start(a=["flights"], b=["notes", "cars", "hotels"])
    trip.must_be_completed(calls=4)
    cars = trip.action("cars").action_id
    plan = ask(trip, f"plan?from_action={cars}")
    assert [row["name"] for row in plan["actions"]] == ["hotels", "cars"]

    decided = ask(trip, "undo", {"from_action": cars, "plan": plan["hash"], "reason": "the wrong car"})

    assert decided["verdict"] == "cancelling"
    assert trip.wait_saga("SUSPENDED").saga.reason == "the wrong car"
    assert trip.wait_undo() == "success"
    assert trip.undo_order == ["hotels", "cars"]
    assert trip.net.total == 2

    scene.airflow.clear(trip.dag_id, trip.run_id, ["b"])
    view = trip.wait_saga("COMPLETED")
    assert [len(trip.calls(kind)) for kind in ("flights", "notes", "cars", "hotels")] == [1, 1, 2, 2]
    assert trip.net.total == 4
    assert [(request.cause, request.whole_run) for request in view.requests] == [("user", False)]


def test_a_compensation_that_failed_is_tried_again_alone(scene: Scene) -> None:
    trip = scene.trip("line")
    hotels, _ = (trip.tell("refuse", kind, verb="undo") for kind in ("hotels", "flights"))
    trip.start(a=["flights"], b=["hotels", "cars", "raise"])
    trip.wait_saga("PARTIALLY_CANCELLED")
    before = {kind: len(trip.undo_calls(kind)) for kind in ("flights", "hotels", "cars")}
    scene.world.forget(hotels)

    ask(trip, f"actions/{trip.action('hotels').action_id}/retry", {"reason": "the hotel answers again"})

    def settled() -> SagaView | None:
        view = trip.view
        return view if len(view.requests) == 2 and view.requests[-1].state == "SETTLED" else None

    view = trip.wait(settled, SOON, "the second undo to be settled")
    assert view is not None
    assert view.saga.state == "PARTIALLY_CANCELLED"
    assert {action.name: action.state for action in view.actions} == {
        "flights": "COMPENSATION_FAILED",
        "hotels": "COMPENSATED",
        "cars": "COMPENSATED",
    }
    after = {kind: len(trip.undo_calls(kind)) - before[kind] for kind in before}
    assert after == {"flights": 0, "hotels": 1, "cars": 0}


def test_probes_say_what_became_of_what_is_in_doubt_and_nothing_else_is_called(scene: Scene) -> None:
    trip = scene.trip("keep")
    trip.tell("hold", "hotels")
    trip.start(a=["flights"], b=["hotels"])
    (call,) = trip.await_calls("hotels")
    trip.process("b").kill(signal.SIGKILL)
    trip.wait_saga("FAILED")
    assert trip.wait_action("hotels", "IN_DOUBT").lands_by is not None
    _wait_until_it_cannot_land(trip)

    started = ask(trip, "probe", {})["undo_run"]

    assert scene.airflow.wait_run(started["dag_id"], started["run_id"]) == "success"
    (hotels, _) = ask(trip, "plan")["actions"]
    assert hotels["name"] == "hotels"
    assert hotels["probe"].startswith("it took effect (asked at ")
    assert len(scene.world.lookups("hotels", key=call["key"])) == 1
    assert (trip.undo_calls(), trip.state, trip.requests) == ([], "FAILED", ())
    assert trip.action("hotels").state == "IN_DOUBT", "an answer decides nothing"

    ask(trip, "undo", {})
    trip.wait_saga("CANCELLED")
    trip.must_be_net_zero()


def _wait_until_it_cannot_land(trip: Trip) -> None:
    def over() -> bool:
        lands_by = trip.action("hotels").lands_by
        return lands_by is None or lands_by < datetime.now(UTC)

    trip.wait(over, SOON, "the lost call to be out of the way")
