"""May this attempt begin? Every answer of `attach_if_allowed`, and what each leaves in the tables (PROTOCOL 4, 10)."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from airflow_saga.core.decide import Go
from airflow_saga.core.records import RecordedCall
from airflow_saga.core.states import Effect
from airflow_saga.store.queries import Q
from airflow_saga.store.steps import Checkpoint
from tests.store.scene import UNDO_RUN, Scene

CLEARED = {"max_tries": 1, "try_number": 2, "clear_number": 1}
"""What the attempt after a clear of this very task looks like."""


def test_the_first_attach_makes_saga_and_step_and_keeps_the_policies_of_the_dag(each_scene: Scene) -> None:
    attached = each_scene.try_attach(
        on_failure="keep",
        on_compensation_failure="halt",
        cancel_deadline_seconds=90.0,
        dag_version="v7",
        retries=2,
    )
    assert attached.decision.go is Go.START
    assert attached.recorded == ()
    saga, step = each_scene.saga, each_scene.step()
    assert (saga.state, saga.mode, saga.clear_number, saga.stop_clear_number) == ("RUNNING", None, 0, -1)
    assert (saga.on_failure, saga.on_compensation_failure) == ("keep", "halt")
    assert saga.cancel_deadline_seconds == 90.0
    assert (step.state, step.fence, step.generation, step.retries) == ("RUNNING", 1, 1, 2)
    assert (step.host, step.pid, step.dag_version) == ("worker-1", 4711, "v7")
    assert step.lease_until is not None
    assert each_scene.history == ["step start"]


def test_a_pending_saga_runs_once_a_step_attaches(scene: Scene) -> None:
    scene.runs.open_if_new(*scene.run)
    assert scene.saga.state == "PENDING"
    scene.runs.open_if_new(*scene.run)
    scene.attach()
    assert scene.saga.state == "RUNNING"
    scene.runs.open_if_new(*scene.run)
    assert scene.saga.state == "RUNNING"


def test_each_index_of_a_mapped_task_is_a_step_of_its_own(scene: Scene) -> None:
    first = scene.attach("rooms", map_index=0)
    second = scene.attach("rooms", map_index=1)
    assert first.step_id != second.step_id
    assert (first.label, second.label) == ("rooms[0]", "rooms[1]")
    scene.act(first, 1)
    assert scene.runs.mark_step_if_running(*scene.run, "rooms", 0)
    assert scene.step("rooms", 1).state == "RUNNING"


@pytest.mark.parametrize("lease_is_out", [False, True])
def test_c86_a_new_try_takes_the_step_over_and_puts_the_open_call_in_doubt(
    each_scene: Scene, lease_is_out: bool
) -> None:
    first = each_scene.attach()
    each_scene.act(first, 1)
    assert each_scene.begin(first, 2)
    if lease_is_out:
        each_scene.time_passes(20)
    attached = each_scene.try_attach(try_number=2)
    assert attached.decision.go is Go.RESUME
    assert attached.step is not None
    assert (attached.step.fence, attached.step.generation) == (2, 1)
    assert [(row.seq, row.state) for row in attached.recorded] == [(1, "DONE"), (2, "IN_DOUBT")]
    assert each_scene.action(2).in_doubt
    assert each_scene.action(2).lands_by is not None, "its call may still land: A1 is not over"
    assert not each_scene.begin(first, 3), "the older attempt is fenced"
    assert not each_scene.end(first, 2)
    assert each_scene.begin(attached.step, 3)


def test_c12_the_attempt_after_a_platform_kill_resumes_and_nothing_is_undone(scene: Scene) -> None:
    first = scene.act(scene.attach(retries=1, max_tries=1), 1)
    assert scene.begin(first, 2)
    attached = scene.try_attach(try_number=2, retries=1, max_tries=1)
    assert attached.decision.go is Go.RESUME
    assert [row.state for row in attached.recorded] == ["DONE", "IN_DOUBT"]
    assert attached.recorded[0].result == '"r1"'
    assert (scene.saga.state, scene.view.requests) == ("RUNNING", ())


def test_resuming_keeps_the_checkpoint_and_beginning_anew_drops_it(scene: Scene) -> None:
    step = scene.attach()
    scene.steps.heartbeat_if_held(step, 15, Checkpoint('{"page": 7}', 1))
    assert scene.attach(try_number=2).checkpoint == '{"page": 7}'
    scene.cancel(stop_now=True)
    scene.undone("flight")
    again = scene.attach(**CLEARED | {"try_number": 3})
    assert (again.checkpoint, again.generation) == (None, 2)


def test_c80_a_second_copy_of_the_same_try_is_refused_while_the_first_lives(scene: Scene) -> None:
    ti_id = uuid4()
    first = scene.attach(ti_id=ti_id)
    before = scene.tables()
    refused = scene.try_attach(ti_id=ti_id, host="worker-2")
    assert refused.decision.go is Go.REFUSE
    assert "already running in process 4711 on worker-1" in refused.decision.message
    assert scene.tables() == before
    scene.time_passes(20)
    assert scene.try_attach(ti_id=ti_id).decision.go is Go.RESUME, "its lease is out, so it may be gone"
    assert not scene.begin(first, 1)


def test_an_older_try_that_comes_late_is_refused(scene: Scene) -> None:
    scene.attach(try_number=2)
    refused = scene.try_attach(try_number=1)
    assert refused.decision.go is Go.REFUSE
    assert "try 1 comes after try 2 had begun" in refused.decision.message


def test_an_older_try_does_not_begin_an_undone_step_anew(scene: Scene) -> None:
    scene.stopped("flight", 1, try_number=3)
    scene.cancel()
    scene.undone("flight")
    refused = scene.try_attach(max_tries=1, try_number=2, clear_number=1)
    assert refused.decision.go is Go.REFUSE
    assert scene.saga.state == "CANCELLED"


def test_a_finished_step_that_was_not_cleared_replays_its_output(each_scene: Scene) -> None:
    each_scene.finish(each_scene.act(each_scene.attach(), 1), output='{"id": 1}')
    replay = each_scene.try_attach(try_number=2, clear_number=1)
    assert replay.decision.go is Go.REPLAY
    assert replay.step is not None
    assert replay.step.output == '{"id": 1}'
    step = each_scene.step()
    assert (step.state, step.fence, step.generation, step.clear_number) == ("SUCCEEDED", 1, 1, 1)
    assert each_scene.view.requests == ()


def test_a_finished_step_whose_retries_changed_cannot_be_told_cleared_or_not(scene: Scene) -> None:
    scene.ran(retries=2)
    refused = scene.try_attach(clear_number=1, retries=3)
    assert refused.decision.go is Go.REFUSE
    assert "Clear it once more" in refused.decision.message
    assert scene.try_attach(clear_number=0, retries=3).decision.go is Go.REPLAY


# -- redo -----------------------------------------------------------------------------------------------------------


def test_a_finished_step_that_was_cleared_is_undone_first_and_then_begins_anew(each_scene: Scene) -> None:
    first = each_scene.ran("flight", 1)
    old_key = each_scene.action().key
    request = each_scene.redo(first)
    assert (request.cause, request.whole_run, request.state) == ("redo", False, "REQUESTED")
    assert each_scene.saga.state == "RUNNING", "a redo leaves the saga's state alone"
    assert (each_scene.step().state, each_scene.step().fence) == ("SUCCEEDED", 1)
    each_scene.freeze(request)
    waiting = each_scene.try_attach(**CLEARED)
    assert waiting.decision.go is Go.WAIT
    assert waiting.request is not None
    assert waiting.request.request_uuid == request.request_uuid
    each_scene.undo_step()
    assert each_scene.settle() is not None
    anew = each_scene.try_attach(**CLEARED)
    assert anew.decision.go is Go.ANEW
    assert anew.step is not None
    assert (anew.step.generation, anew.step.fence) == (2, 4)
    assert (anew.recorded, anew.step.output) == ((), None)
    each_scene.act(anew.step, 1)
    assert each_scene.action().key != old_key


def test_redo_takes_along_each_later_step_that_was_cleared_and_no_other(scene: Scene) -> None:
    scene.ran("flight", 1)
    scene.ran("hotel", 1, after=["flight"])
    scene.finish(scene.attach("report", after=["flight", "hotel"]))
    request = scene.redo(scene.step("flight"), others=["hotel"])
    scope = scene.sql("SELECT task_id FROM airflow_saga.undo_scope JOIN airflow_saga.step USING (step_id)")
    assert {row["task_id"] for row in scope} == {"flight", "hotel"}
    scene.undone("hotel", "flight", request=request)
    assert scene.step("report").state == "SUCCEEDED", "it did nothing that needs an undo and was not cleared"


@pytest.mark.parametrize("how", ["acted", "running", "read only"])
def test_redo_while_a_later_step_stands_is_refused_and_no_failure(scene: Scene, how: str) -> None:
    scene.ran("flight", 1)
    later = scene.attach("hotel", after=["flight"])
    if how == "acted":
        scene.finish(scene.act(later, 1))
    if how == "read only":
        assert scene.read(later, 1)
        scene.finish(later)
        assert scene.try_attach("flight", **CLEARED).decision.go is Go.WAIT
        return
    before = scene.view
    refused = scene.try_attach("flight", **CLEARED)
    assert refused.decision.go is Go.REFUSE
    assert "hotel. Clear them too" in refused.decision.message
    after = scene.view
    assert (after.steps, after.actions, after.requests) == (before.steps, before.actions, before.requests)
    assert (after.saga.state, after.saga.cause) == ("RUNNING", "refused")
    assert scene.runs.fail_and_hint(*scene.run, cause="failure", clear_number=1).request is None


def test_a_redo_that_is_refused_neither_reopens_the_saga_nor_withdraws_its_undo(each_scene: Scene) -> None:
    each_scene.ran("flight", 1)
    each_scene.stopped("hotel", 1, after=["flight"])
    hint = each_scene.hint()
    before = each_scene.tables()
    assert each_scene.try_attach("flight", **CLEARED).decision.go is Go.REFUSE
    assert each_scene.tables() == before
    assert each_scene.reader.request(hint.request_uuid) == hint


def test_a_second_redo_joins_the_first_while_that_is_not_frozen(each_scene: Scene) -> None:
    each_scene.ran("flight", 1)
    each_scene.ran("car", 1)
    request = each_scene.redo(each_scene.step("flight"))
    joined = each_scene.redo(each_scene.step("car"))
    assert joined.request_uuid == request.request_uuid
    again = each_scene.redo(each_scene.step("flight"))
    assert again.request_uuid == request.request_uuid
    assert len(each_scene.view.requests) == 1
    each_scene.undone("car", "flight")
    assert [each_scene.step(task).state for task in ("car", "flight")] == ["UNDONE", "UNDONE"]


def test_a_redo_waits_for_the_frozen_undo_of_other_steps_and_is_asked_for_after_it(scene: Scene) -> None:
    scene.ran("flight", 1)
    scene.ran("car", 1)
    first = scene.freeze(scene.redo(scene.step("flight")))
    waiting = scene.try_attach("car", **CLEARED)
    assert waiting.decision.go is Go.WAIT
    assert waiting.request is not None
    assert waiting.request.request_uuid == first.request_uuid
    scene.undo_step("flight")
    scene.settle()
    second = scene.redo(scene.step("car"))
    assert (second.number, second.state) == (2, "REQUESTED")


def test_a_redo_withdraws_the_automatic_undo_of_a_failed_run(scene: Scene) -> None:
    scene.ran("flight", 1)
    scene.stopped("car", 1)
    hint = scene.hint()
    request = scene.redo(scene.step("flight"))
    assert request.cause == "redo"
    withdrawn = scene.reader.request(hint.request_uuid)
    assert withdrawn is not None
    assert withdrawn.state == "WITHDRAWN"
    assert scene.saga.state == "RUNNING"


# -- what is upstream -----------------------------------------------------------------------------------------------


def test_a_step_waits_while_an_upstream_step_is_being_undone_and_is_refused_after(scene: Scene) -> None:
    scene.ran("flight", 1)
    scene.freeze(scene.redo(scene.step("flight")))
    assert scene.try_attach("hotel", after=["flight"]).decision.go is Go.WAIT
    assert scene.try_attach("car").decision.go is Go.START, "an independent branch goes on"
    scene.undo_step()
    scene.settle()
    refused = scene.try_attach("hotel", after=["flight"])
    assert refused.decision.go is Go.REFUSE
    assert "undone and not run again: flight. Clear them too." in refused.decision.message
    scene.attach("flight", **CLEARED)
    assert scene.try_attach("hotel", after=["flight"]).decision.go is Go.START


def test_a_partly_undone_upstream_step_is_refused_too(scene: Scene) -> None:
    scene.ran("flight", 1)
    scene.freeze(scene.redo(scene.step("flight")))
    attached = scene.undo_of()
    scene.compensate(attached, scene.action(), "COMPENSATION_FAILED", failed=True)
    scene.settle()
    assert scene.step().state == "PARTLY_UNDONE"
    assert scene.try_attach("hotel", after=["flight"]).decision.go is Go.REFUSE
    refused = scene.try_attach("flight", **CLEARED)
    assert refused.decision.go is Go.REFUSE
    assert f"airflow saga show {scene.dag_id} {scene.run_id}" in refused.decision.message


def test_inside_one_mapped_group_only_the_same_index_is_upstream(scene: Scene) -> None:
    for index in (0, 1):
        scene.finish(scene.act(scene.attach("pay", map_index=index, mapped_group="trip"), 1))
    cleared = scene.try_attach("pay", map_index=0, mapped_group="trip", **CLEARED)
    scene.freeze(cleared.request)
    inside = {"after": ["pay"], "mapped_group": "trip"}
    assert scene.try_attach("book", map_index=1, **inside).decision.go is Go.START
    assert scene.try_attach("book", map_index=0, **inside).decision.go is Go.WAIT
    assert scene.try_attach("sum", after=["pay"]).decision.go is Go.WAIT, "outside: all indexes"


# -- a saga that was stopped ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_c22_while_the_saga_is_being_stopped_a_step_that_nobody_cleared_is_refused(
    scene: Scene, keep: bool
) -> None:
    scene.stopped("flight", 1)
    scene.requests.cancel(*scene.run, actor="ann", reason="wrong date", keep=keep)
    before = scene.tables()
    for refused in (scene.try_attach("flight", try_number=2), scene.try_attach("hotel", after=["flight"])):
        assert refused.decision.go is Go.REFUSE
        assert "being stopped by ann (wrong date); nothing was called" in refused.decision.message
    assert scene.tables() == before


@pytest.mark.parametrize("keep", [False, True])
def test_a_step_cleared_while_the_saga_is_being_stopped_waits_for_the_end(scene: Scene, keep: bool) -> None:
    scene.stopped("flight", 1)
    scene.requests.cancel(*scene.run, actor="ann", keep=keep)
    before = scene.tables()
    assert scene.try_attach("flight", **CLEARED).decision.go is Go.WAIT
    assert scene.try_attach("hotel", after=["flight"], clear_number=1).decision.go is Go.WAIT
    assert scene.tables() == before


@pytest.mark.parametrize(
    ("decide", "end"),
    [
        (lambda scene: (scene.cancel(), scene.undone("flight")), "CANCELLED"),
        (
            lambda scene: (
                scene.requests.cancel(*scene.run, actor="ann", keep=True),
                scene.sweeps.suspend_if_quiet(scene.saga.saga_id),
            ),
            "SUSPENDED",
        ),
    ],
    ids=["cancelled", "suspended"],
)
def test_c22_a_stopped_saga_reopens_only_for_a_step_cleared_since(
    each_scene: Scene, decide, end: str
) -> None:  # type: ignore[no-untyped-def]
    each_scene.stopped("flight", 1)
    decide(each_scene)
    assert each_scene.saga.state == end
    before = each_scene.tables()
    refused = [
        each_scene.try_attach("flight", try_number=2),
        each_scene.try_attach(
            "flight", try_number=2, clear_number=1
        ),  # the run was cleared, this task was not
        each_scene.try_attach("hotel", after=["flight"]),
    ]
    for attached in refused:
        assert attached.decision.go is Go.REFUSE
        assert "Clear this task to run it again" in attached.decision.message
    assert each_scene.tables() == before
    step = each_scene.attach("flight", **CLEARED)
    saga = each_scene.saga
    assert (saga.state, saga.mode, saga.actor, saga.reason, saga.deadline_at) == (
        "RUNNING",
        None,
        None,
        None,
        None,
    )
    assert step.generation == (2 if end == "CANCELLED" else 1)


@pytest.mark.parametrize("keep", [False, True])
def test_a_decision_to_stop_covers_every_attempt_that_began_before_it(scene: Scene, keep: bool) -> None:
    """The decider may not know how often the run was cleared; the attempts that attached do."""
    scene.stopped("flight", 1, clear_number=3)
    scene.requests.cancel(*scene.run, actor="ann", keep=keep)
    assert scene.saga.stop_clear_number == 3
    refused = scene.try_attach("hotel", after=["flight"], clear_number=3)
    assert refused.decision.go is Go.REFUSE


@pytest.mark.parametrize("again", ["cancel", "undo"])
def test_asking_again_stops_also_what_was_cleared_in_between(scene: Scene, again: str) -> None:
    scene.stopped("flight", 1)
    scene.cancel()
    assert scene.try_attach("flight", **CLEARED).decision.go is Go.WAIT
    getattr(scene.requests, again)(*scene.run, actor="bob", clear_number=1)
    assert scene.saga.stop_clear_number == 1
    assert scene.try_attach("flight", **CLEARED).decision.go is Go.REFUSE


def test_a_partly_cancelled_saga_refuses_even_a_cleared_step(scene: Scene) -> None:
    scene.stopped("flight", 1, 2)
    scene.cancel()
    scene.freeze()
    attached = scene.undo_of()
    scene.compensate(attached, scene.action(2))
    scene.compensate(attached, scene.action(1), "COMPENSATION_FAILED", failed=True)
    scene.settle()
    assert scene.saga.state == "PARTIALLY_CANCELLED"
    refused = scene.try_attach("flight", **CLEARED)
    assert refused.decision.go is Go.REFUSE
    assert "airflow saga resolve" in refused.decision.message


@pytest.mark.parametrize("held", [False, True])
def test_an_attach_reopens_a_failed_saga_and_withdraws_its_hint(each_scene: Scene, held: bool) -> None:
    each_scene.stopped("flight", 1)
    hint = each_scene.hint()
    if held:
        assert each_scene.sweeps.hold_if_mass_outage(causes=["failure"], threshold=0, window_seconds=60) == 1
    each_scene.attach(try_number=2)
    withdrawn = each_scene.reader.request(hint.request_uuid)
    assert withdrawn is not None
    assert (withdrawn.state, withdrawn.ended_at is not None) == ("WITHDRAWN", True)
    saga = each_scene.saga
    assert (saga.state, saga.cause, saga.reason) == ("RUNNING", None, None)
    assert "undo withdrawn" in each_scene.history
    assert each_scene.freezes.freeze_if_quiet(hint.request_uuid, "undo__late").outcome == "ended"


def test_an_attach_reopens_a_completed_saga(scene: Scene) -> None:
    scene.ran("flight", 1)
    assert scene.runs.complete_if_over(*scene.run) == "COMPLETED"
    scene.attach("hotel", after=["flight"], clear_number=1)
    assert scene.saga.state == "RUNNING"


def test_a_step_undone_in_a_saga_that_runs_begins_anew_only_when_no_open_undo_covers_it(scene: Scene) -> None:
    scene.ran("flight", 1)
    scene.undone("flight", request=scene.redo(scene.step("flight")))
    scene.sql(
        "INSERT INTO airflow_saga.undo_request (saga_id, number, whole_run, state, cause, actor, clear_number) "
        "SELECT saga_id, 9, false, 'REQUESTED', 'late', 'airflow', 0 FROM airflow_saga.saga"
    )
    scope = {"step_id": scene.step().step_id}
    assert scene.try_attach("car").decision.go is Go.START
    scene.sql(
        "INSERT INTO airflow_saga.undo_scope SELECT request_id, %(step_id)s FROM airflow_saga.undo_request "
        "WHERE number = 9",
        scope,
    )
    assert scene.try_attach("flight", **CLEARED).decision.go is Go.WAIT


def test_read_only_rows_of_an_older_attempt_are_not_put_in_doubt(scene: Scene) -> None:
    step = scene.attach()
    assert scene.read(step, 1)
    assert scene.read(step, 2, "FAILED")
    again = scene.try_attach(try_number=2)
    assert [(row.effect, row.state) for row in again.recorded] == [
        (Effect.READ_ONLY, "DONE"),
        (Effect.READ_ONLY, "FAILED"),
    ]


# -- a refusal is no failure ----------------------------------------------------------------------------------------


def refused_after_a_redo(scene: Scene, clear_number: int = 1) -> None:
    """`flight` was undone for a redo; `hotel`, which nobody should have started yet, is refused and fails its task."""
    scene.ran("flight", 1)
    scene.undone("flight", request=scene.redo(scene.step("flight")))
    refused = scene.try_attach("hotel", after=["flight"], clear_number=clear_number)
    assert refused.decision.go is Go.REFUSE
    assert scene.saga.cause == "refused"


@pytest.mark.parametrize("clear_number", [1, 2])
def test_a_run_that_fails_because_a_step_was_refused_is_not_undone(
    each_scene: Scene, clear_number: int
) -> None:
    refused_after_a_redo(each_scene, clear_number)
    each_scene.attach("car", clear_number=clear_number)
    assert each_scene.saga.cause == "refused", "another branch says nothing about it"
    decision = each_scene.runs.fail_and_hint(*each_scene.run, cause="failure", clear_number=2)
    assert (decision.request, each_scene.saga.state) == (None, "FAILED")


def test_a_refusal_is_forgotten_once_the_run_was_cleared_and_goes_on(each_scene: Scene) -> None:
    refused_after_a_redo(each_scene)
    step = each_scene.attach("flight", max_tries=1, try_number=2, clear_number=2)
    assert (each_scene.saga.cause, each_scene.saga.reason) == (None, None)
    assert each_scene.steps.stop_if_held(each_scene.act(step, 1))
    assert each_scene.hint(clear_number=2).state == "HINTED"


def test_what_a_resumed_step_loads_are_the_fields_of_a_recorded_call_in_their_order(
    each_scene: Scene,
) -> None:
    step = each_scene.act(each_scene.attach(), 1)
    key = {"step_id": step.step_id, "generation": step.generation}
    cursor = each_scene.connection.execute(Q.recorded_calls, key)
    assert tuple(column.name for column in cursor.description or ()) == RecordedCall._fields


# -- mapped over other items ------------------------------------------------------------------------------------------


def mapped(scene: Scene, *items: str) -> None:
    for index, item in enumerate(items):
        scene.finish(scene.act(scene.attach("flight", map_index=index, item_fingerprint=item), 1))


def cleared(**more: Any) -> dict[str, Any]:
    return {"max_tries": 1, "try_number": 2, "clear_number": 1, **more}


def test_a_cleared_index_asks_for_the_undo_of_its_cleared_siblings_and_of_those_that_are_no_more(
    each_scene: Scene,
) -> None:
    mapped(each_scene, "x", "y", "z", "w")
    failed = each_scene.act(each_scene.attach("flight", map_index=4, item_fingerprint="v"), 1)
    each_scene.steps.stop_if_held(failed)  # it is cleared too, and resumes by itself
    cleared_ones = frozenset({"flight[1]", "flight[4]"})
    others = {"others_cleared": cleared_ones, "others_removed": frozenset({"flight[3]"})}
    attached = each_scene.try_attach("flight", **cleared(map_index=0, item_fingerprint="x", **others))
    assert attached.decision.go is Go.WAIT
    scope = each_scene.sql(
        "SELECT map_index FROM airflow_saga.undo_scope JOIN airflow_saga.step USING (step_id) ORDER BY 1"
    )
    assert [row["map_index"] for row in scope] == [0, 1, 3]
    assert [step.removed for step in each_scene.view.steps] == [False, False, False, True, False]


def test_an_index_that_is_no_more_and_undone_holds_up_neither_the_end_nor_what_follows(scene: Scene) -> None:
    mapped(scene, "x", "y")
    gone = {"others_removed": frozenset({"flight[1]"})}
    assert scene.try_attach("flight", **cleared(map_index=0, item_fingerprint="x", **gone)).request
    request = scene.freeze()
    for index in (0, 1):
        attached = scene.undos.attach_undo_if_in_order(
            request.request_uuid, "flight", index, UNDO_RUN, lease_seconds=15, host="h", pid=1
        )
        assert attached is not None
        scene.compensate(attached, attached.open_actions[0])
    assert scene.settle() is not None
    again = scene.attach("flight", **cleared(map_index=0, item_fingerprint="x", **gone))
    scene.finish(again)
    after = scene.attach("hotel", after=["flight"], clear_number=1)
    scene.finish(after)
    assert scene.runs.complete_if_over(*scene.run) == "COMPLETED"


@pytest.mark.parametrize("ended", [True, False])
def test_another_item_at_an_index_is_not_resumed(scene: Scene, ended: bool) -> None:
    step = scene.act(scene.attach("flight", map_index=0, item_fingerprint="x"), 1)
    _ = scene.finish(step) if ended else scene.steps.stop_if_held(step)
    retried = {"try_number": 2, "map_index": 0, "item_fingerprint": "y"}
    refused = scene.try_attach("flight", **retried).decision
    assert refused.go is Go.REFUSE
    assert "another item" in refused.message
    redone = scene.try_attach("flight", **cleared(map_index=0, item_fingerprint="y")).decision
    assert redone.go is Go.WAIT
    assert scene.request.cause == "redo"
