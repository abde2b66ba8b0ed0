"""Every row of the four tables (PROTOCOL 3 to 6), made by the verb whose row it is.

A scene is a generator: what comes before its `yield` prepares, what comes after is the verb. The row is looked at on
both sides: the saga, the step `flight`, its newest action, the newest request. A row of the tables that has no scene
fails here, so that nobody adds one that nothing makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from airflow_saga.core.records import Outcome, RequestRow, StepRow
from airflow_saga.core.states import MOVES, Machine, Move
from airflow_saga.store.undo import EndedTry, UndoAttached
from tests.store.scene import Scene

Play = Callable[[Scene, Move], Iterator[Any]]
PLAYS: dict[tuple[Machine, str], Play] = {}
CLEARED = {"max_tries": 1, "try_number": 2, "clear_number": 1}


def play(machine: Machine, *events: str) -> Callable[[Play], Play]:
    def keep(scene: Play) -> Play:
        for event in events:
            PLAYS[machine, event] = scene
        return scene

    return keep


# -- how to get to a state ------------------------------------------------------------------------------------------


def kept(scene: Scene) -> None:
    scene.requests.cancel(*scene.run, actor="ann", keep=True)


def given_up(scene: Scene) -> None:
    """CANCELLING: the undo has failed at action 1."""
    scene.freeze(scene.cancel())
    scene.compensate(scene.undo_of(), scene.action(), "COMPENSATION_FAILED", failed=True)


def saga_in(scene: Scene, state: str | None) -> None:
    """A saga in this state; with an action wherever a step has begun."""
    if state is None:
        return
    if state == "PENDING":
        scene.runs.open_if_new(*scene.run)
        return
    if state == "RUNNING":
        scene.act(scene.attach(), 1)
        return
    scene.ran("flight", 1) if state == "COMPLETED" else scene.stopped("flight", 1)
    if state == "COMPLETED":
        scene.runs.complete_if_over(*scene.run)
    elif state == "FAILED":
        scene.hint()
    elif state in ("SUSPENDED", "CANCELLING"):
        kept(scene)
        if state == "SUSPENDED":
            scene.sweeps.suspend_if_quiet(scene.saga.saga_id)
    elif state == "CANCELLED":
        scene.cancel()
        scene.undone("flight")
    else:
        given_up(scene)
        scene.settle()


def orphan(scene: Scene) -> StepRow:
    """An attempt in the middle of call 1 whose step was taken by a newer one."""
    step = scene.attach()
    assert scene.begin(step, 1)
    scene.attach(try_number=2)
    return step


def frozen_now(scene: Scene, **more: Any) -> tuple[StepRow, UndoAttached]:
    """A call in doubt whose step is being undone; A1 is over."""
    step = scene.attach()
    assert scene.begin(step, 1, **more)
    scene.freeze(scene.cancel(stop_now=True))
    scene.time_passes(12)
    return step, scene.undo_of()


# -- saga -----------------------------------------------------------------------------------------------------------


@play("saga", "open")
def _open(scene: Scene, move: Move) -> Iterator[Any]:
    yield
    scene.runs.open_if_new(*scene.run)


@play("saga", "start", "reopen")
def _start(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, move.source)
    yield
    scene.attach("hotel" if move.source in (None, "PENDING", "COMPLETED", "FAILED") else "flight", **CLEARED)


@play("saga", "cancel")
def _cancel(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, move.source)
    yield
    scene.requests.cancel(*scene.run, actor="ann")
    assert scene.saga.mode == ("undo" if move.target == "CANCELLING" else None)


@play("saga", "none acted")
def _none_acted(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, "PENDING")
    yield
    if move.target == "COMPLETED":
        scene.runs.complete_if_over(*scene.run)
    else:
        scene.runs.fail_and_hint(*scene.run, cause="failure")


@play("saga", "complete")
def _complete(scene: Scene, move: Move) -> Iterator[Any]:
    scene.ran("flight", 1)
    yield
    scene.runs.complete_if_over(*scene.run)


@play("saga", "fail")
def _fail(scene: Scene, move: Move) -> Iterator[Any]:
    scene.stopped("flight", 1)
    yield
    scene.hint()


@play("saga", "undo")
def _undo(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, move.source)
    yield
    scene.requests.undo(*scene.run, actor="ann")
    assert (scene.saga.mode, scene.request.state) == ("undo", "REQUESTED")


@play("saga", "cancel keep")
def _cancel_keep(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, "RUNNING")
    yield
    kept(scene)
    assert (scene.saga.mode, scene.view.requests) == ("keep", ())


@play("saga", "policy")
def _policy(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, "FAILED")
    yield
    scene.freeze()


@play("saga", "suspend")
def _suspend(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, "CANCELLING")
    yield
    scene.sweeps.suspend_if_quiet(scene.saga.saga_id)


@play("saga", "settle")
def _settle(scene: Scene, move: Move) -> Iterator[Any]:
    scene.stopped("flight", 1)
    if move.target == "CANCELLED":
        scene.freeze(scene.cancel())
        scene.undo_step()
    else:
        given_up(scene)
    yield
    scene.settle()


@play("saga", "expire")
def _expire(scene: Scene, move: Move) -> Iterator[Any]:
    step = scene.attach()
    if move.target == "PARTIALLY_CANCELLED":
        scene.act(step, 1)
    scene.cancel()
    scene.time_passes(3601)
    yield
    scene.settles.expire_if_past_deadline(scene.saga.saga_id)


@play("saga", "retry undo")
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


@play("saga", "late")
def _saga_late(scene: Scene, move: Move) -> Iterator[Any]:
    step, attached = frozen_now(scene)
    if move.source == "CANCELLED":
        assert scene.steps.verified_if_held(attached.step, scene.action().action_id, "FAILED", None, "no")
    else:
        assert scene.undos.settle_action_if_held(attached, scene.action(), "IN_DOUBT", probed=True)
    scene.settle()
    yield
    scene.lates.record_late(step, Outcome(1, "DONE"), idempotent=False)


@play("saga", "resolve")
def _saga_resolve(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, "PARTIALLY_CANCELLED")
    yield
    resolve(scene, "ACCEPTED")


def resolve(scene: Scene, to: str) -> None:
    scene.resolves.resolve(*scene.run, scene.action().action_id, to=to, actor="ann", note_text="seen")


# -- step -----------------------------------------------------------------------------------------------------------


@play("step", "attach")
def _attach(scene: Scene, move: Move) -> Iterator[Any]:
    if move.source is not None:
        step = scene.attach()
        if move.source == "STOPPED":
            scene.steps.stop_if_held(step)
    yield
    scene.attach(try_number=2)


@play("step", "replay")
def _replay(scene: Scene, move: Move) -> Iterator[Any]:
    scene.ran("flight", 1)
    yield
    assert scene.try_attach(try_number=2).decision.go == "replay"


@play("step", "redo")
def _redo(scene: Scene, move: Move) -> Iterator[Any]:
    scene.ran("flight", 1)
    yield
    scene.redo(scene.step())


@play("step", "begin anew")
def _begin_anew(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, "CANCELLED")
    yield
    assert scene.attach(**CLEARED).generation == 2


@play("step", "finish")
def _finish(scene: Scene, move: Move) -> Iterator[Any]:
    step = scene.attach()
    yield
    scene.finish(step)


@play("step", "mark")
def _mark(scene: Scene, move: Move) -> Iterator[Any]:
    scene.attach()
    yield
    scene.runs.mark_step_if_running(*scene.run, "flight", -1)


@play("step", "stop")
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


@play("step", "seize")
def _seize(scene: Scene, move: Move) -> Iterator[Any]:
    step_in(scene, move.source)
    scene.cancel(stop_now=True)
    yield
    scene.freeze()


@play("step", "undone")
def _undone(scene: Scene, move: Move) -> Iterator[Any]:
    scene.stopped("flight", 1)
    scene.freeze(scene.cancel())
    how = "COMPENSATED" if move.target == "UNDONE" else "COMPENSATION_FAILED"
    scene.compensate(scene.undo_of(), scene.action(), how)
    yield
    scene.settle()


@play("step", "expire")
def _step_expire(scene: Scene, move: Move) -> Iterator[Any]:
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


@play("step", "late")
def _step_late(scene: Scene, move: Move) -> Iterator[Any]:
    step, attached = frozen_now(scene)
    assert scene.steps.verified_if_held(attached.step, scene.action().action_id, "FAILED", None, "no")
    scene.settle()
    yield
    scene.lates.record_late(step, Outcome(1, "DONE"), idempotent=False)


@play("step", "resolved")
def _resolved(scene: Scene, move: Move) -> Iterator[Any]:
    saga_in(scene, "PARTIALLY_CANCELLED")
    yield
    resolve(scene, "COMPENSATED")


# -- action ---------------------------------------------------------------------------------------------------------


@play("action", "begin")
def _begin(scene: Scene, move: Move) -> Iterator[Any]:
    step = scene.attach()
    yield
    assert scene.begin(step, 1)


@play("action", "read")
def _read(scene: Scene, move: Move) -> Iterator[Any]:
    step = scene.attach()
    yield
    assert scene.read(step, 1, move.target)


@play("action", "twin")
def _twin(scene: Scene, move: Move) -> Iterator[Any]:
    step = orphan(scene)
    scene.lates.record_late(step, Outcome(1, "FAILED"), idempotent=False)
    newer = scene.step()
    assert scene.steps.retry_if_allowed(newer, scene.intent(newer, 1, max_tries=2))[0] == 2
    yield
    scene.lates.record_late(step, Outcome(1, "DONE"), idempotent=False)
    assert scene.view.actions[-1].twin_of == scene.action().action_id


@play("action", "succeed", "reject", "lose")
def _end(scene: Scene, move: Move) -> Iterator[Any]:
    step = scene.attach()
    assert scene.begin(step, 1)
    yield
    assert scene.end(step, 1, move.target)


@play("action", "retry")
def _retry(scene: Scene, move: Move) -> Iterator[Any]:
    step = scene.attach()
    assert scene.begin(step, 1)
    assert scene.end(step, 1, move.source or "")
    yield
    intent = scene.intent(step, 1, max_tries=2, idempotent=True)
    assert scene.steps.retry_if_allowed(step, intent)[0] == 2


@play("action", "verify")
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


@play("action", "compensate")
def _compensate(scene: Scene, move: Move) -> Iterator[Any]:
    attached = undo_in(scene, move.source)
    yield
    assert scene.undos.write_undo(attached, None, scene.next_try(scene.action()))[1] is not None


@play("action", "confirm", "later", "give up")
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


@play("action", "stand")
def _stand(scene: Scene, move: Move) -> Iterator[Any]:
    attached = undo_in(scene, move.source, "NON_COMPENSABLE")
    yield
    assert scene.undos.settle_action_if_held(attached, scene.action(), move.target)


@play("action", "resolve")
def _resolve(scene: Scene, move: Move) -> Iterator[Any]:
    effect = "NON_COMPENSABLE" if move.source == "NON_COMPENSABLE" else "COMPENSABLE"
    attached = undo_in(scene, move.source, effect)
    if move.source in ("NON_COMPENSABLE", "COMPENSATION_FAILED"):
        assert scene.undos.settle_action_if_held(attached, scene.action(), move.source)
    scene.time_passes(3601)
    assert scene.settles.expire_if_past_deadline(scene.saga.saga_id) is not None
    yield
    resolve(scene, move.target)


@play("action", "answer")
def _answer(scene: Scene, move: Move) -> Iterator[Any]:
    step = scene.attach()
    assert scene.begin(step, 1)
    assert scene.end(step, 1, "IN_DOUBT")
    scene.steps.stop_if_held(step)
    yield
    resolve(scene, move.target)


@play("action", "late yes", "late no")
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


# -- request --------------------------------------------------------------------------------------------------------


def hinted(scene: Scene, state: str) -> RequestRow:
    scene.stopped("flight", 1)
    request = scene.hint()
    if state == "HELD":
        scene.sweeps.hold_if_mass_outage(causes=["failure"], threshold=0, window_seconds=60)
    return request


def queued(scene: Scene) -> tuple[RequestRow, RequestRow]:
    """The frozen undo of one step, and the wider wish behind it."""
    scene.ran("flight", 1)
    first = scene.freeze(scene.redo(scene.step()))
    return first, scene.cancel()


@play("request", "ask")
def _ask(scene: Scene, move: Move) -> Iterator[Any]:
    scene.attach()
    yield
    scene.cancel()


@play("request", "hint")
def _hint(scene: Scene, move: Move) -> Iterator[Any]:
    scene.stopped("flight", 1)
    yield
    scene.hint()


@play("request", "hold")
def _hold(scene: Scene, move: Move) -> Iterator[Any]:
    hinted(scene, "HINTED")
    yield
    scene.sweeps.hold_if_mass_outage(causes=["failure"], threshold=0, window_seconds=60)


@play("request", "release")
def _release(scene: Scene, move: Move) -> Iterator[Any]:
    hinted(scene, "HELD")
    yield
    scene.requests.release(*scene.run, actor="ann")


@play("request", "widen")
def _widen(scene: Scene, move: Move) -> Iterator[Any]:
    if move.source == "REQUESTED":
        scene.ran("flight", 1)
        scene.redo(scene.step())
    elif move.source == "QUEUED":
        queued(scene)
    else:
        hinted(scene, move.source or "")
    yield
    if move.source == "QUEUED":
        scene.requests.cancel(*scene.run, actor="bob", stop_now=True)
        assert scene.request.stop_now
    else:
        scene.ask()
        assert (scene.request.whole_run, scene.request.cause, scene.request.number) == (True, "user", 1)


@play("request", "queue")
def _queue(scene: Scene, move: Move) -> Iterator[Any]:
    scene.ran("flight", 1)
    scene.freeze(scene.redo(scene.step()))
    yield
    scene.cancel()


@play("request", "withdraw")
def _withdraw(scene: Scene, move: Move) -> Iterator[Any]:
    hinted(scene, move.source or "")
    yield
    scene.attach(try_number=2)


@play("request", "freeze")
def _freeze(scene: Scene, move: Move) -> Iterator[Any]:
    request = hinted(scene, "HINTED") if move.source == "HINTED" else None
    if request is None:
        scene.stopped("flight", 1)
        scene.cancel()
    yield
    scene.freeze()


@play("request", "take over")
def _take_over(scene: Scene, move: Move) -> Iterator[Any]:
    scene.stopped("flight", 1)
    scene.freeze(scene.cancel())
    scene.time_passes(61)
    yield
    assert scene.freeze(owner="undo__2").owner_run_id == "undo__2"


@play("request", "settle")
def _request_settle(scene: Scene, move: Move) -> Iterator[Any]:
    scene.stopped("flight", 1)
    scene.freeze(scene.cancel())
    scene.undo_step()
    yield
    scene.settle()


@play("request", "next")
def _next(scene: Scene, move: Move) -> Iterator[Any]:
    first, _ = queued(scene)
    scene.undo_step(request=first)
    yield
    scene.settle(first)


@play("request", "expire")
def _request_expire(scene: Scene, move: Move) -> Iterator[Any]:
    if move.source == "QUEUED":
        queued(scene)
    else:
        scene.stopped("flight", 1)
        request = scene.cancel()
        if move.source == "FROZEN":
            scene.freeze(request)
    scene.time_passes(3601)
    yield
    scene.settles.expire_if_past_deadline(scene.saga.saga_id)


# -- the test -------------------------------------------------------------------------------------------------------


def state_of(scene: Scene, machine: Machine, looked_at: int | None) -> tuple[int | None, str | None]:
    """Id and state of the row that the scene is about; ``looked_at``: the id it had before."""
    saga = scene.reader.find(*scene.run)
    if saga is None:
        return None, None
    if machine == "saga":
        return saga.saga_id, saga.state
    view = scene.view
    rows: dict[int, str] = {
        "step": {row.step_id: row.state for row in view.steps if row.task_id == "flight"},
        "action": {row.action_id: row.state for row in view.actions},
        "request": {row.request_id: row.state for row in view.requests},
    }[machine]
    found = looked_at if looked_at is not None else max(rows, default=None)
    return found, None if found is None else rows[found]


def all_moves() -> list[Move]:
    return [move for moves in MOVES.values() for move in moves]


def test_every_row_of_the_tables_is_made_by_a_verb() -> None:
    assert {(move.machine, move.event) for move in all_moves()} == set(PLAYS)


@pytest.mark.parametrize(
    "move", all_moves(), ids=lambda move: f"{move.machine} {move.event}: {move.source} to {move.target}"
)
def test_a_row_is_made_by_its_verb(each_scene: Scene, move: Move) -> None:
    playing = PLAYS[move.machine, move.event](each_scene, move)
    next(playing)
    before, source = state_of(each_scene, move.machine, None)
    born = move.source is None
    if not born:
        assert source == move.source
    assert next(playing, None) is None, "a scene has one yield"
    after, target = state_of(each_scene, move.machine, None if born else before)
    assert target == move.target
    if born:
        assert after != before, "a new row"
