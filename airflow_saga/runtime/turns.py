"""The turns of the journal's thread, and the pen: whoever holds it writes.

Mostly the journal's thread holds it, turn by turn; a caller that would only wait, and finds it free, writes for itself.
Invariants: only the holder of the pen uses the connection and changes the work; an interruption of a caller, which may
come at any bytecode, never takes the pen away for good; when the thread ends, whoever waits is told.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
from contextlib import suppress
from typing import Any

import psycopg

from airflow_saga.core.errors import NotInSagaError, StoreUnavailableError
from airflow_saga.core.records import StepRow
from airflow_saga.runtime.calls import CallRegister
from airflow_saga.runtime.guard import CallGuard
from airflow_saga.runtime.handover import Handover
from airflow_saga.runtime.heartbeat import DUE, Heartbeat
from airflow_saga.runtime.line import StoreLine
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.stops import Stop, StopOrder, StopOrders
from airflow_saga.runtime.ticket import Ticket
from airflow_saga.runtime.writer import Writer
from airflow_saga.store import signals
from airflow_saga.store.connect import first_line

log = logging.getLogger(__name__)

CALLER_WRITES_SECONDS = 0.05
"""A caller that wrote for itself this recently is expected to do it again."""
LOOKS_PER_WRITE = 4
SIGNAL_AGAIN_SECONDS = 0.2
"""A signal that comes just before a system call does not end it; the next one does."""


class Turns:
    """See the module. One per journal."""

    def __init__(
        self,
        step: StepRow,
        limits: Limits,
        calls: CallRegister,
        stops: StopOrders,
        handover: Handover,
        line: StoreLine,
        heartbeat: Heartbeat,
        writer: Writer,
        guard: CallGuard,
    ) -> None:
        self._step = step
        self._limits = limits
        self._calls = calls
        self._stops = stops
        self._handover = handover
        self._line = line
        self._heartbeat = heartbeat
        self._writer = writer
        self._guard = guard
        self._awake_since: float | None = None
        self._pen = threading.RLock()
        """Whoever holds it writes. Mostly the journal's thread; a caller that finds it free writes for itself, since
        a hand-over to a sleeping thread and back costs as much as the commit."""
        self._written_here_at = -math.inf
        self._write_took_seconds = 0.0
        self._broken: BaseException | None = None
        self._passed = False
        """The last turn was left to a caller that held the pen."""
        self._thread = threading.Thread(target=self._run, name="saga-journal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, seconds: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def busy_seconds(self) -> float:
        """How long the journal has been at its present turn, which waits for the store if it is long."""
        if self._handover.over is not None:
            return float("inf")
        since = self._awake_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def looks_again_seconds(self) -> float:
        """How soon after a write the thread looks by itself, so that a call that was over sooner need not wake it.
        Where the store is slow a look comes later: with many processes the looks would cost more than the writes."""
        return max(2 * self._limits.outcome_flush_seconds, LOOKS_PER_WRITE * self._write_took_seconds)

    # -- a caller's own turn ------------------------------------------------------------------------------------------

    def write_here_or_wake(self, ticket: Ticket[Any]) -> None:
        """A thread that would only wait for this answer, while nobody else writes, writes by itself."""
        try:
            if ticket.for_loop or not self._pen.acquire(blocking=False):
                self._handover.bell.ring()
                return
            try:
                self._write_here()
            finally:
                self._awake_since = None
                self._pen.release()
                if self._leaves_something():
                    self._handover.bell.ring()
        except BaseException:
            self._let_go_of_the_pen()
            raise

    def _write_here(self) -> None:
        try:
            if self._handover.over is None and self._broken is None:
                began = self._awake_since = time.monotonic()
                self._handover.gather()
                self._writer.write_if_due()
                self._written_here_at = time.monotonic()
                self._write_took_seconds = self._written_here_at - began
                self._hear()
        except Exception as problem:  # noqa: BLE001 - what ends the journal is the journal's own thread's to tell
            self._broken = problem

    def _leaves_something(self) -> bool:
        handover = self._handover
        return bool(
            handover.queue or handover.work or self._heartbeat.due_at == DUE or self._broken is not None
        )

    def _hear(self) -> None:
        """A notification that came with an answer: nothing is left on the line that would wake anybody."""
        if self._line.connection.pgconn.notifies() is not None:
            self._heartbeat.next_at = DUE

    def _let_go_of_the_pen(self) -> None:
        """A signal handler may raise between taking the pen and knowing it, or before it is given back; with the pen
        gone for good the journal's own thread would wait for ever."""
        with suppress(RuntimeError):  # "cannot release un-acquired lock": this thread does not hold it
            self._pen.release()
            self._awake_since = None
        self._handover.bell.ring()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                self._sleep()
        except BaseException as problem:
            log.exception("the journal of %s stopped", self._step.label)
            gone = StoreUnavailableError(
                f"the saga store is gone ({first_line(problem)}); nothing was called"
            )
            with self._pen:
                self._handover.end(gone)
            self._stops.give(StopOrder(Stop.CUT_OFF, f"{self._step.label}: {gone}"))
        finally:
            with self._pen:
                self._line.close()

    def _turn(self) -> bool:
        """Write what is due, look at the calls under way, renew the lease; False when all is said."""
        handover = self._handover
        self._passed = not self._pen.acquire(blocking=self._is_called_for())
        if self._passed:
            return True  # a caller writes, and rings if it leaves anything: waiting for the pen would stop the next one
        try:
            if self._broken is not None:
                raise self._broken
            self._awake_since = time.monotonic()
            handover.gather()
            self._writer.write_if_due()
            self._guard.watch()
            self._heartbeat.beat_if_due()
            if handover.closing and not handover.work and not handover.queue:
                handover.end(NotInSagaError(f"{self._step.label}: this step has ended; nothing was called"))
                return False
            self._hear()
            self._awake_since = None
            return True
        finally:
            self._pen.release()

    def _is_called_for(self) -> bool:
        """Whether there is something that only this thread does: A1 does not let an overdue call wait, for one."""
        deadline = self._calls.next_deadline(self._limits.abandon_grace_seconds)
        due = time.monotonic() >= min(self._heartbeat.due_at, math.inf if deadline is None else deadline)
        stopped = self._stops.order is not None
        return due or stopped or self._handover.closing or self._broken is not None

    def _sleep(self) -> None:
        """Until something is handed over, heard, or due. While a caller writes for itself, its answers would wake this
        thread each time: then it looks at the clock only, and the caller's own writes hear of a cancel."""
        handover, limits, stops = self._handover, self._limits, self._stops
        now = time.monotonic()
        caller_writes = now - self._written_here_at < CALLER_WRITES_SECONDS + 2 * self.looks_again_seconds
        dates = [self._heartbeat.due_at]
        if (
            caller_writes or self._writer.just_begun
        ):  # a call that ends at once wakes nobody: its next intent will
            dates.append(now + self.looks_again_seconds)
            self._writer.just_begun = False
        if handover.work.outcomes:
            dates.append((handover.waiting_since or now) + limits.outcome_flush_seconds)
        elif handover.work.readings:
            dates.append((handover.waiting_since or now) + limits.flush_seconds)
        deadline = self._calls.next_deadline(limits.abandon_grace_seconds)
        if deadline is not None:
            dates.append(deadline)
        if self._calls.undelivered():
            dates.append(now + SIGNAL_AGAIN_SECONDS)
        if stops.given_at is not None and stops.body_running and not stops.killed:
            dates.append(stops.given_at + limits.stop_grace_seconds)
        pause = max(0.0, min(dates) - now)
        if (handover.queue and not self._passed) or handover.closing:
            pause = 0.0
        self._wait(pause, with_store=not caller_writes)

    def _wait(self, seconds: float, *, with_store: bool) -> None:
        bell = self._handover.bell.hears
        try:
            lines = [bell, *([self._line.connection.fileno()] if with_store else [])]
            readable, _, _ = select.select(lines, [], [], seconds)
        except (OSError, ValueError, psycopg.OperationalError):
            time.sleep(min(seconds, SIGNAL_AGAIN_SECONDS))  # a caller is just replacing a lost connection
            return
        if bell in readable:
            os.read(bell, 4096)
        if len(readable) > (bell in readable):
            self._take_notifications()

    def _take_notifications(self) -> None:
        with self._pen:
            self._awake_since = time.monotonic()
            try:
                noticed = signals.take(self._line.connection)
            except psycopg.OperationalError:
                self._line.reconnect()
                noticed = True
            if noticed:
                self._heartbeat.next_at = DUE
            self._awake_since = None
