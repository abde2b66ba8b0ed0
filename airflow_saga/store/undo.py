"""Verbs of an undo: freeze the request, take a step, compensate action by action, settle. See PROTOCOL 6.

Everything rests on the frozen plan and on fences: a second undo, a killed one, a late one may all try to write, only
the newest attempt of a step may.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

import psycopg
from psycopg.types.json import Jsonb

from airflow_saga.core.errors import StoreError, UndoFencedError, UndoOutOfOrderError, UnknownSagaError
from airflow_saga.core.plan import comes_after
from airflow_saga.core.records import ActionRow, RequestRow, SagaRow, StepRow
from airflow_saga.core.states import (
    NO_POLICY_CAUSES,
    ActionState,
    Cause,
    Mode,
    RequestState,
    SagaState,
    StepState,
)
from airflow_saga.store.connect import retried
from airflow_saga.store.prepared import Prepared
from airflow_saga.store.queries import Q
from airflow_saga.store.requests import insert_request
from airflow_saga.store.rows import dicts, first, many, note, one, wake
from airflow_saga.store.saga import move_saga, steps_with_lease
from airflow_saga.store.scope import GOES_ON, plan_of

_ENDED = (RequestState.SETTLED, RequestState.WITHDRAWN, RequestState.EXPIRED)
_SEIZABLE = (
    StepState.RUNNING,
    StepState.STOPPED,
    StepState.SUCCEEDED,
    StepState.UNDONE,
    StepState.PARTLY_UNDONE,
)


class Freeze(StrEnum):
    """What came of the wish to freeze a request."""

    FROZEN = "frozen"
    NOT_QUIET = "not quiet"
    OWNED = "owned by another run"
    ENDED = "ended"
    WITHDRAWN = "withdrawn"
    HELD = "held"


@dataclass(frozen=True)
class FreezeResult:
    """:ivar waits_for: labels of steps that still hold a lease. :ivar message: for the task log."""

    outcome: Freeze
    request: RequestRow
    saga: SagaRow
    message: str = ""
    waits_for: tuple[str, ...] = ()


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


@dataclass(frozen=True)
class Settled:
    """:ivar residual: the actions that still stand, or may, after this undo."""

    saga: SagaRow
    request: RequestRow
    residual: tuple[ActionRow, ...]


_WRITE_UNDO = Prepared("saga_write_undo", Q.write_undo)
_UNDOING = StepState.UNDOING.encode()


class UndoVerbs:
    """One verb, one transaction. The connection is in autocommit and belongs to one thread."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    # -- freeze -----------------------------------------------------------------------------------------------------

    @retried
    def freeze_if_quiet(
        self,
        request_uuid: UUID,
        owner_run_id: str,
        *,
        owner_is_over: bool = False,
        lease_seconds: float = 60.0,
    ) -> FreezeResult:
        """Seize every step of the scope at once and fix the plan, when no step of it holds a lease (or "now").

        :param owner_is_over: the run that owns a frozen request has ended, as read from Airflow: take it over.
        """
        with self.connection.transaction():
            saga, request = self._locked(request_uuid)
            if request.state in _ENDED:
                message = f"request {request.number} is {request.state} already"
                return FreezeResult(Freeze.ENDED, request, saga, message)
            if request.state == RequestState.FROZEN:
                return self._take_over(saga, request, owner_run_id, owner_is_over, lease_seconds)
            if request.state == RequestState.HELD:
                message = "held because many sagas failed at once; a person releases it: airflow saga release"
                return FreezeResult(Freeze.HELD, request, saga, message)
            if request.state == RequestState.QUEUED:
                return FreezeResult(Freeze.NOT_QUIET, request, saga, "waits for the undo before it")
            if request.state == RequestState.HINTED and not self._policy_applies(saga):
                return self._withdraw(saga, request)
            waits = self._holders(saga, request)
            if waits and not (request.stop_now or saga.stop_now):
                message = f"waiting for {', '.join(step.label for step in waits)} to stop"
                return FreezeResult(
                    Freeze.NOT_QUIET, request, saga, message, tuple(step.label for step in waits)
                )
            return self._freeze(saga, request, owner_run_id, lease_seconds)

    def _locked(self, request_uuid: UUID) -> tuple[SagaRow, RequestRow]:
        found = one(self.connection, RequestRow, Q.find_request, {"request_uuid": request_uuid})
        if found is None:
            raise UnknownSagaError(f"there is no undo request {request_uuid}")
        saga = one(self.connection, SagaRow, Q.lock_saga_by_id, {"saga_id": found.saga_id})
        request = one(self.connection, RequestRow, Q.lock_request, {"request_uuid": request_uuid})
        assert saga is not None
        assert request is not None
        return saga, request

    def _policy_applies(self, saga: SagaRow) -> bool:
        return (
            saga.state == SagaState.FAILED
            and saga.on_failure == "compensate"
            and (saga.cause or "") not in NO_POLICY_CAUSES
        )

    def _withdraw(self, saga: SagaRow, request: RequestRow) -> FreezeResult:
        self.connection.execute(
            Q.move_request, {"request_id": request.request_id, "state": RequestState.WITHDRAWN}
        )
        message = f"the saga is {saga.state}, so the policy asks for no undo"
        note(
            self.connection,
            "undo withdrawn",
            "airflow",
            message,
            saga_id=saga.saga_id,
            request_id=request.request_id,
        )
        return FreezeResult(Freeze.WITHDRAWN, request, saga, message)

    def _holders(self, saga: SagaRow, request: RequestRow) -> list[StepRow]:
        step_ids = None if request.whole_run else [row.step_id for row in self._scope_steps(saga, request)]
        return steps_with_lease(self.connection, saga.saga_id, step_ids)

    def _scope_steps(self, saga: SagaRow, request: RequestRow) -> list[StepRow]:
        if request.whole_run:
            return many(self.connection, StepRow, Q.lock_steps_of_saga, {"saga_id": saga.saga_id})
        return many(self.connection, StepRow, Q.lock_steps_of_request, {"request_id": request.request_id})

    def _freeze(
        self, saga: SagaRow, request: RequestRow, owner_run_id: str, lease_seconds: float
    ) -> FreezeResult:
        if request.state == RequestState.HINTED:
            move_saga(
                self.connection,
                saga,
                SagaState.CANCELLING,
                mode=Mode.UNDO,
                cause=request.cause,
                actor="airflow",
                reason=request.reason or "on_failure=compensate",
                stop_clear_number=max(saga.clear_number, request.clear_number),
            )
        for step in self._scope_steps(saga, request):
            if step.state not in _SEIZABLE:
                raise StoreError(f"{step.label} is {step.state} though no other undo is open: this is a bug")
            self.connection.execute(Q.seize_step, {"step_id": step.step_id})
            self.connection.execute(Q.sweep_step, {"step_id": step.step_id})
            goes_on = request.cause in GOES_ON
            self.connection.execute(Q.reset_for_undo, {"step_id": step.step_id, "goes_on": goes_on})
            scope = {"request_id": request.request_id, "step_id": step.step_id, "from_seq": 0}
            if request.whole_run:
                self.connection.execute(Q.insert_scope, scope)
        plan, digest = plan_of(self.connection, saga, request)
        frozen = one(
            self.connection,
            RequestRow,
            Q.freeze_request,
            {
                "request_id": request.request_id,
                "plan": Jsonb(plan),
                "plan_hash": digest,
                "owner_run_id": owner_run_id,
                "lease_seconds": lease_seconds,
            },
        )
        assert frozen is not None
        count = sum(len(step["actions"]) for step in plan["steps"])
        detail = f"{count} actions of {len(plan['steps'])} steps, plan {digest[:12]}"
        note(
            self.connection,
            "undo frozen",
            owner_run_id,
            detail,
            saga_id=saga.saga_id,
            request_id=request.request_id,
        )
        wake(self.connection, saga.saga_id, "frozen")
        return FreezeResult(Freeze.FROZEN, frozen, saga, detail)

    def _take_over(
        self, saga: SagaRow, request: RequestRow, owner_run_id: str, owner_is_over: bool, lease_seconds: float
    ) -> FreezeResult:
        if request.owner_run_id != owner_run_id:
            live = (first(self.connection, Q.owner_lease_is_live, {"request_id": request.request_id}) or {})[
                "live"
            ]
            if live and not owner_is_over:
                message = f"{request.owner_run_id} carries this undo out already"
                return FreezeResult(Freeze.OWNED, request, saga, message)
            detail = f"from {request.owner_run_id}"
            self._scope_steps(saga, request)
            self.connection.execute(Q.fence_steps_of_request, {"request_id": request.request_id})
            note(
                self.connection,
                "undo taken over",
                owner_run_id,
                detail,
                saga_id=saga.saga_id,
                request_id=request.request_id,
            )
        owned = one(
            self.connection,
            RequestRow,
            Q.own_request,
            {"request_id": request.request_id, "owner_run_id": owner_run_id, "lease_seconds": lease_seconds},
        )
        assert owned is not None
        return FreezeResult(Freeze.FROZEN, owned, saga, "frozen before; going on")

    # -- one step ---------------------------------------------------------------------------------------------------

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
            saga, request = self._locked(request_uuid)
            if request.state != RequestState.FROZEN or request.owner_run_id != owner_run_id:
                raise UndoFencedError(
                    f"undo {request.number} of {saga.dag_id} / {saga.run_id} is {request.state} and carried out by "
                    f"{request.owner_run_id or 'nobody'}; {owner_run_id} called nothing"
                )
            steps = self._scope_steps(saga, request)
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

    # -- the end ----------------------------------------------------------------------------------------------------

    def unsettled(self, request: RequestRow) -> list[ActionRow]:
        return many(self.connection, ActionRow, Q.unsettled_of_request, {"request_id": request.request_id})

    @retried
    def settle_if_all_settled(self, request_uuid: UUID, owner_run_id: str) -> Settled | None:
        """FROZEN → SETTLED, its steps UNDONE or PARTLY_UNDONE, the saga CANCELLED or PARTIALLY_CANCELLED.

        None while an action of the plan is not settled (and the saga does not halt at a failed compensation).
        """
        with self.connection.transaction():
            saga, request = self._locked(request_uuid)
            if request.state == RequestState.SETTLED:
                return Settled(saga, request, self._residual(saga, request))
            if request.state != RequestState.FROZEN or request.owner_run_id != owner_run_id:
                raise UndoFencedError(
                    f"undo {request.number} is {request.state}, owned by {request.owner_run_id}"
                )
            steps = self._scope_steps(saga, request)
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

    # -- asked for again --------------------------------------------------------------------------------------------

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
                move_saga(
                    self.connection,
                    saga,
                    SagaState.CANCELLING,
                    mode=Mode.UNDO,
                    cause=saga.cause,
                    actor=saga.actor,
                    reason=saga.reason,
                    stop_clear_number=saga.stop_clear_number,
                )
            return request
