"""Verbs of the end of an undo: settled, past its deadline, or asked for again where a compensation was not done yet."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

import psycopg

from airflow_saga.core.errors import UndoFencedError
from airflow_saga.core.records import ActionRow, RequestRow, SagaRow, StepRow
from airflow_saga.core.states import Cause, Mode, RequestState, SagaState
from airflow_saga.store.connect import retried
from airflow_saga.store.queries import Q
from airflow_saga.store.requests import insert_request
from airflow_saga.store.rows import dicts, first, many, note, one, wake
from airflow_saga.store.saga import move_saga, undo_again
from airflow_saga.store.scope import lock_request, lock_steps_in_scope


@dataclass(frozen=True)
class Settled:
    """:ivar residual: the actions that still stand, or may, after this undo.
    :ivar just_now: by this very call; False: it was settled already.
    """

    saga: SagaRow
    request: RequestRow
    residual: tuple[ActionRow, ...]
    just_now: bool = True


class SettleVerbs:
    """One verb, one transaction. The connection is in autocommit and belongs to one thread."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    def unsettled(self, request: RequestRow) -> list[ActionRow]:
        return many(self.connection, ActionRow, Q.unsettled_of_request, {"request_id": request.request_id})

    @retried
    def settle_if_all_settled(self, request_uuid: UUID, owner_run_id: str) -> Settled | None:
        """FROZEN → SETTLED, its steps UNDONE or PARTLY_UNDONE, the saga CANCELLED or PARTIALLY_CANCELLED.

        None while an action of the plan is not settled (and the saga does not halt at a failed compensation).
        """
        with self.connection.transaction():
            saga, request = lock_request(self.connection, request_uuid)
            if request.state == RequestState.SETTLED:
                return Settled(saga, request, self._residual(saga, request), just_now=False)
            if request.state != RequestState.FROZEN or request.owner_run_id != owner_run_id:
                raise UndoFencedError(
                    f"undo {request.number} is {request.state}, owned by {request.owner_run_id}"
                )
            steps = lock_steps_in_scope(self.connection, saga, request)
            halted = (first(self.connection, Q.halted_of_request, {"request_id": request.request_id}) or {})[
                "halted"
            ]
            if self.unsettled(request) and not (saga.on_compensation_failure == "halt" and halted):
                return None
            for step in steps:
                self.connection.execute(Q.end_undo_of_step, {"step_id": step.step_id})
            self._end_request(saga, request, RequestState.SETTLED)
            stands = (first(self.connection, Q.saga_has_residual, {"saga_id": saga.saga_id}) or {})["stands"]
            if request.whole_run and saga.state == SagaState.CANCELLING:
                state = SagaState.PARTIALLY_CANCELLED if stands else SagaState.CANCELLED
                move_saga(
                    self.connection, saga, state, cause=saga.cause, actor=saga.actor, reason=saga.reason
                )
            wake(self.connection, saga.saga_id, "settled")
            ended_saga = one(self.connection, SagaRow, Q.lock_saga_by_id, {"saga_id": saga.saga_id})
            ended_request = one(self.connection, RequestRow, Q.lock_request, {"request_uuid": request_uuid})
            assert ended_saga is not None
            assert ended_request is not None
            return Settled(ended_saga, ended_request, self._residual(saga, request))

    def _residual(self, saga: SagaRow, request: RequestRow) -> tuple[ActionRow, ...]:
        rows = many(self.connection, ActionRow, Q.residual_of_saga, {"saga_id": saga.saga_id})
        if request.whole_run:
            return tuple(rows)
        scope = {
            row["step_id"]
            for row in dicts(self.connection, Q.scope_of_request, {"request_id": request.request_id})
        }
        return tuple(row for row in rows if row.step_id in scope)

    def _end_request(self, saga: SagaRow, request: RequestRow, state: str) -> None:
        """The request ends; a wider one that waited behind it is next (not when the whole run was undone just now)."""
        self.connection.execute(Q.move_request, {"request_id": request.request_id, "state": state})
        note(
            self.connection,
            f"undo {state.lower()}",
            request.owner_run_id or "airflow",
            saga_id=saga.saga_id,
            request_id=request.request_id,
        )
        queued = one(self.connection, RequestRow, Q.queued_request, {"saga_id": saga.saga_id})
        if queued is not None:
            following = RequestState.EXPIRED if state == RequestState.EXPIRED else RequestState.REQUESTED
            self.connection.execute(Q.move_request, {"request_id": queued.request_id, "state": following})

    @retried
    def expire_if_past_deadline(self, saga_id: int, *, actor: str = "reconciler") -> SagaRow | None:
        """CANCELLING → PARTIALLY_CANCELLED at the deadline: every step is fenced, what is open is named."""
        with self.connection.transaction():
            saga = one(self.connection, SagaRow, Q.lock_saga_by_id, {"saga_id": saga_id})
            now = (first(self.connection, Q.now_row, {}) or {})["now"]
            if saga is None or saga.state != SagaState.CANCELLING or saga.mode != Mode.UNDO:
                return None
            if saga.deadline_at is None or saga.deadline_at > now:
                return None
            for step in many(self.connection, StepRow, Q.lock_steps_of_saga, {"saga_id": saga_id}):
                self.connection.execute(Q.sweep_step, {"step_id": step.step_id})
                self.connection.execute(Q.stop_deferred, {"step_id": step.step_id})
                self.connection.execute(Q.let_go_of_kept, {"step_id": step.step_id})
                self.connection.execute(Q.expire_step, {"step_id": step.step_id})
            request = one(self.connection, RequestRow, Q.open_request, {"saga_id": saga_id})
            if request is not None and request.state in (RequestState.REQUESTED, RequestState.FROZEN):
                self._end_request(saga, request, RequestState.EXPIRED)
            stands = (first(self.connection, Q.saga_has_residual, {"saga_id": saga_id}) or {})["stands"]
            state = SagaState.PARTIALLY_CANCELLED if stands else SagaState.CANCELLED
            reason = "the deadline of the cancel passed before the undo had ended"
            move_saga(self.connection, saga, state, cause=saga.cause, actor=actor, reason=reason)
            wake(self.connection, saga_id, "settled")
            return one(self.connection, SagaRow, Q.lock_saga_by_id, {"saga_id": saga_id})

    @retried
    def ask_again_if_due(self, saga_id: int) -> RequestRow | None:
        """A ``Later`` or ``Unavailable`` falls due: a new request tries those actions again."""
        with self.connection.transaction():
            saga = one(self.connection, SagaRow, Q.lock_saga_by_id, {"saga_id": saga_id})
            if (
                saga is None
                or one(self.connection, RequestRow, Q.open_request, {"saga_id": saga_id}) is not None
            ):
                return None
            due = [
                row["step_id"] for row in dicts(self.connection, Q.due_steps_of_saga, {"saga_id": saga_id})
            ]
            if not due:
                return None
            whole = saga.state == SagaState.PARTIALLY_CANCELLED
            request = insert_request(
                self.connection,
                saga,
                scope=None if whole else dict.fromkeys(due, 0),
                cause=Cause.DUE,
                actor="reconciler",
                reason="a compensation that was under way is asked for again",
                clear_number=saga.clear_number,
            )
            if whole:
                undo_again(self.connection, saga, saga.reason)
            return request
