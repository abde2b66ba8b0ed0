"""A deferrable operator against the travel service: it starts a job there, and a trigger waits for its end.

A job is an effect of the kind `jobs`; it has ended once there is an effect of the kind `endings` under the job's id.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

from airflow.exceptions import AirflowException
from airflow.sdk import BaseOperator
from airflow.triggers.base import BaseTrigger, TriggerEvent
from support import travel

KIND, ENDINGS, REPORTS = "jobs", "endings", "reports"


class JobTrigger(BaseTrigger):
    """Fires when the job has ended, or is gone. As some of the providers' do, it cancels the job on a user's kill."""

    def __init__(self, job_id: str, key: str, every: timedelta) -> None:
        super().__init__()
        self.job_id = job_id
        self.key = key
        self.every = every

    def serialize(self) -> tuple[str, dict[str, Any]]:
        kwargs = {"job_id": self.job_id, "key": self.key, "every": self.every}
        return f"{__name__}.JobTrigger", kwargs

    async def run(self) -> AsyncIterator[TriggerEvent]:
        while True:
            if await asyncio.to_thread(travel.find, ENDINGS, self.job_id):
                yield TriggerEvent({"job": self.job_id, "state": "ended"})
                return
            if not await asyncio.to_thread(travel.find, KIND, self.key):
                yield TriggerEvent({"job": self.job_id, "state": "gone"})
                return
            await asyncio.sleep(self.every.total_seconds())

    async def on_kill(self) -> None:
        await asyncio.to_thread(travel.cancel, KIND, self.job_id, idempotency_key=f"kill-{self.job_id}")


class JobOperator(BaseOperator):
    """Starts a job, waits for its end without a process, and reports it.

    :param trip: whose job it is.
    :param key: of the job; a new one for each start.
    """

    template_fields = ("trip", "key")

    def __init__(self, *, trip: str, key: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.trip = trip
        self.key = key

    def execute(self, context: Any) -> Any:
        job = travel.book(KIND, {"trip": self.trip}, idempotency_key=self.key)
        trigger = JobTrigger(job["id"], self.key, timedelta(milliseconds=300))
        self.defer(trigger=trigger, method_name="finish", timeout=timedelta(minutes=10))

    def finish(self, context: Any, event: dict[str, Any]) -> dict[str, Any]:
        if event["state"] != "ended":
            raise AirflowException(f"job {event['job']} is {event['state']}")
        travel.TIMEOUT_SECONDS = 600.0
        travel.book(REPORTS, {"trip": self.trip}, idempotency_key=f"report-{self.key}")
        return event
