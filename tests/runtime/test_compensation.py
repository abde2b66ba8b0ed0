"""One compensation: its tries, what it may return or raise, and the probe that confirms it."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from airflow_saga.core.declare import action
from airflow_saga.core.errors import NestedActionError, NotApplied, Unavailable
from airflow_saga.core.records import ActionRecord, Applied, Later
from dags.support import travel
from tests.runtime import deeds
from tests.runtime.lab import Lab, RunPlace, wait_until

# -- one try and the next -------------------------------------------------------------------------------------------


def test_a_failing_compensation_is_tried_again_with_the_same_key(lab: Lab) -> None:
    lab.step(lambda saga: deeds.book("flights"))
    lab.world.tell("fail", "flights", verb="undo", times=2)
    assert lab.undo().saga.state == "CANCELLED"
    calls = lab.world.undo_calls("flights")
    assert len(calls) == 3
    assert len({call["key"] for call in calls}) == 1
    (row,) = lab.actions()
    assert (row.undo_tries, row.undo_failures) == (3, 2)


def test_c42_a_compensation_that_keeps_failing_goes_to_a_person_and_can_be_asked_for_again(lab: Lab) -> None:
    lab.step(lambda saga: deeds.book("flights"))
    lab.world.tell("fail", "flights", verb="undo")
    settled = lab.undo()
    assert settled.saga.state == "PARTIALLY_CANCELLED"
    (row,) = settled.residual
    assert row.state == "COMPENSATION_FAILED"
    assert "500" in (row.error or "")
    assert len(lab.world.undo_calls("flights")) == 3
    assert lab.requests.claim_notice(settled.request.request_id, "standing")
    assert not lab.requests.claim_notice(settled.request.request_id, "standing")
    lab.world.forget()
    assert lab.undo().saga.state == "CANCELLED"
    assert len(lab.world.undo_calls("flights")) == 4
    assert lab.world.net().total == 0


def test_c92_a_halted_undo_says_what_waits_and_goes_on_with_only_that(lab: Lab) -> None:
    lab.step(deeds.five_bookings, on_compensation_failure="halt")
    lab.world.tell("fail", "cars", verb="undo")
    settled = lab.undo()
    states = [row.state for row in lab.actions()]
    assert states == ["DONE", "DONE", "COMPENSATION_FAILED", "COMPENSATED", "COMPENSATED"]
    assert settled.saga.state == "PARTIALLY_CANCELLED"
    assert [row.params for row in settled.residual] == [row.params for row in lab.actions()[:3]]
    lab.world.forget()
    again = lab.undo(owner="undo2")
    assert again.saga.state == "CANCELLED"
    assert lab.undone_kinds() == ["payments", "notes", "cars", "hotels", "flights"]
    assert len(lab.world.undo_calls("payments")) == len(lab.world.undo_calls("notes")) == 1


def test_an_undo_goes_on_past_a_failed_compensation_where_it_may(lab: Lab) -> None:
    lab.step(deeds.five_bookings)
    lab.world.tell("fail", "cars", verb="undo")
    settled = lab.undo()
    assert [row.state for row in lab.actions()].count("COMPENSATED") == 4
    assert [row.state for row in settled.residual] == ["COMPENSATION_FAILED"]


def test_a_rejected_compensation_is_not_tried_again(lab: Lab) -> None:
    lab.step(lambda saga: deeds.book("flights"))
    lab.world.tell("refuse", "flights", verb="undo")
    assert lab.undo().saga.state == "PARTIALLY_CANCELLED"
    assert len(lab.world.undo_calls("flights")) == 1


def test_a_compensation_that_takes_too_long_is_one_failed_try(lab: Lab) -> None:
    lab.step(lambda saga: undone_slowly("flights"))
    _SLOW[:] = [5.0]
    begun = time.monotonic()
    assert lab.undo().saga.state == "CANCELLED"
    assert time.monotonic() - begun < 4
    (row,) = lab.actions()
    assert (row.undo_tries, row.undo_failures) == (2, 1)


_SLOW: list[float] = []


def unbook_slowly(record: ActionRecord) -> None:
    until = time.monotonic() + (_SLOW.pop() if _SLOW else 0.0)
    while time.monotonic() < until:
        time.sleep(0.01)
    deeds.unbook(record)


@action(compensate=unbook_slowly, timeout=deeds.QUICK, undo_retry=deeds.SOON)
def undone_slowly(kind: str, *, key: str) -> Any:
    return deeds._book(kind, "", key)


def test_an_async_compensation_is_awaited(lab: Lab) -> None:
    lab.step(lambda saga: undone_async("flights"))
    assert lab.undo().saga.state == "CANCELLED"
    assert lab.world.net().total == 0


async def unbook_async(record: ActionRecord) -> None:
    deeds.unbook(record)


@action(compensate=unbook_async, timeout=deeds.TIMEOUT)
def undone_async(kind: str, *, key: str) -> Any:
    return deeds._book(kind, "", key)


def test_an_action_called_inside_a_compensation_is_refused(lab: Lab) -> None:
    lab.step(lambda saga: undone_by_another("flights"))
    settled = lab.undo()
    assert settled.residual[0].state == "COMPENSATION_FAILED"
    assert NestedActionError.__name__ in (settled.residual[0].error or "")
    assert [call["kind"] for call in lab.world.calls()] == ["flights"]


def unbook_by_action(record: ActionRecord) -> None:
    deeds.book("cars")


@action(compensate=unbook_by_action, timeout=deeds.TIMEOUT, undo_retry=deeds.ONCE)
def undone_by_another(kind: str, *, key: str) -> Any:
    return deeds._book(kind, "", key)


# -- not now --------------------------------------------------------------------------------------------------------


def test_a_promised_refund_is_awaited_and_asked_for_until_it_settled(own_lab: Lab) -> None:
    lab = own_lab
    lab.step(lambda saga: deeds.charge("12.50"))
    lab.world.tell("later", "payments", seconds=0.6)
    settled = lab.undo()
    assert settled.saga.state == "PARTIALLY_CANCELLED"
    (row,) = settled.residual
    assert (row.state, row.reconcile_at is not None) == ("COMPENSATING", True)
    assert row.undo_failures == 0
    place = RunPlace(run="failed")

    def goes_on() -> bool:
        lab.reconcile(place)
        for request in lab.view().requests:
            if request.state == "REQUESTED":
                assert request.cause == "due"
                lab.carry_out(request.request_uuid)
        return lab.saga_state() == "CANCELLED"

    wait_until(goes_on, "the refund settles")
    assert lab.world.net().total == 0
    assert len(lab.world.undo_calls("payments")) == 1


def test_later_ends_at_the_undo_deadline_also_over_many_requests(own_lab: Lab) -> None:
    lab = own_lab
    lab.step(lambda saga: undone_some_day("flights"))
    lab.undo()
    assert lab.actions()[0].state == "COMPENSATING"

    def goes_on() -> bool:
        lab.reconcile(RunPlace(run="failed"))
        for request in lab.view().requests:
            if request.state == "REQUESTED":
                lab.carry_out(request.request_uuid)
        return lab.actions()[0].state == "COMPENSATION_FAILED"

    wait_until(goes_on, "its deadline passes")
    assert "deadline" in (lab.actions()[0].error or "")


def some_day(record: ActionRecord) -> Later:
    return Later((record.later_token or 0) + 1, after=timedelta(seconds=0.2))


@action(
    compensate=some_day,
    timeout=deeds.TIMEOUT,
    undo_retry=deeds.SOON,
    undo_deadline=timedelta(seconds=0.8),
)
def undone_some_day(kind: str, *, key: str) -> Any:
    return deeds._book(kind, "", key)


def test_c54_an_outage_of_the_service_costs_no_try_and_needs_nobody(own_lab: Lab) -> None:
    lab = own_lab
    runs = [f"run{number}" for number in range(10)]
    for run in runs:
        lab.step(lambda saga: undone_patiently("flights"), run)
    lab.world.tell("fail", "flights", verb="undo", status=503, retry_after=0.3)
    for run in runs:
        settled = lab.undo(run)
        assert settled.residual[0].waiting_for == "the agency"
        assert settled.residual[0].undo_failures == 0
    healed = False

    def goes_on() -> bool:
        nonlocal healed
        lab.reconcile(RunPlace(run="failed"))
        for run in runs:
            for request in lab.view(run).requests:
                if request.state == "REQUESTED":
                    lab.carry_out(request.request_uuid)
        if not healed and len(lab.world.undo_calls("flights")) >= 3 * len(runs):
            lab.world.forget()
            healed = True
        return all(lab.saga_state(run) == "CANCELLED" for run in runs)

    wait_until(goes_on, "all are undone", 40)
    assert lab.world.net().total == 0
    refused = [call for call in lab.world.undo_calls("flights") if call["status"] == 503]
    assert len(refused) <= 5 * len(runs)
    assert not any(
        "COMPENSATION_FAILED" in str(event["what"]) for run in runs for event in lab.view(run).events
    )


@action(compensate=deeds.unbook, timeout=deeds.TIMEOUT, undo_retry=deeds.ONCE)
def undone_patiently(kind: str, *, key: str) -> Any:
    return deeds._book(kind, "", key)


def test_jitter_spreads_the_calls_of_those_that_wait(lab: Lab) -> None:
    lab.step(deeds.five_bookings)
    lab.world.tell("fail", "*", verb="undo", status=503, retry_after=10)
    lab.undo()
    waits = [(row.reconcile_at - row.undo_finished_at).total_seconds() for row in lab.actions()]  # type: ignore[operator]
    assert all(8.5 <= wait <= 13.5 for wait in waits)
    assert len(set(waits)) == 5


def test_an_action_that_waits_lets_the_earlier_ones_be_undone(lab: Lab) -> None:
    lab.step(deeds.five_bookings)
    lab.world.tell("fail", "cars", verb="undo", status=503, retry_after=60)
    settled = lab.undo()
    assert lab.undone_kinds() == ["payments", "notes", "hotels", "flights"]
    assert [row.waiting_for for row in settled.residual] == ["the agency"]


def test_unavailable_and_busy_words_are_what_the_row_shows() -> None:
    assert "payments is unavailable" in str(Unavailable("payments", 3))


# -- confirming -----------------------------------------------------------------------------------------------------


def test_a_compensation_that_lies_is_found_out_by_its_confirm_probe(lab: Lab) -> None:
    lab.step(lambda saga: confirmed("flights"))
    lab.world.tell("lie", "flights", verb="undo", times=1)
    assert lab.undo().saga.state == "CANCELLED"
    assert lab.world.net().total == 0
    assert len(lab.world.undo_calls("flights")) == 2
    assert lab.actions()[0].undo_failures == 1


def still_there(record: ActionRecord) -> Any:
    found = travel.find("flights", record.key)
    return NotApplied() if found is None else Applied(found)


@action(compensate=deeds.unbook, confirm=still_there, timeout=deeds.TIMEOUT, undo_retry=deeds.SOON)
def confirmed(kind: str, *, key: str) -> Any:
    return deeds._book(kind, "", key)


def test_a_confirm_probe_that_cannot_tell_does_not_stand_in_the_way(lab: Lab) -> None:
    lab.step(lambda saga: confirmed("flights"))
    lab.world.tell("fail", "flights", verb="lookup")
    assert lab.undo().saga.state == "CANCELLED"
