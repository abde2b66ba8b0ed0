"""Is everything alive that a saga needs? Each check says what it saw and, where it is not well, what to do.

Without listener and reconciler nothing is undone by itself, and nobody would notice until it matters: so their absence
is a failure here and not a remark. That a component is at work is asked of Airflow, that the plugin is alive in it of
the store, to which each such process writes.
"""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

import psycopg

from airflow_saga import __version__, metadata
from airflow_saga.core.errors import StoreError
from airflow_saga.core.identity import compensation_dag_id
from airflow_saga.core.states import RequestState
from airflow_saga.metadata import Job, MetadataUnreadableError
from airflow_saga.settings import Settings, store_address
from airflow_saga.store.connect import Address, behind_pooler, first_line
from airflow_saga.store.migrate import HEAD, check
from airflow_saga.store.overview import Overview, notification_seconds
from airflow_saga.store.reader import Reader
from airflow_saga.telling.display import age, moment, plural

log = logging.getLogger(__name__)
OLDEST_SERVER = 15
SILENT = timedelta(minutes=5)
"""A process with the plugin says that it is alive each 45 s; this is longer than an outage that it rides out."""
RECONCILER_DEAD = timedelta(hours=1)
ROWS_NAMED = 5
MOST_AT_ONCE = 2
"""Examinations of :func:`examine_within` in one process; a store that hangs holds no more threads than this."""
_rooms = threading.BoundedSemaphore(MOST_AT_ONCE)


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What one check saw. ``next``: what to do about it."""

    level: Level
    check: str
    message: str
    next: str | None = None

    def line(self) -> str:
        told = f"{self.level:<5} {self.check:<17} {self.message}"
        return told if self.next is None else f"{told}\n{'':<24}→ {self.next}"

    def data(self) -> dict[str, Any]:
        return {"level": self.level, "check": self.check, "message": self.message, "next": self.next}


def all_well(findings: Sequence[Finding]) -> bool:
    """Whether nothing is broken; a warning breaks nothing yet."""
    return all(finding.level is not Level.FAIL for finding in findings)


@dataclass(frozen=True)
class _Component:
    """What is lost while a kind of component does not show the plugin."""

    kind: str
    missing: Level
    loses: str


COMPONENTS = (
    _Component("scheduler", Level.FAIL, "the end of a run is seen by the reconciler alone"),
    _Component("api-server", Level.FAIL, "a run marked failed in the UI is undone by the reconciler alone"),
    _Component("dag-processor", Level.WARN, "it may lack the package, and then no saga DAG can be parsed"),
    _Component("triggerer", Level.WARN, "it may lack the package, and then deferred steps cannot go on"),
)


def examine() -> Iterator[Finding]:
    """Every check, in the order in which one rests on the other; those that cannot be made are left out."""
    settings = Settings.load()
    try:
        address = store_address()
        with address.open() as connection:
            yield from _examine_store(settings, address, connection)
    except StoreError as problem:
        yield Finding(Level.FAIL, "connection", str(problem))


def examine_within(seconds: float) -> list[Finding]:
    """As :func:`examine`, but what it has found after this time, for a server that must answer.

    A limit on each statement would not do: a Postgres that is stopped, or a network that swallows all, keeps no limit.
    """
    found: list[Finding] = []
    deadline = time.monotonic() + seconds
    if not _rooms.acquire(timeout=seconds):
        return [_late(f"{MOST_AT_ONCE} that were asked for before have not ended yet")]
    # A daemon: one that hangs must not keep the server from being stopped.
    examination = threading.Thread(target=_examine_into, args=(found,), name="saga-doctor", daemon=True)
    examination.start()
    examination.join(max(0.0, deadline - time.monotonic()))
    seen = list(found)
    if examination.is_alive():
        after = f"after {seen[-1].check}" if seen else "before its first check"
        seen.append(_late(f"no answer within {seconds:g} s, {after}: the rest was not looked at"))
    return seen


def _examine_into(found: list[Finding]) -> None:
    try:
        found.extend(examine())
    except Exception as problem:
        # It would end with the thread, unseen; in a command, it is what the command fails with.
        log.exception("the examination broke off")
        found.append(
            Finding(Level.FAIL, "doctor", f"broke off ({type(problem).__name__})", "look into the log")
        )
    finally:
        _rooms.release()


def _late(message: str) -> Finding:
    return Finding(Level.FAIL, "time", message, "look whether Postgres hangs, the store's or Airflow's own")


def _examine_store(settings: Settings, address: Address, connection: psycopg.Connection) -> Iterator[Finding]:
    info = connection.info
    yield Finding(
        Level.OK,
        "connection",
        f"{settings.conn_id} leads to {info.dbname} on {info.host or 'a socket'}:{info.port} as {info.user}",
    )
    yield from _server(connection)
    try:
        check(connection)
    except StoreError as problem:
        yield Finding(Level.FAIL, "migration", str(problem))
        return
    yield Finding(Level.OK, "migration", f"the tables are at {HEAD}")
    yield from _notifications(settings, address, connection)
    overview, reader = Overview(connection), Reader(connection)
    for examine_one in (_components, _workers, _reconciler, _dags, _people, _oldest_request):
        yield from _told(examine_one, settings, overview, reader)


def _told(
    examine_one: Callable[[Settings, Overview, Reader], Iterator[Finding]],
    settings: Settings,
    overview: Overview,
    reader: Reader,
) -> Iterator[Finding]:
    """One failing check must not hide the others."""
    name = examine_one.__name__.lstrip("_").replace("_", "-")
    try:
        yield from examine_one(settings, overview, reader)
    except MetadataUnreadableError as problem:
        next_step = "run this where the scheduler runs, with its configuration"
        yield Finding(Level.WARN, name, f"Airflow's own database cannot be read here: {problem}", next_step)
    except psycopg.Error as problem:
        yield Finding(Level.FAIL, name, f"the store failed: {first_line(problem)}")


# -- the store --------------------------------------------------------------------------------------------------------


def _server(connection: psycopg.Connection) -> Iterator[Finding]:
    version = connection.info.server_version
    told = f"PostgreSQL {version // 10_000}.{version % 10_000}"
    if version // 10_000 < OLDEST_SERVER:
        yield Finding(Level.FAIL, "server", f"{told} is too old", f"upgrade it to {OLDEST_SERVER} or newer")
    else:
        yield Finding(Level.OK, "server", told)


def _notifications(settings: Settings, address: Address, connection: psycopg.Connection) -> Iterator[Finding]:
    beat = f"{settings.heartbeat_seconds:g} s"
    if behind_pooler(connection):
        yield Finding(
            Level.WARN,
            "notifications",
            f"a transaction pooler stands before Postgres: a cancel is seen by polling, within {beat}",
            "for a cancel within milliseconds, let the connection lead to Postgres itself or to a session pool",
        )
        return
    seconds = notification_seconds(address)
    if seconds is None:
        yield Finding(
            Level.WARN,
            "notifications",
            f"notifications do not arrive: a cancel is seen by polling, within {beat}",
            "look for a proxy between here and Postgres",
        )
    else:
        yield Finding(Level.OK, "notifications", f"arrive after {seconds * 1000:.1f} ms")


# -- who is alive -----------------------------------------------------------------------------------------------------


def _components(settings: Settings, overview: Overview, reader: Reader) -> Iterator[Finding]:
    now = overview.now()
    seen: dict[str, list[dict[str, Any]]] = {}
    for row in reader.components():
        seen.setdefault(row["kind"], []).append(row)
    try:
        jobs = metadata.live_jobs()
    except MetadataUnreadableError as problem:
        jobs = []
        yield Finding(Level.WARN, "jobs", f"Airflow's own database cannot be read here: {problem}")
    for component in COMPONENTS:
        rows = seen.get(component.kind, [])
        yield from _component(component, rows, [job for job in jobs if job.kind == component.kind], now)


def _component(
    component: _Component, rows: list[dict[str, Any]], jobs: list[Job], now: datetime
) -> Iterator[Finding]:
    restart = f"install airflow-saga {__version__} there and restart it"
    if not rows:
        never = f"the plugin was never seen in it: {component.loses}"
        yield Finding(component.missing, component.kind, never, restart)
        return
    at_work = {job.host: job for job in jobs}
    newest = max(row["seen_at"] for row in rows)
    for row in rows:
        job, silence = at_work.get(row["host"]), now - row["seen_at"]
        told = _seen(row, now)
        if job and min(silence, now - job.started_at) > SILENT:
            silent = f"{told}, though it is at work since {moment(job.started_at)}: {component.loses}"
            yield Finding(component.missing, component.kind, silent, restart)
        elif silence > SILENT and row["seen_at"] < newest:
            continue  # a host of the past
        elif silence > SILENT:
            gone = f"{told}: it is stopped, or cannot reach the store"
            yield Finding(Level.WARN, component.kind, gone, "start it, or look into its log")
        elif row["version"] != __version__:
            yield Finding(Level.WARN, component.kind, f"{told}; this is {__version__}", restart)
        else:
            yield Finding(Level.OK, component.kind, told)
    for host in sorted(set(at_work) - {row["host"] for row in rows}):
        if now - at_work[host].started_at > SILENT:
            unseen = f"{host}: at work, but the plugin was not seen in it"
            yield Finding(Level.WARN, component.kind, unseen, restart)


def _seen(row: dict[str, Any], now: datetime) -> str:
    """That it is loaded and that it is called are two things: a hook that nobody calls undoes nothing."""
    called = (
        f"last hook {row['last_hook']} {age(now - row['last_hook_at'])} ago"
        if row["last_hook"]
        else "no hook called in it yet"
    )
    return f"{row['host']}: seen {age(now - row['seen_at'])} ago with {row['version']}, {called}"


def _workers(settings: Settings, overview: Overview, reader: Reader) -> Iterator[Finding]:
    step = overview.newest_step()
    if step is None:
        unproven = (
            "no step has run yet, so it is not proved that workers have the package and reach the store"
        )
        yield Finding(Level.WARN, "worker", unproven, "run a saga DAG once")
    else:
        told = f"{step['host']}: a step began {age(overview.now() - step['attached_at'])} ago"
        yield Finding(Level.OK, "worker", told)


def _reconciler(settings: Settings, overview: Overview, reader: Reader) -> Iterator[Finding]:
    rows = [row for row in reader.components() if row["kind"] == "reconciler"]
    make = "put `reconciler = reconciler_dag()` into a DAG file, and see that it is not paused"
    if not rows:
        yield Finding(Level.FAIL, "reconciler", "has never run: what a hook misses is never undone", make)
        return
    newest = max(rows, key=lambda row: row["seen_at"])
    silence = overview.now() - newest["seen_at"]
    told = f"last ran {age(silence)} ago on {newest['host']}"
    if silence > RECONCILER_DEAD:
        yield Finding(Level.FAIL, "reconciler", f"{told}: what a hook misses is not undone", make)
    elif silence > SILENT:
        yield Finding(Level.WARN, "reconciler", told, make)
    else:
        yield Finding(Level.OK, "reconciler", told)


# -- what is open -----------------------------------------------------------------------------------------------------


def _dags(settings: Settings, overview: Overview, reader: Reader) -> Iterator[Finding]:
    rows = overview.dags_with_sagas()
    names = [row["dag_id"] for row in rows]
    known = metadata.dags_of([*names, *map(compensation_dag_id, names)]) if names else {}
    wrong = 0
    for row in rows:
        forward, undo = known.get(row["dag_id"]), known.get(compensation_dag_id(row["dag_id"]))
        if not row["unsettled"] and (forward is None or forward.is_stale):
            continue  # a DAG of the past, with nothing left to undo by itself
        finding = _compensation_dag(row["dag_id"], undo)
        if finding is not None:
            wrong += 1
            yield finding
    if not wrong:
        yield Finding(Level.OK, "compensation-dags", f"{plural(len(rows), 'saga DAG')}, each can be undone")


def _compensation_dag(dag_id: str, undo: metadata.Dag | None) -> Finding | None:
    name = compensation_dag_id(dag_id)
    if undo is None or undo.is_stale:
        gone = "is not there" if undo is None else "is there no more"
        repair = f"make {dag_id} a SagaDAG, or call compensation_dag(dag) in its file; airflow dags list-import-errors"
        return Finding(
            Level.FAIL, "compensation-dags", f"{name} {gone}: runs of {dag_id} cannot be undone", repair
        )
    if undo.is_paused:
        return Finding(
            Level.FAIL,
            "compensation-dags",
            f"{name} is paused: no undo of {dag_id} begins",
            f"airflow dags unpause {shlex.quote(name)}",
        )
    if undo.has_import_errors:
        return Finding(
            Level.FAIL,
            "compensation-dags",
            f"the file of {name} has import errors",
            "airflow dags list-import-errors",
        )
    return None


def _people(settings: Settings, overview: Overview, reader: Reader) -> Iterator[Finding]:
    rows = overview.needs_person(start_alert_seconds=settings.start_alert_seconds)
    if not rows:
        yield Finding(Level.OK, "people", "no saga needs a person")
        return
    named = ", ".join(f"{row['dag_id']} / {row['run_id']} ({row['state']})" for row in rows[:ROWS_NAMED])
    more = ", …" if len(rows) > ROWS_NAMED else ""
    need = f"{plural(len(rows), 'saga')} {'needs' if len(rows) == 1 else 'need'} a person: {named}{more}"
    yield Finding(Level.WARN, "people", need, "airflow saga list, then airflow saga show")


def _oldest_request(settings: Settings, overview: Overview, reader: Reader) -> Iterator[Finding]:
    row = overview.oldest_open_request()
    if row is None:
        yield Finding(Level.OK, "oldest-request", "no undo is open")
        return
    told = f"{row['dag_id']} / {row['run_id']} waits {age(row['age'])} for its undo ({row['state']})"
    show = f"airflow saga show {shlex.quote(row['dag_id'])} {shlex.quote(row['run_id'])}"
    late = row["age"].total_seconds() > settings.start_alert_seconds
    if row["state"] == RequestState.HELD:
        yield Finding(Level.WARN, "oldest-request", told, show)
    elif late and row["frozen_at"] is None:
        yield Finding(Level.FAIL, "oldest-request", f"{told}, which has not begun", show)
    else:
        yield Finding(Level.WARN if late else Level.OK, "oldest-request", told, show if late else None)
