"""Mapped steps, steps in mapped task groups, and all the forms in which a function may ask for its saga."""

from __future__ import annotations

import asyncio
from typing import Any

from airflow.sdk import task, task_group
from trips.actions import LONG, TRIES, book, cancel, find, flights, hotels

from airflow_saga import Saga, SagaDAG, action


@action(compensate=cancel, verify=find, timeout=LONG, undo_retry=TRIES)
async def tickets(trip: dict, number: int, *, key: str) -> dict:
    return await asyncio.to_thread(book, "tickets", {**trip, "number": number}, key)


@task
def items(dag_run: Any = None) -> list[int]:
    return list(range(dag_run.conf["count"]))


@task.saga
def fail_if_told(dag_run: Any = None) -> None:
    if dag_run.conf.get("fail"):
        raise RuntimeError("told to fail")


with SagaDAG("mapped", schedule=None):

    @task.saga
    def flight(number: int, saga: Saga, dag_run: Any = None) -> str:
        booked = flights(dag_run.conf["trip"])
        saga.checkpoint({"number": number})
        return booked["id"]

    flight.expand(number=items()) >> fail_if_told()

with SagaDAG("grouped", schedule=None):

    @task_group
    def each(number: int) -> None:
        @task.saga
        def flight(number: int, dag_run: Any = None) -> int:
            flights(dag_run.conf["trip"])
            return number

        @task
        def between(number: int) -> int:
            return number

        @task.saga
        def hotel(number: int, dag_run: Any = None) -> None:
            hotels(dag_run.conf["trip"])

        hotel(between(flight(number)))

    each.expand(number=items()) >> fail_if_told()

with SagaDAG("asking", schedule=None):

    @task.saga
    def first(saga: Saga, number: int, dag_run: Any = None) -> list:
        return [saga.run_id, number, flights(dag_run.conf["trip"])["status"]]

    @task.saga
    def last(number: int, dag_run: Any = None, saga: Saga | None = None) -> list:
        return [saga.run_id, number, flights(dag_run.conf["trip"])["status"]]

    @task.saga
    async def keyword(number: int, *, saga: Saga, dag_run: Any = None) -> list:
        both = await asyncio.gather(*(tickets(dag_run.conf["trip"], n) for n in (number, number + 1)))
        return [saga.run_id, number, *(each["number"] for each in both)]

    first(7) >> [first.override(task_id="first_mapped").expand(number=[1, 2])]
    last(8) >> [last.override(task_id="last_mapped").expand(number=[3, 4])]
    keyword(9) >> [keyword.override(task_id="keyword_mapped").partial().expand(number=[5])]
