"""The four state machines as data: saga, step, action, undo request.

The tables here are the contract (they are printed in the README, seeded into the database, which refuses every other
move, and read by the model that checks the protocol). Change one only together with the model and its mutants.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Machine = Literal["saga", "step", "action", "request"]


class SagaState(StrEnum):
    """One DAG run."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLING = "CANCELLING"
    SUSPENDED = "SUSPENDED"
    CANCELLED = "CANCELLED"
    PARTIALLY_CANCELLED = "PARTIALLY_CANCELLED"


class StepState(StrEnum):
    """One task instance that can act."""

    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    UNDOING = "UNDOING"
    UNDONE = "UNDONE"
    PARTLY_UNDONE = "PARTLY_UNDONE"


class ActionState(StrEnum):
    """One recorded call."""

    PENDING = "PENDING"
    DONE = "DONE"
    FAILED = "FAILED"
    IN_DOUBT = "IN_DOUBT"
    COMPENSATING = "COMPENSATING"
    COMPENSATED = "COMPENSATED"
    COMPENSATION_FAILED = "COMPENSATION_FAILED"
    NON_COMPENSABLE = "NON_COMPENSABLE"
    ACCEPTED = "ACCEPTED"


class RequestState(StrEnum):
    """One wish to undo."""

    HINTED = "HINTED"
    HELD = "HELD"
    REQUESTED = "REQUESTED"
    QUEUED = "QUEUED"
    FROZEN = "FROZEN"
    SETTLED = "SETTLED"
    WITHDRAWN = "WITHDRAWN"
    EXPIRED = "EXPIRED"


class Effect(StrEnum):
    """What an action may do to the world, and what can be done about it."""

    COMPENSABLE = "COMPENSABLE"
    NON_COMPENSABLE = "NON_COMPENSABLE"
    READ_ONLY = "READ_ONLY"


class Mode(StrEnum):
    """What CANCELLING leads to."""

    UNDO = "undo"
    KEEP = "keep"


class Cause(StrEnum):
    """Why an undo is asked for, weakest first (see ``CAUSE_RANK``)."""

    LOST_WORKER = "lost_worker"
    TIMEOUT = "timeout"
    DAGRUN_TIMEOUT = "dagrun_timeout"
    FAILURE = "failure"
    LATE = "late"
    DUE = "due"
    RETRY = "retry"
    REDO = "redo"
    DIVERGED = "diverged"
    REWIND = "rewind"
    MARKED_FAILED = "marked_failed"
    USER = "user"


CAUSE_RANK: dict[str, int] = {cause.value: rank for rank, cause in enumerate(Cause)}
HINT_CAUSES: frozenset[str] = frozenset(
    {Cause.LOST_WORKER, Cause.TIMEOUT, Cause.DAGRUN_TIMEOUT, Cause.FAILURE}
)
"""Causes that write a hint first: freezing it decides, an attach withdraws it."""

GOES_ON_CAUSES: frozenset[str] = frozenset({Cause.DUE, Cause.LATE, Cause.RETRY})
"""Causes of an undo that goes on with what an earlier one began: what that one left to people stays left to people."""

NO_POLICY_CAUSES: frozenset[str] = frozenset({"incomplete", "refused"})
"""Causes of FAILED to which ``on_failure`` does not apply."""

SETTLED_ACTION_STATES: frozenset[str] = frozenset(
    {
        ActionState.FAILED,
        ActionState.COMPENSATED,
        ActionState.COMPENSATION_FAILED,
        ActionState.NON_COMPENSABLE,
        ActionState.ACCEPTED,
    }
)
"""Settled whatever else the row says, COMPENSATION_FAILED until a person asks for another undo. IN_DOUBT after its
probe and COMPENSATING with a date are settled too."""

RESIDUAL_ACTION_STATES: frozenset[str] = frozenset(
    {
        ActionState.PENDING,
        ActionState.DONE,
        ActionState.IN_DOUBT,
        ActionState.COMPENSATING,
        ActionState.COMPENSATION_FAILED,
        ActionState.NON_COMPENSABLE,
    }
)
"""An effectful action in one of these stands, or may stand."""

RETRIABLE_ACTION_STATES: frozenset[str] = frozenset(
    {ActionState.IN_DOUBT, ActionState.COMPENSATING, ActionState.COMPENSATION_FAILED}
)
"""An undo that has ended tried it, and a person may have it tried again alone."""

OPEN_REQUEST_STATES: frozenset[str] = frozenset({RequestState.REQUESTED, RequestState.FROZEN})
CLOSED_SAGA_STATES: frozenset[str] = frozenset({SagaState.COMPLETED, SagaState.CANCELLED, SagaState.FAILED})


@dataclass(frozen=True)
class Move:
    """One row of a table.

    :param source: the state before, None for a row that does not exist yet.
    :param guard: what else must hold, in words; the verb of that name in the store checks it.
    """

    machine: Machine
    event: str
    source: str | None
    target: str
    guard: str
    who: str


def _moves(machine: Machine, event: str, sources: str, targets: str, guard: str, who: str) -> list[Move]:
    return [
        Move(machine, event, None if source == "-" else source, target, guard, who)
        for source in sources.split()
        for target in targets.split()
    ]


SAGA_MOVES: tuple[Move, ...] = (
    *_moves("saga", "open", "-", "PENDING", "the run was seen to start", "listener"),
    *_moves("saga", "start", "- PENDING", "RUNNING", "first step attaches", "step"),
    *_moves("saga", "cancel", "- PENDING", "CANCELLED", "no step ever attached", "requester"),
    *_moves(
        "saga", "none acted", "PENDING", "COMPLETED CANCELLED", "run ended without a saga step", "reconciler"
    ),
    *_moves(
        "saga",
        "complete",
        "RUNNING",
        "COMPLETED",
        "run success, no open request, no lease",
        "reader of the run",
    ),
    *_moves(
        "saga", "fail", "RUNNING", "FAILED", "run failed, or success with an undone step", "reader of the run"
    ),
    *_moves("saga", "reopen", "COMPLETED FAILED", "RUNNING", "a step attaches", "step"),
    *_moves(
        "saga", "reopen", "CANCELLED SUSPENDED", "RUNNING", "a step attaches, cleared since the stop", "step"
    ),
    *_moves(
        "saga", "cancel", "RUNNING CANCELLING", "CANCELLING", "not yet mode undo; request as well", "person"
    ),
    *_moves(
        "saga",
        "undo",
        "RUNNING COMPLETED FAILED SUSPENDED PARTIALLY_CANCELLED CANCELLING",
        "CANCELLING",
        "explicit, or marked failed; request in the same transaction",
        "requester",
    ),
    *_moves("saga", "cancel keep", "RUNNING", "CANCELLING", "no open request", "person"),
    *_moves(
        "saga", "policy", "FAILED", "CANCELLING", "at freeze: still FAILED, on_failure=compensate", "undo run"
    ),
    *_moves(
        "saga", "suspend", "CANCELLING", "SUSPENDED", "mode keep, no lease, no open request", "last step"
    ),
    *_moves(
        "saga", "settle", "CANCELLING", "CANCELLED PARTIALLY_CANCELLED", "all actions settled", "undo run"
    ),
    *_moves(
        "saga",
        "settle",
        "CANCELLING",
        "SUSPENDED",
        "undo from a place: it is undone, the rest is kept",
        "undo run",
    ),
    *_moves(
        "saga",
        "expire",
        "CANCELLING",
        "PARTIALLY_CANCELLED CANCELLED SUSPENDED",
        "deadline over",
        "reconciler",
    ),
    *_moves(
        "saga", "retry undo", "PARTIALLY_CANCELLED", "CANCELLING", "a person, or a date is due", "person"
    ),
    *_moves(
        "saga",
        "late",
        "CANCELLED PARTIALLY_CANCELLED SUSPENDED",
        "CANCELLING",
        "a late answer reopened",
        "writer",
    ),
    *_moves("saga", "resolve", "PARTIALLY_CANCELLED", "CANCELLED", "last residual resolved", "person"),
    *_moves(
        "saga",
        "resolve",
        "PARTIALLY_CANCELLED",
        "SUSPENDED",
        "the same, and the rest is kept",
        "person",
    ),
)

STEP_MOVES: tuple[Move, ...] = (
    *_moves("step", "attach", "-", "RUNNING", "saga PENDING/RUNNING or reopened, no undone upstream", "step"),
    *_moves("step", "attach", "RUNNING STOPPED", "RUNNING", "as above, not the same attempt twice", "step"),
    *_moves("step", "replay", "SUCCEEDED", "SUCCEEDED", "this task instance was not itself cleared", "step"),
    *_moves("step", "redo", "SUCCEEDED", "SUCCEEDED", "cleared, and all later steps that acted too", "step"),
    *_moves("step", "begin anew", "UNDONE", "RUNNING", "as attach, no open request covers it", "step"),
    *_moves("step", "finish", "RUNNING", "SUCCEEDED", "newest fence, no PENDING", "step"),
    *_moves("step", "mark", "RUNNING", "STOPPED", "its task instance was marked failed", "listener"),
    *_moves("step", "stop", "RUNNING", "STOPPED", "newest fence, or lease out", "step, reconciler"),
    *_moves(
        "step", "seize", "RUNNING STOPPED SUCCEEDED UNDONE PARTLY_UNDONE", "UNDOING", "freeze", "undo run"
    ),
    *_moves("step", "undone", "UNDOING", "UNDONE PARTLY_UNDONE", "settle or expire", "undo run"),
    *_moves(
        "step", "expire", "RUNNING STOPPED SUCCEEDED", "UNDONE PARTLY_UNDONE", "deadline over", "reconciler"
    ),
    *_moves("step", "expire", "UNDONE", "PARTLY_UNDONE", "the same, of a part that was kept", "reconciler"),
    *_moves("step", "late", "UNDONE", "PARTLY_UNDONE", "a late answer reopened an action", "writer"),
    *_moves("step", "resolved", "PARTLY_UNDONE", "UNDONE", "last residual resolved", "person"),
)

ACTION_MOVES: tuple[Move, ...] = (
    *_moves("action", "begin", "-", "PENDING", "saga and step RUNNING, newest fence, unused seq", "step"),
    *_moves("action", "read", "-", "DONE FAILED", "READ_ONLY", "step"),
    *_moves("action", "twin", "-", "DONE", "a late yes beside a newer attempt", "writer"),
    *_moves("action", "succeed", "PENDING", "DONE", "newest fence, any saga state", "step"),
    *_moves("action", "reject", "PENDING", "FAILED", "newest fence; NotApplied, or READ_ONLY", "step"),
    *_moves(
        "action", "lose", "PENDING", "IN_DOUBT", "other exception, timeout, stop now, sweep", "step, sweep"
    ),
    *_moves(
        "action", "retry", "FAILED IN_DOUBT", "PENDING", "begin's guards, A1 waited out, tries left", "step"
    ),
    *_moves("action", "verify", "IN_DOUBT", "DONE FAILED", "newest fence, A1 waited out", "step, undo"),
    *_moves(
        "action",
        "compensate",
        "DONE IN_DOUBT COMPENSATING COMPENSATION_FAILED",
        "COMPENSATING",
        "step UNDOING, newest fence, later actions settled, A1 waited out",
        "undo",
    ),
    *_moves("action", "confirm", "COMPENSATING", "COMPENSATED", "newest fence, it returned", "undo"),
    *_moves(
        "action", "later", "COMPENSATING", "COMPENSATING", "Later or Unavailable, until its deadline", "undo"
    ),
    *_moves(
        "action", "give up", "COMPENSATING", "COMPENSATION_FAILED", "tries used up, rejected, missing", "undo"
    ),
    *_moves("action", "give up", "DONE", "COMPENSATION_FAILED", "its compensation is missing", "undo"),
    *_moves("action", "stand", "DONE IN_DOUBT", "NON_COMPENSABLE", "declared so, newest fence", "undo"),
    *_moves(
        "action",
        "resolve",
        "COMPENSATION_FAILED NON_COMPENSABLE IN_DOUBT DONE COMPENSATING",
        "COMPENSATED ACCEPTED",
        "step PARTLY_UNDONE, no open request, A1 waited out; a person, with a note",
        "person",
    ),
    *_moves(
        "action",
        "answer",
        "IN_DOUBT",
        "DONE FAILED",
        "step STOPPED, A1 waited out; a person, with a note",
        "person",
    ),
    *_moves("action", "late yes", "IN_DOUBT FAILED", "DONE", "a fenced attempt's answer", "writer"),
    *_moves("action", "late yes", "COMPENSATED", "IN_DOUBT", "the next undo verifies first", "writer"),
    *_moves("action", "late no", "IN_DOUBT", "FAILED", "a fenced attempt proved NotApplied", "writer"),
)

REQUEST_MOVES: tuple[Move, ...] = (
    *_moves("request", "ask", "-", "REQUESTED", "none open", "anyone"),
    *_moves("request", "hint", "-", "HINTED", "failure, timeouts, lost worker", "reader of the run"),
    *_moves("request", "hold", "HINTED", "HELD", "mass outage", "reconciler"),
    *_moves("request", "release", "HELD", "HINTED", "a person", "person"),
    *_moves("request", "widen", "REQUESTED HINTED HELD", "REQUESTED", "before the freeze", "anyone"),
    *_moves("request", "widen", "QUEUED", "QUEUED", "a still wider one", "anyone"),
    *_moves("request", "queue", "-", "QUEUED", "a wider one while one is frozen", "anyone"),
    *_moves(
        "request",
        "withdraw",
        "HINTED HELD",
        "WITHDRAWN",
        "a step attached, or the run is fine",
        "step",
    ),
    *_moves("request", "freeze", "REQUESTED HINTED", "FROZEN", "quiet, or stop now", "undo run"),
    *_moves("request", "take over", "FROZEN", "FROZEN", "its owner is over or lost its lease", "undo run"),
    *_moves("request", "settle", "FROZEN", "SETTLED", "saga's settle", "undo run"),
    *_moves("request", "next", "QUEUED", "REQUESTED", "the frozen one settled", "undo run"),
    *_moves("request", "expire", "REQUESTED FROZEN QUEUED", "EXPIRED", "deadline", "reconciler"),
)

MOVES: dict[Machine, tuple[Move, ...]] = {
    "saga": SAGA_MOVES,
    "step": STEP_MOVES,
    "action": ACTION_MOVES,
    "request": REQUEST_MOVES,
}

STATES: dict[Machine, tuple[str, ...]] = {
    "saga": tuple(SagaState),
    "step": tuple(StepState),
    "action": tuple(ActionState),
    "request": tuple(RequestState),
}


def legal_moves(machine: Machine) -> frozenset[tuple[str | None, str]]:
    """Every (source, target) pair that the table of this machine allows; source None means a new row."""
    return frozenset((move.source, move.target) for move in MOVES[machine])


def figure(machine: Machine) -> str:
    """The table of one machine as a Mermaid state diagram, one arrow per pair, labelled with its events."""
    labels: dict[tuple[str | None, str], list[str]] = {}
    for move in MOVES[machine]:
        events = labels.setdefault((move.source, move.target), [])
        if move.event not in events:
            events.append(move.event)
    arrows = [
        f"    {source or '[*]'} --> {target}: {', '.join(events)}"
        for (source, target), events in labels.items()
    ]
    return "\n".join(["stateDiagram-v2", *arrows])


if __name__ == "__main__":
    for name in MOVES:
        print(f"%% {name}\n{figure(name)}\n")
