"""An action without a word on how to undo it: the file must not load."""

from __future__ import annotations

from airflow_saga import SagaDAG, SagaOperator, action


@action()
def book() -> None: ...


with SagaDAG("forgotten", schedule=None):
    SagaOperator(task_id="a", python_callable=book)
