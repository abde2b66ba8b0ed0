"""Plays of the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from airflow_saga.core.records import Outcome
from airflow_saga.core.states import Move
from airflow_saga.store.rewind import RewindVerbs
from tests.store.plays import CLEARED, Plays, frozen_now, resolve, saga_in
from tests.store.scene import Scene

STEP = Plays("step")


@STEP.of("attach")
def _attach(scene: Scene, move: Move) -> Iterator[Any]:
    if move.source is not None:
        step = scene.attach()
        if move.source == "STOPPED":
            scene.steps.stop_if_held(step)
    yield
    scene.attach(try_number=2)


@STEP.of("replay")
def _replay(scene: Scene, move: Move) -> Iterator[Any]:
    scene.ran("flight", 1)
    yield
    assert scene.try_attach(try_number=2).decision.go == "replay"


@STEP.of("redo")
def _redo(scene: Scene, move: Move) -> Iterator[Any]:
    scene.ran("flight", 1)
    yield
    scene.redo(scene.step())


@STEP.of("begin anew")
def _begin_anew(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, "CANCELLED")
    yield
    assert scene.attach(**CLEARED).generation == 2


@STEP.of("finish")
def _finish(scene: Scene, move: Move) -> Iterator[Any]:
    step = scene.attach()
    yield
    scene.finish(step)


@STEP.of("mark")
def _mark(scene: Scene, move: Move) -> Iterator[Any]:
    scene.attach()
    yield
    scene.runs.mark_step_if_running(*scene.run, "flight", -1)


@STEP.of("stop")
def _stop(scene: Scene, move: Move) -> Iterator[Any]:
    step = scene.attach()
    yield
    scene.steps.stop_if_held(step)


def step_in(scene: Scene, state: str | None) -> None:
    """`flight` in this state, in a saga in which everything may be asked for."""
    if state == "RUNNING":
        scene.act(scene.attach(), 1)
    elif state == "STOPPED":
        scene.stopped("flight", 1)
    elif state == "SUCCEEDED":
        scene.ran("flight", 1)
    else:
        scene.ran("flight", 1)
        scene.freeze(scene.redo(scene.step()))
        how = "COMPENSATED" if state == "UNDONE" else "COMPENSATION_FAILED"
        scene.compensate(scene.undo_of(), scene.action(), how)
        scene.settle()


@STEP.of("seize")
def _seize(scene: Scene, move: Move) -> Iterator[Any]:
    step_in(scene, move.source)
    scene.cancel(stop_now=True)
    yield
    scene.freeze()


@STEP.of("undone")
def _undone(scene: Scene, move: Move) -> Iterator[Any]:
    scene.stopped("flight", 1)
    scene.freeze(scene.cancel())
    how = "COMPENSATED" if move.target == "UNDONE" else "COMPENSATION_FAILED"
    scene.compensate(scene.undo_of(), scene.action(), how)
    yield
    scene.settle()


@STEP.of("expire")
def _step_expire(scene: Scene, move: Move) -> Iterator[Any]:
    if move.source == "UNDONE":
        scene.ran("flight", 1, 2)
        scene.runs.complete_if_over(*scene.run)
        RewindVerbs(scene.connection).undo_from(*scene.run, scene.action(2).action_id, actor="ann")
        scene.undone("flight")
        scene.ask()
        scene.time_passes(3601)
        yield
        scene.settles.expire_if_past_deadline(scene.saga.saga_id)
        return
    step = scene.attach()
    if move.target == "PARTLY_UNDONE":
        scene.act(step, 1)
    if move.source == "STOPPED":
        scene.steps.stop_if_held(step)
    if move.source == "SUCCEEDED":
        scene.finish(step)
    scene.cancel()
    scene.time_passes(3601)
    yield
    scene.settles.expire_if_past_deadline(scene.saga.saga_id)


@STEP.of("late")
def _step_late(scene: Scene, move: Move) -> Iterator[Any]:
    step, attached = frozen_now(scene)
    assert scene.steps.verified_if_held(attached.step, scene.action().action_id, "FAILED", None, "no")
    scene.settle()
    yield
    scene.lates.record_late(step, Outcome(1, "DONE"), idempotent=False)


@STEP.of("resolved")
def _resolved(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, "PARTIALLY_CANCELLED")
    yield
    resolve(scene, "COMPENSATED")
