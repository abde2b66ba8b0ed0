"""The scope of an undo: which steps a request covers from which action on, and the plan that follows from it."""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

import psycopg

from airflow_saga.core.errors import UnknownSagaError, VerbRefusedError
from airflow_saga.core.plan import build_plan, hash_of
from airflow_saga.core.records import ActionRow, RequestRow, SagaRow, StepRow
from airflow_saga.core.states import GOES_ON_CAUSES, RequestState, StepState
from airflow_saga.store.queries import Q
from airflow_saga.store.rows import dicts, many, note, one
from airflow_saga.store.saga import steps_with_lease


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


def cut_for_undo(connection: psycopg.Connection, step: StepRow, cut: Cut, *, goes_on: bool) -> None:
    """Part a step at the place from which it is undone: what came before is kept, the rest gets its tries anew."""
    if cut.from_seq > 0:
        place = {"step_id": step.step_id, **cut._asdict()}
        connection.execute(Q.cut_step, place)
        connection.execute(Q.carry_savepoints, place)
    reset = {"step_id": step.step_id, "goes_on": goes_on, "from_seq": cut.from_seq}
    connection.execute(Q.reset_for_undo, reset)


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


def scope_that_goes_on(connection: psycopg.Connection, saga: SagaRow) -> dict[int, int] | None:
    """The steps that an undo has closed, for one that goes on with it; None: the whole run.

    The others stand on purpose, where a person has undone only what came after a place.
    """
    steps = many(connection, StepRow, Q.steps_of_saga, {"saga_id": saga.saga_id})
    closed = [step.step_id for step in steps if step.state in (StepState.UNDONE, StepState.PARTLY_UNDONE)]
    return None if len(closed) == len(steps) else dict.fromkeys(closed, 0)


def plan_of(connection: psycopg.Connection, saga: SagaRow, request: RequestRow) -> tuple[dict[str, Any], str]:
    """The plan that this request would freeze now, and its hash."""
    cuts = None if request.whole_run else scope_of(connection, request)
    from_seqs = None if cuts is None else {step_id: cut.from_seq for step_id, cut in cuts.items()}
    return plan_of_scope(connection, saga, from_seqs, goes_on=request.cause in GOES_ON_CAUSES)


def plan_of_scope(
    connection: psycopg.Connection, saga: SagaRow, scope: dict[int, int] | None, *, goes_on: bool = False
) -> tuple[dict[str, Any], str]:
    """What an undo of this scope would do now, and the hash of it.

    :param scope: step_id → first seq of its generation; None: the whole run.
    """
    steps = many(connection, StepRow, Q.steps_of_saga, {"saga_id": saga.saga_id})
    if scope is not None:
        steps = [step for step in steps if step.step_id in scope]
    actions = many(connection, ActionRow, Q.actions_of_steps, {"step_ids": [step.step_id for step in steps]})
    plan = build_plan(steps, actions, scope or {}, goes_on=goes_on)
    return plan, hash_of(plan)


def check_signed_plan(
    connection: psycopg.Connection, saga: SagaRow, signed: str, scope: dict[int, int] | None = None
) -> None:
    """:raises VerbRefusedError: the plan whose hash a person signed is not what an undo would do now."""
    running = steps_with_lease(connection, saga.saga_id)
    if running:
        raise VerbRefusedError(
            f"{saga.dag_id} / {saga.run_id}: {running[0].label} is still running, so a plan cannot be exact; "
            f"stop the saga first, or undo without --plan"
        )
    _, now_hash = plan_of_scope(connection, saga, scope)
    if now_hash != signed:
        raise VerbRefusedError(
            f"{saga.dag_id} / {saga.run_id}: something moved since that plan was made; look again: "
            f"airflow saga plan"
        )
