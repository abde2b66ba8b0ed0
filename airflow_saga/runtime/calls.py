"""Calls under way: each has a deadline, and is abandoned at it from outside, whether its code cooperates or not.

A call runs on its caller's own thread. Abandoning means: the log says IN_DOUBT first, then ``ActionTimedOut`` is raised
in that thread (on the main thread through a signal, which also ends a blocking system call), and when even that does
not end it, the process ends. An async call is cancelled.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from airflow_saga.core.errors import ActionTimedOut, StepInterrupted

log = logging.getLogger(__name__)

INTERRUPT = signal.SIGUSR2


@dataclass(eq=False)
class RunningCall:
    """One call of an action, a probe or a compensation.

    :ivar seq: of the action in the forward direction, None for a probe or a compensation.
    :ivar started: monotonic seconds.
    :ivar abandoned_at: monotonic seconds; set once, then the caller's own outcome no longer counts as one.
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
        self._calls: set[RunningCall] = set()
        self._pending_interrupt: StepInterrupted | None = None
        self._old_handler: object = None

    def __len__(self) -> int:
        return len(self._calls)

    def enter(self, call: RunningCall) -> None:
        with self._lock:
            self._calls.add(call)

    def leave(self, call: RunningCall) -> bool:
        """True if the caller's outcome counts: nobody abandoned the call before it ended."""
        with self._lock:
            self._calls.discard(call)
            if call.abandoned_at is not None and call.task is None:
                clear_raised_in(call.thread_id)
            return call.abandoned_at is None

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
            call.task.get_loop().call_soon_threadsafe(call.task.cancel)
            return
        if call.thread_id == threading.main_thread().ident and self._old_handler is not None:
            self._pending_interrupt = ActionTimedOut(call.why)
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
        pending, self._pending_interrupt = self._pending_interrupt, None
        with_call = any(call.abandoned_at is not None for call in tuple(self._calls))
        if pending is not None and with_call:
            raise pending


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
