"""One process of a saga, made to be killed: it carries out a scenario and dies exactly where it is told to.

Run as a program it is a nursery: it has loaded everything already and forks a process for each scenario it reads from
its standard input (a process costs milliseconds so, not a third of a second). It says which process it made, and how
each one ended; when its standard input closes it kills what is left and goes.

The product knows nothing of this: a scenario names a verb of the store or a call to the world, and whether to die
before or after its n-th time; the driver wraps that function in its own process.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from airflow_saga.ai.requests import Exchange
from airflow_saga.core.records import Attempt
from airflow_saga.runtime import drive
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.reconcile import Reconciler
from airflow_saga.runtime.secrecy import KnownSecrets
from airflow_saga.runtime.step import StepRun
from airflow_saga.runtime.undo import StepUndo
from airflow_saga.store.attach import AttachVerbs
from airflow_saga.store.connect import Address
from airflow_saga.store.freeze import FreezeVerbs
from airflow_saga.store.late import LateVerbs
from airflow_saga.store.requests import RequestVerbs
from airflow_saga.store.rewind import RewindVerbs
from airflow_saga.store.runs import RunVerbs
from airflow_saga.store.settle import SettleVerbs
from airflow_saga.store.steps import StepVerbs
from airflow_saga.store.undo import UndoVerbs
from dags.support import travel
from tests.chaos import agents, bodies
from tests.runtime.lab import RunPlace, TaskPlace

Scenario = dict[str, Any]

VERBS: tuple[type, ...] = (
    AttachVerbs,
    StepVerbs,
    LateVerbs,
    FreezeVerbs,
    UndoVerbs,
    SettleVerbs,
    RequestVerbs,
    RunVerbs,
    RewindVerbs,
)
CALLS = {"POST": "call", "GET": "lookup", "DELETE": "uncall"}
"""What a call to the world is named as a point to die at, by its HTTP method."""


# -- where to die ---------------------------------------------------------------------------------------------------


class Reaper:
    """Dies (or stands still) at the n-th time of a named point, before or after it."""

    def __init__(self, point: dict[str, Any] | None) -> None:
        self.point = point
        self.seen: dict[tuple[str, str], int] = {}

    def pass_by(self, name: str, when: str) -> None:
        count = self.seen[name, when] = self.seen.get((name, when), 0) + 1
        at = self.point
        if at is not None and (at["at"], at["when"], at.get("nth", 1)) == (name, when, count):
            os.kill(os.getpid(), signal.SIGSTOP if at.get("stand_still") else signal.SIGKILL)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.pass_by(name, "before")
            try:
                return function(*args, **kwargs)
            finally:
                self.pass_by(name, "after")

        return wrapped


def _install(reaper: Reaper) -> None:
    wanted = (reaper.point or {}).get("at")
    for verbs in VERBS:
        function = verbs.__dict__.get(wanted or "")
        if function is not None:
            setattr(verbs, str(wanted), reaper.wrap(str(wanted), function))
    original = travel._call

    def call(method: str, *args: Any, **kwargs: Any) -> Any:
        return reaper.wrap(CALLS[method], original)(method, *args, **kwargs)

    travel._call = call
    if wanted == "ask":
        _install_asking(reaper)
    drive._in_time = reaper.wrap("in_time", drive._in_time)


def _install_asking(reaper: Reaper) -> None:
    """Around a request to the model of an agent."""
    original = Exchange.ask

    async def ask(exchange: Exchange) -> Any:
        reaper.pass_by("ask", "before")
        try:
            return await original(exchange)
        finally:
            reaper.pass_by("ask", "after")

    Exchange.ask = ask  # type: ignore[method-assign]


# -- what to do -----------------------------------------------------------------------------------------------------


def _step(scenario: Scenario, address: Address, limits: Limits) -> Any:
    fields: dict[str, Any] = {
        "task_id": "t",
        "map_index": -1,
        "try_number": 1,
        "max_tries": 0,
        "retries": 0,
        "clear_number": 0,
        "host": "here",
        "pid": os.getpid(),
        **scenario.get("attempt", {}),
    }
    fields["ti_id"] = uuid.UUID(fields["ti_id"]) if "ti_id" in fields else uuid.uuid4()
    fields["ancestors"] = tuple(fields.get("ancestors", ()))
    attempt = Attempt(scenario["dag_id"], scenario["run_id"], **fields)
    run = StepRun(
        attempt,
        address,
        TaskPlace(**scenario.get("place", {})),
        limits,
        _secrets(scenario),
        on_divergence=scenario.get("on_divergence", "stop"),
    )
    signal.signal(signal.SIGTERM, lambda *_: run.request_kill())
    body = getattr(bodies, scenario["body"], None) or getattr(agents, scenario["body"])
    return run.run(lambda saga: body(saga, *scenario.get("args", []))).output


def _undo(scenario: Scenario, address: Address, limits: Limits) -> Any:
    undo = StepUndo(
        address,
        uuid.UUID(scenario["request_uuid"]),
        scenario.get("owner", "undo1"),
        scenario.get("task_id", "t"),
        scenario.get("map_index", -1),
        limits,
        _secrets(scenario),
    )
    signal.signal(signal.SIGTERM, lambda *_: undo.request_kill())
    return vars(undo.run())


def _freeze(scenario: Scenario, address: Address, limits: Limits) -> Any:
    with address.open() as connection:
        verbs = FreezeVerbs(connection)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            frozen = verbs.freeze_if_quiet(
                uuid.UUID(scenario["request_uuid"]), scenario.get("owner", "undo1"), lease_seconds=2.0
            )
            if frozen.outcome != "not quiet":
                break
            time.sleep(0.05)
        return frozen.outcome


def _settle(scenario: Scenario, address: Address, limits: Limits) -> Any:
    with address.open() as connection:
        settled = SettleVerbs(connection).settle_if_all_settled(
            uuid.UUID(scenario["request_uuid"]), scenario.get("owner", "undo1")
        )
        return settled is not None


def _reconcile(scenario: Scenario, address: Address, limits: Limits) -> Any:
    with address.open() as connection:
        return str(Reconciler(connection, RunPlace(**scenario.get("place", {})), limits).run_once())


DEEDS: dict[str, Callable[[Scenario, Address, Limits], Any]] = {
    "step": _step,
    "undo": _undo,
    "freeze": _freeze,
    "settle": _settle,
    "reconcile": _reconcile,
}


def _secrets(scenario: Scenario) -> KnownSecrets:
    return KnownSecrets(lambda: scenario.get("secrets", []))


def carry_out(scenario: Scenario) -> None:
    """Do what the scenario says, and write into its report how it ended."""
    os.environ["TRAVEL_URL"] = scenario["travel_url"]
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(process)d %(levelname)s %(message)s",
        force=True,
    )
    _install(Reaper(scenario.get("die")))
    if skew := scenario.get("skew_seconds"):
        clock = time.time
        time.time = lambda: clock() + skew
    limits = Limits(**scenario.get("limits", {}))
    report: dict[str, Any] = {"ended": "well"}
    try:
        report["output"] = DEEDS[scenario["do"]](scenario, Address(scenario["database_url"]), limits)
    except BaseException as problem:
        logging.exception("ended by")
        report = {"ended": type(problem).__name__, "message": str(problem)}
    path = Path(scenario["report"])
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report, default=str))
    partial.replace(path)


# -- the nursery ----------------------------------------------------------------------------------------------------


def _fork(scenario: Scenario) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(scenario["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        carry_out(scenario)
        code = 0
    finally:
        os._exit(code)


def _say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def serve() -> None:
    children: dict[int, str] = {}
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    buffered = b""
    while True:
        readable, _, _ = select.select([0, wake_read], [], [], 5.0)
        if wake_read in readable:
            with suppress(BlockingIOError):
                os.read(wake_read, 4096)
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                _say(id=children.pop(pid), exit=os.waitstatus_to_exitcode(status))
        if 0 in readable:
            data = os.read(0, 1 << 20)
            if not data:
                break
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                scenario = json.loads(line)
                pid = _fork(scenario)
                children[pid] = scenario["id"]
                _say(id=scenario["id"], pid=pid)
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve()
