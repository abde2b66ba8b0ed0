"""A password that Airflow knows: passed as a `Secret`, and passed as it is, which is refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import BaseHook, task
from support import travel

from airflow_saga import ActionRecord, SagaDAG, Secret, action


def refund(record: ActionRecord) -> None:
    token = record.params["token"].reveal()
    travel.refund(record.result["id"], idempotency_key=record.undo_key, token=token)


@action(compensate=refund, timeout=timedelta(seconds=20))
def charge(trip: dict, token: Secret, *, key: str) -> dict:
    return travel.charge(trip, "12.00", idempotency_key=key, token=token.reveal())


@action(compensate=refund)
def careless(trip: dict, login: dict, *, key: str) -> dict:
    return travel.charge(trip, "13.00", idempotency_key=key, token=login["nested"][0])


with SagaDAG("secretive", schedule=None):

    @task.saga
    def pay(**context: Any) -> str:
        return charge(context["dag_run"].conf["trip"], Secret("airline"))["id"]

    @task.saga(retries=1, retry_delay=timedelta(seconds=1))
    def pay_carelessly(**context: Any) -> None:
        password = BaseHook.get_connection("airline").password
        careless(context["dag_run"].conf["trip"], {"nested": [password]})

    pay() >> pay_carelessly()
