"""Calls under way: each has a deadline, and is abandoned at it from outside, whether its code cooperates or not.

A call runs on its caller's own thread. Abandoning means: the log says IN_DOUBT first, then ``ActionTimedOut`` is raised
in that thread (on the main thread through a signal, which also ends a blocking system call), and when even that does
not end it, the process ends. An async call is cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from airflow_saga.core.errors import ActionTimedOut, NotInSagaError

log = logging.getLogger(__name__)

INTERRUPT = signal.SIGUSR2
current_action: contextvars.ContextVar[str | None] = contextvars.ContextVar("current_action", default=None)
"""The action (or compensation) whose code is running in this context, if any."""

in_batch: contextvars.ContextVar[bool] = contextvars.ContextVar("in_batch", default=False)
"""The calls of this context belong to a batch whose order means nothing, whichever of them begins first."""

from_log: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar("from_log", default=None)
"""Gathers the seqs of the calls of this context that the log has answered, where somebody wants to know."""


@dataclass(eq=False)
class RunningCall:
    """One call of an action, a probe or a compensation.

    :ivar seq: of the action in the forward direction, None for a probe or a compensation.
    :ivar started: monotonic seconds.
    :ivar abandoned_at: monotonic seconds; set once, then the caller's own outcome no longer counts as one.
    :ivar delivered: the interruption has been raised in the thread of the call.
    """

    name: str
    timeout_seconds: float
    seq: int | None = None
    tries: int = 1
    thread_id: int = field(default_factory=threading.get_ident)
    started: float = field(default_factory=time.monotonic)
    task: asyncio.Task[object] | None = None
    abandoned_at: float | None = None
    why: str = ""
    delivered: bool = False

    @property
    def deadline(self) -> float:
        return self.started + self.timeout_seconds

    @property
    def is_async(self) -> bool:
        return self.task is not None


class CallRegister:
    """The calls of this process that are under way. Entered and left by callers, watched by the journal thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._calls: set[RunningCall] = set()
        self._closed = False
        self._interrupted: RunningCall | None = None
        self._old_handler: object = None

    def __len__(self) -> int:
        return len(self._calls)

    def enter(self, call: RunningCall) -> None:
        """:raises NotInSagaError: the step has ended, so nobody would watch this call; it must not begin."""
        with self._lock:
            if self._closed:
                raise NotInSagaError(f"{call.name}: the step has ended; nothing was called")
            self._calls.add(call)

    def leave(self, call: RunningCall) -> bool:
        """True if the caller's outcome counts: nobody abandoned the call before it ended.

        An exception that another thread or a signal raises here must not leave the call in the register: the process
        would be ended for a call that is over.
        """
        try:
            return self._leave(call)
        except ActionTimedOut:  # meant for this call, which has just ended
            return self._leave(call)
        except BaseException:
            self._leave(call)
            raise

    def _leave(self, call: RunningCall) -> bool:
        with self._lock:
            self._calls.discard(call)
            if not self._calls:
                self._idle.notify_all()
            if call.abandoned_at is not None and call.task is None:
                clear_raised_in(call.thread_id)
            return call.abandoned_at is None

    def close_when_idle(self) -> None:
        """Wait for the calls that the body left running (each ends at its deadline), and let no other begin."""
        with self._idle:
            while self._calls:
                self._idle.wait(1.0)
            self._closed = True

    def seqs(self) -> list[int]:
        """Of the actions under way."""
        if not self._calls:
            return []
        with self._lock:
            return [call.seq for call in self._calls if call.seq is not None]

    def overdue(self, now: float) -> list[RunningCall]:
        with self._lock:
            return [call for call in self._calls if call.abandoned_at is None and call.deadline <= now]

    def abandonable(self) -> list[RunningCall]:
        with self._lock:
            return [call for call in self._calls if call.abandoned_at is None]

    def stuck(self, now: float, grace_seconds: float) -> list[RunningCall]:
        with self._lock:
            return [
                call
                for call in self._calls
                if call.abandoned_at is not None and call.abandoned_at + grace_seconds <= now
            ]

    def next_deadline(self, grace_seconds: float) -> float | None:
        with self._lock:
            dates = [
                call.deadline if call.abandoned_at is None else call.abandoned_at + grace_seconds
                for call in self._calls
            ]
        return min(dates, default=None)

    def undelivered(self) -> list[RunningCall]:
        """Abandoned calls of the main thread whose signal came just before a system call, which it did not end."""
        main = threading.main_thread().ident
        with self._lock:
            return [
                call
                for call in self._calls
                if call.abandoned_at is not None
                and call.task is None
                and call.thread_id == main
                and not call.delivered
            ]

    def mark_abandoned(self, call: RunningCall, why: str) -> bool:
        """Claim the call for the journal; False if it ended by itself meanwhile."""
        with self._lock:
            if call not in self._calls or call.abandoned_at is not None:
                return False
            call.abandoned_at = time.monotonic()
            call.why = why
            return True

    def interrupt(self, call: RunningCall) -> None:
        """Raise ``ActionTimedOut`` where the call runs."""
        if call.task is not None:
            with suppress(RuntimeError):  # its loop is closed: the call is over, whatever became of it
                call.task.get_loop().call_soon_threadsafe(call.task.cancel)
            return
        if call.thread_id == threading.main_thread().ident and self._old_handler is not None:
            self._interrupted = call
            signal.pthread_kill(call.thread_id, INTERRUPT)
            return
        with self._lock:
            if call in self._calls:
                raise_in(call.thread_id, ActionTimedOut)

    # -- the main thread's blocking system calls end only through a signal --------------------------------------------

    def install_handler(self) -> None:
        """On the main thread of the process; elsewhere (tests) a call is interrupted at its next bytecode only."""
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(INTERRUPT, self._on_interrupt) or signal.SIG_DFL

    def remove_handler(self) -> None:
        if self._old_handler is not None:
            signal.signal(INTERRUPT, self._old_handler)  # type: ignore[arg-type]
            self._old_handler = None

    def _on_interrupt(self, signum: int, frame: object) -> None:
        call, self._interrupted = self._interrupted, None
        if call is not None and call in self._calls and not call.delivered:
            call.delivered = True
            raise ActionTimedOut(call.why)


def raise_in(thread_id: int, error: type[BaseException]) -> None:
    """Raise an exception at the next bytecode of another thread (CPython)."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(error))


def clear_raised_in(thread_id: int) -> None:
    """Take back an exception that has not been raised yet: the call it was meant for has ended."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), None)


def end_process(reason: str, before: Callable[[], None] | None = None) -> None:
    """The last resort: what cannot be stopped from inside is ended from inside, so that nothing begins after it."""
    log.error("ending this process: %s", reason)
    try:
        if before is not None:
            before()
    finally:
        logging.shutdown()
        os._exit(70)
