"""What callers hand over to the journal, and how they wake it.

Any thread puts an entry into the queue, without a lock and without waiting; whoever holds the pen gathers what has come
into the work that is not written yet. Invariant: what was put before the journal ended is gathered, and whoever puts
something later hears why nothing is taken any more.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg

from airflow_saga.core.records import Intent, Outcome
from airflow_saga.runtime.ticket import Ticket
from airflow_saga.store.steps import Reading


@dataclass(slots=True)
class Work:
    """What callers have handed over and the journal has not written yet."""

    outcomes: list[Outcome] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    intents: list[tuple[Intent, Ticket[float]]] = field(default_factory=list)
    retries: list[tuple[Intent, Ticket[tuple[int, float]]]] = field(default_factory=list)
    assertions: list[tuple[Intent, Ticket[float]]] = field(default_factory=list)
    asked: list[tuple[Callable[[psycopg.Connection], Any], Ticket[Any]]] = field(default_factory=list)
    uncertain: bool = False
    """Some of it may have been written already."""

    def __bool__(self) -> bool:
        return bool(self.outcomes or self.readings or self.urgent)

    @property
    def urgent(self) -> bool:
        return bool(self.intents or self.retries or self.assertions or self.asked)

    def refuse_calls(self, why: BaseException) -> None:
        """No call may begin; what was asked, and how calls have ended, stays."""
        kept = Work(outcomes=self.outcomes, readings=self.readings, asked=self.asked)
        for ticket in set(self.tickets) - set(kept.tickets):
            ticket.fail(why)
        self.intents, self.retries, self.assertions = [], [], []

    def drop_doubles(self) -> None:
        self.outcomes = list({(outcome.seq, outcome.tries): outcome for outcome in self.outcomes}.values())
        self.readings = list({intent.seq: (intent, outcome) for intent, outcome in self.readings}.values())
        self.intents = list({id(ticket): (intent, ticket) for intent, ticket in self.intents}.values())
        self.retries = list({id(ticket): (intent, ticket) for intent, ticket in self.retries}.values())
        self.assertions = list({id(ticket): (intent, ticket) for intent, ticket in self.assertions}.values())
        self.asked = list({id(ticket): (verb, ticket) for verb, ticket in self.asked}.values())

    @property
    def tickets(self) -> list[Ticket[Any]]:
        waiting: list[tuple[Any, Ticket[Any]]] = [
            *self.intents,
            *self.retries,
            *self.assertions,
            *self.asked,
        ]
        return [ticket for _, ticket in waiting]


class Bell:
    """Wakes the journal's thread out of its select; may be rung from a signal handler.

    :ivar hears: the descriptor that becomes readable when it was rung.
    """

    def __init__(self) -> None:
        self.hears, self._rings = os.pipe()
        os.set_blocking(self.hears, False)
        os.set_blocking(self._rings, False)

    def ring(self) -> None:
        try:
            os.write(self._rings, b"x")
        except BlockingIOError:
            return  # the pipe is full of wake-ups already
        except OSError:
            return  # closed: the journal has ended

    def close(self) -> None:
        for descriptor in (self.hears, self._rings):
            os.close(descriptor)


class Handover:
    """See the module. ``queue`` and ``bell`` are for everybody, ``work`` is for whoever holds the pen.

    Work is taken by plain assignment, never through a method: a signal handler must find no place to raise between
    the moment the work has left this object and the ``try`` that would give it back.

    :ivar waiting_since: when the oldest work that is not due yet was first seen, monotonic seconds.
    :ivar closing: nothing more is to come; what is there is written at once.
    :ivar over: why nothing is taken any more.
    """

    def __init__(self) -> None:
        self.queue: deque[Callable[[Work], None]] = deque()
        self.work = Work()
        self.waiting_since: float | None = None
        self.closing = False
        self.over: BaseException | None = None
        self.bell = Bell()
        self._gathering = False
        """True between two gatherings: the last one was interrupted."""

    def put(self, entry: Callable[[Work], None], wake: bool = True) -> None:
        if self.over is not None:
            raise self.over
        self.queue.append(entry)
        if wake:
            self.bell.ring()
        if self.over is not None:  # it may have ended before it could see the entry, and nobody would answer
            raise self.over

    def gather(self) -> None:
        """Apply what has come. An entry leaves the queue after it was applied: one that is interrupted in between is
        applied again by whoever gathers next, and what is there twice then is dropped."""
        interrupted, self._gathering = self._gathering, True
        work, queue = self.work, self.queue
        while queue:
            queue[0](work)
            queue.popleft()
        if interrupted:
            work.drop_doubles()
        self._gathering = False

    def end(self, why: BaseException) -> None:
        """Nothing is written from now on: whoever waits is told, and whoever comes later."""
        self.over = why
        self.gather()
        work, self.work = self.work, Work()
        for ticket in work.tickets:
            ticket.fail(why)
