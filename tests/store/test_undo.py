"""The undo, verb by verb: freeze, take over, attach, compensate, settle, expire, ask again (PROTOCOL 4, 5, 6)."""

from __future__ import annotations

from uuid import uuid4

import pytest

from airflow_saga.core.errors import UndoFencedError, UndoOutOfOrderError, UnknownSagaError
from airflow_saga.core.records import Outcome, RequestRow
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


# -- one step -------------------------------------------------------------------------------------------------------


def test_an_undo_attempt_takes_its_step_with_a_new_fence_and_a_lease(each_scene: Scene) -> None:
    each_scene.stopped("flight", 1, 2)
    request = each_scene.freeze(each_scene.cancel())
    first = each_scene.undo_of()
    assert [row.seq for row in first.open_actions] == [2, 1]
    assert (first.step.fence, first.step.state, first.step.host, first.step.pid) == (
        3,
        "UNDOING",
        "worker-2",
        99,
    )
    assert first.step.lease_until is not None
    second = each_scene.undo_of()
    assert second.step.fence == 4
    row = each_scene.action(2)
    with pytest.raises(UndoFencedError, match=r"fence 4, ours 3"):
        each_scene.undos.write_undo(first, None, each_scene.next_try(row))
    assert not each_scene.undos.settle_action_if_held(first, row, "COMPENSATION_FAILED", error="x")
    assert each_scene.action(2) == row
    other = each_scene.undos.attach_undo_if_in_order(
        request.request_uuid, "unknown", -1, UNDO_RUN, lease_seconds=15, host="h", pid=1
    )
    assert other is None


def test_c40_a_step_is_undone_only_after_every_later_one(each_scene: Scene) -> None:
    each_scene.ran("flight", 1)
    each_scene.ran("hotel", 1, after=["flight"])
    each_scene.ran("car", 1)
    each_scene.freeze(each_scene.ask())
    before = each_scene.tables()
    with pytest.raises(UndoOutOfOrderError, match=r"only after: book of hotel\. Nothing was called"):
        each_scene.undo_of("flight")
    assert each_scene.tables() == before
    each_scene.undo_step("car")
    each_scene.undo_step("hotel")
    each_scene.undo_step("flight")
    assert each_scene.settle() is not None
    assert each_scene.saga.state == "CANCELLED"


def test_mapped_steps_are_ordered_by_index_only_inside_one_mapped_group(scene: Scene) -> None:
    for index in (0, 1):
        inside = {"map_index": index, "mapped_group": "trip"}
        scene.finish(scene.act(scene.attach("pay", **inside), 1))
        scene.finish(scene.act(scene.attach("book", after=["pay"], **inside), 1))
    request = scene.freeze(scene.ask())

    def take(task_id: str, index: int):  # type: ignore[no-untyped-def]
        return scene.undos.attach_undo_if_in_order(
            request.request_uuid, task_id, index, UNDO_RUN, lease_seconds=15, host="h", pid=1
        )

    attached = take("book", 1)
    scene.compensate(attached, attached.open_actions[0])
    assert take("pay", 1) is not None, "its own index is settled"
    with pytest.raises(UndoOutOfOrderError):
        take("pay", 0)
    assert scene.reader.indexes_to_undo(request, "pay") == [0, 1]
    assert scene.reader.indexes_to_undo(request, "book") == [0]


# -- one compensation -----------------------------------------------------------------------------------------------


def frozen(scene: Scene, *seqs: int) -> RequestRow:
    scene.stopped("flight", *(seqs or (1, 2)))
    return scene.freeze(scene.cancel())


def test_the_intent_of_a_compensation_is_written_before_it_and_its_end_with_the_next(
    each_scene: Scene,
) -> None:
    frozen(each_scene)
    attached = each_scene.undo_of()
    second, first = attached.open_actions
    begin = each_scene.next_try(second, undo_deadline_seconds=60.0)
    assert each_scene.undos.write_undo(attached, None, begin) == (False, 1)
    row = each_scene.action(2)
    assert (row.state, row.undo_tries, row.undo_key) == ("COMPENSATING", 1, begin.undo_key)
    assert row.undo_begun_at is not None
    assert row.undo_deadline_at is not None
    assert not row.settled
    ended = EndedTry(second.action_id, "COMPENSATED")
    assert each_scene.undos.write_undo(attached, ended, each_scene.next_try(first)) == (True, 1)
    assert each_scene.states() == {1: "COMPENSATING", 2: "COMPENSATED"}
    assert each_scene.action(2).undo_finished_at is not None
    assert each_scene.undos.write_undo(attached, ended, None) == (False, None), "confirmed once"
    with_nothing = each_scene.undos.write_undo(attached, None, each_scene.next_try(second))
    assert with_nothing == (False, None), "what was confirmed is never begun again"


def test_inside_a_step_compensations_go_by_falling_seq_across_generations(scene: Scene) -> None:
    scene.ran("flight", 1, 2)
    scene.freeze(scene.redo(scene.step()))
    attached = scene.undo_of()
    scene.compensate(attached, scene.action(2))
    scene.compensate(attached, scene.action(1), "COMPENSATION_FAILED", failed=True)
    scene.settle()
    scene.sql("UPDATE airflow_saga.step SET state = 'UNDONE'")  # as if a person had let it run again
    scene.stopped("flight", 1, max_tries=1, try_number=2, clear_number=1)
    scene.freeze(scene.ask())
    attached = scene.undo_of()
    assert [(row.generation, row.seq) for row in attached.open_actions] == [(2, 1), (1, 1)]
    newer, older = attached.open_actions
    assert scene.undos.write_undo(attached, None, scene.next_try(older)) == (False, None)
    scene.compensate(attached, newer)
    scene.compensate(attached, older)


def test_a_compensation_that_failed_is_not_over_so_the_one_before_it_may_not_begin(each_scene: Scene) -> None:
    frozen(each_scene)
    attached = each_scene.undo_of()
    second, first = attached.open_actions
    assert each_scene.undos.write_undo(attached, None, each_scene.next_try(second))[1] == 1
    failed = EndedTry(second.action_id, "COMPENSATING", error="503", failed=True)
    assert each_scene.undos.write_undo(attached, failed, each_scene.next_try(first)) == (True, None)
    assert each_scene.states() == {1: "DONE", 2: "COMPENSATING"}
    assert (each_scene.action(2).undo_failures, each_scene.action(2).error) == (1, "503")


def test_the_next_try_of_the_same_action_may_ride_with_the_end_of_the_last(each_scene: Scene) -> None:
    frozen(each_scene, 1)
    attached = each_scene.undo_of()
    (row,) = attached.open_actions
    assert each_scene.undos.write_undo(attached, None, each_scene.next_try(row))[1] == 1
    failed = EndedTry(row.action_id, "COMPENSATING", error="503", failed=True)
    assert each_scene.undos.write_undo(attached, failed, each_scene.next_try(row)) == (True, 2)
    row = each_scene.action()
    assert (row.state, row.undo_tries, row.undo_failures, row.error) == ("COMPENSATING", 2, 1, None)


def test_an_undo_ends_only_compensations_of_its_own_step(scene: Scene) -> None:
    scene.stopped("flight", 1)
    scene.stopped("car", 1)
    scene.freeze(scene.cancel())
    flight, car = scene.undo_of("flight"), scene.undo_of("car")
    row = scene.action(1, "car")
    assert scene.undos.write_undo(car, None, scene.next_try(row))[1] == 1
    assert scene.undos.write_undo(flight, EndedTry(row.action_id, "COMPENSATED"), None) == (False, None)
    assert scene.undos.write_undo(flight, None, scene.next_try(row)) == (False, None)
    assert scene.action(1, "car").state == "COMPENSATING"


@pytest.mark.parametrize("state", ["DONE", "IN_DOUBT"])
def test_c35_no_compensation_begins_while_the_call_may_still_land(each_scene: Scene, state: str) -> None:
    step = each_scene.attach()
    assert each_scene.begin(step, 1)
    each_scene.freeze(each_scene.cancel(stop_now=True))
    if state == "DONE":
        each_scene.sql(
            "UPDATE airflow_saga.action SET state = 'DONE'"
        )  # known by other means than its own answer
    attached = each_scene.undo_of()
    begin = each_scene.next_try(each_scene.action())
    assert each_scene.undos.write_undo(attached, None, begin) == (False, None)
    assert not each_scene.undos.settle_action_if_held(attached, each_scene.action(), "IN_DOUBT", probed=True)
    each_scene.time_passes(12)
    assert each_scene.undos.write_undo(attached, None, begin) == (False, 1)
    assert each_scene.action().in_doubt is (state == "IN_DOUBT") or state == "DONE"


def test_read_only_actions_are_never_undone(scene: Scene) -> None:
    step = scene.attach()
    scene.read(step, 1)
    scene.act(step, 2)
    assert scene.steps.stop_if_held(step)
    scene.freeze(scene.cancel())
    attached = scene.undo_of()
    assert [row.seq for row in attached.open_actions] == [2]
    assert scene.undos.write_undo(attached, None, scene.next_try(scene.action(1))) == (False, None)


@pytest.mark.parametrize("declared", ["NON_COMPENSABLE", "missing", "in doubt"])
def test_moves_of_the_undo_that_call_nothing(each_scene: Scene, declared: str) -> None:
    effect = "NON_COMPENSABLE" if declared == "NON_COMPENSABLE" else "COMPENSABLE"
    step = each_scene.attach()
    assert each_scene.begin(step, 1, effect=effect)
    assert each_scene.end(step, 1, "IN_DOUBT" if declared == "in doubt" else "DONE")
    assert each_scene.steps.stop_if_held(step)
    each_scene.freeze(each_scene.cancel())
    attached = each_scene.undo_of()
    state, probed = {
        "NON_COMPENSABLE": ("NON_COMPENSABLE", False),
        "missing": ("COMPENSATION_FAILED", False),
        "in doubt": ("IN_DOUBT", True),
    }[declared]
    row = each_scene.action()
    say = {"probed": probed, "error": "because"}
    assert each_scene.undos.settle_action_if_held(attached, row, state, **say)  # type: ignore[arg-type]
    row = each_scene.action()
    assert (row.state, row.settled, row.residual, row.error) == (state, True, True, "because")
    settled = each_scene.settle()
    assert settled is not None
    assert (settled.saga.state, [action.seq for action in settled.residual]) == ("PARTIALLY_CANCELLED", [1])
    assert each_scene.step().state == "PARTLY_UNDONE"


def test_the_fresh_row_comes_with_the_clock_of_the_database(scene: Scene) -> None:
    frozen(scene, 1)
    row, now = scene.undos.read_action(scene.action().action_id)
    assert row == scene.action()
    assert abs((now - scene.request.frozen_at).total_seconds()) < 60  # type: ignore[operator]


# -- settle ---------------------------------------------------------------------------------------------------------


def test_settle_waits_for_every_action_of_the_request(each_scene: Scene) -> None:
    request = frozen(each_scene)
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
    frozen(scene)
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
    frozen(scene)
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
    frozen(scene)
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
    each_scene.steps.heartbeat_if_held(flight, 15, None, False)
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
    assert not each_scene.steps.heartbeat_if_held(flight, 15, None, False).held
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
