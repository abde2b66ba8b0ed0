"""The verb that freezes a request: every step of its scope is seized at once, and the plan is fixed. See PROTOCOL 6.

From then on no forward attempt of these steps may write, and one run owns the undo.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

import psycopg
from psycopg.types.json import Jsonb

from airflow_saga.core.errors import StoreError
from airflow_saga.core.records import RequestRow, SagaRow, StepRow
from airflow_saga.core.states import (
    GOES_ON_CAUSES,
    NO_POLICY_CAUSES,
    Mode,
    RequestState,
    SagaState,
    StepState,
)
from airflow_saga.store.connect import retried
from airflow_saga.store.queries import Q
from airflow_saga.store.rows import first, note, one, wake
from airflow_saga.store.saga import move_saga, steps_with_lease
from airflow_saga.store.scope import (
    WHOLE_STEP,
    Cut,
    cut_for_undo,
    lock_request,
    lock_steps_in_scope,
    plan_of,
    scope_of,
    withdraw,
)

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


class FreezeVerbs:
    """One verb, one transaction. The connection is in autocommit and belongs to one thread."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

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
            saga, request = lock_request(self.connection, request_uuid)
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

    def _policy_applies(self, saga: SagaRow) -> bool:
        return (
            saga.state == SagaState.FAILED
            and saga.on_failure == "compensate"
            and (saga.cause or "") not in NO_POLICY_CAUSES
        )

    def _withdraw(self, saga: SagaRow, request: RequestRow) -> FreezeResult:
        message = f"the saga is {saga.state}, so the policy asks for no undo"
        withdraw(self.connection, request, message)
        return FreezeResult(Freeze.WITHDRAWN, request, saga, message)

    def _holders(self, saga: SagaRow, request: RequestRow) -> list[StepRow]:
        if request.whole_run:
            return steps_with_lease(self.connection, saga.saga_id)
        scope = [step.step_id for step in lock_steps_in_scope(self.connection, saga, request)]
        return steps_with_lease(self.connection, saga.saga_id, scope)

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
        cuts = {} if request.whole_run else scope_of(self.connection, request)
        for step in lock_steps_in_scope(self.connection, saga, request):
            self._seize(step, request, cuts.get(step.step_id, WHOLE_STEP))
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

    def _seize(self, step: StepRow, request: RequestRow, cut: Cut) -> None:
        if step.state not in _SEIZABLE:
            raise StoreError(f"{step.label} is {step.state} though no other undo is open: this is a bug")
        goes_on = request.cause in GOES_ON_CAUSES
        whole = cut.from_seq == 0 and not goes_on
        self.connection.execute(Q.seize_step, {"step_id": step.step_id, "whole": whole})
        self.connection.execute(Q.sweep_step, {"step_id": step.step_id})
        self.connection.execute(Q.stop_deferred, {"step_id": step.step_id})
        cut_for_undo(self.connection, step, cut, goes_on=goes_on)
        scope = {"request_id": request.request_id, "step_id": step.step_id, "from_seq": 0}
        if request.whole_run:
            self.connection.execute(Q.insert_scope, scope)

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
            lock_steps_in_scope(self.connection, saga, request)
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
