"""The threads in which an agent's sync tools run, and what they come to when nobody waits for them any more.

A coroutine that waits for a thread can be cancelled; the thread goes on. Its answer would be lost with its effect
standing, so whoever gives up on it looks here once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

MOST_THREADS = 32


class Threads:
    """What one tool call has started in threads; the last of it is the tool itself."""

    def __init__(self) -> None:
        self.started: list[Future[Any]] = []

    async def late_answer(self) -> tuple[bool, Any]:
        """Wait for the thread that still runs. Bounded from outside: a call that is stuck ends its process.

        :returns: whether there was one, and what it returned.
        :raises BaseException: what it raised.
        """
        running = [future for future in self.started if not future.done()]
        if not running:
            return False, None
        waiting = asyncio.wrap_future(running[-1])
        while not waiting.done():
            try:
                await asyncio.wait([waiting])
            except asyncio.CancelledError:
                continue
        return True, waiting.result()


current_threads: ContextVar[Threads | None] = ContextVar("saga_tool_threads", default=None)


class ToolThreads(ThreadPoolExecutor):
    """The executor of a run's sync tools: it remembers for whom a thread was started."""

    def __init__(self) -> None:
        super().__init__(MOST_THREADS, thread_name_prefix="saga-tool")

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        threads = current_threads.get()
        if threads is not None:
            threads.started.append(future)
        return future
