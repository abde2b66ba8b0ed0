"""DAGs whose steps are not in a line: branches, teardown, plain tasks in between, a plain DAG."""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, setup, task, teardown
from trips.actions import flights
from trips.script import act

from airflow_saga import SagaDAG, SagaOperator, compensation_dag


@task.saga
def step(task_id: str, **context: Any) -> list:
    return act(task_id, context)


def a_step(task_id: str) -> Any:
    return step.override(task_id=task_id)(task_id)


@task
def plain() -> str:
    return "nothing of a saga"


with SagaDAG("fork", schedule=None):
    a_step("a") >> [a_step("left"), a_step("right")] >> a_step("end")

with SagaDAG("between", schedule=None):
    a_step("a") >> plain() >> plain.override(task_id="more")() >> a_step("b")

with SagaDAG("cleaned", schedule=None):

    @setup
    def make() -> None:
        print("made")

    @teardown
    def clean() -> None:
        print("cleaned")

    made, cleaned = make(), clean()
    made >> a_step("a") >> a_step("b") >> a_step("c") >> cleaned
    made >> cleaned

with DAG("plain_dag", schedule=None, render_template_as_native_obj=True) as plain_dag:
    booked = SagaOperator(
        task_id="a", python_callable=flights, op_kwargs={"trip": "{{ dag_run.conf['trip'] }}"}
    )
    booked >> a_step("b")

compensation_dag(plain_dag)
