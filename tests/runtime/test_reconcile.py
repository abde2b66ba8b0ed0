"""The reconciler finds what every hook missed, moves it on, and leaves alone what is well."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from airflow_saga.core.declare import action
from airflow_saga.core.errors import SagaCancelledError, StepInterrupted
from airflow_saga.core.marks import FailedRun
from airflow_saga.runtime.reconcile import Reconciler
from airflow_saga.store import migrate
from airflow_saga.store.connect import Address
from airflow_saga.store.requests import RequestVerbs
from tests.conftest import available_servers
from tests.runtime import deeds
from tests.runtime.lab import LIMITS, Lab, RunPlace, wait_until
from tests.support.postgres import PostgresServer
from tests.support.world import View


class DiedError(Exception):
    pass


def lose(lab: Lab, run: str, task: str = "t") -> None:
    """As if the process of a step had vanished: its lease has run out and nobody renews it."""
    lab.connection.execute(
        "UPDATE airflow_saga.step SET state = 'RUNNING', lease_until = clock_timestamp() - interval '1 second' "
        "WHERE task_id = %s AND saga_id = (SELECT saga_id FROM airflow_saga.saga WHERE dag_id = %s AND run_id = %s)",
        (task, lab.dag_id, run),
    )


def begin_and_vanish(lab: Lab, run: str) -> None:
    """A step that attached and whose process is gone."""
    from airflow_saga.store.attach import AttachVerbs

    AttachVerbs(lab.connection).attach_if_allowed(lab.attempt(run))
    lose(lab, run)


def test_a_run_that_succeeded_completes_its_saga(own_lab: Lab) -> None:
    own_lab.step(lambda saga: deeds.book("flights"))
    assert own_lab.reconcile(RunPlace(run="success")).completed == 1
    assert own_lab.saga_state() == "COMPLETED"
    assert own_lab.reconcile(RunPlace(run="success")).completed == 0


def test_a_run_that_failed_is_undone_by_its_policy(own_lab: Lab) -> None:
    lab = own_lab

    def body(saga: Any) -> None:
        deeds.book("flights")
        raise DiedError

    lab.fails(body, DiedError)
    place = RunPlace(run="failed")
    assert lab.reconcile(place).failed == 1
    (request,) = lab.view().requests
    assert (request.state, request.cause) == ("HINTED", "failure")
    assert place.triggered == [request.request_uuid]
    assert lab.carry_out(request.request_uuid).saga.state == "CANCELLED"
    assert lab.world.net().total == 0


def test_a_run_that_failed_keeps_its_effects_where_the_policy_says_so(own_lab: Lab) -> None:
    lab = own_lab

    def body(saga: Any) -> None:
        deeds.book("flights")
        raise DiedError

    lab.fails(body, DiedError, on_failure="keep")
    lab.reconcile(RunPlace(run="failed"))
    assert lab.saga_state() == "FAILED"
    assert lab.view().requests == ()
    assert lab.undo().saga.state == "CANCELLED"


def fail_keeping(lab: Lab) -> None:
    def body(saga: Any) -> None:
        deeds.book("flights")
        raise DiedError

    lab.fails(body, DiedError, on_failure="keep")


MARKED = FailedRun(True, "ann", "its audit log says so", over_seconds=1)


def test_a_run_that_a_person_marked_failed_is_undone_also_where_the_policy_keeps(own_lab: Lab) -> None:
    fail_keeping(own_lab)
    place = RunPlace(run="failed", ended=MARKED)
    assert own_lab.reconcile(place).failed == 1
    (request,) = own_lab.view().requests
    assert (request.state, request.cause, request.actor) == ("REQUESTED", "marked_failed", "ann")
    assert place.triggered == [request.request_uuid]
    assert own_lab.carry_out(request.request_uuid).saga.state == "CANCELLED"


def test_a_run_marked_failed_that_lost_its_worker_is_no_outage(own_lab: Lab) -> None:
    begin_and_vanish(own_lab, "r")
    limits = dataclasses.replace(LIMITS, mass_undo_threshold=0)
    report = own_lab.reconcile(RunPlace(run="failed", ended=MARKED), limits)
    assert (report.stopped, report.held, report.triggered) == (1, 0, 1)
    assert own_lab.view().requests[0].cause == "marked_failed"


def test_effects_are_not_kept_before_those_who_can_tell_had_their_time(own_lab: Lab) -> None:
    """A task cannot read the audit log; the listener's thread can, within a minute."""
    fail_keeping(own_lab)
    place = RunPlace(run="failed", ended=FailedRun(None, over_seconds=20))
    own_lab.reconcile(place)
    assert own_lab.saga_state() == "RUNNING"
    place.ended = MARKED
    own_lab.reconcile(place)
    assert own_lab.saga_state() == "CANCELLING"


def test_effects_kept_without_certainty_are_kept_with_a_word_about_it(own_lab: Lab) -> None:
    fail_keeping(own_lab)
    own_lab.reconcile(RunPlace(run="failed", ended=FailedRun(None, over_seconds=200)))
    saga = own_lab.view().saga
    assert (saga.state, saga.cause) == ("FAILED", "failure")
    assert "airflow saga undo" in (saga.reason or "")


def test_where_it_is_known_that_nobody_marked_it_effects_are_kept_at_once(own_lab: Lab) -> None:
    fail_keeping(own_lab)
    own_lab.reconcile(RunPlace(run="failed", ended=FailedRun(False, over_seconds=1)))
    saga = own_lab.view().saga
    assert (saga.state, saga.reason) == ("FAILED", "the run failed")


def test_a_lost_step_is_stopped_only_when_airflow_says_that_it_is_gone(own_lab: Lab) -> None:
    lab = own_lab
    begin_and_vanish(lab, "r")
    assert lab.reconcile(RunPlace(task="running")).stopped == 0
    assert lab.reconcile(RunPlace(task="failed")).stopped == 1
    assert lab.step_state() == "STOPPED"


def test_a_step_that_is_alive_is_left_alone(own_lab: Lab) -> None:
    lab = own_lab
    lab.world.tell("hold", "flights")
    running = lab.start(lambda saga: deeds.book("flights"))
    lab.world.await_received("flights")
    assert lab.reconcile(RunPlace(task="failed")).stopped == 0
    lab.world.release("flights")
    running.result()


def test_an_undo_that_nobody_started_is_started_and_again_when_it_went_silent(own_lab: Lab) -> None:
    lab = own_lab
    lab.step(lambda saga: deeds.book("flights"))
    request = lab.ask_undo().request
    assert request is not None
    place = RunPlace()
    assert lab.reconcile(place).triggered == 1
    assert lab.reconcile(place).triggered == 0, "it has just been started"
    lab.connection.execute(
        "UPDATE airflow_saga.undo_request SET triggered_at = clock_timestamp() - interval '1 hour'"
    )
    assert lab.reconcile(place).triggered == 1
    assert place.triggered == [request.request_uuid] * 2


def test_what_cannot_be_moved_now_keeps_nobody_else_from_being_moved(own_lab: Lab) -> None:
    """Undos whose DAG is gone, and steps that Airflow takes for alive: more of them than a pass looks at at once."""
    lab = own_lab
    runs = [f"r{number}" for number in range(605)]
    for run in runs:
        begin_and_vanish(lab, run)

    class Stuck(RunPlace):
        def task_state(self, dag_id: str, run_id: str, task_id: str, map_index: int) -> str | None:
            return "running" if run_id in runs[:550] else "failed"

        def trigger_undo(self, dag_id: str, run_id: str, request_uuid: UUID, *, reset: bool) -> bool:
            return run_id in runs[600:] and super().trigger_undo(dag_id, run_id, request_uuid, reset=reset)

    place = Stuck(run="failed")
    report = lab.reconcile(place, dataclasses.replace(LIMITS, mass_undo_threshold=1000))
    assert (report.stopped, report.triggered) == (55, 5)


def test_a_mass_outage_is_held_until_a_person_releases_it(own_lab: Lab) -> None:
    lab = own_lab
    runs = [f"r{number}" for number in range(5)]
    for run in runs:
        begin_and_vanish(lab, run)
    limits = dataclasses.replace(LIMITS, mass_undo_threshold=3)
    report = lab.reconcile(RunPlace(run="failed"), limits)
    assert (report.stopped, report.failed, report.held, report.triggered) == (5, 5, 5, 0)
    lab.requests.release(lab.dag_id, runs[0], actor="ann")
    assert lab.reconcile(RunPlace(run="failed"), limits).triggered == 1


class AirflowsOwnError(Exception):
    """As those that the supervisor raises: no common kind of ours or Python's."""


def test_an_error_with_one_saga_does_not_stop_the_pass(own_lab: Lab) -> None:
    lab = own_lab
    for run in ("bad", "good"):
        lab.step(lambda saga: deeds.nothing(1), run)

    class Moody(RunPlace):
        def run_state(self, dag_id: str, run_id: str) -> str | None:
            if run_id == "bad":
                raise AirflowsOwnError("Airflow does not know")
            return "success"

    report = lab.reconcile(Moody())
    assert (report.completed, report.errors) == (1, 1)
    assert lab.saga_state("good") == "COMPLETED"


def test_a_cancel_that_keeps_is_suspended_when_its_last_step_is_gone(own_lab: Lab) -> None:
    lab = own_lab
    begin_and_vanish(lab, "r")
    lab.connection.execute("UPDATE airflow_saga.step SET lease_until = clock_timestamp() + interval '1 hour'")
    lab.cancel(keep=True)
    assert lab.reconcile(RunPlace(task="running")).suspended == 0
    lose(lab, "r")
    lab.reconcile(RunPlace(task="failed"))
    assert lab.saga_state() == "SUSPENDED"


def test_c97_a_saga_leaves_cancelling_at_its_deadline_and_says_what_may_still_happen(own_lab: Lab) -> None:
    """The step's process is paused for good (its worker's machine is), nobody undoes it: it does not hang for ever."""
    lab = own_lab
    lab.world.tell("hold", "flights", lands="release", times=1)
    patient = dataclasses.replace(LIMITS, abandon_grace_seconds=60)
    running = lab.start(lambda saga: deeds.book_quickly_blind("flights"), limits=patient)
    lab.world.await_received("flights")
    lab.cancel()
    lab.connection.execute(
        "UPDATE airflow_saga.saga SET deadline_at = clock_timestamp() + interval '1 second'"
    )

    def expired() -> bool:
        lab.reconcile(RunPlace(task="running"), LIMITS)
        return lab.saga_state() == "PARTIALLY_CANCELLED"

    wait_until(expired, "it leaves CANCELLING", 40)
    (row,) = lab.view().residual
    assert row.state == "IN_DOUBT"
    assert lab.view().requests[0].state == "EXPIRED"
    lab.world.release("flights")
    with pytest.raises(StepInterrupted):
        running.result()


# -- the store goes away in the middle of a pass --------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed_server() -> Iterator[PostgresServer]:
    """A server of these tests alone, to be restarted under a running pass."""
    _, bin_dir = next(iter(available_servers()))
    with PostgresServer(bin_dir) as server:
        migrate.upgrade(server.url)
        yield server


class CuttingPlace(RunPlace):
    """Stops the server while it is asked for something, at every 65th question, ten times."""

    def __init__(self, server: PostgresServer) -> None:
        super().__init__(run="failed")
        self.server, self.asked, self.cuts = server, 0, 0

    def _count(self) -> None:
        self.asked += 1
        if self.asked % 65 == 0 and self.cuts < 10:
            self.cuts += 1
            self.server.stop("immediate")

    def run_state(self, dag_id: str, run_id: str) -> str | None:
        self._count()
        return super().run_state(dag_id, run_id)

    def task_state(self, dag_id: str, run_id: str, task_id: str, map_index: int) -> str | None:
        self._count()
        return super().task_state(dag_id, run_id, task_id, map_index)

    def trigger_undo(self, dag_id: str, run_id: str, request_uuid: UUID, *, reset: bool) -> bool:
        self._count()
        return super().trigger_undo(dag_id, run_id, request_uuid, reset=reset)


def test_c76_a_pass_cut_off_anywhere_loses_no_saga(killed_server: PostgresServer, world: View) -> None:
    lab = Lab(killed_server.url, world)
    runs = [f"r{number}" for number in range(250)]
    for run in runs:
        begin_and_vanish(lab, run)
    lab.close()
    place = CuttingPlace(killed_server)
    limits = dataclasses.replace(LIMITS, mass_undo_threshold=1000)
    cut = 0
    moved = True
    while moved:
        with Address(killed_server.url).open_within(20) as connection:
            try:
                report = Reconciler(connection, place, limits).run_once()
                moved = bool(report.triggered)
            except psycopg.OperationalError:
                cut += 1
                killed_server.start()
    assert cut == place.cuts == 10
    lab = Lab(killed_server.url, world)
    for run in runs:
        assert lab.step_state(run) == "STOPPED"
        assert sum(what.startswith("step lost") for what in lab.whats(run)) == 1
        (request,) = lab.view(run).requests
        assert request.request_uuid in place.triggered
        assert lab.carry_out(request.request_uuid, f"undo of {run}").saga.state == "CANCELLED"
    lab.close()


def test_c69_a_restart_of_the_server_under_a_step_and_an_undo_costs_nothing(
    killed_server: PostgresServer, world: View
) -> None:
    lab = Lab(killed_server.url, world, "restarted")
    limits = dataclasses.replace(LIMITS, store_outage_seconds=30.0, lease_seconds=30.0)
    seen: list[float] = []

    def body(saga: Any) -> None:
        restarts("flights")
        restarts("hotels")
        lab.connection = Address(killed_server.url).open()
        seen.append(time.monotonic())
        RequestVerbs(lab.connection).cancel(lab.dag_id, "r", actor="ann")
        while True:
            saga.check()
            time.sleep(0.005)

    _SERVERS[:] = [killed_server]
    lab.fails(body, SagaCancelledError, limits=limits)
    assert time.monotonic() - seen[0] < 2, "a cancel is heard again as fast as before"
    assert lab.states() == [("restarts", "DONE")] * 2
    (request,) = lab.view().requests
    lab.freeze(request.request_uuid)
    undo = lab.step_undo(request.request_uuid, limits=limits)
    lab.close()
    undo.run()
    lab = Lab(killed_server.url, world, "restarted")
    assert lab.settles.settle_if_all_settled(request.request_uuid, "undo1") is not None
    assert lab.saga_state() == "CANCELLED"
    assert world.net().total == 0
    assert [len(world.calls(kind)) for kind in ("flights", "hotels")] == [1, 1]
    assert [len(world.undo_calls(kind)) for kind in ("flights", "hotels")] == [1, 1]
    lab.close()


_SERVERS: list[PostgresServer] = []


def unbook_and_restart(record: Any) -> None:
    deeds.unbook(record)
    _SERVERS[0].restart("immediate")


@action(compensate=unbook_and_restart, timeout=timedelta(seconds=20), undo_retry=deeds.ONCE)
def restarts(kind: str, *, key: str) -> Any:
    """The server is restarted while this call is under way."""
    booking = deeds._book(kind, "", key)
    _SERVERS[0].restart("fast")
    return booking


def test_indexes_that_are_no_more_after_a_clear_are_undone_and_the_run_completes(own_lab: Lab) -> None:
    lab = own_lab
    for index in (0, 1):
        lab.step(lambda saga: deeds.book("flights")["kind"], map_index=index)
    place = RunPlace(run="success", task="removed", clear_number=1)
    lab.reconcile(place)
    (request,) = lab.view().requests
    assert place.triggered == [request.request_uuid]
    lab.reconcile(place)
    assert len(lab.view().requests) == 1
    lab.carry_out(request.request_uuid)
    assert lab.world.net().total == 0
    lab.reconcile(place)
    assert lab.saga_state() == "COMPLETED"


def test_a_run_that_was_never_cleared_is_asked_nothing_about_its_indexes(own_lab: Lab) -> None:
    lab = own_lab
    lab.step(lambda saga: deeds.book("flights")["kind"], map_index=0)
    lab.reconcile(RunPlace(run="success", task="removed"))
    assert (lab.saga_state(), lab.view().requests) == ("COMPLETED", ())
