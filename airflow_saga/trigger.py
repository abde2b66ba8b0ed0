"""Starting the run that carries out an undo request. A convenience: the request's row is the truth.

Whoever writes a request tries this at once, so that an undo begins in a second; what fails here is caught by the
reconciler within its minute. The run is named after the request, so two who trigger the same one get one run.

For processes that have Airflow's database: API server, command line, a scheduler's listener. Airflow reads with the
session of the thread, so this works on a thread of its own and leaves the caller's session alone; still, a listener
on the scheduler's thread hands it over, since the scheduler must not wait. A task asks its supervisor instead
(``airflow_saga.platform``).
"""

from __future__ import annotations

import logging
from typing import Any
from uuid import UUID, uuid4

from airflow_saga.core.identity import compensation_dag_id, probe_run_id, undo_run_id
from airflow_saga.core.records import RequestRow
from airflow_saga.settings import on_a_session_of_its_own

log = logging.getLogger(__name__)

_OVER = frozenset({"success", "failed"})


def trigger_undo(request: RequestRow, dag_id: str, run_id: str, *, triggered_by: str = "operator") -> bool:
    """Start the undo run of a request; True if it is there now, whoever started it. It is committed.

    :param dag_id: the saga DAG, not its compensation DAG.
    :param run_id: the run that is undone.
    :param triggered_by: as Airflow shows it; a value of ``airflow.utils.types.DagRunTriggeredByType``.
    """
    return start_undo_run(dag_id, run_id, request.request_uuid, user=request.actor, triggered_by=triggered_by)


def start_undo_run(
    dag_id: str,
    run_id: str,
    request_uuid: UUID,
    *,
    user: str | None = None,
    triggered_by: str = "operator",
    restart: bool = False,
) -> bool:
    """The same for who has only the request's id.

    :param restart: a run that is there but over, without having carried out its request, is cleared to go on.
    """
    undo_dag_id, undo_id = compensation_dag_id(dag_id), undo_run_id(request_uuid)
    conf = {"run_id": run_id, "request": str(request_uuid)}
    return _started(undo_dag_id, undo_id, conf, user, triggered_by, restart)


def _start(
    undo_dag_id: str, undo_id: str, conf: dict[str, str], user: str | None, triggered_by: str, restart: bool
) -> bool:
    from airflow.exceptions import DagNotFound
    from airflow.utils.session import create_session
    from sqlalchemy.exc import IntegrityError

    try:
        with create_session(scoped=False) as session:
            if not _run_is_there(session, undo_dag_id, undo_id, restart):
                _trigger(session, undo_dag_id, undo_id, conf, user, triggered_by)
    except IntegrityError:
        log.debug("%s / %s was started at the same moment by somebody else", undo_dag_id, undo_id)
    except DagNotFound:
        log.warning("no DAG %s to undo %s with; the reconciler will try again", undo_dag_id, conf["run_id"])
        return False
    return True


def start_probe_run(dag_id: str, run_id: str, *, user: str | None, triggered_by: str) -> str | None:
    """Start a run of the compensation DAG that only asks the verify probes; its id, None if it cannot be started.

    The probes are in the DAG's file, which neither the API server nor a command reads.
    """
    probe_id, conf = probe_run_id(uuid4()), {"run_id": run_id, "probe": "1"}
    started = _started(compensation_dag_id(dag_id), probe_id, conf, user, triggered_by, restart=False)
    return probe_id if started else None


def _started(
    undo_dag_id: str, undo_id: str, conf: dict[str, str], user: str | None, triggered_by: str, restart: bool
) -> bool:
    """Whether that run is there now. What hinders is logged: the request stands, the reconciler tries again."""

    def start() -> bool:
        return _start(undo_dag_id, undo_id, conf, user, triggered_by, restart)

    try:
        return on_a_session_of_its_own(start)
    except Exception as problem:
        said = (str(problem).splitlines() or [""])[0]
        where = f"{undo_dag_id} / {undo_id}"
        log.warning("%s cannot be started (%s: %s)", where, type(problem).__name__, said)
        log.debug("why %s cannot be started", where, exc_info=True)
        return False


def clear_from(dag_id: str, run_id: str, task_id: str, map_index: int) -> int:
    """Clear a task instance and everything downstream of it, so that a run goes on from there; how many were cleared.

    It goes on with the version of the DAG that the run has, as with "clear" in Airflow's UI.

    :raises DagNotFound: Airflow does not know that run, or its DAG.
    """
    return on_a_session_of_its_own(lambda: _clear_from(dag_id, run_id, task_id, map_index))


def _clear_from(dag_id: str, run_id: str, task_id: str, map_index: int) -> int:
    from airflow.exceptions import DagNotFound
    from airflow.models.dagbag import DBDagBag
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session(scoped=False) as session:
        run = session.scalar(select(DagRun).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id))
        dag = None if run is None else DBDagBag().get_dag_for_run(run, session=session)
        if dag is None or not dag.has_task(task_id):
            raise DagNotFound(f"{dag_id} / {run_id} with a task {task_id}")
        later = dag.get_task(task_id).get_flat_relative_ids(upstream=False)
        first: str | tuple[str, int] = task_id if map_index < 0 else (task_id, map_index)
        return int(dag.clear(task_ids=[first, *sorted(later)], run_id=run_id, session=session))


def _run_is_there(session: Any, undo_dag_id: str, undo_id: str, restart: bool) -> bool:
    from airflow.models.dagbag import DBDagBag
    from airflow.models.dagrun import DagRun
    from sqlalchemy import select

    state = session.scalar(select(DagRun.state).where(DagRun.dag_id == undo_dag_id, DagRun.run_id == undo_id))
    if state is None:
        return False
    if restart and str(getattr(state, "value", state)) in _OVER:
        dag = DBDagBag().get_latest_version_of_dag(undo_dag_id, session=session)
        if dag is not None:
            # An undo is carried out by the newest code, whatever version it began with.
            dag.clear(run_id=undo_id, run_on_latest_version=True, session=session)
    return True


def _trigger(
    session: Any, undo_dag_id: str, undo_id: str, conf: dict[str, str], user: str | None, triggered_by: str
) -> None:
    """:raises DagNotFound: Airflow has never parsed that DAG, or its file is gone."""
    from airflow.api.common.trigger_dag import trigger_dag
    from airflow.exceptions import DagNotFound, DagRunAlreadyExists
    from airflow.models.dag import DagModel
    from airflow.utils.types import DagRunTriggeredByType

    model = DagModel.get_current(undo_dag_id, session=session)
    if model is None or model.is_stale:
        raise DagNotFound(undo_dag_id)
    try:
        trigger_dag(
            undo_dag_id,
            run_id=undo_id,
            conf=conf,
            triggered_by=DagRunTriggeredByType(triggered_by),
            triggering_user_name=user,
            session=session,
        )
    except DagRunAlreadyExists:
        log.debug("%s / %s was started by somebody else", undo_dag_id, undo_id)
