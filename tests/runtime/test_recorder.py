"""What happens to one call: its intent first, its outcome, its retries, and what becomes of it when nobody knows."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from airflow_saga.core.actions import READ_ONLY
from airflow_saga.core.declare import action
from airflow_saga.core.errors import (
    ActionFailedError,
    InDoubtError,
    NestedActionError,
    NotApplied,
    NotInSagaError,
    NotRegisteredError,
    StepInterrupted,
)
from airflow_saga.core.records import ActionRecord
from dags.support import travel
from tests.runtime import deeds
from tests.runtime.lab import Lab, wait_until


def test_intent_is_committed_before_the_call(lab: Lab) -> None:
    lab.world.tell("hold", "flights")
    running = lab.start(lambda saga: deeds.book_patiently("flights"))
    lab.world.await_received("flights")
    assert lab.states() == [("book_patiently", "PENDING")]
    lab.world.release("flights")
    running.result()
    assert lab.states() == [("book_patiently", "DONE")]


def test_calls_are_recorded_in_order_with_params_result_and_stable_keys(lab: Lab) -> None:
    def body(saga: Any) -> str:
        deeds.search("flights", "cheap")
        flight = deeds.book("flights", what="LIS")
        deeds.book("hotels")
        deeds.tell("ann", "booked")
        return str(flight["id"])

    result = lab.step(body)
    assert lab.states() == [("search", "DONE"), ("book", "DONE"), ("book", "DONE"), ("tell", "DONE")]
    rows = lab.actions()
    assert [row.seq for row in rows] == [1, 2, 3, 4]
    assert len({row.key for row in rows}) == 4
    assert [call["key"] for call in lab.world.calls()] == [rows[1].key, rows[2].key, rows[3].key]
    assert result.output == lab.world.calls("flights")[0]["id"]
    assert result.actions == tuple(rows)
    assert lab.step_state() == "SUCCEEDED"


def test_a_call_outside_a_step_is_refused_and_fn_is_the_bare_function(lab: Lab) -> None:
    with pytest.raises(NotInSagaError, match=r"book\.fn"):
        deeds.book("flights")
    assert lab.world.ledger() == []
    deeds.book.fn("flights", key="k")
    assert lab.world.net().total == 1


@action(compensate=deeds.unbook, timeout=deeds.TIMEOUT)
def books_inside(kind: str) -> Any:
    return deeds.book(kind)


def test_an_action_inside_an_action_is_refused(lab: Lab) -> None:
    problem = lab.fails(lambda saga: books_inside("flights"), NestedActionError)
    assert "book.fn" in str(problem)
    assert lab.world.ledger() == []


@action(compensate=deeds.unbook, timeout=deeds.TIMEOUT)
async def books_inside_async(kind: str) -> Any:
    return await deeds.book_async(kind)


def test_an_async_action_inside_an_async_action_is_refused(lab: Lab) -> None:
    lab.fails(lambda saga: asyncio.run(books_inside_async("flights")), NestedActionError)
    assert lab.world.ledger() == []


def test_an_action_made_while_the_step_runs_is_refused_before_its_call(lab: Lab) -> None:
    def body(saga: Any) -> None:
        late = action(compensate=deeds.unbook, name="made_late")(lambda_free)
        late("flights")

    problem = lab.fails(body, NotRegisteredError)
    assert "made_late" in str(problem)
    assert lab.world.ledger() == []
    assert lab.states() == []


def lambda_free(kind: str) -> None:
    travel.book(kind, {})


# -- failing --------------------------------------------------------------------------------------------------------


def test_a_proved_refusal_is_tried_again_and_then_failed(lab: Lab) -> None:
    lab.world.tell("refuse", "flights")
    problem = lab.fails(lambda saga: deeds.book("flights"), NotApplied)
    assert "409" in str(problem)
    assert len(lab.world.calls("flights")) == 3
    assert len({call["key"] for call in lab.world.calls("flights")}) == 1
    (row,) = lab.actions()
    assert (row.state, row.tries, row.lands_by) == ("FAILED", 3, None)


def test_a_refusal_that_heals_is_one_effect(lab: Lab) -> None:
    lab.world.tell("refuse", "flights", times=2)
    lab.step(lambda saga: deeds.book("flights"))
    assert lab.world.net().total == 1
    (row,) = lab.actions()
    assert (row.state, row.tries) == ("DONE", 3)


def test_async_refusals_are_tried_again_too(lab: Lab) -> None:
    lab.world.tell("refuse", "flights", times=2)
    lab.step(lambda saga: asyncio.run(deeds.book_async("flights")))
    assert lab.world.net().total == 1
    assert lab.actions()[0].tries == 3


def test_read_only_failures_are_tried_again_and_need_no_doubt(lab: Lab) -> None:
    def body(saga: Any) -> str:
        with pytest.raises(ZeroDivisionError):
            fails_to_read()
        return "went on"

    assert lab.step(body).output == "went on"
    assert len(_CALLS) == 2
    assert lab.states() == [("fails_to_read", "FAILED")]
    assert not lab.actions()[0].residual


@action(compensate=READ_ONLY, retry=deeds.Retry(first=timedelta(0), tries=2))
def fails_to_read() -> float:
    _CALLS.append(1)
    raise ZeroDivisionError


_CALLS: list[int] = []


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    _CALLS.clear()


def test_a_raised_call_whose_probe_finds_it_returns_what_was_found(lab: Lab) -> None:
    lab.world.tell("apply_and_drop", "flights", times=1)
    result = lab.step(lambda saga: deeds.book_quickly("flights"))
    assert result.output["id"] == lab.world.calls("flights")[0]["id"]
    assert len(lab.world.calls("flights")) == 1
    (row,) = lab.actions()
    assert (row.state, row.note) == ("DONE", "verify: yes")


def test_a_raised_call_whose_probe_finds_nothing_is_tried_again(lab: Lab) -> None:
    lab.world.tell("drop", "flights", times=1)
    lab.step(lambda saga: deeds.book_quickly("flights"))
    assert len(lab.world.calls("flights")) == 2
    assert lab.world.net().total == 1


def test_the_probe_is_asked_only_after_nothing_can_land_any_more(lab: Lab) -> None:
    lab.world.tell("apply_and_drop", "flights", times=1)
    lab.step(lambda saga: deeds.book_quickly("flights"))
    (row,) = lab.actions()
    (looked,) = lab.world.lookups("flights")
    assert row.lands_by is not None
    assert looked["at"] >= row.lands_by.isoformat(timespec="milliseconds")


@pytest.mark.parametrize("says", ["unknown", "nothing at all"])
def test_a_doubt_that_no_probe_ends_stops_the_call_and_is_not_called_again(lab: Lab, says: str) -> None:
    lab.world.tell("apply_and_drop", "flights", times=1)
    if says == "unknown":
        lab.world.tell("unknown", "flights")
    call = deeds.book_quickly if says == "unknown" else deeds.book_quickly_blind
    lab.fails(lambda saga: call("flights"), travel.TravelError)
    assert len(lab.world.calls("flights")) == 1
    assert lab.states() == [(call.name, "IN_DOUBT")]


@pytest.mark.parametrize("way", ["raises", "answers nonsense"])
def test_a_probe_that_goes_wrong_means_unknown(lab: Lab, way: str) -> None:
    lab.world.tell("apply_and_drop", "flights", times=1)
    lab.world.tell("fail" if way == "raises" else "garble", "flights", verb="lookup")
    lab.fails(lambda saga: deeds.book_quickly("flights"), travel.TravelError)
    assert lab.states() == [("book_quickly", "IN_DOUBT")]


def test_an_idempotent_call_in_doubt_is_called_again_with_the_same_key_after_a1(lab: Lab) -> None:
    lab.world.tell("apply_and_drop", "flights", times=1)
    begun = time.monotonic()
    lab.step(lambda saga: deeds.book_again("flights"))
    calls = lab.world.calls("flights")
    assert len(calls) == 2
    assert calls[0]["key"] == calls[1]["key"]
    assert lab.world.net().total == 1
    assert time.monotonic() - begun >= 1.5, "the first attempt could have landed until 1.5 s after its intent"


def test_an_idempotent_call_in_doubt_is_not_called_again_once_its_key_is_forgotten(lab: Lab) -> None:
    lab.world.tell("apply_and_drop", "flights", times=1)
    lab.fails(lambda saga: forgotten_soon("flights"), travel.TravelError)
    assert len(lab.world.calls("flights")) == 1
    assert lab.states() == [("forgotten_soon", "IN_DOUBT")]
    lab.fails(lambda saga: forgotten_soon("flights"), InDoubtError, try_number=2)


@action(compensate=deeds.unbook, idempotent=True, key_lifetime=timedelta(seconds=1), timeout=deeds.QUICK)
def forgotten_soon(kind: str, *, key: str) -> Any:
    return deeds._book(kind, "", key)


def test_the_same_call_again_while_it_is_in_doubt_is_refused(lab: Lab) -> None:
    lab.world.tell("apply_and_drop", "flights", times=1)

    def body(saga: Any) -> None:
        with pytest.raises(travel.TravelError):
            deeds.book_quickly_blind("flights")
        with pytest.raises(InDoubtError):
            deeds.book_quickly_blind("flights")
        deeds.book_quickly_blind("hotels")

    lab.step(body)
    assert len(lab.world.calls("flights")) == 1
    assert lab.states() == [("book_quickly_blind", "IN_DOUBT"), ("book_quickly_blind", "DONE")]
    assert lab.step_state() == "SUCCEEDED"


def test_the_same_call_again_is_refused_also_after_a_resume(lab: Lab) -> None:
    lab.world.tell("apply_and_drop", "flights", times=1)
    lab.fails(lambda saga: deeds.book_quickly_blind("flights"), travel.TravelError)

    def insists(saga: Any) -> None:
        for _ in range(2):
            with pytest.raises(InDoubtError):
                deeds.book_quickly_blind("flights")

    lab.step(insists, try_number=2)
    assert len(lab.world.calls("flights")) == 1


def test_a_call_that_proved_to_have_failed_may_be_made_again(lab: Lab) -> None:
    lab.world.tell("drop", "flights", times=3)

    def body(saga: Any) -> None:
        with pytest.raises(travel.TravelError):
            deeds.book_quickly("flights")
        deeds.book_quickly("flights")

    lab.step(body)
    assert lab.states() == [("book_quickly", "FAILED"), ("book_quickly", "DONE")]
    assert lab.world.net().total == 1


# -- parallel calls -------------------------------------------------------------------------------------------------


def test_parallel_calls_by_gather_are_recorded_one_row_each(lab: Lab) -> None:
    async def body() -> list[Any]:
        return await asyncio.gather(*[deeds.book_async("flights", str(number)) for number in range(12)])

    found = lab.step(lambda saga: [booking["what"] for booking in asyncio.run(body())]).output
    assert found == [str(number) for number in range(12)]
    assert lab.states() == [("book_async", "DONE")] * 12
    assert lab.world.net().total == 12


def test_parallel_calls_by_threads_are_recorded_one_row_each(lab: Lab) -> None:
    def body(saga: Any) -> list[Any]:
        with ThreadPoolExecutor(6) as pool:
            return [b["what"] for b in pool.map(lambda n: deeds.book("flights", str(n)), range(12))]

    assert lab.step(body).output == [str(number) for number in range(12)]
    assert lab.states() == [("book", "DONE")] * 12
    assert lab.world.net().total == 12


def test_one_of_parallel_calls_fails_and_the_others_end(lab: Lab) -> None:
    lab.world.tell("refuse", "hotels")
    lab.world.tell("delay", "flights", seconds=0.3)

    async def body() -> list[Any]:
        return await asyncio.gather(
            *[deeds.book_async(kind) for kind in ("flights", "hotels", "cars")], return_exceptions=True
        )

    found = lab.step(lambda saga: [type(each).__name__ for each in asyncio.run(body())]).output
    assert found == ["dict", "NotApplied", "dict"]
    assert sorted(row.state for row in lab.actions()) == ["DONE", "DONE", "FAILED"]


def test_an_async_call_that_its_body_cancels_is_in_doubt(lab: Lab) -> None:
    lab.world.tell("hold", "flights")

    async def body() -> str:
        task = asyncio.ensure_future(deeds.book_async("flights"))
        await asyncio.to_thread(lab.world.await_received, "flights")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        lab.world.release("flights")
        return "coped"

    assert lab.step(lambda saga: asyncio.run(body())).output == "coped"
    assert lab.states() == [("book_async", "IN_DOUBT")]
    assert lab.step_state() == "SUCCEEDED"


def test_an_async_call_that_its_body_cancels_before_it_began_is_no_doubt(lab: Lab) -> None:
    async def body() -> str:
        task = asyncio.ensure_future(deeds.book_async("flights"))
        await asyncio.sleep(0)  # it has handed its intent to the journal, and no more
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return "coped"

    assert lab.step(lambda saga: asyncio.run(body())).output == "coped"
    assert lab.world.ledger() == []
    assert all(state == "FAILED" for _, state in lab.states())
    assert lab.step_state() == "SUCCEEDED"


def test_the_journal_outlives_an_event_loop_that_is_gone(lab: Lab) -> None:
    """What it has to tell a loop that was closed meanwhile is of no interest to anybody; it must not end it."""
    lab.world.tell("refuse", "flights")

    async def gives_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(deeds.book_async("flights"), 0.15)

    def body(saga: Any) -> str:
        asyncio.run(gives_up())
        decision = lab.cancel()
        assert decision.undoes
        wait_until(lambda: saga.cancelled, "the cancel is seen")
        with pytest.raises(StepInterrupted, match="ann"):
            saga.check()
        return "done"

    lab.fails(body, StepInterrupted)


def test_a_call_left_running_by_the_body_is_awaited_before_the_step_ends(lab: Lab) -> None:
    lab.world.tell("delay", "flights", seconds=0.5)
    threads = []

    def body(saga: Any) -> str:
        thread = threading.Thread(target=lambda: deeds.book("flights"))
        thread.start()
        threads.append(thread)
        lab.world.await_received("flights")
        return "left"

    assert lab.step(body).output == "left"
    threads[0].join(5)
    assert not threads[0].is_alive()
    assert lab.states() == [("book", "DONE")]
    assert lab.step_state() == "SUCCEEDED"


def test_a_call_left_running_by_a_body_that_raised_is_awaited_too(lab: Lab) -> None:
    lab.world.tell("delay", "flights", seconds=0.5)

    def body(saga: Any) -> None:
        threading.Thread(target=lambda: deeds.book("flights")).start()
        lab.world.await_received("flights")
        raise ValueError("no more")

    lab.fails(body, ValueError)
    assert lab.states() == [("book", "DONE")]
    assert lab.step_state() == "STOPPED"


def test_a_thread_left_over_by_the_body_does_not_wait_for_ever(lab: Lab) -> None:
    """It is between two tries of its call when the step ends: the next one is refused, nobody hangs."""
    lab.world.tell("refuse", "flights")
    ended = threading.Event()
    problems = []

    def left_over() -> None:
        try:
            slowly_again("flights")
        except BaseException as problem:  # noqa: BLE001 - whatever it is, it is looked at below
            problems.append(problem)
        ended.set()

    def body(saga: Any) -> None:
        threading.Thread(target=left_over, daemon=True).start()
        lab.world.await_answered("flights")

    lab.step(body)
    assert ended.wait(10)
    assert len(lab.world.calls("flights")) == 1
    assert len(problems) == 1


@action(
    compensate=deeds.unbook, timeout=deeds.TIMEOUT, retry=deeds.Retry(first=timedelta(seconds=0.5), tries=5)
)
def slowly_again(kind: str, *, key: str) -> Any:
    return deeds._book(kind, "", key)


def test_the_end_of_tries_is_replayed_as_the_refusal_it_was(lab: Lab) -> None:
    """A body that copes with a refusal copes with it again when it is resumed."""
    lab.world.tell("refuse", "flights")

    def body(saga: Any) -> str:
        try:
            deeds.book("flights")
        except NotApplied:
            deeds.book("hotels")
        if saga_fails:
            raise ValueError("later")
        return "by train"

    saga_fails = True
    lab.fails(body, ValueError)
    saga_fails = False
    assert lab.step(body, try_number=2).output == "by train"
    assert len(lab.world.calls("flights")) == 3
    assert len(lab.world.calls("hotels")) == 1
    assert issubclass(ActionFailedError, NotApplied)


def test_record_of_a_forward_probe_has_params_and_key(lab: Lab) -> None:
    lab.world.tell("apply_and_drop", "flights", times=1)
    _SEEN.clear()
    lab.step(lambda saga: probed("flights"))
    (record,) = _SEEN
    (row,) = lab.actions()
    assert (record.name, record.params, record.key, record.in_doubt) == (
        "probed",
        {"kind": "flights"},
        row.key,
        True,
    )
    assert (record.dag_id, record.run_id, record.task_id) == (lab.dag_id, "r", "t")


_SEEN: list[ActionRecord] = []


def _remembers(record: ActionRecord) -> Any:
    _SEEN.append(record)
    return deeds.look_up(record)


@action(compensate=deeds.unbook, verify=_remembers, timeout=deeds.QUICK)
def probed(kind: str, *, key: str) -> Any:
    return deeds._book(kind, "", key)
