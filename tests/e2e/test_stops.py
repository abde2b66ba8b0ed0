"""Every way a run can stop leads to the right end, without anybody's help."""

from __future__ import annotations

import pytest

from tests.e2e.scene import Scene, names

pytestmark = pytest.mark.together


def test_run_marked_failed_in_the_middle_of_a_call_is_undone(scene: Scene) -> None:
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
    assert trip.calls("cars") == []
    assert (trip.task_state("a"), trip.task_state("b")) == ("success", "failed")


def test_task_that_raises_undoes_the_run_by_policy(scene: Scene) -> None:
    trip = scene.trip("line").start(a=["flights", "hotels"], b=["cars", "raise"])

    view = trip.must_be_undone(calls=3)

    assert view.saga.cause == "failure"
    assert trip.undo_order == ["cars", "hotels", "flights"]


def test_run_that_succeeds_is_completed_and_nothing_is_undone(scene: Scene) -> None:
    trip = scene.trip("line").start(a=["flights"], b=["hotels", "cars", "weather"])

    view = trip.must_be_completed(calls=3)

    assert names(view.actions) == ["flights", "hotels", "cars", "weather"]
