"""Verbs of an attempt to undo a step: take it, compensate action by action, settle each. See PROTOCOL 6.

Everything rests on the frozen plan and on fences: a second undo, a killed one, a late one may all try to write, only
the newest attempt of a step may.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg

from airflow_saga.core.errors import UndoFencedError, UndoOutOfOrderError
from airflow_saga.core.plan import comes_after
from airflow_saga.core.records import ActionRow, RequestRow, SagaRow, StepRow
from airflow_saga.core.states import ActionState, RequestState, StepState
from airflow_saga.store import signals
from airflow_saga.store.connect import retried
from airflow_saga.store.prepared import Prepared
from airflow_saga.store.queries import Q
from airflow_saga.store.rows import dicts, first, many, one
from airflow_saga.store.scope import lock_request, lock_steps_in_scope


@dataclass(frozen=True)
class UndoAttached:
    """:ivar open_actions: what is to be settled, in the order of the undo."""

    saga: SagaRow
    request: RequestRow
    step: StepRow
    later_step_ids: tuple[int, ...]
    open_actions: tuple[ActionRow, ...]


@dataclass(frozen=True)
class EndedTry:
    """How one try of a compensation ended; rides in the commit that begins the next one."""

    action_id: int
    state: str
    error: str | None = None
    failed: bool = False
    reconcile_seconds: float | None = None
    waiting_for: str | None = None
    later_token: str | None = None

    @property
    def settles(self) -> bool:
        """The action is settled by it, so that the ones before it may be undone (P5)."""
        return self.state != ActionState.COMPENSATING or self.reconcile_seconds is not None


@dataclass(frozen=True)
class NextTry:
    """A compensation that is about to begin."""

    action_id: int
    undo_key: str
    undo_deadline_seconds: float


_WRITE_UNDO = Prepared("saga_write_undo", Q.write_undo)
_UNDOING = StepState.UNDOING.encode()


class UndoVerbs:
    """One verb, one transaction. The connection is in autocommit and belongs to one thread."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    @retried
    def attach_undo_if_in_order(
        self,
        request_uuid: UUID,
        task_id: str,
        map_index: int,
        owner_run_id: str,
        *,
        lease_seconds: float,
        host: str,
        pid: int,
    ) -> UndoAttached | None:
        """Take a seized step for this undo attempt (fence + 1); None if the request has nothing to do with it.

        :raises UndoOutOfOrderError: a later step still has unsettled actions (P5).
        :raises UndoFencedError: another undo run owns the request, or it has ended.
        """
        with self.connection.transaction():
            saga, request = lock_request(self.connection, request_uuid)
            if request.state != RequestState.FROZEN or request.owner_run_id != owner_run_id:
                raise UndoFencedError(
                    f"undo {request.number} of {saga.dag_id} / {saga.run_id} is {request.state} and carried out by "
                    f"{request.owner_run_id or 'nobody'}; {owner_run_id} called nothing"
                )
            steps = lock_steps_in_scope(self.connection, saga, request)
            step = next((s for s in steps if (s.task_id, s.map_index) == (task_id, map_index)), None)
            if step is None or step.state != StepState.UNDOING:
                return None
            later = [other.step_id for other in steps if comes_after(other, step)]
            open_later = dicts(self.connection, Q.unsettled_of_steps, {"step_ids": later}) if later else []
            if open_later:
                names = ", ".join(f"{row['name']} of {row['task_id']}" for row in open_later[:5])
                raise UndoOutOfOrderError(
                    f"{step.label} of {saga.dag_id} / {saga.run_id} may be undone only after: {names}. "
                    f"Nothing was called."
                )
            values = {"step_id": step.step_id, "lease_seconds": lease_seconds, "host": host, "pid": pid}
            taken = one(self.connection, StepRow, Q.attach_undo, values)
            assert taken is not None
            owner = {"request_id": request.request_id, "owner_run_id": owner_run_id, "lease_seconds": 60.0}
            self.connection.execute(Q.own_request, owner)
            signals.listen(self.connection, saga.saga_id)
            rows = many(self.connection, ActionRow, Q.unsettled_actions, {"step_id": step.step_id})
            return UndoAttached(saga, request, taken, tuple(later), tuple(rows))

    @retried
    def write_undo(
        self, attached: UndoAttached, ended: EndedTry | None, begin: NextTry | None
    ) -> tuple[bool, int | None]:
        """How one try ended and the intent of the next, one commit: (ending taken, try number or None if refused).

        :raises UndoFencedError: a newer attempt owns the step; nothing was written.
        """
        if ended is not None and begin is not None and ended.action_id == begin.action_id:
            # One statement can update a row only once.
            with self.connection.transaction():
                taken, _ = self._write_undo(attached, ended, None)
                return taken, self._write_undo(attached, None, begin)[1] if taken else None
        return self._write_undo(attached, ended, begin)

    def _write_undo(
        self, attached: UndoAttached, ended: EndedTry | None, begin: NextTry | None
    ) -> tuple[bool, int | None]:
        row = _WRITE_UNDO.run(
            self.connection,
            {
                "saga_id": attached.saga.saga_id,
                "step_id": attached.step.step_id,
                "fence": attached.step.fence,
                "later_step_ids": list(attached.later_step_ids),
                "ended_id": ended.action_id if ended else None,
                "ended_state": ended.state if ended else None,
                "ended_error": ended.error if ended else None,
                "ended_failures": int(ended.failed) if ended else 0,
                "ended_settles": ended is not None and ended.settles,
                "reconcile_seconds": ended.reconcile_seconds if ended else None,
                "waiting_for": ended.waiting_for if ended else None,
                "later_token": ended.later_token if ended else None,
                "begin_id": begin.action_id if begin else None,
                "undo_key": begin.undo_key if begin else None,
                "undo_deadline_seconds": begin.undo_deadline_seconds if begin else 0.0,
            },
        )
        assert row is not None
        held_fence, state, ended_id, begun_id, tries = row
        fence = int(held_fence or 0)
        if fence != attached.step.fence or state != _UNDOING:
            raise UndoFencedError(
                f"{attached.step.label} of {attached.saga.dag_id} / {attached.saga.run_id}: "
                f"a newer attempt of the undo owns this step (fence {fence}, ours {attached.step.fence}); "
                f"nothing further is called"
            )
        return ended_id is not None, int(tries) if begun_id is not None and tries is not None else None

    @retried
    def settle_action_if_held(
        self,
        attached: UndoAttached,
        action: ActionRow,
        state: str,
        *,
        probed: bool = False,
        error: str | None = None,
    ) -> bool:
        """A move that calls nothing: it cannot be undone, nobody can tell (probed), or nothing knows how to undo it."""
        row = self.connection.execute(
            Q.settle_action,
            {
                "saga_id": attached.saga.saga_id,
                "step_id": attached.step.step_id,
                "fence": attached.step.fence,
                "action_id": action.action_id,
                "state": state,
                "probed": probed,
                "error": error,
                "from_states": [action.state],
            },
        ).fetchone()
        return row is not None

    def read_action(self, action_id: int) -> tuple[ActionRow, Any]:
        """The row as it is now, and the database's clock."""
        row = one(self.connection, ActionRow, Q.read_action_row, {"action_id": action_id})
        now = first(self.connection, Q.now_row, {})
        assert row is not None
        assert now is not None
        return row, now["now"]

    def is_halted(self, request: RequestRow) -> bool:
        """A compensation of this request has failed for good; a saga with ``halt`` undoes nothing further then."""
        row = first(self.connection, Q.halted_of_request, {"request_id": request.request_id})
        return bool(row and row["halted"])
