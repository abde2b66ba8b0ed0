"""Every way a run can stop leads to the right end, without anybody's help: marks, failures, limits."""

from __future__ import annotations

from datetime import datetime

import pytest

from tests.e2e.scene import SOON, Scene, names

pytestmark = pytest.mark.together


def test_run_that_succeeds_is_completed_and_nothing_is_undone(scene: Scene) -> None:
    trip = scene.trip("line").start(a=["flights"], b=["hotels", "cars", "weather"])

    view = trip.must_be_completed(calls=3)

    assert names(view.actions) == ["flights", "hotels", "cars", "weather"]


def test_c38_run_marked_failed_in_the_middle_of_a_call_is_undone(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "hotels")
    trip.start(a=["flights"], b=["hotels", "cars"])
    trip.await_calls("hotels")

    trip.mark_failed()

    trip.wait_saga("CANCELLING")
    trip.release("hotels")
    view = trip.must_be_undone(calls=2)
    assert view.saga.cause == "marked_failed"
    assert trip.undo_order == ["hotels", "flights"]
    assert (trip.task_state("a"), trip.task_state("b")) == ("success", "failed")


def test_c37_c03_call_that_never_answers_before_airflow_kills_the_task_is_found_done_and_undone(
    scene: Scene,
) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "hotels")
    trip.start(a=["flights"], b=["hotels", "cars"])
    trip.await_calls("hotels")
    attempt = trip.process("b")

    trip.mark_failed()

    attempt.wait_gone(timeout=SOON)
    assert trip.action("hotels").state in ("PENDING", "IN_DOUBT")
    view = trip.must_be_undone(calls=2)
    assert trip.undo_order == ["hotels", "flights"]
    assert "found done" in str(trip.action("hotels").note) + str([event["detail"] for event in view.events])


def test_run_marked_failed_twice_is_undone_once(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "hotels")
    trip.start(a=["flights"], b=["hotels"])
    trip.await_calls("hotels")

    trip.mark_failed()
    trip.mark_failed()

    trip.wait_saga("CANCELLING")
    trip.release("hotels")
    trip.must_be_undone(calls=2)
    trip.mark_failed()
    trip.must_be_undone(calls=2)


def test_task_marked_failed_is_fenced_and_the_end_of_the_run_undoes_it(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "hotels")
    trip.start(a=["flights"], b=["hotels", "cars"])
    trip.await_calls("hotels")

    scene.airflow.patch_task(trip.dag_id, trip.run_id, "b", "failed")

    # Either the mark was first, or the run's end was: both let no further action begin.
    trip.wait(
        lambda: trip.view.saga.state != "RUNNING" or trip.step("b").state != "RUNNING", SOON, "it is to stop"
    )
    trip.wait_run("failed")
    trip.release("hotels")
    view = trip.must_be_undone(calls=2)
    assert view.saga.cause == "failure"
    assert trip.undo_order == ["hotels", "flights"]


def test_task_that_raises_undoes_the_run_by_policy(scene: Scene) -> None:
    trip = scene.trip("line").start(a=["flights", "hotels"], b=["cars", "raise"])

    view = trip.must_be_undone(calls=3)

    assert view.saga.cause == "failure"
    assert trip.undo_order == ["cars", "hotels", "flights"]


def test_run_that_keeps_its_effects_on_failure_is_undone_only_by_a_person(scene: Scene) -> None:
    trip = scene.trip("keep").start(a=["flights"], b=["hotels", "raise"])
    trip.wait_saga("FAILED")
    assert trip.wait_run() == "failed"
    assert (trip.requests, trip.undo_run_ids, trip.net.total) == ((), [], 2)

    scene.airflow.trigger(trip.undo_dag_id, {"run_id": trip.run_id})

    view = trip.wait_saga("CANCELLED")
    trip.must_be_net_zero()
    assert view.saga.cause == "user"


def test_c31_undo_starts_after_the_last_try_only(scene: Scene) -> None:
    trip = scene.trip("retried").start(a=["flights"], b=["hotels", "raise"])

    view = trip.must_be_undone(calls=2)

    tries = scene.airflow.tries(trip.dag_id, trip.run_id, "b")
    assert sorted(each["try_number"] for each in tries) == [1, 2, 3]
    (request,) = view.requests
    assert request.asked_at > max(datetime.fromisoformat(each["start_date"]) for each in tries)


def test_retry_goes_on_after_what_is_done(scene: Scene) -> None:
    trip = scene.trip("retried").start(a=["flights"], b=["hotels", "raise<3", "cars"])

    view = trip.must_be_completed(calls=3)

    assert trip.task("b")["try_number"] == 3
    assert [row.tries for row in view.actions] == [1, 1, 1]


def test_c35_call_that_takes_effect_after_its_timeout_is_waited_for_and_undone(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("late", "rooms", seconds=7)
    trip.start(a=["flights"], b=["rooms", "cars"])
    trip.await_calls("rooms")

    trip.mark_failed()

    trip.must_be_undone(calls=2)
    assert trip.undo_order == ["rooms", "flights"]
    (undo,) = trip.undo_calls("rooms")
    (call,) = trip.calls("rooms")
    assert call["landed_seq"] < undo["seq"]
    assert (undo["id"], undo["status"]) == (call["id"], 200)


def test_action_timeout_that_a_probe_finds_done_does_not_stop_the_step(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("late", "rooms", seconds=4)
    trip.start(a=["flights"], b=["rooms", "cars"])

    trip.must_be_completed(calls=3)

    assert "did not answer within 3 s" in str(trip.action("rooms").error)


def test_action_timeout_without_a_probe_is_put_before_a_person_and_not_retried(scene: Scene) -> None:
    trip = scene.trip("retried")
    trip.tell("hold", "tours")
    trip.start(a=["flights"], b=["swallow", "tours", "cars"])

    view = trip.wait_saga("PARTIALLY_CANCELLED")

    assert [(row.name, row.state) for row in view.residual] == [("tours", "IN_DOUBT")]
    assert (trip.net.of("flights"), len(trip.calls("cars"))) == (0, 0)
    assert trip.undo_calls("tours") == []
    assert len(scene.airflow.tries(trip.dag_id, trip.run_id, "b")) == 1
    question = trip.wait_question()
    assert "nobody knows" in question["subject"]
    trip.answer(question, "I have undone it by hand", note="called the tour guide")
    trip.wait_saga("CANCELLED")
    assert trip.wait_undo() == "success"


def test_c09_execution_timeout_is_not_swallowed(scene: Scene) -> None:
    trip = scene.trip("limited")
    trip.tell("hold", "hotels")
    trip.start(a=["flights"], b=["swallow", "hotels", "cars"])

    trip.must_be_undone(calls=2)

    assert trip.undo_order == ["hotels", "flights"]


def test_c09_execution_timeout_that_is_swallowed_ends_the_calls_nonetheless(scene: Scene) -> None:
    trip = scene.trip("limited")
    trip.tell("hold", "hotels")
    trip.start(a=["flights"], b=["cling", "hotels", "nap", "cars", "notes"])

    trip.must_be_undone(calls=2)

    assert trip.undo_order == ["hotels", "flights"]


def test_c09_call_that_stays_in_c_after_its_timeout_loses_its_process(scene: Scene) -> None:
    trip = scene.trip("line").start(a=["flights"], b=["swallow", "cruises", "cars"])

    trip.must_be_undone(calls=2)

    assert trip.undo_order == ["cruises", "flights"]


def test_dagrun_timeout_undoes_the_run(scene: Scene) -> None:
    trip = scene.trip("dated")
    trip.tell("hold", "yachts")
    trip.start(a=["flights"], b=["yachts", "cars"])
    trip.await_calls("yachts")

    trip.wait_run("failed")
    trip.wait_saga("FAILED", "CANCELLING")  # told a moment after Airflow has written it

    trip.release("yachts")
    view = trip.must_be_undone(calls=2)
    assert view.saga.cause == "dagrun_timeout"
    assert trip.task_state("b") == "skipped"


def test_c41_undo_begins_when_the_other_branch_has_ended_too(scene: Scene) -> None:
    trip = scene.trip("fork")
    trip.tell("hold", "hotels")
    trip.start(a=["flights"], left=["cars", "raise"], right=["hotels", "notes"], end=["payments"])
    trip.await_calls("hotels")
    trip.wait_task("left", "failed")

    trip.release("hotels")

    trip.must_be_undone(calls=4)
    ended = max(call["answered_seq"] for call in trip.calls())
    assert all(undo["seq"] > ended for undo in trip.undo_calls())
    assert trip.undo_order[-1] == "flights"
    assert sorted(trip.undo_order[:-1]) == ["cars", "hotels", "notes"]
    assert trip.undo_order.index("notes") < trip.undo_order.index("hotels")


def test_run_with_teardown_that_is_marked_failed_ends_well_in_airflow_and_is_undone(scene: Scene) -> None:
    trip = scene.trip("cleaned")
    trip.tell("hold", "hotels")
    trip.start(a=["flights"], b=["hotels", "cars"], c=["notes"])
    trip.await_calls("hotels")

    trip.mark_failed()

    trip.wait_saga("CANCELLING")
    trip.release("hotels")
    view = trip.must_be_undone(calls=2, run="success")
    assert view.saga.cause == "marked_failed"
    assert trip.task_state("clean") == "success"


def test_step_that_skips_is_a_step_that_ended(scene: Scene) -> None:
    trip = scene.trip("line").start(a=["flights"], b=["hotels", "skip"])

    trip.must_be_completed(calls=2)

    assert trip.task_state("b") == "skipped"


def test_c46_run_marked_failed_before_a_step_began_has_nothing_to_undo(scene: Scene) -> None:
    scene.close_pool("queued")
    trip = scene.trip("queued").start(a=["flights"])
    trip.wait_run("running")

    trip.mark_failed()

    view = trip.wait_saga("CANCELLED")
    assert (view.steps, view.requests, trip.undo_run_ids) == ((), (), [])
    assert trip.wait_run() == "failed"
    assert trip.calls() == []
