"""Answering what Airflow asks about an action (Required Actions) once the action is settled elsewhere.

A convenience: the store's row is the truth and is written first; a question that cannot be answered from here finds it
when it looks the next time. What is done is what Airflow's own API does with a person's answer, except for a question
that was put just now: that answer is recorded, and its task is left to wait for a moment before it goes on.

For processes that have Airflow's database, on a session of its own; see ``airflow_saga.trigger``, which does the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from airflow_saga.core.identity import compensation_dag_id
from airflow_saga.core.records import RequestRow
from airflow_saga.core.states import RequestState
from airflow_saga.operators.review import REVIEW_TASK, REVIEWED_KEY, SETTLE_TASK, Asked, questions_put
from airflow_saga.settings import on_a_session_of_its_own

log = logging.getLogger(__name__)

HEARD_AFTER = timedelta(seconds=6)
"""A task that goes on sooner after it was parked Airflow (3.3.2) can take for one that was killed: it hears late of the
end of the process that parked it."""
PATIENCE_SECONDS = 1.0
"""So long a question that is being put at this moment is waited for, since a person waits too."""
LOOK_SECONDS = 0.1
_WAITS = "awaiting_input"
_AT_WORK = "running"
_OVER = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})


@dataclass(frozen=True)
class Given:
    """What is answered.

    :ivar option: as the question offers it; None, or one that it does not offer: it only looks soon.
    """

    option: str | None
    note: str
    who: str


def answer_questions(dag_id: str, requests: Iterable[RequestRow], action_id: int, given: Given) -> list[str]:
    """Answer every question about an action that is open; what a person should hear about that, as sentences.

    :param dag_id: the saga DAG.
    :param requests: all there are of the saga.
    """
    carried_out = [request for request in requests if request.state == RequestState.SETTLED]
    if not carried_out:
        return []
    undo_dag_id = compensation_dag_id(dag_id)
    try:
        return on_a_session_of_its_own(lambda: _answer_all(undo_dag_id, carried_out, action_id, given))
    except Exception as problem:
        # Whatever hinders Airflow: the store has the answer.
        why = (str(problem).splitlines() or [""])[0]
        log.debug("why the question about action %d cannot be answered", action_id, exc_info=True)
        return [
            f"the question about it in Airflow's Required Actions cannot be answered now "
            f"({type(problem).__name__}: {why}); it ends by itself when it looks the next time"
        ]


def _answer_all(undo_dag_id: str, requests: list[RequestRow], action_id: int, given: Given) -> list[str]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    told = []
    for asked in _questions_about(undo_dag_id, requests, action_id):
        said = _answer(undo_dag_id, asked, given)
        while said is None and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            said = _answer(undo_dag_id, asked, given)
        if said is None:
            said = (
                "the question about it is being put in Airflow right now; it ends when it looks the next time"
            )
        if said:
            told.append(said)
    return told


def _questions_about(undo_dag_id: str, requests: list[RequestRow], action_id: int) -> list[Asked]:
    """Those of undo runs that are not over."""
    from airflow.models.dagrun import DagRun
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session
    from sqlalchemy import select

    found = (
        select(XComModel.run_id, XComModel.value)
        .join(DagRun, DagRun.id == XComModel.dag_run_id)
        .where(
            XComModel.dag_id == undo_dag_id,
            XComModel.run_id.in_([request.owner_run_id for request in requests]),
            XComModel.task_id == SETTLE_TASK,
            XComModel.key == REVIEWED_KEY,
            DagRun.state.in_(("queued", "running")),
        )
    )
    with create_session(scoped=False) as session:
        reviewed = {row.run_id: XComModel.deserialize_value(row) for row in session.execute(found)}
    return [asked for asked in questions_put(requests, reviewed.get) if asked.action_id == action_id]


def _answer(undo_dag_id: str, asked: Asked, given: Given) -> str | None:
    """What there is to say, often nothing; None: it is being put at this moment, or somebody is at it."""
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import select

    find = select(TaskInstance.id, TaskInstance.state).where(
        TaskInstance.dag_id == undo_dag_id,
        TaskInstance.run_id == asked.run_id,
        TaskInstance.task_id == REVIEW_TASK,
        TaskInstance.map_index == asked.map_index,
    )
    with create_session(scoped=False) as session:
        found = session.execute(find).one_or_none()
        if found is None or found.state in _OVER:
            return ""
        task, detail = _locked(session, found.id)
        if task is None:
            return None
        if detail is None:  # not put yet; its task asks the store before it does, and may just have done so
            return None if task.state == _AT_WORK else ""
        if detail.response_received:
            who, what = detail.responded_by_user_name, ", ".join(detail.chosen_options or ())
            return (
                f"{who or 'somebody'} has answered “{what}” in Airflow meanwhile; that answer changes nothing"
            )
        if task.state != _WAITS:
            return None if task.state == _AT_WORK else ""
        _write(session, task, detail, given)
        return ""


def _locked(session: Any, ti_id: UUID) -> tuple[Any, Any]:
    """The task instance, None while somebody else holds it, and its question; locked in the order of Airflow's API."""
    from airflow.models.hitl import HITLDetail
    from airflow.models.taskinstance import TaskInstance
    from sqlalchemy import select

    task = session.get(TaskInstance, ti_id, with_for_update={"of": TaskInstance, "skip_locked": True})
    if task is None:
        return None, None
    question = select(HITLDetail).where(HITLDetail.ti_id == ti_id)
    return task, session.scalar(question.with_for_update(of=HITLDetail))


def _write(session: Any, task: Any, detail: Any, given: Given) -> None:
    """As Airflow's ``update_hitl_detail``. Its scheduler resumes a task whose time to look has come with the answer."""
    from airflow.models.trigger import handle_event_submit
    from airflow.triggers.base import TriggerEvent

    now = datetime.now(UTC)
    heard_at = max(task.updated_at or now, detail.created_at) + HEARD_AFTER
    is_offered = given.option in (detail.options or ())
    if is_offered:
        detail.responded_by = {"id": given.who, "name": given.who}
        detail.responded_at = now
        detail.chosen_options = [given.option]
        detail.params_input = {"note": given.note} if "note" in (detail.params or {}) else {}
    if is_offered and heard_at <= now:
        handle_event_submit(
            TriggerEvent(detail.as_resume_event_payload()), task_instance=task, session=session
        )
    else:
        task.trigger_timeout = max(heard_at, now)
