"""The hooks that Airflow calls. Each puts down what it saw and returns: no I/O, no session, no connection, no error.

Airflow calls the hooks of runs on the scheduler's own thread, inside of its transaction and before its commit. Whoever
uses a session there, or only reads an attribute that is not loaded, ends that transaction and with it the scheduler
(measured on 3.3.2). So a hook reads what an object holds already, and hands plain values to the thread of `dispatch`.

In the API server the same hooks mean that a person marked the run or the task failed. In a task's process they mean
nothing to us: the step itself knows better, and they do not tell "will retry" from "failed for good".
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from airflow.listeners import hookimpl

from airflow_saga.core.identity import forward_dag_id
from airflow_saga.plugin import dispatch
from airflow_saga.plugin.events import SAGA_TAG, Event, What
from airflow_saga.settings import in_task_process

log = logging.getLogger(__name__)

_API_SERVER_MODULES = ("airflow.api_fastapi.main", "airflow.api_fastapi.gunicorn_app")
_MARKED = "manually set"
"""In every message with which the API server calls a hook."""


def quiet(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that raises would keep the listeners of other plugins from being called."""

    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> None:
        try:
            hook(*args, **kwargs)
        except Exception:
            log.exception("%s failed; the reconciler will see what it missed", hook.__name__)

    return call


class SagaListener:
    """See the module."""

    @hookimpl
    @quiet
    def on_starting(self, component: Any) -> None:
        """A scheduler, DAG processor or triggerer starts. So does a task's process: its own step reports that one."""
        if not in_task_process():
            dispatch.be_seen_as(functools.partial(_kind_of_job, component))

    @hookimpl
    @quiet
    def on_dag_run_running(self, dag_run: Any, msg: str) -> None:
        _see_run(What.RUN_STARTED, "on_dag_run_running", dag_run, msg)

    @hookimpl
    @quiet
    def on_dag_run_success(self, dag_run: Any, msg: str) -> None:
        _see_run(What.RUN_SUCCEEDED, "on_dag_run_success", dag_run, msg)

    @hookimpl
    @quiet
    def on_dag_run_failed(self, dag_run: Any, msg: str) -> None:
        marked = in_api_server() or _MARKED in msg
        _see_run(What.RUN_MARKED if marked else What.RUN_FAILED, "on_dag_run_failed", dag_run, msg)

    @hookimpl
    @quiet
    def on_task_instance_failed(self, previous_state: Any, task_instance: Any, error: Any) -> None:
        """Only a person's mark: a task that fails, or will be retried, is told by its own step and by the run's end."""
        _see_task(What.TASK_MARKED, "on_task_instance_failed", task_instance, str(error))

    @hookimpl
    @quiet
    def on_task_instance_success(self, previous_state: Any, task_instance: Any) -> None:
        """Only a person's mark: one that is deferred then has nobody who ends its remote work."""
        _see_task(What.TASK_PASSED, "on_task_instance_success", task_instance, "")


def _see_task(what: What, hook: str, task_instance: Any, message: str) -> None:
    if not in_api_server() or in_task_process():
        return
    seen = vars(task_instance)
    if forward_dag_id(seen["dag_id"]) is not None:
        return
    dispatch.hand_over(
        Event(
            what,
            hook,
            seen["dag_id"],
            seen["run_id"],
            task_id=seen["task_id"],
            map_index=seen["map_index"],
            ti_id=str(seen["id"]),
            message=message,
        )
    )


def _see_run(what: What, hook: str, dag_run: Any, message: str) -> None:
    if in_task_process():
        return
    seen = vars(dag_run)  # not by attribute: one that is not loaded would be fetched with Airflow's session
    dag_id = seen["dag_id"]
    if forward_dag_id(dag_id) is not None:
        return  # an undo that ends, or is marked failed, undoes nothing
    dag = seen.get("dag")
    is_saga_dag = None if dag is None else SAGA_TAG in dag.tags
    if is_saga_dag is False and what is not What.RUN_MARKED:
        return
    dispatch.hand_over(
        Event(
            what,
            hook,
            dag_id,
            seen["run_id"],
            clear_number=seen.get("clear_number") or 0,
            message=message,
            is_saga_dag=is_saga_dag,
        )
    )


def in_api_server() -> bool:
    return any(name in sys.modules for name in _API_SERVER_MODULES)


def api_server_loaded() -> None:
    """The plugin was loaded. Only the API server has no hook that tells of its start."""
    if in_api_server() and not in_task_process():
        dispatch.be_seen_as(lambda: "api-server")


def _kind_of_job(job: Any) -> str | None:
    """Airflow gives a job its type only after it has called the hook with it."""
    from airflow_saga.metadata import JOB_KINDS

    return JOB_KINDS.get(vars(job).get("job_type") or "")
