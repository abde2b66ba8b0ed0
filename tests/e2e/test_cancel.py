"""Cancel from the command line: graceful, now, or only to stop; and what Airflow starts meanwhile."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from tests.e2e.scene import SOON, Scene, Trip

pytestmark = pytest.mark.together


def _cancel(trip: Trip, *how: str) -> str:
    """What the command says. It takes seconds to start, so a call that it shall meet is one of `yachts`."""
    done = trip.airflow.cli("saga", "cancel", trip.dag_id, trip.run_id, *how, "--output", "json", check=False)
    return done.stdout + done.stderr


def test_cancel_lets_the_call_under_way_end_and_undoes_it(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "yachts")
    trip.start(a=["flights"], b=["yachts", "cars"])
    trip.await_calls("yachts")

    _cancel(trip, "--reason", "wrong city")

    assert trip.state == "CANCELLING"
    trip.release("yachts")
    view = trip.must_be_undone(calls=2)
    assert (view.saga.cause, view.saga.reason) == ("user", "wrong city")
    assert str(view.saga.actor).startswith("cli:")
    assert not trip.action("yachts").in_doubt
    assert trip.task_state("b") == "failed"


def test_cancel_keep_only_stops_and_a_clear_goes_on(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "yachts")
    trip.start(a=["flights"], b=["yachts", "cars"])
    trip.await_calls("yachts")

    _cancel(trip, "--keep")

    trip.release("yachts")
    trip.wait_saga("SUSPENDED")
    assert trip.wait_run() == "failed"
    assert (trip.net.total, trip.requests, trip.calls("cars")) == (2, (), [])
    scene.airflow.clear(trip.dag_id, trip.run_id, ["b"])
    trip.must_be_completed(calls=3)


def test_c88_cancel_now_abandons_the_call_within_seconds(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "yachts")
    trip.start(a=["flights"], b=["yachts", "cars"])
    trip.await_calls("yachts")
    attempt = trip.process("b")

    _cancel(trip, "--now")

    doubted = trip.wait_action("yachts", "IN_DOUBT")
    assert trip.saga is not None
    assert doubted.finished_at is not None
    assert (doubted.finished_at - trip.requests[0].asked_at).total_seconds() < 5
    attempt.wait_gone(SOON)
    trip.must_be_undone(calls=2)
    (undo,) = trip.undo_calls("yachts")
    assert doubted.lands_by is not None
    assert datetime.fromisoformat(undo["at"]) > doubted.lands_by


def test_c97_body_that_hangs_cannot_hold_a_cancel(scene: Scene) -> None:
    trip = scene.trip("line").start(a=["flights"], b=["hotels", "hang"])
    trip.wait_action("hotels", "DONE")
    attempt = trip.process("b")

    _cancel(trip)

    trip.must_be_undone(calls=2)
    attempt.wait_gone(SOON)


def test_c22_step_that_airflow_starts_while_the_saga_is_stopped_is_refused(scene: Scene) -> None:
    trip = scene.trip("stubborn")
    trip.tell("hold", "yachts")
    trip.tell("hold", "flights", verb="undo", times=1)
    trip.start(a=["flights"], b=["yachts"], c=["cars"])
    trip.await_calls("yachts")
    _cancel(trip)

    trip.release("yachts")

    refused = trip.wait_task("c", "failed")
    assert refused["try_number"] == 1
    assert "nothing was called" in trip.log("c")
    trip.await_calls("flights", verb="undo")
    assert trip.state == "CANCELLING"
    trip.release("flights")
    trip.must_be_undone(calls=2)


def test_c22_marked_failed_with_downstream_and_cleared_does_not_run_again(scene: Scene) -> None:
    trip = scene.trip("stubborn")
    trip.tell("hold", "yachts", verb="undo", times=1)
    trip.start(a=["yachts"], b=["hotels", "raise"], c=["raise<2", "cars"])
    trip.await_calls("yachts", verb="undo")
    path = f"/dags/{trip.dag_id}/dagRuns/{trip.run_id}/taskInstances/a"
    scene.airflow.request("PATCH", path, {"new_state": "failed", "include_downstream": True})

    scene.airflow.clear(trip.dag_id, trip.run_id, ["c"])

    trip.wait_task("c", "running", "up_for_reschedule")
    assert trip.state == "CANCELLING"
    trip.release("yachts")
    trip.wait_task("c", "failed")
    trip.wait_run("failed")
    view = trip.must_be_undone(calls=2)
    assert view.saga.cause == "failure"
    assert "Clear them too" in trip.log("c")


def test_c89_run_cancelled_before_its_first_step_does_not_begin_later(scene: Scene) -> None:
    scene.close_pool("waiting")
    trip = scene.trip("waiting").start(a=["flights"])
    trip.wait_run("running")

    said = _cancel(trip)

    assert "nothing to undo" in said
    assert (trip.state, trip.requests) == ("CANCELLED", ())
    scene.open_pool("waiting")
    assert trip.wait_run() == "failed"
    assert "nothing was called" in trip.log("a")
    assert (trip.calls(), trip.undo_run_ids, trip.state) == ([], [], "CANCELLED")


def test_cancel_of_a_run_that_is_over_offers_undo(scene: Scene) -> None:
    trip = scene.trip("line").start(a=["flights"], b=["hotels"])
    trip.must_be_completed(calls=2)

    said = _cancel(trip)

    assert "already" in said
    assert "airflow saga undo" in said
    assert (trip.state, trip.net.total) == ("COMPLETED", 2)
    scene.airflow.cli("saga", "undo", trip.dag_id, trip.run_id, "--reason", "second thoughts")
    view = trip.must_be_undone(calls=2, run="success")
    assert (view.saga.cause, view.saga.reason) == ("user", "second thoughts")


def test_doctor_finds_every_component_alive(scene: Scene) -> None:
    scene.airflow.wait_for(
        lambda: any(run["state"] == "success" for run in scene.airflow.runs("saga_reconciler")),
        SOON,
        "the reconciler has run",
    )

    done = scene.airflow.cli("saga", "doctor", "--output", "json", check=False)

    findings = json.loads(done.stdout)
    bad = [finding for finding in findings if finding.get("state") not in ("ok", None)]
    assert (done.returncode, bad) == (0, []), done.stdout + done.stderr
