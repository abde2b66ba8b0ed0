"""The ground every benchmark stands on: a durable server, a migrated store, a step without Airflow, and the floor."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import psycopg

from airflow_saga.core.actions import NON_COMPENSABLE
from airflow_saga.core.declare import action
from airflow_saga.core.records import ActionRecord, Attempt
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.saga import Saga
from airflow_saga.runtime.secrecy import KnownSecrets
from airflow_saga.runtime.step import StepResult, StepRun
from airflow_saga.store.connect import Address

_SECRETS = tuple(f"secret-value-number-{number}" for number in range(20))
KNOWN_SECRETS = KnownSecrets(lambda: _SECRETS)
PARAMS = {"to": "LIS", "nights": 3, "guests": ["a", "b"]}
undone: list[Callable[[ActionRecord], None]] = []


class Alone:
    """The platform of a step that runs outside Airflow: nobody kills it, nothing is triggered."""

    def task_state(self) -> str | None:
        return "running"

    def run_state(self) -> str | None:
        return "running"

    def trigger_undo(self, request_uuid: uuid.UUID) -> None:
        return None


def undo_nothing(record: ActionRecord) -> None:
    for watch in undone:
        watch(record)


@action(compensate=undo_nothing)
def do_nothing(number: int, trip: dict[str, Any]) -> dict[str, int]:
    return {"id": number}


@action(compensate=NON_COMPENSABLE)
def say_nothing() -> None:
    return None


def attempt(run_id: str, task_id: str = "step", try_number: int = 1) -> Attempt:
    return Attempt("bench", run_id, task_id, -1, uuid.uuid4(), try_number, 0, 0, 0)


def step_run(address: Address, run_id: str, task_id: str = "step", try_number: int = 1) -> StepRun:
    return StepRun(attempt(run_id, task_id, try_number), address, Alone(), Limits(), KNOWN_SECRETS)


def run_step(address: Address, run_id: str, body: Callable[[Saga], Any]) -> StepResult:
    return step_run(address, run_id).run(body)


class Floor:
    """One autocommit INSERT of a row like ours, prepared, on a connection of its own."""

    def __init__(self, address: Address) -> None:
        self.connection = address.open()
        self.connection.execute(
            "CREATE TABLE IF NOT EXISTS floor (id bigserial PRIMARY KEY, name text, params text)"
        )
        self.seconds: list[float] = []

    def measure(self) -> float:
        """How long one of them took."""
        began = time.perf_counter()
        self.connection.execute(
            "INSERT INTO floor (name, params) VALUES (%s, %s)",
            ("do_nothing", '{"number": 1, "trip": {"to": "LIS"}}'),
        )
        took = time.perf_counter() - began
        self.seconds.append(took)
        return took

    def close(self) -> None:
        self.connection.close()


def clock(connection: psycopg.Connection) -> Any:
    row = connection.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    return row[0]
