"""Airflow's own stats and OpenTelemetry as what listens to the runtime, in the process of a task.

Everything that is measured is measured in a task: of a step, of an undo, of the reconciler. There the task SDK has made
its backend ready before any operator runs, and its span of the task is the current one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from airflow.sdk.configuration import conf
from airflow.sdk.observability import stats
from opentelemetry import trace
from opentelemetry.trace import NoOpTracerProvider, ProxyTracerProvider, StatusCode

from airflow_saga.runtime.observe import observe_with

_SWITCHES = ("statsd_on", "statsd_datadog_enabled", "otel_on")


def listen_in() -> None:
    """Have the runtime of this process tell Airflow's backends, as far as somebody has turned them on."""
    observe_with(AirflowMeter() if _is_metered() else None, OtelTracer() if _is_traced() else None)


def _is_metered() -> bool:
    return any(conf.getboolean("metrics", switch, fallback=False) for switch in _SWITCHES)


def _is_traced() -> bool:
    """Whoever made the provider: Airflow's ``[traces] otel_on``, or an instrumentation of the user's."""
    return not isinstance(trace.get_tracer_provider(), ProxyTracerProvider | NoOpTracerProvider)


class AirflowMeter:
    """See :class:`airflow_saga.runtime.observe.Meter`. Airflow's prefix, allow list and block list apply."""

    def count(self, name: str, tags: Mapping[str, str]) -> None:
        stats.incr(name, tags=dict(tags))

    def timing(self, name: str, seconds: float, tags: Mapping[str, str]) -> None:
        # A number would be milliseconds; each of Airflow's backends knows what a timedelta is.
        stats.timing(name, timedelta(seconds=seconds), tags=dict(tags))

    def gauge(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        stats.gauge(name, value, tags=dict(tags))


class OtelTracer:
    """See :class:`airflow_saga.runtime.observe.Tracer`."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("airflow_saga")

    @contextmanager
    def span(self, name: str, attributes: Mapping[str, str | int]) -> Iterator[None]:
        """Of an exception it says that there was one, and no more: its text may hold what nobody is to read."""
        with self._tracer.start_as_current_span(
            name, attributes=attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield
            except BaseException:
                span.set_status(StatusCode.ERROR)
                raise

    def mark(self, key: str, value: str) -> None:
        trace.get_current_span().set_attribute(key, value)
