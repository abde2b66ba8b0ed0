"""The guard of the calls under way: ends each at its deadline, and the process where nothing else helps.

Invariants: the log says IN_DOUBT before a call is interrupted, unless the store is away (then the row stays PENDING,
which whoever sweeps reads as in doubt); what can neither be interrupted nor stopped ends with the process, so that
nothing begins after it.
"""

from __future__ import annotations

import logging
import time

from airflow_saga.core.records import Outcome, StepRow
from airflow_saga.core.states import ActionState
from airflow_saga.runtime.calls import CallRegister, RunningCall, end_process
from airflow_saga.runtime.handover import Handover, Work
from airflow_saga.runtime.line import StoreLine
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.stops import Stop, StopOrder, StopOrders
from airflow_saga.runtime.writer import Writer

log = logging.getLogger(__name__)


class CallGuard:
    """See the module. All but :meth:`watch_alone` is for whoever holds the pen.

    :param ends_by: by the monotonic clock, in seconds: then no further action begins, whatever the body does.
    """

    def __init__(
        self,
        calls: CallRegister,
        step: StepRow,
        limits: Limits,
        stops: StopOrders,
        handover: Handover,
        line: StoreLine,
        writer: Writer,
        ends_by: float | None,
    ) -> None:
        self._calls = calls
        self._step = step
        self._limits = limits
        self._stops = stops
        self._handover = handover
        self._line = line
        self._writer = writer
        self._ends_by = ends_by

    def watch(self) -> None:
        stops = self._stops
        if stops.order is not None and not stops.given.is_set():
            stops.give(stops.order)  # request_kill only set the flag
        now = time.monotonic()
        overdue = self._ends_by is not None and now >= self._ends_by and stops.body_running
        if overdue and stops.order is None:
            message = f"{self._step.label}: its execution_timeout is over and its body goes on"
            stops.give(StopOrder(Stop.OVERDUE, message))
        for call in self._calls.overdue(now):
            self._abandon(call, f"{call.name} did not answer within {call.timeout_seconds:g} s")
        for call in self._calls.undelivered():
            self._calls.interrupt(call)
        for call in self._calls.stuck(now, self._limits.abandon_grace_seconds):
            self._end_process(f"{call.name} was abandoned ({call.why}) and cannot be interrupted")
        if stops.given_at is None or stops.killed or not stops.body_running or len(self._calls):
            if len(self._calls) and stops.given_at is not None:
                stops.given_at = max(stops.given_at, now)
            return
        if now >= stops.given_at + self._limits.stop_grace_seconds:
            self._end_process("it has to stop and the body of the step did not return")

    def abandon_all(self, why: str) -> None:
        for call in self._calls.abandonable():
            self._abandon(call, f"{call.name}: {why}")

    def _abandon(self, call: RunningCall, why: str) -> None:
        """The log first: IN_DOUBT, then the interruption. What the call may still do lands by ``lands_by``."""
        if not self._calls.mark_abandoned(call, why):
            return
        log.warning("%s; abandoned, its outcome is in doubt", why)
        if call.seq is not None:
            doubt = Outcome(call.seq, ActionState.IN_DOUBT, error=why, own=False, tries=call.tries)
            handover = self._handover
            handover.gather()
            handover.work.outcomes.append(doubt)
            work, handover.work, handover.waiting_since = handover.work, Work(), None
            self._writer.write(work)
        self._calls.interrupt(call)

    def _end_process(self, reason: str) -> None:
        def last_words() -> None:
            self._handover.gather()
            work = self._handover.work
            if work.outcomes or work.readings:
                self._line.verbs.write_forward(self._step, work.outcomes, [], work.readings)
            self._line.verbs.stop_if_held(self._step)

        end_process(f"{self._step.label}: {reason}", last_words)

    # -- while the journal itself waits for the store -----------------------------------------------------------------

    def watch_alone(self) -> None:
        """The watch: deadlines hold during an outage too. The row stays PENDING until the store is back; if it does
        not come back, whoever sweeps finds it in doubt."""
        now = time.monotonic()
        for call in self._calls.overdue(now):
            why = f"{call.name} did not answer within {call.timeout_seconds:g} s"
            if self._calls.mark_abandoned(call, why):
                log.warning("%s; abandoned while the saga store is away, its outcome is in doubt", why)
                if call.seq is not None:
                    doubt = Outcome(call.seq, ActionState.IN_DOUBT, error=why, own=False, tries=call.tries)
                    self._handover.queue.append(lambda work, doubt=doubt: work.outcomes.append(doubt))  # type: ignore[misc]
                self._calls.interrupt(call)
        for call in self._calls.undelivered():
            self._calls.interrupt(call)
        for call in self._calls.stuck(now, self._limits.abandon_grace_seconds):
            end_process(f"{self._step.label}: {call.name} was abandoned and cannot be interrupted")
        stops = self._stops
        hung = stops.body_running and stops.given_at is not None and not stops.killed and not len(self._calls)
        if hung and now >= (stops.given_at or now) + self._limits.stop_grace_seconds:
            end_process(f"{self._step.label}: it has to stop and the body of the step did not return")
