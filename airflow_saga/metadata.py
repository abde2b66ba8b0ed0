"""What is read of Airflow's own database, by processes that have it: runs, tasks, DAGs, components at work.

For the command line, and for a thread of a listener's or the API server's own; a task and the triggerer have no such
database and ask their supervisor (``airflow_saga.platform``). Each read is one unscoped session of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from airflow_saga.core.marks import NO_TASK_FAILED, FailedRun, TaskEnd, runs_set_failed, tasks_show_mark
from airflow_saga.trigger import start_undo_run

_AUDITED_BEFORE = timedelta(minutes=1)
_MOST_MARKS = 1000
_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
JOB_KINDS = {"SchedulerJob": "scheduler", "DagProcessorJob": "dag-processor", "TriggererJob": "triggerer"}


class MetadataUnreadableError(RuntimeError):
    """Airflow's database cannot be read from here; the message is its first line."""


@dataclass(frozen=True)
class Run:
    """A DAG run as Airflow sees it."""

    state: str
    clear_number: int


@dataclass(frozen=True)
class Mark:
    """A person set a run to failed."""

    dag_id: str
    run_id: str
    at: datetime
    actor: str | None
    clear_number: int = 0


@dataclass(frozen=True)
class Dag:
    """Whether a DAG can run."""

    dag_id: str
    is_paused: bool
    is_stale: bool
    has_import_errors: bool


@dataclass(frozen=True)
class Job:
    """One running component. ``kind`` as in the store's table of components."""

    kind: str
    host: str
    started_at: datetime


def run_of(dag_id: str, run_id: str) -> Run | None:
    """:raises MetadataUnreadableError: Airflow's database cannot be read from here."""
    from airflow.models.dagrun import DagRun
    from sqlalchemy import select

    with _session() as session:
        found = session.execute(
            select(DagRun.state, DagRun.clear_number).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id)
        ).one_or_none()
        return None if found is None else Run(str(getattr(found[0], "value", found[0])), found[1] or 0)


def task_state(dag_id: str, run_id: str, task_id: str, map_index: int) -> str | None:
    """The state of a task instance; None if it has none, as after a clear, or is not there.

    :raises MetadataUnreadableError: Airflow's database cannot be read from here.
    """
    from airflow.models.taskinstance import TaskInstance
    from sqlalchemy import select

    with _session() as session:
        state = session.scalar(
            select(TaskInstance.state).where(
                TaskInstance.dag_id == dag_id,
                TaskInstance.run_id == run_id,
                TaskInstance.task_id == task_id,
                TaskInstance.map_index == map_index,
            )
        )
        return None if state is None else str(getattr(state, "value", state))


def dags_of(dag_ids: list[str]) -> dict[str, Dag]:
    """Those of these DAGs that Airflow has ever parsed.

    :raises MetadataUnreadableError: Airflow's database cannot be read from here.
    """
    from airflow.models.dag import DagModel
    from sqlalchemy import select

    with _session() as session:
        rows = session.scalars(select(DagModel).where(DagModel.dag_id.in_(dag_ids)))
        return {
            row.dag_id: Dag(row.dag_id, bool(row.is_paused), bool(row.is_stale), bool(row.has_import_errors))
            for row in rows
        }


def has_tag(dag_id: str, tag: str) -> bool:
    """Whether a DAG had this tag when it was last parsed.

    :raises MetadataUnreadableError: Airflow's database cannot be read from here.
    """
    from airflow.models.dag import DagTag
    from sqlalchemy import select

    with _session() as session:
        found = select(DagTag.name).where(DagTag.dag_id == dag_id, DagTag.name == tag)
        return session.scalar(found) is not None


def who_marked(dag_id: str, run_id: str, seen_at: datetime) -> str | None:
    """Who set the state of a run by hand: the audit log has it before Airflow calls a hook. None: it does not say.

    :param seen_at: when the hook was called; by the clock of the API server, as the audit log is.
    :raises MetadataUnreadableError: Airflow's database cannot be read from here.
    """
    from airflow.models.log import Log
    from sqlalchemy import and_, or_, select

    this_run = and_(Log.event == "patch_dag_run", Log.dag_id == dag_id, Log.run_id == run_id)
    many_runs = and_(Log.event == "bulk_dag_runs", Log.dag_id.in_((dag_id, "~")))
    with _session() as session:
        owner = session.scalar(
            select(Log.owner)
            .where(or_(this_run, many_runs), Log.dttm.between(seen_at - _AUDITED_BEFORE, seen_at))
            .order_by(Log.id.desc())
            .limit(1)
        )
        return owner or None


def failed_run(dag_id: str, run_id: str) -> FailedRun:
    """Whether a person marked this run failed, since it was last queued.

    :raises MetadataUnreadableError: Airflow's database cannot be read from here.
    """
    from airflow.models.dagrun import DagRun
    from airflow.models.taskinstance import TaskInstance
    from sqlalchemy import select

    with _session() as session:
        queued_at = session.scalar(
            select(DagRun.queued_at).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id)
        )
        for mark in _marks(session, queued_at or _BEGINNING, dag_id):
            if (mark.dag_id, mark.run_id) == (dag_id, run_id):
                return FailedRun(True, mark.actor, "its audit log says so")
        tasks = select(TaskInstance.state, TaskInstance.duration).where(
            TaskInstance.dag_id == dag_id, TaskInstance.run_id == run_id
        )
        if tasks_show_mark([TaskEnd(state, seconds) for state, seconds in session.execute(tasks)]):
            return FailedRun(True, None, NO_TASK_FAILED)
        return FailedRun(False)


def marks_since(when: datetime) -> list[Mark]:
    """Runs that people marked failed since then and that still are, newest first: for what no hook told.

    :raises MetadataUnreadableError: Airflow's database cannot be read from here.
    """
    from airflow.models.dagrun import DagRun
    from sqlalchemy import select

    with _session() as session:
        marks = {(mark.dag_id, mark.run_id): mark for mark in reversed(_marks(session, when))}
        runs = select(DagRun.dag_id, DagRun.run_id, DagRun.clear_number, DagRun.queued_at).where(
            DagRun.run_id.in_([run_id for _, run_id in marks]), DagRun.state == "failed"
        )
        return [
            replace(mark, clear_number=clear_number or 0)
            for dag_id, run_id, clear_number, queued_at in session.execute(runs)
            if (mark := marks.get((dag_id, run_id))) and mark.at >= (queued_at or _BEGINNING)
        ]


def _marks(session: Any, since: datetime, dag_id: str | None = None) -> list[Mark]:
    """What the audit log has of runs set to failed, newest first; in one DAG, or in all."""
    from airflow.models.log import Log
    from sqlalchemy import select

    found = select(Log).where(Log.event.in_(("patch_dag_run", "bulk_dag_runs")), Log.dttm >= since)
    if dag_id is not None:
        found = found.where(Log.dag_id.in_((dag_id, "~")))
    return [
        Mark(*run, entry.dttm, entry.owner or None)
        for entry in session.scalars(found.order_by(Log.id.desc()).limit(_MOST_MARKS))
        for run in runs_set_failed(_extra(entry), entry.dag_id, entry.run_id or "")
    ]


def _extra(entry: Any) -> dict[str, Any]:
    try:
        extra = json.loads(entry.extra or "{}")
    except ValueError:
        return {}
    return extra if isinstance(extra, dict) else {}


def live_jobs() -> list[Job]:
    """Schedulers, DAG processors and triggerers that Airflow believes to be alive.

    :raises MetadataUnreadableError: Airflow's database cannot be read from here.
    """
    from airflow.jobs.job import Job as JobModel
    from sqlalchemy import select

    with _session() as session:
        rows = session.scalars(
            select(JobModel).where(JobModel.state == "running", JobModel.job_type.in_(JOB_KINDS))
        )
        return [
            Job(JOB_KINDS[row.job_type], row.hostname or "", row.start_date)
            for row in rows
            if row.job_type and row.start_date and row.is_alive()
        ]


class MetadataPlatform:
    """What the reconciler asks about any run, for a process that has Airflow's database."""

    def __init__(self, triggered_by: str) -> None:
        self._triggered_by = triggered_by

    def run_state(self, dag_id: str, run_id: str) -> str | None:
        run = run_of(dag_id, run_id)
        return None if run is None else run.state

    def run_clear_number(self, dag_id: str, run_id: str) -> int:
        run = run_of(dag_id, run_id)
        return 0 if run is None else run.clear_number

    def failed_run(self, dag_id: str, run_id: str) -> FailedRun:
        return failed_run(dag_id, run_id)

    def task_state(self, dag_id: str, run_id: str, task_id: str, map_index: int) -> str | None:
        return task_state(dag_id, run_id, task_id, map_index)

    def trigger_undo(self, dag_id: str, run_id: str, request_uuid: UUID, *, reset: bool = False) -> bool:
        return start_undo_run(dag_id, run_id, request_uuid, triggered_by=self._triggered_by, restart=reset)


@contextmanager
def _session() -> Iterator[Any]:
    from airflow.utils.session import create_session
    from sqlalchemy.exc import SQLAlchemyError

    try:
        with create_session(scoped=False) as session:
            yield session
    except (SQLAlchemyError, RuntimeError) as problem:
        raise MetadataUnreadableError((str(problem).splitlines() or [type(problem).__name__])[0]) from problem
