"""Calls end at their deadline, wherever they run and whether or not their code cooperates."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from airflow_saga.core.declare import action
from airflow_saga.core.errors import ActionTimedOut, SagaCancelledError
from airflow_saga.runtime.calls import INTERRUPT, CallRegister, RunningCall
from tests.runtime import deeds
from tests.runtime.lab import LIMITS, Alarm, Lab, Running, wait_until


def timed_out(lab: Lab, body: Any, at_most: float = 2.0, **more: Any) -> float:
    begun = time.monotonic()
    lab.fails(body, ActionTimedOut, **more)
    took = time.monotonic() - begun
    assert took < at_most, took
    assert [row.state for row in lab.actions()] == ["IN_DOUBT"]
    assert "did not answer within 0.5 s" in (lab.actions()[0].error or "")
    return took


def test_a_sleeping_call_on_the_main_thread_is_ended(lab: Lab) -> None:
    timed_out(lab, lambda saga: sleeps(30))


@action(compensate=deeds.unbook, timeout=deeds.QUICK, retry=deeds.ONCE)
def sleeps(seconds: float, kind: str = "sleeps") -> None:
    time.sleep(seconds)


def test_c09_a_call_stuck_in_c_on_the_main_thread_is_ended(lab: Lab) -> None:
    timed_out(lab, lambda saga: deeds.block_in_c(30))


def test_c09_a_loop_that_collects_errors_does_not_swallow_a_timeout(lab: Lab) -> None:
    lab.world.tell("hold", "flights")

    def collects(saga: Any) -> list[Exception]:
        errors = []
        for number in range(5):
            try:
                deeds.book_quickly_blind("flights", str(number))
            except Exception as error:  # noqa: BLE001 - as the body in the report does
                errors.append(error)
        return errors

    timed_out(lab, collects)
    assert len(lab.world.calls("flights")) == 1
    lab.world.release("flights")


def test_a_call_that_waits_for_an_answer_is_ended(lab: Lab) -> None:
    lab.world.tell("stall", "flights", lands="never")
    timed_out(lab, lambda saga: deeds.book_quickly_blind("flights"))
    lab.world.await_gone("flights")
    lab.world.release("flights")


def test_a_call_that_dribbles_is_ended(lab: Lab) -> None:
    lab.world.tell("dribble", "flights", seconds=0.2)
    timed_out(lab, lambda saga: deeds.book_quickly_blind("flights"))


def test_an_async_call_is_cancelled(lab: Lab) -> None:
    timed_out(lab, lambda saga: asyncio.run(naps(30)))


@action(compensate=deeds.unbook, timeout=deeds.QUICK, retry=deeds.ONCE)
async def naps(seconds: float, kind: str = "naps") -> str:
    await asyncio.sleep(seconds)
    return "rested"


def test_a_call_on_a_pool_thread_is_ended(lab: Lab) -> None:
    def body(saga: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(deeds.spin, 30.0).result()

    timed_out(lab, body)


def test_a_timeout_of_one_parallel_call_leaves_the_others_alone(lab: Lab) -> None:
    def body(saga: Any) -> list[str]:
        with ThreadPoolExecutor(3) as pool:
            quick = [pool.submit(deeds.spin, 0.3 + 0.01 * number) for number in range(2)]
            slow = pool.submit(deeds.spin, 30.0)
            with pytest.raises(ActionTimedOut):
                slow.result()
            return [each.result() for each in quick]

    assert lab.step(body).output == ["done", "done"]
    assert sorted(row.state for row in lab.actions()) == ["DONE", "DONE", "IN_DOUBT"]


def test_a_timeout_does_not_wait_for_a_caller_who_writes_all_the_time(lab: Lab) -> None:
    """It holds the pen nearly always, and the next heartbeat is far away."""
    enough = threading.Event()
    took: list[float] = []

    def write() -> None:
        assert lab.last_run is not None
        assert lab.last_run.journal is not None
        until = time.monotonic() + 8
        while not enough.is_set() and time.monotonic() < until:
            lab.last_run.journal.ask(lambda connection: connection.execute("SELECT pg_sleep(0.02)"))

    def body(saga: Any) -> None:
        writing = Running(write)
        began = time.monotonic()
        try:
            sleeps(30)
        except ActionTimedOut:
            took.append(time.monotonic() - began)
        finally:
            enough.set()
        writing.result()

    lab.step(body, limits=dataclasses.replace(LIMITS, heartbeat_seconds=10, lease_seconds=30))
    assert took[0] < 2.0, took


def test_a_call_that_ends_in_spite_of_its_timeout_keeps_its_result(lab: Lab) -> None:
    """It swallowed the interruption and took effect: what is known for certain is known."""
    assert lab.step(lambda saga: stubborn("x")).output == "finished"
    (row,) = lab.actions()
    assert (row.state, row.result) == ("DONE", '"finished"')
    assert any("late answer" in what for what in lab.whats())


@action(compensate=deeds.unbook, timeout=deeds.QUICK, retry=deeds.ONCE)
def stubborn(kind: str) -> str:
    try:
        time.sleep(30)
    except BaseException:  # noqa: BLE001 - what a driver may do
        time.sleep(0.1)
    return "finished"


def test_an_async_call_that_ends_in_spite_of_its_timeout_keeps_its_result(lab: Lab) -> None:
    assert lab.step(lambda saga: asyncio.run(stubborn_async("x"))).output == "finished"
    assert lab.actions()[0].state == "DONE"


@action(compensate=deeds.unbook, timeout=deeds.QUICK, retry=deeds.ONCE)
async def stubborn_async(kind: str) -> str:
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        await asyncio.sleep(0.1)
    return "finished"


def test_the_body_goes_on_after_a_timeout_it_copes_with(lab: Lab) -> None:
    def body(saga: Any) -> str:
        with pytest.raises(ActionTimedOut):
            sleeps(30)
        deeds.book("flights")
        return "by train"

    assert lab.step(body).output == "by train"
    assert lab.states() == [("sleeps", "IN_DOUBT"), ("book", "DONE")]
    assert lab.step_state() == "SUCCEEDED"


# -- races ----------------------------------------------------------------------------------------------------------

BRIEF = timedelta(seconds=0.02)


@action(compensate=deeds.unbook, timeout=BRIEF, retry=deeds.ONCE)
def brief(number: int, seconds: float, kind: str = "brief") -> int:
    time.sleep(seconds)
    return number


@action(compensate=deeds.unbook, timeout=BRIEF, retry=deeds.ONCE)
async def brief_async(number: int, seconds: float, kind: str = "brief") -> int:
    await asyncio.sleep(seconds)
    return number


def durations() -> list[float]:
    chance = random.Random(7)
    return [chance.uniform(0.015, 0.025) for _ in range(100)]


def check_race(lab: Lab, ended: list[str]) -> None:
    """Each call came to what the log says, nothing was interrupted that was not under way, nobody is still waiting."""
    assert len(ended) == 100
    rows = lab.actions()
    assert len(rows) == 100
    assert {"DONE", "IN_DOUBT"} >= {row.state for row in rows}
    assert [row.state for row in rows].count("IN_DOUBT") == ended.count("timed out")
    assert lab.step_state() == "SUCCEEDED"


def test_an_interruption_that_races_the_end_of_a_call_hits_only_that_call(lab: Lab) -> None:
    ended: list[str] = []

    def body(saga: Any) -> None:
        for number, seconds in enumerate(durations()):
            try:
                assert brief(number, seconds) == number
                ended.append("ended")
            except ActionTimedOut:
                ended.append("timed out")
            sum(range(2000))  # a stray interruption would be raised here

    lab.step(body)
    check_race(lab, ended)
    assert 0 < ended.count("timed out") < 100


def test_an_interruption_that_races_the_end_of_an_async_call_hits_only_that_call(lab: Lab) -> None:
    ended: list[str] = []

    async def body() -> None:
        for number, seconds in enumerate(durations()):
            try:
                assert await brief_async(number, seconds) == number
                ended.append("ended")
            except ActionTimedOut:
                ended.append("timed out")
            await asyncio.sleep(0)

    lab.step(lambda saga: asyncio.run(body()))
    check_race(lab, ended)


def test_an_interruption_that_races_the_end_of_a_threads_call_hits_only_that_call(lab: Lab) -> None:
    ended: list[str] = []

    def one(job: tuple[int, float]) -> None:
        try:
            assert brief(*job) == job[0]
            ended.append("ended")
        except ActionTimedOut:
            ended.append("timed out")
        sum(range(2000))

    def body(saga: Any) -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(one, enumerate(durations())))

    lab.step(body)
    check_race(lab, ended)


def test_an_interruption_raised_while_a_call_leaves_does_not_keep_it_in_the_register() -> None:
    """Else the process would be ended for a call that is over."""
    register = CallRegister()
    call = RunningCall("x", 1.0)
    register.enter(call)
    assert register.mark_abandoned(call, "too slow")
    leaves = register._leave
    hits = iter([True])

    def hit_once(left: RunningCall) -> bool:
        if next(hits, False):
            raise ActionTimedOut("it comes right here")
        return leaves(left)

    register._leave = hit_once  # type: ignore[method-assign]
    assert register.leave(call) is False
    assert len(register) == 0


def test_a_signal_for_a_call_that_is_over_is_not_heard() -> None:
    register = CallRegister()
    register.install_handler()
    try:
        call, other = RunningCall("over", 1.0), RunningCall("other", 1.0, thread_id=1)
        for each in (call, other):
            register.enter(each)
            assert register.mark_abandoned(each, "too slow")
        register._interrupted = call
        register.leave(call)
        signal.pthread_kill(threading.get_ident(), INTERRUPT)
        time.sleep(0.01)
    finally:
        register.remove_handler()


def test_the_handler_is_given_back_when_the_step_ends(lab: Lab) -> None:
    before = signal.getsignal(INTERRUPT)
    lab.step(lambda saga: None)
    assert signal.getsignal(INTERRUPT) is before


# -- execution_timeout and the like ---------------------------------------------------------------------------------


class ExecutionTimeout(BaseException):
    """As Airflow's AirflowTaskTimeout: raised by a signal handler, at any point of the main thread."""


def test_a_signal_that_raises_anywhere_leaves_nothing_open(lab: Lab) -> None:
    chance = random.Random(11)
    with Alarm(ExecutionTimeout) as alarm:
        for number in range(60):
            run = f"cut{number}"

            def body(saga: Any) -> None:
                alarm.after(chance.uniform(0.0005, 0.02))
                while True:
                    short("x", chance.random())
                    alarm.check()

            lab.fails(body, ExecutionTimeout, run)
            alarm.off()
            states = [row.state for row in lab.actions(run)]
            assert "PENDING" not in states
            assert states.count("IN_DOUBT") <= 1
            assert lab.step_state(run) == "STOPPED"
    assert lab.sessions() == []


@action(compensate=deeds.unbook, timeout=deeds.TIMEOUT)
def short(kind: str, number: float) -> float:
    return number


# -- stop now -------------------------------------------------------------------------------------------------------


def test_stop_now_abandons_the_call_under_way(lab: Lab) -> None:
    lab.world.tell("hold", "flights")
    running = Running(
        lambda: (lab.world.await_received("flights"), lab.cancel(stop_now=True), time.monotonic())[2]
    )
    lab.fails(lambda saga: deeds.book_patiently("flights"), (SagaCancelledError,))
    assert time.monotonic() - running.result() < 2
    assert lab.states() == [("book_patiently", "IN_DOUBT")]
    assert "stop now" in (lab.actions()[0].error or "")
    lab.world.release("flights")


def test_c88_stop_now_is_heard_in_the_middle_of_one_long_call_and_undone_after_a1(lab: Lab) -> None:
    lab.world.tell("hold", "flights")
    canceller = Running(
        lambda: (lab.world.await_received("flights"), lab.cancel(stop_now=True), time.monotonic())[2]
    )
    lab.fails(lambda saga: holds_long("flights"), SagaCancelledError)
    assert time.monotonic() - canceller.result() < 5
    (row,) = lab.actions()
    assert row.state == "IN_DOUBT"
    request = lab.view().requests[0]
    settled = lab.carry_out(request.request_uuid)
    assert settled.saga.state == "CANCELLED"
    assert lab.world.net().total == 0
    (undone,) = lab.world.undo_calls()
    assert row.lands_by is not None
    assert undone["at"] >= row.lands_by.isoformat(timespec="milliseconds")
    lab.world.release("flights")


@action(compensate=deeds.unbook, verify=deeds.look_up, timeout=timedelta(seconds=4), retry=deeds.ONCE)
def holds_long(kind: str, *, key: str) -> Any:
    return deeds._book(kind, "", key)


def test_a_cancel_lets_the_call_under_way_end(lab: Lab) -> None:
    lab.world.tell("hold", "flights")

    def cancel() -> None:
        lab.world.await_received("flights")
        lab.cancel()
        wait_until(
            lambda: lab.last_run and lab.last_run.journal and lab.last_run.journal.stop_order, "it is seen"
        )
        lab.world.release("flights")

    canceller = Running(cancel)
    lab.fails(
        lambda saga: [deeds.book_patiently("flights"), deeds.book("hotels")],
        SagaCancelledError,
        limits=LIMITS,
    )
    canceller.result()
    assert lab.states() == [("book_patiently", "DONE")]
    assert lab.world.calls("hotels") == []
