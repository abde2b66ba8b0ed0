"""A question in Airflow's Required Actions ends in seconds when its action is settled elsewhere, and says the same."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_saga import questions
from airflow_saga.operators.review import ACCEPTED, LEAVE_OPEN, OPTIONS, UNDONE_BY_HAND
from tests.airflow.conftest import Command
from tests.airflow.web import Web, api
from tests.store.scene import Scene

pytestmark = pytest.mark.timeout(120)
UNDO_DAG = "book_trip__compensation"
LONG_AGO = 60.0


@dataclass
class Undo:
    """An undo run as Airflow's own database has it: ``settle`` has said what each ``review`` is about."""

    run_id: str

    def review(self, index: int = 0) -> Any:
        """The task instance of a question, as it is now."""
        from airflow.models.taskinstance import TaskInstance

        return _read(
            TaskInstance,
            TaskInstance.run_id == self.run_id,
            TaskInstance.task_id == "review",
            TaskInstance.map_index == index,
        )

    def question(self, index: int = 0) -> Any:
        from airflow.models.hitl import HITLDetail

        return _read(HITLDetail, HITLDetail.ti_id == self.review(index).id)

    def event(self, index: int = 0) -> dict[str, Any]:
        """What ``execute_complete`` of a question that goes on will get."""
        from airflow.sdk.serde import deserialize

        given: dict[str, Any] = deserialize(self.review(index).next_kwargs)["event"]
        return given

    def change(self, index: int = 0, **columns: Any) -> None:
        from airflow.models.taskinstance import TaskInstance
        from airflow.utils.session import create_session
        from sqlalchemy import update

        with create_session(scoped=False) as session:
            found = update(TaskInstance).where(TaskInstance.id == self.review(index).id)
            session.execute(found.values(**columns))

    def respond(self, option: str, name: str, index: int = 0) -> None:
        """As somebody does in Airflow, whose task has not gone on yet."""
        from airflow.models.hitl import HITLDetail
        from airflow.utils.session import create_session

        with create_session(scoped=False) as session:
            question = session.get(HITLDetail, self.review(index).id)
            question.responded_by = {"id": name, "name": name}
            question.responded_at = datetime.now(UTC)
            question.chosen_options = [option]


def _read(model: Any, *where: Any) -> Any:
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session(scoped=False) as session:
        return session.scalar(select(model).where(*where))


Ask = Callable[..., Undo]


@pytest.fixture
def standing(scene: Scene) -> list[int]:
    """Two effects that an undo has left, since they cannot be undone."""
    scene.act(scene.attach(), 1, 2, effect="NON_COMPENSABLE")
    assert scene.steps.stop_if_held(scene.step())
    request = scene.cancel()
    owner = f"undo__{request.request_uuid}"
    scene.freeze(request, owner)
    attached = scene.undo_of("flight", request, owner)
    for action in attached.open_actions:
        assert scene.undos.settle_action_if_held(attached, action, "NON_COMPENSABLE")
    assert scene.settle(request, owner) is not None
    return [scene.action(1).action_id, scene.action(2).action_id]


@pytest.fixture
def ask(scene: Scene, standing: list[int], airflow_run: Callable[..., None]) -> Ask:
    """Put the questions of the undo into Airflow's database.

    ``parked``: how many seconds ago their tasks began to wait; ``is_put``: False as before the question's row is there.
    """

    def put(
        *, parked: float = LONG_AGO, state: str = "awaiting_input", run: str = "running", is_put: bool = True
    ) -> Undo:
        airflow_run(*scene.run)
        undo = Undo(str(scene.view.requests[0].owner_run_id))
        airflow_run(UNDO_DAG, undo.run_id, state=run)
        _insert(undo.run_id, standing, parked, state, is_put)
        return undo

    return put


def _insert(run_id: str, reviewed: list[int], parked: float, state: str, is_put: bool) -> None:
    from airflow.models.dagrun import DagRun
    from airflow.models.hitl import HITLDetail
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session
    from sqlalchemy import select

    since = datetime.now(UTC) - timedelta(seconds=parked)
    with create_session(scoped=False) as session:
        run = session.scalar(select(DagRun).where(DagRun.run_id == run_id))
        pattern = session.scalar(select(TaskInstance).where(TaskInstance.run_id == run_id))
        same = {
            column.key: getattr(pattern, column.key)
            for column in TaskInstance.__mapper__.column_attrs
            if column.key not in ("id", "context_carrier")
        }
        waits = {
            "task_id": "review",
            "state": state,
            "next_method": "execute_complete",
            "next_kwargs": {},
            "trigger_timeout": since + timedelta(seconds=600),
            "updated_at": since,
        }
        tasks = [{"task_id": "settle", "state": "success"}]
        tasks += [waits | {"map_index": index} for index in range(len(reviewed))]
        for number, task in enumerate(tasks):
            ti_id = uuid.uuid4()
            row = same | task | {"id": ti_id}
            columns = {TaskInstance.__mapper__.attrs[key].columns[0].name: row[key] for key in row}
            session.execute(TaskInstance.__table__.insert().values(columns))
            if number and is_put:
                note = {"note": {"value": None, "schema": {"type": ["null", "string"]}}}
                session.add(
                    HITLDetail(ti_id=ti_id, options=list(OPTIONS), subject="?", params=note, created_at=since)
                )
        of_settle = {
            "dag_id": UNDO_DAG,
            "run_id": run_id,
            "dag_run_id": run.id,
            "task_id": "settle",
            "map_index": -1,
        }
        session.add(XComModel(**of_settle, key="reviewed", value=reviewed))


def _sweep() -> None:
    """What the scheduler does every fifteen seconds."""
    from airflow.jobs.scheduler_job_runner import SchedulerJobRunner

    SchedulerJobRunner.check_awaiting_input_timeouts(SimpleNamespace(log=logging.getLogger("scheduler")))


def test_a_question_settled_on_the_command_line_goes_on_at_once_and_says_the_same(
    scene: Scene, standing: list[int], ask: Ask, airflow_saga_cli: Command
) -> None:
    undo = ask()
    said = airflow_saga_cli("resolve", *scene.run, standing[1], "--undone", "--note", "phoned them")
    assert (said.code, said.err) == (0, "")
    answered, other = undo.question(1), undo.question(0)
    assert answered.chosen_options == [UNDONE_BY_HAND]
    assert answered.params_input == {"note": "phoned them"}
    assert str(scene.action(2).note).startswith(answered.responded_by["name"])
    assert undo.review(1).state == "scheduled"
    assert undo.event(1)["chosen_options"] == [UNDONE_BY_HAND]
    assert (other.responded_at, undo.review(0).state) == (None, "awaiting_input")


def test_a_click_in_the_tab_answers_the_question_and_does_not_hang(
    scene: Scene, standing: list[int], ask: Ask, web: Web
) -> None:
    undo = ask()
    began = time.monotonic()
    done = web.post(
        api(scene.run, "actions", str(standing[0]), "resolve"), {"answer": "accepted", "note": "it may"}
    )
    took = time.monotonic() - began
    assert done.status_code == 200
    assert took < 2
    assert undo.question().responded_by == {"id": "user:user_1", "name": "user:user_1"}
    assert (undo.question().chosen_options, undo.review().state) == ([ACCEPTED], "scheduled")


def test_an_answer_within_seconds_of_its_question_is_kept_until_airflow_hears_it(
    scene: Scene, standing: list[int], ask: Ask, airflow_saga_cli: Command
) -> None:
    undo = ask(parked=1)
    assert airflow_saga_cli("resolve", *scene.run, standing[0], "--accepted", "--note", "it may").code == 0
    assert undo.question().chosen_options == [ACCEPTED], "it is gone from what people are asked"
    waits = undo.review()
    assert waits.state == "awaiting_input"
    assert 3 < (waits.trigger_timeout - datetime.now(UTC)).total_seconds() < 6
    _sweep()
    assert undo.review().state == "awaiting_input"
    undo.change(trigger_timeout=datetime.now(UTC) - timedelta(seconds=1))
    _sweep()
    assert undo.review().state == "scheduled"
    assert undo.event()["chosen_options"] == [ACCEPTED]


def test_an_answer_that_somebody_gave_in_airflow_stays_and_who_comes_second_is_told(
    scene: Scene, standing: list[int], ask: Ask, airflow_saga_cli: Command
) -> None:
    undo = ask()
    undo.respond(LEAVE_OPEN, "bob")
    said = airflow_saga_cli("resolve", *scene.run, standing[0], "--accepted", "--note", "it may")
    assert said.code == 0
    assert f"bob has answered “{LEAVE_OPEN}” in Airflow meanwhile" in said.err
    assert (undo.question().responded_by["name"], undo.question().chosen_options) == ("bob", [LEAVE_OPEN])
    assert scene.action().state == "ACCEPTED"


def test_a_question_that_is_being_put_is_waited_for_a_moment(
    scene: Scene, standing: list[int], ask: Ask, airflow_saga_cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "PATIENCE_SECONDS", 20)
    undo = ask(parked=0, state="running")
    parks = threading.Timer(0.5, lambda: undo.change(state="awaiting_input"))
    parks.start()
    said = airflow_saga_cli("resolve", *scene.run, standing[0], "--accepted", "--note", "it may")
    parks.join()
    assert (said.code, said.err) == (0, "")
    assert (undo.question().chosen_options, undo.review().state) == ([ACCEPTED], "awaiting_input")


@pytest.mark.parametrize("is_put", [True, False])
def test_a_question_that_takes_long_to_be_put_is_left_to_itself(
    scene: Scene, standing: list[int], ask: Ask, airflow_saga_cli: Command, is_put: bool
) -> None:
    undo = ask(parked=0, state="running", is_put=is_put)
    began = time.monotonic()
    said = airflow_saga_cli("resolve", *scene.run, standing[0], "--accepted", "--note", "it may")
    assert time.monotonic() - began < questions.PATIENCE_SECONDS + 2
    assert said.code == 0
    assert "is being put in Airflow right now" in said.err
    assert undo.review().state == "running"


@pytest.mark.parametrize(
    ("run", "state", "is_put"),
    [
        ("running", "success", True),
        ("running", "queued", False),
        ("running", "scheduled", True),
        ("running", "up_for_retry", True),
        ("failed", "awaiting_input", True),
    ],
)
def test_what_asks_nobody_now_is_left_alone(
    scene: Scene,
    standing: list[int],
    ask: Ask,
    airflow_saga_cli: Command,
    run: str,
    state: str,
    is_put: bool,
) -> None:
    undo = ask(run=run, state=state, is_put=is_put)
    said = airflow_saga_cli("resolve", *scene.run, standing[0], "--accepted", "--note", "it may")
    assert (said.code, said.err) == (0, "")
    assert undo.review().state == state
    if is_put:
        assert undo.question().responded_at is None


def test_an_answer_that_the_question_does_not_offer_makes_it_look_soon(
    scene: Scene, standing: list[int], ask: Ask
) -> None:
    undo = ask()
    given = questions.Given(None, "it did not happen", "cli:ann")
    assert questions.answer_questions("book_trip", scene.view.requests, standing[0], given) == []
    assert undo.question().responded_at is None
    _sweep()
    assert undo.event()["error_type"] == "timeout"


def test_an_answer_stands_though_airflow_cannot_be_told(
    scene: Scene,
    standing: list[int],
    ask: Ask,
    airflow_saga_cli: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask()

    def away(*_: Any) -> Any:
        raise RuntimeError("database is away")

    monkeypatch.setattr(questions, "_questions_about", away)
    said = airflow_saga_cli("resolve", *scene.run, standing[0], "--accepted", "--note", "it may")
    assert said.code == 0
    assert "cannot be answered now (RuntimeError: database is away)" in said.err
    assert scene.action().state == "ACCEPTED"
