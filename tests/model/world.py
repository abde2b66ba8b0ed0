"""What the model keeps of one moment: the log, Airflow's view, the processes that live, and the truth outside.

Everything is an immutable, hashable tuple, because the model visits hundreds of thousands of worlds. The states of
saga, step, action and request are the names of ``airflow_saga.core.states``; None is a row that does not exist yet.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from airflow_saga.core.states import ActionState, RequestState, SagaState, StepState

PENDING: Final = SagaState.PENDING.value
RUNNING: Final = SagaState.RUNNING.value
COMPLETED: Final = SagaState.COMPLETED.value
FAILED: Final = SagaState.FAILED.value
CANCELLING: Final = SagaState.CANCELLING.value
SUSPENDED: Final = SagaState.SUSPENDED.value
CANCELLED: Final = SagaState.CANCELLED.value
PARTIALLY_CANCELLED: Final = SagaState.PARTIALLY_CANCELLED.value

STOPPED: Final = StepState.STOPPED.value
SUCCEEDED: Final = StepState.SUCCEEDED.value
UNDOING: Final = StepState.UNDOING.value
UNDONE: Final = StepState.UNDONE.value
PARTLY_UNDONE: Final = StepState.PARTLY_UNDONE.value

DONE: Final = ActionState.DONE.value
IN_DOUBT: Final = ActionState.IN_DOUBT.value
COMPENSATING: Final = ActionState.COMPENSATING.value
COMPENSATED: Final = ActionState.COMPENSATED.value
COMPENSATION_FAILED: Final = ActionState.COMPENSATION_FAILED.value
NON_COMPENSABLE: Final = ActionState.NON_COMPENSABLE.value
ACCEPTED: Final = ActionState.ACCEPTED.value

HINTED: Final = RequestState.HINTED.value
HELD: Final = RequestState.HELD.value
REQUESTED: Final = RequestState.REQUESTED.value
QUEUED: Final = RequestState.QUEUED.value
FROZEN: Final = RequestState.FROZEN.value
SETTLED: Final = RequestState.SETTLED.value
WITHDRAWN: Final = RequestState.WITHDRAWN.value
EXPIRED: Final = RequestState.EXPIRED.value

UNDO: Final = "undo"
KEEP: Final = "keep"
INCOMPLETE: Final = "incomplete"
"""The run read success, but a step is stopped or undone: FAILED, and no policy applies. Kept where the mode is."""

# Airflow's states of a task and of a run, as far as they matter.
WAITING: Final = "waiting"
SUCCESS: Final = "success"
# (and RUNNING, FAILED)

# Where a process is: about to begin an action, its intent is committed, its call is out, the answer is there, all is
# done but not yet reported to Airflow. The undo uses CALL, ANSWER and TRY_FAILED.
NEXT: Final = "next"
INTENT: Final = "intent"
CALL: Final = "call"
ANSWER: Final = "answer"
REPORT: Final = "report"
TRY_FAILED: Final = "try failed"
UNAVAILABLE: Final = "unavailable"

# What else the log says about an action.
ASKED: Final = "asked"
"""IN_DOUBT after its probe, or without one: a person's."""
AWAITED: Final = "awaited"
"""COMPENSATING with a date."""
AGAIN: Final = "again"
"""COMPENSATION_FAILED, and somebody asked for another undo: it gets new tries."""

BUDGETS: Final = (
    "cancel",
    "keep",
    "place",
    "mark",
    "mark_task",
    "clear",
    "clear_plain",
    "skip",
    "crash",
    "exception",
    "retry",
    "undo_zombie",
    "undo_fails",
    "later",
    "unavailable",
    "expire",
    "hold",
    "slow",
)
"""What the environment may do only so often, so that there is an end of worlds."""


class Action(NamedTuple):
    """One recorded call. ``standing`` and ``wire`` are the truth outside: effects in place, calls that may yet land."""

    state: str | None = None
    note: str = ""
    standing: int = 0
    wire: int = 0


class Process(NamedTuple):
    """A living attempt; as a zombie it lives on fenced.

    ``generation`` is the one it works for; ``alone`` that no other attempt of its action is unaccounted for, so that
    its own "nothing happened" is a proof.
    """

    at: int
    phase: str
    generation: int
    alone: bool = True


class Step(NamedTuple):
    """One task instance.

    ``task`` is Airflow's state of it, ``cleared`` that its max_tries grew since the last attach, ``waited`` that A1 is
    over for each of its calls that did not report, ``old`` the actions of its first generation.
    """

    state: str | None
    generation: int
    process: Process | None
    zombie: Process | None
    task: str
    cleared: bool
    waited: bool
    actions: tuple[Action, ...]
    old: tuple[Action, ...] = ()


class Request(NamedTuple):
    """One undo request.

    ``whole_run``: the saga is CANCELLING for it, and ends with it. ``goes_on``: a date fell due or a late answer came;
    nobody asked anew, so what was left to people stays with people.
    """

    state: str | None
    steps: tuple[int, ...]
    whole_run: bool
    goes_on: bool = False


class Undo(NamedTuple):
    """A living undo run: between actions (``phase`` NEXT), or in the compensation of one."""

    step: int = -1
    action: int = -1
    phase: str = NEXT


class Reading(NamedTuple):
    """What a thread has read about the run and not yet acted upon."""

    what: str
    clears: int


class World(NamedTuple):
    """One moment.

    ``clears`` is Airflow's clear_number of the run, ``stopped_at`` the one at the last decision to stop,
    ``attached_at`` the one at the newest attach (kept only where a slow reading can meet it).
    """

    saga: str | None
    mode: str
    stopped_at: int
    attached_at: int
    run: str
    clears: int
    request: Request | None
    queued: Request | None
    undo: Undo | None
    undo_zombie: Undo | None
    reading: Reading | None
    steps: tuple[Step, ...]
    budget: tuple[int, ...]


Edge = tuple[str, World, str | None]
"""What happened, the world after it, and the promise it broke, if it broke one."""

_BUDGET_AT: Final = {name: position for position, name in enumerate(BUDGETS)}


def left(world: World, name: str) -> int:
    return world.budget[_BUDGET_AT[name]]


def spend(world: World, name: str) -> World:
    at = _BUDGET_AT[name]
    budget = world.budget
    return world._replace(budget=(*budget[:at], budget[at] - 1, *budget[at + 1 :]))


def with_step(world: World, i: int, step: Step) -> World:
    steps = world.steps
    return world._replace(steps=(*steps[:i], step, *steps[i + 1 :]))


def with_action(step: Step, k: int, action: Action) -> Step:
    actions = step.actions
    return step._replace(actions=(*actions[:k], action, *actions[k + 1 :]))


def put_action(world: World, i: int, k: int, action: Action) -> World:
    return with_step(world, i, with_action(world.steps[i], k, action))
