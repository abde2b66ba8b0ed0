"""What a person is asked about an effect that stands: once, and until it is answered here or settled elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowRescheduleException, TaskAwaitingInput

from airflow_saga.core.identity import undo_run_id
from airflow_saga.core.records import ActionRow, RequestRow
from airflow_saga.operators import answers
from airflow_saga.operators.answers import ApplyOperator, ReviewOperator, asked_already
from airflow_saga.operators.review import ACCEPTED, LEAVE_OPEN, OPTIONS, UNDONE_BY_HAND
from tests.store.scene import Scene

pytestmark = pytest.mark.timeout(120)
TIME_TO_LOOK = {"error": "no response", "error_type": "timeout"}


def answered(option: str) -> dict[str, Any]:
    return {
        "chosen_options": [option],
        "params_input": {},
        "responded_at": datetime.now(UTC),
        "responded_by_user": {"id": "1", "name": "ann"},
    }


@dataclass
class Task:
    """What a task of an undo run asks of its own instance: the XComs, by task (and run), key and map index."""

    xcoms: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def xcom_pull(self, *, task_ids: str, key: str = "return_value", **where: Any) -> Any:
        return self.xcoms.get((task_ids, key, *where.values()))

    def context(self, run_id: str = "undo_2") -> dict[str, Any]:
        run = SimpleNamespace(dag_id="book_trip__compensation", run_id=run_id, conf={})
        return {"ti": self, "dag_run": run, "task": None}


@pytest.fixture
def standing(scene: Scene) -> ActionRow:
    """An effect that an undo has left, since it cannot be undone."""
    scene.act(scene.attach(), 1, effect="NON_COMPENSABLE")
    assert scene.steps.stop_if_held(scene.step())
    undo(scene, scene.cancel(), "undo_1")
    row = scene.action()
    assert (row.state, scene.saga.state) == ("NON_COMPENSABLE", "PARTIALLY_CANCELLED")
    return row


def undo(scene: Scene, request: RequestRow, owner: str) -> None:
    scene.freeze(request, owner)
    attached = scene.undo_of("flight", request, owner)
    for action in attached.open_actions:
        assert scene.undos.settle_action_if_held(attached, action, "NON_COMPENSABLE")
    assert scene.settle(request, owner) is not None


@pytest.fixture
def question(scene: Scene, standing: ActionRow) -> ReviewOperator:
    return ReviewOperator(
        task_id="review",
        saga_dag_id=scene.dag_id,
        saga_run_id=scene.run_id,
        action_id=standing.action_id,
        subject="messages",
        options=list(OPTIONS),
    )


def test_an_answer_is_in_the_log_at_once(scene: Scene, question: ReviewOperator) -> None:
    given = question.execute_complete({}, answered(ACCEPTED))
    assert given["written"] is True
    assert (scene.action().state, scene.saga.state) == ("ACCEPTED", "CANCELLED")
    assert str(scene.action().note).startswith("ann")


def test_a_question_stays_open_as_long_as_its_answer_is_needed(question: ReviewOperator) -> None:
    with pytest.raises(TaskAwaitingInput) as asked:
        question.execute_complete({}, TIME_TO_LOOK)
    assert asked.value.method_name == "execute_complete"
    assert asked.value.timeout == question.response_timeout


def test_a_question_that_was_settled_elsewhere_ends_by_itself(
    scene: Scene, standing: ActionRow, question: ReviewOperator
) -> None:
    scene.resolves.resolve(*scene.run, standing.action_id, to="ACCEPTED", actor="bob", note_text="it may")
    given = question.execute_complete({}, TIME_TO_LOOK)
    assert given == {"chosen_options": [], "written": True}
    assert str(scene.action().note).startswith("bob")


def test_what_was_settled_before_its_question_was_put_is_not_asked(
    scene: Scene, standing: ActionRow, question: ReviewOperator
) -> None:
    scene.resolves.resolve(*scene.run, standing.action_id, to="ACCEPTED", actor="bob", note_text="it may")
    assert question.execute({}) == {"chosen_options": [], "written": True}


@pytest.mark.parametrize(
    ("option", "level", "said"),
    [
        (ACCEPTED, "INFO", "is ACCEPTED in the log already (bob: it may)"),
        (UNDONE_BY_HAND, "WARNING", "the answer of ann came second and changes nothing"),
    ],
)
def test_the_second_of_two_answers_changes_nothing_and_is_told_so(
    scene: Scene,
    standing: ActionRow,
    question: ReviewOperator,
    caplog: pytest.LogCaptureFixture,
    option: str,
    level: str,
    said: str,
) -> None:
    scene.resolves.resolve(*scene.run, standing.action_id, to="ACCEPTED", actor="bob", note_text="it may")
    with caplog.at_level("INFO", answers.__name__):
        given = question.execute_complete({}, answered(option))
    assert given["written"] is True
    ((_, of, text),) = [record for record in caplog.record_tuples if record[0] == answers.__name__]
    assert (logging.getLevelName(of), said in text) == (level, True)
    assert str(scene.action().note).startswith("bob")


def test_an_answer_while_another_undo_is_under_way_waits_for_its_end(
    scene: Scene, standing: ActionRow, question: ReviewOperator
) -> None:
    second = scene.ask()
    scene.freeze(second, "undo_2")
    given = question.execute_complete({}, answered(ACCEPTED))
    assert given["written"] is False
    first = scene.view.requests[0]
    task = Task(
        {
            ("plan", "return_value"): {"request": str(first.request_uuid)},
            ("settle", "reviewed"): [standing.action_id],
            ("review", "return_value", 0): given,
        }
    )
    apply = ApplyOperator(task_id="apply", saga_dag_id=scene.dag_id)
    with pytest.raises(AirflowRescheduleException):
        apply.execute(task.context(undo_run_id(first.request_uuid)))
    scene.undo_of("flight", second, "undo_2")
    assert scene.settle(second, "undo_2") is not None
    assert apply.execute(task.context())["state"] == "CANCELLED"
    assert scene.action().state == "ACCEPTED"


def test_an_undo_whose_question_is_left_open_fails_and_names_what_stands(
    scene: Scene, standing: ActionRow, question: ReviewOperator
) -> None:
    given = question.execute_complete({}, answered(LEAVE_OPEN))
    (first,) = scene.view.requests
    task = Task(
        {
            ("plan", "return_value"): {"request": str(first.request_uuid)},
            ("settle", "reviewed"): [standing.action_id],
            ("review", "return_value", 0): given,
        }
    )
    with pytest.raises(AirflowFailException, match="1 effects still stand"):
        ApplyOperator(task_id="apply", saga_dag_id=scene.dag_id).execute(task.context())


@pytest.mark.parametrize(
    ("run", "review", "asked"),
    [
        ("running", {0: "awaiting_input"}, True),
        ("running", {0: "scheduled"}, True),
        ("running", {}, True),
        ("running", {0: "success"}, False),
        ("running", {0: "failed"}, False),
        ("failed", {0: "awaiting_input"}, False),
        (None, {}, False),
    ],
)
def test_what_an_earlier_undo_still_asks_is_known(
    scene: Scene,
    standing: ActionRow,
    monkeypatch: pytest.MonkeyPatch,
    run: str | None,
    review: dict[int, str],
    asked: bool,
) -> None:
    platform = SimpleNamespace(run_state=lambda *_: run, mapped_states=lambda *_: review)
    monkeypatch.setattr(answers, "SupervisorPlatform", lambda: platform)
    task = Task({("settle", "reviewed", "undo_1"): [standing.action_id]})
    found = asked_already(task.context("undo_2"), scene.reader.requests(scene.saga.saga_id))
    assert found == ({standing.action_id: "undo_1"} if asked else {})
    assert asked_already(task.context("undo_1"), scene.reader.requests(scene.saga.saga_id)) == {}


def test_many_questions_look_less_often() -> None:
    often: Callable[[int], float] = answers.look_again_seconds
    assert often(1) == often(100) == 600
    assert often(1000) == 6000
