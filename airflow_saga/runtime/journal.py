"""The journal: one thread per step process owns the one connection to the store, and everything that is written.

Callers hand it intents and outcomes. It writes what has gathered in one commit (the outcome of call k rides with the
intent of call k + 1), renews the lease, listens for a cancel, ends calls at their deadline, and waits out an outage of
the store. Nothing is written from a signal handler: ``request_kill`` sets a flag and wakes the thread.

Invariants: an intent is answered only after its commit; an outcome is never dropped (if the step was taken over it is
kept as a late answer); a write that cannot be made stops the step before the call.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import psycopg

from airflow_saga.core.errors import (
    ActionRefusedError,
    SagaCancelledError,
    StepFencedError,
    StepKilledError,
    StoreUnavailableError,
)
from airflow_saga.core.records import Intent, Outcome, SagaRow, StepRow
from airflow_saga.core.states import ActionState, SagaState, StepState
from airflow_saga.runtime.calls import CallRegister, RunningCall, end_process
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.ticket import Ticket
from airflow_saga.store import signals
from airflow_saga.store.connect import Address, first_line
from airflow_saga.store.late import LateVerbs
from airflow_saga.store.steps import Reading, StepVerbs, Written

log = logging.getLogger(__name__)
R = TypeVar("R")

_LOST = (psycopg.OperationalError, psycopg.InterfaceError)
BEGIN_WITHIN_SECONDS = 1.0
"""A1: a call starts within this of sending its intent, else the intent is asserted again."""


class Stop(StrEnum):
    """Why no further action begins, strongest last."""

    KILLED = "killed"
    CANCELLED = "cancelled"
    FENCED = "fenced"


@dataclass(frozen=True)
class StopOrder:
    """:ivar message: who decided what, for the task log."""

    kind: Stop
    message: str
    mode: str | None = None

    def error(self) -> BaseException:
        if self.kind is Stop.FENCED:
            return StepFencedError(self.message)
        return (
            SagaCancelledError(self.message) if self.kind is Stop.CANCELLED else StepKilledError(self.message)
        )


@dataclass
class _Work:
    """What callers have handed over and the journal has not written yet."""

    outcomes: list[Outcome] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    intents: list[tuple[Intent, Ticket[None]]] = field(default_factory=list)
    retries: list[tuple[Intent, Ticket[int]]] = field(default_factory=list)
    asked: list[tuple[Callable[[psycopg.Connection], Any], Ticket[Any]]] = field(default_factory=list)
    flush: bool = False

    def __bool__(self) -> bool:
        return bool(
            self.outcomes or self.readings or self.intents or self.retries or self.asked or self.flush
        )

    @property
    def urgent(self) -> bool:
        return bool(self.intents or self.retries or self.asked or self.flush)


class Journal:
    """See the module. Made by the thread that attached the step; ``connection`` is the journal's from then on."""

    def __init__(
        self, address: Address, connection: psycopg.Connection, saga: SagaRow, step: StepRow, limits: Limits
    ) -> None:
        self.address = address
        self.saga = saga
        self.step = step
        self.limits = limits
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
        self._stop_now = False
        self._stopped_at: float | None = None
        self._body_running = False
        self._closing = False
        self._broken: BaseException | None = None
        self._checkpoint: Callable[[], str | None] | None = None
        self._waiting_since: float | None = None
        self._next_beat = 0.0
        self._thread = threading.Thread(target=self._run, name="saga-journal", daemon=True)

    # -- called by the step's threads ---------------------------------------------------------------------------------

    def start(self) -> None:
        self._listen()
        self.calls.install_handler()
        self._body_running = True
        self._thread.start()

    def begin(self, intent: Intent, ticket: Ticket[None]) -> None:
        """The ticket is answered once the intent is committed, or with why it may not begin."""
        self._put(lambda work: work.intents.append((intent, ticket)))

    def retry(self, intent: Intent, ticket: Ticket[int]) -> None:
        """As :meth:`begin`, for another try of a recorded call; the answer is the number of the try."""
        self._put(lambda work: work.retries.append((intent, ticket)))

    def outcome(self, outcome: Outcome) -> None:
        """How a call ended; written with the next intent or within 2 ms, whichever is first. Never refused."""
        self._put(lambda work: work.outcomes.append(outcome))

    def reading(self, reading: Reading) -> None:
        """How a READ_ONLY call ended; written with the next intent or within ``flush_seconds``."""
        self._put(lambda work: work.readings.append(reading), wake=False)

    def ask(self, verb: Callable[[psycopg.Connection], R]) -> R:
        """Run a verb on the journal's connection, after everything that was handed over before it is written."""
        ticket: Ticket[R] = Ticket()
        self._put(lambda work: work.asked.append((verb, ticket)))
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

    def body_ended(self) -> None:
        """The body has returned or raised: a hung one no longer has to be ended from outside."""
        self._body_running = False

    def close(self) -> None:
        """Write what is left and let the connection go."""
        self._closing = True
        self._wake()
        self._thread.join(self.limits.store_outage_seconds + 10)
        self.calls.remove_handler()
        for descriptor in (self._wake_read, self._wake_write):
            os.close(descriptor)

    def _put(self, entry: Callable[[_Work], None], wake: bool = True) -> None:
        if self._broken is not None:
            raise StoreUnavailableError(f"the journal has stopped: {self._broken}") from self._broken
        self._queue.append(entry)
        if wake:
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
            while True:
                self._gather()
                self._write_if_due()
                self._watch_calls()
                self._beat_if_due()
                if self._closing and not self._work and not self._queue:
                    return
                self._sleep()
        except BaseException as problem:
            self._broken = problem
            log.exception("the journal of %s stopped", self.step.label)
            self._refuse_all(problem)
            self._stop(StopOrder(Stop.FENCED, f"the journal stopped: {first_line(problem)}"))
        finally:
            self._connection.close()

    def _gather(self) -> None:
        while True:
            try:
                entry = self._queue.popleft()
            except IndexError:
                return
            entry(self._work)

    def _sleep(self) -> None:
        now = time.monotonic()
        dates = [self._next_beat]
        if self._work.outcomes:
            dates.append((self._waiting_since or now) + self.limits.outcome_flush_seconds)
        elif self._work.readings:
            dates.append((self._waiting_since or now) + self.limits.flush_seconds)
        deadline = self.calls.next_deadline(self.limits.abandon_grace_seconds)
        if deadline is not None:
            dates.append(deadline)
        if self._stopped_at is not None and self._body_running:
            dates.append(self._stopped_at + self.limits.stop_grace_seconds)
        pause = max(0.0, min(dates) - now)
        if self._queue or self._closing:
            pause = 0.0
        readable, _, _ = select.select([self._wake_read, self._connection.fileno()], [], [], pause)
        if self._wake_read in readable:
            os.read(self._wake_read, 4096)
        if len(readable) > (self._wake_read in readable):
            self._take_notifications()

    def _take_notifications(self) -> None:
        try:
            noticed = signals.take(self._connection)
        except psycopg.OperationalError:
            self._reconnect()
            noticed = True
        if noticed:
            self._next_beat = 0.0

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
        self._write(work)

    def _write(self, work: _Work) -> None:
        if self.stop_order is not None:
            refused: list[Ticket[Any]] = [*(t for _, t in work.intents), *(t for _, t in work.retries)]
            for ticket in refused:
                ticket.fail(self.stop_order.error())
            work.intents, work.retries = [], []
        if work.outcomes or work.readings or work.intents:
            self._write_batch(work)
        for intent, ticket in work.retries:
            self._answer(ticket, lambda intent=intent: self._retry(intent))  # type: ignore[misc]
        for verb, asked in work.asked:
            self._answer(asked, lambda verb=verb: self._through_outage(lambda: verb(self._connection)))  # type: ignore[misc]

    def _answer(self, ticket: Ticket[Any], produce: Callable[[], Any]) -> None:
        try:
            answer = produce()
        except Exception as problem:  # noqa: BLE001 - it belongs to whoever asked
            ticket.fail(problem)
        except (SagaCancelledError, StepFencedError, StepKilledError) as stop:
            ticket.fail(stop)
        else:
            ticket.answer(answer)

    def _write_batch(self, work: _Work) -> None:
        sent = time.monotonic()
        intents = [intent for intent, _ in work.intents]
        try:
            written = self._verbs.write_forward(self.step, work.outcomes, intents, work.readings)
            self.commits += 1
            resent = False
        except _LOST as problem:
            self._reconnect(problem)
            written = self._write_again(work)
            resent = True
        self._see(written)
        self._keep_late(work.outcomes, written)
        for intent, ticket in work.intents:
            if intent.seq not in written.begun:
                ticket.fail(self._refusal(intent, written))
            elif resent or time.monotonic() - sent > BEGIN_WITHIN_SECONDS:
                self._answer(ticket, lambda intent=intent: self._reassert(intent))  # type: ignore[misc]
            else:
                ticket.answer(None)

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
            outcomes = [
                o for o in work.outcomes if (row := rows[o.seq]) is None or row.state == ActionState.PENDING
            ]
            intents = [i for i, _ in work.intents if rows[i.seq] is None]
            readings = [(i, o) for i, o in work.readings if rows[i.seq] is None]
            written = self._verbs.write_forward(self.step, outcomes, intents, readings)
            there = {
                o.seq
                for o in work.outcomes
                if o not in outcomes and (row := rows[o.seq]) and row.state == o.state
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

    def _reassert(self, intent: Intent) -> None:
        sent = time.monotonic()
        written = self._through_outage(lambda: self._verbs.reassert_if_allowed(self.step, intent))
        self._see(written)
        if intent.seq not in written.begun:
            raise self._refusal(intent, written)
        if time.monotonic() - sent > BEGIN_WITHIN_SECONDS:
            raise ActionRefusedError(
                f"{intent.name}: the saga store is too slow to begin a call safely ({time.monotonic() - sent:.1f} s); "
                f"nothing was called"
            )

    def _retry(self, intent: Intent) -> int:
        tries, written = self._through_outage(lambda: self._verbs.retry_if_allowed(self.step, intent))
        self._see(written)
        if tries is None:
            raise self._refusal(intent, written)
        return tries

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
        checkpoint = self._checkpoint() if self._checkpoint else None
        try:
            beat = self._verbs.heartbeat_if_held(
                self.step, self.limits.lease_seconds, checkpoint, checkpoint is not None
            )
        except _LOST as problem:
            self._reconnect(problem)
            self._next_beat = 0.0
            return
        if not beat.held:
            if self.step.state == StepState.RUNNING and not self._body_running:
                return  # the step has just been finished or stopped by this very process
            self._stop(
                StopOrder(Stop.FENCED, f"{self.step.label}: a newer attempt or the undo owns this step")
            )
        elif self.step.state == StepState.RUNNING and beat.state != SagaState.RUNNING:
            who = f"by {beat.actor or 'Airflow'}" + (f" ({beat.reason})" if beat.reason else "")
            self._stop(StopOrder(Stop.CANCELLED, f"the saga is being stopped {who}", beat.mode))
        if beat.stop_now and beat.state == SagaState.CANCELLING and self.step.state == StepState.RUNNING:
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
        for listener in self._stop_listeners:
            listener()

    # -- calls under way ----------------------------------------------------------------------------------------------

    def _watch_calls(self) -> None:
        if self.stop_order is not None and not self.stop_event.is_set():
            self._stop(self.stop_order)  # request_kill only set the flag
        now = time.monotonic()
        for call in self.calls.overdue(now):
            self._abandon(call, f"{call.name} did not answer within {call.timeout_seconds:g} s")
        for call in self.calls.stuck(now, self.limits.abandon_grace_seconds):
            self._end_process(f"{call.name} was abandoned ({call.why}) and cannot be interrupted")
        killed = self.stop_order is not None and self.stop_order.kind is Stop.KILLED
        if self._stopped_at is None or killed or not self._body_running or len(self.calls):
            if len(self.calls) and self._stopped_at is not None:
                self._stopped_at = max(self._stopped_at, now)
            return
        if now >= self._stopped_at + self.limits.stop_grace_seconds:
            self._end_process("the saga is being stopped and the body of the step did not return")

    def _abandon_all(self, why: str) -> None:
        if self._stop_now:
            return
        self._stop_now = True
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

    # -- the store goes away and comes back -----------------------------------------------------------------------------

    def _listen(self) -> None:
        signals.listen(self._connection, self.saga.saga_id)

    def _reconnect(self, problem: BaseException | None = None) -> None:
        """:raises StoreUnavailableError: after ``store_outage_seconds``; what is in flight ends in doubt."""
        log.warning(
            "lost the saga store (%s); reconnecting", first_line(problem) if problem else "connection closed"
        )
        self._connection.close()
        deadline = time.monotonic() + self.limits.store_outage_seconds
        while True:
            try:
                self._connection = self.address.open()
                break
            except StoreUnavailableError:
                if time.monotonic() > deadline:
                    raise
                self._watch_calls_offline()
                time.sleep(0.2)
        self._verbs = StepVerbs(self._connection)
        self._listen()
        self._next_beat = 0.0

    def _watch_calls_offline(self) -> None:
        """Deadlines hold during an outage too; the row stays PENDING, and whoever sweeps it finds it in doubt."""
        now = time.monotonic()
        for call in self.calls.overdue(now):
            why = f"{call.name} did not answer within {call.timeout_seconds:g} s"
            if self.calls.mark_abandoned(call, why):
                if call.seq is not None:
                    doubt = Outcome(call.seq, ActionState.IN_DOUBT, error=why, own=False, tries=call.tries)
                    self._queue.append(lambda work, doubt=doubt: work.outcomes.append(doubt))  # type: ignore[misc]
                self.calls.interrupt(call)
        for call in self.calls.stuck(now, self.limits.abandon_grace_seconds):
            end_process(f"{self.step.label}: {call.name} was abandoned and cannot be interrupted")

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

    def _refuse_all(self, problem: BaseException) -> None:
        self._gather()
        tickets: list[Ticket[Any]] = [
            *(ticket for _, ticket in self._work.intents),
            *(ticket for _, ticket in self._work.retries),
            *(ticket for _, ticket in self._work.asked),
        ]
        for ticket in tickets:
            ticket.fail(
                StoreUnavailableError(f"the saga store is gone: {first_line(problem)}; nothing was called")
            )
        self._work = _Work()
