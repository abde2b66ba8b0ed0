"""A saga whose stop must be over before anything ends a body that hangs: this file's processes alone are told so."""

from __future__ import annotations

import os
from typing import Any

from airflow.sdk import task
from trips.script import act

from airflow_saga import SagaDAG

os.environ["AIRFLOW__SAGA__CANCEL_DEADLINE_SECONDS"] = "8"
os.environ["AIRFLOW__SAGA__STOP_GRACE_SECONDS"] = "180"

with SagaDAG("deadline", schedule=None):

    @task.saga
    def a(**context: Any) -> list:
        return act("a", context)

    a()
