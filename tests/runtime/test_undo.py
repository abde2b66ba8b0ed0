"""The undo of a step: in reverse, through doubts, kills and code that is gone, and honest about what still stands."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import pytest

from airflow_saga.core.declare import action
from airflow_saga.core.errors import (
    CompensationRejected,
    NotApplied,
    SagaCancelledError,
    StepFencedError,
    StepKilledError,
    UndoFencedError,
    UndoOutOfOrderError,
)
from airflow_saga.core.records import ActionRecord
from airflow_saga.store.decision import Verdict
from airflow_saga.store.freeze import Freeze
from dags.support import travel
from tests.runtime import deeds
from tests.runtime.lab import Lab, Running, wait_until


def test_actions_are_undone_in_reverse_once_each_with_their_own_keys(lab: Lab) -> None:
    lab.step(deeds.five_bookings)
    settled = lab.undo()
    assert settled.saga.state == "CANCELLED"
    assert settled.residual == ()
    assert lab.undone_kinds() == ["payments", "notes", "cars", "hotels", "flights"]
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
    assert lab.undone_kinds() == ["cars", "flights"]
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
    assert lab.undone_kinds() == ["cars", "flights"]
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
    assert lab.undone_kinds() == ["hotels", "flights"]


def test_an_undo_of_a_step_that_has_nothing_to_undo_calls_nothing(lab: Lab) -> None:
    lab.step(lambda saga: deeds.search("flights"))
    settled = lab.undo()
    assert settled.saga.state == "CANCELLED"
    assert lab.world.undo_calls() == []


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
    assert lab.undone_kinds() == ["k5", "k4", "k3", "k2", "k1"]


# -- killed, taken over ---------------------------------------------------------------------------------------------


def test_c14_an_undo_that_dies_in_a_call_is_taken_over_with_the_same_key(lab: Lab) -> None:
    """Here the first attempt goes on unseen (a paused machine); the fence keeps it from anything further."""
    lab.step(deeds.five_bookings)
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
    assert lab.undone_kinds() == ["payments", "notes", "cars", "hotels", "flights"]
    assert len(lab.world.undo_calls("hotels")) == 1


def test_a_killed_undo_keeps_what_its_last_compensation_came_to(lab: Lab) -> None:
    lab.step(deeds.five_bookings)
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
    lab.step(deeds.five_bookings)
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
    lab.step(deeds.five_bookings)
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
    lab.step(deeds.five_bookings)
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
    assert lab.undone_kinds() == ["cars", "flights"]


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
    assert lab.undone_kinds() == ["cars", "flights"]


def test_a_done_action_whose_params_cannot_be_read_is_named_and_the_rest_is_undone(lab: Lab) -> None:
    lab.step(deeds.five_bookings)
    row = lab.actions()[2]
    lab.connection.execute(
        "UPDATE airflow_saga.action SET params = 'no value of ours' WHERE action_id = %s", (row.action_id,)
    )
    settled = lab.undo()
    assert [(each.action_id, each.state) for each in settled.residual] == [
        (row.action_id, "COMPENSATION_FAILED")
    ]
    assert lab.undone_kinds() == ["payments", "notes", "hotels", "flights"]


def test_the_old_version_of_an_action_is_undone_by_the_compensation_kept_for_it(lab: Lab) -> None:
    lab.step(lambda saga: deeds.book("flights"))
    from airflow_saga.core.actions import Registry
    from airflow_saga.core.declare import _origin

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
