"""Agents on a real Airflow: stopped in the middle of a sentence, killed, cleared, approved, undone.

The model is scripted and behind real HTTP; each run has a model of its own, named after it.
"""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest

from tests.e2e.scene import HEARD_AFTER, SOON, Scene, Trip
from tests.support.model import ModelView, calls, says

pytestmark = pytest.mark.together

FORMS = ["agent_operator", "agent_task", "agent_provider", "agent_bare"]
CLOSED_WITHIN_SECONDS = 0.3
LONG = "And so it went on, and on, and on, until somebody had enough of it. " * 4


def cast(scene: Scene, dag_id: str) -> tuple[Trip, ModelView]:
    """A trip, and the model that is told what to do on it."""
    trip = scene.trip(dag_id)
    return trip, ModelView(scene.airflow.env["MODEL_URL"], trip.run_id)


def booking(trip: Trip, *tools: str) -> dict[str, Any]:
    return calls(*[(tool, {"trip": trip.run_id}) for tool in tools])


@pytest.mark.parametrize("form", FORMS)
def test_an_agent_stopped_in_mid_sentence_by_marking_the_run_failed_is_undone(
    scene: Scene, form: str
) -> None:
    trip, model = cast(scene, form)
    model.script(booking(trip, "flights", "hotels"), says(LONG))
    model.tell("hold", after=9, turn=1)
    trip.start()
    model.await_chunks(9, after=1, seconds=SOON)

    trip.mark_failed()

    view = trip.must_be_undone(calls=2)
    assert trip.undo_order == ["hotels", "flights"] or trip.undo_order == ["flights", "hotels"]
    asked = view.requests[0].asked_at.timestamp()
    left = model.requests[1]["client_left"]
    assert left is not None
    assert left - asked < CLOSED_WITHIN_SECONDS
    cut = [row for row in view.actions if row.name == "model_request"][-1]
    assert cut.state == "FAILED"
    assert json.loads(cut.result or "{}")["text"] == LONG[:48]


def test_an_agent_killed_in_mid_sentence_resumes_without_asking_again_for_what_was_said(scene: Scene) -> None:
    trip, model = cast(scene, "agent_operator")
    model.script(
        calls(("weather", {"city": "LIS"}), ("list_tables", {})),
        booking(trip, "flights", "hotels"),
        booking(trip, "payments"),
        says("all is done"),
    )
    model.tell("hold", after=2, turn=3)
    trip.start()
    model.await_chunks(2, after=3, seconds=SOON)

    trip.process("agent").kill(signal.SIGKILL)

    trip.must_be_completed(calls=3)
    assert [row["turn"] for row in model.requests] == [0, 1, 2, 3, 3]
    assert trip.task("agent")["try_number"] == 2
    assert trip.airflow.xcom(trip.dag_id, trip.run_id, "agent") == "all is done"


def test_sigterm_gives_the_slot_back_and_the_conversation_goes_on_without_using_a_try(scene: Scene) -> None:
    trip, model = cast(scene, "agent_task")
    model.script(booking(trip, "flights"), booking(trip, "hotels"), says("done"))
    model.tell("hold", after=1, turn=2)
    trip.start()
    model.await_chunks(1, after=2, seconds=SOON)

    trip.process("agent").kill(signal.SIGTERM)

    trip.must_be_completed(calls=2)
    assert trip.task("agent")["try_number"] == 1
    assert [row["turn"] for row in model.requests] == [0, 1, 2, 2]


def test_a_finished_agent_that_is_cleared_is_undone_and_talks_anew(scene: Scene) -> None:
    trip, model = cast(scene, "agent_operator")
    model.script(booking(trip, "flights"), says("done"))
    trip.start()
    trip.must_be_completed(calls=1)

    trip.airflow.clear(trip.dag_id, trip.run_id, ["agent"])

    trip.wait(lambda: len(trip.calls("flights")) == 2, SOON, "it books again")
    trip.wait_saga("COMPLETED")
    assert trip.net.of("flights") == 1
    assert len(trip.undo_calls("flights")) == 1
    assert model.asked == 4


def test_mapped_agents_are_stopped_and_undone_each_by_itself(scene: Scene) -> None:
    trip, model = cast(scene, "agent_mapped")
    model.script(booking(trip, "flights"), says(LONG))
    model.tell("hold", after=3, turn=1, times=2)
    trip.start()
    trip.await_calls("flights", 2)
    trip.wait(
        lambda: sum(row["turn"] == 1 and row["chunks"] >= 3 for row in model.requests) == 2, SOON, "both talk"
    )

    trip.mark_failed()

    trip.must_be_undone(calls=2)


def test_what_stands_after_an_agent_was_undone_is_named(scene: Scene) -> None:
    trip, model = cast(scene, "agent_operator")
    model.script(booking(trip, "hotels"), booking(trip, "messages"), says(LONG))
    model.tell("hold", after=3, turn=2)
    trip.start()
    model.await_chunks(3, after=2, seconds=SOON)

    trip.mark_failed()

    view = trip.wait_saga("PARTIALLY_CANCELLED")
    assert [row.name for row in view.residual] == ["messages"]
    assert trip.net.kinds == {"hotels": 0, "messages": 1}


def test_an_undeclared_tool_waits_for_a_person_and_its_siblings_are_not_called_again(scene: Scene) -> None:
    trip, model = cast(scene, "agent_asks")
    model.script(booking(trip, "hotels", "cars", "payments"), says("done"))
    trip.start()
    trip.wait(lambda: trip.task_state("agent") == "awaiting_input", SOON, "it asks")
    trip.wait(lambda: len(trip.calls()) == 2, SOON, "the others were called")

    _approve(trip)

    trip.wait_saga("COMPLETED")
    assert trip.net.kinds == {"hotels": 1, "cars": 1, "payments": 1}
    assert len(trip.calls()) == 3
    assert [row["turn"] for row in model.requests] == [0, 1]
    approved = trip.action("undeclared_tool")
    assert approved.effect == "NON_COMPENSABLE"
    assert json.loads(approved.params)["tool"] == "cars"


def _approve(trip: Trip) -> None:
    time.sleep(HEARD_AFTER)
    where = f"/dags/{trip.dag_id}/dagRuns/{trip.run_id}/taskInstances/agent/-1/hitlDetails"
    trip.airflow.request("PATCH", where, {"chosen_options": ["Approve"], "params_input": {}})


def test_an_answer_that_waits_for_a_person_is_not_asked_for_again(scene: Scene) -> None:
    trip, model = cast(scene, "agent_llm_asks")
    model.script(says("forty-two"))
    trip.start()
    trip.wait(lambda: trip.task_state("agent") in ("awaiting_input", "deferred"), SOON, "it asks")
    assert trip.step("agent").state == "STOPPED"

    _approve(trip)

    trip.wait_saga("COMPLETED")
    assert trip.airflow.xcom(trip.dag_id, trip.run_id, "agent") == "forty-two"
    assert model.asked == 1


def test_a_model_alone_is_a_step_and_its_answer_is_not_paid_twice(scene: Scene) -> None:
    trip, model = cast(scene, "agent_llm")
    model.script(says("yes"))
    trip.start()
    trip.wait_saga("COMPLETED")
    assert trip.airflow.xcom(trip.dag_id, trip.run_id, "agent") == "yes"
    assert [row.name for row in trip.actions()] == ["model_request"]
    assert model.asked == 1
    assert model.requests[0]["streamed"] is True


def test_agents_leave_one_dag_version_however_often_the_file_is_parsed(scene: Scene) -> None:
    trip, model = cast(scene, "agent_mapped")
    model.script(says("hello"))
    trip.start()
    trip.wait_saga("COMPLETED")
    rows = scene.metadata("SELECT dag_id, count(*) FROM dag_version WHERE dag_id LIKE 'agent%%' GROUP BY 1")
    assert {count for _, count in rows} == {1}, rows


@pytest.mark.timeout(480)
def test_the_demo_agent_runs_with_a_real_small_model_and_what_it_did_is_undone(scene: Scene) -> None:
    """What it says is nonsense, so nothing is said here of which tools it calls, and how often; nor how fast it is."""
    trip = scene.trip("concierge_agent")
    trip.airflow.trigger(trip.dag_id, {"trip": trip.run_id, "model": "openai-chat:small"}, trip.run_id)
    view = trip.wait_saga("COMPLETED", timeout=300)
    names = [row.name for row in view.actions]
    assert names[0] == names[-1] == "model_request"
    assert len(names) >= 3

    trip.airflow.cli("saga", "undo", trip.dag_id, trip.run_id)

    left = {row.name for row in trip.wait_saga("CANCELLED", "PARTIALLY_CANCELLED").residual}
    assert left <= {"notify"}
