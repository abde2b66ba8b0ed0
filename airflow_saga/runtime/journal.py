"""The journal: one per step process owns the one connection to the store, and everything that is written.

Callers hand it intents and outcomes. It writes what has gathered in one commit (the outcome of call k rides with the
intent of call k + 1), renews the lease, listens for a cancel, ends calls at their deadline, and waits out an outage of
the store. Nothing is written from a signal handler: ``request_kill`` sets a flag and wakes the thread.

Here is what callers may ask. Its parts: ``handover`` (what they asked for), ``turns`` (the thread, and who writes),
``writer`` (one commit for what has gathered), ``line`` (the store, lost and found again), ``heartbeat`` (the lease, and
what the saga wants), ``guard`` (the calls under way), ``stops`` (why nothing begins any more).

Invariants: an intent is answered only after its commit; an outcome is never dropped (if the step was taken over it is
kept as a late answer); a write that cannot be made stops the step before the call.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import psycopg

from airflow_saga.core.errors import StoreUnavailableError
from airflow_saga.core.records import Intent, Outcome, SagaRow, StepRow
from airflow_saga.core.states import ActionState
from airflow_saga.runtime.calls import CallRegister, RunningCall
from airflow_saga.runtime.guard import CallGuard
from airflow_saga.runtime.handover import Handover, Work
from airflow_saga.runtime.heartbeat import DUE, Heartbeat
from airflow_saga.runtime.line import StoreLine
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.stops import Stop, StopOrder, StopOrders
from airflow_saga.runtime.ticket import Ticket
from airflow_saga.runtime.turns import Turns
from airflow_saga.runtime.watch import Watch
from airflow_saga.runtime.writer import Writer
from airflow_saga.store.connect import Address
from airflow_saga.store.deferral import DeferralVerbs
from airflow_saga.store.steps import Checkpoint, Reading

log = logging.getLogger(__name__)
R = TypeVar("R")


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
        self.step = step
        self.limits = limits
        self.calls = CallRegister()
        self._stops = stops = StopOrders(step)
        self._handover = handover = Handover()
        self._line = line = StoreLine(address, connection, step, limits, heard=self._look_at_saga)
        self._heartbeat = beat = Heartbeat(line, step, limits, stops, abandon_all=self._abandon_all)
        self._writer = writer = Writer(line, step, limits, stops, handover, beat)
        self._guard = guard = CallGuard(self.calls, step, limits, stops, handover, line, writer, ends_by)
        self._turns = Turns(step, limits, self.calls, stops, handover, line, beat, writer, guard)
        self._watch = Watch(self._turns, guard, line)
        self.stop_event = stops.given
        self.idempotent_seqs = writer.idempotent_seqs

    # -- called by the step's threads ---------------------------------------------------------------------------------

    def start(self) -> None:
        self.calls.install_handler()
        self._stops.body_running = True
        self._line.hear()
        self._turns.start()
        self._watch.start()

    def begin(self, intent: Intent, ticket: Ticket[float]) -> None:
        """The ticket is answered once the intent is committed, with when it was sent; or with why it may not begin."""
        self._handover.put(lambda work: work.intents.append((intent, ticket)), wake=False)
        self._turns.write_here_or_wake(ticket)

    def retry(self, intent: Intent, ticket: Ticket[tuple[int, float]]) -> None:
        """As :meth:`begin`, for another try of a recorded call; the answer tells the number of the try too."""
        self._handover.put(lambda work: work.retries.append((intent, ticket)))

    def assert_again(self, intent: Intent, ticket: Ticket[float]) -> None:
        """An intent is older than A1 allows: may its call still begin? Answered as :meth:`begin`."""
        self._handover.put(lambda work: work.assertions.append((intent, ticket)))

    def withdraw(self, intent: Intent, was: ActionState, ticket: Ticket[Any]) -> None:
        """Whoever asked for this intent will not make the call. If it was committed, the row is ``was`` again."""

        def take_back(work: Work) -> None:
            work.intents = [(i, t) for i, t in work.intents if t is not ticket]
            work.retries = [(i, t) for i, t in work.retries if t is not ticket]
            if ticket.granted:
                work.outcomes.append(self._writer.not_called(intent, was))

        self._handover.put(take_back)

    def outcome(self, outcome: Outcome, took_seconds: float = math.inf) -> None:
        """How a call ended; written with the next intent or within a few ms, whichever is first. Never refused.

        :param took_seconds: of the call. After a short one the journal is about to look by itself.
        """
        wake = took_seconds > self._turns.looks_again_seconds
        self._handover.put(lambda work: work.outcomes.append(outcome), wake)

    def reading(self, reading: Reading) -> None:
        """How a READ_ONLY call ended; written with the next intent or within ``flush_seconds``."""
        self._handover.put(lambda work: work.readings.append(reading))

    def ask(self, verb: Callable[[psycopg.Connection], R]) -> R:
        """Run a verb on the journal's connection, after everything that was handed over before it is written."""
        ticket: Ticket[R] = Ticket()
        self._handover.put(lambda work: work.asked.append((verb, ticket)), wake=False)
        self._turns.write_here_or_wake(ticket)
        return ticket.wait()

    def ask_with(self, verb: Callable[[psycopg.Connection], R], ticket: Ticket[R]) -> None:
        """As :meth:`ask`, answered through the ticket."""
        self._handover.put(lambda work: work.asked.append((verb, ticket)))

    def park(self, seq: int, deferral: str, summary: str) -> bool:
        """The call of this seq waits in Airflow's triggerer: the log says so, and it ends without an outcome here.

        False: a newer attempt or the undo owns the step.
        """

        def write(connection: psycopg.Connection) -> bool:
            parked = DeferralVerbs(connection).park_if_held(self.step, seq, deferral, summary)
            self._writer.let_go(seq)
            return parked

        return self.ask(write)

    def watch(self, call: RunningCall) -> None:
        """A call has begun; if it may end before the next heartbeat, its deadline is looked at at once."""
        if call.timeout_seconds < 2 * self.limits.heartbeat_seconds:
            self._handover.bell.ring()

    def warn(self, message: str) -> None:
        log.warning("%s: %s", self.step.label, message)

    def flush(self) -> None:
        """Everything handed over so far is committed when this returns."""
        self.ask(lambda connection: None)

    def set_checkpoint(self, source: Callable[[], Checkpoint | None]) -> None:
        """The newest checkpoint, taken when the journal writes; never blocks on the database."""
        self._heartbeat.checkpoint = source

    def checkpoint_waits(self, *, long_enough: bool = False) -> None:
        """There is one to be kept, within ``flush_seconds`` or now."""
        self._heartbeat.flush_at = DUE if long_enough else time.monotonic() + self.limits.flush_seconds
        self._handover.bell.ring()

    def check(self) -> None:
        """:raises StepInterrupted: if the step has to stop."""
        order = self._stops.order
        if order is not None:
            raise order.error()

    @property
    def stop_order(self) -> StopOrder | None:
        return self._stops.order

    @property
    def commits(self) -> int:
        return self._line.commits

    def request_kill(self) -> None:
        """From ``on_kill``, which is a signal handler: a flag and a wake-up, nothing else."""
        if self._stops.order is None:
            self._stops.order = StopOrder(Stop.KILLED, "Airflow asked this process to go")
        self._handover.bell.ring()

    def on_stop(self, listener: Callable[[], object]) -> None:
        """Called on the journal thread when the step has to stop (an event loop's back-off ends at once)."""
        self._stops.listen(listener)

    def off_stop(self, listener: Callable[[], object]) -> None:
        self._stops.unlisten(listener)

    def body_ended(self) -> None:
        """The body has returned or raised: no call begins any more, and those it left running are waited for.

        Their outcomes are handed over when this returns. A call that was interrupted between its intent and its
        outcome is in doubt from now on.
        """
        self._stops.body_running = False
        self.calls.close_when_idle()
        with suppress(StoreUnavailableError):
            self._handover.put(self._writer.settle_open)

    def keep_checkpoint(self) -> None:
        """The newest checkpoint is committed when this returns (if the step is still ours)."""
        self.ask(lambda connection: self._heartbeat.keep_checkpoint())

    def close(self) -> None:
        """Write what is left and let the connection go."""
        self._handover.closing = True
        self._handover.bell.ring()
        self._turns.join(self.limits.store_outage_seconds + 10)
        self._watch.stop()
        self.calls.remove_handler()
        self._handover.bell.close()

    # -- what its parts tell each other -------------------------------------------------------------------------------

    def _look_at_saga(self) -> None:
        self._heartbeat.next_at = DUE

    def _abandon_all(self, why: str) -> None:
        self._guard.abandon_all(why)
