"""A deferrable operator as a step: its remote work is ended once, by whoever ends the step, or goes on undisturbed.

A job is the remote work; `_end` lets it end, which its trigger notices.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.scene import SOON, Scene, Trip
from tests.support.airflow import RunningAirflow
from tests.support.airflow_api import PATIENCE

NAME = "deferred.job"
GRACE_SECONDS = 30.0 * PATIENCE
"""From a person's word to the cancel of the remote work: two seconds where the machine has nothing else to do."""


def _deferred(scene: Scene) -> Trip:
    """A trip whose job runs, and whose task waits for it without a process."""
    trip = scene.trip("deferred")
    scene.airflow.trigger("deferred", {"trip": {"id": trip.run_id}}, trip.run_id)
    trip.wait_task("job", "deferred")
    assert len(trip.calls("jobs")) == 1
    return trip


def _end(trip: Trip, of: int = 0) -> None:
    """The job of the trip ends, as far as the remote service is concerned."""
    job = trip.calls("jobs")[of]["id"]
    status, _ = trip.world.call("POST", "/effects/endings", {"job": job}, key=str(job))
    assert status == 201


def _told(trip: Trip) -> Any:
    deferral = trip.action(NAME).deferral
    return None if deferral is None else json.loads(deferral)


def _must_be_undone_once(trip: Trip) -> None:
    """One start, one cancel, and the log names the job that was cancelled."""
    trip.must_be_undone(calls=1)
    (cancel,) = trip.undo_calls("jobs")
    assert cancel["key"] == trip.action(NAME).undo_key
    assert _told(trip)["kwargs"]["job_id"] == trip.calls("jobs")[0]["id"]
    assert trip.action(NAME).state == "COMPENSATED"
    assert "waits in the triggerer: jobs.JobTrigger" in str(trip.action(NAME).note)


def test_deferred_operator_waits_without_a_process_and_ends_the_action_it_began(scene: Scene) -> None:
    trip = _deferred(scene)
    begun = trip.action(NAME)
    assert (begun.state, begun.deferred, trip.step("job").lease_until) == ("PENDING", True, None)

    # Longer than a lease, and longer than the reconciler takes to look at it.
    scene.airflow.wait_for(lambda: _passes(scene) >= 2 or None, SOON, "the reconciler has looked twice")
    assert trip.action(NAME) == begun
    _end(trip)

    trip.must_be_completed(calls=2)
    done = trip.action(NAME)
    assert (done.state, done.key, done.seq, done.tries) == ("DONE", begun.key, begun.seq, 1)
    assert json.loads(str(done.result)) == {"job": trip.calls("jobs")[0]["id"], "state": "ended"}
    assert done.deferral is None


def _passes(scene: Scene) -> int:
    runs = [run for run in scene.airflow.runs("saga_reconciler") if run["state"] == "success"]
    seen = [run["dag_run_id"] for run in runs]
    known = _seen.setdefault(scene.name, set(seen))
    return len(set(seen) - known)


_seen: dict[str, set[str]] = {}


def test_c01_task_marked_failed_while_it_is_deferred_has_its_remote_work_cancelled_once(scene: Scene) -> None:
    trip = _deferred(scene)

    scene.airflow.patch_task(trip.dag_id, trip.run_id, "job", "failed")

    trip.world.await_received("jobs", 1, GRACE_SECONDS, verb="undo", trip=trip.run_id)
    _must_be_undone_once(trip)


def test_c01_run_marked_failed_or_saga_cancelled_while_a_task_is_deferred_cancels_once(scene: Scene) -> None:
    marked, cancelled = _deferred(scene), _deferred(scene)

    marked.mark_failed()
    scene.airflow.cli("saga", "cancel", cancelled.dag_id, cancelled.run_id)

    _must_be_undone_once(marked)
    _must_be_undone_once(cancelled)
    assert cancelled.calls("reports") == []


def test_c01_task_marked_success_while_it_is_deferred_has_its_remote_work_cancelled_once(
    scene: Scene,
) -> None:
    trip = _deferred(scene)

    scene.airflow.patch_task(trip.dag_id, trip.run_id, "job", "success")

    trip.world.await_received("jobs", 1, GRACE_SECONDS, verb="undo", trip=trip.run_id)
    trip.wait_action(NAME, "COMPENSATED")
    assert len(trip.undo_calls("jobs")) == 1
    assert _told(trip)["kwargs"]["job_id"] == trip.calls("jobs")[0]["id"]
    assert trip.net.of("jobs") == 0
    trip.wait(lambda: trip.step("job").state == "UNDONE", SOON, "its step is undone")


def test_c01_task_cleared_while_it_is_deferred_has_its_job_cancelled_once_and_starts_a_new_one(
    scene: Scene,
) -> None:
    trip = _deferred(scene)

    scene.airflow.clear(trip.dag_id, trip.run_id, ["job"])

    trip.await_calls("jobs", 2)
    (cancel,) = trip.undo_calls("jobs")
    old, new = sorted(trip.actions(NAME), key=lambda action: action.generation)
    assert (old.state, cancel["key"]) == ("COMPENSATED", old.undo_key)
    assert (new.generation > old.generation, new.key != old.key) == (True, True)
    trip.wait_task("job", "deferred")
    _end(trip, of=1)
    trip.wait_saga("COMPLETED")
    assert trip.net.of("jobs") == 1
    assert len(trip.undo_calls("jobs")) == 1


def test_deferred_operator_that_ended_is_undone_by_its_own_compensation(scene: Scene) -> None:
    trip = scene.trip("deferred")
    scene.airflow.trigger("deferred", {"trip": {"id": trip.run_id}, "fail": True}, trip.run_id)
    trip.wait_task("job", "deferred")

    _end(trip)

    trip.must_be_undone(calls=2)
    assert sorted(trip.undo_order) == ["jobs", "reports"]


def test_process_lost_after_the_trigger_woke_it_leaves_a_doubt_that_names_the_remote_work(
    scene: Scene,
) -> None:
    trip = _deferred(scene)
    trip.tell("hold", "reports")
    _end(trip)
    trip.await_calls("reports")

    trip.process("job").kill(signal.SIGKILL)

    trip.wait_saga("PARTIALLY_CANCELLED")
    action = trip.action(NAME)
    assert (action.state, action.in_doubt) == ("IN_DOUBT", True)
    assert _told(trip)["kwargs"]["job_id"] == trip.calls("jobs")[0]["id"]
    assert trip.undo_calls() == []


@pytest.mark.alone
def test_c84_triggerer_killed_and_a_second_one_beside_it_cancel_nothing_and_wake_the_task_once(
    scene: Scene,
) -> None:
    trip, other = _deferred(scene), _deferred(scene)

    scene.airflow.kill("triggerer")
    with _second_triggerer(scene.airflow):
        scene.airflow.restart("triggerer")
        assert trip.undo_calls() == other.undo_calls() == []
        _end(trip)
        trip.must_be_completed(calls=2)
        assert trip.log("job").count("Trigger fired event") <= 1
        other.mark_failed()
        _must_be_undone_once(other)
    assert len(trip.calls("reports")) == 1


@contextmanager
def _second_triggerer(airflow: RunningAirflow) -> Iterator[None]:
    command = [str(airflow._bin / "airflow"), "triggerer", "--skip-serve-logs"]
    process = subprocess.Popen(
        command,
        env=airflow.env,
        cwd=airflow.home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    airflow._sessions.add(process.pid)
    try:
        yield
    finally:
        process.kill()
        process.wait()
