"""Clear, as people do in the UI: what stopped resumes, what was undone runs anew, what was done is redone."""

from __future__ import annotations

import pytest

from tests.e2e.scene import SOON, Scene

pytestmark = pytest.mark.together


def test_run_that_was_undone_is_cleared_and_runs_anew_with_new_keys(scene: Scene) -> None:
    trip = scene.trip("line").start(a=["flights"], b=["hotels", "raise<2"])
    trip.must_be_undone(calls=2)

    scene.airflow.clear(trip.dag_id, trip.run_id)

    view = trip.wait_saga("COMPLETED", timeout=2 * SOON)
    assert trip.wait_run() == "success"
    assert {step.task_id: step.generation for step in view.steps} == {"a": 2, "b": 2}
    assert len({call["key"] for call in trip.calls()}) == 4
    assert (trip.net.total, len(trip.undo_calls()), len(view.requests)) == (2, 2, 1)


def test_finished_steps_that_are_cleared_are_undone_in_reverse_and_done_again(scene: Scene) -> None:
    trip = scene.trip("line").start(a=["flights"], b=["hotels"])
    trip.must_be_completed(calls=2)

    scene.airflow.clear(trip.dag_id, trip.run_id, ["a"], downstream=True)

    trip.wait(lambda: trip.step("b").generation == 2, 2 * SOON, "both steps are redone")
    view = trip.wait_saga("COMPLETED", timeout=2 * SOON)
    assert trip.wait_run() == "success"
    assert trip.undo_order == ["hotels", "flights"]
    assert (trip.net.of("flights"), trip.net.of("hotels"), len(trip.calls())) == (1, 1, 4)
    assert {request.state for request in view.requests} == {"SETTLED"}
    assert {request.cause for request in view.requests} == {"redo"}
    times = {event["what"]: event["at"] for event in reversed(view.events)}
    seconds = (times["undo frozen"] - times["undo asked for"]).total_seconds()
    print(f"the undo began {seconds:.1f} s after the cleared step")
    assert seconds < 15


def test_finished_step_that_is_cleared_alone_is_refused_and_names_the_later_one(scene: Scene) -> None:
    trip = scene.trip("line").start(a=["flights"], b=["hotels"])
    trip.must_be_completed(calls=2)

    scene.airflow.clear(trip.dag_id, trip.run_id, ["a"])

    trip.wait_task("a", "failed")
    trip.wait_run()
    assert "Clear" in trip.log("a")
    assert trip.log("a").count(" b") > 0
    view = trip.wait_saga("COMPLETED")
    assert (trip.net.total, trip.undo_calls(), view.requests) == (2, [], ())


def test_c18_step_cleared_in_the_middle_of_a_call_resumes_without_a_second_one(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "hotels")
    trip.start(a=["flights"], b=["cars", "hotels", "notes"])
    trip.await_calls("hotels")
    attempt = trip.process("b")

    scene.airflow.clear(trip.dag_id, trip.run_id, ["b"])

    attempt.wait_gone(SOON)
    trip.must_be_completed(calls=4)
    assert [step.generation for step in trip.view.steps] == [1, 1]


def test_c16_failed_run_that_keeps_its_effects_is_cleared_and_resumes_without_its_xcoms(
    scene: Scene,
) -> None:
    trip = scene.trip("keep").start(a=["flights"], b=["hotels", "raise<2", "cars"])
    trip.wait_saga("FAILED")
    assert trip.wait_run() == "failed"
    scene.metadata("DELETE FROM xcom WHERE run_id = %s", trip.run_id)

    scene.airflow.clear(trip.dag_id, trip.run_id, only_failed=True)

    trip.must_be_completed(calls=3)
