"""The longest names with which an undo can run where Airflow keeps its logs as it does by default.

A directory there is called `dag_id=<dag_id>` or `task_id=<task_id>`, and has at most 255 characters.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import task
from trips.script import act

from airflow_saga import SagaDAG

LONGEST_DAG_ID = "long_".ljust(255 - len("dag_id=" + "__compensation"), "d")
LONGEST_TASK_ID = "long_".ljust(255 - len("task_id=" + "undo." + ".indexes"), "t")

with SagaDAG(LONGEST_DAG_ID, schedule=None):

    @task.saga(task_id=LONGEST_TASK_ID)
    def step(**context: Any) -> list:
        return act("a", context)

    step()
