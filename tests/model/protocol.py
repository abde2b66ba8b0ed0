"""The moves, and the few verbs that several actors share: sweep, seize, ask for an undo, take a late answer.

Each change of a saga, step, action or request goes through ``Protocol``, which looks the move up, with its event, in
the tables of ``airflow_saga.core.states`` and remembers that it was made. A move that no table lists is a violation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from airflow_saga.core.states import MOVES, RESIDUAL_ACTION_STATES, SETTLED_ACTION_STATES, Machine
from tests.model.configurations import Configuration
from tests.model.guards import Guards
from tests.model.world import (
    AGAIN,
    ASKED,
    AWAITED,
    BUDGETS,
    CANCELLED,
    CANCELLING,
    COMPENSATING,
    COMPENSATION_FAILED,
    COMPLETED,
    FAILED,
    FROZEN,
    HELD,
    HINTED,
    IN_DOUBT,
    PARTIALLY_CANCELLED,
    PARTLY_UNDONE,
    PENDING,
    QUEUED,
    REQUESTED,
    RUNNING,
    SUSPENDED,
    UNDO,
    UNDOING,
    UNDONE,
    WAITING,
    Action,
    Request,
    Step,
    World,
    with_step,
)

Taken = tuple[str, str, str | None, str]
"""Machine, event, source, target: one arrow of a table."""

LEGAL: Final[frozenset[Taken]] = frozenset(
    (machine, move.event, move.source, move.target) for machine, table in MOVES.items() for move in table
)
RESIDUAL: Final[frozenset[str | None]] = frozenset(str(state) for state in RESIDUAL_ACTION_STATES)
SETTLED_STATES: Final[frozenset[str | None]] = frozenset(
    {None, *(str(state) for state in SETTLED_ACTION_STATES)}
)


class IllegalMove(Exception):
    """The protocol made a move that is in no table of ``airflow_saga.core.states``."""


class Protocol:
    """One configuration under the protocol, or under a mutant of it."""

    def __init__(self, configuration: Configuration, guards: Guards | None = None) -> None:
        self.kinds = configuration.steps
        self.listener = configuration.listener
        self.bounded = configuration.bounded
        self.halt = configuration.halt
        self.policy = configuration.policy
        self.guards = guards or Guards()
        self.budget = tuple(configuration.budget.get(name, 0) for name in BUDGETS)
        self.places = configuration.budget.get("place", 0) > 0
        self.keeps = configuration.budget.get("keep", 0) > 0
        self.slow = configuration.budget.get("slow", 0) > 0
        self.steps = tuple(range(len(self.kinds)))
        self.upstream = [self.steps[:i] if configuration.chain else () for i in self.steps]
        self.downstream = [self.steps[i + 1 :] if configuration.chain else () for i in self.steps]
        self.taken: set[Taken] = set()

    def first_world(self) -> World:
        steps = tuple(
            Step(None, 1, None, None, WAITING, False, True, tuple(Action() for _ in kinds))
            for kinds in self.kinds
        )
        return World(None, "", -1, 0, RUNNING, 0, None, None, None, None, None, steps, self.budget)

    # -- moves ------------------------------------------------------------------------------------------------------

    def _take(self, machine: Machine, event: str, source: str | None, target: str) -> str:
        taken = (machine, event, source, target)
        if taken not in LEGAL:
            raise IllegalMove(f"{machine}: {event} from {source} to {target}")
        self.taken.add(taken)
        return target

    def move_saga(self, world: World, event: str, target: str, mode: str = "") -> World:
        return world._replace(saga=self._take("saga", event, world.saga, target), mode=mode)

    def stop_saga(self, world: World, event: str, target: str, mode: str = "") -> World:
        """A decision to stop: it stores the clear_number of its moment."""
        return self.move_saga(world, event, target, mode)._replace(stopped_at=world.clears)

    def move_step(self, step: Step, event: str, target: str, **changes: Any) -> Step:
        return step._replace(state=self._take("step", event, step.state, target), **changes)

    def move_action(self, action: Action, event: str, target: str, **changes: Any) -> Action:
        changes.setdefault("note", "")
        return action._replace(state=self._take("action", event, action.state, target), **changes)

    def move_request(self, request: Request, event: str, target: str, **changes: Any) -> Request:
        return request._replace(state=self._take("request", event, request.state, target), **changes)

    def close_request(self, world: World, event: str, target: str) -> World:
        """SETTLED, WITHDRAWN or EXPIRED: the world has no use for it any more."""
        assert world.request is not None
        self.move_request(world.request, event, target)
        return world._replace(request=None)

    # -- words ------------------------------------------------------------------------------------------------------

    def is_read_only(self, i: int, k: int) -> bool:
        return self.kinds[i][k] == "O"

    def is_residual(self, i: int, k: int, action: Action) -> bool:
        if self.is_read_only(i, k) and self.guards.read_only_is_no_residual:
            return False
        return action.state in RESIDUAL

    def has_residual(self, i: int, step: Step) -> bool:
        return any(self.is_residual(i, k, action) for k, action in enumerate(step.actions))

    def saga_has_residual(self, world: World) -> bool:
        return any(self.has_residual(i, step) for i, step in enumerate(world.steps))

    def after_undo(self, world: World) -> str:
        """What an undo has made of a saga: partly cancelled while a step is, else what came before it stays."""
        if any(step.state == PARTLY_UNDONE for step in world.steps) and self.guards.rest_is_named:
            return PARTIALLY_CANCELLED
        return SUSPENDED if self.saga_has_residual(world) else CANCELLED

    def is_settled(self, i: int, k: int, action: Action) -> bool:
        state, note = action.state, action.note
        if state in SETTLED_STATES:
            return note != AGAIN
        return (
            self.is_read_only(i, k)
            or (state == IN_DOUBT and note == ASKED)
            or (state == COMPENSATING and note == AWAITED)
        )

    # -- shared verbs -----------------------------------------------------------------------------------------------

    def sweep(self, step: Step) -> Step:
        """What a lost attempt left PENDING is in doubt, and its call may still land."""
        if not self.guards.sweep or not any(action.state == PENDING for action in step.actions):
            return step
        actions = tuple(
            self.move_action(action, "lose", IN_DOUBT) if action.state == PENDING else action
            for action in step.actions
        )
        return step._replace(actions=actions, waited=False)

    def seize(self, step: Step, goes_on: bool) -> Step:
        """The undo takes the step: whoever works in it is fenced, and what an earlier undo gave up is tried anew."""
        if step.process is not None:
            step = step._replace(zombie=step.process, process=None)
        step = self.sweep(step)
        if not goes_on and self.guards.tries_anew:
            step = step._replace(actions=tuple(map(self._anew, step.actions)))
        return self.move_step(step, "seize", UNDOING)

    def _anew(self, action: Action) -> Action:
        if action.state == COMPENSATION_FAILED:
            return action._replace(note=AGAIN)
        return action._replace(note="") if action.note else action

    def freeze(self, world: World) -> World:
        request = world.request
        assert request is not None
        steps = list(world.steps)
        for i in request.steps:
            if steps[i].state is not None:
                steps[i] = self.seize(steps[i], request.goes_on)
        return world._replace(steps=tuple(steps), request=self.move_request(request, "freeze", FROZEN))

    def can_freeze(self, world: World) -> bool:
        """Bounded: the model keeps one zombie for each step."""
        assert world.request is not None
        return not any(world.steps[i].process and world.steps[i].zombie for i in world.request.steps)

    def hint(self, world: World) -> World:
        return world._replace(request=self.move_request(Request(None, self.steps, True), "hint", HINTED))

    def ask(self, world: World, steps: Iterable[int], whole_run: bool, goes_on: bool = False) -> World:
        """P10: at most one open request; before the freeze it is widened, after it a wider one waits."""
        wish = Request(None, tuple(sorted(set(steps))), whole_run, goes_on)
        request = world.request
        if request is None:
            return world._replace(request=self.move_request(wish, "ask", REQUESTED))
        if request.state == FROZEN:
            if {*wish.steps} <= {*request.steps} and request.whole_run >= whole_run:
                return world  # answered with who asked first
            return self._queue(world, wish) if self.guards.queue else world
        if request.state in (HINTED, HELD) and not whole_run:
            return world  # the hint covers the whole run; whether it is carried out is decided at its freeze
        return world._replace(request=self._widen(request, wish, REQUESTED)) if self.guards.widen else world

    def _queue(self, world: World, wish: Request) -> World:
        if world.queued is None:
            return world._replace(queued=self.move_request(wish, "queue", QUEUED))
        return world._replace(queued=self._widen(world.queued, wish, QUEUED))

    def _widen(self, request: Request, wish: Request, target: str) -> Request:
        return self.move_request(
            request,
            "widen",
            target,
            steps=tuple(sorted({*request.steps, *wish.steps})),
            whole_run=request.whole_run or wish.whole_run,
            goes_on=request.goes_on and wish.goes_on,
        )

    def reopen(self, world: World, i: int) -> World:
        """A late answer changed an action of step i: the step, the saga and a request follow in its transaction."""
        guards = self.guards
        if not guards.late_reopen:
            return world
        step = world.steps[i]
        if step.state == UNDONE and guards.late_step:
            step = self.move_step(step, "late", PARTLY_UNDONE)
            world = with_step(world, i, step)
        if step.state not in (UNDONE, PARTLY_UNDONE):
            return world
        if world.saga in (CANCELLED, PARTIALLY_CANCELLED, SUSPENDED):
            return self.ask(
                self.move_saga(world, "late", CANCELLING, UNDO), (i,), whole_run=True, goes_on=True
            )
        if not guards.late_scope and world.saga in (FAILED, COMPLETED) and world.request is None:
            return self.ask(world._replace(saga=CANCELLING, mode=UNDO), (i,), whole_run=True, goes_on=True)
        cancelling = world.saga == CANCELLING and world.mode == UNDO
        return self.ask(world, (i,), whole_run=cancelling, goes_on=True)

    def resolved(self, world: World, i: int) -> World:
        """The last residual of a step takes the step with it, the last one of the saga the saga."""
        step = world.steps[i]
        if step.state == PARTLY_UNDONE and not self.has_residual(i, step):
            world = with_step(world, i, self.move_step(step, "resolved", UNDONE))
        if world.saga == PARTIALLY_CANCELLED and self.after_undo(world) != PARTIALLY_CANCELLED:
            return self.move_saga(world, "resolve", self.after_undo(world))
        return world
