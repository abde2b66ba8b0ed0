"""An agent is killed around each request to its model and each call of a tool, and then run again.

Afterwards each effect is there once, no tool was called again under another key, the model was not asked again for an
answer that was in the log when the process died, and the conversation ends as it would have.
"""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.chaos import agents
from tests.chaos.conftest import Playground
from tests.chaos.nursery import Nursery
from tests.support.model import ModelView, calls, running_model, says
from tests.support.world import World, describe

assert agents.capability, "the undo finds what the children called only where it is declared too"

SIDE_BY_SIDE = 8
SCRIPT = (
    calls(("agent_looks", {"city": "LIS"}), text="I look around."),
    calls(("agent_flies", {"to": "LIS"}), ("agent_sleeps", {"at": "Ritz"})),
    calls(("agent_drives", {"car": "Twingo"})),
    says("all is booked"),
)
EFFECTS = {"flights": 1, "hotels": 1, "cars": 1}


def deaths() -> Iterator[dict[str, Any]]:
    for nth in range(1, len(SCRIPT) + 1):
        yield {"at": "ask", "when": "before", "nth": nth}
        yield {"at": "ask", "when": "after", "nth": nth}
    for nth in range(1, len(EFFECTS) + 1):
        yield {"at": "call", "when": "before", "nth": nth}
        yield {"at": "call", "when": "after", "nth": nth}
        yield {"at": "call", "when": "after", "nth": nth, "dropped": True}
    for nth in range(1, 7):
        yield {"at": "write_forward", "when": "before", "nth": nth}
        yield {"at": "write_forward", "when": "after", "nth": nth}
    yield {"at": "finish_if_held", "when": "before"}
    yield {"at": "finish_if_held", "when": "after"}


class Cell:
    """One conversation with one death."""

    def __init__(self, playground: Playground, model: ModelView, death: dict[str, Any]) -> None:
        self.playground = playground
        self.model = model
        self.death = death

    def run(self) -> None:
        self.model.script(*SCRIPT)
        if self.death.get("dropped"):
            self.playground.world.tell("drop", verb="forward", skip=self.death["nth"] - 1, times=1)
        died = self._converse(1, die=self.death)
        known = self._answers_in_the_log()
        asked = self.model.asked
        for try_number in (2, 3):
            if not died.killed and try_number == 2:
                assert died.output == "all is booked"
                break
            again = self._converse(try_number)
            if again.said["ended"] == "well":
                assert again.output == "all is booked"
                break
        self._check(known, asked)

    def _converse(self, try_number: int, **more: Any) -> Any:
        args = (self.model.url, self.model.model)
        return self.playground.step("converse", *args, try_number=try_number, **more).wait()

    def _answers_in_the_log(self) -> int:
        if not self.playground.lab.begun():
            return 0
        return sum(
            row.name == "model_request" and row.state == "DONE" for row in self.playground.lab.actions()
        )

    def _check(self, known: int, asked: int) -> None:
        lab, net = self.playground.lab, self.playground.world.net()
        assert net.kinds == EFFECTS, net.kinds
        for kind, keys in net.keys.items():
            assert len(keys) == 1, f"{kind} was called under {len(keys)} keys"
            (books,) = keys.values()
            assert books["landed"] == 1, books
            assert books["calls"] <= (2 if self.death.get("dropped") or self.death["at"] == "call" else 1), (
                books
            )
        again = [row["turn"] for row in self.model.requests[asked:]]
        assert all(turn >= known for turn in again), f"asked again for {again}, the log had {known} answers"
        assert lab.saga_state() in ("RUNNING", "COMPLETED")
        assert lab.step_state() == "SUCCEEDED"
        self._undo()
        assert self.playground.world.net().total == 0

    def _undo(self) -> None:
        request = str(self.playground.ask_undo())
        for do in ("freeze", "undo", "settle"):
            child = self.playground.start(do, request_uuid=request, task_id="t").wait()
            assert child.said["ended"] == "well", child.log


@pytest.fixture(scope="module")
def model_url() -> Iterator[str]:
    with running_model() as url:
        yield url


@pytest.mark.timeout(400)
def test_c67_an_agent_killed_anywhere_ends_its_conversation_and_does_nothing_twice(
    nursery: Nursery, shared_database_url: str, travel_world: World, model_url: str
) -> None:
    def one(death: dict[str, Any]) -> str | None:
        world = travel_world.namespace(uuid.uuid4().hex)
        playground = Playground(nursery, shared_database_url, world)
        cell = Cell(playground, ModelView(model_url, uuid.uuid4().hex), death)
        try:
            cell.run()
        except Exception:  # noqa: BLE001 - told together with those of the other cells
            rows = "\n".join(map(str, playground.lab.actions() if playground.lab.begun() else []))
            ledger = "\n".join(map(describe, world.ledger()))
            return f"{death}\n{traceback.format_exc()}\n{rows}\n{ledger}\n{cell.model.requests}"
        finally:
            playground.close()
        return None

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        problems = [each for each in pool.map(one, deaths()) if each]
    assert not problems, f"{len(problems)} cells:\n" + "\n\n".join(problems[:3])
