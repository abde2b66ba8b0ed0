"""Airflow's side of the hooks: real runs in its metadata, and the calls that Airflow itself makes of the listener."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

MARKED = "Dag Run's state was manually set to `failed`."
TASK_MARKED = "TaskInstance's state was manually set to `failed`."


def until(look: Callable[[], T], seconds: float = 20.0) -> T:
    """Look again and again until something true comes back."""
    deadline = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not within {seconds} s; last seen: {seen!r}"
        time.sleep(0.02)
    return seen


def be_api_server(patch: pytest.MonkeyPatch) -> None:
    """What tells the listener that it is in the API server."""
    patch.setitem(__import__("sys").modules, "airflow.api_fastapi.main", types.ModuleType("main"))


class HookedRun:
    """A run in Airflow's metadata, with the hooks that Airflow calls for it; by default of a DAG that has our tag."""

    def __init__(self, dag_id: str, run_id: str) -> None:
        self.dag_id, self.run_id = dag_id, run_id

    @contextmanager
    def loaded(self, tags: set[str] | None = None) -> Iterator[Any]:
        """The run as Airflow holds it, in an open session. ``tags`` None: without its DAG."""
        from airflow.models.dagrun import DagRun
        from airflow.sdk import DAG
        from airflow.utils.session import create_session
        from sqlalchemy import select

        with create_session(scoped=False) as session:
            wanted = (DagRun.dag_id == self.dag_id, DagRun.run_id == self.run_id)
            run = session.scalars(select(DagRun).where(*wanted)).one()
            if tags is not None:
                run.dag = DAG(self.dag_id, schedule=None, tags=tags)
            yield run

    def commit(self, state: str, clear_number: int | None = None) -> None:
        """Airflow's own transaction commits."""
        with self.loaded() as run:
            run.state = state
            run.clear_number = run.clear_number if clear_number is None else clear_number

    def call(self, hook: str, message: str, tags: set[str] | None = None) -> None:
        from airflow.listeners.listener import get_listener_manager

        with self.loaded({"saga"} if tags is None else tags) as run:
            getattr(get_listener_manager().hook, hook)(dag_run=run, msg=message)

    def starts(self, **more: Any) -> None:
        self.call("on_dag_run_running", "started", **more)

    def succeeds(self, **more: Any) -> None:
        self.call("on_dag_run_success", "success", **more)

    def fails(self, message: str = "task_failure", **more: Any) -> None:
        self.call("on_dag_run_failed", message, **more)

    def is_marked_failed(self, **more: Any) -> None:
        self.call("on_dag_run_failed", MARKED, **more)

    def task_fails(
        self,
        *,
        ti_id: Any = None,
        error: str = TASK_MARKED,
        state: str = "failed",
        previous: str | None = None,
    ) -> None:
        """The task instance `flight` of this run, as Airflow has it, or as another attempt of it."""
        from airflow.listeners.listener import get_listener_manager
        from airflow.models.taskinstance import TaskInstance
        from airflow.utils.session import create_session
        from sqlalchemy import select

        with create_session(scoped=False) as session:
            wanted = (TaskInstance.dag_id == self.dag_id, TaskInstance.run_id == self.run_id)
            instance = session.scalars(select(TaskInstance).where(*wanted)).one()
            session.expunge(instance)
            if ti_id is not None:
                instance.id = ti_id
            instance.state = state
            hook = get_listener_manager().hook
            hook.on_task_instance_failed(previous_state=previous, task_instance=instance, error=error)

    def undo_runs(self) -> list[Any]:
        """The runs of the compensation DAG that there are for this run."""
        from airflow.models.dagrun import DagRun
        from airflow.utils.session import create_session
        from sqlalchemy import select

        with create_session(scoped=False) as session:
            runs = session.scalars(
                select(DagRun).where(DagRun.dag_id == f"{self.dag_id}__compensation")
            ).all()
            return [run for run in runs if (run.conf or {}).get("run_id") == self.run_id]
