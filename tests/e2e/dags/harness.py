"""What the tests of the harness run: nothing of sagas, so that they tell a broken Airflow from a broken product."""

from __future__ import annotations

import time

from airflow.sdk import DAG, task

with DAG("harness_plain", schedule=None):

    @task
    def one(**context) -> int:
        return context["dag_run"].conf.get("number", 1)

    @task
    def double(number: int) -> int:
        return 2 * number

    double.expand(number=[one(), 5])

with DAG("harness_long", schedule=None):

    @task
    def long() -> None:
        """Goes on after a SIGTERM, as a task of Airflow does that has no on_kill."""
        print("begun")
        for _ in range(600):
            time.sleep(0.1)

    long()
