"""Resuming a step: what is done is not called again, what is not goes on, and a body that changed is stopped."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from airflow_saga.core.actions import READ_ONLY
from airflow_saga.core.declare import action
from airflow_saga.core.errors import InDoubtError, SagaDivergedError, StepRefusedError, in_doubt_by
from dags.support import travel
from tests.runtime import deeds
from tests.runtime.lab import Lab


class Interrupted(Exception):
    pass


def cut_after(number: int, *calls: Any) -> Any:
    """A body that makes these calls and raises before the one of this number."""

    def body(saga: Any) -> list[Any]:
        made = []
        for index, call in enumerate(calls):
            if index == number:
                raise Interrupted
            made.append(call())
        return made

    return body


def book(kind: str) -> Any:
    return lambda: deeds.book(kind)


def test_what_is_done_is_replayed_and_the_rest_is_done(lab: Lab) -> None:
    calls = [book("flights"), book("hotels"), lambda: deeds.search("cars"), book("cars")]
    lab.fails(cut_after(3, *calls), Interrupted)
    first = lab.world.calls("flights")[0]["id"]
    result = lab.step(cut_after(9, *calls), try_number=2)
    assert result.output[0]["id"] == first
    assert [len(lab.world.calls(kind)) for kind in ("flights", "hotels", "cars")] == [1, 1, 1]
    assert len(lab.world.lookups()) == 1
    assert lab.states() == [("book", "DONE"), ("book", "DONE"), ("search", "DONE"), ("book", "DONE")]


def test_equal_calls_are_told_apart_by_their_occurrence(lab: Lab) -> None:
    calls = [book("flights")] * 3
    lab.fails(cut_after(2, *calls), Interrupted)
    ids = [booking["id"] for booking in lab.step(cut_after(9, *calls), try_number=2).output]
    assert len(set(ids)) == 3
    assert ids == [call["id"] for call in lab.world.calls("flights")]


def test_a_step_that_succeeded_returns_its_output_without_running(lab: Lab) -> None:
    lab.step(lambda saga: [deeds.book("flights")["kind"], {"n": 1}])
    again = lab.step(lambda saga: pytest.fail("the body ran"), try_number=1)
    assert again.replayed
    assert again.output == ["flights", {"n": 1}]
    assert [row.name for row in again.actions] == ["book"]


def test_the_checkpoint_of_the_attempt_before_is_restored(lab: Lab) -> None:
    def body(saga: Any) -> Any:
        if saga.restored is not None:
            return saga.restored
        saga.checkpoint({"page": 1})
        saga.checkpoint({"page": 2})
        raise Interrupted

    lab.fails(body, Interrupted)
    assert lab.step(body, try_number=2).output == {"page": 2}


def test_a_checkpoint_that_cannot_be_kept_is_refused_where_it_is_made(lab: Lab) -> None:
    from airflow_saga.core.errors import SecretInParamsError, ValueNotKeptError

    lab.known_secrets = ["S3cr3t-XYZ"]

    def body(saga: Any) -> str:
        saga.checkpoint("good")
        with pytest.raises(ValueNotKeptError):
            saga.checkpoint(object())
        with pytest.raises(SecretInParamsError):
            saga.checkpoint({"password": "S3cr3t-XYZ"})
        deeds.book("flights")
        raise Interrupted

    lab.fails(body, Interrupted)
    assert lab.step(lambda saga: [deeds.book("flights"), saga.restored][1], try_number=2).output == "good"


# -- a body that changed --------------------------------------------------------------------------------------------


def test_another_call_at_this_place_stops_the_step_and_names_both(lab: Lab) -> None:
    lab.fails(cut_after(1, book("flights")), Interrupted) if False else None
    lab.fails(cut_after(2, book("flights"), book("hotels"), book("cars")), Interrupted)
    problem = lab.fails(cut_after(9, book("hotels"), book("flights")), SagaDivergedError, try_number=2)
    assert "book" in str(problem)
    assert len(lab.world.calls()) == 2
    assert lab.step_state() == "STOPPED"


def test_a_new_call_before_a_recorded_one_stops_the_step(lab: Lab) -> None:
    lab.fails(cut_after(1, book("flights"), book("hotels")), Interrupted)
    lab.fails(cut_after(9, book("cars"), book("flights")), SagaDivergedError, try_number=2)
    assert lab.world.calls("cars") == []


def test_changed_arguments_stop_the_step(lab: Lab) -> None:
    lab.fails(cut_after(1, lambda: deeds.book("flights", what="LIS"), book("cars")), Interrupted)
    lab.fails(cut_after(9, lambda: deeds.book("flights", what="OPO")), SagaDivergedError, try_number=2)
    assert len(lab.world.calls("flights")) == 1


def test_a_diverged_step_can_be_undone(lab: Lab) -> None:
    lab.fails(cut_after(1, book("flights"), book("cars")), Interrupted)
    lab.fails(cut_after(9, book("cars")), SagaDivergedError, try_number=2)
    assert lab.undo().saga.state == "CANCELLED"
    assert lab.world.net().total == 0


def test_a_reading_that_failed_is_made_again_before_what_was_recorded_after_it(lab: Lab) -> None:
    def body(saga: Any) -> str:
        try:
            found = reads("flights")
        except ZeroDivisionError:
            found = "nothing"
        deeds.book("hotels")
        if _FAILS:
            raise Interrupted
        return found

    _FAILS[:] = [True]
    lab.fails(body, Interrupted)
    _FAILS.clear()
    assert lab.step(body, try_number=2).output == "flights"
    assert len(lab.world.calls("hotels")) == 1
    assert lab.step(lambda saga: None).replayed


_FAILS: list[bool] = []


@action(compensate=READ_ONLY, retry=deeds.ONCE)
def reads(kind: str) -> str:
    if _FAILS:
        raise ZeroDivisionError
    return kind


def test_a_reading_may_move(lab: Lab) -> None:
    """It changes nothing, so where it stands in the body is no reason to stop."""
    lab.fails(cut_after(2, lambda: deeds.search("x"), book("flights"), book("cars")), Interrupted)
    lab.step(cut_after(9, book("flights"), lambda: deeds.search("x"), book("cars")), try_number=2)
    assert [len(lab.world.calls(kind)) for kind in ("flights", "cars")] == [1, 1]
    assert len(lab.world.lookups()) == 1


def test_a_reading_with_other_arguments_before_a_recorded_booking_stops_the_step(lab: Lab) -> None:
    lab.fails(cut_after(2, lambda: deeds.search("x"), book("flights"), book("cars")), Interrupted)
    lab.fails(cut_after(9, lambda: deeds.search("y"), book("flights")), SagaDivergedError, try_number=2)


# -- parallel -------------------------------------------------------------------------------------------------------


def test_parallel_calls_are_replayed_in_any_order(lab: Lab) -> None:
    kinds = ["flights", "hotels", "cars", "notes"]

    async def all_of(order: list[str]) -> dict[str, str]:
        made = await asyncio.gather(*[deeds.book_async(kind) for kind in order])
        return {booking["kind"]: booking["id"] for booking in made}

    lab.world.tell("delay", "*", seconds=0.2)
    ids: dict[str, str] = {}

    def first(saga: Any) -> None:
        ids.update(asyncio.run(all_of(kinds)))
        raise Interrupted

    lab.fails(first, Interrupted)
    again = lab.step(lambda saga: asyncio.run(all_of(kinds[::-1])), try_number=2)
    assert again.output == ids
    assert all(len(lab.world.calls(kind)) == 1 for kind in kinds)


def test_parallel_calls_by_threads_are_replayed(lab: Lab) -> None:
    def all_of(order: range) -> list[Any]:
        with ThreadPoolExecutor(4) as pool:
            return [b["what"] for b in pool.map(lambda n: deeds.book("flights", str(n)), order)]

    def first(saga: Any) -> None:
        all_of(range(8))
        raise Interrupted

    lab.fails(first, Interrupted)
    assert lab.step(lambda saga: all_of(range(8)), try_number=2).output == [str(n) for n in range(8)]
    assert len(lab.world.calls("flights")) == 8


def test_of_parallel_calls_only_those_that_were_not_made_are_made(lab: Lab) -> None:
    lab.world.tell("refuse", "hotels")

    async def all_of() -> list[Any]:
        return await asyncio.gather(
            *[deeds.book_async(kind) for kind in ("flights", "hotels", "cars")], return_exceptions=True
        )

    def first(saga: Any) -> None:
        asyncio.run(all_of())
        raise Interrupted

    lab.fails(first, Interrupted)
    lab.step(lambda saga: [type(each).__name__ for each in asyncio.run(all_of())], try_number=2)
    assert [len(lab.world.calls(kind)) for kind in ("flights", "hotels", "cars")] == [1, 3, 1]


# -- what was not finished ------------------------------------------------------------------------------------------


def test_a_doubt_from_an_earlier_attempt_is_asked_about_first(lab: Lab) -> None:
    lab.world.tell("apply_and_drop", "flights")
    lab.world.tell("unknown", "flights", times=1)
    lab.fails(lambda saga: deeds.book_quickly("flights"), travel.TravelError)
    lab.world.forget()
    result = lab.step(lambda saga: deeds.book_quickly("flights"), try_number=2)
    assert result.output["id"] == lab.world.calls("flights")[0]["id"]
    assert len(lab.world.calls("flights")) == 1


def test_a_doubt_that_nobody_can_end_stops_the_resume_and_says_what_to_do(lab: Lab) -> None:
    lab.world.tell("apply_and_drop", "flights")
    first = lab.fails(lambda saga: deeds.book_quickly_blind("flights"), travel.TravelError)
    assert "may not be called again" in (in_doubt_by(first) or ""), "the task must not be retried for this"
    problem = lab.fails(lambda saga: deeds.book_quickly_blind("flights"), InDoubtError, try_number=2)
    (row,) = lab.actions()
    assert f"resolve {lab.dag_id} r {row.action_id} --happened" in str(problem)
    assert len(lab.world.calls("flights")) == 1


@pytest.mark.parametrize("happened", [True, False])
def test_a_person_may_answer_for_the_probe(lab: Lab, happened: bool) -> None:
    lab.world.tell("apply_and_drop" if happened else "drop", "flights", times=1)
    lab.fails(lambda saga: deeds.book_quickly_blind("flights"), travel.TravelError)
    (row,) = lab.actions()
    from tests.runtime.lab import wait_until

    now = lab.undo_verbs.read_action(row.action_id)[1]
    assert row.lands_by is not None
    wait_until(lambda: lab.undo_verbs.read_action(row.action_id)[1] > row.lands_by, f"A1 is over ({now})")
    to = "DONE" if happened else "FAILED"
    result = '{"id": "found by phone"}' if happened else None
    lab.resolves.resolve(
        lab.dag_id, "r", row.action_id, to=to, actor="ann", note_text="phoned", result=result
    )
    again = lab.step(lambda saga: deeds.book_quickly_blind("flights"), try_number=2)
    assert len(lab.world.calls("flights")) == (1 if happened else 2)
    if happened:
        assert again.output == {"id": "found by phone"}


def test_tries_are_counted_over_the_generation(lab: Lab) -> None:
    lab.world.tell("refuse", "flights")
    for number in (1, 2):
        with pytest.raises(Exception, match="409"):
            lab.step(lambda saga: deeds.book("flights"), try_number=number)
    assert len(lab.world.calls("flights")) == 3


def test_a_clear_grants_new_tries_and_a_retry_after_it_none(lab: Lab) -> None:
    lab.world.tell("refuse", "flights")
    with pytest.raises(Exception, match="409"):
        lab.step(lambda saga: deeds.book("flights"))
    with pytest.raises(Exception, match="409"):
        lab.step(lambda saga: deeds.book("flights"), try_number=2, max_tries=1, clear_number=1)
    assert len(lab.world.calls("flights")) == 6
    with pytest.raises(Exception, match="409"):
        lab.step(lambda saga: deeds.book("flights"), try_number=3, max_tries=1, clear_number=1)
    assert len(lab.world.calls("flights")) == 6


def test_c80_a_second_copy_of_the_same_try_is_refused(lab: Lab) -> None:
    lab.world.tell("hold", "flights")
    running = lab.start(lambda saga: deeds.book("flights"))
    lab.world.await_received("flights")
    ti_id = lab.view().steps[0].ti_id
    problem = lab.fails(lambda saga: deeds.book("flights"), StepRefusedError, ti_id=ti_id)
    assert "already running" in str(problem)
    lab.world.release("flights")
    running.result()
    assert len(lab.world.calls("flights")) == 1
    assert lab.step_state() == "SUCCEEDED"


def test_keys_differ_by_generation_and_are_the_same_within_one(lab: Lab) -> None:
    lab.fails(cut_after(1, book("flights"), book("cars")), Interrupted)
    lab.step(cut_after(9, book("flights")), try_number=2)
    lab.undo()
    lab.step(cut_after(9, book("flights")), try_number=3, max_tries=1, clear_number=1)
    keys = [call["key"] for call in lab.world.calls("flights")]
    assert len(keys) == len(set(keys)) == 2
    assert [row.generation for row in lab.actions()] == [1, 2]
    assert lab.world.net().total == 1
