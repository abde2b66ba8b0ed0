"""The thread that tells the store: duplicates from many processes, forks, outages, and a queue that is full."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest

from airflow_saga.core.states import RequestState, SagaState
from airflow_saga.plugin import dispatch, outage
from airflow_saga.plugin.dispatch import Dispatcher
from airflow_saga.plugin.events import Event, What
from airflow_saga.settings import forget_addresses
from airflow_saga.store.migrate import upgrade
from tests.airflow.hooks import MARKED, HookedRun, until
from tests.store.scene import Scene
from tests.support.postgres import PostgresServer

pytestmark = pytest.mark.timeout(240)

fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _own_thread(store_url: str) -> Iterator[None]:
    """Each test has a dispatcher of its own, which leads to the store of the test."""
    dispatch.stop()
    yield
    dispatch.stop()


@pytest.fixture
def run(scene: Scene, airflow_run: Callable[..., None]) -> HookedRun:
    airflow_run(*scene.run)
    return HookedRun(*scene.run)


def _marked(run_id: str, **more: object) -> Event:
    return Event(What.RUN_MARKED, "on_dag_run_failed", "book_trip", run_id, is_saga_dag=True, **more)  # type: ignore[arg-type]


def _in_child(work: Callable[[], None]) -> multiprocessing.process.BaseProcess:
    """A forked process, as the executors of Airflow fork theirs; it ends without what a process does at its exit."""

    def begin() -> None:
        from airflow import settings

        assert settings.engine is not None
        settings.engine.dispose(close=False)
        work()

    child = fork.Process(target=begin)
    child.start()
    return child


# -- many processes ---------------------------------------------------------------------------------------------------


def test_c29_twenty_failed_events_from_four_processes_make_one_request_and_one_undo_run(
    scene: Scene, run: HookedRun
) -> None:
    scene.attach()
    gate = fork.Barrier(4)
    events = (run.is_marked_failed, run.fails, run.is_marked_failed, run.fails, run.is_marked_failed)

    def tell() -> None:
        gate.wait(60)
        for call in events:
            call()
        if not dispatch.current().drain(60):
            os._exit(3)

    children = [_in_child(tell) for _ in range(4)]
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0, 0, 0]
    requests = scene.view.requests
    assert [request.number for request in requests] == [1]
    assert [each.run_id for each in run.undo_runs()] == [f"undo__{requests[0].request_uuid}"]
    assert scene.history.count("undo asked for") == 1


def test_a_forked_child_tells_by_a_connection_of_its_own(scene: Scene, run: HookedRun) -> None:
    run.starts()
    parent = dispatch.current()
    assert parent.drain(20)
    connection = parent._connection
    assert connection is not None
    backend = connection.info.backend_pid

    def tell() -> None:
        child = dispatch.current()
        if child is parent or child._thread is not None:
            os._exit(3)
        child.put(_marked("of_the_child"))
        if not child.drain(60):
            os._exit(4)
        assert child._connection is not None
        if child._connection.info.backend_pid == backend:
            os._exit(5)

    child = _in_child(tell)
    child.join(60)
    assert child.exitcode == 0
    assert scene.reader.saga("book_trip", "of_the_child").state == SagaState.CANCELLED
    # What the child did at its end did not reach the parent's connection.
    dispatch.hand_over(_marked("of_the_parent"))
    assert parent.drain(20)
    assert parent._connection is connection
    assert connection.info.backend_pid == backend
    assert scene.reader.saga("book_trip", "of_the_parent").state == SagaState.CANCELLED


def test_no_child_is_forked_while_the_thread_imports() -> None:
    importing, imported = threading.Event(), threading.Event()
    order: list[str] = []

    def load() -> None:
        with dispatch.no_fork_meanwhile():
            importing.set()
            imported.wait(5)
            order.append("imported")

    def free_it() -> None:
        until(lambda: forking.is_set())
        imported.set()

    forking = threading.Event()
    threads = [threading.Thread(target=load), threading.Thread(target=free_it)]
    for thread in threads:
        thread.start()
    assert importing.wait(5)
    forking.set()
    child = _in_child(lambda: os._exit(0 if dispatch._importing.acquire(blocking=False) else 3))
    order.append("forked")
    child.join(60)
    for thread in threads:
        thread.join(10)
    assert order == ["imported", "forked"]
    assert child.exitcode == 0


def test_events_that_wait_when_a_process_ends_are_told_first(scene: Scene) -> None:
    dispatch.hand_over(_marked("told_at_the_end"))
    dispatch.stop()
    assert scene.reader.saga("book_trip", "told_at_the_end").state == SagaState.CANCELLED


# -- the store is away ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_server(postgres_server: PostgresServer) -> Iterator[PostgresServer]:
    """A server that may be stopped."""
    with PostgresServer(postgres_server._bin_dir) as server:
        yield server


@pytest.fixture
def own_store(own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_{time.monotonic_ns()}"
    url = own_server.create_database(name)
    upgrade(url)
    monkeypatch.setenv("AIRFLOW_CONN_SAGA_DEFAULT", url)
    forget_addresses()
    return url


def test_hooks_stay_quick_while_the_store_is_down_and_all_is_told_when_it_is_back(
    own_server: PostgresServer, own_store: str, run: HookedRun, caplog: pytest.LogCaptureFixture
) -> None:
    from airflow.listeners.listener import get_listener_manager

    caplog.set_level(logging.INFO)
    played = Scene(own_store, run_id=run.run_id)
    played.attach()
    played.close()
    dispatch.hand_over(_marked("before"))
    assert dispatch.current().drain(30)
    own_server.stop("immediate")
    wall, work = [], []
    try:
        down_until = time.monotonic() + 10
        hook = get_listener_manager().hook.on_dag_run_failed
        with run.loaded({"saga"}) as dag_run:
            while time.monotonic() < down_until:
                began, worked = time.perf_counter(), time.thread_time()
                hook(dag_run=dag_run, msg=MARKED)
                work.append(time.thread_time() - worked)
                wall.append(time.perf_counter() - began)
                time.sleep(0.01)  # so that the thread meets the outage as it does in an Airflow
    finally:
        own_server.start()
    assert sorted(wall)[len(wall) // 2] < 0.001, sorted(wall)
    assert sorted(work)[int(len(work) * 0.99)] < 0.001, sorted(work)
    after = Scene(own_store, run_id=run.run_id)
    try:
        until(lambda: after.view.requests, 60)
        assert until(lambda: dispatch.current().drain(5), 60)
        assert after.saga.state == SagaState.CANCELLING
        assert [request.state for request in after.view.requests] == [RequestState.REQUESTED]
    finally:
        after.close()
    assert len(run.undo_runs()) == 1
    said = [record for record in caplog.records if record.name.startswith("airflow_saga.plugin.")]
    warnings = [record.getMessage() for record in said if record.levelno == logging.WARNING]
    assert any("is kept for 10 minutes" in text for text in warnings)
    assert any("is back after" in text for text in warnings)
    assert len(warnings) < 10, warnings


def test_what_is_least_missed_is_dropped_when_the_queue_is_full(
    own_server: PostgresServer, own_store: str, caplog: pytest.LogCaptureFixture
) -> None:
    own_server.stop("immediate")
    dispatcher = Dispatcher(capacity=4)
    try:
        for number in range(3):
            start = Event(
                What.RUN_STARTED, "on_dag_run_running", "book_trip", f"start_{number}", is_saga_dag=True
            )
            dispatcher.put(start)
        for number in range(5):
            dispatcher.put(_marked(f"mark_{number}"))
    finally:
        own_server.start()
    try:
        assert until(lambda: dispatcher.drain(5), 60)
        with psycopg.connect(own_store) as connection:
            told = {row[0] for row in connection.execute("SELECT run_id FROM airflow_saga.saga")}
        # One event may have been in the hands of the thread when the queue was filled.
        assert told >= {"mark_1", "mark_2", "mark_3", "mark_4"}
        assert len(told) in (4, 5)
    finally:
        dispatcher.stop(5)
    assert "dropped, since 4 events wait for the saga store already" in caplog.text


def test_events_are_told_in_their_order_after_an_outage(
    own_server: PostgresServer, own_store: str, run: HookedRun
) -> None:
    """A task's mark that was seen before the run's is still told after it, so that the step may end its call."""
    played = Scene(own_store, run_id=run.run_id)
    step = played.attach()
    played.close()
    own_server.stop("immediate")
    try:
        task = Event(
            What.TASK_MARKED,
            "on_task_instance_failed",
            run.dag_id,
            run.run_id,
            task_id=step.task_id,
            ti_id=str(step.ti_id),
        )
        dispatch.hand_over(task)
        dispatch.hand_over(_marked(run.run_id))
        until(lambda: time.monotonic() > task.since + 1.5)
    finally:
        own_server.start()
    assert until(lambda: dispatch.current().drain(5), 60)
    after = Scene(own_store, run_id=run.run_id)
    try:
        assert (after.saga.state, after.step().state) == (SagaState.CANCELLING, "RUNNING")
    finally:
        after.close()


def test_an_event_that_waited_too_long_is_given_up_loudly(
    own_server: PostgresServer,
    own_store: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(dispatch, "PATIENCE_SECONDS", 0.5)
    own_server.stop("immediate")
    try:
        dispatch.hand_over(_marked("forgotten"))
        until(lambda: "book_trip / forgotten: the run was marked failed in Airflow: given up" in caplog.text)
    finally:
        own_server.start()
    assert not dispatch.current()._items


def test_a_store_without_tables_is_said_and_taken_when_they_are_there(
    postgres_server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(outage, "UNUSABLE_PAUSE_SECONDS", 0.2)
    url = postgres_server.create_database("without_tables")
    monkeypatch.setenv("AIRFLOW_CONN_SAGA_DEFAULT", url)
    forget_addresses()
    try:
        dispatch.hand_over(_marked("early"))
        until(lambda: "Run: airflow saga db migrate" in caplog.text)
        upgrade(url)
        assert until(lambda: dispatch.current().drain(5), 60)
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT state FROM airflow_saga.saga").fetchall() == [("CANCELLED",)]
    finally:
        dispatch.stop()
        postgres_server.drop_database("without_tables")


def test_a_connection_that_nobody_needs_is_closed_and_opened_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "IDLE_SECONDS", 0.2)
    dispatch.hand_over(_marked("one"))
    assert dispatch.current().drain(30)
    until(lambda: dispatch.current()._connection is None)
    dispatch.hand_over(_marked("two"))
    assert dispatch.current().drain(30)
    assert scene.reader.saga("book_trip", "two").state == SagaState.CANCELLED


def test_one_event_that_fails_does_not_stop_the_next(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    dispatch.hand_over(_marked("with_a_nul\x00"))  # nothing that Postgres can keep
    dispatch.hand_over(_marked("fine"))
    assert dispatch.current().drain(30)
    assert "not told to the saga store; the reconciler will see it" in caplog.text
    assert scene.reader.saga("book_trip", "fine").state == SagaState.CANCELLED
