"""DAGs that are cleared: a plain task, two steps; in `cleared_retried` the last step has tries left.

What failed keeps its effects, so that the test alone decides what becomes of them.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from airflow.sdk import Variable, task
from trips.actions import flights, hotels
from trips.script import act

from airflow_saga import Saga, SagaDAG, SagaOperator


@task
def plain() -> str:
    return "nothing of a saga"


@task.saga
def step(task_id: str, **context: Any) -> list:
    return act(task_id, context)


def line(dag_id: str, **last: Any) -> None:
    with SagaDAG(dag_id, schedule=None, on_failure="keep"):
        (
            plain.override(task_id="p")()
            >> step.override(task_id="a")("a")
            >> step.override(task_id="b", **last)("b")
        )


class LosesItsReport(SagaOperator):
    """In its first try it ends well, and never comes to say so."""

    def execute(self, context: Any) -> Any:
        output = super().execute(context)
        if context["ti"].try_number == 1:
            time.sleep(600)
        return output


def book_hotels(dag_run: Any = None) -> str:
    return str(hotels(dag_run.conf["trip"])["id"])


line("cleared")
line("cleared_retried", retries=1, retry_delay=timedelta(seconds=1))

with SagaDAG("report_lost", schedule=None, on_failure="keep"):
    step.override(task_id="a")("a") >> LosesItsReport(
        task_id="b", python_callable=book_hotels, retries=1, retry_delay=timedelta(seconds=1)
    )

with SagaDAG("remapped", schedule=None, on_failure="keep"):

    @task
    def items(dag_run: Any = None) -> list[str]:
        """What somebody has put down elsewhere, and may change between a run and its clear."""
        return list(Variable.get(dag_run.run_id, deserialize_json=True))

    @task.saga
    def flight(item: str, dag_run: Any = None) -> None:
        flights(dag_run.conf["trip"])
        if item.startswith("fail"):
            raise RuntimeError(f"told to fail by {item}")

    flight.expand(item=items())

with SagaDAG("savepoints", schedule=None, on_failure="keep"):

    @task.saga
    def a(saga: Saga, dag_run: Any = None) -> str:
        trip = dag_run.conf["trip"]
        flights(trip)
        saga.checkpoint("flown")
        saga.savepoint("flown")
        hotels(trip)
        saga.checkpoint("slept")
        return str(saga.restored)

    a() >> plain.override(task_id="p")() >> step.override(task_id="b")("b")
