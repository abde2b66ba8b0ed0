"""Verbs of a call that leaves its process: one that waits in Airflow's triggerer, and one that has ended early.

Invariant: a call that is parked belongs to nobody's lease, so neither its step nor its saga waits for it; only a
resumed attempt (``reassert_if_allowed``) or an undo takes it up again.
"""

from __future__ import annotations

from typing import Any

import psycopg

from airflow_saga.core.records import ActionRow, RequestRow, SagaRow, StepRow
from airflow_saga.core.states import Cause, RequestState, SagaState
from airflow_saga.store.connect import retried
from airflow_saga.store.decision import Decision, Verdict
from airflow_saga.store.queries import Q
from airflow_saga.store.requests import insert_request, widen_request
from airflow_saga.store.rows import first, note, one, wake


class DeferralVerbs:
    """One verb, one transaction. The connection is in autocommit and belongs to one thread."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    @retried
    def park_if_held(self, step: StepRow, seq: int, deferral: str, summary: str) -> bool:
        """A PENDING call waits in the triggerer from now on, and its step is STOPPED without a lease.

        False: a newer attempt or the undo owns the step. What the trigger was told is kept in either case.

        :param deferral: what the trigger was told, encoded.
        :param summary: the same for people, in a line.
        """
        values: dict[str, Any] = {
            "saga_id": step.saga_id,
            "step_id": step.step_id,
            "fence": step.fence,
            "generation": step.generation,
            "seq": seq,
            "deferral": deferral,
            "note": summary,
        }
        with self.connection.transaction():
            parked = first(self.connection, Q.park_call, values)
            if parked is None:
                self.connection.execute(Q.note_deferral, values)
                return False
            ids = {"saga_id": step.saga_id, "step_id": step.step_id, "action_id": parked["action_id"]}
            note(self.connection, "call deferred", "airflow", f"{step.label}: {summary}", **ids)
            wake(self.connection, step.saga_id, "step")
            return True

    def parked_call(self, step: StepRow) -> ActionRow | None:
        """The call of this generation that waits in the triggerer, if there is one."""
        key = {"step_id": step.step_id, "generation": step.generation}
        return one(self.connection, ActionRow, Q.parked_call, key)

    @retried
    def undo_parked_if_any(self, step: StepRow, reason: str) -> Decision | None:
        """Its task instance was ended by hand: nobody will wake it, so the call that it left is undone.

        :returns: None where no call of it waits in the triggerer, or the saga does not run any more.
        """
        with self.connection.transaction():
            saga = one(self.connection, SagaRow, Q.lock_saga_by_id, {"saga_id": step.saga_id})
            if saga is None or saga.state not in (SagaState.RUNNING, SagaState.COMPLETED):
                return None
            parked = self.parked_call(step)
            if parked is None:
                return None
            ask: dict[str, Any] = {
                "scope": {step.step_id: 0},
                "cause": Cause.USER,
                "actor": "airflow",
                "reason": f"{step.label}: {reason}",
                "clear_number": saga.clear_number,
            }
            open_request = one(self.connection, RequestRow, Q.open_request, {"saga_id": saga.saga_id})
            frozen = open_request is not None and open_request.state == RequestState.FROZEN
            if open_request is None or frozen:
                state = RequestState.QUEUED if frozen else RequestState.REQUESTED
                request = insert_request(self.connection, saga, state=state, **ask)
            else:
                request = widen_request(self.connection, open_request, **ask)
            wake(self.connection, saga.saga_id, "undo")
            message = f"{step.label}: what it left to the triggerer is undone, since {reason}"
            return Decision(Verdict.CANCELLING, message, saga, request)

    @retried
    def over_if_held(self, step: StepRow, seq: int, settle_seconds: float) -> None:
        """A call in doubt has ended in the process that made it, so it lands within ``settle_seconds`` from now."""
        self.connection.execute(
            Q.call_over,
            {
                "step_id": step.step_id,
                "fence": step.fence,
                "generation": step.generation,
                "seq": seq,
                "settle_seconds": settle_seconds,
            },
        )
