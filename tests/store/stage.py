"""One run of one saga in the store, with the world it is held against: what whoever plays it at random can look at."""

from __future__ import annotations

from typing import Any

from airflow_saga.core.records import ActionRow, RequestRow
from airflow_saga.store.reader import SagaView
from tests.store.scene import Scene
from tests.store.world import Call, Process, World


class Stage:
    """``view``: what the last move left."""

    scene: Scene
    world: World
    saga_id: int
    view: SagaView

    def look(self) -> SagaView:
        self.view = self.scene.glance(self.saga_id)
        return self.view

    def _pick(self, things: list[Any], pick: int) -> Any:
        return things[pick % len(things)] if things else None

    def _process(self, pick: int) -> Process:
        """Mostly one that holds its step; now and then one that was fenced and does not know."""
        living = self.world.living()
        holding = [process for process in living if self._holds(process)]
        found: Process = self._pick(holding if holding and pick % 4 else living, pick)
        return found

    def _dropped(self) -> list[tuple[Process, Call]]:
        """Calls that did not take effect, of processes that lost their step and have not said so yet."""
        return [
            (process, call)
            for process, call in self.world.calls()
            if call.landed is False and not call.reported and not self._holds(process)
        ]

    def _row(self, action_id: int) -> ActionRow:
        return self.scene.undos.read_action(action_id)[0]

    def _open_request(self) -> RequestRow | None:
        states = ("HINTED", "HELD", "REQUESTED", "FROZEN")
        return next((row for row in self.view.requests if row.state in states), None)

    def _holds(self, process: Process) -> bool:
        mine = process.step
        return any(step.step_id == mine.step_id and step.fence == mine.fence for step in self.view.steps)

    def _wire(self) -> set[int]:
        return {call.action_id for call in self.world.on_the_wire()}
