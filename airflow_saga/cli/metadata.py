"""What the commands read of Airflow's own database: runs, DAGs, and which components are at work.

A command is a process of its own, so it may use Airflow's models; nothing here is for a task or a listener.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

JOB_KINDS = {"SchedulerJob": "scheduler", "DagProcessorJob": "dag-processor", "TriggererJob": "triggerer"}


class MetadataUnreadableError(Exception):
    """Airflow's database cannot be read from here; the message is its first line."""


@dataclass(frozen=True)
class Run:
    """A DAG run as Airflow sees it."""

    state: str
    clear_number: int


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


@contextmanager
def _session() -> Iterator[Any]:
    from airflow.utils.session import create_session
    from sqlalchemy.exc import SQLAlchemyError

    try:
        with create_session(scoped=False) as session:
            yield session
    except (SQLAlchemyError, RuntimeError) as problem:
        raise MetadataUnreadableError((str(problem).splitlines() or [type(problem).__name__])[0]) from problem
