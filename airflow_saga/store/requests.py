"""The request for an undo, and the verbs of who asks for one. Each locks the saga first, so that no two wishes mix.

A decision to stop and its undo request are one transaction; who asked first is in the answer to whoever asks second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import psycopg

from airflow_saga.core.decide import pruned
from airflow_saga.core.errors import UnknownSagaError, VerbRefusedError
from airflow_saga.core.records import RequestRow, SagaRow
from airflow_saga.core.states import CAUSE_RANK, Cause, Mode, RequestState, SagaState
from airflow_saga.store.connect import retried
from airflow_saga.store.decision import Decision, Verdict
from airflow_saga.store.queries import Q
from airflow_saga.store.rows import dicts, note, one, wake
from airflow_saga.store.saga import lock_or_open_saga, move_saga, steps_with_lease
from airflow_saga.store.scope import check_signed_plan

_UNDO_IT = "undo it with Undo in its Saga tab, or: airflow saga undo"


def insert_request(
    connection: psycopg.Connection,
    saga: SagaRow,
    *,
    scope: Mapping[int, int] | None,
    cause: str,
    actor: str,
    reason: str | None,
    clear_number: int,
    state: str = RequestState.REQUESTED,
    stop_now: bool = False,
) -> RequestRow:
    """A new row in the caller's transaction. ``scope`` None: the whole run; else step_id → first seq."""
    row = one(
        connection,
        RequestRow,
        Q.insert_request,
        {
            "saga_id": saga.saga_id,
            "whole_run": scope is None,
            "state": state,
            "cause": cause,
            "actor": actor,
            "reason": reason,
            "clear_number": clear_number,
            "stop_now": stop_now,
            "deadline_seconds": saga.cancel_deadline_seconds,
        },
    )
    assert row is not None
    for step_id, from_seq in (scope or {}).items():
        connection.execute(
            Q.insert_scope, {"request_id": row.request_id, "step_id": step_id, "from_seq": from_seq}
        )
    note(
        connection,
        f"undo {'hinted' if state == RequestState.HINTED else 'asked for'}",
        actor,
        f"number {row.number}, {'whole run' if scope is None else f'{len(scope)} steps'}, cause {cause}"
        + (f": {reason}" if reason else ""),
        saga_id=saga.saga_id,
        request_id=row.request_id,
    )
    return row


def widen_request(
    connection: psycopg.Connection,
    request: RequestRow,
    *,
    scope: Mapping[int, int] | None,
    cause: str,
    actor: str,
    reason: str | None,
    clear_number: int,
    stop_now: bool = False,
) -> RequestRow:
    """A later wish joins a request that is not frozen yet: the union of both scopes and the higher cause."""
    there = dicts(connection, Q.scope_of_request, {"request_id": request.request_id})
    known = {row["step_id"]: row["from_seq"] for row in there}
    wider = scope is None and not request.whole_run
    for step_id, from_seq in (scope or {}).items():
        if not request.whole_run and known.get(step_id, from_seq + 1) > from_seq:
            wider = True
            values = {"request_id": request.request_id, "step_id": step_id, "from_seq": from_seq}
            connection.execute(Q.insert_scope, values)
    raises = CAUSE_RANK.get(cause, 0) > CAUSE_RANK.get(request.cause, 0)
    queued = request.state == RequestState.QUEUED
    widened = one(
        connection,
        RequestRow,
        Q.widen_request,
        {
            "request_id": request.request_id,
            "state": RequestState.QUEUED if queued else RequestState.REQUESTED,
            "whole_run": scope is None,
            "cause": cause if raises else request.cause,
            "actor": actor if raises else request.actor,
            "reason": reason if raises else request.reason,
            "clear_number": clear_number,
            "stop_now": stop_now,
        },
    )
    assert widened is not None
    if wider or raises or widened.state != request.state or widened.stop_now != request.stop_now:
        detail = f"number {request.number}, cause {cause}" + (f": {reason}" if reason else "")
        note(
            connection, "undo widened", actor, detail, saga_id=request.saga_id, request_id=request.request_id
        )
    return widened


def undo_removed_indexes(
    connection: psycopg.Connection,
    saga: SagaRow,
    request: RequestRow | None,
    step_ids: Sequence[int],
    clear_number: int,
) -> RequestRow:
    """Indexes that are no more: nobody runs them again, so nobody else would ever ask for the undo of what they did."""
    connection.execute(Q.note_removed, {"step_ids": list(step_ids)})
    ask: dict[str, Any] = {
        "scope": dict.fromkeys(step_ids, 0),
        "cause": Cause.REDO,
        "actor": "airflow",
        "reason": "the mapping has become shorter",
        "clear_number": clear_number,
    }
    wake(connection, saga.saga_id, "undo")
    if request is not None:
        return widen_request(connection, request, **ask)
    return insert_request(connection, saga, **ask)


def drop_stale_wish(
    connection: psycopg.Connection, saga: SagaRow, cause: str, actor: str, clear_number: int
) -> Decision:
    """A hook or a reading that tells of the run as it was before a clear; a step has attached since."""
    detail = f"{cause} of clear {clear_number}; steps attached with {saga.clear_number}"
    note(connection, "stale wish dropped", actor, detail, saga_id=saga.saga_id)
    message = (
        f"{saga.dag_id} / {saga.run_id}: that was before it was cleared and ran again; nothing is undone"
    )
    return Decision(Verdict.IGNORED, message, saga)


class RequestVerbs:
    """What people, hooks and steps ask for. One verb, one transaction."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    # -- stop and undo ----------------------------------------------------------------------------------------------

    @retried
    def cancel(
        self,
        dag_id: str,
        run_id: str,
        *,
        actor: str,
        reason: str | None = None,
        clear_number: int = 0,
        keep: bool = False,
        stop_now: bool = False,
        run_is_success: bool = False,
    ) -> Decision:
        """Stop a saga that runs: then undo it, or keep its effects. A finished one is not touched, undo is offered.

        :param stop_now: abandon the call under way (it is in doubt) instead of letting it end.
        :param run_is_success: the Airflow run has ended well; with no live step the saga has finished too.
        """
        with self.connection.transaction():
            saga = lock_or_open_saga(self.connection, dag_id, run_id)
            if saga.state in (
                SagaState.COMPLETED,
                SagaState.FAILED,
                SagaState.SUSPENDED,
                SagaState.PARTIALLY_CANCELLED,
            ):
                message = f"{dag_id} / {run_id} has already ended ({saga.state}); {_UNDO_IT}"
                return Decision(Verdict.FINISHED, message, saga)
            if (
                saga.state == SagaState.RUNNING
                and run_is_success
                and not steps_with_lease(self.connection, saga.saga_id)
            ):
                message = f"{dag_id} / {run_id} has already finished; {_UNDO_IT}"
                return Decision(Verdict.FINISHED, message, saga)
            if keep:
                return self._keep(saga, actor, reason, clear_number, stop_now)
            return self._stop(saga, Cause.USER, actor, reason, clear_number, stop_now)

    @retried
    def undo(
        self,
        dag_id: str,
        run_id: str,
        *,
        actor: str,
        cause: str = Cause.USER,
        reason: str | None = None,
        clear_number: int = 0,
        stop_now: bool = False,
        plan_hash: str | None = None,
    ) -> Decision:
        """Undo a saga whatever state it is in: stop it first if it runs. Asking twice joins the first request.

        ``marked_failed`` comes from hooks, which may be late: it undoes a saga that runs or has completed, no other,
        and none that was cleared and has run since.
        """
        with self.connection.transaction():
            saga = lock_or_open_saga(self.connection, dag_id, run_id)
            hooked = cause == Cause.MARKED_FAILED
            if saga.pruned_at is not None:
                if hooked:
                    return Decision(Verdict.IGNORED, f"{dag_id} / {run_id}: {pruned(saga)}", saga)
                raise VerbRefusedError(f"{dag_id} / {run_id}: {pruned(saga)}")
            if hooked and saga.state not in (SagaState.PENDING, SagaState.RUNNING, SagaState.COMPLETED):
                return Decision(
                    Verdict.IGNORED,
                    f"{dag_id} / {run_id} is {saga.state}; marking it failed adds nothing",
                    saga,
                )
            if hooked and clear_number < saga.clear_number:
                return drop_stale_wish(self.connection, saga, cause, actor, clear_number)
            if plan_hash is not None:
                check_signed_plan(self.connection, saga, plan_hash)
            return self._stop(saga, cause, actor, reason, clear_number, stop_now)

    def _stop(
        self, saga: SagaRow, cause: str, actor: str, reason: str | None, clear_number: int, stop_now: bool
    ) -> Decision:
        where = f"{saga.dag_id} / {saga.run_id}"
        if saga.state == SagaState.CANCELLED:
            message = f"{where} is already cancelled, by {saga.actor or 'the product'}"
            return Decision(Verdict.CANCELLED, message, saga)
        stop: dict[str, Any] = {
            "cause": cause,
            "actor": actor,
            "reason": reason,
            "stop_clear_number": max(clear_number, saga.clear_number),
        }
        if saga.state == SagaState.PENDING:
            move_saga(self.connection, saga, SagaState.CANCELLED, **stop)
            message = f"{where} is cancelled; no step had begun, there is nothing to undo"
            return Decision(Verdict.NOTHING, message, saga)
        ask: dict[str, Any] = {
            "scope": None,
            "cause": cause,
            "actor": actor,
            "reason": reason,
            "clear_number": clear_number,
            "stop_now": stop_now,
        }
        request = one(self.connection, RequestRow, Q.open_request, {"saga_id": saga.saga_id})
        queued = one(self.connection, RequestRow, Q.queued_request, {"saga_id": saga.saga_id})
        verdict = Verdict.CANCELLING
        if request is None:
            request = insert_request(self.connection, saga, **ask)
        elif saga.state == SagaState.CANCELLING and saga.mode == Mode.UNDO and request.whole_run:
            return self._join(saga, request, ask)
        elif request.state != RequestState.FROZEN:
            request = widen_request(self.connection, request, **ask)
        elif queued is not None and queued.whole_run:
            return self._join(saga, queued, ask)
        else:
            verdict = Verdict.QUEUED
            if queued is not None:
                request = widen_request(self.connection, queued, **ask)
            else:
                request = insert_request(self.connection, saga, state=RequestState.QUEUED, **ask)
        if saga.state != SagaState.CANCELLING or saga.mode != Mode.UNDO:
            now = stop_now or saga.stop_now
            move_saga(self.connection, saga, SagaState.CANCELLING, mode=Mode.UNDO, stop_now=now, **stop)
        wake(self.connection, saga.saga_id, "cancel")
        return Decision(verdict, f"{where} is being stopped and undone, asked for by {actor}", saga, request)

    def _join(self, saga: SagaRow, request: RequestRow, ask: dict[str, Any]) -> Decision:
        """The whole run is being undone already: at most this one raises the cause, or adds "now"."""
        first_actor = request.actor
        if request.state != RequestState.FROZEN:
            request = widen_request(self.connection, request, **ask)
        self._stop_again(saga, ask["actor"], ask["reason"], ask["clear_number"], ask["stop_now"])
        what = (
            "its undo is queued already"
            if request.state == RequestState.QUEUED
            else "is being undone already"
        )
        message = f"{saga.dag_id} / {saga.run_id} {what}, asked for by {first_actor}"
        if ask["stop_now"] and not saga.stop_now:
            message += "; the call under way is abandoned now"
        return Decision(Verdict.ALREADY, message, saga, request)

    def _stop_again(
        self, saga: SagaRow, actor: str, reason: str | None, clear_number: int, stop_now: bool
    ) -> None:
        """A second decision to stop: attempts of a clear in between are stopped too, and "now" is never taken back."""
        values = {"saga_id": saga.saga_id, "stop_clear_number": clear_number, "stop_now": stop_now}
        self.connection.execute(Q.stop_saga_again, values)
        if stop_now and not saga.stop_now:
            note(self.connection, "stop now", actor, reason, saga_id=saga.saga_id)
            wake(self.connection, saga.saga_id, "cancel")

    def _keep(
        self, saga: SagaRow, actor: str, reason: str | None, clear_number: int, stop_now: bool
    ) -> Decision:
        where = f"{saga.dag_id} / {saga.run_id}"
        stop: dict[str, Any] = {
            "cause": Cause.USER,
            "actor": actor,
            "reason": reason,
            "stop_clear_number": max(clear_number, saga.clear_number),
        }
        if saga.state == SagaState.PENDING:
            move_saga(self.connection, saga, SagaState.CANCELLED, **stop)
            return Decision(Verdict.NOTHING, f"{where} is cancelled; no step had begun", saga)
        if saga.state == SagaState.CANCELLED:
            message = f"{where} is already cancelled, by {saga.actor or 'the product'}"
            return Decision(Verdict.CANCELLED, message, saga)
        if saga.mode == Mode.KEEP:
            self._stop_again(saga, actor, reason, clear_number, stop_now)
            message = f"{where} is being stopped already and its effects are kept, asked for by {saga.actor}"
            return Decision(Verdict.ALREADY, message, saga)
        if saga.state != SagaState.RUNNING:
            message = f"{where} is being undone already, asked for by {saga.actor}; it cannot be kept now"
            return Decision(Verdict.ALREADY, message, saga)
        request = one(self.connection, RequestRow, Q.open_request, {"saga_id": saga.saga_id})
        if request is not None:
            message = f"{where}: {request.actor} has asked for an undo first; effects cannot be kept until it has ended"
            return Decision(Verdict.ALREADY, message, saga, request)
        move_saga(self.connection, saga, SagaState.CANCELLING, mode=Mode.KEEP, stop_now=stop_now, **stop)
        wake(self.connection, saga.saga_id, "cancel")
        return Decision(Verdict.KEEPING, f"{where} is being stopped, its effects are kept", saga)

    # -- what becomes of a request ----------------------------------------------------------------------------------

    @retried
    def release(self, dag_id: str, run_id: str, *, actor: str) -> Decision:
        """HELD → HINTED: a person says that this automatic undo may go on."""
        with self.connection.transaction():
            saga = one(self.connection, SagaRow, Q.lock_saga, {"dag_id": dag_id, "run_id": run_id})
            if saga is None:
                raise UnknownSagaError(f"there is no saga {dag_id} / {run_id}")
            request = one(self.connection, RequestRow, Q.open_request, {"saga_id": saga.saga_id})
            if request is None or request.state != RequestState.HELD:
                raise VerbRefusedError(f"{dag_id} / {run_id}: no undo is held")
            moved = one(
                self.connection,
                RequestRow,
                Q.move_request,
                {"request_id": request.request_id, "state": "HINTED"},
            )
            note(self.connection, "undo released", actor, saga_id=saga.saga_id, request_id=request.request_id)
            return Decision(Verdict.CANCELLING, f"{dag_id} / {run_id} will be undone", saga, moved)

    @retried
    def claim_notice(self, request_id: int, kind: str) -> bool:
        """True for the first who asks: only that one tells people."""
        params = {"request_id": request_id, "kind": kind}
        return self.connection.execute(Q.claim_notice, params).fetchone() is not None

    @retried
    def note_triggered(self, request_uuid: UUID) -> None:
        self.connection.execute(Q.note_triggered, {"request_uuid": request_uuid})
