"""A laboratory: one database, one world, and the runtime driven as Airflow's tasks drive it, without Airflow.

``Lab.step`` is a try of a task, ``Lab.undo`` a whole compensation run, ``Lab.reconcile`` a pass of the reconciler.
What Airflow would say is kept in plain fields (``TaskPlace``, ``RunPlace``).
"""

from __future__ import annotations

import signal
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg

from airflow_saga.core.errors import SagaError, UndoFencedError
from airflow_saga.core.marks import FailedRun
from airflow_saga.core.plan import undo_order
from airflow_saga.core.records import ActionRow, Attempt, StepRow
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.reconcile import PassReport, Reconciler
from airflow_saga.runtime.saga import Saga
from airflow_saga.runtime.secrecy import KnownSecrets
from airflow_saga.runtime.step import StepResult, StepRun
from airflow_saga.runtime.undo import StepUndo, UndoReport
from airflow_saga.store.connect import Address
from airflow_saga.store.decision import Decision
from airflow_saga.store.freeze import Freeze, FreezeVerbs
from airflow_saga.store.reader import Reader, SagaView
from airflow_saga.store.requests import RequestVerbs
from airflow_saga.store.resolve import ResolveVerbs
from airflow_saga.store.runs import RunVerbs
from airflow_saga.store.settle import Settled, SettleVerbs
from airflow_saga.store.undo import UndoVerbs
from tests.support.world import View

LIMITS = Limits(
    lease_seconds=2.0,
    heartbeat_seconds=0.2,
    stop_grace_seconds=1.0,
    abandon_grace_seconds=1.0,
    wait_in_process_seconds=2.0,
    store_outage_seconds=5.0,
)
Body = Callable[[Saga], Any]


@dataclass
class TaskPlace:
    """What Airflow says of one task instance."""

    task: str | None = "running"
    run: str | None = "running"
    triggered: list[uuid.UUID] = field(default_factory=list)

    def task_state(self) -> str | None:
        return self.task

    def run_state(self) -> str | None:
        return self.run

    def trigger_undo(self, request_uuid: uuid.UUID) -> None:
        self.triggered.append(request_uuid)


@dataclass
class RunPlace:
    """What Airflow says of any run; ``runs`` and ``tasks`` say it for one, by run id and (run id, task id)."""

    run: str | None = "running"
    task: str | None = "failed"
    runs: dict[str, str | None] = field(default_factory=dict)
    tasks: dict[tuple[str, str], str | None] = field(default_factory=dict)
    clear_number: int = 0
    triggered: list[uuid.UUID] = field(default_factory=list)
    ended: FailedRun = field(default_factory=lambda: FailedRun(None, over_seconds=3600))

    def run_state(self, dag_id: str, run_id: str) -> str | None:
        return self.runs.get(run_id, self.run)

    def run_clear_number(self, dag_id: str, run_id: str) -> int:
        return self.clear_number

    def failed_run(self, dag_id: str, run_id: str) -> FailedRun:
        return self.ended

    def task_state(self, dag_id: str, run_id: str, task_id: str, map_index: int) -> str | None:
        return self.tasks.get((run_id, task_id), self.task)

    def trigger_undo(self, dag_id: str, run_id: str, request_uuid: uuid.UUID, *, reset: bool) -> bool:
        self.triggered.append(request_uuid)
        return True


class Running:
    """A step or an undo on a thread of its own; ``result()`` gives what it came to, or raises it."""

    def __init__(self, what: Callable[[], Any]) -> None:
        self._what = what
        self._result: Any = None
        self.problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._what()
        except BaseException as problem:  # noqa: BLE001 - it is raised again where it is asked for
            self.problem = problem

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float = 20.0) -> BaseException | None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"still running after {seconds} s"
        return self.problem

    def result(self, seconds: float = 20.0) -> Any:
        if (problem := self.wait(seconds)) is not None:
            raise problem
        return self._result


class Lab:
    """See the module. The connection of the lab itself is ``connection``; steps and undos open their own."""

    def __init__(self, url: str, world: View, dag_id: str = "trip") -> None:
        self.url = url
        self.dag_id = dag_id
        self.address = Address(url)
        self.world = world
        self.known_secrets: list[str] = []
        self.secrets = KnownSecrets(lambda: self.known_secrets)
        self.connection = self.address.open()
        self.last_run: StepRun | None = None
        self.last_undo: StepUndo | None = None

    def close(self) -> None:
        self.connection.close()

    # -- forward ------------------------------------------------------------------------------------------------

    def attempt(self, run: str = "r", task: str = "t", try_number: int = 1, **more: Any) -> Attempt:
        known: dict[str, Any] = {
            "dag_id": self.dag_id,
            "run_id": run,
            "task_id": task,
            "map_index": -1,
            "ti_id": uuid.uuid4(),
            "try_number": try_number,
            "max_tries": 0,
            "retries": 0,
            "clear_number": 0,
            "host": "here",
            "pid": 1,
        }
        return Attempt(**{**known, **more})

    def step_run(
        self,
        run: str = "r",
        task: str = "t",
        *,
        place: TaskPlace | None = None,
        limits: Limits = LIMITS,
        address: Address | None = None,
        on_divergence: str = "stop",
        **attempt: Any,
    ) -> StepRun:
        made = StepRun(
            self.attempt(run, task, **attempt),
            address or self.address,
            place or TaskPlace(),
            limits,
            self.secrets,
            on_divergence=on_divergence,
        )
        self.last_run = made
        return made

    def step(self, body: Body, run: str = "r", task: str = "t", **more: Any) -> StepResult:
        """One try of a task, on this thread."""
        return self.step_run(run, task, **more).run(body)

    def start(self, body: Body, run: str = "r", task: str = "t", **more: Any) -> Running:
        """One try of a task, on a thread of its own."""
        made = self.step_run(run, task, **more)
        return Running(lambda: made.run(body))

    def fails(
        self,
        body: Body,
        expected: type[BaseException] | tuple[type[BaseException], ...],
        run: str = "r",
        **more: Any,
    ) -> BaseException:
        try:
            self.step(body, run, **more)
        except expected as problem:
            return problem
        raise AssertionError(f"the step ended well instead of raising {expected}")

    # -- deciding -----------------------------------------------------------------------------------------------

    @property
    def requests(self) -> RequestVerbs:
        return RequestVerbs(self.connection)

    @property
    def runs(self) -> RunVerbs:
        return RunVerbs(self.connection)

    @property
    def resolves(self) -> ResolveVerbs:
        return ResolveVerbs(self.connection)

    @property
    def undo_verbs(self) -> UndoVerbs:
        return UndoVerbs(self.connection)

    @property
    def freezes(self) -> FreezeVerbs:
        return FreezeVerbs(self.connection)

    @property
    def settles(self) -> SettleVerbs:
        return SettleVerbs(self.connection)

    @property
    def reader(self) -> Reader:
        return Reader(self.connection)

    def cancel(self, run: str = "r", **how: Any) -> Decision:
        return self.requests.cancel(self.dag_id, run, actor="ann", reason="wrong trip", **how)

    def ask_undo(self, run: str = "r", **how: Any) -> Decision:
        return self.requests.undo(self.dag_id, run, actor="ann", reason="wrong trip", **how)

    # -- undo ---------------------------------------------------------------------------------------------------

    def undo(self, run: str = "r", **how: Any) -> Settled:
        """Ask for the undo of a run and carry it out."""
        decision = self.ask_undo(run)
        assert decision.request is not None, decision.message
        return self.carry_out(decision.request.request_uuid, **how)

    def carry_out(self, request_uuid: uuid.UUID, owner: str = "undo1", **how: Any) -> Settled:
        """What the tasks of one compensation run do: plan, undo each step in reverse, settle."""
        self.freeze(request_uuid, owner)
        for step in self.steps_to_undo(request_uuid):
            self.undo_step(request_uuid, step.task_id, owner, map_index=step.map_index, **how)
        settled = self.settles.settle_if_all_settled(request_uuid, owner)
        assert settled is not None, "not everything is settled"
        return settled

    def freeze(
        self, request_uuid: uuid.UUID, owner: str = "undo1", seconds: float = 20.0, **how: Any
    ) -> None:
        deadline = time.monotonic() + seconds
        while True:
            frozen = self.freezes.freeze_if_quiet(request_uuid, owner, **how)
            if frozen.outcome is Freeze.FROZEN:
                return
            assert frozen.outcome is Freeze.NOT_QUIET, frozen
            assert time.monotonic() < deadline, frozen.message
            time.sleep(0.02)

    def steps_to_undo(self, request_uuid: uuid.UUID) -> list[StepRow]:
        request = self.reader.request(request_uuid)
        assert request is not None
        return undo_order(step for step in self.reader.steps(request.saga_id) if step.state == "UNDOING")

    def step_undo(
        self,
        request_uuid: uuid.UUID,
        task: str = "t",
        owner: str = "undo1",
        *,
        map_index: int = -1,
        limits: Limits = LIMITS,
        address: Address | None = None,
        **more: Any,
    ) -> StepUndo:
        made = StepUndo(
            address or self.address, request_uuid, owner, task, map_index, limits, self.secrets, **more
        )
        self.last_undo = made
        return made

    def undo_step(
        self, request_uuid: uuid.UUID, task: str = "t", owner: str = "undo1", tries: int = 3, **more: Any
    ) -> UndoReport:
        """The task ``undo.<task>``, with Airflow's retries."""
        while True:
            tries -= 1
            try:
                return self.step_undo(request_uuid, task, owner, **more).run()
            except UndoFencedError:
                raise
            except SagaError:
                if tries == 0:
                    raise

    # -- the reconciler -----------------------------------------------------------------------------------------

    def reconcile(self, place: RunPlace | None = None, limits: Limits = LIMITS) -> PassReport:
        return Reconciler(self.connection, place or RunPlace(), limits).run_once()

    # -- looking ------------------------------------------------------------------------------------------------

    def view(self, run: str = "r") -> SagaView:
        return self.reader.view(self.dag_id, run)

    def actions(self, run: str = "r") -> list[ActionRow]:
        return list(self.view(run).actions)

    def states(self, run: str = "r") -> list[tuple[str, str]]:
        """Name and state of each action, in order."""
        return [(row.name, row.state) for row in self.actions(run)]

    def undone_kinds(self) -> list[str]:
        """What the world was asked to take back, in that order."""
        return [each["kind"] for each in self.world.net().undo_order]

    def begun(self, run: str = "r") -> bool:
        return self.reader.find(self.dag_id, run) is not None

    def saga_state(self, run: str = "r") -> str:
        return self.reader.saga(self.dag_id, run).state

    def step_state(self, run: str = "r", task: str = "t") -> str:
        return next(step.state for step in self.view(run).steps if step.task_id == task)

    def whats(self, run: str = "r") -> list[str]:
        """What its history says, one word each."""
        return [str(event["what"]) for event in self.view(run).events]

    def sessions(self, **wanted: str) -> list[dict[str, Any]]:
        """The product's sessions on this database, as the server sees them, without the lab's own."""
        mine = self.connection.info.backend_pid
        with psycopg.connect(self.url, autocommit=True) as other:
            rows = other.execute(
                "SELECT pid, state, query FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name = 'airflow_saga' AND pid <> %s",
                (mine,),
            ).fetchall()
        named = [dict(zip(("pid", "state", "query"), row, strict=True)) for row in rows]
        return [row for row in named if all(row[name] == value for name, value in wanted.items())]


class Alarm:
    """Raises something in the main thread after a while, wherever it is then, as Airflow's execution_timeout does.

    Python ignores what is raised while it collects garbage: ``check`` raises it then.
    """

    def __init__(self, problem: type[BaseException]) -> None:
        self._problem = problem
        self._rang = False
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Alarm:
        self._old = signal.signal(signal.SIGUSR1, self._ring)
        return self

    def __exit__(self, *_: object) -> None:
        self.off()
        signal.signal(signal.SIGUSR1, self._old)

    def _ring(self, signum: int, frame: object) -> None:
        self._rang = True
        raise self._problem

    def after(self, seconds: float) -> None:
        self._rang = False
        main = threading.main_thread().ident
        assert main is not None
        self._timer = threading.Timer(seconds, lambda: signal.pthread_kill(main, signal.SIGUSR1))
        self._timer.start()

    def check(self) -> None:
        if self._rang:
            raise self._problem

    def off(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 15.0) -> Any:
    """Poll a condition until it is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.01)
    return value
