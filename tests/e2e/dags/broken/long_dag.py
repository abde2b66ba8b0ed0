"""A name that leaves no room for the compensation DAG's: the file must not load."""

from __future__ import annotations

from airflow_saga import READ_ONLY, SagaDAG, SagaOperator, action


@action(compensate=READ_ONLY)
def look() -> None: ...


with SagaDAG("d" * 237, schedule=None):
    SagaOperator(task_id="a", python_callable=look)
