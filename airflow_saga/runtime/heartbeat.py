"""The heartbeat of a step: renews its lease, keeps its newest checkpoint, and learns what the saga wants.

Invariants: what a write or a beat learns of the saga becomes an order to stop before anybody is answered; a checkpoint
that was taken is kept with the next beat, also if the one it was taken for did not reach the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from airflow_saga.core.records import StepRow
from airflow_saga.core.states import SagaState, StepState
from airflow_saga.runtime.line import LOST, StoreLine
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.stops import Stop, StopOrder, StopOrders
from airflow_saga.store.steps import Written


class Heartbeat:
    """See the module. Used by whoever holds the pen.

    :param abandon_all: called with why, when somebody asked to stop now.
    :ivar next_at: monotonic seconds; 0 when the saga may have changed.
    :ivar checkpoint: gives the newest checkpoint's text, or None if that one was taken already.
    """

    def __init__(
        self,
        line: StoreLine,
        step: StepRow,
        limits: Limits,
        stops: StopOrders,
        abandon_all: Callable[[str], None],
    ) -> None:
        self.next_at = 0.0
        self.checkpoint: Callable[[], str | None] | None = None
        self._line = line
        self._step = step
        self._limits = limits
        self._stops = stops
        self._abandon_all = abandon_all
        self._kept: str | None = None

    def see(self, written: Written) -> None:
        step = self._step
        if written.fence != step.fence:
            message = f"{step.label}: a newer attempt or the undo owns this step (fence {written.fence})"
            self._stops.give(StopOrder(Stop.FENCED, message))
        elif written.saga_state != SagaState.RUNNING and step.state == StepState.RUNNING:
            self.next_at = 0.0
            self.beat_if_due()  # it tells who decided to stop, and why

    def beat_if_due(self) -> None:
        now = time.monotonic()
        if now < self.next_at:
            return
        self.next_at = now + self._limits.heartbeat_seconds
        try:
            self.beat()
        except LOST as problem:
            self._line.reconnect(problem)

    def beat(self) -> None:
        """Renew the lease, keep the newest checkpoint, and learn what the saga wants."""
        step = self._step
        if self.checkpoint is not None:
            self._kept = self.checkpoint() or self._kept
        beat = self._line.verbs.heartbeat_if_held(
            step, self._limits.lease_seconds, self._kept, self._kept is not None
        )
        self._kept = None
        forward = step.state == StepState.RUNNING
        if not beat.held:
            if forward and not self._stops.body_running:
                return  # the step has just been finished or stopped by this very process
            self._stops.give(
                StopOrder(Stop.FENCED, f"{step.label}: a newer attempt or the undo owns this step")
            )
        elif forward and beat.state != SagaState.RUNNING:
            who = f"by {beat.actor or 'Airflow'}" + (f" ({beat.reason})" if beat.reason else "")
            self._stops.give(StopOrder(Stop.CANCELLED, f"the saga is being stopped {who}", beat.mode))
        if forward and beat.stop_now and beat.state == SagaState.CANCELLING:
            self._abandon_all("stop now was asked for")
