"""The orders to stop a step, and whether anything may begin in it at all.

Invariant: an order only ever gives way to one as strong or stronger, and once there is one, or the body has ended, no
further action begins.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from airflow_saga.core.errors import (
    NotInSagaError,
    SagaCancelledError,
    StepCutOffError,
    StepFencedError,
    StepInterrupted,
    StepKilledError,
    StepOverdueError,
)
from airflow_saga.core.records import StepRow

log = logging.getLogger(__name__)


class Stop(StrEnum):
    """Why no further action begins, strongest last."""

    KILLED = "killed"
    OVERDUE = "overdue"
    CANCELLED = "cancelled"
    FENCED = "fenced"
    CUT_OFF = "cut off"


@dataclass(frozen=True)
class StopOrder:
    """:ivar message: who decided what, for the task log.
    :ivar age_seconds: how long ago a cancel was decided, by the database's clock, when it was seen.
    """

    kind: Stop
    message: str
    mode: str | None = None
    age_seconds: float | None = None

    def error(self) -> BaseException:
        return _ERRORS[self.kind](self.message)


_ERRORS: dict[Stop, type[StepInterrupted]] = {
    Stop.KILLED: StepKilledError,
    Stop.OVERDUE: StepOverdueError,
    Stop.CANCELLED: SagaCancelledError,
    Stop.FENCED: StepFencedError,
    Stop.CUT_OFF: StepCutOffError,
}


class StopOrders:
    """See the module. One per step process.

    :ivar order: the strongest so far; a signal handler may set the first one, and nothing else.
    :ivar given: set once the order was told to everybody who waits.
    :ivar given_at: monotonic seconds, moved on while calls are under way: since then the body should have returned.
    """

    def __init__(self, step: StepRow) -> None:
        self.order: StopOrder | None = None
        self.given = threading.Event()
        self.given_at: float | None = None
        self.body_running = False
        self._step = step
        self._listeners: list[Callable[[], object]] = []

    def listen(self, listener: Callable[[], object]) -> None:
        self._listeners.append(listener)
        if self.given.is_set():
            listener()

    def unlisten(self, listener: Callable[[], object]) -> None:
        self._listeners.remove(listener)

    def give(self, order: StopOrder) -> None:
        ranks = list(Stop)
        known = self.order
        if known is not None and ranks.index(known.kind) > ranks.index(order.kind):
            return
        self.order = order
        if self.given_at is None or known is None or known.kind is Stop.KILLED:
            self.given_at = time.monotonic()
            log.warning("%s", order.message)
        self.given.set()
        for listener in tuple(self._listeners):
            listener()

    def refusal(self) -> BaseException | None:
        """Why no call may begin now, whatever the log says."""
        if self.order is not None:
            return self.order.error()
        if not self.body_running:
            return NotInSagaError(f"{self._step.label}: the body of the step has ended; nothing was called")
        return None

    @property
    def killed(self) -> bool:
        return self.order is not None and self.order.kind is Stop.KILLED
