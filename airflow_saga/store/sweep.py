"""Verbs of the reconciler: lost attempts, kept sagas, mass outages, retention. Each is safe to run twice, anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from airflow_saga.core.records import RequestRow, SagaRow, StepRow
from airflow_saga.core.states import Mode, SagaState, StepState
from airflow_saga.store.connect import retried
from airflow_saga.store.queries import Q
from airflow_saga.store.rows import many, note, one, wake
from airflow_saga.store.saga import move_saga, steps_with_lease


class SweepVerbs:
    """One verb, one transaction."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    @retried
    def stop_if_lost(self, saga_id: int, step_id: int) -> bool:
        """Its lease ran out and Airflow says it is not running: STOPPED, what it had begun is in doubt.

        So is what a stopped step (its task was marked failed) had begun, once that can land no more (A1).
        """
        with self.connection.transaction():
            one(self.connection, SagaRow, Q.lock_saga_by_id, {"saga_id": saga_id})
            one(self.connection, StepRow, Q.lock_step_by_id, {"step_id": step_id})
            if self.connection.execute(Q.stop_lost_step, {"step_id": step_id}).fetchone() is not None:
                self.connection.execute(Q.sweep_step, {"step_id": step_id})
                what = "step lost: its lease ran out and Airflow says it is not running"
            elif self.connection.execute(Q.sweep_stopped_step, {"step_id": step_id}).fetchone() is not None:
                what = "call lost: nobody reported how it ended"
            else:
                return False
            note(self.connection, what, "reconciler", saga_id=saga_id, step_id=step_id)
            wake(self.connection, saga_id, "step")
            return True

    @retried
    def suspend_if_quiet(self, saga_id: int, actor: str = "reconciler") -> bool:
        """CANCELLING(keep) → SUSPENDED, once no step holds a lease and no undo is asked for."""
        with self.connection.transaction():
            saga = one(self.connection, SagaRow, Q.lock_saga_by_id, {"saga_id": saga_id})
            if saga is None or saga.state != SagaState.CANCELLING or saga.mode != Mode.KEEP:
                return False
            busy = steps_with_lease(self.connection, saga_id)
            if busy or one(self.connection, RequestRow, Q.open_request, {"saga_id": saga_id}) is not None:
                return False
            for step in many(self.connection, StepRow, Q.lock_steps_of_saga, {"saga_id": saga_id}):
                if step.state == StepState.RUNNING:
                    self.connection.execute(Q.stop_lost_step, {"step_id": step.step_id})
                if step.state in (StepState.RUNNING, StepState.STOPPED):
                    self.connection.execute(Q.sweep_step, {"step_id": step.step_id})
            move_saga(
                self.connection,
                saga,
                SagaState.SUSPENDED,
                cause=saga.cause,
                actor=saga.actor,
                reason=saga.reason,
            )
            note(
                self.connection,
                "suspended",
                actor,
                "its effects are kept; clear it to go on",
                saga_id=saga_id,
            )
            wake(self.connection, saga_id, "settled")
            return True

    @retried
    def hold_if_mass_outage(self, *, causes: Sequence[str], threshold: int, window_seconds: float) -> int:
        """Many sagas lost at once is an outage, not many decisions: above the threshold their hints are held."""
        with self.connection.transaction():
            params: dict[str, Any] = {"causes": list(causes), "window_seconds": window_seconds}
            row = self.connection.execute(Q.recent_hints, params).fetchone()
            if row is None or row[0] <= threshold:
                return 0
            locked = self.connection.execute(Q.lock_sagas_with_recent_hints, params).fetchall()
            params["saga_ids"] = [saga_id for (saga_id,) in locked]
            held = many(self.connection, RequestRow, Q.hold_hints, params)
            for request in held:
                detail = f"{row[0]} sagas asked for an automatic undo within {window_seconds:.0f} s"
                note(
                    self.connection,
                    "undo held",
                    "reconciler",
                    detail,
                    saga_id=request.saga_id,
                    request_id=request.request_id,
                )
            return len(held)

    def prune(self, *, retention_days: int, batch: int = 10_000, most_batches: int = 1_000) -> int:
        """Delete the actions of closed sagas older than this, in batches; the saga row stays as a tombstone.

        A grave is dug first and committed: a clear that comes in between is refused, it never finds half a saga.
        """
        params = {"retention_days": retention_days, "batch": batch}
        for _ in range(most_batches):
            if len(self.connection.execute(Q.bury_old_sagas, params).fetchall()) < batch:
                break
        deleted = 0
        for _ in range(most_batches):
            count = len(self.connection.execute(Q.prune_actions, params).fetchall())
            deleted += count
            if count < batch:
                break
        return deleted
