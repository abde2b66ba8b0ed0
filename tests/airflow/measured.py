"""One attempt of a step as a task's process makes it, measured: ``python -m tests.airflow.measured``.

Airflow's stats are made ready as the task runner does it, from the options in the environment; spans are kept by
OpenTelemetry's own SDK, below one that stands for the task's, and printed as JSON.
"""

from __future__ import annotations

import json
import uuid
from types import SimpleNamespace
from typing import Any

from airflow.sdk.configuration import conf
from airflow.sdk.observability import stats
from airflow.sdk.observability.metrics import stats_utils
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from airflow_saga import ActionRecord, NotApplied, SagaDAG, SagaOperator, action
from airflow_saga.core.policies import Retry

PRIVATE = "hunter2"


def take_back(record: ActionRecord) -> None:
    return None


@action(compensate=take_back, retry=Retry(tries=1))
def book_measured(what: str) -> str:
    with trace.get_tracer("client").start_as_current_span("request"):
        return f"booked {what}"


@action(compensate=take_back, retry=Retry(tries=1))
def refuse_measured(what: str) -> str:
    raise NotApplied(f"{what} is not to be had")


def body(saga: Any) -> str:
    book_measured(PRIVATE)
    try:
        refuse_measured(PRIVATE)
    except NotApplied:
        return "one of two"
    raise AssertionError("it was refused")


def run() -> None:
    with SagaDAG("measured", schedule=None):
        step = SagaOperator(task_id="step", python_callable=body)
    ti = SimpleNamespace(
        dag_id="measured",
        run_id=f"run-{uuid.uuid4().hex[:8]}",
        task_id="step",
        map_index=-1,
        id=uuid.uuid4(),
        try_number=1,
        max_tries=0,
        xcom_push=lambda key, value: None,
    )
    step.run_step({"ti": ti, "dag_run": SimpleNamespace(clear_number=0)}, body)


def _told(span: ReadableSpan) -> dict[str, Any]:
    return {
        "name": span.name,
        "id": span.context.span_id,
        "parent": span.parent and span.parent.span_id,
        "status": span.status.status_code.name,
        "described": span.status.description,
        "attributes": dict(span.attributes or {}),
        "events": len(span.events),
    }


def main() -> None:
    stats.initialize(
        factory=stats_utils.get_stats_factory(),
        export_legacy_names=conf.getboolean("metrics", "legacy_names_on", fallback=True),
    )
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    with trace.get_tracer("task runner").start_as_current_span("task.execute"):
        run()
    print(json.dumps([_told(span) for span in kept.get_finished_spans()]))


if __name__ == "__main__":
    main()
