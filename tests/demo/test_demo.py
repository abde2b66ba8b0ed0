"""The demo as a stranger runs it: a program of its own, judged by its exit code, its words and what it leaves behind.

Each test runs a copy of `dags/`, so that none meets a demo that somebody has left running from this checkout.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.airflow_api import PATIENCE

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(700 * PATIENCE)]

DAGS = Path(__file__).parents[2] / "dags"
DEMO_SECONDS = 600 * PATIENCE
SOON_SECONDS = 60 * PATIENCE


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

    def read_until(self, pattern: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if re.search(pattern, line):
                return line
        raise AssertionError(f"it ended without saying {pattern!r}:\n{self.text}")

    def finish(self, seconds: float = DEMO_SECONDS) -> int:
        """Read to the end and return the exit code; a demo that takes longer is killed, and has none to be proud of."""
        assert self.process.stdout is not None
        too_long = threading.Timer(seconds, self.process.kill)
        too_long.start()
        self.lines += self.process.stdout.read().splitlines()
        code = self.process.wait()
        too_long.cancel()
        return code

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def directory(self) -> Path:
        found = re.search(r"in (/\S*saga-demo-\S+)", self.text)
        assert found, self.text
        return Path(found[1])


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(DAGS, tmp_path / "dags", ignore=shutil.ignore_patterns("__pycache__"))
    yield tmp_path
    Demo(tmp_path, "--down").finish(SOON_SECONDS)


def processes_in(directory: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(directory):
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_nothing_is_left(directory: Path) -> None:
    assert processes_in(directory) == []
    assert not directory.exists()


def test_demo_plays_three_runs_and_ends_ok(checkout: Path) -> None:
    demo = Demo(checkout)

    code = demo.finish()

    assert code == 0, demo.text
    assert demo.lines[-1].startswith("demo: OK"), demo.text
    assert "book_trip / demo-1-completes is COMPLETED" in demo.text
    assert "book_trip / demo-2-marked-failed is CANCELLED" in demo.text
    assert "refund_later / demo-3-refund-later is PARTIALLY_CANCELLED" in demo.text
    assert_nothing_is_left(demo.directory)


def test_demo_up_leaves_it_running_until_demo_down(checkout: Path) -> None:
    up = Demo(checkout, "--up")
    assert up.finish() == 0, up.text
    assert up.lines[-1].startswith("demo: OK"), up.text
    url = json.loads((checkout / ".run" / "demo-up.json").read_text())["url"]
    assert url in up.text
    assert httpx.get(f"{url}/api/v2/monitor/health", trust_env=False).is_success

    again = Demo(checkout, "--up")
    assert again.finish(SOON_SECONDS) == 0
    assert f"up already: {url}" in again.text

    down = Demo(checkout, "--down")
    assert down.finish(SOON_SECONDS) == 0, down.text
    assert_nothing_is_left(up.directory)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)
    assert Demo(checkout, "--down").finish(SOON_SECONDS) == 0


@pytest.mark.parametrize("arguments", [(), ("--up",)])
def test_interrupted_demo_leaves_nothing(checkout: Path, arguments: tuple[str, ...]) -> None:
    demo = Demo(checkout, *arguments)
    demo.read_until("Postgres is up")

    demo.process.send_signal(signal.SIGINT)

    assert demo.finish(SOON_SECONDS) == 130, demo.text
    assert "Traceback" not in demo.text
    assert_nothing_is_left(demo.directory)
    assert not (checkout / ".run" / "demo-up.json").exists()


def test_killed_demo_leaves_nothing(checkout: Path) -> None:
    demo = Demo(checkout)
    demo.read_until("Postgres is up")
    assert processes_in(demo.directory)

    demo.process.kill()

    demo.process.wait()
    deadline = time.monotonic() + SOON_SECONDS
    while demo.directory.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert_nothing_is_left(demo.directory)


def test_demo_whose_airflow_dies_says_so_and_keeps_the_logs(checkout: Path) -> None:
    demo = Demo(checkout)
    demo.read_until("airflow saga db migrate")
    standalone = next(each for each in processes_in(demo.directory) if each.cmdline()[-1:] == ["standalone"])

    standalone.kill()

    assert demo.finish(SOON_SECONDS) == 1
    assert "`airflow standalone` ended by itself, with -9" in demo.text
    assert demo.lines[-1].startswith("demo: FAILED"), demo.text
    assert processes_in(demo.directory) == []
    logs = demo.directory / "logs"
    assert f"all logs are in {logs}" in demo.text
    assert "Starting Airflow Standalone" in (logs / "airflow.log").read_text()
    shutil.rmtree(demo.directory)
