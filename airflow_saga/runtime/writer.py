"""Writes what was handed over, in one commit, and answers whoever waits for it.

The outcome of call k rides with the intent of call k + 1. When a commit was not heard of, the rows tell what of it is
there, and only the rest is written.

Invariants: an intent is answered only after its commit; an outcome is never dropped (if the step was taken over it is
kept as a late answer); a write that cannot be made stops the step before the call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from airflow_saga.core.errors import ActionRefusedError, StepInterrupted, StoreUnavailableError
from airflow_saga.core.records import Intent, Outcome, StepRow
from airflow_saga.core.states import ActionState
from airflow_saga.runtime.handover import Handover, Work
from airflow_saga.runtime.heartbeat import Heartbeat
from airflow_saga.runtime.line import LOST, StoreLine
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.stops import StopOrders
from airflow_saga.runtime.ticket import Ticket
from airflow_saga.store.connect import first_line
from airflow_saga.store.late import LateVerbs
from airflow_saga.store.steps import Written

log = logging.getLogger(__name__)


class Writer:
    """See the module. Used by whoever holds the pen.

    :ivar idempotent_seqs: the actions whose late answer needs no row of its own.
    :ivar just_begun: an intent was committed since the journal's thread last went to sleep.
    """

    def __init__(
        self,
        line: StoreLine,
        step: StepRow,
        limits: Limits,
        stops: StopOrders,
        handover: Handover,
        heartbeat: Heartbeat,
    ) -> None:
        self.idempotent_seqs: set[int] = set()
        self.just_begun = False
        self._line = line
        self._step = step
        self._limits = limits
        self._stops = stops
        self._handover = handover
        self._heartbeat = heartbeat
        self._open: dict[int, int] = {}
        """Tries of the calls whose intent is committed and whose outcome is not handed over yet, by seq."""
        heartbeat.write_outcomes = self.write_outcomes

    def not_called(self, intent: Intent, was: ActionState = ActionState.FAILED) -> Outcome:
        own = was is ActionState.FAILED
        why = "interrupted before the call was made; nothing was called"
        return Outcome(intent.seq, was, error=why, own=own, tries=self._open.get(intent.seq, 1))

    def settle_open(self, work: Work) -> None:
        told = {outcome.seq for outcome in work.outcomes}
        for seq, tries in self._open.items():
            if seq not in told:
                why = "interrupted before its outcome was known"
                work.outcomes.append(Outcome(seq, ActionState.IN_DOUBT, error=why, own=False, tries=tries))

    def let_go(self, seq: int) -> None:
        """This call will have no outcome of this process."""
        self._open.pop(seq, None)

    def write_if_due(self) -> None:
        handover = self._handover
        work = handover.work
        if not work:
            handover.waiting_since = None
            return
        now = time.monotonic()
        if handover.waiting_since is None:
            handover.waiting_since = now
        waited = now - handover.waiting_since
        ripe = waited >= (self._limits.outcome_flush_seconds if work.outcomes else self._limits.flush_seconds)
        if not (work.urgent or ripe or handover.closing or self._stops.order is not None):
            return
        handover.work, handover.waiting_since = Work(), None
        try:
            self.write(work)
        except Exception:
            raise
        except BaseException:
            self._give_back(work)
            raise

    def write_outcomes(self) -> None:
        """What calls have come to so far, whatever else waits."""
        handover = self._handover
        handover.gather()
        work = Work(outcomes=handover.work.outcomes, readings=handover.work.readings)
        if work.outcomes or work.readings:
            handover.work.outcomes, handover.work.readings = [], []
            work.uncertain = handover.work.uncertain
            try:
                self._write_batch(work)
            except BaseException:
                self._give_back(work)
                raise

    def _give_back(self, work: Work) -> None:
        """The thread that wrote for itself was interrupted: nobody knows how far it came. The journal finds out."""
        for intent, _ in work.intents:
            self._open.pop(intent.seq, None)
            work.outcomes.append(self.not_called(intent))
        unwritten = self._handover.work
        unwritten.outcomes[:0] = work.outcomes
        unwritten.readings[:0] = work.readings
        unwritten.uncertain = True

    def write(self, work: Work) -> None:
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

    def _write_all(self, work: Work) -> None:
        refusal = self._stops.refusal()
        if refusal is not None:
            work.refuse_calls(refusal)
        if work.outcomes or work.readings or work.intents:
            self._write_batch(work)
        for intent, retry in work.retries:
            self._answer(retry, lambda intent=intent: self._retry(intent))  # type: ignore[misc]
        for intent, again in work.assertions:
            self._answer(again, lambda intent=intent: self._assert(intent))  # type: ignore[misc]
        line = self._line
        for verb, asked in work.asked:
            self._answer(asked, lambda verb=verb: line.through_outage(lambda: verb(line.connection)))  # type: ignore[misc]

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

    def _write_batch(self, work: Work) -> None:
        line = self._line
        sent = time.monotonic()
        intents = [intent for intent, _ in work.intents]
        for outcome in work.outcomes:
            self._open.pop(outcome.seq, None)
        resent = work.uncertain
        try:
            if resent:
                written = self._write_again(work)
            else:
                written = line.verbs.write_forward(self._step, work.outcomes, intents, work.readings)
                line.commits += 1
        except LOST as problem:
            line.reconnect(problem)
            written = self._write_again(work)
            resent = True
        self._heartbeat.see(written)
        self._keep_late(work.outcomes, written)
        if work.intents:
            self._heartbeat.keep_checkpoint()
        for intent, ticket in work.intents:
            if intent.seq not in written.begun:
                ticket.fail(self._refusal(intent, written))
                continue
            self._open[intent.seq] = 1
            self.just_begun = True
            if resent:
                self._answer(ticket, lambda intent=intent: self._assert_or_withdraw(intent))  # type: ignore[misc]
            else:
                ticket.answer(sent)

    def _assert_or_withdraw(self, intent: Intent) -> float:
        try:
            return self._assert(intent)
        except (ActionRefusedError, StepInterrupted):
            self._handover.work.outcomes.append(self.not_called(intent))
            raise

    def _write_again(self, work: Work) -> Written:
        """After an outage nobody knows whether the batch was committed: write only what is not there yet."""
        line, step = self._line, self._step

        def again() -> Written:
            rows = {
                seq: line.verbs.recorded_action(step, seq)
                for seq in [
                    *(o.seq for o in work.outcomes),
                    *(i.seq for i, _ in [*work.intents, *work.readings]),
                ]
            }
            outcomes = [o for o in work.outcomes if (row := rows[o.seq]) and row.state == ActionState.PENDING]
            intents = [i for i, _ in work.intents if rows[i.seq] is None]
            readings = [(i, o) for i, o in work.readings if rows[i.seq] is None]
            written = line.verbs.write_forward(step, outcomes, intents, readings)
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

        return line.through_outage(again)

    def _assert(self, intent: Intent) -> float:
        """All of begin's guards again, and a new time to land; when it was sent."""

        def sent_now() -> tuple[float, Written]:
            return time.monotonic(), self._line.verbs.reassert_if_allowed(self._step, intent)

        sent, written = self._line.through_outage(sent_now)
        self._heartbeat.see(written)
        if intent.seq not in written.begun:
            raise self._refusal(intent, written)
        return sent

    def _retry(self, intent: Intent) -> tuple[int, float]:
        """Another try. If its commit was not heard of, the row tells: it is ours, since the fence is."""
        line, step = self._line, self._step
        tried = False

        def sent_now() -> tuple[float, int | None, Written]:
            nonlocal tried
            if tried:
                row = line.verbs.recorded_action(step, intent.seq)
                if row is not None and row.state == ActionState.PENDING:
                    sent, written = time.monotonic(), line.verbs.reassert_if_allowed(step, intent)
                    return sent, row.tries if intent.seq in written.begun else None, written
            tried = True
            return time.monotonic(), *line.verbs.retry_if_allowed(step, intent)

        sent, tries, written = line.through_outage(sent_now)
        self._heartbeat.see(written)
        if tries is None:
            raise self._refusal(intent, written)
        self._open[intent.seq] = tries
        return tries, sent

    def _keep_late(self, outcomes: list[Outcome], written: Written) -> None:
        line, step = self._line, self._step
        for outcome in outcomes:
            if outcome.seq in written.ended:
                continue
            idempotent = outcome.seq in self.idempotent_seqs

            def late(outcome: Outcome = outcome, idempotent: bool = idempotent) -> str:
                return LateVerbs(line.connection).record_late(step, outcome, idempotent=idempotent)

            log.warning(
                "%s: late answer of action %d: %s", step.label, outcome.seq, line.through_outage(late)
            )

    def _refusal(self, intent: Intent, written: Written) -> BaseException:
        if self._stops.order is not None:
            return self._stops.order.error()
        return ActionRefusedError(
            f"{intent.name}: the log did not let it begin (saga {written.saga_state}, step {written.step_state}, "
            f"fence {written.fence}); nothing was called"
        )
