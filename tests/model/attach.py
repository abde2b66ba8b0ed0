"""A step attaches: PROTOCOL 4. Airflow starts a try, and the log says start, resume, replay, redo, wait or refuse."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.protocol import Protocol
from tests.model.world import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    FAILED,
    FROZEN,
    HELD,
    HINTED,
    NEXT,
    PARTIALLY_CANCELLED,
    PARTLY_UNDONE,
    PENDING,
    REQUESTED,
    RUNNING,
    STOPPED,
    SUCCEEDED,
    SUCCESS,
    SUSPENDED,
    UNDOING,
    UNDONE,
    WAITING,
    WITHDRAWN,
    Action,
    Edge,
    Process,
    Step,
    World,
    with_step,
)

GENERATIONS = 2
"""The model follows a step into its second generation, no further."""


def attach(protocol: Protocol, world: World, i: int) -> Iterator[Edge]:
    step = world.steps[i]
    if world.run != RUNNING or step.task != WAITING:
        return
    if any(world.steps[u].task != SUCCESS for u in protocol.upstream[i]):
        return
    verdict = _saga_verdict(protocol, world, step) or _upstream_verdict(protocol, world, i)
    if verdict == "refuse":
        yield refused(world, i)
    elif verdict is None:
        yield from _step_verdict(protocol, world, i)


def refused(world: World, i: int, broken: str | None = None) -> Edge:
    """The task fails, without a retry; the log stays as it was."""
    step = world.steps[i]._replace(task=FAILED, cleared=False)
    return f"refuse {i}", with_step(world, i, step), broken


def _saga_verdict(protocol: Protocol, world: World, step: Step) -> str | None:
    guards = protocol.guards
    later = world.clears > world.stopped_at and (step.state is None or step.cleared)
    goes_on = later or not guards.clear_stamp
    if world.saga == CANCELLING:
        if not guards.wait_undo:
            return None
        return "wait" if goes_on else "refuse"
    if world.saga in (CANCELLED, SUSPENDED):
        return None if goes_on else "refuse"
    if world.saga == PARTIALLY_CANCELLED and guards.partly_refuse:
        return "refuse"
    return None


def _upstream_verdict(protocol: Protocol, world: World, i: int) -> str | None:
    if not protocol.guards.stale:
        return None
    states = [world.steps[u].state for u in protocol.upstream[i]]
    if UNDOING in states:
        return "wait"
    return "refuse" if UNDONE in states or PARTLY_UNDONE in states else None


def _step_verdict(protocol: Protocol, world: World, i: int) -> Iterator[Edge]:
    step = world.steps[i]
    if step.state is None:
        yield _begin(protocol, world, i, "attach", step)
    elif step.state in (RUNNING, STOPPED):
        if step.process and step.zombie:
            return  # bounded: one zombie for each step
        if step.process:
            step = step._replace(zombie=step.process)
        yield _begin(protocol, world, i, "attach", protocol.sweep(step))
    elif step.state == SUCCEEDED:
        redo = step.cleared or (world.clears > 0 and not protocol.guards.cleared_itself)
        yield from _redo(protocol, world, i) if redo else _replay(protocol, world, i)
    elif step.state == UNDONE:
        yield from _begin_anew(protocol, world, i)
    elif step.state == PARTLY_UNDONE and not _covered(world, i):
        yield refused(world, i)


def _covered(world: World, i: int) -> bool:
    return any(
        request is not None and request.state not in (HINTED, HELD) and i in request.steps
        for request in (world.request, world.queued)
    )


def _enter(protocol: Protocol, world: World) -> tuple[World, str | None]:
    """The saga runs, or runs again; a hint that nobody has frozen is withdrawn."""
    broken = None
    if world.saga in (None, PENDING):
        world = protocol.move_saga(world, "start", RUNNING)
    elif world.saga in (COMPLETED, FAILED, CANCELLED, SUSPENDED):
        if world.saga in (CANCELLED, SUSPENDED) and world.clears <= world.stopped_at:
            broken = "a late start or retry revives a cancelled saga, nobody cleared it"
        world = protocol.move_saga(world, "reopen", RUNNING)
    elif world.saga != RUNNING:  # only mutants: no table has this move
        if world.saga == PARTIALLY_CANCELLED:
            broken = "a new generation begins over an unresolved rest"
        world = world._replace(saga=RUNNING, mode="")
    if world.request and world.request.state in (HINTED, HELD) and protocol.guards.hint_recheck:
        world = protocol.close_request(world, "withdraw", WITHDRAWN)
    if protocol.slow:
        world = world._replace(attached_at=world.clears)
    return world, broken


def _begin(protocol: Protocol, world: World, i: int, event: str, step: Step) -> Edge:
    world, broken = _enter(protocol, world)
    process = Process(0, NEXT, step.generation)
    step = protocol.move_step(step, event, RUNNING, process=process, task=RUNNING, cleared=False)
    return f"{event} {i}", with_step(world, i, step), broken


def _begin_anew(protocol: Protocol, world: World, i: int) -> Iterator[Edge]:
    step = world.steps[i]
    if _covered(world, i):
        return  # wait
    if step.generation == GENERATIONS or step.zombie is not None:
        yield refused(world, i)  # bounded
        return
    fresh = tuple(Action() for _ in step.actions)
    step = step._replace(generation=GENERATIONS, old=step.actions, actions=fresh, waited=True)
    yield _begin(protocol, world, i, "begin anew", step)


def _replay(protocol: Protocol, world: World, i: int) -> Iterator[Edge]:
    world, broken = _enter(protocol, world)
    step = protocol.move_step(world.steps[i], "replay", SUCCEEDED, task=SUCCESS)
    yield f"replay {i}", with_step(world, i, step), broken


def _redo(protocol: Protocol, world: World, i: int) -> Iterator[Edge]:
    """A finished step was cleared: it and each later step that acted are undone first, if they were cleared too."""
    scope = [i]
    for later in protocol.downstream[i]:
        step = world.steps[later]
        if step.state not in (SUCCEEDED, STOPPED, RUNNING, PARTLY_UNDONE):
            continue
        if step.task == WAITING:
            scope.append(later)
        elif protocol.guards.redo_later:
            yield refused(world, i)
            return
    request = world.request
    if request is not None and (
        request.state == FROZEN or (request.whole_run and request.state == REQUESTED)
    ):
        return  # wait
    entered, broken = _enter(protocol, world)
    if entered.request is not None and {*scope} <= {*entered.request.steps}:
        return  # it is asked for already
    if not world.steps[i].cleared:
        broken = broken or "spurious undo of a finished, uncleared step"
    step = protocol.move_step(entered.steps[i], "redo", SUCCEEDED)
    yield f"redo {i}", protocol.ask(with_step(entered, i, step), scope, whole_run=False), broken
