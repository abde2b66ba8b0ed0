"""A compensation that cannot be found again when the undo runs: the file must not load."""

from __future__ import annotations

from airflow_saga import SagaDAG, SagaOperator, action


@action(compensate=lambda record: None)
def book() -> None: ...


with SagaDAG("lambdas", schedule=None):
    SagaOperator(task_id="a", python_callable=book)
