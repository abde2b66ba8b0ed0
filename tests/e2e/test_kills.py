"""A platform that kills resumes and never undoes while tries are left; a worker that is lost for good is undone."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.scene import SOON, Scene

pytestmark = pytest.mark.together


@pytest.mark.parametrize("whom", ["task", "supervisor"])
def test_sigterm_gives_the_slot_back_and_goes_on_without_using_a_try(scene: Scene, whom: str) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "hotels")
    trip.start(a=["flights"], b=["hotels", "cars"])
    trip.await_calls("hotels")
    attempt = trip.process("b")

    if whom == "task":
        attempt.kill(signal.SIGTERM)
    else:
        attempt.kill_supervisor(signal.SIGTERM)
        scene.airflow.wait_log(trip.dag_id, trip.run_id, "b", "asked this process to go")

    trip.release("hotels")
    attempt.wait_gone(SOON)
    trip.must_be_completed(calls=3)
    assert trip.task("b")["try_number"] == 1
    assert "is run again and resumes" in trip.log("b")


def test_c05_sigterm_again_and_again_stops_once(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "hotels")
    trip.start(a=["flights"], b=["hotels", "cars"])
    trip.await_calls("hotels")
    attempt = trip.process("b")

    for _ in range(3):
        attempt.kill(signal.SIGTERM)
    scene.airflow.wait_log(trip.dag_id, trip.run_id, "b", "asked this process to go")
    attempt.kill(signal.SIGTERM)

    trip.release("hotels")
    attempt.wait_gone(SOON)
    trip.must_be_completed(calls=3)
    assert trip.log("b").count("is run again and resumes") == 1


def test_c10_task_killed_without_a_word_is_undone_by_policy(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "hotels")
    trip.start(a=["flights"], b=["hotels", "cars"])
    trip.await_calls("hotels")

    trip.process("b").kill(signal.SIGKILL)

    view = trip.must_be_undone(calls=2)
    assert view.saga.cause in ("lost_worker", "failure")
    assert trip.undo_order == ["hotels", "flights"]


def test_task_killed_with_tries_left_goes_on_after_asking_what_became_of_its_call(scene: Scene) -> None:
    trip = scene.trip("retried")
    trip.tell("hold", "hotels")
    trip.start(a=["flights"], b=["cars", "hotels", "notes"])
    trip.await_calls("hotels")

    trip.process("b").kill(signal.SIGKILL)

    trip.must_be_completed(calls=4)
    assert trip.task("b")["try_number"] == 2


def test_task_killed_in_a_call_that_never_landed_makes_it_again(scene: Scene) -> None:
    trip = scene.trip("retried")
    trip.tell("hold", "payments", lands="never", times=1)
    trip.start(a=["flights"], b=["payments", "notes"])
    trip.await_calls("payments")

    trip.process("b").kill(signal.SIGKILL)

    trip.wait_saga("COMPLETED", timeout=2 * SOON)
    first, second = trip.calls("payments")
    assert first["key"] == second["key"]
    assert (trip.net.total, len(trip.requests)) == (3, 0)


def test_c12_healthy_task_that_airflow_takes_for_lost_goes_on_in_its_next_try(scene: Scene) -> None:
    trip = scene.trip("retried")
    trip.tell("hold", "yachts")
    trip.start(a=["flights"], b=["hotels", "yachts", "notes"])
    trip.await_calls("yachts")
    attempt = trip.process("b")

    attempt.kill_supervisor(signal.SIGSTOP)  # its heartbeats arrive too late
    trip.wait(lambda: trip.task("b")["id"] != attempt.ti_id, SOON, "Airflow has given the attempt up")
    attempt.kill_supervisor(signal.SIGCONT)

    attempt.wait_gone(SOON)
    trip.release("yachts")
    trip.must_be_completed(calls=4)
    assert trip.task("b")["try_number"] == 2


def test_c08_orphan_that_answers_after_the_run_was_marked_failed_is_undone(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "hotels")
    trip.start(a=["flights"], b=["hotels", "cars"])
    trip.await_calls("hotels")
    orphan = trip.process("b")
    orphan.kill_supervisor(signal.SIGKILL)

    trip.mark_failed()

    trip.wait_saga("CANCELLING")
    assert orphan.alive
    trip.release("hotels")
    view = trip.must_be_undone(calls=2)
    orphan.wait_gone(SOON)
    assert trip.undo_order == ["hotels", "flights"]
    assert not any("COMPLETED" in what for what in trip.history)
    assert view.saga.state == "CANCELLED"


def test_orphan_of_a_lost_supervisor_ends_its_call_before_the_run_is_undone(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "yachts")
    trip.start(a=["flights"], b=["yachts", "cars"])
    trip.await_calls("yachts")
    orphan = trip.process("b")

    orphan.kill_supervisor(signal.SIGKILL)

    trip.wait_run("failed")
    trip.release(
        "yachts"
    )  # before or after the call's own timeout: its effect is found and undone in either case
    trip.must_be_undone()
    orphan.wait_gone(SOON)
    assert trip.undo_order[-2:] == ["yachts", "flights"]
