"""The API: one route per verb of the command line, by the same name, with the same data.

A verb answers 200 where the saga is, or will be, as asked, also when that was so before: each may be sent again. It
answers 409 where it is refused; the message says who decided what before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import psycopg
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.core_api.security import GetUserDep
from airflow.api_fastapi.logging.decorators import action_logging
from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from airflow_saga.core.states import ActionState, SagaState
from airflow_saga.plugin.web import access
from airflow_saga.settings import Settings, secrets_of_this_process, sensitive_names, store_address
from airflow_saga.store.migrate import check as check_version
from airflow_saga.store.overview import Overview
from airflow_saga.store.reader import Reader
from airflow_saga.telling import lists
from airflow_saga.telling.display import Display, plain
from airflow_saga.telling.told import Told
from airflow_saga.verbs import Answer, Verbs

log = logging.getLogger(__name__)
api = APIRouter(prefix="/api/v1", tags=["saga"])
ONE = "/dags/{dag_id}/runs/{run_id}"
MAX_TEXT = 4000
Reason = Annotated[str | None, Field(max_length=MAX_TEXT, description="Why, for those who read it later")]
ANSWERS: dict[str, ActionState] = {
    "undone": ActionState.COMPENSATED,
    "accepted": ActionState.ACCEPTED,
    "happened": ActionState.DONE,
    "did_not_happen": ActionState.FAILED,
}


class Body(BaseModel):
    """A misspelt field is refused: it could be the one that says ``keep``."""

    model_config = ConfigDict(extra="forbid")


class CancelBody(Body):
    reason: Reason = None
    keep: bool = Field(False, description="Only stop: keep the effects")
    now: bool = Field(False, description="Abandon the call under way, which is in doubt then")


class UndoBody(Body):
    reason: Reason = None
    now: bool = Field(False, description="Abandon the call under way, which is in doubt then")
    from_action: int | None = Field(
        None, description="Only this action and all that came after it, of a saga that is at rest"
    )
    plan: str | None = Field(None, max_length=128, description="Do exactly the plan of this hash, or refuse")


class RetryBody(Body):
    reason: Reason = None


class RewindBody(Body):
    to: str = Field(
        max_length=500, description="The save-point; TASK:NAME where several steps have that name"
    )
    reason: Reason = None


class ResolveBody(Body):
    answer: Literal["undone", "accepted", "happened", "did_not_happen"]
    note: str = Field(min_length=1, max_length=MAX_TEXT, description="How you know")
    result: Any = Field(None, description="Of an action that happened: what the call gave")


# -- looking ----------------------------------------------------------------------------------------------------------


@api.get("/sagas")
def list_sagas(
    user: GetUserDep,
    dag_id: str | None = None,
    state: Annotated[list[SagaState] | None, Query()] = None,
    waiting: bool = False,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
) -> JSONResponse:
    """Sagas of the DAGs that you may see; those that need a person first, or (``waiting``) only those."""
    dag_ids = access.visible_dags(user)
    if dag_id is not None:
        dag_ids = [dag_id] if dag_id in dag_ids else []
    rows = listed(dag_ids, states=state, limit=limit)
    return JSONResponse({"sagas": plain([row for row in rows if row["needs"] or not waiting])})


@api.get(ONE)
def show(user: GetUserDep, dag_id: str, run_id: str) -> JSONResponse:
    """Everything about one saga: what stands, what to do next, what happened when."""
    access.check(user, "GET", dag_id)
    with store() as connection:
        view = Reader(connection).view(dag_id, run_id)
        now = Overview(connection).now()
    told = Told(view, display(), now, start_alert_seconds=Settings.load().start_alert_seconds)
    return JSONResponse(plain(told.data()))


@api.get(f"{ONE}/plan")
def plan(user: GetUserDep, dag_id: str, run_id: str, from_action: int | None = None) -> JSONResponse:
    """What an undo would do now, in its order, and the hash by which to ask for exactly that. Calls nothing."""
    access.check(user, "GET", dag_id)
    with store() as connection:
        planned = Reader(connection).plan(dag_id, run_id, from_action)
    return JSONResponse({"hash": planned.digest, "actions": plain(lists.planned(planned, display()))})


# -- deciding ---------------------------------------------------------------------------------------------------------


@api.post(f"{ONE}/cancel", dependencies=[Depends(action_logging("saga_cancel"))])
def cancel(user: GetUserDep, dag_id: str, run_id: str, body: CancelBody) -> JSONResponse:
    """Stop a running saga, then undo it (or keep its effects)."""
    if body.keep and body.now:
        return refused(
            "keep and now exclude each other: to keep the effects, the call under way is let to end"
        )
    with verbs(user, dag_id, run_id) as verb:
        return _told(verb.cancel(reason=body.reason, keep=body.keep, now=body.now))


@api.post(f"{ONE}/undo", dependencies=[Depends(action_logging("saga_undo"))])
def undo(user: GetUserDep, dag_id: str, run_id: str, body: UndoBody) -> JSONResponse:
    """Undo a saga, whatever state it is in, or (``from_action``) only a part of one that is at rest."""
    if body.from_action is not None and body.now:
        return refused("from_action and now exclude each other: nothing runs in a saga that is at rest")
    with verbs(user, dag_id, run_id) as verb:
        return _told(
            verb.undo(reason=body.reason, now=body.now, plan_hash=body.plan, from_action=body.from_action)
        )


@api.post(f"{ONE}/rewind", dependencies=[Depends(action_logging("saga_rewind"))])
def rewind(user: GetUserDep, dag_id: str, run_id: str, body: RewindBody) -> JSONResponse:
    """Go back to a save-point: undo what came after it, and run on from there."""
    with verbs(user, dag_id, run_id) as verb:
        return _told(verb.rewind(body.to, reason=body.reason))


@api.post(f"{ONE}/actions/{{action}}/resolve", dependencies=[Depends(action_logging("saga_resolve"))])
def resolve(user: GetUserDep, dag_id: str, run_id: str, action: int, body: ResolveBody) -> JSONResponse:
    """Say what became of an action, where the product cannot know."""
    has_result = body.answer == "happened" and "result" in body.model_fields_set
    with verbs(user, dag_id, run_id) as verb:
        return _told(
            verb.resolve(
                action, to=ANSWERS[body.answer], note=body.note, result=body.result, has_result=has_result
            )
        )


@api.post(f"{ONE}/probe", dependencies=[Depends(action_logging("saga_probe"))])
def probe(user: GetUserDep, dag_id: str, run_id: str) -> JSONResponse:
    """Ask the verify probes about what is in doubt; the plan shows what they say. Calls nothing else."""
    with verbs(user, dag_id, run_id) as verb:
        return _told(verb.probe())


@api.post(f"{ONE}/actions/{{action}}/retry", dependencies=[Depends(action_logging("saga_retry"))])
def retry(user: GetUserDep, dag_id: str, run_id: str, action: int, body: RetryBody) -> JSONResponse:
    """Try the undo of one action again; no other is tried again."""
    with verbs(user, dag_id, run_id) as verb:
        return _told(verb.retry(action, reason=body.reason))


@api.post(f"{ONE}/release", dependencies=[Depends(action_logging("saga_release"))])
def release(user: GetUserDep, dag_id: str, run_id: str) -> JSONResponse:
    """Let an undo go on that is held since many sagas failed at once."""
    with verbs(user, dag_id, run_id) as verb:
        return _told(verb.release())


# -- parts ------------------------------------------------------------------------------------------------------------


@contextmanager
def store() -> Iterator[psycopg.Connection]:
    """The store, opened and of the right version.

    :raises StoreError: answered with 503.
    """
    with store_address().open() as connection:
        check_version(connection)
        yield connection


def display() -> Display:
    return Display(sensitive_names(), secrets_of_this_process().pattern())


def listed(
    dag_ids: Sequence[str], *, states: Sequence[str] | None = None, limit: int
) -> list[dict[str, Any]]:
    """The sagas of these DAGs, as the API and the pages list them."""
    with store() as connection:
        return lists.list_sagas(
            connection,
            display(),
            start_alert_seconds=Settings.load().start_alert_seconds,
            dag_ids=dag_ids,
            states=states,
            limit=limit,
        )


@contextmanager
def verbs(user: BaseUser, dag_id: str, run_id: str) -> Iterator[Verbs]:
    """The verbs about this saga, if this user may use them."""
    access.check(user, "PUT", dag_id)
    with store() as connection:
        yield Verbs(
            connection,
            dag_id,
            run_id,
            actor=f"user:{user.get_name()}",
            triggered_by="rest_api",
            warn=lambda text: log.warning("%s / %s: %s", dag_id, run_id, text),
        )


def _told(answer: Answer) -> JSONResponse:
    data = plain(answer.as_data(display()))
    return JSONResponse(data, status_code=200 if answer.is_done else 409)


def refused(message: str, status: int = 400) -> JSONResponse:
    return JSONResponse({"message": message}, status_code=status)
