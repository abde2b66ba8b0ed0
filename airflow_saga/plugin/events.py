"""What a hook saw, as plain values: no object of Airflow's leaves the thread that its session belongs to."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum

SAGA_TAG = "saga"
"""By this tag of its DAG a run is known for a saga before any of its steps has begun."""


class What(StrEnum):
    """Of which kind. The value is the reason that the history of the saga shows."""

    RUN_STARTED = "the run started"
    RUN_SUCCEEDED = "the run succeeded"
    RUN_FAILED = "the run failed"
    TASK_PASSED = "the task was marked success in Airflow"
    TASK_MARKED = "the task was marked failed in Airflow"
    RUN_MARKED = "the run was marked failed in Airflow"


LEAST_MISSED_FIRST = tuple(What)
"""What is dropped first when there is no room: a start costs nothing, a mark is what a person asked for."""


@dataclass(frozen=True, slots=True)
class Event:
    """One call of a hook.

    :ivar clear_number: the run's, as the hook saw it; an event of before a clear is dropped by the store.
    :ivar ti_id: which attempt was marked: a clear gives the task instance another one.
    :ivar message: what Airflow said of it.
    :ivar is_saga_dag: whether the DAG has our tag; None where the hook could not see its DAG.
    :ivar seen_at: by the wall clock; ``since``: by the monotonic one, in seconds.
    """

    what: What
    hook: str
    dag_id: str
    run_id: str
    task_id: str = ""
    map_index: int = -1
    ti_id: str | None = None
    clear_number: int = 0
    message: str = ""
    is_saga_dag: bool | None = None
    seen_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        task = f" / {self.task_id}" if self.task_id else ""
        return f"{self.dag_id} / {self.run_id}{task}: {self.what}"
