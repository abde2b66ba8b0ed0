"""Runs that end in each way that a hook tells of; nothing outside of Airflow and the store is called."""

from __future__ import annotations

import time
from datetime import timedelta

from airflow.sdk import DAG, task

from airflow_saga import ActionRecord, Saga, SagaDAG, action

NIGHTS = 200


def unbook(record: ActionRecord) -> None:
    print("unbooked", record.params)


@action(compensate=unbook, timeout=timedelta(seconds=30))
def book(what: str) -> str:
    print("booked", what)
    time.sleep(0.5)
    return what


with SagaDAG("marked", schedule=None):

    @task.saga
    def many() -> None:
        for night in range(NIGHTS):
            book(f"night {night}")

    many()

with SagaDAG("failing", schedule=None):

    @task.saga(retries=1, retry_delay=timedelta(seconds=1))
    def fails(saga: Saga) -> None:
        book("flight")
        raise ValueError("no")

    fails()

with SagaDAG("fine", schedule=None):

    @task.saga
    def succeeds() -> None:
        book("flight")

    succeeds()

with DAG("bystander", schedule=None):

    @task
    def nothing() -> None:
        pass

    nothing()
