"""Starting an undo run: once for all who ask, by a session of its own, and never an error for who only wrote a row."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import pytest

from airflow_saga.metadata import run_of
from airflow_saga.trigger import start_undo_run, trigger_undo
from tests.store.scene import Scene


@pytest.fixture(autouse=True)
def _metadata(airflow_home: Path) -> None:
    """Each test here needs Airflow's metadata."""


def test_the_run_is_named_after_the_request_and_knows_whom_it_undoes(scene: Scene) -> None:
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from sqlalchemy import select

    scene.stopped("flight", 1)
    request = scene.ask(actor="alice")
    assert trigger_undo(request, *scene.run, triggered_by="rest_api")
    with create_session(scoped=False) as session:
        run = session.scalar(select(DagRun).where(DagRun.run_id == f"undo__{request.request_uuid}"))
        assert run is not None
        assert run.dag_id == "book_trip__compensation"
        assert run.conf == {"run_id": scene.run_id, "request": str(request.request_uuid)}
        assert (run.triggered_by.value, run.triggering_user_name) == ("rest_api", "alice")
        assert str(run.state) == "queued"


def test_asking_twice_is_fine(scene: Scene) -> None:
    scene.stopped("flight", 1)
    request = scene.ask()
    assert trigger_undo(request, *scene.run)
    assert trigger_undo(request, *scene.run)


def test_many_threads_that_ask_at_once_get_one_run() -> None:
    number = uuid.uuid4()
    barrier, answers = threading.Barrier(4), list[bool]()

    def ask() -> None:
        barrier.wait(30)
        answers.append(start_undo_run("book_trip", "run_1", number))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [True] * 4
    assert run_of("book_trip__compensation", f"undo__{number}") is not None


def test_a_dag_that_airflow_does_not_know_is_left_to_the_reconciler(caplog: pytest.LogCaptureFixture) -> None:
    assert not start_undo_run("dag_of_last_year", "run_1", uuid.uuid4())
    assert "no DAG dag_of_last_year__compensation" in caplog.text


def test_a_dag_whose_file_is_gone_is_left_to_the_reconciler() -> None:
    _set_stale(True)
    try:
        assert not start_undo_run("book_trip", "run_1", uuid.uuid4())
    finally:
        _set_stale(False)


def _set_stale(is_stale: bool) -> None:
    from airflow.models.dag import DagModel
    from airflow.utils.session import create_session

    with create_session(scoped=False) as session:
        session.get(DagModel, "book_trip__compensation").is_stale = is_stale


def test_the_session_of_the_calling_thread_is_left_alone(scene: Scene) -> None:
    from airflow.models.variable import Variable
    from airflow.utils.session import create_session
    from sqlalchemy import inspect

    with create_session() as session:
        unsaved = Variable(key=f"v_{uuid.uuid4().hex}", val="x")
        session.add(unsaved)
        assert start_undo_run("book_trip", "run_1", uuid.uuid4())
        assert inspect(unsaved).pending
        session.expunge(unsaved)
