"""Checkpoints, save-points, and bodies that go on from one: what is kept, when, and what is asked for again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from airflow_saga.core.declare import action
from airflow_saga.core.errors import SagaDivergedError, StepWaitError
from airflow_saga.core.identity import action_key
from airflow_saga.store.rewind import RewindVerbs
from tests.runtime import deeds
from tests.runtime.lab import LIMITS, Lab, TaskPlace, wait_until


class Interrupted(Exception):
    pass


watched: list[Callable[[], None]] = []


@action(compensate=deeds.unbook)
def look_on(kind: str = "looks") -> None:
    """Looks at something while the call is under way."""
    for watch in watched:
        watch()


def standing(lab: Lab) -> dict[str, int]:
    return {kind: number for kind, number in lab.world.net().kinds.items() if number}


def pages(upto: int, of: int = 5) -> Any:
    """A body that books one page after the other, keeps how far it came, and is interrupted after ``upto``."""

    def body(saga: Any) -> int:
        for page in range(saga.resume_from(0), of):
            if page == upto:
                raise Interrupted
            deeds.book("hotels", what="the same words each time")
            saga.checkpoint(page + 1)
        return of

    return body


# -- when it is kept ------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_kept_within_its_time_though_no_heartbeat_is_due(lab: Lab) -> None:
    limits = dataclasses.replace(LIMITS, heartbeat_seconds=30, lease_seconds=90, flush_seconds=0.2)

    def body(saga: Any) -> float:
        began = time.monotonic()
        saga.checkpoint("here")
        wait_until(lambda: lab.view().steps[0].checkpoint == '"here"', "the checkpoint is committed")
        return time.monotonic() - began

    assert lab.step(body, limits=limits).output < 1.0


def test_a_checkpoint_behind_a_call_is_kept_within_its_time_too(lab: Lab) -> None:
    """Writing what the call came to is not a reason to wait for a heartbeat."""
    limits = dataclasses.replace(LIMITS, heartbeat_seconds=5, lease_seconds=30, flush_seconds=0.3)

    def body(saga: Any) -> float:
        deeds.book("hotels")
        saga.checkpoint("booked")
        began = time.monotonic()
        wait_until(lambda: lab.view().steps[0].checkpoint == '"booked"', "the checkpoint is committed")
        return time.monotonic() - began

    assert lab.step(body, limits=limits).output < 1.5


def test_so_many_checkpoints_are_kept_at_once(lab: Lab) -> None:
    limits = dataclasses.replace(
        LIMITS, heartbeat_seconds=30, lease_seconds=90, flush_seconds=20, checkpoint_every=10
    )

    def body(saga: Any) -> None:
        for number in range(1, 11):
            saga.checkpoint(number)
        wait_until(lambda: lab.view().steps[0].checkpoint == "10", "the tenth is committed")

    lab.step(body, limits=limits)


def test_a_checkpoint_is_kept_before_the_next_action_is_called(lab: Lab) -> None:
    limits = dataclasses.replace(LIMITS, heartbeat_seconds=30, lease_seconds=90, flush_seconds=20)
    seen: list[str | None] = []

    def body(saga: Any) -> None:
        saga.checkpoint("before")
        watched.append(lambda: seen.append(lab.view().steps[0].checkpoint))
        look_on()
        watched.clear()

    lab.step(body, limits=limits)
    assert seen == ['"before"']


def test_what_calls_came_to_is_kept_before_a_checkpoint_that_knows_of_it(lab: Lab) -> None:
    limits = dataclasses.replace(
        LIMITS, heartbeat_seconds=30, lease_seconds=90, flush_seconds=0.1, outcome_flush_seconds=20
    )

    def body(saga: Any) -> list[tuple[str, str]]:
        deeds.book("hotels")
        saga.checkpoint("booked")
        wait_until(lambda: lab.view().steps[0].checkpoint is not None, "the checkpoint is committed")
        return lab.states()

    assert lab.step(body, limits=limits).output == [("book", "DONE")]


def test_a_tight_loop_of_checkpoints_costs_its_caller_little(lab: Lab) -> None:
    taken: list[float] = []

    def body(saga: Any) -> None:
        for number in range(2000):
            began = time.perf_counter()
            saga.checkpoint({"page": number})
            taken.append(time.perf_counter() - began)

    lab.step(body)
    assert sorted(taken)[len(taken) // 2] < 0.0005


# -- going on from it -----------------------------------------------------------------------------------------------


def test_a_body_that_goes_on_from_its_checkpoint_asks_for_nothing_again(lab: Lab) -> None:
    lab.fails(pages(3), Interrupted)
    assert lab.step(pages(9), try_number=2).output == 5
    assert len(lab.world.calls("hotels")) == 5
    assert lab.states() == [("book", "DONE")] * 5
    assert lab.undo().saga.state == "CANCELLED"
    assert lab.world.net().total == 0


def test_a_call_after_the_checkpoint_is_replayed(lab: Lab) -> None:
    def body(saga: Any) -> list[str]:
        begun = saga.resume_from([])
        if not begun:
            begun = [deeds.book("hotels")["id"]]
            saga.checkpoint(begun)
        begun = [*begun, deeds.book("hotels")["id"]]
        if lab.world.calls("cars") == []:
            deeds.book("cars")
            raise Interrupted
        return begun

    lab.fails(body, Interrupted)
    booked = lab.step(body, try_number=2).output
    assert booked == [call["id"] for call in lab.world.calls("hotels")]


def test_a_body_that_only_looks_at_its_checkpoint_gets_recorded_results(lab: Lab) -> None:
    def body(saga: Any) -> Any:
        first = deeds.book("hotels")
        saga.checkpoint("one")
        if saga.restored is None:
            raise Interrupted
        return first["id"], saga.restored

    lab.fails(body, Interrupted)
    assert lab.step(body, try_number=2).output == (lab.world.calls("hotels")[0]["id"], "one")
    assert len(lab.world.calls("hotels")) == 1


def test_a_body_that_reads_before_it_acts_goes_on_from_its_checkpoint(lab: Lab) -> None:
    def body(saga: Any) -> str:
        if saga.resume_from() is None:
            deeds.search("LIS")
            deeds.book("hotels")
            saga.checkpoint("booked")
            raise Interrupted
        return str(saga.restored)

    lab.fails(body, Interrupted)
    assert lab.step(body, try_number=2).output == "booked"


def test_going_on_comes_first(lab: Lab) -> None:
    lab.fails(pages(2), Interrupted)

    def too_late(saga: Any) -> None:
        deeds.book("hotels", what="the same words each time")
        saga.resume_from(0)

    problem = lab.fails(too_late, RuntimeError, try_number=2)
    assert "resume_from() comes first" in str(problem)


# -- save-points ----------------------------------------------------------------------------------------------------


def test_a_saga_goes_back_to_a_savepoint_and_on_from_there(lab: Lab) -> None:
    def body(saga: Any) -> str:
        deeds.book("flights")
        saga.checkpoint("flown")
        saga.savepoint("flown")
        deeds.book("hotels")
        saga.checkpoint("slept")
        return str(saga.restored)

    lab.step(body)
    kept = lab.world.calls("flights")[0]["id"]
    asked = RewindVerbs(lab.connection).rewind(lab.dag_id, "r", "flown", actor="ann")
    lab.carry_out(asked.request.request_uuid)
    assert standing(lab) == {"flights": 1}
    again = lab.step(body, try_number=2, max_tries=1, clear_number=1)
    assert again.output == "flown"
    assert [call["id"] for call in lab.world.calls("flights")] == [kept]
    assert standing(lab) == {"flights": 1, "hotels": 1}
    assert len({call["key"] for call in lab.world.calls("hotels")}) == 2
    assert lab.undo().saga.state == "CANCELLED"
    assert lab.world.net().total == 0


def test_a_savepoint_has_a_name_of_its_own(lab: Lab) -> None:
    def body(saga: Any) -> None:
        saga.savepoint("a")
        for wrong in ("a", "", "x:y", "n" * 201):
            with pytest.raises(ValueError, match="save-point"):
                saga.savepoint(wrong)

    lab.step(body)


# -- a body that changed --------------------------------------------------------------------------------------------


def changed(*kinds: str, stop: bool = False) -> Any:
    def body(saga: Any) -> list[str]:
        booked = [deeds.book(kind)["id"] for kind in kinds]
        if stop:
            raise Interrupted
        return booked

    return body


def test_a_changed_body_is_undone_from_there_and_goes_on_live(lab: Lab) -> None:
    lab.fails(changed("flights", "hotels", "cars", stop=True), Interrupted)
    kept = lab.world.calls("flights")[0]["id"]
    place = TaskPlace()
    now = changed("flights", "trains")
    wait = lab.fails(now, StepWaitError, try_number=2, on_divergence="undo", place=place)
    assert "is undone first" in str(wait)
    [request] = place.triggered
    lab.carry_out(request)
    assert lab.undone_kinds() == ["cars", "hotels"]
    result = lab.step(now, try_number=3, on_divergence="undo")
    assert result.output[0] == kept
    assert standing(lab) == {"flights": 1, "trains": 1}
    saga = lab.view().saga
    assert lab.world.calls("trains")[0]["key"] == action_key(saga.saga_uuid, "t", -1, 2, 2)


def test_a_body_that_swallows_it_does_not_end_well(lab: Lab) -> None:
    lab.fails(changed("flights", stop=True), Interrupted)

    def swallows(saga: Any) -> str:
        with suppress(SagaDivergedError):
            deeds.book("cars")
        return "fine"

    lab.fails(swallows, SagaDivergedError, try_number=2)
    assert lab.step_state() == "STOPPED"
    assert lab.world.calls("cars") == []


@action(name="versioned", compensate=deeds.unbook)
def first_edition(kind: str) -> str:
    return f"booked {kind}"


@action(name="versioned", version=2, compensate=deeds.unbook, compensations={1: deeds.unbook})
def second_edition(kind: str) -> str:
    pytest.fail("it was called")


def test_another_version_of_an_action_is_another_action(lab: Lab) -> None:
    def first(saga: Any) -> None:
        first_edition("flights")
        raise Interrupted

    lab.fails(first, Interrupted)
    problem = lab.fails(lambda saga: second_edition("flights"), SagaDivergedError, try_number=2)
    assert "versioned" in str(problem)
