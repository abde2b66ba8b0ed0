"""A task's name that leaves no room for those of its undo: the file must not load."""

from __future__ import annotations

from airflow_saga import READ_ONLY, SagaDAG, SagaOperator, action


@action(compensate=READ_ONLY)
def look() -> None: ...


with SagaDAG("long_task", schedule=None):
    SagaOperator(task_id="t" * 238, python_callable=look)
