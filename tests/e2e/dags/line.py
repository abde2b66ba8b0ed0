"""Steps in a line, under each of the policies and limits that a DAG or a task can have."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import task
from airflow.sdk.bases.notifier import BaseNotifier
from support import travel
from trips.actions import BUSY
from trips.script import act

from airflow_saga import SagaDAG


class Notice(BaseNotifier):
    """Tells the world that somebody is wanted."""

    template_fields = ("about",)

    def __init__(self) -> None:
        super().__init__()
        self.about = "notice of {{ saga.run_id }}"

    def notify(self, context: Any) -> None:
        travel.book("notices", {"trip": self.about})


def line(dag_id: str, task_ids: str = "ab", *, last: dict[str, Any] | None = None, **dag: Any) -> None:
    """:param last: arguments for the last step's task."""
    with SagaDAG(dag_id, schedule=None, **dag):
        before = None
        for task_id in task_ids:
            how = (last or {}) if task_id == task_ids[-1] else {}

            @task.saga(task_id=task_id, **how)
            def step(task_id: str, **context: Any) -> list:
                return act(task_id, context)

            now = step(task_id)
            if before is not None:
                before >> now
            before = now


line("line")
line("told", notifiers=[Notice()])
line("keep", on_failure="keep")
line("halt", on_compensation_failure="halt")
line("retried", last={"retries": 2, "retry_delay": timedelta(seconds=1)})
line("limited", last={"execution_timeout": timedelta(seconds=5)})
line("dated", dagrun_timeout=timedelta(seconds=12 * BUSY))
line("stubborn", "abc", last={"trigger_rule": "all_done"})
line("queued", "a", last={"pool": "queued"})
line("waiting", "a", last={"pool": "waiting"})
line("shut", "a", last={"pool": "shut"})
line("single", "a")
