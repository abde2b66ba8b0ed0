"""Who looks at a saga from outside: the reconciler, the listener's thread, and ``plan``. PROTOCOL 3.

The reconciler alone must suffice; the others are only faster. They read Airflow's committed run state and then act,
and in between the run may have been cleared: ``Reading`` is such a gap.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.protocol import Protocol
from tests.model.scheduler import MARKED, undo_marked_run
from tests.model.world import (
    AWAITED,
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FAILED,
    HELD,
    HINTED,
    IN_DOUBT,
    INCOMPLETE,
    KEEP,
    PARTIALLY_CANCELLED,
    PARTLY_UNDONE,
    PENDING,
    RUNNING,
    STOPPED,
    SUCCEEDED,
    SUCCESS,
    SUSPENDED,
    UNDO,
    UNDOING,
    UNDONE,
    Edge,
    Reading,
    Step,
    Undo,
    World,
    left,
    spend,
    with_action,
    with_step,
)


def listener_opens(protocol: Protocol, world: World) -> Iterator[Edge]:
    if protocol.listener and world.saga is None and world.run == RUNNING:
        yield "listener: run started", protocol.move_saga(world, "open", PENDING), None


def end_of_run(protocol: Protocol, world: World) -> Iterator[Edge]:
    """The reconciler reads the run and acts at once; a thread of the listener reads it, and acts later."""
    if world.run != RUNNING and protocol.guards.reconciler:
        yield from _end(protocol, world, world.run)
    if world.run != RUNNING and world.reading is None and left(world, "slow"):
        yield (
            f"a thread reads: run {world.run}",
            spend(world._replace(reading=Reading(world.run, world.clears)), "slow"),
            None,
        )
    if world.reading is not None:
        yield from _act_on_reading(protocol, world, world.reading)


def _act_on_reading(protocol: Protocol, world: World, reading: Reading) -> Iterator[Edge]:
    world = world._replace(reading=None)
    stale = reading.clears < world.attached_at
    if stale and protocol.guards.fresh_reading:
        yield "an old reading is dropped", world, None
    elif reading.what == MARKED:
        told = undo_marked_run(protocol, world)
        broken = "a mark older than the newest attach undoes a run that goes on" if stale else None
        yield "the listener's thread acts", told, broken if told is not world else None
    else:
        yield "the thread has nothing to do", world, None
        for label, after, broken in _end(protocol, world, reading.what):
            yield f"late, {label}", after, broken


def _end(protocol: Protocol, world: World, run: str) -> Iterator[Edge]:
    """What a reading of the run's end makes of the saga."""
    if world.saga == PENDING:
        if run == SUCCESS:
            yield "nothing acted: COMPLETED", protocol.move_saga(world, "none acted", COMPLETED), None
        else:
            yield "nothing acted: CANCELLED", protocol.stop_saga(world, "none acted", CANCELLED), None
    elif world.saga == RUNNING and run == SUCCESS:
        yield from _run_succeeded(protocol, world)
    elif world.saga == RUNNING and world.request is None:
        yield "FAILED", protocol.move_saga(world, "fail", FAILED), None


def _run_succeeded(protocol: Protocol, world: World) -> Iterator[Edge]:
    steps = world.steps
    quiet = all(step.process is None and step.state in (None, SUCCEEDED) for step in steps)
    if not protocol.guards.complete_open or (world.request is None and quiet):
        undone = any(step.state in (UNDOING, UNDONE, PARTLY_UNDONE) for step in steps)
        broken = "COMPLETED while an undo is open or a step is undone" if world.request or undone else None
        yield "COMPLETED", protocol.move_saga(world, "complete", COMPLETED), broken
    elif world.request is None and all(step.state != RUNNING or step.process is None for step in steps):
        yield "FAILED, incomplete", protocol.move_saga(world, "fail", FAILED, INCOMPLETE), None


def hints(protocol: Protocol, world: World) -> Iterator[Edge]:
    """A failed saga gets a hint; an outage holds it."""
    request = world.request
    if request is None:
        compensates = protocol.policy == "compensate" and world.mode != INCOMPLETE
        if protocol.guards.reconciler and world.saga == FAILED and world.run == FAILED and compensates:
            yield "hint", protocol.hint(world), None
        if world.saga == SUSPENDED and world.run == FAILED and not protocol.guards.keep_rank:
            undone = protocol.ask(world._replace(saga=CANCELLING, mode=UNDO), protocol.steps, whole_run=True)
            yield "policy overrules keep", undone, "automatic undo of what a user kept"
    elif request.state == HINTED and left(world, "hold"):
        held = world._replace(request=protocol.move_request(request, "hold", HELD))
        yield "mass outage: hint held", spend(held, "hold"), None


def plan_reads_failed_run(protocol: Protocol, world: World) -> Iterator[Edge]:
    """``plan`` of an undo run that somebody started by hand: fail, policy and freeze in one transaction."""
    if (
        world.saga != RUNNING
        or world.run != FAILED
        or world.request is not None
        or protocol.policy != "compensate"
    ):
        return
    hinted = protocol.hint(protocol.move_saga(world, "fail", FAILED))
    if protocol.can_freeze(hinted) and hinted.undo is None:
        frozen = protocol.freeze(protocol.stop_saga(hinted, "policy", CANCELLING, UNDO))
        yield "plan: fail, policy, freeze", frozen._replace(undo=Undo()), None


def sweep_lost(protocol: Protocol, world: World, i: int) -> Iterator[Edge]:
    """A lost attempt is swept; so is, after A1, what a step that was marked failed left PENDING."""
    step = world.steps[i]
    if not protocol.guards.reconciler or step.process is not None:
        return
    if step.state == RUNNING and step.task in (FAILED, SUCCESS):
        stopped = protocol.move_step(protocol.sweep(step), "stop", STOPPED)
        yield f"reconciler: sweep {i}", with_step(world, i, stopped), None
    elif step.state == STOPPED and step.waited and any(action.state == PENDING for action in step.actions):
        yield f"reconciler: sweep marked {i}", with_step(world, i, _sweep_waited(protocol, step)), None


def _sweep_waited(protocol: Protocol, step: Step) -> Step:
    for k, action in enumerate(step.actions):
        if action.state == PENDING:
            step = with_action(step, k, protocol.move_action(action, "lose", IN_DOUBT))
    return step


def suspend(protocol: Protocol, world: World) -> Iterator[Edge]:
    if world.saga != CANCELLING or world.mode != KEEP or world.request is not None:
        return
    if any(step.process is not None for step in world.steps):
        return
    steps = tuple(
        protocol.move_step(protocol.sweep(step), "stop", STOPPED) if step.state == RUNNING else step
        for step in world.steps
    )
    yield "SUSPENDED", protocol.move_saga(world._replace(steps=steps), "suspend", SUSPENDED), None


def due(protocol: Protocol, world: World, i: int) -> Iterator[Edge]:
    """The date of a compensation that was put off has come: one more try for that step."""
    step = world.steps[i]
    if world.request is not None or step.state != PARTLY_UNDONE or not protocol.guards.due:
        return
    if not any(action.note == AWAITED for action in step.actions):
        return
    actions = (action._replace(note="") if action.note == AWAITED else action for action in step.actions)
    world = with_step(world, i, step._replace(actions=tuple(actions)))
    if world.saga == PARTIALLY_CANCELLED:
        again = protocol.move_saga(world, "retry undo", CANCELLING, UNDO)
        yield f"due {i}", protocol.ask(again, (i,), whole_run=True, goes_on=True), None
    else:
        yield f"due {i}", protocol.ask(world, (i,), whole_run=False, goes_on=True), None


def expire(protocol: Protocol, world: World) -> Iterator[Edge]:
    """The deadline of the cancel is over: everybody is fenced, and what stands is named."""
    if not left(world, "expire") or world.saga != CANCELLING or world.mode != UNDO:
        return
    if any(step.process and step.zombie for step in world.steps) or (world.undo and world.undo_zombie):
        return  # bounded
    world = spend(world, "expire")
    ends = world.request.steps if world.request and not world.queued else protocol.steps
    if world.request:
        world = protocol.close_request(world, "expire", EXPIRED)
    if world.queued:
        protocol.move_request(world.queued, "expire", EXPIRED)
    world = world._replace(queued=None, undo=None, undo_zombie=world.undo or world.undo_zombie)
    steps = (_expired(protocol, i, step) if i in ends else step for i, step in enumerate(world.steps))
    world = world._replace(steps=tuple(steps))
    yield "expire", protocol.move_saga(world, "expire", protocol.after_undo(world)), None


def _expired(protocol: Protocol, i: int, step: Step) -> Step:
    if step.state is None:
        return step
    if protocol.guards.expire_fence:
        if step.process is not None:
            step = step._replace(zombie=step.process, process=None)
        step = protocol.sweep(step)
    target = PARTLY_UNDONE if protocol.has_residual(i, step) else UNDONE
    if step.state in (UNDONE, PARTLY_UNDONE):
        return step
    return protocol.move_step(step, "undone" if step.state == UNDOING else "expire", target)
