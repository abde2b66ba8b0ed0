"""Plays of the saga."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from airflow_saga.core.records import Outcome, StepRow
from airflow_saga.core.states import Move
from airflow_saga.store.rewind import RewindVerbs
from airflow_saga.store.undo import EndedTry
from tests.store.plays import CLEARED, Plays, frozen_now, given_up, kept, resolve, saga_in
from tests.store.scene import Scene

SAGA = Plays("saga")


@SAGA.of("open")
def _open(scene: Scene, move: Move) -> Iterator[Any]:
    yield
    scene.runs.open_if_new(*scene.run)


@SAGA.of("start", "reopen")
def _start(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, move.source)
    yield
    scene.attach("hotel" if move.source in (None, "PENDING", "COMPLETED", "FAILED") else "flight", **CLEARED)


@SAGA.of("cancel")
def _cancel(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, move.source)
    yield
    scene.requests.cancel(*scene.run, actor="ann")
    assert scene.saga.mode == ("undo" if move.target == "CANCELLING" else None)


@SAGA.of("none acted")
def _none_acted(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, "PENDING")
    yield
    if move.target == "COMPLETED":
        scene.runs.complete_if_over(*scene.run)
    else:
        scene.runs.fail_and_hint(*scene.run, cause="failure")


@SAGA.of("complete")
def _complete(scene: Scene, move: Move) -> Iterator[Any]:
    scene.ran("flight", 1)
    yield
    scene.runs.complete_if_over(*scene.run)


@SAGA.of("fail")
def _fail(scene: Scene, move: Move) -> Iterator[Any]:
    scene.stopped("flight", 1)
    yield
    scene.hint()


@SAGA.of("undo")
def _undo(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, move.source)
    yield
    scene.requests.undo(*scene.run, actor="ann")
    assert (scene.saga.mode, scene.request.state) == ("undo", "REQUESTED")


@SAGA.of("cancel keep")
def _cancel_keep(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, "RUNNING")
    yield
    kept(scene)
    assert (scene.saga.mode, scene.view.requests) == ("keep", ())


@SAGA.of("policy")
def _policy(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, "FAILED")
    yield
    scene.freeze()


@SAGA.of("suspend")
def _suspend(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, "CANCELLING")
    yield
    scene.sweeps.suspend_if_quiet(scene.saga.saga_id)


@SAGA.of("settle")
def _settle(scene: Scene, move: Move) -> Iterator[Any]:
    if move.target == "SUSPENDED":
        _freeze_from(scene, 2)
        scene.undo_step()
        yield
        scene.settle()
        return
    scene.stopped("flight", 1)
    if move.target == "CANCELLED":
        scene.freeze(scene.cancel())
        scene.undo_step()
    else:
        given_up(scene)
    yield
    scene.settle()


def _freeze_from(scene: Scene, seq: int) -> None:
    """Two actions of a finished saga, undone from this one on."""
    scene.ran("flight", 1, 2)
    scene.runs.complete_if_over(*scene.run)
    RewindVerbs(scene.connection).undo_from(*scene.run, scene.action(seq).action_id, actor="ann")
    scene.freeze()


@SAGA.of("expire")
def _expire(scene: Scene, move: Move) -> Iterator[Any]:
    if move.target == "SUSPENDED":
        _freeze_from(scene, 2)
        scene.undo_step()
        scene.time_passes(3601)
        yield
        scene.settles.expire_if_past_deadline(scene.saga.saga_id)
        return
    step = scene.attach()
    if move.target == "PARTIALLY_CANCELLED":
        scene.act(step, 1)
    scene.cancel()
    scene.time_passes(3601)
    yield
    scene.settles.expire_if_past_deadline(scene.saga.saga_id)


@SAGA.of("retry undo")
def _retry_undo(scene: Scene, move: Move) -> Iterator[Any]:
    scene.stopped("flight", 1)
    scene.freeze(scene.cancel())
    attached, row = scene.undo_of(), scene.action()
    assert scene.undos.write_undo(attached, None, scene.next_try(row))[1] == 1
    later = EndedTry(row.action_id, "COMPENSATING", reconcile_seconds=60)
    assert scene.undos.write_undo(attached, later, None)[0]
    scene.settle()
    scene.time_passes(61)
    yield
    scene.settles.ask_again_if_due(scene.saga.saga_id)


def _lost_beside(scene: Scene) -> StepRow:
    """A flight whose call is found without effect in its undo, and a car beside it that stays."""
    step = scene.attach()
    assert scene.begin(step, 1)
    scene.time_passes(60)
    assert scene.sweeps.stop_if_lost(step.saga_id, step.step_id)
    scene.ran("car", 1)
    scene.runs.fail_and_hint(*scene.run, cause="failure")
    RewindVerbs(scene.connection).undo_from(*scene.run, scene.action().action_id, actor="ann")
    scene.freeze()
    attached = scene.undo_of()
    lost = scene.action(1, generation=1)
    assert scene.steps.verified_if_held(attached.step, lost.action_id, "FAILED", None, "no")
    assert scene.settle() is not None
    return step


@SAGA.of("late")
def _saga_late(scene: Scene, move: Move) -> Iterator[Any]:
    if move.source == "SUSPENDED":
        late = _lost_beside(scene)
        yield
        scene.lates.record_late(late, Outcome(1, "DONE"), idempotent=False)
        return
    step, attached = frozen_now(scene)
    if move.source == "CANCELLED":
        assert scene.steps.verified_if_held(attached.step, scene.action().action_id, "FAILED", None, "no")
    else:
        assert scene.undos.settle_action_if_held(attached, scene.action(), "IN_DOUBT", probed=True)
    scene.settle()
    yield
    scene.lates.record_late(step, Outcome(1, "DONE"), idempotent=False)


@SAGA.of("resolve")
def _saga_resolve(scene: Scene, move: Move) -> Iterator[Any]:
    if move.target == "SUSPENDED":
        _freeze_from(scene, 2)
        attached = scene.undo_of()
        scene.compensate(attached, attached.open_actions[0], "COMPENSATION_FAILED", failed=True)
        scene.settle()
        failed = scene.action(2, generation=1).action_id
        yield
        scene.resolves.resolve(*scene.run, failed, to="ACCEPTED", actor="ann", note_text="it may stand")
        return
    saga_in(scene, "PARTIALLY_CANCELLED")
    yield
    resolve(scene, "ACCEPTED")
