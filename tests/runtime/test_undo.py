"""The undo of a step: in reverse, with retries, waits and doubts, and honest about what still stands."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from typing import Any

import pytest

from airflow_saga.core.actions import action
from airflow_saga.core.errors import (
    CompensationRejected,
    NestedActionError,
    NotApplied,
    SagaCancelledError,
    StepFencedError,
    StepKilledError,
    Unavailable,
    UndoFencedError,
    UndoOutOfOrderError,
)
from airflow_saga.core.records import ActionRecord, Applied, Later
from airflow_saga.store.decision import Verdict
from airflow_saga.store.freeze import Freeze
from dags.support import travel
from tests.runtime import deeds
from tests.runtime.lab import Lab, Running, RunPlace, wait_until


def five_bookings(saga: Any) -> None:
    for kind in ("flights", "hotels", "cars", "notes", "payments"):
        deeds.book(kind)


def undone_kinds(lab: Lab) -> list[str]:
    return [each["kind"] for each in lab.world.net().undo_order]


def test_actions_are_undone_in_reverse_once_each_with_their_own_keys(lab: Lab) -> None:
    lab.step(five_bookings)
    settled = lab.undo()
    assert settled.saga.state == "CANCELLED"
    assert settled.residual == ()
    assert undone_kinds(lab) == ["payments", "notes", "cars", "hotels", "flights"]
    assert lab.world.net().total == 0
    rows = lab.actions()
    assert {row.state for row in rows} == {"COMPENSATED"}
    assert [call["key"] for call in lab.world.undo_calls()] == [row.undo_key for row in reversed(rows)]
    assert lab.step_state() == "UNDONE"


def test_what_cannot_be_undone_is_named_and_the_rest_is_undone(lab: Lab) -> None:
    def body(saga: Any) -> None:
        deeds.book("flights")
        deeds.tell("ann", "booked")
        deeds.search("hotels")
        deeds.book("cars")

    lab.step(body)
    settled = lab.undo()
    assert settled.saga.state == "PARTIALLY_CANCELLED"
    assert [row.name for row in settled.residual] == ["tell"]
    assert settled.residual[0].state == "NON_COMPENSABLE"
    assert undone_kinds(lab) == ["cars", "flights"]
    assert lab.step_state() == "PARTLY_UNDONE"


def test_nothing_is_undone_that_proved_to_have_no_effect(lab: Lab) -> None:
    lab.world.tell("refuse", "hotels")

    def body(saga: Any) -> None:
        deeds.book("flights")
        with pytest.raises(NotApplied):
            deeds.book("hotels")

    lab.step(body)
    lab.undo()
    assert [call["kind"] for call in lab.world.undo_calls()] == ["flights"]


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
    lab.step(five_bookings, on_compensation_failure="halt")
    lab.world.tell("fail", "cars", verb="undo")
    settled = lab.undo()
    states = [row.state for row in lab.actions()]
    assert states == ["DONE", "DONE", "COMPENSATION_FAILED", "COMPENSATED", "COMPENSATED"]
    assert settled.saga.state == "PARTIALLY_CANCELLED"
    assert [row.params for row in settled.residual] == [row.params for row in lab.actions()[:3]]
    lab.world.forget()
    again = lab.undo(owner="undo2")
    assert again.saga.state == "CANCELLED"
    assert undone_kinds(lab) == ["payments", "notes", "cars", "hotels", "flights"]
    assert len(lab.world.undo_calls("payments")) == len(lab.world.undo_calls("notes")) == 1


def test_an_undo_goes_on_past_a_failed_compensation_where_it_may(lab: Lab) -> None:
    lab.step(five_bookings)
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
    lab.step(five_bookings)
    lab.world.tell("fail", "*", verb="undo", status=503, retry_after=10)
    lab.undo()
    waits = [(row.reconcile_at - row.undo_finished_at).total_seconds() for row in lab.actions()]  # type: ignore[operator]
    assert all(8.5 <= wait <= 13.5 for wait in waits)
    assert len(set(waits)) == 5


def test_an_action_that_waits_lets_the_earlier_ones_be_undone(lab: Lab) -> None:
    lab.step(five_bookings)
    lab.world.tell("fail", "cars", verb="undo", status=503, retry_after=60)
    settled = lab.undo()
    assert undone_kinds(lab) == ["payments", "notes", "hotels", "flights"]
    assert [row.waiting_for for row in settled.residual] == ["the agency"]


# -- in doubt -------------------------------------------------------------------------------------------------------


def test_c37_a_call_that_took_effect_without_an_answer_is_found_and_undone(lab: Lab) -> None:
    lab.world.tell("apply_and_drop", "flights")
    lab.world.tell("unknown", "flights", times=1)
    lab.fails(lambda saga: deeds.book_quickly("flights"), travel.TravelError)
    assert lab.states() == [("book_quickly", "IN_DOUBT")]
    assert lab.undo().saga.state == "CANCELLED"
    assert lab.world.net().total == 0
    (row,) = lab.actions()
    assert row.note == "was in doubt, found done"
    assert [call["id"] for call in lab.world.undo_calls()] == [lab.world.calls("flights")[0]["id"]]


def test_a_call_that_proves_to_have_had_no_effect_is_not_compensated(lab: Lab) -> None:
    lab.world.tell("drop", "flights")
    lab.world.tell("unknown", "flights", times=1)
    lab.fails(lambda saga: deeds.book_quickly("flights"), travel.TravelError)
    assert lab.undo().saga.state == "CANCELLED"
    assert lab.states() == [("book_quickly", "FAILED")]
    assert lab.world.undo_calls() == []


@pytest.mark.parametrize("landed", [True, False])
def test_a_compensation_that_copes_is_called_in_doubt(lab: Lab, landed: bool) -> None:
    lab.world.tell("apply_and_drop" if landed else "drop", "flights")
    lab.fails(lambda saga: copes("flights"), travel.TravelError)
    assert lab.undo().saga.state == "CANCELLED"
    assert lab.world.net().total == 0
    assert len(lab.world.undo_calls("flights")) == 1


@action(compensate=deeds.unbook, compensate_in_doubt=True, timeout=deeds.QUICK, retry=deeds.ONCE)
def copes(kind: str, *, key: str) -> Any:
    return deeds._book(kind, "", key)


def test_a_doubt_that_nobody_can_end_goes_to_a_person_and_the_rest_is_undone(lab: Lab) -> None:
    lab.world.tell("apply_and_drop", "hotels")

    def body(saga: Any) -> None:
        deeds.book("flights")
        with pytest.raises(travel.TravelError):
            deeds.book_quickly_blind("hotels")
        deeds.book("cars")

    lab.step(body)
    settled = lab.undo()
    assert [(row.name, row.state) for row in settled.residual] == [("book_quickly_blind", "IN_DOUBT")]
    assert "has no verify probe" in (settled.residual[0].error or "")
    assert undone_kinds(lab) == ["cars", "flights"]
    assert settled.saga.state == "PARTIALLY_CANCELLED"
    decision = lab.resolves.resolve(
        lab.dag_id, "r", settled.residual[0].action_id, to="COMPENSATED", actor="ann", note_text="by phone"
    )
    assert lab.saga_state() == "CANCELLED", decision


def test_nothing_is_compensated_before_a1_is_waited_out(lab: Lab) -> None:
    lab.world.tell("drop", "flights")
    lab.fails(lambda saga: copes("flights"), travel.TravelError)
    lab.undo()
    (row,) = lab.actions()
    (call,) = lab.world.undo_calls()
    assert row.lands_by is not None
    assert call["at"] >= row.lands_by.isoformat(timespec="milliseconds")


def test_c35_no_compensation_overtakes_a_call_that_may_still_land(lab: Lab) -> None:
    lab.world.tell("late", "flights", seconds=1.0)

    def cancel_when_it_is_given_up() -> None:
        other = Lab(lab.url, lab.world, lab.dag_id)
        wait_until(
            lambda: other.begun() and [r.state for r in other.actions()] == ["IN_DOUBT"],
            "the call is given up",
        )
        other.cancel()
        other.close()

    canceller = Running(cancel_when_it_is_given_up)
    lab.fails(lambda saga: deeds.book_slow_world("flights"), SagaCancelledError)
    canceller.result()
    settled = lab.undo()
    assert settled.saga.state == "CANCELLED"
    net = lab.world.net()
    assert net.total == 0
    (undone,) = lab.world.undo_calls("flights")
    (called,) = lab.world.calls("flights")
    assert undone["id"] == called["id"]
    assert undone["seq"] > called["landed_seq"]


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


# -- order ----------------------------------------------------------------------------------------------------------


def test_an_earlier_step_is_not_undone_while_a_later_one_stands(lab: Lab) -> None:
    lab.step(lambda saga: deeds.book("flights"), task="a")
    lab.step(lambda saga: deeds.book("hotels"), task="b", ancestors=("a",))
    request = lab.ask_undo().request
    assert request is not None
    lab.freeze(request.request_uuid)
    with pytest.raises(UndoOutOfOrderError, match="book of b"):
        lab.step_undo(request.request_uuid, "a").run()
    assert lab.world.undo_calls() == []
    lab.undo_step(request.request_uuid, "b")
    lab.undo_step(request.request_uuid, "a")
    assert undone_kinds(lab) == ["hotels", "flights"]


def test_an_undo_of_a_step_that_has_nothing_to_undo_calls_nothing(lab: Lab) -> None:
    lab.step(lambda saga: deeds.search("flights"))
    settled = lab.undo()
    assert settled.saga.state == "CANCELLED"
    assert lab.world.undo_calls() == []


# -- killed, taken over ---------------------------------------------------------------------------------------------


def test_c14_an_undo_that_dies_in_a_call_is_taken_over_with_the_same_key(lab: Lab) -> None:
    """Here the first attempt goes on unseen (a paused machine); the fence keeps it from anything further."""
    lab.step(five_bookings)
    request = lab.ask_undo().request
    assert request is not None
    lab.freeze(request.request_uuid)
    lab.world.tell("hold", "cars", verb="undo", times=1)
    first = lab.step_undo(request.request_uuid)
    running = Running(first.run)
    lab.world.await_received("cars", verb="undo")
    lab.undo_step(request.request_uuid)
    lab.world.release("cars")
    assert isinstance(running.wait(), UndoFencedError | StepFencedError)
    calls = lab.world.undo_calls("cars")
    assert len(calls) == 2
    assert len({call["key"] for call in calls}) == 1
    assert undone_kinds(lab) == ["payments", "notes", "cars", "hotels", "flights"]
    assert len(lab.world.undo_calls("hotels")) == 1


def test_a_killed_undo_keeps_what_its_last_compensation_came_to(lab: Lab) -> None:
    lab.step(five_bookings)
    request = lab.ask_undo().request
    assert request is not None
    lab.freeze(request.request_uuid)
    lab.world.tell("hold", "cars", verb="undo", times=1)
    undo = lab.step_undo(request.request_uuid)
    running = Running(undo.run)
    lab.world.await_received("cars", verb="undo")
    for _ in range(3):
        undo.request_kill()
    lab.world.release("cars")
    assert isinstance(running.wait(), StepKilledError)
    assert [row.state for row in lab.actions()] == ["DONE", "DONE", *["COMPENSATED"] * 3]
    lab.undo_step(request.request_uuid)
    assert all(
        len(lab.world.undo_calls(kind)) == 1 for kind in ("flights", "hotels", "cars", "notes", "payments")
    )


def test_a_killed_undo_does_not_wait_out_its_back_off(lab: Lab) -> None:
    lab.step(lambda saga: waits_long("flights"))
    request = lab.ask_undo().request
    assert request is not None
    lab.freeze(request.request_uuid)
    lab.world.tell("fail", "flights", verb="undo")
    undo = lab.step_undo(request.request_uuid)
    running = Running(undo.run)
    lab.world.await_answered("flights", verb="undo")
    undo.request_kill()
    assert isinstance(running.wait(5), StepKilledError)
    assert lab.actions()[0].undo_failures == 1


@action(compensate=deeds.unbook, timeout=deeds.TIMEOUT, undo_retry=deeds.Retry(first=timedelta(seconds=60)))
def waits_long(kind: str, *, key: str) -> Any:
    return deeds._book(kind, "", key)


def test_a_second_undo_run_ends_at_once_and_names_the_first(lab: Lab) -> None:
    lab.step(five_bookings)
    request = lab.ask_undo().request
    assert request is not None
    lab.freeze(request.request_uuid, "first")
    second = lab.freezes.freeze_if_quiet(request.request_uuid, "second")
    assert second.outcome is Freeze.OWNED
    assert "first" in second.message
    with pytest.raises(UndoFencedError):
        lab.step_undo(request.request_uuid, owner="second").run()
    assert lab.world.undo_calls() == []


def test_an_undo_run_takes_over_from_one_that_is_over(lab: Lab) -> None:
    lab.step(five_bookings)
    request = lab.ask_undo().request
    assert request is not None
    lab.freeze(request.request_uuid, "first")
    taken = lab.freezes.freeze_if_quiet(request.request_uuid, "second", owner_is_over=True)
    assert taken.outcome is Freeze.FROZEN
    lab.undo_step(request.request_uuid, owner="second")
    with pytest.raises(UndoFencedError):
        lab.step_undo(request.request_uuid, owner="first").run()
    assert lab.world.net().total == 0


def test_c38_what_was_decided_about_the_forward_run_does_not_stop_the_undo(lab: Lab) -> None:
    lab.step(five_bookings)
    request = lab.ask_undo(stop_now=True).request
    assert request is not None
    lab.freeze(request.request_uuid)
    lab.world.tell("hold", "cars", verb="undo", times=1)
    running = Running(lambda: lab.undo_step(request.request_uuid))
    lab.world.await_received("cars", verb="undo")
    assert lab.cancel(stop_now=True).verdict is Verdict.ALREADY
    assert lab.ask_undo(cause="marked_failed").verdict in (Verdict.IGNORED, Verdict.ALREADY)
    lab.world.release("cars")
    running.result()
    assert len(lab.world.undo_calls()) == 5
    assert lab.world.net().total == 0


# -- what is not there any more -------------------------------------------------------------------------------------


def test_an_action_that_nobody_declares_any_more_is_named_and_the_rest_is_undone(lab: Lab) -> None:
    def body(saga: Any) -> None:
        deeds.book("flights")
        deeds.book_coping("hotels")
        deeds.book("cars")

    lab.step(body)
    known = _without("book_coping")
    settled = lab.undo(actions=known)
    assert settled.saga.state == "PARTIALLY_CANCELLED"
    (row,) = settled.residual
    assert row.state == "COMPENSATION_FAILED"
    assert "'book_coping'" in (row.error or "")
    assert undone_kinds(lab) == ["cars", "flights"]


def _without(*names: str) -> Any:
    from airflow_saga.core.actions import Registry, registry

    rest = Registry()
    for name in registry.names():
        if name not in names and (found := registry.find(name, 1)) is not None:
            rest.add(found)
    return rest


def test_a_doubtful_action_whose_params_cannot_be_read_does_not_stop_the_others(lab: Lab) -> None:
    lab.world.tell("drop", "hotels")

    def body(saga: Any) -> None:
        deeds.book("flights")
        with pytest.raises(travel.TravelError):
            deeds.book_quickly("hotels")
        deeds.book("cars")

    lab.world.tell("unknown", "hotels")
    lab.step(body)
    lab.connection.execute(
        "UPDATE airflow_saga.action SET params = 'no value of ours' WHERE state = 'IN_DOUBT' AND saga_id = "
        "(SELECT saga_id FROM airflow_saga.saga WHERE dag_id = %s)",
        (lab.dag_id,),
    )
    settled = lab.undo()
    assert [row.name for row in settled.residual] == ["book_quickly"]
    assert undone_kinds(lab) == ["cars", "flights"]


def test_a_done_action_whose_params_cannot_be_read_is_named_and_the_rest_is_undone(lab: Lab) -> None:
    lab.step(five_bookings)
    row = lab.actions()[2]
    lab.connection.execute(
        "UPDATE airflow_saga.action SET params = 'no value of ours' WHERE action_id = %s", (row.action_id,)
    )
    settled = lab.undo()
    assert [(each.action_id, each.state) for each in settled.residual] == [
        (row.action_id, "COMPENSATION_FAILED")
    ]
    assert undone_kinds(lab) == ["payments", "notes", "hotels", "flights"]


def test_the_old_version_of_an_action_is_undone_by_the_compensation_kept_for_it(lab: Lab) -> None:
    lab.step(lambda saga: deeds.book("flights"))
    from airflow_saga.core.actions import Registry, _origin

    _SEEN.clear()
    newer = Registry()
    import dataclasses

    newer.add(
        dataclasses.replace(
            deeds.book, version=2, compensation=_never, compensations={1: _old}, origin=_origin(_old)
        )
    )
    assert lab.undo(actions=newer).saga.state == "CANCELLED"
    assert [record.version for record in _SEEN] == [1]


_SEEN: list[ActionRecord] = []


def _old(record: ActionRecord) -> None:
    _SEEN.append(record)


def _never(record: ActionRecord) -> None:
    raise CompensationRejected("not for this one")


def test_the_record_a_compensation_gets(lab: Lab) -> None:
    _SEEN.clear()
    lab.step(lambda saga: remembered("flights", 3))
    lab.undo()
    (record,) = _SEEN
    (row,) = lab.actions()
    assert record.params == {"kind": "flights", "seats": 3}
    assert record.result == {"seats": 3}
    assert (record.key, record.undo_key, record.attempt) == (row.key, row.undo_key, 1)
    assert (record.in_doubt, record.result_lost, record.later_token) == (False, False, None)


@action(compensate=_old, timeout=deeds.TIMEOUT)
def remembered(kind: str, seats: int) -> dict[str, int]:
    return {"seats": seats}


def test_unavailable_and_busy_words_are_what_the_row_shows() -> None:
    assert "payments is unavailable" in str(Unavailable("payments", 3))


def test_c40_undo_order_is_that_of_the_log_over_steps_and_actions(lab: Lab) -> None:
    """The workers' clocks play no part: the second step's rows carry times an hour before those of the first."""
    lab.step(lambda saga: [deeds.book("k1"), deeds.book("k2")], task="a")
    lab.step(lambda saga: [deeds.book("k3")], task="b", ancestors=("a",))
    lab.step(lambda saga: [deeds.book("k4"), deeds.book("k5")], task="c", ancestors=("a", "b"))
    for task, hours in itertools.zip_longest("abc", (1, 0, -1)):
        lab.connection.execute(
            "UPDATE airflow_saga.action SET begun_at = begun_at + %s * interval '1 hour', "
            "finished_at = finished_at + %s * interval '1 hour' WHERE step_id = (SELECT step_id FROM "
            "airflow_saga.step s JOIN airflow_saga.saga g USING (saga_id) WHERE g.dag_id = %s AND s.task_id = %s)",
            (hours, hours, lab.dag_id, task),
        )
    lab.undo()
    assert undone_kinds(lab) == ["k5", "k4", "k3", "k2", "k1"]
