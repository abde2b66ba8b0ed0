"""The processes of one Airflow, found from outside, and their end.

Airflow's processes change their titles, and with that what /proc says of their command line and environment; children
get process groups and sessions of their own, and outlive their parents. What holds: a component is the leader of a
session that its children inherit, each process starts in the Airflow's home directory, and what is executed by a task
still carries AIRFLOW_HOME. A process with any of these marks belongs to it.

Run as a program this is the janitor: it waits until its standard input closes, which happens however its parent ends,
and then kills what is left.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from os import getpid, getsid
from pathlib import Path

import psutil

REAP_SECONDS = 20.0
_TASK = "airflow worker -- "
_SUPERVISOR = "airflow worker -- LocalExecutor: "


@dataclass(frozen=True)
class TaskProcess:
    """One attempt of a task instance at work: its process, and the supervisor that watches it and heartbeats."""

    ti_id: str
    task: psutil.Process
    supervisor: psutil.Process | None
    """None when the supervisor is gone, and the task an orphan."""

    @property
    def pid(self) -> int:
        return self.task.pid

    @property
    def alive(self) -> bool:
        return alive(self.task)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Signal the task's process alone."""
        self.task.send_signal(signum)

    def kill_supervisor(self, signum: int = signal.SIGKILL) -> None:
        """Signal the supervisor alone: after SIGKILL the task goes on without it."""
        if self.supervisor is None:
            raise ProcessLookupError(f"task process {self.pid} ({self.ti_id}) has no supervisor any more")
        self.supervisor.send_signal(signum)

    def wait_gone(self, timeout: float = 30) -> None:
        """Wait until the task's process is gone; raises AssertionError after `timeout` seconds."""
        wait_gone([self.task], timeout)


def owned_by(home: Path, sessions: Collection[int] = ()) -> list[psutil.Process]:
    """The living processes of the Airflow with this home; `sessions` are the session ids of its components."""
    return [
        process
        for process in psutil.process_iter()
        if process.pid != getpid() and _is_owned(process, home, sessions) and alive(process)
    ]


def _is_owned(process: psutil.Process, home: Path, sessions: Collection[int]) -> bool:
    with suppress(psutil.Error, ProcessLookupError):
        if getsid(process.pid) in sessions:
            return True
    with suppress(psutil.Error):
        if Path(process.cwd()).is_relative_to(home):
            return True
    with suppress(psutil.Error):
        return process.environ().get("AIRFLOW_HOME") == str(home)
    return False


def task_processes(owned: Collection[psutil.Process]) -> Iterator[TaskProcess]:
    """Those among the processes of an Airflow that run a task, LocalExecutor's, by what their titles say."""
    titles = {process: _title(process) for process in owned}
    supervisors = {
        title.removeprefix(_SUPERVISOR): process
        for process, title in titles.items()
        if title.startswith(_SUPERVISOR)
    }
    for process, title in titles.items():
        if title.startswith(_TASK) and not title.startswith(_SUPERVISOR):
            ti_id = title.removeprefix(_TASK)
            yield TaskProcess(ti_id, process, supervisors.get(ti_id))


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def alive(process: psutil.Process) -> bool:
    """Whether it still runs: a zombie does not, nor does a later process with the same number."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(processes: Collection[psutil.Process], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while left := [process for process in processes if alive(process)]:
        if time.monotonic() > deadline:
            raise AssertionError(f"still there after {timeout:g} s: {left}")
        time.sleep(0.02)


def reap(home: Path, sessions: Collection[int] = ()) -> None:
    """SIGKILL all processes of an Airflow until none is left; raises AssertionError if one stays."""
    deadline = time.monotonic() + REAP_SECONDS
    while left := owned_by(home, sessions):
        if time.monotonic() > deadline:
            raise AssertionError(f"processes of {home} outlive SIGKILL: {left}")
        # Stopped first, so that none can start another between being seen and being killed.
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signum)
        time.sleep(0.02)


def start_janitor(home: Path) -> subprocess.Popen[bytes]:
    """Start a janitor for an Airflow; close its standard input to let it work and go."""
    return subprocess.Popen(
        [sys.executable, __file__, str(home)], stdin=subprocess.PIPE, start_new_session=True, cwd="/"
    )


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.read()
    reap(Path(sys.argv[1]))
