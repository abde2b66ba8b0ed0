"""One thread per process that carries what the hooks saw into the saga store, and says there that the process is alive.

It owns a bounded queue and a listener's only connection to the store. Hooks put events in and never wait. The thread
opens the store when there is something to say, waits out an outage of some minutes, and drops what is least missed,
loudly, when it cannot keep everything: the reconciler finds what was lost.

The invariant: nothing of it crosses a fork. A child begins with an empty queue and no thread, and never touches the
parent's connection. No child is forked while the thread imports: a module half loaded would stay locked in it.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from airflow_saga import __version__
from airflow_saga.plugin.events import LEAST_MISSED_FIRST, Event, What
from airflow_saga.plugin.outage import Outage

if TYPE_CHECKING:
    import psycopg

    from airflow_saga.plugin.follow import Follower

log = logging.getLogger(__name__)

Kind = Callable[[], str | None]
"""Tells which component this process is; None: not known yet, or none that a person looks for."""

CAPACITY = 2000
PATIENCE_SECONDS = 600.0
"""How long an event waits for a store that does not answer."""
FIRST_LOOK_SECONDS = {What.TASK_MARKED: 1.0, What.RUN_SUCCEEDED: 0.05, What.RUN_FAILED: 0.05}
"""A run that is marked failed marks its tasks first; its step may end its call, so a task's mark has to wait for it."""
LOOK_AGAIN_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 4.0)
"""For the commit of the transaction that a hook was called in, about ten seconds; then it is the reconciler's."""
IDLE_SECONDS = 10.0
"""A connection without anything to say for this long is closed."""
SEEN_EVERY_SECONDS = 45.0
MARKS_AGAIN = timedelta(minutes=2)
MARKS_BEFORE_START = timedelta(hours=1)
"""How far back a process that has just started looks for runs that were marked failed while nobody listened."""
_READS_AUDIT_LOG = frozenset({"api-server", "scheduler"})
FIRST_SEEN_SECONDS = 3.0
"""After the start of a process: its executor has forked by then."""
DRAIN_SECONDS = 2.0
FORK_WAIT_SECONDS = 10.0


@dataclass(order=True)
class _Item:
    due: float
    order: int
    event: Event = field(compare=False)
    looks: int = field(default=0, compare=False)

    @property
    def missed(self) -> tuple[int, int]:
        return LEAST_MISSED_FIRST.index(self.event.what), self.order


class Dispatcher:
    """The queue and the thread of one process.

    :param kind: see :data:`Kind`; asked again until it answers.
    :param capacity: how many events are kept; beyond that, the least missed one is dropped.
    """

    def __init__(self, kind: Kind | None = None, *, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._changed = threading.Condition()
        self._items: list[_Item] = []
        self._order = itertools.count()
        self._delivering = False
        self._stopped = False
        self._dropped = 0
        self._thread: threading.Thread | None = None
        self._last_hook: str | None = None
        self._kind = kind
        self._show_at = float("inf") if kind is None else time.monotonic() + FIRST_SEEN_SECONDS
        # The rest is the thread's alone.
        self._connection: psycopg.Connection | None = None
        self._idle_at = float("inf")
        self._outage = Outage(PATIENCE_SECONDS)
        self._marks_seen_to = datetime.now(UTC) - MARKS_BEFORE_START

    # -- on the thread of a hook ------------------------------------------------------------------------------------

    def put(self, event: Event) -> None:
        """Take an event over. Waits for nothing but the lock, which nobody holds for longer than a few microseconds."""
        due = event.since + FIRST_LOOK_SECONDS.get(event.what, 0.0)
        with self._changed:
            if len(self._items) >= self._capacity:
                self._drop_least_missed()
            heapq.heappush(self._items, _Item(due, next(self._order), event))
            self._last_hook = event.hook
            self._changed.notify_all()
        self.start()

    def be_seen_as(self, kind: Kind) -> None:
        """Say in the store from now on that this process is alive."""
        with self._changed:
            self._kind = kind
            self._show_at = time.monotonic() + FIRST_SEEN_SECONDS
            self._changed.notify_all()
        self.start()

    def start(self) -> None:
        """Start the thread unless it runs."""
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="saga-dispatch", daemon=True)
                self._thread.start()

    def drain(self, seconds: float) -> bool:
        """Wait until everything is told; False if something is left, at once if the store is away."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._items or self._delivering:
                left = deadline - time.monotonic()
                if left <= 0 or self._outage.since is not None:
                    return False
                self._changed.wait(min(left, 0.1))
        return True

    def stop(self, seconds: float) -> bool:
        """Tell what waits, for so long at most, and end the thread; False if something was left."""
        drained = self.drain(seconds)
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)
        return drained

    def _drop_least_missed(self) -> None:
        victim = min(self._items, key=lambda item: item.missed)
        self._items.remove(victim)
        heapq.heapify(self._items)
        self._dropped += 1
        if self._dropped % 100 == 1:
            log.error(
                "%s: dropped, since %d events wait for the saga store already (%d dropped so far). The reconciler will "
                "find what happened; see what is wrong with: airflow saga doctor",
                victim.event,
                self._capacity,
                self._dropped,
            )

    # -- on the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._wait_for_work()
        try:
            with no_fork_meanwhile():
                from airflow_saga.plugin import follow  # psycopg, and Airflow's models

                follow.load()
        except Exception:
            log.exception("airflow_saga cannot follow what happens in this process; only the reconciler can")
            return
        follower = follow.Follower()
        while not self._stopped:
            item = self._next()
            try:
                if item is None:
                    self._keep_up()
                else:
                    self._deliver(item, follower)
            except Exception:
                told = "" if item is None else f"{item.event}: "
                log.exception("%snot told to the saga store; the reconciler will see it", told)
            finally:
                with self._changed:
                    self._delivering = False
                    self._changed.notify_all()
        self._close()

    def _wait_for_work(self) -> None:
        """Nothing is loaded before there is something to do: a process has enough to do when it starts."""
        with self._changed:
            while not self._items and not self._stopped and time.monotonic() < self._show_at:
                wait = self._show_at - time.monotonic()
                self._changed.wait(None if wait == float("inf") else wait)

    def _next(self) -> _Item | None:
        """The next event, once it is due; None once there is something else to do."""
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                due = max(self._items[0].due, self._outage.until) if self._items else float("inf")
                if due <= now:
                    self._delivering = True
                    return heapq.heappop(self._items)
                else_at = min(self._idle_at, self._show_at)
                if else_at <= now:
                    return None
                wait = min(due, else_at) - now
                self._changed.wait(None if wait == float("inf") else wait)
        return None

    def _deliver(self, item: _Item, follower: Follower) -> None:
        from airflow_saga.metadata import MetadataUnreadableError
        from airflow_saga.plugin import follow

        try:
            seen = follower.follow(self._store(), item.event)
        except (*follow.AWAY, *follow.UNUSABLE) as problem:
            self._store_is_away(problem)
            self._keep(item)
            return
        except MetadataUnreadableError as problem:
            log.info("%s: Airflow's database does not answer: %s", item.event, problem)
            seen = False
        self._store_is_back()
        if not seen:
            self._look_again(item)

    def _keep(self, item: _Item) -> None:
        """Its place in the order stays: what was due before it is still told before it."""
        if time.monotonic() - item.event.since > PATIENCE_SECONDS:
            level = logging.INFO if item.event.is_saga_dag is False else logging.ERROR
            log.log(
                level, "%s: given up, the saga store is away too long; left to the reconciler", item.event
            )
            return
        with self._changed:
            heapq.heappush(self._items, item)

    def _look_again(self, item: _Item) -> None:
        if item.looks >= len(LOOK_AGAIN_SECONDS):
            log.info("%s, but Airflow has not committed that; left to the reconciler", item.event)
            return
        due = time.monotonic() + LOOK_AGAIN_SECONDS[item.looks]
        with self._changed:
            heapq.heappush(self._items, _Item(due, item.order, item.event, item.looks + 1))

    # -- the store --------------------------------------------------------------------------------------------------

    def _store(self) -> psycopg.Connection:
        from airflow_saga.plugin import follow

        if self._connection is None or self._connection.closed:
            self._connection = follow.open_store()
        self._idle_at = time.monotonic() + IDLE_SECONDS
        return self._connection

    def _store_is_back(self) -> None:
        if self._outage.since is not None:
            log.warning("the saga store is back after %.1f s", time.monotonic() - self._outage.since)
            self._outage = Outage(PATIENCE_SECONDS)

    def _store_is_away(self, problem: BaseException) -> None:
        from airflow_saga.plugin import follow

        self._close()
        self._outage.goes_on(problem, unusable=isinstance(problem, follow.UNUSABLE))

    def _close(self) -> None:
        connection, self._connection, self._idle_at = self._connection, None, float("inf")
        if connection is not None:
            connection.close()

    def _keep_up(self) -> None:
        """Say that this process is alive when it is time to, and close a connection that nobody needs."""
        if time.monotonic() >= self._show_at:
            self._show()
        if time.monotonic() >= self._idle_at:
            self._close()

    def _show(self) -> None:
        from airflow_saga.plugin import follow
        from airflow_saga.store.runs import RunVerbs

        self._show_at = time.monotonic() + SEEN_EVERY_SECONDS
        kind = self._kind() if self._kind is not None else None
        if kind is None:
            return
        hook = self._last_hook
        try:
            RunVerbs(self._store()).note_component(kind, follow.host_name(), __version__, hook)
        except (*follow.AWAY, *follow.UNUSABLE) as problem:
            self._store_is_away(problem)
            self._show_at = self._outage.until
            return
        self._store_is_back()
        if self._last_hook == hook:
            self._last_hook = None
        if kind in _READS_AUDIT_LOG:
            self._look_for_missed_marks()

    def _look_for_missed_marks(self) -> None:
        """A hook can be missed, and a mark must not be: each look goes back over the one before it as well."""
        from airflow_saga.metadata import MetadataUnreadableError
        from airflow_saga.plugin import follow

        now = datetime.now(UTC)
        try:
            follow.undo_missed_marks(self._store(), self._marks_seen_to - MARKS_AGAIN)
        except (*follow.AWAY, *follow.UNUSABLE) as problem:
            self._store_is_away(problem)
        except MetadataUnreadableError as problem:
            log.info("Airflow's audit log does not answer: %s", problem)
        else:
            self._marks_seen_to = now


# -- one per process --------------------------------------------------------------------------------------------------

_making = threading.Lock()
_importing = threading.RLock()
_forking = threading.local()
_dispatcher: Dispatcher | None = None
_kind: Kind | None = None
_of_parents: list[Dispatcher] = []


def current() -> Dispatcher:
    """The one of this process, made when it is first asked for."""
    global _dispatcher
    if _dispatcher is None:
        with _making:
            if _dispatcher is None:
                _dispatcher = Dispatcher(_kind)
    return _dispatcher


def hand_over(event: Event) -> None:
    """Have an event told to the store; returns at once, from any thread of any process."""
    current().put(event)


def be_seen_as(kind: Kind) -> None:
    """This process lives long: it says so in the store from now on, as the component that `kind` names."""
    global _kind
    _kind = kind
    current().be_seen_as(kind)


def stop() -> None:
    """Tell what still waits, for two seconds at most, and end the thread. The next event starts another one."""
    global _dispatcher
    ended, _dispatcher = _dispatcher, None
    if ended is not None and not ended.stop(DRAIN_SECONDS):
        log.warning("this process ends with events that the saga store was not told; left to the reconciler")


@contextmanager
def no_fork_meanwhile() -> Iterator[None]:
    """Hold back a fork in this process, for at most as long as a fork waits."""
    lock = _importing
    with lock:
        yield


def _before_fork() -> None:
    _forking.held = _importing.acquire(timeout=FORK_WAIT_SECONDS)


def _after_fork_in_parent() -> None:
    if getattr(_forking, "held", False):
        _importing.release()


def _after_fork_in_child() -> None:
    global _making, _importing, _forking, _dispatcher
    if _dispatcher is not None:
        # Kept, so that nobody here closes the connection, which is the parent's.
        _of_parents.append(_dispatcher)
    _making, _importing, _forking, _dispatcher = threading.Lock(), threading.RLock(), threading.local(), None


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
atexit.register(stop)
