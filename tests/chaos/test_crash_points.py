"""A process is killed at every commit boundary and around every call to the world; afterwards the books balance.

Each cell of the matrix is one saga: three calls, a death (in the first attempt, in the attempt that resumes it, in the
undo, or in two of them), and then whatever comes after a death: the next attempt, or the undo. In the end every effect
is undone, or is named by an action that says it still stands, or may. No call was made more often than it may be.

The cells of one test run side by side, since what they do most is wait until nothing can land any more (A1).
"""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.chaos.bodies import KINDS
from tests.chaos.conftest import Playground
from tests.chaos.nursery import Nursery
from tests.support.world import World, describe

SIDE_BY_SIDE = 12

VERIFIES = {
    "answers": "reserve",
    "cannot_tell": "reserve",
    "missing": "reserve_blind",
    "lags": "reserve_in_slow_world",
    "not_needed": "reserve_again",
}
"""What the verify probe does, and the action that has such a one. ``not_needed``: the call may be made again."""
FINDS_OUT = ("answers", "lags")


@dataclass(frozen=True)
class Death:
    """Where a process dies. ``landed``: what the world made of the call that it died around."""

    at: str
    when: str
    nth: int = 1
    landed: bool | None = None

    def __str__(self) -> str:
        landed = {None: "", True: ", landed", False: ", not landed"}[self.landed]
        return f"{self.when} {self.at} {self.nth}{landed}"

    def scenario(self) -> dict[str, Any]:
        return {"at": self.at, "when": self.when, "nth": self.nth}


def around(at: str, times: int = 1) -> Iterator[Death]:
    for nth in range(1, times + 1):
        yield Death(at, "before", nth)
        yield Death(at, "after", nth)


def around_call(at: str, times: int) -> Iterator[Death]:
    for nth in range(1, times + 1):
        yield Death(at, "before", nth)
        yield Death(at, "after", nth, landed=True)
        yield Death(at, "after", nth, landed=False)


FORWARD = [
    *around("attach_if_allowed"),
    *around("write_forward", len(KINDS) + 1),
    *around_call("call", len(KINDS)),
    *around("finish_if_held"),
]
RESUMED = [
    *around("attach_if_allowed"),
    *around("lookup"),
    *around("verified_if_held"),
    *around("retry_if_allowed"),
    *around("write_forward", 2),
    *around_call("call", 1),
    *around("finish_if_held"),
]
UNDO = [
    *around("freeze_if_quiet"),
    *around("attach_undo_if_in_order"),
    *around("write_undo", len(KINDS) + 1),
    *around_call("uncall", len(KINDS)),
    *around("settle_if_all_settled"),
]
UNDO_IN_DOUBT = [*around("lookup"), *around("verified_if_held"), *around("settle_action_if_held")]
IN_THE_CALL = [Death("call", "after", 2, landed=True), Death("call", "after", 2, landed=False)]


class Cell:
    """One saga with its deaths."""

    def __init__(self, playground: Playground, verify: str, deaths: dict[str, Death | None]) -> None:
        self.playground = playground
        self.world = playground.world
        self.verify = verify
        self.deaths = deaths
        self.died: list[str] = []
        self.attempts = 0
        self.undos = 0
        self.given_up = 0
        """Calls that a machine too busy for their deadline made the processes give up: doubts that no death made."""

    def run(self, *, resume: bool) -> None:
        if self.verify == "cannot_tell":
            self.world.tell("unknown")
        if self.verify == "lags":
            self.world.tell("lag", seconds=0.8)
        if self.verify != "not_needed":
            self.world.tell("ignore_keys", verb="forward")
        self._step("forward")
        if resume:
            self._step("resumed")
            for _ in range(2):
                if self.playground.lab.begun() and self.playground.lab.step_state() == "SUCCEEDED":
                    break
                self._step(None)
        self._undo_all()
        self.check()

    def _die(self, name: str | None) -> dict[str, Any]:
        death = self.deaths.get(name or "")
        if death is None:
            return {}
        if death.landed is False:
            self.world.tell(
                "drop", verb={"call": "forward", "uncall": "undo"}[death.at], skip=death.nth - 1, times=1
            )
        return {"die": death.scenario()}

    def _step(self, name: str | None) -> None:
        if name is not None and name != "forward" and self.deaths.get(name) is None:
            return
        self.attempts += 1
        child = self.playground.step(
            "three", VERIFIES[self.verify], try_number=self.attempts, **self._die(name)
        )
        if child.killed and name is not None:
            self.died.append(name)
        self.given_up += child.log.count("; abandoned")

    def _undo_all(self) -> None:
        lab = self.playground.lab
        if not lab.begun():
            return
        decision = lab.ask_undo()
        if decision.request is None:
            assert lab.saga_state() == "CANCELLED", decision
            return
        request = decision.request.request_uuid
        for name in ("undo", "undo again", None):
            if self._undo_once(request, name):
                break
        assert lab.saga_state() in ("CANCELLED", "PARTIALLY_CANCELLED"), lab.view()

    def _undo_once(self, request: uuid.UUID, name: str | None) -> bool:
        """One try of each task of the undo; the first and the second may die. True when it is over."""
        if name is not None and self.deaths.get(name) is None:
            return False
        self.undos += 1
        die = self._die(name)
        at = die.get("die", {}).get("at")
        for do in ("freeze", "undo", "settle"):
            mine = {"freeze_if_quiet": "freeze", "settle_if_all_settled": "settle"}.get(str(at), "undo") == do
            child = self.playground.start(do, request_uuid=str(request), task_id="t", **(die if mine else {}))
            child.wait()
            self.given_up += child.log.count("; abandoned")
            if child.killed:
                assert name is not None, child.log
                self.died.append(name)
                return False
            if do == "freeze" and child.output == "ended":
                return True
            if child.ended != "well":
                assert name is not None, child.log
                return False
        return True

    # -- the books ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        lab = self.playground.lab
        rows = lab.actions() if lab.begun() else []
        net = self.world.net()
        row_of = {row.key: row for row in rows}
        keys = {key: (kind, books) for kind, by_key in net.keys.items() for key, books in by_key.items()}
        residual = {row.key for row in rows if row.residual}
        assert not [row for row in rows if row.state == "PENDING"]
        assert len({row.key for row in rows}) == len(rows)
        assert set(keys) <= {row.key for row in rows}, "a call was made that the log does not know"
        for key, (kind, books) in keys.items():
            where = f"{kind} {books}"
            assert books["landed"] <= 1, f"two effects of one action: {where}"
            assert books["net"] in (0, 1), where
            assert books["net"] == 0 or key in residual, f"stands, and nobody says so: {where}"
            assert books["most_in_flight"] <= 1, f"two calls of one action at once: {where}"
            most = 1 if self.verify in ("missing", "cannot_tell") else self.attempts + 1
            assert books["calls"] <= most, f"called too often: {where}"
            tries = self.undos + row_of[key].undo_failures
            assert books["undo_calls"] <= tries, f"undone too often: {where}"
            assert len(books["undo_keys"]) <= 1, f"one undo, one key: {where}"
        in_doubt = [row for row in rows if row.residual]
        assert {row.state for row in in_doubt} <= {"IN_DOUBT"}, [row.state for row in in_doubt]
        if self.verify in FINDS_OUT and not self.given_up:
            assert not residual, [(row.name, row.state, row.error) for row in in_doubt]
        assert len(residual) <= len(self.died) + self.given_up
        if rows:
            assert lab.saga_state() == ("PARTIALLY_CANCELLED" if residual else "CANCELLED")
        undone = [each["key"] for each in net.undo_order]
        seqs = [row_of[key].seq for key in undone]
        assert seqs == sorted(seqs, reverse=True)


def play(
    nursery: Nursery,
    url: str,
    travel_world: World,
    verify: str,
    cells: list[dict[str, Death | None]],
    *,
    resume: bool,
) -> None:
    """Run the cells side by side; each that goes wrong is told with its ledger."""

    def one(deaths: dict[str, Death | None]) -> tuple[str, str | None, int]:
        name = ", then ".join(f"{part} dies {death}" for part, death in deaths.items() if death is not None)
        playground = Playground(nursery, url, travel_world.namespace())
        cell = Cell(playground, verify, deaths)
        try:
            cell.run(resume=resume)
        except Exception:  # noqa: BLE001 - it is told below, with all others
            lab = playground.lab
            rows = (
                [(row.seq, row.state, row.tries, row.error) for row in lab.actions()] if lab.begun() else []
            )
            ledger = "\n".join(map(describe, playground.world.ledger()))
            return name, f"{traceback.format_exc()}\n{rows}\n{ledger}", len(cell.died)
        finally:
            playground.world.reset()
            playground.close()
        return name, None, len(cell.died)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        told = list(pool.map(one, cells))
    wrong = [f"=== {name}\n{problem}" for name, problem, _ in told if problem is not None]
    assert not wrong, "\n\n".join([f"{len(wrong)} of {len(cells)} cells", *wrong])
    never = [name for name, _, died in told if not died]
    assert len(never) <= len(cells) // 3, f"nothing died here: {never}"


@pytest.mark.parametrize("verify", list(VERIFIES))
def test_a_step_that_dies_anywhere_is_undone(
    nursery: Nursery, database_url: str, travel_world: World, verify: str
) -> None:
    play(nursery, database_url, travel_world, verify, [{"forward": d} for d in FORWARD], resume=False)


@pytest.mark.parametrize("verify", list(VERIFIES))
def test_a_step_that_dies_anywhere_is_resumed_and_then_undone(
    nursery: Nursery, database_url: str, travel_world: World, verify: str
) -> None:
    cells: list[dict[str, Death | None]] = [{"forward": death} for death in FORWARD]
    play(nursery, database_url, travel_world, verify, cells, resume=True)


@pytest.mark.parametrize("verify", list(VERIFIES))
def test_a_step_that_dies_again_while_it_is_resumed_is_undone(
    nursery: Nursery, database_url: str, travel_world: World, verify: str
) -> None:
    cells: list[dict[str, Death | None]] = [
        {"forward": first, "resumed": second} for first in IN_THE_CALL for second in RESUMED
    ]
    play(nursery, database_url, travel_world, verify, cells, resume=True)


def test_an_undo_that_dies_anywhere_goes_on(nursery: Nursery, database_url: str, travel_world: World) -> None:
    play(nursery, database_url, travel_world, "answers", [{"undo": death} for death in UNDO], resume=False)


@pytest.mark.parametrize("verify", list(VERIFIES))
def test_an_undo_of_a_doubt_that_dies_anywhere_goes_on(
    nursery: Nursery, database_url: str, travel_world: World, verify: str
) -> None:
    cells: list[dict[str, Death | None]] = [
        {"forward": first, "undo": death} for first in IN_THE_CALL for death in UNDO_IN_DOUBT
    ]
    play(nursery, database_url, travel_world, verify, cells, resume=False)


def test_an_undo_that_dies_twice_goes_on(nursery: Nursery, database_url: str, travel_world: World) -> None:
    cells: list[dict[str, Death | None]] = [
        {"undo": first, "undo again": second}
        for first in (Death("uncall", "after", 2, landed=True), Death("write_undo", "after", 2))
        for second in UNDO
    ]
    play(nursery, database_url, travel_world, "answers", cells, resume=False)
