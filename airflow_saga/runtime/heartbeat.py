"""The heartbeat of a step: renews its lease, keeps its newest checkpoint, and learns what the saga wants.

Invariants: what a write or a beat learns of the saga becomes an order to stop before anybody is answered; a checkpoint
that was taken is kept with the next beat, also if the one it was taken for did not reach the store.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from airflow_saga.core.records import StepRow
from airflow_saga.core.states import SagaState, StepState
from airflow_saga.runtime.line import LOST, StoreLine
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.stops import Stop, StopOrder, StopOrders
from airflow_saga.store.steps import Checkpoint, Written

DUE = 0.0
"""The next beat is wanted at once: the saga may have changed."""
BEATS_PER_LEASE = 3
"""A lease survives the loss of two of them."""


class Heartbeat:
    """See the module. Used by whoever holds the pen.

    :param abandon_all: called with why, when somebody asked to stop now.
    :ivar next_at: monotonic seconds; ``DUE`` when the saga may have changed.
    :ivar flush_at: monotonic seconds; when a checkpoint that waits has waited long enough. Set by whoever makes it.
    :ivar write_outcomes: writes what calls have come to so far.
    :ivar checkpoint: gives the newest checkpoint, or None if that one was taken already.
    """

    def __init__(
        self,
        line: StoreLine,
        step: StepRow,
        limits: Limits,
        stops: StopOrders,
        abandon_all: Callable[[str], None],
    ) -> None:
        self.next_at = time.monotonic() + limits.heartbeat_seconds  # the attach was the first
        self.flush_at = math.inf
        self.checkpoint: Callable[[], Checkpoint | None] | None = None
        self.write_outcomes: Callable[[], None] = lambda: None
        self._line = line
        self._step = step
        self._limits = limits
        self._stops = stops
        self._abandon_all = abandon_all
        self._kept: Checkpoint | None = None
        self._renew_at = self.next_at + limits.lease_seconds / BEATS_PER_LEASE - limits.heartbeat_seconds
        """Monotonic seconds; the lease is not left older than this by writes that stand in for a beat."""

    @property
    def due_at(self) -> float:
        return min(self.next_at, self.flush_at)

    def see(self, written: Written) -> None:
        step = self._step
        if written.fence != step.fence:
            message = f"{step.label}: a newer attempt or the undo owns this step (fence {written.fence})"
            self._stops.give(StopOrder(Stop.FENCED, message))
        elif written.saga_state != SagaState.RUNNING and step.state == StepState.RUNNING:
            self.next_at = DUE
            self.beat_if_due()  # it tells who decided to stop, and why
        else:
            self._put_off()

    def _put_off(self) -> None:
        """A write that finds the saga running has learned what a beat would: until the lease has to be renewed, the
        next beat is due a whole interval later. One that is due already, after a notification, stays due; a checkpoint
        that waits has a date of its own."""
        now = time.monotonic()
        if now < self.next_at:
            self.next_at = min(now + self._limits.heartbeat_seconds, self._renew_at)

    def _take_checkpoint(self) -> bool:
        """Whether there is a new one; whoever takes it keeps it at once, since it has no date from now on."""
        self.flush_at = math.inf  # before it is taken: the next one sets it again
        if self.checkpoint is not None:
            self._kept = self.checkpoint() or self._kept
        return self._kept is not None

    def keep_checkpoint(self) -> None:
        """The newest checkpoint is committed when this returns, if there is a new one."""
        if self._take_checkpoint():
            self.next_at = DUE
            self.beat_if_due()

    def beat_if_due(self) -> None:
        now = time.monotonic()
        if now < self.due_at:
            return
        self.next_at = now + self._limits.heartbeat_seconds
        self._renew_at = now + self._limits.lease_seconds / BEATS_PER_LEASE
        try:
            self.beat()
        except LOST as problem:
            self._line.reconnect(problem)

    def beat(self) -> None:
        """Renew the lease, keep the newest checkpoint, and learn what the saga wants."""
        step = self._step
        if self._take_checkpoint():
            self.write_outcomes()  # a checkpoint never knows of a call that the log does not
        beat = self._line.verbs.heartbeat_if_held(step, self._limits.lease_seconds, self._kept)
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
            message, age = f"the saga is being stopped {who}", beat.cancelled_for_seconds
            self._stops.give(StopOrder(Stop.CANCELLED, message, beat.mode, age))
        if forward and beat.stop_now and beat.state == SagaState.CANCELLING:
            self._abandon_all("stop now was asked for")
