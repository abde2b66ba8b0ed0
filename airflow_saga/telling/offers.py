"""Which verbs a person may use now, and what each would do: said before, so that nobody presses to find out.

An offer is advice. Whether a verb is legal is decided by the store when it is sent, by whatever is true then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from airflow_saga.core.states import (
    OPEN_REQUEST_STATES,
    ActionState,
    Effect,
    Mode,
    RequestState,
    SagaState,
    StepState,
)
from airflow_saga.store.reader import SagaView


@dataclass(frozen=True)
class Offer:
    """One button.

    :ivar verb: as the API and the command line call it.
    :ivar body: what is sent with it.
    :ivar about: what will happen, for the confirmation.
    :ivar shows_plan: the plan is shown first, and sent by its hash.
    """

    verb: str
    label: str
    about: str
    body: dict[str, Any] = field(default_factory=dict)
    is_first: bool = False
    shows_plan: bool = False
    takes_reason: bool = True


_UNDONE = "in reverse, newest first. What cannot be undone is named and put before a person."
_STOP = Offer(
    "cancel",
    "Stop and undo",
    f"No new action begins; a call under way may end. Then what was done is undone {_UNDONE}",
    is_first=True,
)
_KEEP = Offer(
    "cancel",
    "Stop, keep effects",
    "No new action begins; a call under way may end. Nothing is undone: clear the run's tasks to go on, or undo it "
    "later.",
    {"keep": True},
)
_NOW = Offer(
    "cancel",
    "Stop now",
    "The call under way is abandoned. Nobody knows then whether it took effect; the undo finds out, or asks a person.",
    {"now": True},
)
_AFTER_ALL = Offer(
    "cancel", "Undo after all", f"Once it has stopped, what was done is undone {_UNDONE}", is_first=True
)
_UNDO = Offer("undo", "Undo", f"What was done is undone {_UNDONE}", is_first=True, shows_plan=True)
_AGAIN = Offer(
    "undo",
    "Try the rest again",
    "What still stands is undone once more; what is undone already is not touched.",
    is_first=True,
    shows_plan=True,
)
_RELEASE = Offer(
    "release",
    "Let the undo go on",
    "It was held since many sagas failed at once, which looks like an outage. It goes on now.",
    is_first=True,
    takes_reason=False,
)

_PROBE = Offer(
    "probe",
    "Ask what became of it",
    "The verify probes of what is in doubt are asked. Nothing else is called, and nothing is decided by it; what they "
    "say is shown here.",
    takes_reason=False,
)
_AT_REST = (SagaState.COMPLETED, SagaState.FAILED, SagaState.SUSPENDED)


def offers(view: SagaView, now: datetime) -> Iterator[Offer]:
    """What may be decided about the saga as a whole, the likeliest first."""
    saga = view.saga
    requests = {request.state for request in view.requests}
    if RequestState.HELD in requests:
        yield _RELEASE
    if saga.state in (SagaState.PENDING, SagaState.RUNNING):
        yield from (_STOP, _KEEP)
    elif saga.state == SagaState.CANCELLING:
        if saga.mode == Mode.KEEP:
            yield _AFTER_ALL
        elif not saga.stop_now and _is_at_work(view, now):
            yield _NOW
    elif not requests & OPEN_REQUEST_STATES and _could_be_undone(view):
        yield _AGAIN if saga.state == SagaState.PARTIALLY_CANCELLED else _UNDO
    if saga.state != SagaState.CANCELLING and any(
        action.residual and action.state == ActionState.IN_DOUBT for action in view.actions
    ):
        yield _PROBE


def undoable_from(view: SagaView, now: datetime) -> frozenset[int]:
    """The actions from which on the saga may be undone now, the others staying."""
    requests = {request.state for request in view.requests}
    if view.saga.state not in _AT_REST or requests & OPEN_REQUEST_STATES or _is_at_work(view, now):
        return frozenset()
    generations = {step.step_id: step.generation for step in view.steps}
    return frozenset(
        action.action_id
        for action in view.actions
        if action.residual and action.generation == generations[action.step_id]
    )


def _is_at_work(view: SagaView, now: datetime) -> bool:
    return any(
        step.state == StepState.RUNNING and step.lease_until is not None and step.lease_until > now
        for step in view.steps
    )


def _could_be_undone(view: SagaView) -> bool:
    return any(
        action.residual and action.effect == Effect.COMPENSABLE and action.reconcile_at is None
        for action in view.actions
    )
