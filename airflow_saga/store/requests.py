"""Verbs of deciders: cancel, undo, hint, mark, resolve. Each locks the saga row first, so that two decisions never mix.

A decision to stop and its undo request are one transaction; who asked first is in the answer to whoever asks second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

import psycopg

from airflow_saga.core.errors import UnknownSagaError, VerbRefusedError
from airflow_saga.core.records import ActionRow, RequestRow, SagaRow, StepRow
from airflow_saga.core.states import (
    CAUSE_RANK,
    NO_POLICY_CAUSES,
    ActionState,
    Cause,
    Effect,
    Mode,
    RequestState,
    SagaState,
    StepState,
)
from airflow_saga.store.connect import retried
from airflow_saga.store.queries import Q
from airflow_saga.store.rows import dicts, first, many, note, one, wake

_SAID_BY_PEOPLE = (ActionState.COMPENSATED, ActionState.ACCEPTED, ActionState.DONE, ActionState.FAILED)
_HINTS = (RequestState.HINTED, RequestState.HELD)


class Verdict(StrEnum):
    """What a request to stop or undo came to."""

    CANCELLING = "cancelling"
    KEEPING = "stopping, effects are kept"
    QUEUED = "queued behind the undo under way"
    ALREADY = "already asked for"
    NOTHING = "cancelled, nothing to undo"
    CANCELLED = "already cancelled"
    FINISHED = "already finished"
    IGNORED = "ignored"


@dataclass(frozen=True)
class Decision:
    """:ivar message: one sentence for a person: what was decided, by whom, and what to do next."""

    verdict: Verdict
    message: str
    saga: SagaRow | None = None
    request: RequestRow | None = None

    @property
    def undoes(self) -> bool:
        return self.request is not None and self.verdict in (
            Verdict.CANCELLING,
            Verdict.QUEUED,
            Verdict.ALREADY,
        )


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


def move_saga(
    connection: psycopg.Connection,
    saga: SagaRow,
    state: str,
    *,
    mode: str | None = None,
    cause: str | None = None,
    actor: str | None = None,
    reason: str | None = None,
    stop_clear_number: int = -1,
    stop_now: bool = False,
) -> None:
    """One move of the saga in the caller's transaction, with who and why, and a line of history."""
    connection.execute(
        Q.move_saga,
        {
            "saga_id": saga.saga_id,
            "state": state,
            "mode": mode,
            "cause": cause,
            "actor": actor,
            "reason": reason,
            "stop_clear_number": stop_clear_number,
            "stop_now": stop_now,
        },
    )
    detail = ", ".join(part for part in (mode and f"mode {mode}", cause and f"cause {cause}", reason) if part)
    note(connection, f"saga {saga.state} → {state}", actor or "airflow", detail or None, saga_id=saga.saga_id)


def close_if_nothing_stands(
    connection: psycopg.Connection, saga: SagaRow, step: StepRow, *, actor: str | None, reason: str
) -> bool:
    """After the last residual of a step, and of a partly cancelled saga, is settled without an undo."""
    connection.execute(Q.step_resolved, {"step_id": step.step_id})
    stands = (first(connection, Q.saga_has_residual, {"saga_id": saga.saga_id}) or {})["stands"]
    if saga.state != SagaState.PARTIALLY_CANCELLED or stands:
        return False
    move_saga(connection, saga, SagaState.CANCELLED, cause=saga.cause, actor=actor, reason=reason)
    return True


class RequestVerbs:
    """What people, listeners, steps and the reconciler decide. One verb, one transaction."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    # -- stop and undo ----------------------------------------------------------------------------------------------

    @retried
    def open_if_new(self, dag_id: str, run_id: str) -> None:
        """A run of a saga DAG was seen to start: a PENDING row, so that a stop before the first step finds one."""
        self.connection.execute(Q.insert_saga, _new_saga(dag_id, run_id, SagaState.PENDING))

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
            saga = self._saga_or_new(dag_id, run_id)
            if saga.state in (
                SagaState.COMPLETED,
                SagaState.FAILED,
                SagaState.SUSPENDED,
                SagaState.PARTIALLY_CANCELLED,
            ):
                message = (
                    f"{dag_id} / {run_id} has already ended ({saga.state}); undo it with: airflow saga undo"
                )
                return Decision(Verdict.FINISHED, message, saga)
            if saga.state == SagaState.RUNNING and run_is_success and not self._live(saga):
                message = f"{dag_id} / {run_id} has already finished; undo it with: airflow saga undo"
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
            saga = self._saga_or_new(dag_id, run_id)
            hooked = cause == Cause.MARKED_FAILED
            if hooked and saga.state not in (SagaState.PENDING, SagaState.RUNNING, SagaState.COMPLETED):
                return Decision(
                    Verdict.IGNORED,
                    f"{dag_id} / {run_id} is {saga.state}; marking it failed adds nothing",
                    saga,
                )
            if hooked and clear_number < saga.clear_number:
                return self._drop(saga, cause, actor, clear_number)
            if plan_hash is not None:
                self._check_signed_plan(saga, plan_hash)
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

    def _drop(self, saga: SagaRow, cause: str, actor: str, clear_number: int) -> Decision:
        """A hook or a reading that tells of the run as it was before a clear; a step has attached since."""
        detail = f"{cause} of clear {clear_number}; steps attached with {saga.clear_number}"
        note(self.connection, "stale wish dropped", actor, detail, saga_id=saga.saga_id)
        message = (
            f"{saga.dag_id} / {saga.run_id}: that was before it was cleared and ran again; nothing is undone"
        )
        return Decision(Verdict.IGNORED, message, saga)

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

    def _saga_or_new(self, dag_id: str, run_id: str) -> SagaRow:
        row = one(self.connection, SagaRow, Q.lock_saga, {"dag_id": dag_id, "run_id": run_id})
        if row is None:
            self.connection.execute(Q.insert_saga, _new_saga(dag_id, run_id, SagaState.PENDING))
            row = one(self.connection, SagaRow, Q.lock_saga, {"dag_id": dag_id, "run_id": run_id})
        assert row is not None
        return row

    def _live(self, saga: SagaRow) -> list[StepRow]:
        return many(self.connection, StepRow, Q.running_leases, {"saga_id": saga.saga_id, "step_ids": None})

    def _check_signed_plan(self, saga: SagaRow, signed: str) -> None:
        from airflow_saga.store.undo import plan_of

        running = self._live(saga)
        if running:
            raise VerbRefusedError(
                f"{saga.dag_id} / {saga.run_id}: {running[0].label} is still running, so a plan cannot be exact; "
                f"stop the saga first, or undo without --plan"
            )
        _, now_hash = plan_of(self.connection, saga, None)
        if now_hash != signed:
            raise VerbRefusedError(
                f"{saga.dag_id} / {saga.run_id}: something moved since that plan was made; look again: "
                f"airflow saga plan"
            )

    # -- the end of the Airflow run ---------------------------------------------------------------------------------

    @retried
    def complete_if_over(self, dag_id: str, run_id: str) -> str | None:
        """The Airflow run was read as success: RUNNING → COMPLETED, or FAILED if a step is undone or stopped."""
        with self.connection.transaction():
            saga = one(self.connection, SagaRow, Q.lock_saga, {"dag_id": dag_id, "run_id": run_id})
            if saga is None:
                return None
            if saga.state == SagaState.PENDING:
                move_saga(
                    self.connection, saga, SagaState.COMPLETED, reason="the run ended without a saga step"
                )
                return SagaState.COMPLETED
            if saga.state != SagaState.RUNNING or self._live(saga):
                return saga.state
            if one(self.connection, RequestRow, Q.open_request, {"saga_id": saga.saga_id}) is not None:
                return saga.state
            steps = many(self.connection, StepRow, Q.lock_steps_of_saga, {"saga_id": saga.saga_id})
            open_steps = [step.label for step in steps if step.state != StepState.SUCCEEDED]
            if open_steps:
                reason = f"the run ended as success with steps that did not: {', '.join(open_steps[:10])}"
                move_saga(self.connection, saga, SagaState.FAILED, cause="incomplete", reason=reason)
                return SagaState.FAILED
            move_saga(self.connection, saga, SagaState.COMPLETED)
            return SagaState.COMPLETED

    @retried
    def fail_and_hint(
        self, dag_id: str, run_id: str, *, cause: str, reason: str | None = None, clear_number: int = 0
    ) -> Decision:
        """The Airflow run was read as failed: RUNNING → FAILED, and the policy's hint that an undo is due."""
        with self.connection.transaction():
            saga = one(self.connection, SagaRow, Q.lock_saga, {"dag_id": dag_id, "run_id": run_id})
            if saga is None:
                return Decision(Verdict.IGNORED, f"{dag_id} / {run_id} is no saga")
            if saga.state == SagaState.PENDING:
                move_saga(
                    self.connection, saga, SagaState.CANCELLED, cause=cause, stop_clear_number=clear_number
                )
                return Decision(
                    Verdict.NOTHING, f"{dag_id} / {run_id}: no step had begun, nothing to undo", saga
                )
            request = one(self.connection, RequestRow, Q.open_request, {"saga_id": saga.saga_id})
            if saga.state not in (SagaState.RUNNING, SagaState.FAILED) or request is not None:
                return Decision(Verdict.IGNORED, f"{dag_id} / {run_id} is {saga.state}", saga, request)
            if clear_number < saga.clear_number:
                return self._drop(saga, cause, "airflow", clear_number)
            # A step was refused: what its own rows say outlives the run's end.
            if saga.cause in NO_POLICY_CAUSES:
                cause, reason = saga.cause, saga.reason
            if saga.state == SagaState.RUNNING:
                move_saga(self.connection, saga, SagaState.FAILED, cause=cause, reason=reason)
            if saga.on_failure != "compensate" or cause in NO_POLICY_CAUSES:
                return Decision(
                    Verdict.IGNORED, f"{dag_id} / {run_id} has failed; its effects are kept", saga
                )
            hint = insert_request(
                self.connection,
                saga,
                scope=None,
                state=RequestState.HINTED,
                cause=cause,
                actor="airflow",
                reason=reason,
                clear_number=clear_number,
            )
            return Decision(
                Verdict.CANCELLING, f"{dag_id} / {run_id} has failed and will be undone", saga, hint
            )

    @retried
    def mark_step_if_running(self, dag_id: str, run_id: str, task_id: str, map_index: int) -> bool:
        """Its task instance was marked failed: the attempt is fenced, the run's end decides about an undo.

        Only in a saga that runs: when the run itself was marked, the step may let its call end.
        """
        with self.connection.transaction():
            saga = one(self.connection, SagaRow, Q.lock_saga, {"dag_id": dag_id, "run_id": run_id})
            if saga is None or saga.state != SagaState.RUNNING:
                return False
            key = {"saga_id": saga.saga_id, "task_id": task_id, "map_index": map_index}
            step = one(self.connection, StepRow, Q.lock_step, key)
            if step is None or step.state != StepState.RUNNING:
                return False
            self.connection.execute(Q.mark_step, {"step_id": step.step_id})
            what = "step stopped: its task was marked failed"
            note(self.connection, what, "airflow", step.label, saga_id=saga.saga_id, step_id=step.step_id)
            wake(self.connection, saga.saga_id, "step")
            return True

    # -- a person settles -------------------------------------------------------------------------------------------

    @retried
    def resolve(
        self,
        dag_id: str,
        run_id: str,
        action_id: int,
        *,
        to: str,
        actor: str,
        note_text: str,
        result: str | None = None,
    ) -> Decision:
        """A person says what became of an action: undone by hand, accepted, it happened, it did not.

        :param to: COMPENSATED or ACCEPTED (after an undo), DONE or FAILED (an action in doubt of a stopped step).
        :raises VerbRefusedError: saying since when by whom, or until when, it is not the moment.
        """
        if to not in _SAID_BY_PEOPLE or not note_text.strip():
            raise VerbRefusedError(
                f"action {action_id}: a person settles it as {', '.join(_SAID_BY_PEOPLE[:-1])} or "
                f"{_SAID_BY_PEOPLE[-1]}, with a note that says how it is known; not as {to}, note {note_text!r}"
            )
        with self.connection.transaction():
            saga, step, action = self._action_of(dag_id, run_id, action_id)
            answers = to in (ActionState.DONE, ActionState.FAILED)
            self._check_resolvable(saga, step, action, to, answers)
            values = {"action_id": action_id, "state": to, "note": f"{actor}: {note_text}", "result": result}
            self.connection.execute(Q.resolve_action, values)
            note(
                self.connection,
                f"action {action.state} → {to}",
                actor,
                f"{action.name}: {note_text}",
                saga_id=saga.saga_id,
                step_id=step.step_id,
                action_id=action_id,
            )
            if close_if_nothing_stands(
                self.connection, saga, step, actor=actor, reason="the rest is resolved"
            ):
                message = f"{dag_id} / {run_id} is CANCELLED now: nothing is left to settle"
                return Decision(Verdict.CANCELLED, message, saga)
            return Decision(Verdict.ALREADY, f"{action.name} is {to} now", saga)

    def _action_of(self, dag_id: str, run_id: str, action_id: int) -> tuple[SagaRow, StepRow, ActionRow]:
        saga = one(self.connection, SagaRow, Q.lock_saga, {"dag_id": dag_id, "run_id": run_id})
        if saga is None:
            raise UnknownSagaError(f"there is no saga {dag_id} / {run_id}")
        found = one(self.connection, ActionRow, Q.read_action_row, {"action_id": action_id})
        if found is None or found.saga_id != saga.saga_id:
            raise UnknownSagaError(f"{dag_id} / {run_id} has no action {action_id}; see: airflow saga show")
        step = one(self.connection, StepRow, Q.lock_step_by_id, {"step_id": found.step_id})
        action = one(self.connection, ActionRow, Q.lock_action, {"action_id": action_id})
        assert step is not None
        assert action is not None
        return saga, step, action

    def _check_resolvable(
        self, saga: SagaRow, step: StepRow, action: ActionRow, to: str, answers: bool
    ) -> None:
        what = f"action {action.action_id} ({action.name} of {step.label})"
        if action.effect == Effect.READ_ONLY or not action.residual:
            raise VerbRefusedError(
                f"{what} is {action.state}: there is nothing to settle"
                + (f" ({action.note})" if action.note else "")
            )
        request = one(self.connection, RequestRow, Q.open_request, {"saga_id": saga.saga_id})
        if request is not None and request.state not in _HINTS:
            raise VerbRefusedError(
                f"{what}: an undo asked for by {request.actor} is under way; wait for its end"
            )
        if answers:
            if action.state != ActionState.IN_DOUBT or step.state != StepState.STOPPED:
                raise VerbRefusedError(
                    f"{what} is {action.state} in a step that is {step.state}: only an action in doubt of a stopped "
                    f"step can be answered; after an undo use --undone or --accepted"
                )
        elif step.state != StepState.PARTLY_UNDONE:
            raise VerbRefusedError(
                f"{what}: its step is {step.state}, not PARTLY_UNDONE; undo the saga first"
            )
        now = (first(self.connection, Q.now_row, {}) or {})["now"]
        if action.lands_by is not None and action.lands_by > now:
            raise VerbRefusedError(
                f"{what}: a call that did not report may still take effect until {action.lands_by:%H:%M:%S} UTC; "
                f"settle it then",
                until=action.lands_by,
            )

    # -- hints in a mass outage -------------------------------------------------------------------------------------

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

    @retried
    def note_component(self, kind: str, host: str, version: str, hook: str | None) -> None:
        """This Airflow process has the plugin; ``hook``: the listener hook that was just called in it."""
        self.connection.execute(
            Q.note_component, {"kind": kind, "host": host, "version": version, "hook": hook}
        )


def _new_saga(dag_id: str, run_id: str, state: str) -> dict[str, Any]:
    return {
        "dag_id": dag_id,
        "run_id": run_id,
        "state": state,
        "cause": None,
        "actor": None,
        "reason": None,
        "stop_clear_number": -1,
    }
