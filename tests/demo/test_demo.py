"""The demo as a stranger runs it: a program of its own, judged by its exit code, its words and what it leaves behind.

Somebody who clicks in what it leaves running is in `test_newcomer`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.demo.program import SOON_SECONDS, Demo, copy_of_demo
from tests.support.airflow_api import PATIENCE

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(700 * PATIENCE)]


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    yield copy_of_demo(tmp_path)
    Demo(tmp_path, "--down").finish(SOON_SECONDS)


def processes_of(demo: Demo) -> list[psutil.Process]:
    """Its living processes, by either mark: some do not tell an ordinary user where they work."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_of_demo = os.getsid(process.pid) in demo.sessions
            is_of_demo = is_of_demo or Path(process.cwd()).is_relative_to(demo.directory)
            if is_of_demo and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def assert_nothing_is_left(demo: Demo) -> None:
    assert demo.sessions
    assert processes_of(demo) == []
    assert not demo.directory.exists()


def test_demo_ends_ok_and_up_leaves_it_running_until_down(checkout: Path) -> None:
    up = Demo(checkout, "--up")
    assert up.finish() == 0, up.text
    assert up.lines[-1].startswith("demo: OK"), up.text
    assert "book_trip / demo-1-completes is COMPLETED" in up.text
    assert "book_trip / demo-2-marked-failed is CANCELLED" in up.text
    assert "refund_later / demo-3-refund-later is PARTIALLY_CANCELLED" in up.text
    url = json.loads((checkout / ".run" / "demo-up.json").read_text())["url"]
    assert url in up.text
    assert httpx.get(f"{url}/api/v2/monitor/health", trust_env=False).is_success

    again = Demo(checkout, "--up")
    assert again.finish(SOON_SECONDS) == 0
    assert f"up already: {url}" in again.text

    down = Demo(checkout, "--down")
    assert down.finish(SOON_SECONDS) == 0, down.text
    assert_nothing_is_left(up)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)
    assert Demo(checkout, "--down").finish(SOON_SECONDS) == 0


def test_demo_of_the_agent_ends_ok_without_a_key_or_a_network(checkout: Path) -> None:
    demo = Demo(checkout, "--agent")
    assert demo.finish() == 0, demo.text
    assert demo.lines[-1].startswith("demo: OK"), demo.text
    assert "concierge_agent / agent-1-completes is COMPLETED" in demo.text
    assert "concierge_agent / agent-2-stopped is CANCELLED" in demo.text
    assert "concierge_agent / agent-3-killed is COMPLETED" in demo.text
    assert 'cut after "Your flight to Lisbon' in demo.text
    assert_nothing_is_left(demo)


def test_demo_with_a_compensation_that_does_nothing_says_what_differs(checkout: Path) -> None:
    book_trip = checkout / "dags" / "book_trip.py"
    honest = 'travel.cancel_hotel(record.result["id"], idempotency_key=record.undo_key)'
    assert honest in book_trip.read_text()
    book_trip.write_text(book_trip.read_text().replace(honest, "print(record.undo_key)"))

    demo = Demo(checkout)

    assert demo.finish() == 1, demo.text
    told = [line for line in demo.lines if line.startswith("DIFFERS")]
    assert told[0] == (
        "DIFFERS: run 2, net effect: expected {'flights': 0, 'hotels': 0}, found {'flights': 0, 'hotels': 1}"
    )
    assert all("run 2" in line for line in told)
    assert demo.lines[-1].startswith("demo: FAILED"), demo.text
    assert processes_of(demo) == []
    assert [entry.name for entry in demo.directory.iterdir()] == ["logs"]
    shutil.rmtree(demo.directory)


@pytest.mark.parametrize("arguments", [(), ("--up",)])
def test_interrupted_demo_leaves_nothing(checkout: Path, arguments: tuple[str, ...]) -> None:
    demo = Demo(checkout, *arguments)
    demo.read_until("Postgres is up")

    demo.process.send_signal(signal.SIGINT)

    assert demo.finish(SOON_SECONDS) == 130, demo.text
    assert "Traceback" not in demo.text
    assert_nothing_is_left(demo)
    assert not (checkout / ".run" / "demo-up.json").exists()


def test_killed_demo_leaves_nothing(checkout: Path) -> None:
    demo = Demo(checkout)
    demo.read_until("Postgres is up")
    assert processes_of(demo)

    demo.process.kill()

    demo.process.wait()
    deadline = time.monotonic() + SOON_SECONDS
    while (demo.directory.exists() or processes_of(demo)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert_nothing_is_left(demo)


def test_demo_whose_airflow_dies_says_so_and_keeps_the_logs(checkout: Path) -> None:
    demo = Demo(checkout)
    demo.read_until("airflow saga db migrate")
    standalone = next(each for each in processes_of(demo) if each.cmdline()[-1:] == ["standalone"])

    standalone.kill()

    assert demo.finish(SOON_SECONDS) == 1
    assert "`airflow standalone` ended by itself, with -9" in demo.text
    assert demo.lines[-1].startswith("demo: FAILED"), demo.text
    assert processes_of(demo) == []
    logs = demo.directory / "logs"
    assert f"all logs are in {logs}" in demo.text
    assert "Starting Airflow Standalone" in (logs / "airflow.log").read_text()
    shutil.rmtree(demo.directory)
