"""Opening the store: one plain psycopg connection per process that logs, autocommit, prepared where that works.

A transaction pooler between us and Postgres can neither keep a prepared statement nor a LISTEN; it gives itself away
by a backend id of its own. Then statements go unprepared and polling replaces notifications.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import psycopg
from psycopg.conninfo import make_conninfo

from airflow_saga.core.errors import StoreUnavailableError

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

CONNECT_TIMEOUT_SECONDS = 5
_LIVENESS: dict[str, str | int | None] = {
    "connect_timeout": CONNECT_TIMEOUT_SECONDS,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "application_name": "airflow_saga",
}
_STEADY_PLANS = "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off"
"""Planning these statements costs more than running them, and a table that has grown since it was last analyzed would
tempt the planner to read all of it."""
TRANSIENT = (
    psycopg.errors.SerializationFailure,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.LockNotAvailable,
)
TRANSIENT_TRIES = 6


@dataclass(frozen=True)
class Address:
    """Where the store is; opened again after an outage without asking Airflow a second time."""

    conninfo: str

    def __repr__(self) -> str:
        return "<address of the saga store>"

    @classmethod
    def of(cls, connection: psycopg.Connection) -> Address:
        """The address an open connection leads to (an Airflow hook made it), with limits on silence added."""
        return cls(make_conninfo(connection.info.dsn, password=connection.info.password or None))

    def open(self) -> psycopg.Connection:
        """:raises StoreUnavailableError: if nothing answers; nothing was called, an Airflow retry tries again."""
        try:
            connection = psycopg.connect(make_conninfo(self.conninfo, **_LIVENESS), autocommit=True)
        except psycopg.OperationalError as problem:
            raise StoreUnavailableError(f"the saga store does not answer: {first_line(problem)}") from problem
        if behind_pooler(connection):
            connection.prepare_threshold = None
        else:
            connection.prepare_threshold = 1  # what is asked once, as a step attaches, is not worth preparing
            connection.execute(_STEADY_PLANS, prepare=False)
        return connection

    def open_within(self, seconds: float) -> psycopg.Connection:
        """As :meth:`open`, but waits out an outage or a full server for this long, saying so in the log."""
        deadline = time.monotonic() + seconds
        pause = 0.2
        while True:
            try:
                return self.open()
            except StoreUnavailableError as problem:
                if time.monotonic() + pause > deadline:
                    raise
                log.warning("%s; trying again in %.1f s", problem, pause)
                time.sleep(pause)
                pause = min(pause * 2, 5.0)


def behind_pooler(connection: psycopg.Connection) -> bool:
    """Whether something between us and Postgres shares server connections, so that LISTEN and PREPARE are lost."""
    row = connection.execute("SELECT pg_backend_pid()", prepare=False).fetchone()
    return row is None or row[0] != connection.info.backend_pid


def first_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]


def retried(verb: Callable[P, R]) -> Callable[P, R]:
    """A verb that Postgres rolled back for another one's sake (40001, 40P01, 55P03) is run again, a few times."""

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        for attempt in range(1, TRANSIENT_TRIES):
            try:
                return verb(*args, **kwargs)
            except TRANSIENT as problem:
                log.info("%s rolled back (%s), try %d", verb.__name__, first_line(problem), attempt)
                time.sleep(0.01 * 2**attempt)
        return verb(*args, **kwargs)

    return run
