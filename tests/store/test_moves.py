"""Every row of the four tables (PROTOCOL 3 to 6), made by the verb whose row it is.

A play brings a row about. The row is looked at on both sides of it: the saga, the step `flight`, its newest action, the
newest request. A row of the tables that has no play fails here, so that nobody adds one that nothing makes.
"""

from __future__ import annotations

import pytest

from airflow_saga.core.states import MOVES, Machine, Move
from tests.store.plays.action import ACTION
from tests.store.plays.request import REQUEST
from tests.store.plays.saga import SAGA
from tests.store.plays.step import STEP
from tests.store.scene import Scene

PLAYS = {**SAGA, **STEP, **ACTION, **REQUEST}


def state_of(scene: Scene, machine: Machine, looked_at: int | None) -> tuple[int | None, str | None]:
    """Id and state of the row that the play is about; ``looked_at``: the id it had before."""
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
    assert next(playing, None) is None, "a play has one yield"
    after, target = state_of(each_scene, move.machine, None if born else before)
    assert target == move.target
    if born:
        assert after != before, "a new row"
