"""One saga in the order of time: what was called, what was decided, what was undone, and what came late.

An action has one row, with its forward times and the times of its undo, so it gives up to two entries; decisions stand
in the history. Nothing is inferred from a clock of ours: every time is the database's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from airflow_saga.core.records import ActionRow
from airflow_saga.core.states import ActionState, Effect
from airflow_saga.store.reader import SagaView
from airflow_saga.telling.display import Display, seconds_between

_UNDO_ENDED = frozenset(
    {
        ActionState.COMPENSATED,
        ActionState.COMPENSATION_FAILED,
        ActionState.NON_COMPENSABLE,
        ActionState.IN_DOUBT,
    }
)


@dataclass(frozen=True)
class Entry:
    """Something that happened.

    :ivar kind: ``saga``, ``step``, ``action``, ``read``, ``undo``, ``request``, ``person`` or ``late``.
    :ivar seconds: how long it took, where both ends are known; how long so far, where it is under way.
    :ivar key: the idempotency key that the outside world saw.
    """

    at: datetime
    kind: str
    what: str
    who: str | None = None
    step: str | None = None
    action: int | None = None
    state: str | None = None
    seconds: float | None = None
    tries: int | None = None
    key: str | None = None
    detail: str | None = None
    params: Any = None
    result: Any = None
    error: str | None = None

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def timeline(view: SagaView, display: Display, now: datetime) -> list[Entry]:
    """Everything that is known of a saga, oldest first.

    :param now: the database's clock, for what is still under way.
    """
    entries = [*_decisions(view, display)]
    labels = {step.step_id: step.label for step in view.steps}
    for action in view.actions:
        entries.append(_call(action, labels[action.step_id], display, now))
        entries.extend(_undo(action, labels[action.step_id], display, now))
    return sorted(entries, key=lambda entry: entry.at)


def forward_state(action: ActionRow) -> str:
    """How the call itself ended, whatever an undo has made of it since."""
    if action.state in (ActionState.PENDING, ActionState.FAILED):
        return action.state
    return (
        ActionState.IN_DOUBT if action.in_doubt or action.state == ActionState.IN_DOUBT else ActionState.DONE
    )


def was_undone_or_tried(action: ActionRow) -> bool:
    return action.undo_begun_at is not None or action.undo_finished_at is not None


def call_seconds(action: ActionRow, now: datetime) -> float | None:
    """How long the call took, or has taken so far; None where its times do not tell."""
    state = forward_state(action)
    if state == ActionState.PENDING:
        return seconds_between(action.begun_at, now)
    if state == ActionState.IN_DOUBT or action.note or action.reopened or action.effect == Effect.READ_ONLY:
        # A sweep, a person or a probe set the end, and a read is written when it is over: it says nothing of the call.
        return None
    return seconds_between(action.begun_at, action.finished_at)


def _call(action: ActionRow, step: str, display: Display, now: datetime) -> Entry:
    return Entry(
        at=action.begun_at,
        kind="read" if action.effect == Effect.READ_ONLY else "action",
        what=action.name,
        step=step,
        action=action.action_id,
        state=forward_state(action),
        seconds=call_seconds(action, now),
        tries=action.tries,
        key=None if action.effect == Effect.READ_ONLY else action.key,
        detail=_twin(action) or display.text(action.note),
        params=display.value(action.params),
        result="<not stored>" if action.result_lost else display.value(action.result),
        error=None if was_undone_or_tried(action) else display.text(action.error),
    )


def _twin(action: ActionRow) -> str | None:
    return f"a second effect beside action {action.twin_of}, told of late" if action.twin_of else None


def _undo(action: ActionRow, step: str, display: Display, now: datetime) -> Iterator[Entry]:
    begun = action.undo_begun_at or action.undo_finished_at
    if begun is None:
        return
    ended = action.undo_finished_at if action.state in _UNDO_ENDED else now
    waits = None
    if action.reconcile_at is not None:
        waits = f"awaited, asked again at {action.reconcile_at:%Y-%m-%d %H:%M:%S}+00:00"
        waits += f" (waiting for {action.waiting_for})" if action.waiting_for else ""
    yield Entry(
        at=begun,
        kind="undo",
        what=f"undo {action.name}",
        step=step,
        action=action.action_id,
        state=action.state,
        seconds=seconds_between(action.undo_begun_at, ended),
        tries=action.undo_tries,
        key=action.undo_key,
        detail=display.text(waits),
        error=display.text(action.error),
    )


def _decisions(view: SagaView, display: Display) -> Iterator[Entry]:
    labels = {step.step_id: step.label for step in view.steps}
    yield Entry(at=view.saga.created_at, kind="saga", what="saga seen for the first time")
    for event in view.events:
        yield Entry(
            at=event["at"],
            kind=_kind(event),
            what=event["what"],
            who=display.text(event["actor"]),
            step=labels.get(event["step_id"]),
            action=event["action_id"],
            detail=display.text(event["detail"]),
        )


def _kind(event: dict[str, Any]) -> str:
    if event["what"] == "late answer":
        return "late"
    if event["request_id"] is not None:
        return "request"
    if event["action_id"] is not None:
        return "person"
    return "saga" if event["step_id"] is None else "step"
