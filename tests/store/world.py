"""The outside world and the processes of one run, for the stateful test: who called what, and what really happened.

The log may be wrong about the world only in ways that PROTOCOL allows; this is the truth that it is held against. A
call that has begun lands, or is dropped, at the latest when A1 says so; only :class:`Call` objects know which.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from airflow_saga.core.records import ActionRow, StepRow
from airflow_saga.store.undo import UndoAttached

TASKS: dict[str, tuple[str, ...]] = {"flight": (), "hotel": ("flight",), "car": ()}
BACKWARDS = ("hotel", "flight", "car")


@dataclass(eq=False)
class Call:
    """One attempt of one action. ``landed`` None: it is on the wire."""

    action_id: int
    seq: int
    tries: int
    landed: bool | None = None
    reported: bool = False


@dataclass(eq=False)
class Process:
    """One attempt of a step. It goes on until it ends or is killed, whatever the log thinks of it."""

    task_id: str
    step: StepRow
    next_seq: int
    calls: list[Call] = field(default_factory=list)
    alive: bool = True

    def die(self) -> None:
        """Its calls may still land; it answers no more."""
        self.alive = False
        for call in self.calls:
            call.reported = True

    @property
    def open_call(self) -> Call | None:
        return next((call for call in self.calls if not call.reported), None)


@dataclass(eq=False)
class UndoProcess:
    """One attempt to undo a step. ``trying``: the action whose compensation is called now."""

    attached: UndoAttached
    trying: ActionRow | None = None


@dataclass
class TaskInstance:
    """What Airflow knows of a task: each start is a new try, a clear raises ``max_tries``."""

    try_number: int = 0
    max_tries: int = 0


class World:
    """Effects that stand, and the processes and calls that may still change them."""

    def __init__(self) -> None:
        self.standing: dict[int, int] = {}
        self.undone: set[int] = set()
        """Actions whose compensation was confirmed; it is not called again unless they were reopened."""
        self.processes: list[Process] = []
        self.undos: list[UndoProcess] = []
        self.tasks = {task_id: TaskInstance() for task_id in TASKS}
        self.clear_number = 0
        self.cleared: set[str] = set()
        self.fences: dict[int, int] = {}

    def attempt(self, task_id: str) -> dict[str, Any]:
        """What the next try of this task says about itself."""
        ti = self.tasks[task_id]
        ti.try_number += 1
        return {
            "after": TASKS[task_id],
            "ti_id": uuid4(),
            "try_number": ti.try_number,
            "max_tries": ti.max_tries,
            "clear_number": self.clear_number,
            "others_cleared": frozenset(self.cleared),
        }

    def clear(self, task_ids: set[str]) -> None:
        self.clear_number += 1
        for task_id in task_ids:
            if self.tasks[task_id].try_number:
                self.tasks[task_id].max_tries += 1
                self.cleared.add(task_id)

    def living(self) -> list[Process]:
        return [process for process in self.processes if process.alive]

    def calls(self) -> list[tuple[Process, Call]]:
        return [(process, call) for process in self.processes for call in process.calls]

    def on_the_wire(self) -> list[Call]:
        return [call for _, call in self.calls() if call.landed is None]

    def land(self, call: Call) -> None:
        call.landed = True
        self.standing[call.action_id] = self.standing.get(call.action_id, 0) + 1

    def compensate(self, action_id: int) -> None:
        """Compensations are idempotent, and safe where there is nothing to undo."""
        self.standing[action_id] = 0

    def stands(self, action_id: int) -> bool:
        return self.standing.get(action_id, 0) > 0
