"""An answer that one thread waits for and the journal gives: for a blocked thread, or for an event loop."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Generic, TypeVar

R = TypeVar("R")


class Ticket(Generic[R]):
    """Given out once, answered once; a second answer is not heard. ``loop``: it wakes a future there, not a thread."""

    __slots__ = ("_answer", "_future", "_lock", "_loop", "_problem", "closed")

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.closed = False
        self._answer: R | None = None
        self._problem: BaseException | None = None
        self._loop = loop
        self._future: asyncio.Future[R] | None = loop.create_future() if loop else None
        self._lock = threading.Lock()  # a bare lock is the cheapest thing a thread can wait on
        self._lock.acquire()

    @property
    def granted(self) -> bool:
        """It was answered, and not with a problem."""
        return self.closed and self._problem is None

    @property
    def refused(self) -> bool:
        return self._problem is not None

    @property
    def for_loop(self) -> bool:
        """Whether an event loop waits for it, which must not block."""
        return self._loop is not None

    def answer(self, answer: R) -> None:
        if not self.closed:
            self._answer = answer
            self._release()

    def fail(self, problem: BaseException) -> None:
        if not self.closed:
            self._problem = problem
            self._release()

    def _release(self) -> None:
        self.closed = True
        if self._loop is not None:
            with suppress(RuntimeError):  # that loop is closed by now: nobody waits for the answer any more
                self._loop.call_soon_threadsafe(self._settle_future)
        self._lock.release()

    def _settle_future(self) -> None:
        assert self._future is not None
        if self._future.done():
            return
        if self._problem is not None:
            self._future.set_exception(self._problem)
        else:
            self._future.set_result(self._answer)  # type: ignore[arg-type]

    def wait(self) -> R:
        """Block this thread until the answer is there."""
        self._lock.acquire()
        if self._problem is not None:
            raise self._problem
        return self._answer  # type: ignore[return-value]

    async def wait_async(self) -> R:
        assert self._future is not None
        return await self._future
