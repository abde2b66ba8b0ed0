"""Processes that are killed, stopped, paused, or hang: what the log makes of them, and what the world sees."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tests.chaos.conftest import Playground
from tests.chaos.nursery import Nursery
from tests.conftest import available_servers
from tests.runtime.lab import RunPlace, wait_until
from tests.support.pgbouncer import find_pgbouncer, pooled
from tests.support.postgres import PostgresServer
from tests.support.world import View, World, overlaps

THREE = ("flights", "hotels", "cars")


# -- the forward step -----------------------------------------------------------------------------------------------


def test_c10_a_process_that_vanishes_is_found_by_its_lease_and_undone_once(
    own_playground: Playground,
) -> None:
    ground, lab = own_playground, own_playground.lab
    ground.world.tell("hold", "hotels", times=1)
    child = ground.step("three", "reserve")
    ground.world.await_received("hotels")
    child.kill()
    assert child.killed
    ground.world.release("hotels")
    wait_until(lambda: lab.reconcile(RunPlace(task="failed")).stopped, "its lease runs out")
    place = RunPlace(run="failed", task="failed")
    lab.reconcile(place)
    (request,) = lab.view().requests
    assert request.cause == "lost_worker"
    assert lab.actions()[1].state == "IN_DOUBT"
    assert lab.carry_out(request.request_uuid).saga.state == "CANCELLED"
    for _ in range(3):
        lab.reconcile(place)
    assert len(lab.view().requests) == 1
    assert ground.world.net().total == 0
    assert [len(ground.world.undo_calls(kind)) for kind in ("flights", "hotels")] == [1, 1]


def test_c09_a_thread_that_sits_in_c_is_ended_with_its_process(playground: Playground) -> None:
    begun = time.monotonic()
    child = playground.step("blocks_in_a_thread", limits={"abandon_grace_seconds": 0.5}).wait(30)
    assert time.monotonic() - begun < 15
    assert child.exit == 70, child.log
    assert playground.lab.states() == [("block_in_c", "IN_DOUBT")]
    assert playground.lab.step_state() == "STOPPED"
    assert "cannot be interrupted" in child.log


def test_c97_a_body_that_ignores_everything_cannot_hold_a_cancel(playground: Playground) -> None:
    child = playground.step("hangs", "reserve")
    playground.world.await_answered("flights")
    child.kill(signal.SIGTERM)
    request = playground.ask_undo()
    assert child.wait(30).exit == 70, child.log
    assert playground.lab.carry_out(request).saga.state == "CANCELLED"
    assert playground.world.net().total == 0


def test_c03_c05_a_termination_delivered_three_times_is_one_stop(playground: Playground) -> None:
    playground.world.tell("delay", "hotels", seconds=1.0)
    child = playground.step("three", "book", place={"task": "failed", "run": "failed"})
    playground.world.await_received("hotels")
    for _ in range(3):
        child.kill(signal.SIGTERM)
        time.sleep(0.2)
    assert child.ended == "SagaCancelledError", child.log
    lab = playground.lab
    assert lab.states() == [("book", "DONE"), ("book", "DONE")]
    assert len(lab.view().requests) == 1
    assert sum("undo asked for" in what for what in lab.whats()) == 1
    assert lab.carry_out(lab.view().requests[0].request_uuid).saga.state == "CANCELLED"
    assert playground.world.net().total == 0


def test_a_kill_ends_a_back_off_of_a_minute_at_once(playground: Playground) -> None:
    playground.world.tell("refuse", "flights")
    child = playground.step("backs_off")
    playground.world.await_answered("flights")
    begun = time.monotonic()
    child.kill(signal.SIGTERM)
    assert child.ended == "StepGivenBack", child.log
    assert time.monotonic() - begun < 5


def test_c86_a_newer_try_takes_over_from_a_living_one(playground: Playground) -> None:
    """The older is in the middle of a call: it is fenced, its call is asked about and not made again."""
    playground.world.tell("delay", "hotels", seconds=1.0)
    older = playground.step("three", "book")
    playground.world.await_received("hotels")
    newer = playground.step("three", "book", try_number=2)
    assert newer.output == list(THREE), newer.log
    assert older.ended == "StepFencedError", older.log
    assert [len(playground.world.calls(kind)) for kind in THREE] == [1, 1, 1]
    assert playground.lab.step_state() == "SUCCEEDED"
    assert any("late answer" in what for what in playground.lab.whats())


def test_c81_a_process_that_wakes_after_the_takeover_calls_nothing(playground: Playground) -> None:
    """It stands still in front of its second call until another attempt has made it; same host, same task."""
    older = playground.step(
        "three", "reserve", die={"at": "in_time", "when": "before", "nth": 2, "stand_still": True}
    )
    older.wait_until_it_stands_still()
    assert [row.state for row in playground.lab.actions()] == ["DONE", "PENDING"]
    newer = playground.step("three", "reserve", try_number=2)
    assert newer.output == list(THREE), newer.log
    older.kill(signal.SIGCONT)
    assert older.ended == "StepFencedError", older.log
    assert [len(playground.world.calls(kind)) for kind in THREE] == [1, 1, 1]
    assert [row.state for row in playground.lab.actions()] == ["DONE"] * 3
    assert playground.lab.step_state() == "SUCCEEDED"


def test_c81_a_process_paused_in_a_call_keeps_its_answer_and_begins_nothing_more(
    playground: Playground,
) -> None:
    playground.world.tell("hold", "hotels", times=1)
    older = playground.step("three", "book")
    playground.world.await_received("hotels")
    older.kill(signal.SIGSTOP)
    older.wait_until_it_stands_still()
    playground.world.release("hotels")
    playground.world.await_answered("hotels")
    newer = playground.step("three", "book", try_number=2)
    assert newer.output == list(THREE), newer.log
    older.kill(signal.SIGCONT)
    assert older.ended in ("StepFencedError", "ActionTimedOut"), older.log
    assert [len(playground.world.calls(kind)) for kind in THREE] == [1, 1, 1]
    assert playground.ask_undo()
    assert playground.lab.carry_out(playground.lab.view().requests[0].request_uuid).saga.state == "CANCELLED"
    assert playground.world.net().total == 0


def test_c41_nothing_is_undone_before_every_branch_is_settled(own_playground: Playground) -> None:
    ground, lab = own_playground, own_playground.lab
    ground.world.tell("delay", "hotels", seconds=1.5)
    failing = ground.step("then_fails", "book", "flights", attempt={"task_id": "a"})
    slow = ground.step("these", "book", "hotels", attempt={"task_id": "b"})
    assert failing.ended == "ValueError"
    ground.world.await_received("hotels")
    lab.reconcile(RunPlace(run="failed", task="running"))
    (request,) = lab.view().requests
    settled = lab.carry_out(request.request_uuid)
    slow.wait()
    assert settled.saga.state == "CANCELLED"
    assert ground.world.net().total == 0
    answered = ground.world.calls("hotels")[0]["answered_seq"]
    assert all(call["seq"] > answered for call in ground.world.undo_calls())


# -- the undo -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("landed", [True, False])
def test_c14_an_undo_killed_in_a_call_is_finished_with_the_same_key(
    playground: Playground, landed: bool
) -> None:
    assert playground.step("three", "book").output == list(THREE)
    request = playground.ask_undo()
    playground.lab.freeze(request)
    playground.world.tell("hold", "hotels", verb="undo", lands="now" if landed else "never", times=1)
    first = playground.undo(request)
    playground.world.await_received("hotels", verb="undo")
    first.kill()
    assert first.killed
    playground.world.release("hotels", land=False)
    playground.lab.undo_step(request)
    calls = playground.world.undo_calls("hotels")
    assert len(calls) == 2
    assert len({call["key"] for call in calls}) == 1
    net = playground.world.net()
    assert net.total == 0
    assert all(len(playground.world.undo_calls(kind)) == 1 for kind in ("flights", "cars"))


def test_c05_an_undo_told_three_times_to_go_finishes_its_call_once(playground: Playground) -> None:
    assert playground.step("three", "book").output == list(THREE)
    request = playground.ask_undo()
    playground.lab.freeze(request)
    playground.world.tell("delay", "cars", verb="undo", seconds=1.5, times=1)
    child = playground.undo(request)
    playground.world.await_received("cars", verb="undo")
    for _ in range(3):
        child.kill(signal.SIGTERM)
        time.sleep(0.3)
    assert child.ended == "StepKilledError", child.log
    assert len(playground.world.undo_calls("cars")) == 1
    assert [row.state for row in playground.lab.actions()] == ["DONE", "DONE", "COMPENSATED"]
    playground.lab.undo_step(request)
    assert playground.world.net().total == 0
    assert all(len(playground.world.undo_calls(kind)) == 1 for kind in THREE)


def test_c81_an_undo_that_wakes_after_the_takeover_calls_nothing(playground: Playground) -> None:
    assert playground.step("three", "book").output == list(THREE)
    request = playground.ask_undo()
    playground.lab.freeze(request)
    older = playground.undo(
        request, die={"at": "write_undo", "when": "before", "nth": 2, "stand_still": True}
    )
    older.wait_until_it_stands_still()
    playground.lab.undo_step(request)
    older.kill(signal.SIGCONT)
    assert older.ended in ("UndoFencedError", "StepFencedError"), older.log
    assert playground.world.net().total == 0
    assert [len(playground.world.undo_calls(kind)) for kind in ("flights", "hotels")] == [1, 1]
    assert not overlaps([call for call in playground.world.undo_calls() if call["kind"] != "cars"])


def test_c40_undo_order_does_not_care_for_the_clocks_of_the_workers(playground: Playground) -> None:
    for task, skew, kinds in (("a", 3600, ("k1", "k2")), ("b", -3600, ("k3",)), ("c", 0, ("k4", "k5"))):
        child = playground.step(
            "these",
            "book",
            *kinds,
            attempt={
                "task_id": task,
                "ancestors": ["a", "b"] if task == "c" else ["a"] if task == "b" else [],
            },
            skew_seconds=skew,
        )
        assert child.output == list(kinds), child.log
    assert playground.lab.carry_out(playground.ask_undo()).saga.state == "CANCELLED"
    assert [each["kind"] for each in playground.world.net().undo_order] == ["k5", "k4", "k3", "k2", "k1"]


# -- many -----------------------------------------------------------------------------------------------------------


def test_c78_ten_steps_that_fail_together_are_one_undo(own_playground: Playground) -> None:
    ground, lab = own_playground, own_playground.lab
    children = [
        ground.step("then_fails", "book", f"kind{number}", attempt={"task_id": f"t{number}"})
        for number in range(10)
    ]
    for child in children:
        assert child.ended == "ValueError", child.log
    lab.reconcile(RunPlace(run="failed"))
    lab.reconcile(RunPlace(run="failed"))
    (request,) = lab.view().requests
    assert lab.carry_out(request.request_uuid).saga.state == "CANCELLED"
    net = ground.world.net()
    assert net.total == 0
    assert all(
        books["calls"] == books["undo_calls"] == 1 for by in net.keys.values() for books in by.values()
    )


@contextmanager
def small_server(connections: int) -> Iterator[PostgresServer]:
    from airflow_saga.store import migrate

    _, bin_dir = next(iter(available_servers()))
    server = PostgresServer(bin_dir)
    with (server.data_directory / "postgresql.conf").open("a") as settings:
        settings.write(f"max_connections = {connections}\nsuperuser_reserved_connections = 0\n")
    with server:
        migrate.upgrade(server.url)
        yield server


def test_c74_more_steps_than_connections_wait_before_their_first_call(
    nursery: Nursery, world: View, travel_world: World
) -> None:
    with small_server(14) as server:
        ground = Playground(nursery, server.url, world)
        ground.world.tell("delay", "*", seconds=0.5)
        children = [
            ground.step("these", "book", "flights", run=f"r{number}", limits={"store_outage_seconds": 40.0})
            for number in range(30)
        ]
        for child in children:
            assert child.output == ["flights"], child.log
        assert len(ground.world.calls("flights")) == 30
        waited = [child for child in children if "too many clients" in child.log]
        assert waited, "nobody had to wait"
        assert any("trying again" in child.log for child in waited)
        ground.close()


# -- behind a transaction pooler ------------------------------------------------------------------------------------


@pytest.fixture
def pooled_url(database_url: str) -> Iterator[str]:
    """The test's database behind pgbouncer in transaction mode."""
    program = find_pgbouncer()
    if program is None:
        pytest.skip("DID NOT RUN: there is no pgbouncer, and only root on a Debian can install it")
    with pooled(program, database_url) as url:
        yield url


def test_c68_behind_a_transaction_pooler_a_cancel_is_seen_by_polling_and_the_log_says_so(
    nursery: Nursery, pooled_url: str, world: View
) -> None:
    with closing(Playground(nursery, pooled_url, world)) as ground:
        child = ground.step("calls_each_second", "book")
        world.await_answered("flights", 3)
        others = [ground.step("these", "book", "hotels", run=f"r{number}") for number in range(8)]
        for other in others:
            assert other.output == ["hotels"], other.log
        asked = time.monotonic()
        request = ground.ask_undo()
        assert child.ended == "SagaCancelledError", child.log
        assert time.monotonic() - asked < 3
        assert "notifications are not delivered" in child.log
        assert "polling every 0.2 s" in child.log
        assert ground.lab.carry_out(request).saga.state == "CANCELLED"
        assert world.net("flights").total == 0


def test_c77_no_session_lock_is_taken_through_a_pooler_and_two_never_hold_a_step(
    nursery: Nursery, pooled_url: str, world: View
) -> None:
    with closing(Playground(nursery, pooled_url, world)) as ground:
        world.tell("ignore_keys", verb="forward")
        world.tell("delay", "*", seconds=0.1)
        for number in range(1, 9):
            child = ground.step("three", "book", try_number=number)
            if number < 8:
                time.sleep(0.2)
                child.kill()
                child.wait()
        assert child.output == list(THREE), child.log
        assert not overlaps(world.calls())
        assert all(books["landed"] == 1 for by in world.net().keys.values() for books in by.values())


@pytest.mark.parametrize("grace_seconds", [0.0, 1.0, 5.0])
def test_c83_what_a_grace_period_cuts_off_is_finished_by_the_next_process(
    playground: Playground, grace_seconds: float
) -> None:
    """SIGTERM in the middle of an undo, and SIGKILL before it is done with its five actions."""
    lab, world = playground.lab, playground.world
    playground.step("five_bookings").wait()
    request = playground.ask_undo()
    assert playground.start("freeze", request_uuid=str(request)).output == "frozen"
    world.tell("hold", verb="undo", skip=1, times=1)
    first = playground.undo(request)
    world.await_received("*", 2, verb="undo")
    first.kill(signal.SIGTERM)
    time.sleep(grace_seconds)  # it is what is tested
    if not first.over:
        first.kill()
    first.wait()
    for row in world.undo_calls():
        if row["answered_seq"] is None:
            world.release(row["kind"], key=row["key"])
    assert playground.undo(request).ended == "well"
    assert playground.start("settle", request_uuid=str(request)).output
    assert lab.saga_state() == "CANCELLED"
    assert world.net().total == 0
    for keys in world.net().keys.values():
        for books in keys.values():
            assert (books["landed"], books["undone"]) == (1, 1)
            assert len(books["undo_keys"]) == 1
