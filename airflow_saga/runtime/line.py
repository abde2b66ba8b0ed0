"""The line to the store: the one connection of a step process, lost and found again.

Invariant: there is one connection at a time, and the verbs are always those of the present one; a connection is closed
or replaced only under the lock that the watch takes to hang up, so it never shuts a descriptor that is somebody else's.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import psycopg

from airflow_saga.core.errors import StoreUnavailableError
from airflow_saga.core.records import StepRow
from airflow_saga.runtime.ports import Limits
from airflow_saga.store import signals
from airflow_saga.store.connect import Address, first_line
from airflow_saga.store.steps import StepVerbs

log = logging.getLogger(__name__)
R = TypeVar("R")

LOST = (psycopg.OperationalError, psycopg.InterfaceError)


class StoreLine:
    """See the module. Used by whoever holds the pen; only :meth:`hang_up` may be called at any time.

    :param heard: called when the saga may have changed, as far as this line can tell.
    :ivar commits: how many were made for callers.
    """

    def __init__(
        self,
        address: Address,
        connection: psycopg.Connection,
        step: StepRow,
        limits: Limits,
        heard: Callable[[], None],
    ) -> None:
        self.connection = connection
        self.verbs = StepVerbs(connection)
        self.commits = 0
        self._address = address
        self._step = step
        self._limits = limits
        self._heard = heard
        self._lock = threading.Lock()

    def hear(self) -> None:
        """The verb that attached has told this connection to listen; from now on the journal takes notice."""
        if signals.are_delivered(self.connection):
            self.connection.add_notify_handler(self._noticed)
        else:
            log.warning(
                "%s: notifications are not delivered (a transaction pooler is in between); polling every %g s",
                self._step.label,
                self._limits.heartbeat_seconds,
            )

    def _noticed(self, notify: object) -> None:
        """One that came with the answer of a statement."""
        self._heard()

    def reconnect(self, problem: BaseException | None = None) -> None:
        """:raises StoreUnavailableError: after ``store_outage_seconds``; what is in flight ends in doubt."""
        log.warning(
            "lost the saga store (%s); reconnecting", first_line(problem) if problem else "connection closed"
        )
        deadline = time.monotonic() + self._limits.store_outage_seconds
        while True:
            with self._lock:
                self.connection.close()
            try:
                opened = self._address.open()
                with self._lock:
                    self.connection = opened
                self.verbs = StepVerbs(opened)
                signals.listen(opened, self._step.saga_id)
                self.hear()
                break
            except (StoreUnavailableError, *LOST) as still:
                if time.monotonic() > deadline:
                    raise StoreUnavailableError(
                        f"the saga store was away for more than {self._limits.store_outage_seconds:g} s: "
                        f"{first_line(still)}"
                    ) from still
                time.sleep(0.2)
        self._heard()

    def through_outage(self, verb: Callable[[], R]) -> R:
        """Run an idempotent verb; if the connection is lost, wait for the store and run it again."""
        for _ in range(5):
            try:
                answer = verb()
                self.commits += 1
                return answer
            except LOST as problem:
                self.reconnect(problem)
        return verb()

    def hang_up(self) -> None:
        """Nothing came back for too long: make the wait end, as if the other side had closed the connection."""
        with self._lock:
            if not self.connection.closed:
                log.warning("%s: the saga store does not answer; dropping the connection", self._step.label)
                with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as line:
                    line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self.connection.close()
