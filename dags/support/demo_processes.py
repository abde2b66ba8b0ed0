"""The processes of one demo, found from outside and ended together, whatever happens to the demo itself.

Everything the demo starts belongs to a session whose leader has written itself down in the demo's directory, and works
in that directory. Airflow's tasks get process groups of their own and change their titles, but not their session. Those
of its processes that hold secrets do not tell an ordinary user where they work: of them the session alone is known.

The keeper is this file run as a program. It waits for its standard input to close, which happens however the demo ends,
and then ends what is left and removes the directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

END_SECONDS = 20.0
POSTMASTER_SECONDS = 5.0
SESSIONS = "sessions"
"""The file with the process id of every session's leader."""
SERVER = "postgres"
"""The directory that only Postgres has business in. Its backends have sessions of their own."""
LOGS = "logs"

LEAVE = b"leave"
KEEP_LOGS = b"keep-logs"


class DemoProblem(Exception):
    """Something of the demo's surroundings did not work; says what.

    :ivar logs: where to look for why.
    """

    def __init__(self, message: str, *logs: Path) -> None:
        super().__init__(message)
        self.logs = logs


def noted(directory: Path, command: list[str]) -> list[str]:
    """A command that begins by writing itself down as a session of the demo in this directory.

    To be started as the leader of a session. It does so itself, since whoever starts it may be killed right after.
    """
    return ["/bin/sh", "-c", 'echo $$ >> "$0" && exec "$@"', str(directory / SESSIONS), *command]


def owned(directory: Path) -> list[psutil.Process]:
    """The living processes of the demo in this directory."""
    with suppress(FileNotFoundError):
        sessions = {int(line) for line in (directory / SESSIONS).read_text().split()}
        return [each for each in psutil.process_iter() if _is_owned(each, directory, sessions)]
    return []


def _is_owned(process: psutil.Process, directory: Path, sessions: Collection[int]) -> bool:
    try:
        in_session = os.getsid(process.pid) in sessions
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        place = Path(process.cwd())
    except psutil.AccessDenied:
        return in_session
    except (psutil.Error, OSError):
        return False
    return place.is_relative_to(directory / SERVER) or (in_session and place.is_relative_to(directory))


def end(directory: Path, *, keep_logs: bool = False) -> None:
    """End every process of the demo and remove its directory; does nothing where there is none.

    Nobody is asked: what they would still write is thrown away.

    :raises DemoProblem: a process outlives being killed; names it.
    """
    _stop_postmaster(directory)
    deadline = time.monotonic() + END_SECONDS
    while left := owned(directory):
        if time.monotonic() > deadline:
            raise DemoProblem(f"still there {END_SECONDS:g} s after being killed: {left}")
        # Stopped first, so that none can start another between being seen and being killed.
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signum)
        time.sleep(0.02)
    for entry in list(directory.iterdir()) if directory.exists() else []:
        if keep_logs and entry.name == LOGS:
            continue
        shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
    with suppress(OSError):
        directory.rmdir()


def _stop_postmaster(directory: Path) -> None:
    """Killed the hard way it would leave its shared memory behind; told to quit it does not."""
    with suppress(OSError, ValueError, psutil.NoSuchProcess):
        pid = int((directory / SERVER / "data" / "postmaster.pid").read_text().split()[0])
        for postmaster in [each for each in owned(directory) if each.pid == pid]:
            postmaster.send_signal(signal.SIGQUIT)
            deadline = time.monotonic() + POSTMASTER_SECONDS
            while postmaster in owned(directory) and time.monotonic() < deadline:
                time.sleep(0.02)


class Keeper:
    """Sees to it that nothing outlives the demo, not even a demo that is killed."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(directory)],
            stdin=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )

    def end_all(self, *, keep_logs: bool = False) -> bool:
        """End and remove everything; False if that did not succeed (why is on standard error)."""
        return self._dismiss(KEEP_LOGS if keep_logs else b"")

    def leave_all(self) -> None:
        """Go away and let everything run."""
        self._dismiss(LEAVE)

    def _dismiss(self, word: bytes) -> bool:
        self._process.communicate(word, timeout=3 * END_SECONDS)
        return self._process.returncode == 0


def keep(directory: Path) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    word = sys.stdin.buffer.read()
    if word != LEAVE:
        end(directory, keep_logs=word == KEEP_LOGS)


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
