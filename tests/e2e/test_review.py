"""Questions to a person in a real Airflow: none is put twice, and none outlives its answer."""

from __future__ import annotations

import time

import pytest

from tests.e2e.scene import SOON, Scene, Trip


def _leaves_a_message(scene: Scene) -> Trip:
    trip = scene.trip("line").start(a=["flights", "messages"], b=["raise"])
    view = trip.wait_saga("PARTIALLY_CANCELLED")
    assert [row.name for row in view.residual] == ["messages"]
    return trip


@pytest.mark.together
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


def test_question_that_is_settled_by_rest_is_gone_at_once_and_the_undo_ends(scene: Scene) -> None:
    """By itself, since the time counts: with others each task of an undo takes that long."""
    trip = _leaves_a_message(scene)
    trip.wait_question()
    began = time.monotonic()
    _settle_by_rest(scene, trip, "undone")

    assert scene.airflow.hitl(trip.undo_dag_id, trip.undo_run_id) == []
    gone = time.monotonic() - began
    assert trip.wait_undo(timeout=15) == "success"
    print(f"answered after {gone:.1f} s, the undo ended after {time.monotonic() - began:.1f} s")
    (answered,) = scene.airflow.hitl(trip.undo_dag_id, trip.undo_run_id, unanswered=False)
    assert (answered["chosen_options"], answered["params_input"]) == (
        ["I have undone it by hand"],
        {"note": "seen to it"},
    )
    assert trip.state == "CANCELLED"
    assert "in the log already" in scene.airflow.logs(
        trip.undo_dag_id, trip.undo_run_id, "review", map_index=0
    )


@pytest.mark.together
def test_question_that_is_settled_by_rest_as_soon_as_it_is_put_ends_well(scene: Scene) -> None:
    """Airflow would lose an answer that its task heard now: it hears it seconds later, at its first try."""
    trip = _leaves_a_message(scene)
    trip.wait(lambda: _review(scene, trip), SOON, "a person is asked")
    began = time.monotonic()
    _settle_by_rest(scene, trip, "accepted")

    assert scene.airflow.hitl(trip.undo_dag_id, trip.undo_run_id) == []
    assert trip.wait_undo() == "success"
    print(f"settled as soon as asked: the undo ended after {time.monotonic() - began:.1f} s")
    assert trip.action("messages").state == "ACCEPTED"
    assert len(scene.airflow.tries(trip.undo_dag_id, trip.undo_run_id, "review", 0)) == 1


@pytest.mark.together
def test_what_is_settled_before_anybody_is_asked_is_not_asked(scene: Scene) -> None:
    trip = _leaves_a_message(scene)
    _settle_by_rest(scene, trip, "accepted")
    assert trip.wait_undo() == "success"
    assert trip.state == "CANCELLED"
    assert scene.airflow.hitl(trip.undo_dag_id, trip.undo_run_id) == []


@pytest.mark.together
def test_question_looks_whether_it_is_still_asked_and_is_answered_from_the_command_line(scene: Scene) -> None:
    trip = _leaves_a_message(scene)
    trip.wait_question()
    _be_time_to_look(scene, trip)
    trip.wait(lambda: _waits_again(scene, trip), SOON, "the question has looked, and is still asked")
    action, said = str(trip.action("messages").action_id), ("--accepted", "--note", "it may stand")
    scene.airflow.cli("saga", "resolve", trip.dag_id, trip.run_id, action, *said)
    trip.wait_saga("CANCELLED")
    assert trip.wait_undo() == "success"
    assert "it may stand" in str(trip.action("messages").note)


def _settle_by_rest(scene: Scene, trip: Trip, answer: str) -> None:
    verb = f"actions/{trip.action('messages').action_id}/resolve"
    body = {"answer": answer, "note": "seen to it"}
    status, said = scene.airflow.saga("POST", trip.dag_id, trip.run_id, verb, body)
    assert status == 200, said


def _review(scene: Scene, trip: Trip) -> bool:
    return scene.metadata(
        "SELECT state FROM task_instance WHERE run_id = %s AND task_id = 'review' AND map_index = 0",
        trip.undo_run_id,
    ) == [("awaiting_input",)]


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
