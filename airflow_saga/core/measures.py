"""What is measured, as data: each name once, with its kind, its unit, its tags and what it means.

Whoever measures hands one of these over, not a string, and the table in the README and the names that the dashboard may
use are read from here. So a name cannot be told that is not documented, nor drawn that is not told.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How a backend keeps it."""

    COUNTER = "counter"
    TIMING = "timing"
    GAUGE = "gauge"


@dataclass(frozen=True)
class Measure:
    """:ivar tags: of bounded values only; never a parameter, a result or the text of an error."""

    name: str
    kind: Kind
    unit: str
    tags: tuple[str, ...]
    meaning: str


def _counter(name: str, tags: str, meaning: str, unit: str = "calls") -> Measure:
    return Measure(name, Kind.COUNTER, unit, tuple(tags.split()), meaning)


def _timing(name: str, tags: str, meaning: str) -> Measure:
    return Measure(name, Kind.TIMING, "ms", tuple(tags.split()), meaning)


def _gauge(name: str, unit: str, meaning: str) -> Measure:
    return Measure(name, Kind.GAUGE, unit, (), meaning)


_OF_ACTION = "dag_id effect"
ACTION_BEGUN = _counter("saga.action.begun", _OF_ACTION, "calls of actions that began, each try counted")
ACTION_DONE = _counter("saga.action.done", _OF_ACTION, "calls that took effect")
ACTION_FAILED = _counter("saga.action.failed", _OF_ACTION, "calls that proved to have no effect")
ACTION_IN_DOUBT = _counter("saga.action.in_doubt", _OF_ACTION, "calls of which nobody knew what they did")
ACTION_DEFERRED = _counter("saga.action.deferred", _OF_ACTION, "calls that were left to Airflow's triggerer")

_OF_DAG = "dag_id"
COMPENSATION_BEGUN = _counter(
    "saga.compensation.begun", _OF_DAG, "calls of compensations that began, each try counted"
)
COMPENSATION_DONE = _counter("saga.compensation.done", _OF_DAG, "compensations that took effect")
COMPENSATION_FAILED = _counter("saga.compensation.failed", _OF_DAG, "tries of compensations that failed")
COMPENSATION_LATER = _counter(
    "saga.compensation.later", _OF_DAG, "compensations that are under way or wait for a service, with a date"
)
UNDO_STANDING = _counter(
    "saga.undo.standing", _OF_DAG, "effects that an undo could not take back and named", "actions"
)
UNDO_EXPIRED = _counter(
    "saga.undo.expired", _OF_DAG, "sagas whose undo had not ended by its deadline", "sagas"
)

CANCEL_SEEN = _timing("saga.cancel.seen", _OF_DAG, "from the decision to stop until a running step saw it")
CANCEL_STOPPED = _timing("saga.cancel.stopped", _OF_DAG, "from there until that step had stopped")
CANCEL_SETTLED = _timing(
    "saga.cancel.settled", "dag_id cause", "from the request of an undo until all of it was settled"
)
UNDO_DURATION = _timing(
    "saga.undo.duration", "dag_id cause", "from the plan of an undo until all was settled"
)

OPEN_RESIDUALS = _gauge(
    "saga.open.residuals", "actions", "effects that stand, or may, in sagas that are undone or partly undone"
)
OPEN_NEEDS_PERSON = _gauge(
    "saga.open.needs_person", "sagas", "sagas that nothing will move by itself, up to 1000"
)
OPEN_NEEDS_PERSON_AGE = _gauge(
    "saga.open.needs_person_age", "seconds", "since the longest waiting of these last moved; 0 without any"
)
OPEN_UNDO_REQUESTS = _gauge(
    "saga.open.undo_requests", "requests", "undos that were asked for and have not ended"
)
OPEN_UNDO_REQUEST_AGE = _gauge(
    "saga.open.undo_request_age", "seconds", "since the oldest of these was asked for; 0 without any"
)

MEASURES = (
    ACTION_BEGUN,
    ACTION_DONE,
    ACTION_FAILED,
    ACTION_IN_DOUBT,
    ACTION_DEFERRED,
    COMPENSATION_BEGUN,
    COMPENSATION_DONE,
    COMPENSATION_FAILED,
    COMPENSATION_LATER,
    UNDO_STANDING,
    UNDO_EXPIRED,
    CANCEL_SEEN,
    CANCEL_STOPPED,
    CANCEL_SETTLED,
    UNDO_DURATION,
    OPEN_RESIDUALS,
    OPEN_NEEDS_PERSON,
    OPEN_NEEDS_PERSON_AGE,
    OPEN_UNDO_REQUESTS,
    OPEN_UNDO_REQUEST_AGE,
)


def table() -> str:
    """All of them, as the README shows them."""
    rows = ["| name | kind, unit | tags | what it says |", "|---|---|---|---|"]
    for each in MEASURES:
        tags = ", ".join(f"`{tag}`" for tag in each.tags) or "–"
        rows.append(f"| `{each.name}` | {each.kind}, {each.unit} | {tags} | {each.meaning} |")
    return "\n".join(rows)
