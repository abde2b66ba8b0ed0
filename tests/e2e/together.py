"""Tests that run at the same time in one Airflow: each spends most of its time waiting, and one after the other they
would take an hour.

A test marked `together` takes the argument `scene`, and may be parametrized. When the first of them is called, all of
them start, a few at a time and in the order of the session; calling the next one then only waits for its end. So each
reads like any other test, fails like any other test, and can be run alone. What a body touches is its own: its runs,
and the calls that name its trips.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import pytest

MARK = "together"
# More only queue on a small machine: a task costs Airflow about a second of a core.
WIDTH = int(os.environ.get("SAGA_TEST_TOGETHER", "8"))

Body = Callable[[], None]


class Together:
    """The bodies under way. Their threads are daemons: nobody waits for one when the session is given up."""

    def __init__(self, bodies: Iterable[tuple[str, Body]], width: int = WIDTH) -> None:
        self._waiting: queue.SimpleQueue[tuple[str, Body]] = queue.SimpleQueue()
        self._ends: dict[str, Future[None]] = {}
        self.seconds: dict[str, float] = {}
        for name, body in bodies:
            self._ends[name] = Future()
            self._waiting.put((name, body))
        for number in range(width):
            threading.Thread(target=self._work, name=f"together-{number}", daemon=True).start()

    def wait(self, name: str) -> None:
        """Return when the body of this name has; raise what it raised."""
        self._ends[name].result()

    def _work(self) -> None:
        while True:
            try:
                name, body = self._waiting.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            try:
                body()
            except BaseException as problem:  # noqa: BLE001 - it belongs to the test that waits for it
                self.seconds[name] = time.monotonic() - began
                self._ends[name].set_exception(problem)
            else:
                self.seconds[name] = time.monotonic() - began
                self._ends[name].set_result(None)


def is_together(item: pytest.Item) -> bool:
    return item.get_closest_marker(MARK) is not None


def body_of(item: Any, **fixtures: Any) -> Body:
    """The test's function with its parameters and the given fixtures as arguments."""
    arguments = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    wanted = set(item.fixturenames) - set(arguments) - set(fixtures) - {"request"}
    used = wanted & set(item._fixtureinfo.argnames)
    if used:
        raise pytest.UsageError(
            f"{item.nodeid}: a test of the mark `{MARK}` cannot have {', '.join(sorted(used))}"
        )
    names = set(item._fixtureinfo.argnames)
    given = {name: value for name, value in fixtures.items() if name in names}
    return lambda: item.obj(**arguments, **given)
