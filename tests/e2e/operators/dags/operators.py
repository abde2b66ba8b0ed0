"""Operators of several providers as steps of sagas."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.providers.amazon.aws.operators.s3 import S3CreateBucketOperator, S3DeleteBucketOperator
from airflow.providers.common.sql.operators.sql import SQLExecuteQueryOperator
from airflow.providers.http.operators.http import HttpOperator
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import task
from jobs import JobOperator
from support import travel

from airflow_saga import ActionRecord, Applied, NotApplied, SagaDAG, compensable, reconciler_dag

PLACE = Path(os.environ["SAGA_TEST_PLACE"])
SHORT = timedelta(seconds=20)

reconciler_dag(every=timedelta(seconds=10))


@task.saga
def fail_if_told(dag_run: Any = None) -> None:
    if dag_run.conf.get("fail"):
        raise RuntimeError("told to fail")


# -- what undoes each: functions, and functions that give back operators -----------------------------------------------


def remove_file(record: ActionRecord) -> BashOperator:
    return BashOperator(
        task_id="remove",
        bash_command=f'rm "{PLACE}/{{{{ run_id }}}}"; echo removed for {{{{ record.task_id }}}}',
    )


def cancel_flight(record: ActionRecord) -> None:
    travel.cancel("flights", record.result["id"], idempotency_key=record.undo_key)


def drop_bucket(record: ActionRecord) -> S3DeleteBucketOperator:
    return S3DeleteBucketOperator(task_id="drop", bucket_name=record.params["bucket_name"])


def delete_order(record: ActionRecord) -> SQLExecuteQueryOperator:
    return SQLExecuteQueryOperator(
        task_id="delete",
        conn_id="shop",
        sql="DELETE FROM orders WHERE run = '{{ dag_run.run_id }}' AND id = %(id)s",
        parameters={"id": record.result[0][0]},
    )


def flight_of(response: Any) -> Any:
    return response.json()


FLIGHT: dict[str, Any] = {
    "http_conn_id": "travel",
    "endpoint": "flights",
    "headers": {
        "Content-Type": "application/json",
        "Idempotency-Key": "{{ run_id }}/{{ ti.map_index }}",
    },
    "response_filter": flight_of,
    "compensate": cancel_flight,
    "timeout": timedelta(minutes=2),
}

with SagaDAG("providers", schedule=None):
    file = compensable(BashOperator)(
        task_id="file",
        bash_command=f'echo "{{{{ run_id }}}}" > "{PLACE}/{{{{ run_id }}}}"',
        compensate=remove_file,
        timeout=SHORT,
    )
    flight = compensable(HttpOperator)(task_id="flight", data='{"trip": "{{ run_id }}"}', **FLIGHT)
    bucket = compensable(S3CreateBucketOperator)(
        task_id="bucket", bucket_name="b-{{ run_id[-6:] }}", compensate=drop_bucket, timeout=SHORT
    )
    order = compensable(SQLExecuteQueryOperator)(
        task_id="order",
        conn_id="shop",
        sql="INSERT INTO orders (run) VALUES (%(run)s) RETURNING id",
        parameters={"run": "{{ run_id }}"},
        compensate=delete_order,
        timeout=SHORT,
    )
    file >> flight >> bucket >> order >> fail_if_told()

with SagaDAG("fleet", schedule=None):
    (
        compensable(HttpOperator)
        .partial(task_id="flight", **FLIGHT)
        .expand(data=[f'{{"trip": "{{{{ run_id }}}}", "number": {number}}}' for number in range(3)])
        >> fail_if_told()
    )


# -- one that is killed in the middle ----------------------------------------------------------------------------------


def is_there(record: ActionRecord) -> Applied | NotApplied:
    return Applied("found") if (PLACE / record.run_id).exists() else NotApplied()


def remove(record: ActionRecord) -> None:
    (PLACE / record.run_id).unlink()


with SagaDAG("slow", schedule=None):
    compensable(BashOperator)(
        task_id="script",
        bash_command=f'touch "{PLACE}/{{{{ run_id }}}}"; sleep 15; touch "{PLACE}/{{{{ run_id }}}}-late"',
        compensate=remove,
        verify=is_there,
        timeout=SHORT,
        settle_after=timedelta(seconds=1),
    )


# -- deferrable --------------------------------------------------------------------------------------------------------


def undo_job(record: ActionRecord) -> None:
    """Of a job that has ended: its report is taken back too."""
    travel.cancel(
        "reports", None, idempotency_key=f"{record.undo_key}-r", booked_under=f"report-{record.params['key']}"
    )
    travel.cancel("jobs", record.result["job"], idempotency_key=record.undo_key)


def stop_job(record: ActionRecord) -> None:
    travel.cancel("jobs", record.deferred["kwargs"]["job_id"], idempotency_key=record.undo_key)


with SagaDAG("deferred", schedule=None):
    (
        compensable(JobOperator)(
            task_id="job",
            trip="{{ run_id }}",
            key="{{ run_id }}-{{ dag_run.clear_number }}",
            compensate=undo_job,
            cancel_deferred=stop_job,
            timeout=SHORT,
            retries=0,
        )
        >> fail_if_told()
    )
