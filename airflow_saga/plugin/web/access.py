"""Who may look, who may decide, and from where a decision may come.

Airflow gives a plugin's app no protection at all: not of its routes, and against a foreign page that posts with the
viewer's cookie neither (both tried on 3.3.2). So both checks hang at the app itself, where no new route can miss them.
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import (
    ConnectionDetails,
    DagAccessEntity,
    DagDetails,
)
from airflow.api_fastapi.core_api.security import get_user
from airflow.configuration import conf
from airflow.models.connection import Connection
from airflow.models.dag import DagModel
from airflow.models.team import Team
from fastapi import Depends, HTTPException, Request

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_BODY_BYTES = 1024 * 1024
Method = Literal["GET", "PUT"]


def comes_from_our_own_page(request: Request) -> None:
    """Refuse what another site, or another port of this host, has a viewer's browser send.

    A request that brings its own token is not sent by a foreign page, which does not know it. Only ``Bearer`` counts:
    a browser adds ``Basic`` by itself.

    :raises HTTPException: 403.
    """
    if request.method in SAFE_METHODS or request.headers.get("authorization", "").lower().startswith(
        "bearer "
    ):
        return
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        is_ours = site == "same-origin"
    else:
        is_ours = origin is not None and urlsplit(origin).netloc == request.headers.get("host")
    if not is_ours:
        raise HTTPException(
            403,
            "this request was sent by another page than Airflow's own, or by a program without a token; nothing was "
            "done. Programs send 'Authorization: Bearer …'",
        )


def is_short(request: Request) -> None:
    """Refuse a body that is too long, or does not say how long it is, before it is read.

    :raises HTTPException: 411, 413.
    """
    if request.method in SAFE_METHODS:
        return
    if "transfer-encoding" in request.headers:
        raise HTTPException(411, "say how long the body is (Content-Length)")
    if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
        raise HTTPException(413, f"a body of more than {MAX_BODY_BYTES} bytes is not read")


EVERY_ROUTE = [Depends(get_user), Depends(is_short), Depends(comes_from_our_own_page)]
"""The dependencies of the app itself; who is not known gets 401 from the first."""


def may(user: BaseUser, method: Method, dag_id: str) -> bool:
    """Whether Airflow lets this user see (``GET``) or change (``PUT``) the runs of this DAG."""
    return bool(
        get_auth_manager().is_authorized_dag(
            method=method,
            access_entity=DagAccessEntity.RUN,
            details=DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id)),
            user=user,
        )
    )


def check(user: BaseUser, method: Method, dag_id: str) -> None:
    """:raises HTTPException: 403, whether or not there is such a DAG."""
    if not may(user, method, dag_id):
        what = "see" if method == "GET" else "change"
        raise HTTPException(403, f"you may not {what} runs of {dag_id}")


def may_all(user: BaseUser, method: Literal["PUT", "DELETE"]) -> bool:
    """Whether Airflow lets this user change (``PUT``) or delete (``DELETE``) the runs of every DAG there is.

    Asked of runs and of DAGs: FAB's right to edit runs does not say whose, it goes along with one to edit single DAGs.
    And asked for each team, where Airflow has teams: without a name, it is asked about DAGs of none.
    """
    manager = get_auth_manager()
    details = [None]
    if conf.getboolean("core", "multi_team", fallback=False):
        details += [DagDetails(team_name=name) for name in sorted(Team.get_all_team_names())]
    return all(
        manager.is_authorized_dag(method=method, access_entity=DagAccessEntity.RUN, details=each, user=user)
        and manager.is_authorized_dag(method="PUT", details=each, user=user)
        for each in details
    )


def check_all(user: BaseUser, method: Literal["PUT", "DELETE"]) -> None:
    """:raises HTTPException: 403."""
    if not may_all(user, method):
        what = "change" if method == "PUT" else "delete"
        raise HTTPException(403, f"this concerns all DAGs, and you may not {what} runs of each of them")


def check_connection(user: BaseUser, conn_id: str) -> None:
    """:raises HTTPException: 403."""
    details = ConnectionDetails(conn_id=conn_id, team_name=Connection.get_team_name(conn_id))
    if not get_auth_manager().is_authorized_connection(method="GET", details=details, user=user):
        raise HTTPException(403, "this names hosts, and you may not see connections")


def visible_dags(user: BaseUser) -> list[str]:
    """The DAGs whose runs this user may see."""
    manager = get_auth_manager()
    dag_ids = sorted(manager.get_authorized_dag_ids(user=user, method="GET"))
    if manager.is_authorized_dag(method="GET", access_entity=DagAccessEntity.RUN, user=user):
        return dag_ids
    # FAB: who may see a DAG need not see runs, and may see those of some DAGs only.
    return [dag_id for dag_id in dag_ids if may(user, "GET", dag_id)]
