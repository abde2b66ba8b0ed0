"""The API's part for those who run the deployment: doctor, reconcile, prune.

Each concerns the sagas of all DAGs, so each asks for rights to all of them. The tables are made by ``airflow saga db``
alone: that is for who installs, with a database user that may, and no server has to hold such a right.
"""

from __future__ import annotations

import threading
from typing import Annotated

from airflow.api_fastapi.core_api.security import GetUserDep
from airflow.api_fastapi.logging.decorators import action_logging
from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from pydantic import Field

from airflow_saga import upkeep
from airflow_saga.doctor import all_well, examine_within
from airflow_saga.plugin.web import access
from airflow_saga.plugin.web.api import Body, refused, store
from airflow_saga.settings import Settings
from airflow_saga.telling.display import plain

upkeep_api = APIRouter(prefix="/api/v1", tags=["upkeep"])
DOCTOR_SECONDS = 20.0
_pass_under_way = threading.Lock()


class PruneBody(Body):
    retention_days: Annotated[int | None, Field(ge=1, le=100_000)] = None
    yes: bool = Field(False, description="Delete; without it, 409 says what would go")


@upkeep_api.get("/doctor")
def doctor(user: GetUserDep) -> JSONResponse:
    """Whether store, plugin and reconciler are alive; 200 also where one is not, with ``ok`` false."""
    # Whom it names: the store's host and user, the components' hosts, and sagas of any DAG.
    access.check_connection(user, Settings.load().conn_id)
    access.check_all(user, "PUT")
    findings = examine_within(DOCTOR_SECONDS)
    return JSONResponse(
        {"ok": all_well(findings), "findings": plain([finding.data() for finding in findings])}
    )


@upkeep_api.post("/reconcile", dependencies=[Depends(action_logging("saga_reconcile"))])
def reconcile(user: GetUserDep) -> JSONResponse:
    """Look once for what every hook has missed, as the reconciler DAG does."""
    access.check_all(user, "PUT")
    # Two passes do no harm, but each holds one of the server's few threads.
    if not _pass_under_way.acquire(blocking=False):
        return refused("a pass that was asked for before is still under way; nothing more was done", 409)
    try:
        with store() as connection:
            done = upkeep.reconcile(connection, triggered_by="rest_api")
    finally:
        _pass_under_way.release()
    return _told(done)


@upkeep_api.post("/prune", dependencies=[Depends(action_logging("saga_prune"))])
def prune(user: GetUserDep, body: PruneBody) -> JSONResponse:
    """Delete the actions of settled sagas that are old; without ``yes``, say only what would go."""
    access.check_all(user, "PUT")
    access.check_all(user, "DELETE")
    with store() as connection:
        done = upkeep.prune(
            connection, body.retention_days, agreed=lambda what: body.yes, how_to_agree='{"yes": true}'
        )
    return _told(done)


def _told(done: upkeep.Done) -> JSONResponse:
    message = done.message if done.problem is None else f"{done.message}; {done.problem}"
    return JSONResponse(plain({"message": message, **done.data}))
