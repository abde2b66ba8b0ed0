"""Starting the run that carries out an undo request. A convenience: the request's row is the truth.

Whoever writes a request tries this at once, so that an undo begins in a second; what fails here is caught by the
reconciler within its minute. The run is named after the request, so two who trigger the same one get one run.
"""

from __future__ import annotations

import logging

from airflow_saga.core.identity import compensation_dag_id, undo_run_id
from airflow_saga.core.records import RequestRow

log = logging.getLogger(__name__)


def trigger_undo(request: RequestRow, dag_id: str, run_id: str, *, triggered_by: str = "operator") -> bool:
    """Start the undo run of a request; True if it is there now, whoever started it.

    Uses sessions of its own and of its thread, and commits. **Not on the scheduler's main thread**, whose session this
    would end: a listener hands it to a thread of its own. Not in a task either, which has no database.

    :param dag_id: the saga DAG, not its compensation DAG. :param run_id: the run that is undone.
    :param triggered_by: as Airflow shows it; one of ``airflow.utils.types.DagRunTriggeredByType``.
    """
    from airflow.api.common.trigger_dag import trigger_dag
    from airflow.exceptions import DagNotFound, DagRunAlreadyExists
    from airflow.utils.session import create_session
    from airflow.utils.types import DagRunTriggeredByType
    from sqlalchemy.exc import IntegrityError

    undo_dag_id, undo_id = compensation_dag_id(dag_id), undo_run_id(request.request_uuid)
    try:
        with create_session(scoped=False) as session:
            trigger_dag(
                undo_dag_id,
                run_id=undo_id,
                conf={"run_id": run_id, "request": str(request.request_uuid)},
                triggered_by=DagRunTriggeredByType(triggered_by),
                triggering_user_name=request.actor,
                session=session,
            )
    except (DagRunAlreadyExists, IntegrityError):
        return True  # asked for twice, or at the same moment by somebody else
    except DagNotFound:
        log.warning(
            "no DAG %s to undo %s / %s with; the reconciler will try again", undo_dag_id, dag_id, run_id
        )
        return False
    except Exception as problem:
        first_line = (str(problem).splitlines() or [""])[0]
        log.warning(
            "%s / %s could not be started (%s: %s); the reconciler will try again",
            undo_dag_id,
            undo_id,
            type(problem).__name__,
            first_line,
        )
        log.debug("the trace of it", exc_info=True)
        return False
    return True
