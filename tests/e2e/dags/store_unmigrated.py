"""A saga whose store is unmigrated: this file's processes alone are told so."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from airflow.sdk import task
from trips.script import act

from airflow_saga import SagaDAG

os.environ["AIRFLOW__SAGA__CONN_ID"] = "saga_unmigrated"
os.environ["AIRFLOW__SAGA__STORE_OUTAGE_SECONDS"] = "1"

with SagaDAG("store_unmigrated", schedule=None):

    @task.saga(retries=1, retry_delay=timedelta(seconds=1))
    def a(**context: Any) -> list:
        return act("a", context)

    a()
