"""What the reconciler finds and moves on: lost steps, kept sagas, undo runs that nobody started, old rows."""

from __future__ import annotations

import pytest

from airflow_saga.core.decide import Go
from airflow_saga.core.errors import VerbRefusedError
from airflow_saga.store.decision import Verdict
from airflow_saga.store.freeze import Freeze
from tests.store.scene import Scene

# -- lost attempts --------------------------------------------------------------------------------------------------


def test_c10_a_step_whose_process_vanished_is_stopped_and_its_call_is_in_doubt(each_scene: Scene) -> None:
    step = each_scene.act(each_scene.attach(), 1)
    assert each_scene.begin(step, 2)
    each_scene.read(step, 3)
    assert each_scene.reader.lost_leases() == []
    assert not each_scene.sweeps.stop_if_lost(step.saga_id, step.step_id), "its lease still runs"
    each_scene.time_passes(16)
    lost = each_scene.reader.lost_leases()
    assert [(row["step_id"], row["dag_id"], row["run_id"]) for row in lost] == [
        (step.step_id, *each_scene.run)
    ]
    assert each_scene.sweeps.stop_if_lost(step.saga_id, step.step_id)
    row = each_scene.step()
    assert (row.state, row.fence, row.lease_until) == ("STOPPED", 2, None)
    assert each_scene.states() == {1: "DONE", 2: "IN_DOUBT", 3: "DONE"}
    action = each_scene.action(2)
    assert action.in_doubt
    assert action.lands_by is not None
    assert "was lost before it reported" in (action.error or "")
    assert not each_scene.end(step, 2), "the process that comes back is fenced"
    assert not each_scene.sweeps.stop_if_lost(step.saga_id, step.step_id)
    assert each_scene.reader.lost_leases() == []
    assert each_scene.reader.lost_a_worker(step.saga_id)


def test_c10_the_policy_follows_without_any_callback(scene: Scene) -> None:
    step = scene.act(scene.attach(), 1)
    assert scene.begin(step, 2)
    scene.time_passes(16)
    for row in scene.reader.lost_leases():
        scene.sweeps.stop_if_lost(row["saga_id"], row["step_id"])
    for saga in scene.reader.sagas_to_read():
        scene.runs.fail_and_hint(saga.dag_id, saga.run_id, cause="lost_worker")
    (row,) = scene.reader.requests_to_trigger(silent_seconds=30)
    assert (row["dag_id"], row["run_id"], row["state"]) == (*scene.run, "HINTED")
    assert scene.freezes.freeze_if_quiet(row["request_uuid"], "undo__1").outcome is Freeze.FROZEN
    assert scene.saga.state == "CANCELLING"


@pytest.mark.parametrize("how", ["marked failed", "stopped itself"])
def test_p4_the_open_call_of_a_stopped_step_is_in_doubt_once_it_can_land_no_more(
    each_scene: Scene, how: str
) -> None:
    """Nobody resumes or undoes it, and its process is gone: a person must still be able to say what became of it."""
    step = each_scene.attach(on_failure="keep")
    assert each_scene.begin(step, 1)
    if how == "marked failed":
        assert each_scene.runs.mark_step_if_running(*each_scene.run, "flight", -1)
    else:
        assert each_scene.steps.stop_if_held(step)
    fence = each_scene.step().fence
    assert each_scene.reader.lost_leases() == []
    assert not each_scene.sweeps.stop_if_lost(step.saga_id, step.step_id)
    each_scene.time_passes(12)
    assert [row["step_id"] for row in each_scene.reader.lost_leases()] == [step.step_id]
    assert each_scene.sweeps.stop_if_lost(step.saga_id, step.step_id)
    row = each_scene.action()
    assert (row.state, row.in_doubt) == ("IN_DOUBT", True)
    assert (each_scene.step().state, each_scene.step().fence) == ("STOPPED", fence)
    assert "call lost: nobody reported how it ended" in each_scene.history
    assert each_scene.reader.lost_leases() == []
    assert not each_scene.sweeps.stop_if_lost(step.saga_id, step.step_id)
    each_scene.resolves.resolve(
        *each_scene.run, row.action_id, to="DONE", actor="ann", note_text="it is there"
    )


def test_a_step_that_lives_again_is_not_stopped(scene: Scene) -> None:
    step = scene.attach()
    scene.time_passes(16)
    assert scene.steps.heartbeat_if_held(step, 15).held
    assert not scene.sweeps.stop_if_lost(step.saga_id, step.step_id)
    assert scene.begin(step, 1)


# -- keep -----------------------------------------------------------------------------------------------------------


def test_a_kept_saga_is_suspended_once_nothing_lives(each_scene: Scene) -> None:
    step = each_scene.act(each_scene.attach(), 1)
    assert each_scene.begin(step, 2)
    lost = each_scene.act(each_scene.attach("car"), 1)
    assert each_scene.begin(lost, 2)
    each_scene.requests.cancel(*each_scene.run, actor="ann", reason="enough", keep=True, clear_number=2)
    saga_id = each_scene.saga.saga_id
    assert each_scene.reader.sagas_to_suspend() == []
    assert not each_scene.sweeps.suspend_if_quiet(saga_id)
    each_scene.end(step, 2)
    each_scene.steps.stop_if_held(step)
    assert not each_scene.sweeps.suspend_if_quiet(saga_id)
    each_scene.time_passes(16)
    assert [saga.saga_id for saga in each_scene.reader.sagas_to_suspend()] == [saga_id]
    assert each_scene.sweeps.suspend_if_quiet(saga_id)
    saga = each_scene.saga
    assert (saga.state, saga.mode, saga.actor, saga.reason) == ("SUSPENDED", None, "ann", "enough")
    assert saga.stop_clear_number == 2
    assert each_scene.step("car").state == "STOPPED"
    assert each_scene.states("car") == {1: "DONE", 2: "IN_DOUBT"}
    assert not each_scene.sweeps.suspend_if_quiet(saga_id)


def test_a_kept_saga_waits_for_an_open_undo_of_some_steps(scene: Scene) -> None:
    scene.ran("flight", 1)
    scene.requests.cancel(*scene.run, actor="ann", keep=True)
    saga_id = scene.saga.saga_id
    scene.sql(
        "INSERT INTO airflow_saga.undo_request (saga_id, number, whole_run, state, cause, actor, clear_number) "
        "VALUES (%(id)s, 1, false, 'REQUESTED', 'late', 'airflow', 0)",
        {"id": saga_id},
    )
    assert not scene.sweeps.suspend_if_quiet(saga_id)
    scene.undone(request=scene.request)
    assert scene.sweeps.suspend_if_quiet(saga_id)


@pytest.mark.parametrize("state", ["RUNNING", "CANCELLING"])
def test_only_a_kept_saga_is_suspended(scene: Scene, state: str) -> None:
    scene.stopped("flight", 1)
    if state == "CANCELLING":
        scene.cancel()
    before = scene.tables()
    assert not scene.sweeps.suspend_if_quiet(scene.saga.saga_id)
    assert not scene.sweeps.suspend_if_quiet(10**9)
    assert scene.tables() == before


# -- undo runs to start ---------------------------------------------------------------------------------------------


def to_trigger(scene: Scene, silent_seconds: float = 30) -> list[str]:
    return [row["state"] for row in scene.reader.requests_to_trigger(silent_seconds=silent_seconds)]


def test_a_request_is_triggered_until_somebody_carries_it_out(each_scene: Scene) -> None:
    each_scene.stopped("flight", 1)
    assert to_trigger(each_scene) == []
    request = each_scene.cancel()
    assert to_trigger(each_scene) == ["REQUESTED"]
    each_scene.requests.note_triggered(request.request_uuid)
    assert to_trigger(each_scene) == []
    each_scene.time_passes(31)
    assert to_trigger(each_scene) == ["REQUESTED"], "its run never showed up"
    each_scene.freeze()
    assert to_trigger(each_scene) == []
    each_scene.time_passes(61)
    assert to_trigger(each_scene) == ["FROZEN"], "its run is silent"
    each_scene.requests.note_triggered(request.request_uuid)
    each_scene.undo_step()
    assert to_trigger(each_scene) == []
    each_scene.settle()
    each_scene.time_passes(1000)
    assert to_trigger(each_scene) == []


def test_what_is_held_or_queued_is_not_triggered(scene: Scene) -> None:
    scene.stopped("flight", 1)
    scene.hint()
    assert to_trigger(scene) == ["HINTED"]
    scene.sweeps.hold_if_mass_outage(causes=["failure"], threshold=0, window_seconds=60)
    assert to_trigger(scene) == []
    other = scene.another_run("run_2")
    other.ran("flight", 1)
    other.freeze(other.redo(other.step()))
    other.cancel()
    assert to_trigger(scene) == []
    other.undo_step(request=other.view.requests[0])
    other.settle(other.view.requests[0])
    assert to_trigger(scene) == ["REQUESTED"]
    other.close()


# -- which runs to read ---------------------------------------------------------------------------------------------


def test_the_reconciler_reads_the_runs_whose_end_nobody_told(each_scene: Scene) -> None:
    wanted = []
    for state in (
        "PENDING",
        "RUNNING",
        "COMPLETED",
        "FAILED",
        "incomplete",
        "keep",
        "CANCELLING",
        "CANCELLED",
    ):
        run = each_scene.another_run(state)
        if state in ("PENDING", "CANCELLED"):
            run.runs.open_if_new(*run.run)
        else:
            run.stopped("flight", 1, on_failure="keep" if state == "keep" else "compensate")
        if state in ("CANCELLED", "CANCELLING"):
            run.requests.cancel(*run.run, actor="ann")
        if state == "COMPLETED":
            run.finish(run.attach(try_number=2))
        if state in ("COMPLETED", "incomplete"):
            run.runs.complete_if_over(*run.run)
        if state in ("FAILED", "keep"):
            run.runs.fail_and_hint(*run.run, cause="failure")
        if state in ("PENDING", "RUNNING"):
            wanted.append(run.run_id)
        run.close()
    read = each_scene.reader.sagas_to_read()
    assert [saga.run_id for saga in read] == wanted
    assert [saga.run_id for saga in each_scene.reader.sagas_to_read(after_id=read[0].saga_id)] == wanted[1:]
    assert [saga.run_id for saga in each_scene.reader.sagas_to_read(limit=1)] == wanted[:1]
    each_scene.sql("UPDATE airflow_saga.undo_request SET state = 'WITHDRAWN' WHERE state = 'HINTED'")
    assert [saga.run_id for saga in each_scene.reader.sagas_to_read()] == [*wanted, "FAILED"], (
        "its hint is gone"
    )


# -- retention ------------------------------------------------------------------------------------------------------


def closed(scene: Scene, run_id: str, state: str) -> Scene:
    run = scene.another_run(run_id)
    if state == "open undo":
        run.ran("flight", 1)
        run.runs.complete_if_over(*run.run)
        run.sql(
            "INSERT INTO airflow_saga.undo_request (saga_id, number, whole_run, state, cause, actor, clear_number) "
            "VALUES (%(id)s, 1, false, 'QUEUED', 'late', 'airflow', 0)",
            {"id": run.saga.saga_id},
        )
        return run
    run.ran("flight", 1, 2) if state == "COMPLETED" else run.stopped("flight", 1, 2)
    if state == "COMPLETED":
        run.runs.complete_if_over(*run.run)
    elif state == "CANCELLED":
        run.cancel()
        run.undone("flight")
    elif state == "PARTIALLY_CANCELLED":
        run.cancel()
        run.freeze()
        attached = run.undo_of()
        for action in attached.open_actions:
            run.compensate(attached, action, "COMPENSATION_FAILED", failed=True)
        run.settle()
    elif state == "SUSPENDED":
        run.requests.cancel(*run.run, actor="ann", keep=True)
        run.sweeps.suspend_if_quiet(run.saga.saga_id)
    assert run.saga.state == state
    return run


def test_c24_pruning_deletes_what_closed_sagas_did_and_nothing_else(each_scene: Scene) -> None:
    gone = [closed(each_scene, state, state) for state in ("COMPLETED", "CANCELLED")]
    kept = [
        closed(each_scene, state, state)
        for state in ("RUNNING", "PARTIALLY_CANCELLED", "SUSPENDED", "open undo")
    ]
    assert each_scene.sweeps.prune(retention_days=1) == 0
    each_scene.time_passes(86_401)
    young = closed(each_scene, "young", "COMPLETED")
    assert each_scene.sweeps.prune(retention_days=1, batch=3) == 4
    for run in gone:
        assert (run.view.actions, len(run.view.steps)) == ((), 1), "the rest stays as a tombstone"
    for run in [*kept, young]:
        assert run.view.actions != ()
    assert each_scene.sweeps.prune(retention_days=1) == 0
    for run in [*gone, *kept, young]:
        run.close()


def test_pruning_is_bounded(scene: Scene) -> None:
    closed(scene, "old", "COMPLETED").close()
    scene.time_passes(86_401)
    assert scene.sweeps.prune(retention_days=1, batch=1, most_batches=1) == 1
    assert scene.sweeps.prune(retention_days=1, batch=1, most_batches=1) == 1


# -- retention: a grave, not a fresh start ----------------------------------------------------------------------------


def old_and_pruned(scene: Scene) -> None:
    scene.ran("flight", 1)
    assert scene.runs.complete_if_over(*scene.run) == "COMPLETED"
    scene.time_passes(91 * 86_400)
    assert scene.sweeps.prune(retention_days=90) == 1


def test_a_pruned_saga_is_neither_resumed_nor_undone_and_says_since_when(each_scene: Scene) -> None:
    old_and_pruned(each_scene)
    assert each_scene.saga.pruned_at is not None
    day = f"{each_scene.saga.pruned_at:%Y-%m-%d}"
    for cleared in ({}, {"max_tries": 1, "try_number": 2, "clear_number": 1}):
        refused = each_scene.try_attach("flight", **cleared).decision
        assert refused.go is Go.REFUSE
        assert f"forgotten on {day}" in refused.message
    new_task = each_scene.try_attach("hotel", clear_number=1).decision
    assert new_task.go is Go.REFUSE
    before = each_scene.tables()
    with pytest.raises(VerbRefusedError, match=f"forgotten on {day}"):
        each_scene.ask()
    ignored = each_scene.requests.undo(*each_scene.run, actor="airflow", cause="marked_failed")
    assert ignored.verdict is Verdict.IGNORED
    assert each_scene.tables() == before


def test_c24_what_is_not_closed_is_never_pruned_however_old(each_scene: Scene) -> None:
    each_scene.stopped("flight", 1)
    each_scene.time_passes(1000 * 86_400)
    assert each_scene.sweeps.prune(retention_days=1) == 0
    resumed = each_scene.try_attach("flight", try_number=2)
    assert [row.seq for row in resumed.recorded] == [1]
