"""The row of a saga: opened, moved, closed. Each of these works in the transaction of the verb that calls it."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from airflow_saga.core.records import SagaRow, StepRow
from airflow_saga.core.states import Mode, SagaState
from airflow_saga.store.queries import Q
from airflow_saga.store.rows import first, many, note, one


def open_saga_if_new(connection: psycopg.Connection, dag_id: str, run_id: str) -> None:
    """A PENDING row, if the run has none."""
    connection.execute(
        Q.insert_saga,
        {
            "dag_id": dag_id,
            "run_id": run_id,
            "state": SagaState.PENDING,
            "cause": None,
            "actor": None,
            "reason": None,
            "stop_clear_number": -1,
        },
    )


def lock_or_open_saga(connection: psycopg.Connection, dag_id: str, run_id: str) -> SagaRow:
    row = one(connection, SagaRow, Q.lock_saga, {"dag_id": dag_id, "run_id": run_id})
    if row is None:
        open_saga_if_new(connection, dag_id, run_id)
        row = one(connection, SagaRow, Q.lock_saga, {"dag_id": dag_id, "run_id": run_id})
    assert row is not None
    return row


def steps_with_lease(
    connection: psycopg.Connection, saga_id: int, step_ids: Sequence[int] | None = None
) -> list[StepRow]:
    """The steps that an attempt holds now, of these or of the whole saga."""
    return many(connection, StepRow, Q.running_leases, {"saga_id": saga_id, "step_ids": step_ids})


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


def undo_again(connection: psycopg.Connection, saga: SagaRow, reason: str | None) -> None:
    """A saga that an undo has closed is stopped once more, for the cause and by whom it was stopped before."""
    move_saga(
        connection,
        saga,
        SagaState.CANCELLING,
        mode=Mode.UNDO,
        cause=saga.cause,
        actor=saga.actor,
        reason=reason,
        stop_clear_number=saga.stop_clear_number,
    )


def close_if_nothing_stands(
    connection: psycopg.Connection, saga: SagaRow, step: StepRow, *, actor: str | None, reason: str
) -> SagaState | None:
    """After the last residual of a step, and of a partly cancelled saga, is settled without an undo.

    SUSPENDED where what is left stands on purpose: it came before the place from which the saga was undone.
    """
    connection.execute(Q.step_resolved, {"step_id": step.step_id})
    state = state_after_undo(connection, saga)
    if saga.state != SagaState.PARTIALLY_CANCELLED or state == SagaState.PARTIALLY_CANCELLED:
        return None
    move_saga(connection, saga, state, cause=saga.cause, actor=actor, reason=reason)
    return state


def state_after_undo(connection: psycopg.Connection, saga: SagaRow) -> SagaState:
    """What an undo has made of a saga: partly cancelled while something stands that it was to take away."""
    row = first(connection, Q.left_by_undo, {"saga_id": saga.saga_id})
    assert row is not None
    if row["failed"]:
        return SagaState.PARTIALLY_CANCELLED
    return SagaState.SUSPENDED if row["kept"] else SagaState.CANCELLED
