"""The undo is killed, marked, cleared, refused, and goes on; what still stands in the end is settled by a person."""

from __future__ import annotations

import json
import signal

import pytest

from tests.e2e.scene import SOON, Scene, Trip
from tests.support.airflow_api import AirflowApiError

pytestmark = pytest.mark.together


def test_run_that_completed_is_undone_by_hand(scene: Scene) -> None:
    trip = scene.trip("line").start(a=["flights"], b=["hotels"])
    trip.must_be_completed(calls=2)

    by_hand = scene.airflow.trigger(trip.undo_dag_id, {"run_id": trip.run_id})

    assert scene.airflow.wait_run(trip.undo_dag_id, by_hand) == "success"
    view = trip.wait_saga("CANCELLED")
    trip.must_be_net_zero()
    assert trip.undo_order == ["hotels", "flights"]
    assert [(request.state, request.cause) for request in view.requests] == [("SETTLED", "user")]
    assert trip.wait_run() == "success"


def test_undo_by_hand_of_an_unknown_run_says_so(scene: Scene) -> None:
    by_hand = scene.airflow.trigger("line__compensation", {"run_id": "never_seen"})

    assert scene.airflow.wait_run("line__compensation", by_hand) == "failed"
    assert "there is no saga line / never_seen" in scene.airflow.logs("line__compensation", by_hand, "plan")


def test_c14_undo_task_that_is_killed_repeats_its_call_with_the_same_key(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "hotels", verb="undo", times=1)
    trip.start(a=["flights"], b=["hotels", "cars", "raise"])
    trip.await_calls("hotels", verb="undo")

    trip.undo_process("undo.b").kill(signal.SIGKILL)

    trip.must_be_undone(calls=3)
    assert [len(trip.undo_calls(kind)) for kind in ("cars", "hotels", "flights")] == [1, 2, 1]
    assert len({undo["key"] for undo in trip.undo_calls("hotels")}) == 1


def test_undo_task_that_the_platform_stops_goes_on_after_the_call_that_it_was_in(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "cars", verb="undo", times=1)
    trip.start(a=["flights"], b=["hotels", "cars", "raise"])
    trip.await_calls("cars", verb="undo")
    attempt = trip.undo_process("undo.b")

    attempt.kill(signal.SIGTERM)

    trip.release("cars")
    attempt.wait_gone(SOON)
    trip.must_be_undone(calls=3)
    assert [len(trip.undo_calls(kind)) for kind in ("cars", "hotels", "flights")] == [1, 1, 1]


def test_undo_run_marked_failed_and_cleared_goes_on(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "flights", verb="undo", times=1)
    trip.start(a=["flights"], b=["hotels", "raise"])
    trip.await_calls("flights", verb="undo")
    attempt = trip.undo_process("undo.a")

    scene.airflow.patch_run(trip.undo_dag_id, trip.undo_run_id, "failed")
    scene.airflow.clear(trip.undo_dag_id, trip.undo_run_id)

    trip.release("flights")
    trip.must_be_undone(calls=2)
    attempt.wait_gone(SOON)
    assert len(trip.undo_calls("hotels")) == 1
    assert len({undo["key"] for undo in trip.undo_calls("flights")}) == 1


def test_undo_run_marked_failed_is_started_again_by_the_reconciler(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "flights", verb="undo", times=1)
    trip.start(a=["flights"], b=["hotels", "raise"])
    trip.await_calls("flights", verb="undo")

    scene.airflow.patch_run(trip.undo_dag_id, trip.undo_run_id, "failed")

    trip.release("flights")
    trip.must_be_undone(calls=2)
    assert len(trip.undo_calls("hotels")) == 1


def test_undo_run_cleared_when_all_is_undone_does_nothing_again(scene: Scene) -> None:
    trip = scene.trip("line").start(a=["flights"], b=["hotels", "raise"])
    trip.must_be_undone(calls=2)

    scene.airflow.clear(trip.undo_dag_id, trip.undo_run_id)

    trip.wait(
        lambda: scene.airflow.run(trip.undo_dag_id, trip.undo_run_id)["end_date"] is None, SOON, "cleared"
    )
    trip.must_be_undone(calls=2)
    assert len(trip.undo_calls()) == 2


def _leaves_hotels_standing(scene: Scene) -> Trip:
    """A run whose undo fails for its hotel, after three tries."""
    trip = scene.trip("told")
    trip.tell("fail", "hotels", verb="undo")
    trip.start(a=["flights"], b=["hotels", "raise"])
    view = trip.wait_saga("PARTIALLY_CANCELLED")
    assert [(row.name, row.state) for row in view.residual] == [("hotels", "COMPENSATION_FAILED")]
    assert (len(trip.undo_calls("hotels")), trip.net.of("flights")) == (3, 0)
    return trip


def test_c42_compensation_that_fails_for_good_is_settled_by_a_person_in_airflow(scene: Scene) -> None:
    trip = _leaves_hotels_standing(scene)
    question = trip.wait_question()
    assert trip.run_id in question["body"]

    trip.answer(question, "I have undone it by hand", note="phoned the hotel")

    view = trip.wait_saga("CANCELLED")
    assert trip.wait_undo() == "success"
    assert [(row.name, row.state) for row in view.actions] == [
        ("flights", "COMPENSATED"),
        ("hotels", "COMPENSATED"),
    ]
    assert "phoned the hotel" in str(trip.action("hotels").note)
    assert len(trip.undo_calls("hotels")) == 3
    assert len(scene.world.calls("notices", trip=f"notice of {trip.run_id}")) == 1


def test_c42_each_effect_that_stands_gets_the_answer_that_was_meant_for_it(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("fail", "hotels", verb="undo")
    trip.start(a=["flights", "messages"], b=["hotels", "raise"])
    view = trip.wait_saga("PARTIALLY_CANCELLED")
    stand = {row.name: row.state for row in view.residual}
    assert stand == {"messages": "NON_COMPENSABLE", "hotels": "COMPENSATION_FAILED"}

    first, second = trip.wait_questions(2)
    answers = {"messages": "Let it stand", "hotels": "I have undone it by hand"}
    for question in (second, first):
        trip.answer(question, answers[question["subject"].split()[0]])

    trip.wait_saga("CANCELLED")
    assert trip.wait_undo() == "success"
    assert (trip.action("messages").state, trip.action("hotels").state) == ("ACCEPTED", "COMPENSATED")
    assert (trip.net.of("messages"), trip.net.of("flights"), trip.undo_calls("messages")) == (1, 0, [])


def test_effect_that_a_person_leaves_open_still_stands(scene: Scene) -> None:
    trip = scene.trip("line").start(a=["flights"], b=["messages", "raise"])
    trip.wait_saga("PARTIALLY_CANCELLED")

    trip.answer(trip.wait_question(), "Leave it open")

    assert trip.wait_undo() == "failed"
    assert trip.state == "PARTIALLY_CANCELLED"
    log = scene.airflow.logs(trip.undo_dag_id, trip.undo_run_id, "apply")
    assert "messages" in log
    assert "1 effects still stand" in log


def test_c42_answer_that_comes_second_is_told_that_it_lost(scene: Scene) -> None:
    trip = _leaves_hotels_standing(scene)
    question = trip.wait_question()
    action = str(trip.action("hotels").action_id)

    scene.airflow.cli(
        "saga", "resolve", trip.dag_id, trip.run_id, action, "--undone", "--note", "phoned the hotel"
    )  # fmt: skip

    trip.wait_saga("CANCELLED")
    with pytest.raises(AirflowApiError, match="already been updated"):
        trip.answer(question, "Let it stand")
    assert trip.wait_undo() == "success"
    assert trip.action("hotels").state == "COMPENSATED"


def test_c42_undo_asked_for_again_once_the_service_is_healed_calls_once_more(scene: Scene) -> None:
    trip = _leaves_hotels_standing(scene)
    for rule in scene.world.told():
        if rule.get("trip") == trip.run_id:
            scene.world.forget(rule["id"])

    by_hand = scene.airflow.trigger(trip.undo_dag_id, {"run_id": trip.run_id})

    trip.wait_saga("CANCELLED")
    assert scene.airflow.wait_run(trip.undo_dag_id, by_hand) == "success"
    trip.must_be_net_zero()
    assert (len(trip.undo_calls("hotels")), len(trip.undo_calls("flights"))) == (4, 1)
    assert len({undo["key"] for undo in trip.undo_calls("hotels")}) == 1


def test_c92_undo_that_halts_says_what_it_did_not_do_and_the_next_one_does_it(scene: Scene) -> None:
    trip = scene.trip("halt")
    rule = trip.tell("fail", "cars", verb="undo")
    trip.start(a=["flights", "hotels"], b=["cars", "payments", "notes", "raise"])
    trip.wait_saga("PARTIALLY_CANCELLED")
    assert [(row.name, row.state) for row in trip.view.actions] == [
        ("flights", "DONE"),
        ("hotels", "DONE"),
        ("cars", "COMPENSATION_FAILED"),
        ("payments", "COMPENSATED"),
        ("notes", "COMPENSATED"),
    ]
    scene.world.forget(rule)

    by_hand = scene.airflow.trigger(trip.undo_dag_id, {"run_id": trip.run_id})

    trip.wait_saga("CANCELLED")
    assert scene.airflow.wait_run(trip.undo_dag_id, by_hand) == "success"
    trip.must_be_net_zero()
    assert trip.undo_order == ["notes", "payments", "cars", "hotels", "flights"]
    assert [len(trip.undo_calls(kind)) for kind in ("notes", "payments", "cars", "hotels")] == [1, 1, 4, 1]


def test_saga_summary_in_xcom_tells_the_story(scene: Scene) -> None:
    trip = scene.trip("line").start(a=["flights", "weather"], b=["hotels", "messages"])
    trip.must_be_completed(calls=3)

    first = scene.airflow.xcom(trip.dag_id, trip.run_id, "a", key="saga")
    second = scene.airflow.xcom(trip.dag_id, trip.run_id, "b", key="saga")

    assert json.dumps(first)
    assert (first["saga"], first["step"]) == (f"line / {trip.run_id}", "a")
    assert [(each["name"], each["state"], each["undo"]) for each in first["actions"]] == [
        ("flights", "DONE", "can be undone"),
        ("weather", "DONE", "nothing to undo"),
    ]
    assert (second["can_be_undone"], second["cannot_be_undone"]) == (1, 1)
    assert first["actions"][0]["key"] == trip.calls("flights")[0]["key"]
