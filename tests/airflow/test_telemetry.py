"""What Airflow's own backends are told: datagrams of statsd on a real socket, and spans of OpenTelemetry's SDK."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_saga import telemetry
from airflow_saga.core import measures
from airflow_saga.runtime import observe
from tests.airflow import measured

ROOT = Path(__file__).resolve().parents[2]
PROCESS_SECONDS = 100


@dataclass(frozen=True)
class Heard:
    datagrams: list[str]
    spans: list[dict[str, Any]]

    def of(self, name: str) -> dict[str, Any]:
        return next(span for span in self.spans if span["name"] == name)


def _measured(database_url: str, **options: str) -> Heard:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as statsd:
        statsd.bind(("127.0.0.1", 0))
        statsd.settimeout(0.2)
        environment = {
            **os.environ,
            "_AIRFLOW_PROCESS_CONTEXT": "server",
            "AIRFLOW_CONN_SAGA_DEFAULT": database_url.replace("postgresql://", "postgres://"),
            "AIRFLOW__METRICS__STATSD_HOST": "127.0.0.1",
            "AIRFLOW__METRICS__STATSD_PORT": str(statsd.getsockname()[1]),
            **options,
        }
        done = subprocess.run(
            [sys.executable, "-m", measured.__name__],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PROCESS_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return Heard(list(_datagrams(statsd)), json.loads(done.stdout.splitlines()[-1]))


def _datagrams(statsd: socket.socket) -> Iterator[str]:
    """Ours that have come: a datagram to this machine is there when it was sent."""
    while True:
        try:
            heard = statsd.recv(65_536).decode()
        except TimeoutError:
            return
        if heard.startswith("airflow.saga."):
            yield heard


def test_an_action_is_told_to_statsd_under_the_documented_names_with_its_tags(database_url: str) -> None:
    heard = _measured(
        database_url, AIRFLOW__METRICS__STATSD_ON="True", AIRFLOW__METRICS__STATSD_INFLUXDB_ENABLED="True"
    )
    tags = "dag_id=measured,effect=COMPENSABLE"
    assert heard.datagrams == [
        f"airflow.saga.action.begun,{tags}:1|c",
        f"airflow.saga.action.done,{tags}:1|c",
        f"airflow.saga.action.begun,{tags}:1|c",
        f"airflow.saga.action.failed,{tags}:1|c",
    ]


def test_an_action_is_a_span_of_the_task_and_says_nothing_that_is_private(database_url: str) -> None:
    heard = _measured(database_url)
    assert heard.datagrams == [], "statsd is off"
    task, book, refuse = (
        heard.of(name)
        for name in ("task.execute", "saga.action book_measured", "saga.action refuse_measured")
    )
    assert (book["parent"], refuse["parent"], task["parent"]) == (task["id"], task["id"], None)
    assert heard.of("request")["parent"] == book["id"], "what the action itself traces is below it"
    assert (book["attributes"]["saga.action.state"], book["status"]) == ("DONE", "UNSET")
    assert (refuse["attributes"]["saga.action.state"], refuse["status"]) == ("FAILED", "ERROR")
    assert (refuse["described"], refuse["events"]) == (None, 0)
    assert book["attributes"]["airflow.dag_id"] == "measured"
    assert measured.PRIVATE not in json.dumps(heard.spans)


class _Recorded:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, verb: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((verb, *args, kwargs))


def test_a_timing_goes_out_as_a_timedelta_whose_unit_each_backend_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = _Recorded()
    monkeypatch.setattr(telemetry, "stats", stats)
    meter = telemetry.AirflowMeter()
    meter.timing("saga.cancel.seen", 0.25, {"dag_id": "d"})
    meter.gauge("saga.open.residuals", 3, {})
    assert stats.calls == [
        ("timing", "saga.cancel.seen", timedelta(seconds=0.25), {"tags": {"dag_id": "d"}}),
        ("gauge", "saga.open.residuals", 3, {"tags": {}}),
    ]


def test_nobody_listens_where_airflow_has_metrics_and_traces_turned_off() -> None:
    telemetry.listen_in()
    assert not observe.is_measured()
    with observe.span("name", lambda: pytest.fail("nobody wants to know")):
        observe.count(measures.ACTION_BEGUN, dag_id="d", effect="READ_ONLY")


@pytest.mark.parametrize("switch", ["STATSD_ON", "STATSD_DATADOG_ENABLED", "OTEL_ON"])
def test_each_backend_of_airflow_is_listened_with(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv(f"AIRFLOW__METRICS__{switch}", "True")
    telemetry.listen_in()
    try:
        assert observe.is_measured()
    finally:
        observe.observe_with(None, None)
