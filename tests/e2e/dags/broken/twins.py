"""Two actions of one name: the file must not load."""

from __future__ import annotations

from airflow_saga import READ_ONLY, SagaDAG, SagaOperator, action


@action(compensate=READ_ONLY, name="twin")
def one() -> None: ...


@action(compensate=READ_ONLY, name="twin")
def other() -> None: ...


with SagaDAG("twins", schedule=None):
    SagaOperator(task_id="a", python_callable=one)
