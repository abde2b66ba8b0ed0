"""Verbs of what Airflow was seen to do: a run began, a task of it was marked failed, it ended; a process of it lives.

Listeners tell of it at once and the reconciler later, so each says whether it still matters.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from airflow_saga.core.records import RequestRow, SagaRow, StepRow
from airflow_saga.core.states import NO_POLICY_CAUSES, RequestState, SagaState, StepState
from airflow_saga.store.connect import retried
from airflow_saga.store.decision import Decision, Verdict
from airflow_saga.store.queries import Q
from airflow_saga.store.requests import drop_stale_wish, insert_request, undo_removed_indexes
from airflow_saga.store.rows import many, note, one, wake
from airflow_saga.store.saga import move_saga, open_saga_if_new, steps_with_lease


class RunVerbs:
    """What listeners and the reconciler read. One verb, one transaction."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    @retried
    def open_if_new(self, dag_id: str, run_id: str) -> None:
        """A run of a saga DAG was seen to start: a PENDING row, so that a stop before the first step finds one."""
        open_saga_if_new(self.connection, dag_id, run_id)

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
            if saga.state != SagaState.RUNNING or steps_with_lease(self.connection, saga.saga_id):
                return saga.state
            if one(self.connection, RequestRow, Q.open_request, {"saga_id": saga.saga_id}) is not None:
                return saga.state
            steps = many(self.connection, StepRow, Q.lock_steps_of_saga, {"saga_id": saga.saga_id})
            open_steps = [
                step.label for step in steps if step.state != StepState.SUCCEEDED and not step.is_gone
            ]
            if open_steps:
                reason = f"the run ended as success with steps that did not: {', '.join(open_steps[:10])}"
                move_saga(self.connection, saga, SagaState.FAILED, cause="incomplete", reason=reason)
                return SagaState.FAILED
            move_saga(self.connection, saga, SagaState.COMPLETED)
            return SagaState.COMPLETED

    @retried
    def undo_removed(self, dag_id: str, run_id: str, step_ids: Sequence[int]) -> Decision | None:
        """These indexes are no more: ask for their undo, unless another is asked for (then the next reading does)."""
        with self.connection.transaction():
            saga = one(self.connection, SagaRow, Q.lock_saga, {"dag_id": dag_id, "run_id": run_id})
            open_states = (SagaState.RUNNING, SagaState.COMPLETED)
            if saga is None or saga.state not in open_states or saga.pruned_at is not None:
                return None
            if one(self.connection, RequestRow, Q.open_request, {"saga_id": saga.saga_id}) is not None:
                return None
            request = undo_removed_indexes(self.connection, saga, None, step_ids, saga.clear_number)
            message = f"{dag_id} / {run_id}: {len(step_ids)} indexes are no more and will be undone"
            return Decision(Verdict.CANCELLING, message, saga, request)

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
                return drop_stale_wish(self.connection, saga, cause, "airflow", clear_number)
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

    @retried
    def note_component(self, kind: str, host: str, version: str, hook: str | None) -> None:
        """This Airflow process has the plugin; ``hook``: the listener hook that was just called in it."""
        self.connection.execute(
            Q.note_component, {"kind": kind, "host": host, "version": version, "hook": hook}
        )
