"""Freezing a request, and who carries it out: seize, fix the plan, withdraw, take over (PROTOCOL 6)."""

from __future__ import annotations

from uuid import uuid4

import pytest

from airflow_saga.core.errors import UndoFencedError, UnknownSagaError
from airflow_saga.store.freeze import Freeze
from airflow_saga.store.undo import EndedTry
from tests.store.scene import UNDO_RUN, Scene

# -- freeze ---------------------------------------------------------------------------------------------------------


def test_freeze_seizes_the_whole_scope_and_fixes_the_plan(each_scene: Scene) -> None:
    each_scene.ran("flight", 1, 2)
    hotel = each_scene.attach("hotel", after=["flight"])
    each_scene.read(hotel, 1)
    each_scene.act(hotel, 2)
    assert each_scene.begin(hotel, 3, effect="NON_COMPENSABLE")
    assert each_scene.steps.stop_if_held(hotel)
    frozen = each_scene.freezes.freeze_if_quiet(each_scene.cancel().request_uuid, UNDO_RUN)
    assert frozen.outcome is Freeze.FROZEN
    request = frozen.request
    assert (request.state, request.owner_run_id) == ("FROZEN", UNDO_RUN)
    assert request.frozen_at is not None
    assert request.plan is not None
    planned = [
        (step["task_id"], row["seq"], row["expected"])
        for step in request.plan["steps"]
        for row in step["actions"]
    ]
    assert planned == [
        ("hotel", 3, "cannot be undone"),
        ("hotel", 2, "undo"),
        ("flight", 2, "undo"),
        ("flight", 1, "undo"),
    ]
    assert len(request.plan_hash or "") == 64
    steps = [each_scene.step("flight"), each_scene.step("hotel")]
    assert [(step.state, step.fence, step.lease_until) for step in steps] == [("UNDOING", 2, None)] * 2
    assert each_scene.states("hotel") == {1: "DONE", 2: "DONE", 3: "IN_DOUBT"}
    assert each_scene.saga.state == "CANCELLING"
    assert each_scene.reader.indexes_to_undo(request, "flight") == [-1]


def test_c41_freeze_waits_for_every_step_of_the_scope_that_holds_a_lease(each_scene: Scene) -> None:
    step = each_scene.act(each_scene.attach(), 1)
    car = each_scene.attach("car")
    request = each_scene.cancel()
    before = each_scene.tables()
    waits = each_scene.freezes.freeze_if_quiet(request.request_uuid, UNDO_RUN)
    assert (waits.outcome, waits.waits_for) == (Freeze.NOT_QUIET, ("flight", "car"))
    assert "waiting for flight, car to stop" in waits.message
    assert each_scene.tables() == before
    assert each_scene.steps.stop_if_held(step)
    assert each_scene.freezes.freeze_if_quiet(request.request_uuid, UNDO_RUN).waits_for == ("car",)
    each_scene.time_passes(16)
    assert each_scene.begin(car, 1) is False
    each_scene.freeze(request)
    assert each_scene.step("car").state == "UNDOING"


def test_a_redo_waits_only_for_its_own_steps(scene: Scene) -> None:
    scene.ran("flight", 1)
    scene.attach("car")
    frozen = scene.freeze(scene.redo(scene.step("flight")))
    assert frozen.plan is not None
    assert [step["task_id"] for step in frozen.plan["steps"]] == ["flight"]
    assert scene.step("car").state == "RUNNING"


def test_stop_now_freezes_at_once_and_puts_the_open_call_in_doubt(each_scene: Scene) -> None:
    step = each_scene.attach()
    assert each_scene.begin(step, 1)
    each_scene.freeze(each_scene.cancel(stop_now=True))
    row = each_scene.action()
    assert (row.state, row.in_doubt) == ("IN_DOUBT", True)
    assert row.lands_by is not None
    assert not each_scene.end(step, 1)


def test_the_automatic_undo_decides_at_the_freeze(each_scene: Scene) -> None:
    each_scene.stopped("flight", 1, clear_number=2)
    hint = each_scene.hint(reason="boom", clear_number=2)
    assert (each_scene.saga.state, each_scene.saga.stop_clear_number) == ("FAILED", -1)
    each_scene.freeze(hint)
    saga = each_scene.saga
    assert (saga.state, saga.mode, saga.cause, saga.actor, saga.reason) == (
        *("CANCELLING", "undo", "failure", "airflow", "boom"),
    )
    assert (saga.stop_clear_number, saga.deadline_at is not None) == (2, True)


def test_the_automatic_undo_is_withdrawn_where_the_policy_does_not_apply_any_more(scene: Scene) -> None:
    scene.stopped("flight", 1)
    hint = scene.hint()
    scene.sql("UPDATE airflow_saga.saga SET on_failure = 'keep'")
    result = scene.freezes.freeze_if_quiet(hint.request_uuid, UNDO_RUN)
    assert result.outcome is Freeze.WITHDRAWN
    assert (scene.request.state, scene.saga.state, scene.step().state) == ("WITHDRAWN", "FAILED", "STOPPED")
    assert scene.freezes.freeze_if_quiet(hint.request_uuid, UNDO_RUN).outcome is Freeze.ENDED


def test_a_request_that_nobody_knows_is_named(scene: Scene) -> None:
    unknown = uuid4()
    with pytest.raises(UnknownSagaError, match=str(unknown)):
        scene.freezes.freeze_if_quiet(unknown, UNDO_RUN)


def test_an_undo_of_nothing_settles_at_once(scene: Scene) -> None:
    scene.finish(scene.attach())
    frozen = scene.freeze(scene.ask())
    assert frozen.plan == {"steps": []}
    settled = scene.settle()
    assert settled is not None
    assert (settled.saga.state, settled.residual) == ("CANCELLED", ())


# -- who carries it out ---------------------------------------------------------------------------------------------


def test_a_second_run_ends_at_once_while_the_first_carries_the_undo_out(each_scene: Scene) -> None:
    each_scene.stopped("flight", 1)
    request = each_scene.freeze(each_scene.cancel())
    before = each_scene.tables()
    second = each_scene.freezes.freeze_if_quiet(request.request_uuid, "manual__2")
    assert second.outcome is Freeze.OWNED
    assert UNDO_RUN in second.message
    assert each_scene.tables() == before
    again = each_scene.freezes.freeze_if_quiet(request.request_uuid, UNDO_RUN)
    assert (again.outcome, again.request.plan_hash) == (Freeze.FROZEN, request.plan_hash)


@pytest.mark.parametrize("why", ["its run is over", "its lease ran out"])
def test_another_run_takes_over_an_undo_whose_owner_is_gone(each_scene: Scene, why: str) -> None:
    each_scene.stopped("flight", 1, 2)
    request = each_scene.freeze(each_scene.cancel())
    old = each_scene.undo_of()
    assert each_scene.undos.write_undo(old, None, each_scene.next_try(each_scene.action(2)))[1] == 1
    over = why == "its run is over"
    if not over:
        each_scene.time_passes(61)
    taken = each_scene.freezes.freeze_if_quiet(request.request_uuid, "manual__2", owner_is_over=over)
    assert (taken.outcome, taken.request.owner_run_id) == (Freeze.FROZEN, "manual__2")
    assert taken.request.plan_hash == request.plan_hash
    assert each_scene.step().fence == old.step.fence + 1
    with pytest.raises(UndoFencedError, match="a newer attempt"):
        each_scene.undos.write_undo(old, EndedTry(each_scene.action(2).action_id, "COMPENSATED"), None)
    with pytest.raises(UndoFencedError, match="carried out by manual__2"):
        each_scene.undo_of()
    with pytest.raises(UndoFencedError):
        each_scene.settle()
    attached = each_scene.undo_of(owner="manual__2")
    assert [row.state for row in attached.open_actions] == ["COMPENSATING", "DONE"]
    for row in attached.open_actions:
        each_scene.compensate(attached, row)
    assert each_scene.settle(owner="manual__2") is not None
    assert each_scene.saga.state == "CANCELLED"
