"""The scope of an undo: which steps a request covers from which action on, and the plan that follows from it."""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

import psycopg

from airflow_saga.core.errors import UnknownSagaError, VerbRefusedError
from airflow_saga.core.plan import build_plan, hash_of
from airflow_saga.core.records import ActionRow, RequestRow, SagaRow, StepRow
from airflow_saga.core.states import Cause, RequestState
from airflow_saga.store.queries import Q
from airflow_saga.store.rows import dicts, many, note, one
from airflow_saga.store.saga import steps_with_lease

GOES_ON = (Cause.DUE, Cause.LATE)
"""Causes of an undo that nobody asked for anew: what an earlier one gave up still waits for a person."""


class Cut(NamedTuple):
    """Where in a step an undo begins.

    :ivar from_seq: of the first action that is undone, in the step's generation; 0: the whole step.
    :ivar checkpoint: the one that the step goes on from.
    """

    from_seq: int
    checkpoint: str | None = None


WHOLE_STEP = Cut(0)


def scope_of(connection: psycopg.Connection, request: RequestRow) -> dict[int, Cut]:
    """The steps of a request that is not about the whole run, by step_id."""
    rows = dicts(connection, Q.scope_of_request, {"request_id": request.request_id})
    return {row["step_id"]: Cut(row["from_seq"], row["checkpoint"]) for row in rows}


def lock_request(connection: psycopg.Connection, request_uuid: UUID) -> tuple[SagaRow, RequestRow]:
    """A request and its saga, the saga locked first as by everybody."""
    found = one(connection, RequestRow, Q.find_request, {"request_uuid": request_uuid})
    if found is None:
        raise UnknownSagaError(f"there is no undo request {request_uuid}")
    saga = one(connection, SagaRow, Q.lock_saga_by_id, {"saga_id": found.saga_id})
    request = one(connection, RequestRow, Q.lock_request, {"request_uuid": request_uuid})
    assert saga is not None
    assert request is not None
    return saga, request


def withdraw(connection: psycopg.Connection, request: RequestRow, why: str) -> None:
    """The request ends without an undo."""
    connection.execute(Q.move_request, {"request_id": request.request_id, "state": RequestState.WITHDRAWN})
    ids = {"saga_id": request.saga_id, "request_id": request.request_id}
    note(connection, "undo withdrawn", "airflow", why, **ids)


def lock_steps_in_scope(connection: psycopg.Connection, saga: SagaRow, request: RequestRow) -> list[StepRow]:
    if request.whole_run:
        return many(connection, StepRow, Q.lock_steps_of_saga, {"saga_id": saga.saga_id})
    return many(connection, StepRow, Q.lock_steps_of_request, {"request_id": request.request_id})


def plan_of(
    connection: psycopg.Connection, saga: SagaRow, request: RequestRow | None
) -> tuple[dict[str, Any], str]:
    """The plan an undo would freeze now, and its hash. ``request`` None: of the whole run."""
    steps = many(connection, StepRow, Q.steps_of_saga, {"saga_id": saga.saga_id})
    from_seq: dict[int, int] = {}
    if request is not None and not request.whole_run:
        from_seq = {step_id: cut.from_seq for step_id, cut in scope_of(connection, request).items()}
        steps = [step for step in steps if step.step_id in from_seq]
    actions = many(connection, ActionRow, Q.actions_of_steps, {"step_ids": [step.step_id for step in steps]})
    plan = build_plan(steps, actions, from_seq, goes_on=request is not None and request.cause in GOES_ON)
    return plan, hash_of(plan)


def check_signed_plan(connection: psycopg.Connection, saga: SagaRow, signed: str) -> None:
    """:raises VerbRefusedError: the plan whose hash a person signed is not what an undo would do now."""
    running = steps_with_lease(connection, saga.saga_id)
    if running:
        raise VerbRefusedError(
            f"{saga.dag_id} / {saga.run_id}: {running[0].label} is still running, so a plan cannot be exact; "
            f"stop the saga first, or undo without --plan"
        )
    _, now_hash = plan_of(connection, saga, None)
    if now_hash != signed:
        raise VerbRefusedError(
            f"{saga.dag_id} / {saga.run_id}: something moved since that plan was made; look again: "
            f"airflow saga plan"
        )
