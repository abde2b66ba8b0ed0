"""The watch: a second thread that looks after calls while the journal waits for the store.

A deadline holds whether or not the store answers (A1 rests on it), and a connection that went silent without a word
must not hold the journal for ever. The watch writes nothing and owns nothing; while the journal works, it only looks.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow_saga.runtime.guard import CallGuard
    from airflow_saga.runtime.line import StoreLine
    from airflow_saga.runtime.turns import Turns

EVERY_SECONDS = 0.25
BUSY_SECONDS = 0.5
"""A turn of the journal that takes longer than this waits for the store; meanwhile the watch keeps deadlines."""
SILENT_SECONDS = 10.0
"""A statement without an answer for this long: the connection is given up. As long as TCP's own limit on silence."""


class Watch:
    """See the module. One per journal."""

    def __init__(self, turns: Turns, guard: CallGuard, line: StoreLine) -> None:
        self._turns = turns
        self._guard = guard
        self._line = line
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="saga-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(EVERY_SECONDS):
            busy = self._turns.busy_seconds()
            if busy > BUSY_SECONDS:
                self._guard.watch_alone()
            if SILENT_SECONDS < busy < float("inf"):
                self._line.hang_up()
