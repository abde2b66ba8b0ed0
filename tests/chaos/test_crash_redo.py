"""A process is killed anywhere while a saga goes back and on again: a redo, a rewind, a body that has changed.

Each cell is one step that made three calls, a way back (``redo``: all of it, ``rewind``: to a save-point behind the
first, ``diverge``: the body wants another call in the second place), and a death: while the way back is asked for, in
the undo, or when the step runs again. Then whatever Airflow and the reconciler do after a death is done until the step
has ended well, and the ledger has to show exactly what the last body wanted. In the end all is undone.
"""

from __future__ import annotations

import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from airflow_saga.store.rewind import RewindVerbs
from tests.chaos.conftest import Playground
from tests.chaos.nursery import Child, Nursery
from tests.chaos.test_crash_points import SIDE_BY_SIDE, Death, around, around_call
from tests.support.world import World, describe

ALL = {"flights": 1, "hotels": 1, "cars": 1}
WANTED = {"redo": ALL, "rewind": ALL, "diverge": {"flights": 1, "cars": 1}}
UNDONE = {"redo": 3, "rewind": 2, "diverge": 2}
BODIES = {
    "redo": ("three", []),
    "rewind": ("three_with_savepoint", []),
    "diverge": ("these", ["flights", "cars"]),
}
CLEARED = {"max_tries": 1, "clear_number": 1}
ROUNDS = 8

ASK = {
    "redo": [*around("attach_if_allowed")],
    "rewind": [],
    "diverge": [*around("attach_if_allowed"), *around("stop_if_held"), *around("undo_from_if_stopped")],
}


def undo_deaths(way: str) -> list[Death]:
    times = UNDONE[way]
    return [
        *around("freeze_if_quiet"),
        *around("attach_undo_if_in_order"),
        *around("write_undo", times + 1),
        *around_call("uncall", times),
        *around("settle_if_all_settled"),
    ]


def again_deaths(way: str) -> list[Death]:
    times = {"redo": 3, "rewind": 2, "diverge": 1}[way]
    more = around("savepoint_if_held") if way == "rewind" else ()
    return [
        *around("attach_if_allowed"),
        *around("write_forward", times + 1),
        *around_call("call", times),
        *around("finish_if_held"),
        *more,
    ]


class Way:
    """One cell."""

    def __init__(self, playground: Playground, way: str, where: str, death: Death) -> None:
        self.playground = playground
        self.lab = playground.lab
        self.world = playground.world
        self.way = way
        self.where = where
        self.death: Death | None = death
        self.tries = 1
        self.died = False

    def run(self) -> None:
        self.world.tell("ignore_keys", verb="forward")
        first = "then_fails" if self.way == "diverge" else BODIES[self.way][0]
        kinds = list(ALL) if self.way == "diverge" else []
        self.playground.step(first, "reserve", *kinds).wait()
        if self.way == "rewind":
            RewindVerbs(self.lab.connection).rewind(self.lab.dag_id, "r", "first", actor="ann")
        for _ in range(ROUNDS):
            if self._step().ended == "well":
                break
            self._undo_open()
        self.check()
        self._undo_all()

    def _die(self, where: str, *points: str) -> dict[str, Any]:
        death = self.death
        if death is None or where != self.where or (points and death.at not in points):
            return {}
        if death.landed is False:
            verb = {"call": "forward", "uncall": "undo"}[death.at]
            self.world.tell("drop", verb=verb, skip=self._before(verb) + death.nth - 1, times=1)
        self.death = None
        return {"die": death.scenario()}

    def _before(self, verb: str) -> int:
        return len(self.world.calls()) if verb == "forward" else len(self.world.undo_calls())

    def _step(self) -> Child:
        self.tries += 1
        undone = any(request.state == "SETTLED" for request in self.lab.view().requests)
        body, kinds = BODIES[self.way]
        attempt = {} if self.way == "diverge" else CLEARED
        child = self.playground.step(
            body,
            "reserve",
            *kinds,
            try_number=self.tries,
            attempt=attempt,
            on_divergence="undo",
            **self._die("again" if undone else "ask"),
        ).wait()
        self.died = self.died or child.killed
        return child

    def _undo_open(self) -> None:
        for request in self.lab.view().requests:
            if request.state not in ("REQUESTED", "FROZEN"):
                continue
            for _ in range(3):
                if self._carry_out(request.request_uuid):
                    break

    def _carry_out(self, request: uuid.UUID) -> bool:
        points = {"freeze": ("freeze_if_quiet",), "settle": ("settle_if_all_settled",)}
        others = ("attach_undo_if_in_order", "write_undo", "uncall")
        for do in ("freeze", "undo", "settle"):
            die = self._die("undo", *points.get(do, others))
            child = self.playground.start(do, request_uuid=str(request), task_id="t", **die).wait()
            self.died = self.died or child.killed
            if child.killed or child.ended != "well":
                return False
        return True

    def check(self) -> None:
        """What stands is what the last body wanted; every call once, every undo once."""
        assert self.lab.step_state() == "SUCCEEDED", self.lab.view()
        net = self.world.net()
        assert {kind: number for kind, number in net.kinds.items() if number} == WANTED[self.way]
        rows = {row.key: row for row in self.lab.actions()}
        for kind, keys in net.keys.items():
            for key, books in keys.items():
                assert key in rows, "a call was made that the log does not know"
                assert books["landed"] <= 1, f"two effects of one action: {kind} {books}"
                assert books["most_in_flight"] <= 1, f"two calls of one action at once: {kind} {books}"
                assert books["net"] == (rows[key].state == "DONE"), f"{kind} {books} {rows[key]}"
        current = self.lab.view().steps[0].generation
        assert current == 2
        standing = [row.state for row in rows.values() if row.generation == current and row.residual]
        assert standing == ["DONE"] * len(WANTED[self.way])

    def _undo_all(self) -> None:
        decision = self.lab.ask_undo()
        assert decision.request is not None
        assert self._carry_out(decision.request.request_uuid)
        assert self.lab.saga_state() == "CANCELLED"
        assert self.world.net().total == 0


@pytest.mark.parametrize("way", list(WANTED))
def test_a_saga_that_goes_back_survives_a_death_anywhere(
    nursery: Nursery, database_url: str, travel_world: World, way: str
) -> None:
    cells = [
        *(("ask", death) for death in ASK[way]),
        *(("undo", death) for death in undo_deaths(way)),
        *(("again", death) for death in again_deaths(way)),
    ]

    def one(cell: tuple[str, Death]) -> tuple[str, str | None, bool]:
        where, death = cell
        playground = Playground(nursery, database_url, travel_world.namespace())
        this = Way(playground, way, where, death)
        try:
            this.run()
        except Exception:  # noqa: BLE001 - it is told below, with all others
            ledger = "\n".join(map(describe, playground.world.ledger()))
            told = f"{traceback.format_exc()}\n{playground.lab.states()}\n{playground.lab.whats()}\n{ledger}"
            return f"{where}: {death}", told, this.died
        finally:
            playground.world.reset()
            playground.close()
        return f"{where}: {death}", None, this.died

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        ends = list(pool.map(one, cells))
    wrong = [f"=== {name}\n{problem}" for name, problem, _ in ends if problem is not None]
    assert not wrong, "\n\n".join([f"{len(wrong)} of {len(cells)} cells", *wrong])
    never = [name for name, _, died in ends if not died]
    assert len(never) <= len(cells) // 5, f"nothing died here: {never}"
