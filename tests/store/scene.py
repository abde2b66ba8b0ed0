"""One run of a saga DAG, played by hand: the verbs of every part, and short words for the usual sequence of them.

The rows are real and so is Postgres. Only time is ours: :meth:`Scene.time_passes` moves every stored time into the
past, which for the log is the same as waiting, since all of it uses the database's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg.rows import class_row, dict_row

from airflow_saga.core.decide import Go
from airflow_saga.core.identity import action_key
from airflow_saga.core.identity import undo_key as undo_key_of
from airflow_saga.core.records import ActionRow, Attempt, Intent, Outcome, RequestRow, SagaRow, StepRow
from airflow_saga.store.attach import Attached, AttachVerbs
from airflow_saga.store.connect import Address
from airflow_saga.store.freeze import Freeze, FreezeVerbs
from airflow_saga.store.late import LateVerbs
from airflow_saga.store.queries import Q
from airflow_saga.store.reader import Reader, SagaView
from airflow_saga.store.requests import RequestVerbs
from airflow_saga.store.resolve import ResolveVerbs
from airflow_saga.store.runs import RunVerbs
from airflow_saga.store.settle import Settled, SettleVerbs
from airflow_saga.store.steps import StepVerbs, Written
from airflow_saga.store.sweep import SweepVerbs
from airflow_saga.store.undo import EndedTry, NextTry, UndoAttached, UndoVerbs

DAG_ID = "book_trip"
UNDO_RUN = "undo__1"
_TIMES = {
    "saga": ("deadline_at", "created_at", "changed_at"),
    "step": ("lease_until", "attached_at", "changed_at"),
    "action": ("lands_by", "begun_at", "finished_at", "undo_begun_at", "undo_deadline_at", "reconcile_at"),
    "undo_request": ("owner_lease_until", "triggered_at", "deadline_at", "asked_at", "frozen_at"),
}


class Scene:
    """A run, and one connection through which everybody acts on it, one after the other."""

    def __init__(self, url: str, run_id: str = "run_1", dag_id: str = DAG_ID) -> None:
        self.url, self.dag_id, self.run_id = url, dag_id, run_id
        self.connection = Address(url).open()
        self.attaches = AttachVerbs(self.connection)
        self.steps = StepVerbs(self.connection)
        self.requests = RequestVerbs(self.connection)
        self.runs = RunVerbs(self.connection)
        self.resolves = ResolveVerbs(self.connection)
        self.freezes = FreezeVerbs(self.connection)
        self.undos = UndoVerbs(self.connection)
        self.settles = SettleVerbs(self.connection)
        self.lates = LateVerbs(self.connection)
        self.sweeps = SweepVerbs(self.connection)
        self.reader = Reader(self.connection)

    def close(self) -> None:
        self.connection.close()

    def another_run(self, run_id: str) -> Scene:
        return Scene(self.url, run_id, self.dag_id)

    # -- rows -------------------------------------------------------------------------------------------------------

    @property
    def run(self) -> tuple[str, str]:
        return self.dag_id, self.run_id

    @property
    def saga(self) -> SagaRow:
        return self.reader.saga(self.dag_id, self.run_id)

    @property
    def view(self) -> SagaView:
        return self.reader.view(self.dag_id, self.run_id)

    def step(self, task_id: str = "flight", map_index: int = -1) -> StepRow:
        found = self.reader.step(self.saga.saga_id, task_id, map_index)
        assert found is not None
        return found

    def action(self, seq: int = 1, task_id: str = "flight", generation: int | None = None) -> ActionRow:
        step = self.step(task_id)
        wanted = (step.step_id, generation or step.generation, seq)
        return next(a for a in self.view.actions if (a.step_id, a.generation, a.seq) == wanted)

    def glance(self, saga_id: int) -> SagaView:
        """The view without its history, in one round trip; for who looks often and is alone."""
        key = {"saga_id": saga_id}
        wanted = (
            (SagaRow, Q.saga_by_id),
            (StepRow, Q.steps_of_saga),
            (ActionRow, Q.all_actions_of_saga),
            (RequestRow, Q.requests_of_saga),
        )
        with self.connection.pipeline():
            cursors = [
                self.connection.cursor(row_factory=class_row(kind)).execute(statement, key)
                for kind, statement in wanted
            ]
            (saga,), steps, actions, requests = (cursor.fetchall() for cursor in cursors)
        return SagaView(saga, tuple(steps), tuple(actions), tuple(requests), ())  # type: ignore[arg-type]

    def states(self, task_id: str = "flight") -> dict[int, str]:
        step = self.step(task_id)
        rows = [a for a in self.view.actions if (a.step_id, a.generation) == (step.step_id, step.generation)]
        return {row.seq: row.state for row in sorted(rows, key=lambda row: row.seq)}

    @property
    def request(self) -> RequestRow:
        """The newest undo request."""
        return self.view.requests[-1]

    @property
    def history(self) -> list[str]:
        return [event["what"] for event in self.view.events]

    def sql(self, statement: str, params: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        with self.connection.cursor(row_factory=dict_row) as cursor:
            cursor.execute(statement.encode(), params)
            return cursor.fetchall() if cursor.description else []

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Every row of every table, to see that a refused verb left nothing behind."""
        names = ("saga", "step", "action", "undo_request", "undo_scope", "event")
        return {name: self.sql(f"SELECT * FROM airflow_saga.{name} ORDER BY 1, 2") for name in names}

    def time_passes(self, seconds: float) -> None:
        """As if nothing had happened for this long: every time that is stored is that much longer ago."""
        for table, columns in _TIMES.items():
            moved = ", ".join(f"{column} = {column} - %(by)s * interval '1 second'" for column in columns)
            self.sql(f"UPDATE airflow_saga.{table} SET {moved}", {"by": seconds})

    # -- forward ----------------------------------------------------------------------------------------------------

    def attempt(self, task_id: str = "flight", *, after: Iterable[str] = (), **more: Any) -> Attempt:
        given: dict[str, Any] = {
            "map_index": -1,
            "ti_id": uuid4(),
            "try_number": 1,
            "max_tries": 0,
            "retries": 0,
            "clear_number": 0,
            "host": "worker-1",
            "pid": 4711,
        }
        return Attempt(self.dag_id, self.run_id, task_id, ancestors=tuple(after), **{**given, **more})

    def try_attach(self, task_id: str = "flight", **more: Any) -> Attached:
        return self.attaches.attach_if_allowed(self.attempt(task_id, **more))

    def attach(self, task_id: str = "flight", **more: Any) -> StepRow:
        """Attach, and insist that the step may go on."""
        attached = self.try_attach(task_id, **more)
        assert attached.decision.go in (Go.START, Go.RESUME, Go.ANEW), attached.decision
        assert attached.step is not None
        return attached.step

    def intent(self, step: StepRow, seq: int = 1, **more: Any) -> Intent:
        key = action_key(UUID(int=step.saga_id), step.task_id, step.map_index, step.generation, seq)
        given: dict[str, Any] = {
            "name": "book",
            "version": 1,
            "effect": "COMPENSABLE",
            "fingerprint": f"fp{seq}",
            "params": "{}",
            "timeout_seconds": 10.0,
            "settle_after_seconds": 0.0,
        }
        return Intent(seq=seq, key=key, **{**given, **more})

    def begin(self, step: StepRow, seq: int = 1, **more: Any) -> bool:
        return seq in self.write(step, begin=[self.intent(step, seq, **more)]).begun

    def write(
        self,
        step: StepRow,
        *,
        ended: Iterable[Outcome] = (),
        begin: Iterable[Intent] = (),
        read: Iterable[tuple[Intent, Outcome]] = (),
    ) -> Written:
        return self.steps.write_forward(step, list(ended), list(begin), list(read))

    def end(self, step: StepRow, seq: int = 1, state: str = "DONE", **more: Any) -> bool:
        given: dict[str, Any] = {"result": f'"r{seq}"' if state == "DONE" else None}
        return seq in self.write(step, ended=[Outcome(seq, state, **{**given, **more})]).ended

    def read(self, step: StepRow, seq: int = 1, state: str = "DONE") -> bool:
        intent = self.intent(step, seq, name="search", effect="READ_ONLY")
        return seq in self.write(step, read=[(intent, Outcome(seq, state))]).begun

    def act(self, step: StepRow, *seqs: int, **more: Any) -> StepRow:
        """Calls that begin and are DONE."""
        for seq in seqs:
            assert self.begin(step, seq, **more)
            assert self.end(step, seq)
        return step

    def finish(self, step: StepRow, output: str | None = None) -> StepRow:
        assert self.steps.finish_if_held(step, output, False)
        return step

    def ran(self, task_id: str = "flight", *seqs: int, **more: Any) -> StepRow:
        """A step that attached, acted and finished."""
        return self.finish(self.act(self.attach(task_id, **more), *(seqs or (1,))))

    def stopped(self, task_id: str = "flight", *seqs: int, **more: Any) -> StepRow:
        """A step that attached, acted and ended without finishing."""
        step = self.act(self.attach(task_id, **more), *seqs)
        assert self.steps.stop_if_held(step)
        return step

    # -- decisions and the undo -------------------------------------------------------------------------------------

    def cancel(self, **more: Any) -> RequestRow:
        return self._asked(self.requests.cancel(*self.run, **{"actor": "ann", **more}).request)

    def ask(self, **more: Any) -> RequestRow:
        """A person asks for the undo, whatever state the saga is in."""
        return self._asked(self.requests.undo(*self.run, **{"actor": "ann", **more}).request)

    def hint(self, **more: Any) -> RequestRow:
        return self._asked(self.runs.fail_and_hint(*self.run, **{"cause": "failure", **more}).request)

    def redo(self, step: StepRow, others: Iterable[str] = (), **more: Any) -> RequestRow:
        """The task of a finished step is cleared, and its new attempt asks for the redo."""
        cleared = {"max_tries": step.max_tries + 1, "try_number": step.try_number + 1, "clear_number": 1}
        attached = self.try_attach(
            step.task_id, after=step.ancestors, others_cleared=frozenset(others), **cleared | more
        )
        assert attached.decision.go is Go.WAIT, attached.decision
        return self._asked(attached.request)

    def _asked(self, request: RequestRow | None) -> RequestRow:
        assert request is not None
        return request

    def freeze(self, request: RequestRow | None = None, owner: str = UNDO_RUN) -> RequestRow:
        frozen = self.freezes.freeze_if_quiet((request or self.request).request_uuid, owner)
        assert frozen.outcome is Freeze.FROZEN, frozen
        return frozen.request

    def frozen_undo(self, *seqs: int) -> RequestRow:
        """A step that stopped after these calls, cancelled, and its undo frozen."""
        self.stopped("flight", *(seqs or (1, 2)))
        return self.freeze(self.cancel())

    def undo_of(
        self, task_id: str = "flight", request: RequestRow | None = None, owner: str = UNDO_RUN
    ) -> UndoAttached:
        """An undo attempt that has taken this step."""
        attached = self.undos.attach_undo_if_in_order(
            (request or self.request).request_uuid,
            task_id,
            -1,
            owner,
            lease_seconds=15,
            host="worker-2",
            pid=99,
        )
        assert attached is not None
        return attached

    def next_try(self, action: ActionRow, **more: Any) -> NextTry:
        given = {"undo_deadline_seconds": 86_400.0}
        return NextTry(
            action.action_id,
            undo_key_of(UUID(int=action.saga_id), action.key, action.reopened),
            **{**given, **more},
        )

    def compensate(
        self, attached: UndoAttached, action: ActionRow, state: str = "COMPENSATED", **more: Any
    ) -> None:
        """One try of one compensation, begun and ended."""
        assert self.undos.write_undo(attached, None, self.next_try(action))[1] is not None
        assert self.undos.write_undo(attached, EndedTry(action.action_id, state, **more), None)[0]

    def undo_step(
        self, task_id: str = "flight", request: RequestRow | None = None, owner: str = UNDO_RUN
    ) -> None:
        """Compensate all that is open in a step."""
        attached = self.undo_of(task_id, request, owner)
        for action in attached.open_actions:
            self.compensate(attached, action)

    def settle(self, request: RequestRow | None = None, owner: str = UNDO_RUN) -> Settled | None:
        return self.settles.settle_if_all_settled((request or self.request).request_uuid, owner)

    def undone(self, *task_ids: str, request: RequestRow | None = None) -> Settled:
        """Freeze, compensate each of these steps in this order, settle."""
        self.freeze(request)
        for task_id in task_ids:
            self.undo_step(task_id, request)
        settled = self.settle(request)
        assert settled is not None
        return settled


def connect(url: str) -> psycopg.Connection:
    """A plain connection, as `psql` would have one."""
    return psycopg.connect(url, autocommit=True)
