"""One test's part of the stage: its trips, each a run of a saga DAG that travels through Airflow, store and world.

A trip is named alike everywhere: the run's id is the trip's id in the world's ledger. So a test asks all three what
became of it, and tells the world how to treat this trip alone. Waits end with a deadline and say what was there.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import psycopg

from airflow_saga.core.errors import UnknownSagaError
from airflow_saga.core.identity import compensation_dag_id, undo_run_id
from airflow_saga.core.records import ActionRow, RequestRow, SagaRow, StepRow
from airflow_saga.store.reader import Reader, SagaView
from tests.support.airflow import RunningAirflow
from tests.support.airflow_api import PATIENCE, NotInTimeError
from tests.support.airflow_logs import readable
from tests.support.processes import TaskProcess
from tests.support.world import Net, Row, View, describe

T = TypeVar("T")

SOON = 90.0
"""Seconds within which whatever needs no clock of ours has happened, on a machine that has much else to do."""
HEARD_AFTER = 6.0
"""Seconds: what is answered sooner Airflow can lose (it notices the end of the asking process late)."""
AIRLINE_PASSWORD = f"planted-{uuid.uuid4().hex}"
"""Of the connection `airline`, which Airflow knows from its environment."""
CLOSED = ("CANCELLED", "PARTIALLY_CANCELLED")


@dataclass(frozen=True)
class Stage:
    """What all share: an Airflow with the wheel in it, and the outside world that its DAGs call."""

    airflow: RunningAirflow
    world: View


@dataclass
class Scene:
    """What a test gets. ``trips`` are those it has made, for the report of its failure."""

    stage: Stage
    name: str
    trips: list[Trip] = field(default_factory=list)

    @property
    def airflow(self) -> RunningAirflow:
        return self.stage.airflow

    @property
    def world(self) -> View:
        return self.stage.world

    def trip(self, dag_id: str) -> Trip:
        """A trip that has not begun, so that the world can be told about it first."""
        trip = Trip(self.airflow, self.world, dag_id, self._run_id())
        self.trips.append(trip)
        return trip

    def close_pool(self, pool: str, slots: int = 0) -> None:
        """A pool without slots: its tasks stay scheduled until it gets some."""
        self.airflow.request("POST", "/pools", {"name": pool, "slots": slots})

    def open_pool(self, pool: str) -> None:
        body = {"pool": pool, "slots": 8, "include_deferred": False}
        self.airflow.request("PATCH", f"/pools/{pool}", body)

    def metadata(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run one statement in Airflow's own database."""
        return metadata(self.airflow, statement, *values)

    def _run_id(self) -> str:
        words = re.sub(r"\W+", "-", self.name.rpartition("::")[2].removeprefix("test_"))[:60].strip("-")
        return f"{words}-{uuid.uuid4().hex[:6]}"

    def report(self) -> Iterator[tuple[str, str]]:
        """Everything about the trips of a test that failed, as (title, text)."""
        for trip in self.trips:
            yield f"trip {trip.dag_id} / {trip.run_id}", trip.story()
            try:
                yield from trip.task_logs()
            except (OSError, psycopg.Error) as problem:
                yield "logs", f"cannot be read: {problem}"


class Trip:
    """One run of a saga DAG, and what undoes it."""

    def __init__(self, airflow: RunningAirflow, world: View, dag_id: str, run_id: str) -> None:
        self.airflow = airflow
        self.world = world
        self.dag_id = dag_id
        self.run_id = run_id
        self.undo_dag_id = compensation_dag_id(dag_id)
        self._store: psycopg.Connection | None = None
        self._asking = threading.Lock()

    def start(self, **script: list[str]) -> Trip:
        """Trigger the run; each step is told what to do by its name."""
        conf = {"trip": {"id": self.run_id, "to": "LIS"}, "do": script}
        self.airflow.trigger(self.dag_id, conf, self.run_id)
        return self

    # -- the world ---------------------------------------------------------------------------------------------------

    def tell(self, do: str, kind: str, **details: Any) -> int:
        """Tell the world how to treat calls of this trip; what is held is held until it is released."""
        if do == "hold":
            details.setdefault("seconds", 600)
        return self.world.tell(do, kind, trip=self.run_id, **details)

    def release(self, kind: str) -> None:
        """Let the calls of a kind that are held go on."""
        for row in self.world.ledger(kind=kind, trip=self.run_id):
            if row["answered_seq"] is None:
                self.world.release(kind, key=row["key"])

    def calls(self, kind: str = "*") -> list[Row]:
        return self.world.calls(kind, trip=self.run_id)

    def undo_calls(self, kind: str = "*") -> list[Row]:
        return self.world.undo_calls(kind, trip=self.run_id)

    def await_calls(self, kind: str, n: int = 1, *, verb: str = "forward") -> list[Row]:
        """Wait until n calls of a kind have come in."""
        return self.world.await_received(kind, n, SOON * PATIENCE, verb=verb, trip=self.run_id)

    @property
    def net(self) -> Net:
        return self.world.net(trip=self.run_id)

    @property
    def undo_order(self) -> list[str]:
        """The kinds whose effects were taken back, in the order in which they were."""
        return [undone["kind"] for undone in self.net.undo_order]

    # -- Airflow -----------------------------------------------------------------------------------------------------

    @property
    def run_state(self) -> str:
        return self.airflow.run_state(self.dag_id, self.run_id)

    def mark_failed(self) -> None:
        """As the button in the UI does."""
        self.airflow.patch_run(self.dag_id, self.run_id, "failed")

    def task(self, task_id: str, map_index: int = -1) -> dict[str, Any]:
        return self.airflow.task_instance(self.dag_id, self.run_id, task_id, map_index)

    def task_state(self, task_id: str, map_index: int = -1) -> str:
        return str(self.task(task_id, map_index)["state"])

    def wait_task(
        self, task_id: str, *states: str, map_index: int = -1, timeout: float = SOON
    ) -> dict[str, Any]:
        return self.airflow.wait_task(self.dag_id, self.run_id, task_id, states, timeout, map_index)

    def wait_run(self, *states: str, timeout: float = SOON) -> str:
        return self.airflow.wait_run(self.dag_id, self.run_id, states or ("success", "failed"), timeout)

    def process(self, task_id: str, map_index: int = -1) -> TaskProcess:
        return self.airflow.task_process(self.dag_id, self.run_id, task_id, map_index)

    def log(self, task_id: str, try_number: int | None = None, map_index: int = -1) -> str:
        return self.airflow.logs(self.dag_id, self.run_id, task_id, try_number, map_index)

    # -- the undo run ------------------------------------------------------------------------------------------------

    @property
    def undo_run_id(self) -> str:
        """Of the newest request."""
        return undo_run_id(self.requests[-1].request_uuid)

    @property
    def undo_run_ids(self) -> list[str]:
        """All runs of the compensation DAG that were triggered for this trip, oldest first."""
        find = "SELECT run_id FROM dag_run WHERE dag_id = %s AND conf->>'run_id' = %s ORDER BY id"
        return [run_id for (run_id,) in metadata(self.airflow, find, self.undo_dag_id, self.run_id)]

    def wait_undo(self, *states: str, timeout: float = SOON) -> str:
        """Wait for the end of the newest request's undo run."""
        return self.airflow.wait_run(
            self.undo_dag_id, self.undo_run_id, states or ("success", "failed"), timeout
        )

    def undo_process(self, task_id: str, map_index: int = -1) -> TaskProcess:
        return self.airflow.task_process(self.undo_dag_id, self.undo_run_id, task_id, map_index)

    def undo_states(self) -> dict[str, str | None]:
        return self.airflow.task_states(self.undo_dag_id, self.undo_run_id)

    def wait_questions(self, n: int) -> list[dict[str, Any]]:
        """Wait until a person is asked n things about this trip, and until Airflow is sure to hear the answers."""

        def look() -> list[dict[str, Any]] | None:
            questions = self.airflow.hitl(self.undo_dag_id, self.undo_run_id)
            asked = [datetime.fromisoformat(question["created_at"]) for question in questions]
            heard = asked and (datetime.now(UTC) - max(asked)).total_seconds() > HEARD_AFTER
            return questions if heard and len(questions) == n else None

        return self.wait(look, SOON, f"a person is asked {n} things")

    def wait_question(self) -> dict[str, Any]:
        """The same for one question."""
        (question,) = self.wait_questions(1)
        return question

    def answer(self, question: dict[str, Any], option: str, note: str | None = None) -> None:
        """Answer in Airflow, as a person does in Required Actions."""
        instance = question["task_instance"]
        self.airflow.answer_hitl(
            instance["dag_id"],
            instance["dag_run_id"],
            instance["task_id"],
            [option],
            {"note": note},
            instance["map_index"],
        )

    # -- the store ---------------------------------------------------------------------------------------------------

    def read(self, ask: Callable[[Reader], T]) -> T:
        """Ask the store; a store that was away is asked anew."""
        assert self.airflow.store_url is not None
        with self._asking:
            if self._store is None or self._store.closed:
                self._store = psycopg.connect(self.airflow.store_url, autocommit=True)
            return ask(Reader(self._store))

    @property
    def saga(self) -> SagaRow | None:
        return self.read(lambda reader: reader.find(self.dag_id, self.run_id))

    @property
    def state(self) -> str:
        saga = self.saga
        return "no saga" if saga is None else saga.state

    @property
    def view(self) -> SagaView:
        return self.read(lambda reader: reader.view(self.dag_id, self.run_id))

    @property
    def requests(self) -> tuple[RequestRow, ...]:
        return self.view.requests

    def actions(self, name: str | None = None) -> list[ActionRow]:
        return [action for action in self.view.actions if name in (None, action.name)]

    def action(self, name: str) -> ActionRow:
        (found,) = self.actions(name)
        return found

    def step(self, task_id: str, map_index: int = -1) -> StepRow:
        return next(
            step for step in self.view.steps if (step.task_id, step.map_index) == (task_id, map_index)
        )

    @property
    def history(self) -> list[str]:
        return [event["what"] for event in self.view.events]

    def wait(self, look: Callable[[], T], timeout: float, what: str) -> T:
        """As Airflow's ``wait_for``; a failure tells the story of the trip."""

        def looked() -> T | None:
            try:
                return look()
            except (UnknownSagaError, psycopg.OperationalError):
                return None

        try:
            return self.airflow.wait_for(looked, timeout, what)  # type: ignore[return-value]
        except NotInTimeError as late:
            raise NotInTimeError(f"{late}\n{self.story()}") from None

    def wait_saga(self, *states: str, timeout: float = SOON) -> SagaView:
        def look() -> SagaView | None:
            return self.view if self.state in states else None

        return self.wait(look, timeout, f"the saga is {' or '.join(states)}")

    def wait_action(self, name: str, *states: str, timeout: float = SOON) -> ActionRow:
        def look() -> ActionRow | None:
            return next((action for action in self.actions(name) if action.state in states), None)

        return self.wait(look, timeout, f"action {name} is {' or '.join(states)}")

    # -- what has to hold at the end ---------------------------------------------------------------------------------

    def must_be_undone(self, *, calls: int | None = None, run: str = "failed") -> SagaView:
        """Wait for the end and check that nothing stands, that nothing was done twice, and that Airflow says so.

        :param calls: how many forward calls the world saw, where it matters; each key once in any case.
        """
        view = self.wait_saga(*CLOSED, timeout=2 * SOON)
        assert view.saga.state == "CANCELLED", self.story()
        self.must_be_net_zero()
        if calls is not None:
            assert len(self.calls()) == calls, self.story()
        assert [request.state for request in view.requests] == ["SETTLED"], self.story()
        assert self.wait_undo() == "success", self.story()
        assert self.undo_run_ids == [self.undo_run_id]
        assert self.wait_run() == run
        return self.view

    def must_be_net_zero(self) -> None:
        net = self.net
        assert net.total == 0, self.story()
        assert net.standing == [], self.story()
        for kind, keys in net.keys.items():
            for key, count in keys.items():
                assert count["calls"] == 1, f"{kind} {key}\n{self.story()}"
                assert count["landed"] == count["undone"], f"{kind} {key}\n{self.story()}"

    def must_be_completed(self, *, calls: int) -> SagaView:
        """Wait for the end and check that each call landed once and that nothing was undone."""
        view = self.wait_saga("COMPLETED", timeout=2 * SOON)
        assert self.wait_run() == "success"
        assert len(self.calls()) == calls, self.story()
        assert self.net.total == calls, self.story()
        assert view.requests == (), self.story()
        assert self.undo_calls() == []
        return view

    # -- telling ------------------------------------------------------------------------------------------------------

    def story(self) -> str:
        """What Airflow, the store and the world know of this trip, for the text of a failure."""
        lines = [f"{self.dag_id} / {self.run_id}"]
        try:
            lines += [f"run: {self.run_state} {self.airflow.task_states(self.dag_id, self.run_id)}"]
            for run_id in self.undo_run_ids:
                state = self.airflow.run_state(self.undo_dag_id, run_id)
                lines.append(f"undo {run_id}: {state} {self.airflow.task_states(self.undo_dag_id, run_id)}")
            lines += self._stored()
        except Exception as problem:  # noqa: BLE001 - what is there is told in any case
            lines.append(f"not told: {problem!r}")
        lines += [describe(row) for row in self.world.ledger(trip=self.run_id)]
        return "\n".join(lines)

    def _stored(self) -> Iterator[str]:
        if self.saga is None:
            yield "no saga in the store"
            return
        view = self.view
        yield f"saga: {view.saga}"
        yield from (f"step {step.label}: {step}" for step in view.steps)
        yield from (
            f"action {row.action_id} {row.name} of step {row.step_id}.{row.generation}.{row.seq}: {row.state} "
            f"doubt={row.in_doubt} tries={row.tries} undo_tries={row.undo_tries} error={row.error} note={row.note}"
            for row in view.actions
        )
        yield from (
            f"request {row.number}: {row.state} {row.cause} by {row.actor}: {row.reason}"
            for row in view.requests
        )
        yield from (
            f"  {event['at']} {event['what']} ({event['actor']}): {event['detail']}" for event in view.events
        )

    def task_logs(self) -> Iterator[tuple[str, str]]:
        """The end of each task's log, of the run and of its undo runs, oldest first."""
        runs = [(self.dag_id, self.run_id), *((self.undo_dag_id, run_id) for run_id in self.undo_run_ids)]
        for dag_id, run_id in runs:
            folder: Path = self.airflow.task_logs / f"dag_id={dag_id}" / f"run_id={run_id}"
            for path in sorted(folder.glob("**/*.log"), key=lambda each: each.stat().st_mtime):
                yield str(path.relative_to(self.airflow.task_logs)), "\n".join(readable(path)[-80:])


def names(rows: Collection[ActionRow]) -> list[str]:
    return [row.name for row in rows]


def metadata(airflow: RunningAirflow, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """Run one statement in Airflow's own database."""
    address = airflow.env["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"].replace("+psycopg2", "")
    with psycopg.connect(address, autocommit=True) as connection:
        cursor = connection.execute(statement.encode(), values)
        return cursor.fetchall() if cursor.description else []
