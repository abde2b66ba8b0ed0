"""Plays of the action."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from airflow_saga.core.records import Outcome
from airflow_saga.core.states import Move
from airflow_saga.store.undo import EndedTry, UndoAttached
from tests.store.plays import Plays, frozen_now, orphan, resolve
from tests.store.scene import Scene

ACTION = Plays("action")


@ACTION.of("begin")
def _begin(scene: Scene, move: Move) -> Iterator[Any]:
    step = scene.attach()
    yield
    assert scene.begin(step, 1)


@ACTION.of("read")
def _read(scene: Scene, move: Move) -> Iterator[Any]:
    step = scene.attach()
    yield
    assert scene.read(step, 1, move.target)


@ACTION.of("twin")
def _twin(scene: Scene, move: Move) -> Iterator[Any]:
    step = orphan(scene)
    scene.lates.record_late(step, Outcome(1, "FAILED"), idempotent=False)
    newer = scene.step()
    assert scene.steps.retry_if_allowed(newer, scene.intent(newer, 1, max_tries=2))[0] == 2
    yield
    scene.lates.record_late(step, Outcome(1, "DONE"), idempotent=False)
    assert scene.view.actions[-1].twin_of == scene.action().action_id


@ACTION.of("succeed", "reject", "lose")
def _end(scene: Scene, move: Move) -> Iterator[Any]:
    step = scene.attach()
    assert scene.begin(step, 1)
    yield
    assert scene.end(step, 1, move.target)


@ACTION.of("retry")
def _retry(scene: Scene, move: Move) -> Iterator[Any]:
    step = scene.attach()
    assert scene.begin(step, 1)
    assert scene.end(step, 1, move.source or "")
    yield
    intent = scene.intent(step, 1, max_tries=2, idempotent=True)
    assert scene.steps.retry_if_allowed(step, intent)[0] == 2


@ACTION.of("verify")
def _verify(scene: Scene, move: Move) -> Iterator[Any]:
    _, attached = frozen_now(scene)
    yield
    assert scene.steps.verified_if_held(attached.step, scene.action().action_id, move.target, None, "seen")


def undo_in(scene: Scene, state: str | None, effect: str = "COMPENSABLE") -> UndoAttached:
    """Action 1 in this state, in a step that is being undone."""
    step = scene.attach()
    assert scene.begin(step, 1, effect=effect)
    assert scene.end(step, 1, "IN_DOUBT" if state == "IN_DOUBT" else "DONE")
    scene.steps.stop_if_held(step)
    scene.freeze(scene.cancel())
    attached = scene.undo_of()
    if state == "COMPENSATING":
        assert scene.undos.write_undo(attached, None, scene.next_try(scene.action()))[1] == 1
    elif state == "COMPENSATION_FAILED":
        scene.compensate(attached, scene.action(), state)
        scene.settle()
        scene.freeze(scene.ask())
        attached = scene.undo_of()
    return attached


@ACTION.of("compensate")
def _compensate(scene: Scene, move: Move) -> Iterator[Any]:
    attached = undo_in(scene, move.source)
    yield
    assert scene.undos.write_undo(attached, None, scene.next_try(scene.action()))[1] is not None


@ACTION.of("confirm", "later", "give up")
def _end_of_a_try(scene: Scene, move: Move) -> Iterator[Any]:
    attached = undo_in(scene, move.source)
    yield
    if move.source == "DONE":
        assert scene.undos.settle_action_if_held(attached, scene.action(), move.target, error="it is gone")
    else:
        seconds = 60 if move.event == "later" else None
        ended = EndedTry(scene.action().action_id, move.target, reconcile_seconds=seconds)
        assert scene.undos.write_undo(attached, ended, None)[0]
        assert (scene.action().reconcile_at is not None) == (move.event == "later")


@ACTION.of("stand")
def _stand(scene: Scene, move: Move) -> Iterator[Any]:
    attached = undo_in(scene, move.source, "NON_COMPENSABLE")
    yield
    assert scene.undos.settle_action_if_held(attached, scene.action(), move.target)


@ACTION.of("resolve")
def _resolve(scene: Scene, move: Move) -> Iterator[Any]:
    effect = "NON_COMPENSABLE" if move.source == "NON_COMPENSABLE" else "COMPENSABLE"
    attached = undo_in(scene, move.source, effect)
    if move.source in ("NON_COMPENSABLE", "COMPENSATION_FAILED"):
        assert scene.undos.settle_action_if_held(attached, scene.action(), move.source)
    scene.time_passes(3601)
    assert scene.settles.expire_if_past_deadline(scene.saga.saga_id) is not None
    yield
    resolve(scene, move.target)


@ACTION.of("answer")
def _answer(scene: Scene, move: Move) -> Iterator[Any]:
    step = scene.attach()
    assert scene.begin(step, 1)
    assert scene.end(step, 1, "IN_DOUBT")
    scene.steps.stop_if_held(step)
    yield
    resolve(scene, move.target)


@ACTION.of("late yes", "late no")
def _late(scene: Scene, move: Move) -> Iterator[Any]:
    if move.source == "IN_DOUBT":
        step = orphan(scene)
    else:
        step, attached = frozen_now(scene)
        state = "FAILED" if move.source == "FAILED" else "DONE"
        assert scene.steps.verified_if_held(attached.step, scene.action().action_id, state, None, "seen")
        if move.source == "COMPENSATED":
            scene.compensate(attached, scene.action())
    yield
    scene.lates.record_late(
        step, Outcome(1, "FAILED" if move.event == "late no" else "DONE"), idempotent=False
    )
