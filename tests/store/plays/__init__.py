"""How each row of the tables is made, for `test_moves`: one file for each table, and here what they share.

A play is a generator: what comes before its `yield` prepares, what comes after is the verb.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from airflow_saga.core.records import StepRow
from airflow_saga.core.states import Machine, Move
from airflow_saga.store.undo import UndoAttached
from tests.store.scene import Scene

Play = Callable[[Scene, Move], Iterator[Any]]
CLEARED = {"max_tries": 1, "try_number": 2, "clear_number": 1}


class Plays(dict[tuple[Machine, str], Play]):
    """The plays of one table, each under the events that it makes."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def of(self, *events: str) -> Callable[[Play], Play]:
        def keep(play: Play) -> Play:
            for event in events:
                self[self.machine, event] = play
            return play

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


def resolve(scene: Scene, to: str) -> None:
    scene.resolves.resolve(*scene.run, scene.action().action_id, to=to, actor="ann", note_text="seen")
