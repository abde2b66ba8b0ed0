"""The demo as a program of its own, run from a copy of `dags/`.

A copy, so that no test meets a demo that somebody has left running from this checkout.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.airflow_api import PATIENCE

DAGS = Path(__file__).parents[2] / "dags"
DEMO_SECONDS = 600 * PATIENCE
SOON_SECONDS = 60 * PATIENCE


def copy_of_demo(directory: Path) -> Path:
    """What of a checkout the demo needs."""
    shutil.copytree(DAGS, directory / "dags", ignore=shutil.ignore_patterns("__pycache__"))
    return directory


class Demo:
    """One run of the program, with what it has printed so far."""

    def __init__(self, checkout: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(checkout / "dags" / "support" / "demo.py"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
        )
        self.lines: list[str] = []
        self.sessions: set[int] = set()
        """Of what it has started: each is a session of its own, whose processes never leave it."""

    def read_until(self, pattern: str) -> str:
        """:raises AssertionError: it ended without saying that."""
        found = next((line for line in self._read() if re.search(pattern, line)), None)
        assert found is not None, self.text
        return found

    def finish(self, seconds: float = DEMO_SECONDS) -> int:
        """Read to the end and return the exit code; a demo that takes longer is killed, and has none to be proud of."""
        too_long = threading.Timer(seconds, self.process.kill)
        too_long.start()
        for _ in self._read():
            pass
        code = self.process.wait()
        too_long.cancel()
        return code

    def _read(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            with suppress(psutil.NoSuchProcess):
                self.sessions |= {child.pid for child in psutil.Process(self.process.pid).children()}
            yield line

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def directory(self) -> Path:
        found = re.search(r"in (/\S*saga-demo-\S+)", self.text)
        assert found, self.text
        return Path(found[1])
