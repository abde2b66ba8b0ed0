"""Verbs of the end of an undo: settled, past its deadline, or asked for again where a compensation was not done yet."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

import psycopg

from airflow_saga.core.errors import UndoFencedError, UnknownSagaError, VerbRefusedError
from airflow_saga.core.records import ActionRow, RequestRow, SagaRow, StepRow
from airflow_saga.core.states import (
    GOES_ON_CAUSES,
    RETRIABLE_ACTION_STATES,
    Cause,
    Effect,
    Mode,
    RequestState,
    SagaState,
    StepState,
)
from airflow_saga.store.connect import retried
from airflow_saga.store.decision import Decision, Verdict
from airflow_saga.store.queries import Q
from airflow_saga.store.requests import insert_request, widen_request
from airflow_saga.store.rows import dicts, first, many, note, one, wake
from airflow_saga.store.saga import move_saga, state_after_undo, undo_again
from airflow_saga.store.scope import (
    cut_for_undo,
    lock_request,
    lock_steps_in_scope,
    scope_of,
    scope_that_goes_on,
)


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
        """FROZEN → SETTLED, its steps UNDONE or PARTLY_UNDONE, and the saga, where it is stopped for it, to its end.

        That is CANCELLED, PARTIALLY_CANCELLED where something stands, SUSPENDED where the rest stands on purpose.
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
            is_last = not self._end_request(saga, request, RequestState.SETTLED)
            if is_last and saga.state == SagaState.CANCELLING and saga.mode == Mode.UNDO:
                state = state_after_undo(self.connection, saga)
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
        found = many(self.connection, ActionRow, Q.residual_of_saga, {"saga_id": saga.saga_id})
        rows = [row for row in found if not row.kept]
        if request.whole_run:
            return tuple(rows)
        scope = {
            row["step_id"]
            for row in dicts(self.connection, Q.scope_of_request, {"request_id": request.request_id})
        }
        return tuple(row for row in rows if row.step_id in scope)

    def _end_request(self, saga: SagaRow, request: RequestRow, state: str) -> bool:
        """The request ends; one that waited behind it is next: True."""
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
        return queued is not None

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
            request = one(self.connection, RequestRow, Q.open_request, {"saga_id": saga_id})
            self._expire_steps(saga, request)
            if request is not None and request.state in (RequestState.REQUESTED, RequestState.FROZEN):
                self._end_request(saga, request, RequestState.EXPIRED)
            state = state_after_undo(self.connection, saga)
            reason = "the deadline of the cancel passed before the undo had ended"
            move_saga(self.connection, saga, state, cause=saga.cause, actor=actor, reason=reason)
            wake(self.connection, saga_id, "settled")
            return one(self.connection, SagaRow, Q.lock_saga_by_id, {"saga_id": saga_id})

    def _expire_steps(self, saga: SagaRow, request: RequestRow | None) -> None:
        """Fence and sweep what was to be undone. Of an undo from a place on, what came before stays as it is."""
        queued = one(self.connection, RequestRow, Q.queued_request, {"saga_id": saga.saga_id})
        part = None if request is None or request.whole_run or queued is not None else request
        if part is None:
            steps = many(self.connection, StepRow, Q.lock_steps_of_saga, {"saga_id": saga.saga_id})
        else:
            steps = lock_steps_in_scope(self.connection, saga, part)
        cuts = {} if part is None else scope_of(self.connection, part)
        for step in steps:
            self.connection.execute(Q.sweep_step, {"step_id": step.step_id})
            self.connection.execute(Q.stop_deferred, {"step_id": step.step_id})
            if part is None:
                self.connection.execute(Q.let_go_of_kept, {"step_id": step.step_id})
            elif part.state == RequestState.REQUESTED and part.cause not in GOES_ON_CAUSES:
                cut_for_undo(self.connection, step, cuts[step.step_id], goes_on=False)
            self.connection.execute(Q.expire_step, {"step_id": step.step_id})

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
            reason = "a compensation that was under way is asked for again"
            return self._go_on(saga, due, cause=Cause.DUE, actor="reconciler", reason=reason)

    def _go_on(
        self, saga: SagaRow, step_ids: list[int], *, cause: Cause, actor: str, reason: str
    ) -> RequestRow:
        """Ask for an undo that goes on where an earlier one has ended."""
        is_closed = saga.state == SagaState.PARTIALLY_CANCELLED
        request = insert_request(
            self.connection,
            saga,
            scope=scope_that_goes_on(self.connection, saga) if is_closed else dict.fromkeys(step_ids, 0),
            cause=cause,
            actor=actor,
            reason=reason,
            clear_number=saga.clear_number,
        )
        if is_closed:
            undo_again(self.connection, saga, saga.reason)
        return request

    @retried
    def retry(
        self, dag_id: str, run_id: str, action_id: int, *, actor: str, reason: str | None = None
    ) -> Decision:
        """Ask once more for the undo of one action that an undo has left standing. No other is tried again.

        :raises UnknownSagaError: there is no such saga, or it has no such action.
        :raises VerbRefusedError: nothing of it can be tried again now; says why.
        """
        with self.connection.transaction():
            saga = one(self.connection, SagaRow, Q.lock_saga, {"dag_id": dag_id, "run_id": run_id})
            action = one(self.connection, ActionRow, Q.read_action_row, {"action_id": action_id})
            if saga is None or action is None or action.saga_id != saga.saga_id:
                raise UnknownSagaError(
                    f"{dag_id} / {run_id} has no action {action_id}; see: airflow saga show"
                )
            step = one(self.connection, StepRow, Q.lock_step_by_id, {"step_id": action.step_id})
            assert step is not None
            _check_retriable(step, action)
            told = reason or f"{action.name} is tried again"
            request = one(self.connection, RequestRow, Q.open_request, {"saga_id": saga.saga_id})
            if request is not None:
                return self._join(saga, step, action, request, actor, told)
            self.connection.execute(Q.give_new_tries, {"action_id": action_id})
            asked = self._go_on(saga, [step.step_id], cause=Cause.RETRY, actor=actor, reason=told)
            wake(self.connection, saga.saga_id, "undo")
            return Decision(Verdict.CANCELLING, f"the undo of {action.name} is tried again", saga, asked)

    def _join(
        self, saga: SagaRow, step: StepRow, action: ActionRow, request: RequestRow, actor: str, reason: str
    ) -> Decision:
        """Another undo is asked for: one that has not begun takes this action along.

        :raises VerbRefusedError: it has begun, or is about another step.
        """
        asked = request.state == RequestState.REQUESTED
        if asked and request.cause in GOES_ON_CAUSES:
            self.connection.execute(Q.give_new_tries, {"action_id": action.action_id})
            request = widen_request(
                self.connection,
                request,
                scope={step.step_id: 0},
                cause=Cause.RETRY,
                actor=actor,
                reason=reason,
                clear_number=saga.clear_number,
            )
        elif not (asked and request.whole_run):
            raise VerbRefusedError(
                f"action {action.action_id} ({action.name} of {step.label}): an undo asked for by {request.actor} is "
                f"under way ({request.state}); wait for its end"
            )
        message = f"{action.name} is taken along by the undo that {request.actor} has asked for already"
        return Decision(Verdict.ALREADY, message, saga, request)


def _check_retriable(step: StepRow, action: ActionRow) -> None:
    what = f"action {action.action_id} ({action.name} of {step.label})"
    if not action.residual or action.kept:
        told = f" ({action.note})" if action.note else ""
        raise VerbRefusedError(f"{what} is {action.state}{told}: there is nothing to try again")
    if action.effect == Effect.NON_COMPENSABLE:
        raise VerbRefusedError(
            f"{what} is declared NON_COMPENSABLE: nothing of ours can undo it. Say what became of it: "
            f"airflow saga resolve"
        )
    if action.state not in RETRIABLE_ACTION_STATES:
        raise VerbRefusedError(
            f"{what} is {action.state}: no undo has tried it. It is undone after what came after it: undo the saga"
        )
    if step.state not in (StepState.PARTLY_UNDONE, StepState.UNDOING):
        raise VerbRefusedError(f"{what}: its step is {step.state}, no undo has tried it; undo the saga first")
