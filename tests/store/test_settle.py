"""The end of an undo: settle, ask again for what was under way, expire (PROTOCOL 4, 6)."""

from __future__ import annotations

import pytest

from airflow_saga.core.errors import UndoFencedError, UndoOutOfOrderError
from airflow_saga.core.records import Outcome
from airflow_saga.store.undo import EndedTry
from tests.store.scene import Scene

# -- settle ---------------------------------------------------------------------------------------------------------


def test_settle_waits_for_every_action_of_the_request(each_scene: Scene) -> None:
    request = each_scene.frozen_undo()
    attached = each_scene.undo_of()
    assert [row.seq for row in each_scene.settles.unsettled(request)] == [1, 2]
    assert each_scene.settle() is None
    each_scene.compensate(attached, each_scene.action(2))
    before = each_scene.tables()
    assert each_scene.settle() is None
    assert each_scene.tables() == before
    each_scene.compensate(attached, each_scene.action(1))
    settled = each_scene.settle()
    assert settled is not None
    assert (settled.saga.state, settled.request.state, settled.residual) == ("CANCELLED", "SETTLED", ())
    saga = each_scene.saga
    assert (saga.mode, saga.deadline_at, saga.actor, saga.cause) == (None, None, "ann", "user")
    assert (each_scene.step().state, each_scene.step().lease_until) == ("UNDONE", None)
    again = each_scene.settle(request)
    assert again is not None
    assert again.request.state == "SETTLED"


def test_c92_after_a_halt_the_second_undo_does_only_what_is_open_and_in_order(each_scene: Scene) -> None:
    each_scene.stopped("flight", 1, 2, 3, 4, 5, on_compensation_failure="halt")
    each_scene.freeze(each_scene.cancel())
    attached = each_scene.undo_of()
    for seq in (5, 4):
        each_scene.compensate(attached, each_scene.action(seq))
    assert not each_scene.undos.is_halted(each_scene.request)
    each_scene.compensate(attached, each_scene.action(3), "COMPENSATION_FAILED", failed=True, error="500")
    assert each_scene.undos.is_halted(each_scene.request)
    settled = each_scene.settle()
    assert settled is not None
    assert settled.saga.state == "PARTIALLY_CANCELLED"
    assert each_scene.states() == {
        1: "DONE",
        2: "DONE",
        3: "COMPENSATION_FAILED",
        4: "COMPENSATED",
        5: "COMPENSATED",
    }
    request = each_scene.ask()
    each_scene.freeze(request)
    assert not each_scene.undos.is_halted(request), "it is tried anew"
    assert each_scene.settle() is None
    attached = each_scene.undo_of()
    assert [row.seq for row in attached.open_actions] == [3, 2, 1]
    begin = each_scene.next_try(each_scene.action(2))
    assert each_scene.undos.write_undo(attached, None, begin) == (False, None), "3 comes first"
    for row in attached.open_actions:
        assert row.undo_failures == 0
        each_scene.compensate(attached, row)
    settled = each_scene.settle()
    assert settled is not None
    assert settled.saga.state == "CANCELLED"


def test_p5_what_is_tried_anew_holds_back_the_steps_before_it(scene: Scene) -> None:
    scene.ran("flight", 1)
    scene.ran("hotel", 1, after=["flight"], on_compensation_failure="halt")
    scene.freeze(scene.ask())
    scene.compensate(scene.undo_of("hotel"), scene.action(1, "hotel"), "COMPENSATION_FAILED", failed=True)
    assert scene.settle() is not None
    scene.freeze(scene.ask())
    with pytest.raises(UndoOutOfOrderError):
        scene.undo_of("flight")
    scene.undo_step("hotel")
    scene.undo_step("flight")
    scene.settle()
    assert scene.saga.state == "CANCELLED"


def test_an_undo_that_continues_past_a_failure_names_what_stands(scene: Scene) -> None:
    scene.frozen_undo()
    attached = scene.undo_of()
    scene.compensate(attached, scene.action(2), "COMPENSATION_FAILED", failed=True, error="409 locked")
    scene.compensate(attached, scene.action(1))
    settled = scene.settle()
    assert settled is not None
    assert settled.saga.state == "PARTIALLY_CANCELLED"
    assert [(row.seq, row.state, row.error) for row in settled.residual] == [
        (2, "COMPENSATION_FAILED", "409 locked")
    ]


# -- later ----------------------------------------------------------------------------------------------------------


def promised(scene: Scene, seconds: float = 3600.0, deadline_seconds: float = 86_400.0) -> None:
    """PARTIALLY_CANCELLED, since the compensation of 2 is under way; 1 was given up."""
    scene.frozen_undo()
    attached = scene.undo_of()
    row = scene.action(2)
    begin = scene.next_try(row, undo_deadline_seconds=deadline_seconds)
    assert scene.undos.write_undo(attached, None, begin)[1] is not None
    later = EndedTry(
        row.action_id, "COMPENSATING", reconcile_seconds=seconds, waiting_for="the bank", later_token='"t1"'
    )
    assert scene.undos.write_undo(attached, later, None)[0]
    scene.compensate(attached, scene.action(1), "COMPENSATION_FAILED", failed=True)
    assert scene.settle() is not None


def test_what_is_under_way_is_settled_for_the_order_and_residual_for_the_end(each_scene: Scene) -> None:
    promised(each_scene)
    row = each_scene.action(2)
    assert (row.state, row.settled, row.residual) == ("COMPENSATING", True, True)
    assert (row.waiting_for, row.later_token, row.undo_failures) == ("the bank", '"t1"', 0)
    assert row.reconcile_at is not None
    assert each_scene.saga.state == "PARTIALLY_CANCELLED"
    assert each_scene.reader.due_sagas() == []
    assert each_scene.settles.ask_again_if_due(each_scene.saga.saga_id) is None


def test_c54_when_it_falls_due_the_reconciler_asks_again(each_scene: Scene) -> None:
    promised(each_scene)
    each_scene.time_passes(3601)
    assert [row["run_id"] for row in each_scene.reader.due_sagas()] == [each_scene.run_id]
    request = each_scene.settles.ask_again_if_due(each_scene.saga.saga_id)
    assert request is not None
    assert (request.cause, request.whole_run, request.state) == ("due", True, "REQUESTED")
    saga = each_scene.saga
    assert (saga.state, saga.mode, saga.actor, saga.cause) == ("CANCELLING", "undo", "ann", "user")
    assert each_scene.settles.ask_again_if_due(saga.saga_id) is None
    plan = each_scene.freeze(request).plan
    assert plan is not None
    assert [(row["seq"], row["expected"]) for row in plan["steps"][0]["actions"]] == [
        (2, "undo again"),
        (1, "waits for a person"),
    ]
    attached = each_scene.undo_of()
    assert [row.seq for row in attached.open_actions] == [2], "what was given up waits for a person (C42)"
    assert (attached.open_actions[0].later_token, attached.open_actions[0].undo_tries) == ('"t1"', 1)
    each_scene.compensate(attached, each_scene.action(2))
    settled = each_scene.settle()
    assert settled is not None
    assert settled.saga.state == "PARTIALLY_CANCELLED"
    assert [row.seq for row in settled.residual] == [1]


def test_the_deadline_of_an_undo_runs_on_however_often_it_is_asked_again(each_scene: Scene) -> None:
    promised(each_scene, seconds=60, deadline_seconds=1000)
    deadline = each_scene.action(2).undo_deadline_at
    each_scene.time_passes(100)
    each_scene.settles.ask_again_if_due(each_scene.saga.saga_id)
    each_scene.freeze()
    attached = each_scene.undo_of()
    begin = each_scene.next_try(each_scene.action(2), undo_deadline_seconds=1000)
    assert each_scene.undos.write_undo(attached, None, begin)[1] == 2
    again = each_scene.action(2).undo_deadline_at
    assert deadline is not None
    assert again is not None
    assert (deadline - again).total_seconds() == pytest.approx(100, abs=1)


def test_what_is_not_due_yet_is_left_alone_when_something_else_is(scene: Scene) -> None:
    scene.frozen_undo()
    attached = scene.undo_of()
    for row, seconds in zip(attached.open_actions, (60.0, 6000.0), strict=True):
        assert scene.undos.write_undo(attached, None, scene.next_try(row))[1] == 1
        later = EndedTry(row.action_id, "COMPENSATING", reconcile_seconds=seconds, waiting_for="the bank")
        assert scene.undos.write_undo(attached, later, None)[0]
    scene.settle()
    scene.time_passes(100)
    scene.settles.ask_again_if_due(scene.saga.saga_id)
    scene.freeze()
    assert [row.seq for row in scene.undo_of().open_actions] == [2]
    assert scene.action(1).reconcile_at is not None


def test_a_person_who_asks_again_starts_everything_anew(scene: Scene) -> None:
    promised(scene)
    scene.freeze(scene.ask())
    attached = scene.undo_of()
    assert [row.seq for row in attached.open_actions] == [2, 1]
    for row in attached.open_actions:
        assert (row.undo_failures, row.undo_deadline_at, row.reconcile_at) == (0, None, None)


def test_a_late_answer_does_not_try_again_what_was_given_up(scene: Scene) -> None:
    step = scene.attach()
    scene.act(step, 1)
    assert scene.begin(step, 2)
    scene.freeze(scene.cancel(stop_now=True))
    scene.time_passes(12)
    attached = scene.undo_of()
    assert scene.undos.settle_action_if_held(attached, scene.action(2), "IN_DOUBT", probed=True)
    scene.compensate(attached, scene.action(1), "COMPENSATION_FAILED", failed=True)
    scene.settle()
    scene.lates.record_late(step, Outcome(2, "DONE", '"late"'), idempotent=False)
    scene.freeze()
    assert [row.seq for row in scene.undo_of().open_actions] == [2]


def test_what_falls_due_in_a_saga_that_runs_asks_for_that_step_only(scene: Scene) -> None:
    scene.ran("flight", 1)
    scene.freeze(scene.redo(scene.step()))
    attached = scene.undo_of()
    row = scene.action()
    assert scene.undos.write_undo(attached, None, scene.next_try(row))[1] == 1
    later = EndedTry(row.action_id, "COMPENSATING", reconcile_seconds=60, waiting_for="the bank")
    assert scene.undos.write_undo(attached, later, None)[0]
    scene.settle()
    scene.time_passes(61)
    request = scene.settles.ask_again_if_due(scene.saga.saga_id)
    assert request is not None
    assert (request.whole_run, scene.saga.state) == (False, "RUNNING")
    scene.undone("flight")
    assert scene.step().state == "UNDONE"


# -- expire ---------------------------------------------------------------------------------------------------------


def test_c97_at_the_deadline_every_step_is_fenced_and_what_is_open_is_named(each_scene: Scene) -> None:
    flight = each_scene.act(each_scene.attach(cancel_deadline_seconds=100.0), 1)
    assert each_scene.begin(flight, 2)
    each_scene.finish(each_scene.attach("car", cancel_deadline_seconds=100.0))
    each_scene.cancel()
    saga_id = each_scene.saga.saga_id
    assert each_scene.settles.expire_if_past_deadline(saga_id) is None
    assert each_scene.reader.sagas_past_deadline() == []
    each_scene.time_passes(101)
    each_scene.steps.heartbeat_if_held(flight, 15)
    assert [saga.saga_id for saga in each_scene.reader.sagas_past_deadline()] == [saga_id]
    expired = each_scene.settles.expire_if_past_deadline(saga_id)
    assert expired is not None
    assert (expired.state, expired.cause) == ("PARTIALLY_CANCELLED", "user")
    assert "deadline" in (expired.reason or "")
    assert (each_scene.step().state, each_scene.step().fence) == ("PARTLY_UNDONE", 2)
    assert each_scene.step("car").state == "UNDONE"
    assert each_scene.states() == {1: "DONE", 2: "IN_DOUBT"}
    assert each_scene.request.state == "EXPIRED"
    assert not each_scene.end(flight, 2)
    assert not each_scene.steps.heartbeat_if_held(flight, 15).held
    assert each_scene.settles.expire_if_past_deadline(saga_id) is None


def test_expiring_fences_the_undo_too(scene: Scene) -> None:
    scene.stopped("flight", 1, 2, cancel_deadline_seconds=100.0)
    scene.freeze(scene.cancel())
    attached = scene.undo_of()
    row = scene.action(2)
    assert scene.undos.write_undo(attached, None, scene.next_try(row))[1] == 1
    scene.time_passes(101)
    assert scene.settles.expire_if_past_deadline(scene.saga.saga_id) is not None
    with pytest.raises(UndoFencedError):
        scene.undos.write_undo(attached, EndedTry(row.action_id, "COMPENSATED"), None)
    with pytest.raises(UndoFencedError, match="EXPIRED"):
        scene.undo_of()
    with pytest.raises(UndoFencedError, match="EXPIRED"):
        scene.settle()
    assert scene.action(2).state == "COMPENSATING"
    scene.freeze(scene.ask())
    assert [row.seq for row in scene.undo_of().open_actions] == [2, 1]


def test_a_stop_without_anything_that_stands_expires_as_cancelled(scene: Scene) -> None:
    scene.attach(cancel_deadline_seconds=100.0)
    scene.cancel()
    scene.time_passes(101)
    expired = scene.settles.expire_if_past_deadline(scene.saga.saga_id)
    assert expired is not None
    assert (expired.state, scene.step().state) == ("CANCELLED", "UNDONE")


def test_with_the_undo_under_way_expires_the_one_that_waits_behind_it(scene: Scene) -> None:
    scene.ran("flight", 1, cancel_deadline_seconds=100.0)
    scene.freeze(scene.redo(scene.step(), cancel_deadline_seconds=100.0))
    scene.cancel()
    assert [request.state for request in scene.view.requests] == ["FROZEN", "QUEUED"]
    scene.time_passes(101)
    expired = scene.settles.expire_if_past_deadline(scene.saga.saga_id)
    assert expired is not None
    assert expired.state == "PARTIALLY_CANCELLED"
    assert [request.state for request in scene.view.requests] == ["EXPIRED", "EXPIRED"]
    scene.undone("flight", request=scene.ask())
    assert scene.saga.state == "CANCELLED"


def test_what_is_kept_does_not_expire(scene: Scene) -> None:
    scene.attach(cancel_deadline_seconds=1.0)
    scene.requests.cancel(*scene.run, actor="ann", keep=True)
    scene.time_passes(1000)
    assert scene.reader.sagas_past_deadline() == []
    assert scene.settles.expire_if_past_deadline(scene.saga.saga_id) is None
