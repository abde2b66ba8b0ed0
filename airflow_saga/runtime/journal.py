"""The journal: one per step process owns the one connection to the store, and everything that is written.

Callers hand it intents and outcomes. It writes what has gathered in one commit (the outcome of call k rides with the
intent of call k + 1), renews the lease, listens for a cancel, ends calls at their deadline, and waits out an outage of
the store. Nothing is written from a signal handler: ``request_kill`` sets a flag and wakes the thread.

Invariants: an intent is answered only after its commit; an outcome is never dropped (if the step was taken over it is
kept as a late answer); a write that cannot be made stops the step before the call.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import psycopg

from airflow_saga.core.errors import (
    ActionRefusedError,
    NotInSagaError,
    SagaCancelledError,
    StepCutOffError,
    StepFencedError,
    StepInterrupted,
    StepKilledError,
    StepOverdueError,
    StoreUnavailableError,
)
from airflow_saga.core.records import Intent, Outcome, SagaRow, StepRow
from airflow_saga.core.states import ActionState, SagaState, StepState
from airflow_saga.runtime.calls import CallRegister, RunningCall, end_process
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.ticket import Ticket
from airflow_saga.runtime.watch import Watch
from airflow_saga.store import signals
from airflow_saga.store.connect import Address, first_line
from airflow_saga.store.late import LateVerbs
from airflow_saga.store.steps import Reading, StepVerbs, Written

log = logging.getLogger(__name__)
R = TypeVar("R")

_LOST = (psycopg.OperationalError, psycopg.InterfaceError)
CALLER_WRITES_SECONDS = 0.05
"""A caller that wrote for itself this recently is expected to do it again."""
SIGNAL_AGAIN_SECONDS = 0.2
"""A signal that comes just before a system call does not end it; the next one does."""


class Stop(StrEnum):
    """Why no further action begins, strongest last."""

    KILLED = "killed"
    OVERDUE = "overdue"
    CANCELLED = "cancelled"
    FENCED = "fenced"
    CUT_OFF = "cut off"


@dataclass(frozen=True)
class StopOrder:
    """:ivar message: who decided what, for the task log."""

    kind: Stop
    message: str
    mode: str | None = None

    def error(self) -> BaseException:
        return _ERRORS[self.kind](self.message)


_ERRORS: dict[Stop, type[StepInterrupted]] = {
    Stop.KILLED: StepKilledError,
    Stop.OVERDUE: StepOverdueError,
    Stop.CANCELLED: SagaCancelledError,
    Stop.FENCED: StepFencedError,
    Stop.CUT_OFF: StepCutOffError,
}


@dataclass
class _Work:
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
        kept = _Work(outcomes=self.outcomes, readings=self.readings, asked=self.asked)
        for ticket in set(self.tickets) - set(kept.tickets):
            ticket.fail(why)
        self.intents, self.retries, self.assertions = [], [], []

    @property
    def tickets(self) -> list[Ticket[Any]]:
        waiting: list[tuple[Any, Ticket[Any]]] = [
            *self.intents,
            *self.retries,
            *self.assertions,
            *self.asked,
        ]
        return [ticket for _, ticket in waiting]


class Journal:
    """See the module. Made by the thread that attached the step; ``connection`` is the journal's from then on.

    :param ends_by: by the monotonic clock, in seconds: then no further action begins, whatever the body does.
    """

    def __init__(
        self,
        address: Address,
        connection: psycopg.Connection,
        saga: SagaRow,
        step: StepRow,
        limits: Limits,
        ends_by: float | None = None,
    ) -> None:
        self.address = address
        self.saga = saga
        self.step = step
        self.limits = limits
        self.ends_by = ends_by
        self.calls = CallRegister()
        self.stop_order: StopOrder | None = None
        self.stop_event = threading.Event()
        self.idempotent_seqs: set[int] = set()
        self.commits = 0
        self._connection = connection
        self._verbs = StepVerbs(connection)
        self._lock = threading.Lock()
        self._queue: deque[Callable[[_Work], None]] = deque()
        self._work = _Work()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._stop_listeners: list[Callable[[], object]] = []
        self._open: dict[int, int] = {}
        """Tries of the calls whose intent is committed and whose outcome is not handed over yet, by seq."""
        self._stopped_at: float | None = None
        self._body_running = False
        self._closing = False
        self._over: BaseException | None = None
        self._checkpoint: Callable[[], str | None] | None = None
        self._waiting_since: float | None = None
        self._next_beat = 0.0
        self._just_begun = False
        self._kept: str | None = None
        self._awake_since: float | None = None
        self._connection_lock = threading.Lock()
        self._pen = threading.RLock()
        """Whoever holds it writes. Mostly the journal's thread; a caller that finds it free writes for itself, since
        a hand-over to a sleeping thread and back costs as much as the commit."""
        self._written_here_at = -math.inf
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="saga-journal", daemon=True)
        self._watch = Watch(self)

    # -- called by the step's threads ---------------------------------------------------------------------------------

    def start(self) -> None:
        self.calls.install_handler()
        self._body_running = True
        self._thread.start()
        self._watch.start()

    def begin(self, intent: Intent, ticket: Ticket[float]) -> None:
        """The ticket is answered once the intent is committed, with when it was sent; or with why it may not begin."""
        self._put(lambda work: work.intents.append((intent, ticket)), wake=False)
        self._write_here_or_wake(ticket)

    def retry(self, intent: Intent, ticket: Ticket[tuple[int, float]]) -> None:
        """As :meth:`begin`, for another try of a recorded call; the answer tells the number of the try too."""
        self._put(lambda work: work.retries.append((intent, ticket)))

    def assert_again(self, intent: Intent, ticket: Ticket[float]) -> None:
        """An intent is older than A1 allows: may its call still begin? Answered as :meth:`begin`."""
        self._put(lambda work: work.assertions.append((intent, ticket)))

    def withdraw(self, intent: Intent, was: ActionState, ticket: Ticket[Any]) -> None:
        """Whoever asked for this intent will not make the call. If it was committed, the row is ``was`` again."""

        def take_back(work: _Work) -> None:
            work.intents = [(i, t) for i, t in work.intents if t is not ticket]
            work.retries = [(i, t) for i, t in work.retries if t is not ticket]
            if ticket.granted:
                work.outcomes.append(self._not_called(intent, was))

        self._put(take_back)

    def _not_called(self, intent: Intent, was: ActionState = ActionState.FAILED) -> Outcome:
        own = was is ActionState.FAILED
        why = "interrupted before the call was made; nothing was called"
        return Outcome(intent.seq, was, error=why, own=own, tries=self._open.get(intent.seq, 1))

    def outcome(self, outcome: Outcome, took_seconds: float = math.inf) -> None:
        """How a call ended; written with the next intent or within a few ms, whichever is first. Never refused.

        :param took_seconds: of the call. After a short one the journal is about to look by itself.
        """
        wake = took_seconds > self.limits.outcome_flush_seconds
        self._put(lambda work: work.outcomes.append(outcome), wake)

    def reading(self, reading: Reading) -> None:
        """How a READ_ONLY call ended; written with the next intent or within ``flush_seconds``."""
        self._put(lambda work: work.readings.append(reading))

    def ask(self, verb: Callable[[psycopg.Connection], R]) -> R:
        """Run a verb on the journal's connection, after everything that was handed over before it is written."""
        ticket: Ticket[R] = Ticket()
        self._put(lambda work: work.asked.append((verb, ticket)), wake=False)
        self._write_here_or_wake(ticket)
        return ticket.wait()

    def ask_with(self, verb: Callable[[psycopg.Connection], R], ticket: Ticket[R]) -> None:
        """As :meth:`ask`, answered through the ticket."""
        self._put(lambda work: work.asked.append((verb, ticket)))

    def watch(self, call: RunningCall) -> None:
        """A call has begun; if it may end before the next heartbeat, its deadline is looked at at once."""
        if call.timeout_seconds < 2 * self.limits.heartbeat_seconds:
            self._wake()

    def warn(self, message: str) -> None:
        log.warning("%s: %s", self.step.label, message)

    def flush(self) -> None:
        """Everything handed over so far is committed when this returns."""
        self.ask(lambda connection: None)

    def set_checkpoint(self, source: Callable[[], str | None]) -> None:
        """The newest checkpoint's text, taken when the journal writes; never blocks on the database."""
        self._checkpoint = source

    def check(self) -> None:
        """:raises StepInterrupted: if the step has to stop."""
        order = self.stop_order
        if order is not None:
            raise order.error()

    def request_kill(self) -> None:
        """From ``on_kill``, which is a signal handler: a flag and a wake-up, nothing else."""
        if self.stop_order is None:
            self.stop_order = StopOrder(Stop.KILLED, "Airflow asked this process to go")
        self._wake()

    def on_stop(self, listener: Callable[[], object]) -> None:
        """Called on the journal thread when the step has to stop (an event loop's back-off ends at once)."""
        self._stop_listeners.append(listener)
        if self.stop_event.is_set():
            listener()

    def off_stop(self, listener: Callable[[], object]) -> None:
        self._stop_listeners.remove(listener)

    def body_ended(self) -> None:
        """The body has returned or raised: no call begins any more, and those it left running are waited for.

        Their outcomes are handed over when this returns. A call that was interrupted between its intent and its
        outcome is in doubt from now on.
        """
        self._body_running = False
        self.calls.close_when_idle()
        with suppress(StoreUnavailableError):
            self._put(self._settle_open)

    def _settle_open(self, work: _Work) -> None:
        told = {outcome.seq for outcome in work.outcomes}
        for seq, tries in self._open.items():
            if seq not in told:
                why = "interrupted before its outcome was known"
                work.outcomes.append(Outcome(seq, ActionState.IN_DOUBT, error=why, own=False, tries=tries))

    def keep_checkpoint(self) -> None:
        """The newest checkpoint is committed when this returns (if the step is still ours)."""
        if self._checkpoint is not None:
            self.ask(lambda connection: self._beat())

    def close(self) -> None:
        """Write what is left and let the connection go."""
        self._closing = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(self.limits.store_outage_seconds + 10)
        self._watch.stop()
        self.calls.remove_handler()
        for descriptor in (self._wake_read, self._wake_write):
            os.close(descriptor)

    def _put(self, entry: Callable[[_Work], None], wake: bool = True) -> None:
        if self._over is not None:
            raise self._over
        self._queue.append(entry)
        if wake:
            self._wake()
        if self._over is not None:  # it may have ended before it could see the entry, and nobody would answer
            raise self._over

    def _write_here_or_wake(self, ticket: Ticket[Any]) -> None:
        """A thread that would only wait for this answer, while nobody else writes, writes by itself."""
        try:
            if ticket.for_loop or not self._pen.acquire(blocking=False):
                self._wake()
                return
            try:
                self._write_here()
            finally:
                self._awake_since = None
                self._pen.release()
                if self._queue or self._broken is not None or self._work:
                    self._wake()
        except BaseException:
            self._let_go_of_the_pen()
            raise

    def _write_here(self) -> None:
        try:
            if self._over is None and self._broken is None:
                self._awake_since = self._written_here_at = time.monotonic()
                self._gather()
                self._write_if_due()
        except Exception as problem:  # noqa: BLE001 - what ends the journal is the journal's own thread's to tell
            self._broken = problem

    def _let_go_of_the_pen(self) -> None:
        """A signal handler may raise between taking the pen and knowing it, or before it is given back; with the pen
        gone for good the journal's own thread would wait for ever."""
        with suppress(RuntimeError):  # "cannot release un-acquired lock": this thread does not hold it
            self._pen.release()
            self._awake_since = None
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            return  # the pipe is full of wake-ups already
        except OSError:
            return  # closed: the journal has ended

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._pen:
                self._through_outage(self._listen)
            while self._turn():
                self._sleep()
        except BaseException as problem:
            log.exception("the journal of %s stopped", self.step.label)
            gone = StoreUnavailableError(
                f"the saga store is gone ({first_line(problem)}); nothing was called"
            )
            with self._pen:
                self._end(gone)
            self._stop(StopOrder(Stop.CUT_OFF, f"{self.step.label}: {gone}"))
        finally:
            with self._pen, self._connection_lock:
                self._connection.close()

    def _turn(self) -> bool:
        """Write what is due, look at the calls under way, renew the lease; False when all is said."""
        with self._pen:
            if self._broken is not None:
                raise self._broken
            self._awake_since = time.monotonic()
            self._gather()
            self._write_if_due()
            self._watch_calls()
            self._beat_if_due()
            if self._closing and not self._work and not self._queue:
                self._end(NotInSagaError(f"{self.step.label}: this step has ended; nothing was called"))
                return False
            if (
                self._connection.pgconn.notifies() is not None
            ):  # it came with an answer: nothing is left to be read
                self._next_beat = 0.0
            self._awake_since = None
            return True

    def _end(self, why: BaseException) -> None:
        """Nothing is written from now on: whoever waits is told, and whoever comes later."""
        self._over = why
        self._gather()
        work, self._work = self._work, _Work()
        for ticket in work.tickets:
            ticket.fail(why)

    def _gather(self) -> None:
        while True:
            try:
                entry = self._queue.popleft()
            except IndexError:
                return
            entry(self._work)

    def _sleep(self) -> None:
        """Until something is handed over, heard, or due. While a caller writes for itself, its answers would wake this
        thread each time: then it looks at the clock only, and the caller's own writes hear of a cancel."""
        now = time.monotonic()
        caller_writes = now - self._written_here_at < CALLER_WRITES_SECONDS
        dates = [self._next_beat]
        if self._just_begun:  # a call that ends at once wakes nobody: its next intent will
            dates.append(now + 2 * self.limits.outcome_flush_seconds)
            self._just_begun = False
        elif caller_writes:
            dates.append(now + 5 * self.limits.outcome_flush_seconds)
        if self._work.outcomes:
            dates.append((self._waiting_since or now) + self.limits.outcome_flush_seconds)
        elif self._work.readings:
            dates.append((self._waiting_since or now) + self.limits.flush_seconds)
        deadline = self.calls.next_deadline(self.limits.abandon_grace_seconds)
        if deadline is not None:
            dates.append(deadline)
        if self.calls.undelivered():
            dates.append(now + SIGNAL_AGAIN_SECONDS)
        if self._stopped_at is not None and self._body_running and not self._killed:
            dates.append(self._stopped_at + self.limits.stop_grace_seconds)
        pause = max(0.0, min(dates) - now)
        if self._queue or self._closing:
            pause = 0.0
        self._wait(pause, with_store=not caller_writes)

    def _wait(self, seconds: float, *, with_store: bool) -> None:
        try:
            lines = [self._wake_read, *([self._connection.fileno()] if with_store else [])]
            readable, _, _ = select.select(lines, [], [], seconds)
        except (OSError, ValueError, psycopg.OperationalError):
            time.sleep(min(seconds, SIGNAL_AGAIN_SECONDS))  # a caller is just replacing a lost connection
            return
        if self._wake_read in readable:
            os.read(self._wake_read, 4096)
        if len(readable) > (self._wake_read in readable):
            self._take_notifications()

    def _take_notifications(self) -> None:
        with self._pen:
            self._awake_since = time.monotonic()
            try:
                noticed = signals.take(self._connection)
            except psycopg.OperationalError:
                self._reconnect()
                noticed = True
            if noticed:
                self._next_beat = 0.0
            self._awake_since = None

    # -- writing ------------------------------------------------------------------------------------------------------

    def _write_if_due(self) -> None:
        work = self._work
        if not work:
            self._waiting_since = None
            return
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        waited = now - self._waiting_since
        ripe = waited >= (self.limits.outcome_flush_seconds if work.outcomes else self.limits.flush_seconds)
        if not (work.urgent or ripe or self._closing or self.stop_order is not None):
            return
        self._work, self._waiting_since = _Work(), None
        try:
            self._write(work)
        except Exception:
            raise
        except BaseException:
            self._give_back(work)
            raise

    def _give_back(self, work: _Work) -> None:
        """The thread that wrote for itself was interrupted: nobody knows how far it came. The journal finds out."""
        for intent, _ in work.intents:
            self._open.pop(intent.seq, None)
            work.outcomes.append(self._not_called(intent))
        self._work.outcomes[:0] = work.outcomes
        self._work.readings[:0] = work.readings
        self._work.uncertain = True

    def _write(self, work: _Work) -> None:
        """:raises BaseException: nothing can be written any more; whoever waits for this work has been told."""
        try:
            self._write_all(work)
        except BaseException as problem:
            gone = StoreUnavailableError(
                f"the saga store is gone ({first_line(problem)}); nothing was called"
            )
            for ticket in work.tickets:
                ticket.fail(gone)
            raise

    def _write_all(self, work: _Work) -> None:
        refusal = self._refusal_of_all()
        if refusal is not None:
            work.refuse_calls(refusal)
        if work.outcomes or work.readings or work.intents:
            self._write_batch(work)
        for intent, retry in work.retries:
            self._answer(retry, lambda intent=intent: self._retry(intent))  # type: ignore[misc]
        for intent, again in work.assertions:
            self._answer(again, lambda intent=intent: self._assert(intent))  # type: ignore[misc]
        for verb, asked in work.asked:
            self._answer(asked, lambda verb=verb: self._through_outage(lambda: verb(self._connection)))  # type: ignore[misc]

    def _refusal_of_all(self) -> BaseException | None:
        """Why no call may begin now, whatever the log says."""
        if self.stop_order is not None:
            return self.stop_order.error()
        if not self._body_running:
            return NotInSagaError(f"{self.step.label}: the body of the step has ended; nothing was called")
        return None

    def _answer(self, ticket: Ticket[Any], produce: Callable[[], Any]) -> None:
        try:
            answer = produce()
        except StoreUnavailableError as gone:
            ticket.fail(gone)
            raise
        except Exception as problem:  # noqa: BLE001 - it belongs to whoever asked
            ticket.fail(problem)
        except StepInterrupted as stop:
            ticket.fail(stop)
        else:
            ticket.answer(answer)

    def _write_batch(self, work: _Work) -> None:
        sent = time.monotonic()
        intents = [intent for intent, _ in work.intents]
        for outcome in work.outcomes:
            self._open.pop(outcome.seq, None)
        resent = work.uncertain
        try:
            if resent:
                written = self._write_again(work)
            else:
                written = self._verbs.write_forward(self.step, work.outcomes, intents, work.readings)
                self.commits += 1
        except _LOST as problem:
            self._reconnect(problem)
            written = self._write_again(work)
            resent = True
        self._see(written)
        self._keep_late(work.outcomes, written)
        for intent, ticket in work.intents:
            if intent.seq not in written.begun:
                ticket.fail(self._refusal(intent, written))
                continue
            self._open[intent.seq] = 1
            self._just_begun = True
            if resent:
                self._answer(ticket, lambda intent=intent: self._assert_or_withdraw(intent))  # type: ignore[misc]
            else:
                ticket.answer(sent)

    def _assert_or_withdraw(self, intent: Intent) -> float:
        try:
            return self._assert(intent)
        except (ActionRefusedError, StepInterrupted):
            self._work.outcomes.append(self._not_called(intent))
            raise

    def _write_again(self, work: _Work) -> Written:
        """After an outage nobody knows whether the batch was committed: write only what is not there yet."""

        def again() -> Written:
            rows = {
                seq: self._verbs.recorded_action(self.step, seq)
                for seq in [
                    *(o.seq for o in work.outcomes),
                    *(i.seq for i, _ in [*work.intents, *work.readings]),
                ]
            }
            outcomes = [o for o in work.outcomes if (row := rows[o.seq]) and row.state == ActionState.PENDING]
            intents = [i for i, _ in work.intents if rows[i.seq] is None]
            readings = [(i, o) for i, o in work.readings if rows[i.seq] is None]
            written = self._verbs.write_forward(self.step, outcomes, intents, readings)
            there = {
                o.seq
                for o in work.outcomes
                if o not in outcomes and ((row := rows[o.seq]) is None or row.state == o.state)
            }
            begun = {
                i.seq for i, _ in work.intents if (row := rows[i.seq]) and row.state == ActionState.PENDING
            }
            return Written(
                written.ended | there,
                written.begun | begun,
                written.saga_state,
                written.step_state,
                written.fence,
            )

        return self._through_outage(again)

    def _assert(self, intent: Intent) -> float:
        """All of begin's guards again, and a new time to land; when it was sent."""

        def sent_now() -> tuple[float, Written]:
            return time.monotonic(), self._verbs.reassert_if_allowed(self.step, intent)

        sent, written = self._through_outage(sent_now)
        self._see(written)
        if intent.seq not in written.begun:
            raise self._refusal(intent, written)
        return sent

    def _retry(self, intent: Intent) -> tuple[int, float]:
        """Another try. If its commit was not heard of, the row tells: it is ours, since the fence is."""
        tried = False

        def sent_now() -> tuple[float, int | None, Written]:
            nonlocal tried
            if tried:
                row = self._verbs.recorded_action(self.step, intent.seq)
                if row is not None and row.state == ActionState.PENDING:
                    sent, written = time.monotonic(), self._verbs.reassert_if_allowed(self.step, intent)
                    return sent, row.tries if intent.seq in written.begun else None, written
            tried = True
            return time.monotonic(), *self._verbs.retry_if_allowed(self.step, intent)

        sent, tries, written = self._through_outage(sent_now)
        self._see(written)
        if tries is None:
            raise self._refusal(intent, written)
        self._open[intent.seq] = tries
        return tries, sent

    def _keep_late(self, outcomes: list[Outcome], written: Written) -> None:
        for outcome in outcomes:
            if outcome.seq in written.ended:
                continue
            idempotent = outcome.seq in self.idempotent_seqs

            def late(outcome: Outcome = outcome, idempotent: bool = idempotent) -> str:
                return LateVerbs(self._connection).record_late(self.step, outcome, idempotent=idempotent)

            log.warning(
                "%s: late answer of action %d: %s", self.step.label, outcome.seq, self._through_outage(late)
            )

    def _refusal(self, intent: Intent, written: Written) -> BaseException:
        if self.stop_order is not None:
            return self.stop_order.error()
        return ActionRefusedError(
            f"{intent.name}: the log did not let it begin (saga {written.saga_state}, step {written.step_state}, "
            f"fence {written.fence}); nothing was called"
        )

    # -- what the saga wants ------------------------------------------------------------------------------------------

    def _see(self, written: Written) -> None:
        if written.fence != self.step.fence:
            message = f"{self.step.label}: a newer attempt or the undo owns this step (fence {written.fence})"
            self._stop(StopOrder(Stop.FENCED, message))
        elif written.saga_state != SagaState.RUNNING and self.step.state == StepState.RUNNING:
            self._next_beat = 0.0
            self._beat_if_due()  # it tells who decided to stop, and why

    def _beat_if_due(self) -> None:
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + self.limits.heartbeat_seconds
        try:
            self._beat()
        except _LOST as problem:
            self._reconnect(problem)

    def _beat(self) -> None:
        """Renew the lease, keep the newest checkpoint, and learn what the saga wants."""
        if self._checkpoint is not None:
            self._kept = self._checkpoint() or self._kept
        beat = self._verbs.heartbeat_if_held(
            self.step, self.limits.lease_seconds, self._kept, self._kept is not None
        )
        self._kept = None
        forward = self.step.state == StepState.RUNNING
        if not beat.held:
            if forward and not self._body_running:
                return  # the step has just been finished or stopped by this very process
            self._stop(
                StopOrder(Stop.FENCED, f"{self.step.label}: a newer attempt or the undo owns this step")
            )
        elif forward and beat.state != SagaState.RUNNING:
            who = f"by {beat.actor or 'Airflow'}" + (f" ({beat.reason})" if beat.reason else "")
            self._stop(StopOrder(Stop.CANCELLED, f"the saga is being stopped {who}", beat.mode))
        if forward and beat.stop_now and beat.state == SagaState.CANCELLING:
            self._abandon_all("stop now was asked for")

    def _stop(self, order: StopOrder) -> None:
        ranks = list(Stop)
        known = self.stop_order
        if known is not None and ranks.index(known.kind) > ranks.index(order.kind):
            return
        self.stop_order = order
        if self._stopped_at is None or known is None or known.kind is Stop.KILLED:
            self._stopped_at = time.monotonic()
            log.warning("%s", order.message)
        self.stop_event.set()
        for listener in tuple(self._stop_listeners):
            listener()

    @property
    def _killed(self) -> bool:
        return self.stop_order is not None and self.stop_order.kind is Stop.KILLED

    # -- calls under way ----------------------------------------------------------------------------------------------

    def _watch_calls(self) -> None:
        if self.stop_order is not None and not self.stop_event.is_set():
            self._stop(self.stop_order)  # request_kill only set the flag
        now = time.monotonic()
        overdue = self.ends_by is not None and now >= self.ends_by and self._body_running
        if overdue and self.stop_order is None:
            message = f"{self.step.label}: its execution_timeout is over and its body goes on"
            self._stop(StopOrder(Stop.OVERDUE, message))
        for call in self.calls.overdue(now):
            self._abandon(call, f"{call.name} did not answer within {call.timeout_seconds:g} s")
        for call in self.calls.undelivered():
            self.calls.interrupt(call)
        for call in self.calls.stuck(now, self.limits.abandon_grace_seconds):
            self._end_process(f"{call.name} was abandoned ({call.why}) and cannot be interrupted")
        if self._stopped_at is None or self._killed or not self._body_running or len(self.calls):
            if len(self.calls) and self._stopped_at is not None:
                self._stopped_at = max(self._stopped_at, now)
            return
        if now >= self._stopped_at + self.limits.stop_grace_seconds:
            self._end_process("it has to stop and the body of the step did not return")

    def _abandon_all(self, why: str) -> None:
        for call in self.calls.abandonable():
            self._abandon(call, f"{call.name}: {why}")

    def _abandon(self, call: RunningCall, why: str) -> None:
        """The log first: IN_DOUBT, then the interruption. What the call may still do lands by ``lands_by``."""
        if not self.calls.mark_abandoned(call, why):
            return
        log.warning("%s; abandoned, its outcome is in doubt", why)
        if call.seq is not None:
            doubt = Outcome(call.seq, ActionState.IN_DOUBT, error=why, own=False, tries=call.tries)
            self._gather()
            self._work.outcomes.append(doubt)
            work, self._work, self._waiting_since = self._work, _Work(), None
            self._write(work)
        self.calls.interrupt(call)

    def _end_process(self, reason: str) -> None:
        def last_words() -> None:
            self._gather()
            if self._work.outcomes or self._work.readings:
                self._verbs.write_forward(self.step, self._work.outcomes, [], self._work.readings)
            self._verbs.stop_if_held(self.step)

        end_process(f"{self.step.label}: {reason}", last_words)

    # -- the store goes away and comes back ---------------------------------------------------------------------------

    def _listen(self) -> None:
        if signals.listen(self._connection, self.saga.saga_id):
            self._connection.add_notify_handler(self._noticed)
        else:
            log.warning(
                "%s: notifications are not delivered (a transaction pooler is in between); polling every %g s",
                self.step.label,
                self.limits.heartbeat_seconds,
            )

    def _noticed(self, notify: object) -> None:
        """One that came with the answer of a statement."""
        self._next_beat = 0.0

    def _reconnect(self, problem: BaseException | None = None) -> None:
        """:raises StoreUnavailableError: after ``store_outage_seconds``; what is in flight ends in doubt."""
        log.warning(
            "lost the saga store (%s); reconnecting", first_line(problem) if problem else "connection closed"
        )
        deadline = time.monotonic() + self.limits.store_outage_seconds
        while True:
            with self._connection_lock:
                self._connection.close()
            try:
                opened = self.address.open()
                with self._connection_lock:
                    self._connection = opened
                self._verbs = StepVerbs(opened)
                self._listen()
                break
            except (StoreUnavailableError, *_LOST) as still:
                if time.monotonic() > deadline:
                    raise StoreUnavailableError(
                        f"the saga store was away for more than {self.limits.store_outage_seconds:g} s: "
                        f"{first_line(still)}"
                    ) from still
                time.sleep(0.2)
        self._next_beat = 0.0

    # -- while the journal itself waits for the store -----------------------------------------------------------------

    def watch_calls_alone(self) -> None:
        """The watch: deadlines hold during an outage too. The row stays PENDING until the store is back; if it does
        not come back, whoever sweeps finds it in doubt."""
        now = time.monotonic()
        for call in self.calls.overdue(now):
            why = f"{call.name} did not answer within {call.timeout_seconds:g} s"
            if self.calls.mark_abandoned(call, why):
                log.warning("%s; abandoned while the saga store is away, its outcome is in doubt", why)
                if call.seq is not None:
                    doubt = Outcome(call.seq, ActionState.IN_DOUBT, error=why, own=False, tries=call.tries)
                    self._queue.append(lambda work, doubt=doubt: work.outcomes.append(doubt))  # type: ignore[misc]
                self.calls.interrupt(call)
        for call in self.calls.undelivered():
            self.calls.interrupt(call)
        for call in self.calls.stuck(now, self.limits.abandon_grace_seconds):
            end_process(f"{self.step.label}: {call.name} was abandoned and cannot be interrupted")
        hung = (
            self._body_running and self._stopped_at is not None and not self._killed and not len(self.calls)
        )
        if hung and now >= (self._stopped_at or now) + self.limits.stop_grace_seconds:
            end_process(f"{self.step.label}: it has to stop and the body of the step did not return")

    def busy_seconds(self) -> float:
        """How long the journal has been at its present turn, which waits for the store if it is long."""
        if self._over is not None:
            return float("inf")
        since = self._awake_since
        return 0.0 if since is None else time.monotonic() - since

    def hang_up(self) -> None:
        """Nothing came back for too long: make the wait end, as if the other side had closed the connection."""
        with self._connection_lock:
            if not self._connection.closed:
                log.warning("%s: the saga store does not answer; dropping the connection", self.step.label)
                with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as line:
                    line.shutdown(socket.SHUT_RDWR)

    def _through_outage(self, verb: Callable[[], R]) -> R:
        """Run an idempotent verb; if the connection is lost, wait for the store and run it again."""
        for _ in range(5):
            try:
                answer = verb()
                self.commits += 1
                return answer
            except _LOST as problem:
                self._reconnect(problem)
        return verb()
