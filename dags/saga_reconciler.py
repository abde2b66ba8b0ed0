"""The reconciler: one DAG per Airflow deployment, which catches what every hook missed."""

from __future__ import annotations

import os
from datetime import timedelta

from airflow_saga import reconciler_dag

# Once a minute is right in production; the demo asks for it more often so that nobody has to wait.
reconciler = reconciler_dag(
    every=timedelta(seconds=float(os.environ.get("SAGA_RECONCILE_EVERY_SECONDS", "60")))
)
