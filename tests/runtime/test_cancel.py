"""Stopping a step: a decision, a kill, a mark; what it ends, what it lets end, and what the task learns of it."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from airflow_saga.core.declare import action
from airflow_saga.core.errors import (
    ActionTimedOut,
    SagaCancelledError,
    StepKilledError,
    StepRefusedError,
    StepWaitError,
)
from airflow_saga.runtime.step import StepCleared, StepGivenBack
from airflow_saga.store.decision import Verdict
from tests.runtime import deeds
from tests.runtime.lab import LIMITS, Lab, Running, TaskPlace, wait_until

SLOWLY = deeds.Retry(first=timedelta(seconds=60), ceiling=timedelta(seconds=60), tries=5)


@action(compensate=deeds.unbook, timeout=deeds.TIMEOUT, retry=SLOWLY)
async def tries_slowly_async(kind: str, *, key: str) -> Any:
    return await asyncio.to_thread(deeds._book, kind, "", key)


def when_answered(lab: Lab, act: Any) -> Running:
    return Running(lambda: (lab.world.await_answered("flights"), time.sleep(0.1), act(), time.monotonic())[3])


# -- back-off -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_cancel_ends_a_back_off_at_once(lab: Lab, way: str) -> None:
    lab.world.tell("refuse", "flights")
    deciding = when_answered(lab, lab.cancel)
    call = deeds.slow_to_retry if way == "sync" else tries_slowly_async
    lab.fails(
        lambda saga: call("flights") if way == "sync" else asyncio.run(call("flights")), SagaCancelledError
    )
    assert time.monotonic() - deciding.result() < 3
    assert len(lab.world.calls("flights")) == 1
    assert lab.actions()[0].state == "FAILED"


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_kill_ends_a_back_off_at_once(lab: Lab, way: str) -> None:
    lab.world.tell("refuse", "flights")
    deciding = when_answered(lab, lambda: lab.last_run.request_kill())  # type: ignore[union-attr]
    call = deeds.slow_to_retry if way == "sync" else tries_slowly_async
    lab.fails(lambda saga: call("flights") if way == "sync" else asyncio.run(call("flights")), StepGivenBack)
    assert time.monotonic() - deciding.result() < 3


# -- the decision ---------------------------------------------------------------------------------------------------


def test_a_cancel_names_who_and_why_and_nothing_begins_after_it(lab: Lab) -> None:
    deciding = Running(
        lambda: (wait_until(lambda: lab.begun() and len(lab.actions()) > 5, "busy"), lab.cancel())[1]
    )

    def body(saga: Any) -> None:
        for number in range(100_000):
            deeds.nothing(number)

    problem = lab.fails(body, SagaCancelledError)
    assert "ann (wrong trip)" in str(problem)
    request = deciding.result().request
    assert all(row.begun_at <= request.asked_at for row in lab.actions())
    assert lab.step_state() == "STOPPED"


def test_a_body_that_ends_well_in_spite_of_a_cancel_still_fails_its_task(lab: Lab) -> None:
    def body(saga: Any) -> str:
        deeds.book("flights")
        lab.cancel()
        wait_until(lambda: saga.cancelled, "it is seen")
        return "done"

    lab.fails(body, SagaCancelledError)
    assert lab.step_state() == "SUCCEEDED"
    assert lab.carry_out(lab.view().requests[0].request_uuid).saga.state == "CANCELLED"
    assert lab.world.net().total == 0


def test_cancel_and_keep_stops_the_step_and_suspends_the_saga(lab: Lab) -> None:
    def body(saga: Any) -> None:
        deeds.book("flights")
        lab.cancel(keep=True)
        wait_until(lambda: saga.cancelled, "it is seen")
        deeds.book("hotels")

    lab.fails(body, SagaCancelledError)
    assert lab.saga_state() == "SUSPENDED"
    assert lab.world.net().total == 1
    lab.fails(lambda saga: None, StepRefusedError, try_number=2)
    again = lab.step(
        lambda saga: [deeds.book(kind)["kind"] for kind in ("flights", "hotels")],
        try_number=3,
        max_tries=1,
        clear_number=1,
    )
    assert again.output == ["flights", "hotels"]
    assert len(lab.world.calls("flights")) == 1


def test_c89_a_saga_cancelled_before_it_began_never_calls_anything(lab: Lab) -> None:
    decision = lab.cancel()
    assert decision.verdict is Verdict.NOTHING
    assert lab.saga_state() == "CANCELLED"
    problem = lab.fails(lambda saga: deeds.book("flights"), StepRefusedError)
    assert "ann" in str(problem)
    assert lab.world.ledger() == []


def test_c89_a_cancel_that_races_the_start_is_either_seen_or_undone(lab: Lab) -> None:
    chance = random.Random(89)
    other = Lab(lab.url, lab.world, lab.dag_id)
    for trial in range(500):
        run = f"r{trial}"
        delay = chance.uniform(0, 0.02)
        deciding = Running(lambda run=run, delay=delay: (time.sleep(delay), other.cancel(run))[1])  # type: ignore[misc]
        called: list[int] = []

        def body(saga: Any, called: list[int] = called) -> None:
            for number in range(3):
                deeds.nothing(number)
                called.append(number)

        with suppress(StepRefusedError, SagaCancelledError):
            lab.step(body, run)
        decision = deciding.result()
        if decision.verdict is Verdict.NOTHING:
            assert not called, f"{run}: it was said that nothing had begun"
            assert lab.saga_state(run) == "CANCELLED"
        else:
            assert decision.verdict is Verdict.CANCELLING, decision
            assert lab.saga_state(run) == "CANCELLING"
            assert "PENDING" not in [row.state for row in lab.actions(run)]
    other.close()


def test_c90_a_cancel_that_races_the_end_gets_an_answer_that_the_end_agrees_with(lab: Lab) -> None:
    chance = random.Random(90)
    other = Lab(lab.url, lab.world, lab.dag_id)
    verdicts = []
    for trial in range(500):
        run = f"r{trial}"
        near_the_end = threading.Event()

        def decide(run: str = run, near_the_end: threading.Event = near_the_end) -> Any:
            near_the_end.wait()
            time.sleep(chance.uniform(0, 0.02))
            over = other.view(run).steps[0].state == "SUCCEEDED"
            return other.cancel(run, run_is_success=over)

        deciding = Running(decide)

        def body(saga: Any, near_the_end: threading.Event = near_the_end) -> None:
            deeds.nothing(1)
            near_the_end.set()

        cancelled = False
        try:
            lab.step(body, run)
        except SagaCancelledError:
            cancelled = True
        decision = deciding.result()
        verdicts.append(decision.verdict)
        if not cancelled:
            lab.runs.complete_if_over(lab.dag_id, run)
        state = lab.saga_state(run)
        if decision.verdict is Verdict.FINISHED:
            assert not cancelled
            assert state == "COMPLETED"
            assert not lab.view(run).requests
            assert "airflow saga undo" in decision.message
        else:
            assert decision.verdict is Verdict.CANCELLING
            assert state == "CANCELLING"
            assert len(lab.view(run).requests) == 1
    assert set(verdicts) == {Verdict.FINISHED, Verdict.CANCELLING}
    other.close()


# -- killed: what Airflow says of the task then ---------------------------------------------------------------------


def killed_while_booking(lab: Lab, place: TaskPlace, expected: type[BaseException]) -> BaseException:
    """SIGTERM comes in the middle of the second of three bookings."""
    lab.world.tell("hold", "hotels", times=1)

    def kill() -> None:
        lab.world.await_received("hotels")
        for _ in range(3):
            lab.last_run.request_kill()  # type: ignore[union-attr]
        lab.world.release("hotels")

    killing = Running(kill)
    problem = lab.fails(three, expected, place=place)
    killing.result()
    return problem


def three(saga: Any) -> list[str]:
    return [deeds.book(kind)["kind"] for kind in ("flights", "hotels", "cars")]


def test_c12_a_kill_by_the_platform_keeps_what_is_done_and_the_retry_goes_on(lab: Lab) -> None:
    killed_while_booking(lab, TaskPlace(task="up_for_retry"), StepCleared)
    assert lab.states() == [("book", "DONE"), ("book", "DONE")]
    assert lab.view().requests == ()
    assert lab.step(three, try_number=2).output == ["flights", "hotels", "cars"]
    assert all(len(lab.world.calls(kind)) == 1 for kind in ("flights", "hotels", "cars"))


def test_a_kill_while_the_task_is_running_gives_the_place_back(lab: Lab) -> None:
    killed_while_booking(lab, TaskPlace(task="running"), StepGivenBack)
    assert lab.step_state() == "STOPPED"
    assert lab.view().requests == ()


def test_a_kill_of_a_cleared_task_stops_it_to_be_resumed(lab: Lab) -> None:
    killed_while_booking(lab, TaskPlace(task="restarting"), StepCleared)
    assert lab.view().requests == ()


def test_c03_a_step_whose_run_was_marked_failed_asks_for_the_undo_itself(lab: Lab) -> None:
    place = TaskPlace(task="failed", run="failed")
    problem = killed_while_booking(lab, place, SagaCancelledError)
    assert "marked failed" in str(problem)
    (request,) = lab.view().requests
    assert (request.cause, request.actor) == ("marked_failed", "airflow")
    assert place.triggered == [request.request_uuid]
    assert lab.saga_state() == "CANCELLING"
    assert lab.carry_out(request.request_uuid).saga.state == "CANCELLED"
    assert lab.world.net().total == 0
    assert lab.world.calls("cars") == []


def test_a_step_whose_task_alone_was_marked_failed_leaves_the_undo_to_the_end_of_the_run(lab: Lab) -> None:
    killed_while_booking(lab, TaskPlace(task="failed", run="running"), SagaCancelledError)
    assert lab.view().requests == ()
    assert lab.saga_state() == "RUNNING"


def test_a_kill_before_the_step_attached_calls_nothing(lab: Lab) -> None:
    run = lab.step_run()
    run.request_kill()
    with pytest.raises((StepGivenBack, StepKilledError)):
        run.run(lambda saga: deeds.book("flights"))
    assert lab.world.ledger() == []


def test_c08_an_answer_after_the_mark_is_kept_with_its_result_and_undone_once(lab: Lab) -> None:
    """Nobody is there to kill the process: it goes on, and what it brings home is undone."""
    lab.world.tell("hold", "flights")

    def mark() -> Any:
        lab.world.await_received("flights")
        decision = lab.requests.undo(lab.dag_id, "r", actor="airflow", cause="marked_failed")
        wait_until(lambda: lab.last_run.journal.stop_order, "it is seen")  # type: ignore[union-attr]
        lab.world.release("flights")
        return decision

    marking = Running(mark)
    lab.fails(lambda saga: [deeds.book_patiently("flights"), deeds.book("hotels")], SagaCancelledError)
    request = marking.result().request
    assert request is not None
    assert lab.states() == [("book_patiently", "DONE")]
    assert lab.carry_out(request.request_uuid).saga.state == "CANCELLED"
    (undone,) = lab.world.undo_calls()
    assert undone["id"] == lab.world.calls("flights")[0]["id"]
    assert lab.runs.complete_if_over(lab.dag_id, "r") == "CANCELLED"


def test_a_late_answer_after_the_undo_reopens_the_saga_and_is_undone(lab: Lab) -> None:
    """The world breaks A1: the call was given up as lost, undone as never happened, and lands all the same."""
    lab.world.tell("hold", "flights", lands="release", times=1)
    patient = dataclasses.replace(LIMITS, abandon_grace_seconds=60)
    running = lab.start(lambda saga: holds("flights"), limits=patient)
    lab.world.await_received("flights")
    decision = lab.requests.undo(lab.dag_id, "r", actor="ann", stop_now=True)
    assert decision.request is not None
    settled = lab.carry_out(decision.request.request_uuid)
    assert settled.saga.state == "CANCELLED"
    assert lab.states() == [("holds", "FAILED")]
    lab.world.release("flights")
    running.wait()
    wait_until(lambda: lab.saga_state() == "CANCELLING", "the late answer reopens it")
    again = lab.view().requests[-1]
    assert (again.cause, again.state) == ("late", "REQUESTED")
    assert lab.carry_out(again.request_uuid).saga.state == "CANCELLED"
    assert lab.world.net().total == 0
    assert len(lab.world.undo_calls()) == 1


@action(compensate=deeds.unbook, verify=deeds.look_up, timeout=timedelta(seconds=1), retry=deeds.ONCE)
def holds(kind: str, *, key: str) -> Any:
    """As a client that works on a thread of its own: the interruption does not reach it, and its answer comes home."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(deeds._book, kind, "", key)
        while True:
            with suppress(ActionTimedOut):
                return answer.result()


# -- waiting for an undo --------------------------------------------------------------------------------------------


def test_a_cleared_step_waits_in_its_slot_for_its_undo_and_begins_anew(lab: Lab) -> None:
    lab.step(three)
    request = lab.ask_undo().request
    assert request is not None
    place = TaskPlace()
    again = lab.start(three, try_number=2, max_tries=1, clear_number=1, place=place)
    lab.carry_out(request.request_uuid)
    assert again.result().output == ["flights", "hotels", "cars"]
    assert lab.view().steps[0].generation == 2
    assert lab.world.net().total == 3


def test_a_cleared_step_gives_its_slot_back_when_its_undo_takes_longer(lab: Lab) -> None:
    lab.step(three)
    request = lab.ask_undo().request
    assert request is not None
    place = TaskPlace()
    problem = lab.fails(three, StepWaitError, try_number=2, max_tries=1, clear_number=1, place=place)
    assert problem.request_uuid == str(request.request_uuid)  # type: ignore[attr-defined]
    assert place.triggered == [request.request_uuid]
    assert len(lab.world.calls()) == 3


def test_a_finished_step_that_was_cleared_is_undone_first(lab: Lab) -> None:
    lab.step(three)
    place = TaskPlace()
    again = lab.start(three, try_number=2, max_tries=1, clear_number=1, place=place)
    (request_uuid,) = wait_until(lambda: place.triggered, "it asks for its undo")
    assert lab.view().requests[0].cause == "redo"
    lab.carry_out(request_uuid)
    again.result()
    assert lab.world.net().total == 3
    assert [len(lab.world.calls(kind)) for kind in ("flights", "hotels", "cars")] == [2, 2, 2]
    assert lab.saga_state() == "RUNNING"
