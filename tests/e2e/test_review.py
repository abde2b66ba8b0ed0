"""Questions to a person in a real Airflow: none is put twice, and none outlives its answer."""

from __future__ import annotations

import pytest

from tests.e2e.scene import SOON, Scene, Trip

pytestmark = pytest.mark.together


def _leaves_a_message(scene: Scene) -> Trip:
    trip = scene.trip("line").start(a=["flights", "messages"], b=["raise"])
    view = trip.wait_saga("PARTIALLY_CANCELLED")
    assert [row.name for row in view.residual] == ["messages"]
    return trip


def test_second_undo_of_a_run_does_not_ask_again_and_the_first_question_still_counts(scene: Scene) -> None:
    trip = _leaves_a_message(scene)
    question = trip.wait_question()
    first = trip.undo_run_id

    second = scene.airflow.trigger(trip.undo_dag_id, {"run_id": trip.run_id})
    assert scene.airflow.wait_run(trip.undo_dag_id, second) == "failed"

    assert scene.airflow.hitl(trip.undo_dag_id, second, unanswered=False) == []
    assert f"already, in {first}" in scene.airflow.logs(trip.undo_dag_id, second, "settle")
    trip.answer(question, "Let it stand")
    trip.wait_saga("CANCELLED")
    assert trip.action("messages").state == "ACCEPTED"
    assert scene.airflow.wait_run(trip.undo_dag_id, first) == "success"


def test_question_that_was_answered_elsewhere_ends_by_itself(scene: Scene) -> None:
    trip = _leaves_a_message(scene)
    trip.wait_question()
    _be_time_to_look(scene, trip)
    trip.wait(lambda: _waits_again(scene, trip), SOON, "the question has looked, and is still asked")
    action, said = str(trip.action("messages").action_id), ("--accepted", "--note", "it may stand")
    scene.airflow.cli("saga", "resolve", trip.dag_id, trip.run_id, action, *said)
    trip.wait_saga("CANCELLED")

    _be_time_to_look(scene, trip)

    assert trip.wait_undo() == "success"
    assert "it may stand" in str(trip.action("messages").note)


def _be_time_to_look(scene: Scene, trip: Trip) -> None:
    scene.metadata(
        "UPDATE task_instance SET trigger_timeout = now() WHERE run_id = %s AND state = 'awaiting_input'",
        trip.undo_run_id,
    )


def _waits_again(scene: Scene, trip: Trip) -> bool:
    return scene.metadata(
        "SELECT state, trigger_timeout > now() + interval '5 minutes' FROM task_instance "
        "WHERE run_id = %s AND task_id = 'review'",
        trip.undo_run_id,
    ) == [("awaiting_input", True)]
