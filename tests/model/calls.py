"""What an attempt does: intents, calls, outcomes; the wire; and the attempt that lives on fenced. PROTOCOL 5."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.protocol import Protocol
from tests.model.world import (
    ACCEPTED,
    ANSWER,
    CALL,
    CANCELLED,
    CANCELLING,
    COMPENSATED,
    COMPENSATING,
    COMPENSATION_FAILED,
    DONE,
    FAILED,
    HELD,
    HINTED,
    IN_DOUBT,
    INTENT,
    NEXT,
    NON_COMPENSABLE,
    PARTLY_UNDONE,
    PENDING,
    REPORT,
    RUNNING,
    STOPPED,
    SUCCEEDED,
    SUCCESS,
    UNDOING,
    UNDONE,
    WAITING,
    Edge,
    Process,
    Step,
    World,
    left,
    put_action,
    spend,
    with_action,
    with_step,
)

UNDONE_ACTION = frozenset({COMPENSATED, COMPENSATION_FAILED, NON_COMPENSABLE, ACCEPTED, COMPENSATING})


def work(protocol: Protocol, world: World, i: int) -> Iterator[Edge]:
    """One step of the living attempt."""
    step = world.steps[i]
    process = step.process
    if process is None:
        return
    if process.phase == NEXT:
        if process.at == len(step.actions):
            finished = protocol.move_step(step, "finish", SUCCEEDED, process=process._replace(phase=REPORT))
            yield f"finish {i}", with_step(world, i, finished), None
        else:
            yield from _next(protocol, world, i, process.at)
            yield from _raise(protocol, world, i, process.at)
    elif process.phase == INTENT:
        action = step.actions[process.at]
        called = with_action(step, process.at, action._replace(wire=action.wire + 1))
        yield (
            f"call {i}.{process.at}",
            with_step(world, i, called._replace(process=process._replace(phase=CALL))),
            None,
        )
    elif process.phase == CALL:
        yield from _returns(protocol, world, i, process)
    elif process.phase == ANSWER:
        yield f"succeed {i}.{process.at}", _outcome(protocol, world, i, process, "succeed", DONE, 1), None
    else:
        task = SUCCESS if step.task == RUNNING else step.task
        yield f"report {i}", with_step(world, i, step._replace(process=None, task=task)), None


def _next(protocol: Protocol, world: World, i: int, k: int) -> Iterator[Edge]:
    """Before action k: begin it, skip it, try it again, ask its probe, or stop."""
    guards = protocol.guards
    step = world.steps[i]
    state = step.actions[k].state
    if state == DONE and guards.done_skip:
        yield f"skip {i}.{k}", _at(world, i, k + 1), None
    elif state in (None, DONE, PENDING):  # PENDING only without the sweep
        yield from _begin(protocol, world, i, k, "begin", guards.begin_saga)
    elif state == FAILED:
        yield from _begin(protocol, world, i, k, "retry", guards.retry_saga)
    elif state != IN_DOUBT:
        yield f"stop {i}", _stop(protocol, world, i, FAILED), None
    elif step.waited or not guards.wait:
        yield from _in_doubt(protocol, world, i, k)


def _begin(protocol: Protocol, world: World, i: int, k: int, event: str, checked: bool) -> Iterator[Edge]:
    if world.saga != RUNNING and checked:
        yield f"{event} {i}.{k} refused", _stop(protocol, world, i, FAILED), _stopped_by_a_redo(world, i)
        return
    broken = _broken_by_begin(protocol, world, i, k)
    if protocol.is_read_only(i, k):
        yield from _read(protocol, world, i, k, broken)
        return
    action = world.steps[i].actions[k]
    alone = action.state != IN_DOUBT
    if action.state in (None, FAILED, IN_DOUBT):
        action = protocol.move_action(action, event, PENDING)
    else:  # only mutants
        action = action._replace(state=PENDING)
    yield f"{event} {i}.{k}", _intent(put_action(world, i, k, action), i, k, alone), broken


def _intent(world: World, i: int, k: int, alone: bool) -> World:
    """Called again while in doubt, neither this attempt nor a fenced one can speak for the other."""
    step = world.steps[i]
    process, ghost = step.process, step.zombie
    assert process is not None
    if not alone and ghost is not None and ghost.at == k and ghost.phase != NEXT:
        ghost = ghost._replace(alone=False)
    process = process._replace(at=k, phase=INTENT, alone=alone)
    return with_step(world, i, step._replace(process=process, zombie=ghost))


def _stopped_by_a_redo(world: World, i: int) -> str | None:
    """A redo leaves the saga's state alone, so no begin of a step outside its scope is refused."""
    request = world.request
    if (
        world.saga == CANCELLING
        and not world.mode
        and request
        and not request.whole_run
        and i not in request.steps
    ):
        return "a step nobody cleared is stopped by another step's redo"
    return None


def _broken_by_begin(protocol: Protocol, world: World, i: int, k: int) -> str | None:
    step = world.steps[i]
    request = world.request
    state = step.actions[k].state
    if world.saga != RUNNING:
        return "forward effect begins after the cancel committed"
    if step.state == STOPPED:
        return "forward effect begins after the step was stopped"
    if step.state != RUNNING:
        return "forward effect begins after the undo fenced"
    if (request and request.whole_run and request.state not in (HINTED, HELD)) or (
        world.queued and world.queued.whole_run
    ):
        return "forward effect begins while an undo of the whole run is open"
    if any(world.steps[u].state in (UNDONE, UNDOING, PARTLY_UNDONE) for u in protocol.upstream[i]):
        return "stale-upstream step runs"
    if state in UNDONE_ACTION:
        return "action of an undone generation begun again"
    return "DONE action called again" if state == DONE else None


def _read(protocol: Protocol, world: World, i: int, k: int, broken: str | None) -> Iterator[Edge]:
    """READ_ONLY has no intent and appears as DONE or FAILED. What follows a FAILED one has a new seq: not kept here."""
    action = world.steps[i].actions[k]
    if action.state is not None:
        yield f"read again {i}.{k}", _at(world, i, k + 1), broken
        return
    done = put_action(world, i, k, protocol.move_action(action, "read", DONE))
    yield f"read {i}.{k}", _at(done, i, k + 1), broken
    if left(world, "exception"):
        failed = put_action(world, i, k, protocol.move_action(action, "read", FAILED))
        yield f"read {i}.{k} fails", spend(failed, "exception"), broken


def _in_doubt(protocol: Protocol, world: World, i: int, k: int) -> Iterator[Edge]:
    kind = protocol.kinds[i][k]
    action = world.steps[i].actions[k]
    if kind == "E" or not protocol.guards.retry_idempotent:
        yield from _begin(protocol, world, i, k, "retry", protocol.guards.retry_saga)
        return
    if kind == "U":
        answer = DONE if action.standing else FAILED
        verified = put_action(world, i, k, protocol.move_action(action, "verify", answer))
        yield f"verify {i}.{k}: {answer}", verified, None
    yield f"stop {i}, {k} is in doubt", _stop(protocol, world, i, FAILED), None


def _raise(protocol: Protocol, world: World, i: int, k: int) -> Iterator[Edge]:
    """The body does not cope with an action that failed or is in doubt."""
    if world.steps[i].actions[k].state not in (FAILED, IN_DOUBT):
        return
    if left(world, "retry"):
        yield f"raise {i}, retry", spend(_stop(protocol, world, i, WAITING), "retry"), None
    yield f"raise {i}", _stop(protocol, world, i, FAILED), None


def _returns(protocol: Protocol, world: World, i: int, process: Process) -> Iterator[Edge]:
    """The call comes back: an answer, an exception, a proof that nothing happened, or its timeout."""
    k = process.at
    step = world.steps[i]
    action = step.actions[k]
    if action.standing and not action.wire:
        answered = step._replace(process=process._replace(phase=ANSWER))
        yield f"answer {i}.{k}", with_step(world, i, answered), None
    if left(world, "exception"):
        yield f"exception {i}.{k}", spend(_lose(protocol, world, i, process), "exception"), None
        if action.wire and not (action.standing and process.alone):
            yield f"NotApplied {i}.{k}", spend(_not_applied(protocol, world, i, process), "exception"), None
    elif not action.wire and not action.standing:  # dropped on the way: it must end somehow
        yield f"timeout {i}.{k}", _lose(protocol, world, i, process), None


def _lose(protocol: Protocol, world: World, i: int, process: Process) -> World:
    world = _outcome(protocol, world, i, process, "lose", IN_DOUBT, 0)
    return with_step(world, i, world.steps[i]._replace(waited=False))


def _not_applied(protocol: Protocol, world: World, i: int, process: Process) -> World:
    """The call proved that it did nothing. It cannot speak for an earlier attempt that never reported."""
    action = world.steps[i].actions[process.at]
    world = put_action(world, i, process.at, action._replace(wire=action.wire - 1))
    if not process.alone and protocol.guards.reject_alone:
        return _lose(protocol, world, i, process)
    return _outcome(protocol, world, i, process, "reject", FAILED, 0)


def _outcome(
    protocol: Protocol, world: World, i: int, process: Process, event: str, target: str, forward: int
) -> World:
    """The attempt's own outcome, never refused. It changes only the row that it left PENDING."""
    k = process.at
    step = world.steps[i]
    action = step.actions[k]
    if action.state == PENDING:
        step = with_action(step, k, protocol.move_action(action, event, target))
    return with_step(world, i, step._replace(process=Process(k + forward, NEXT, step.generation)))


def _at(world: World, i: int, at: int) -> World:
    step = world.steps[i]
    return with_step(world, i, step._replace(process=Process(at, NEXT, step.generation)))


def _stop(protocol: Protocol, world: World, i: int, task: str) -> World:
    """The attempt ends unfinished, and Airflow is told so unless it knows better."""
    step = world.steps[i]
    if step.state == RUNNING:
        step = protocol.move_step(step, "stop", STOPPED)
    return with_step(world, i, step._replace(process=None, task=task if step.task == RUNNING else step.task))


# -- the world outside, and time ----------------------------------------------------------------------------------


def wire(protocol: Protocol, world: World, i: int) -> Iterator[Edge]:
    """A call on the wire lands or is dropped. The same key lands once, where the service is idempotent."""
    for k, action in enumerate(world.steps[i].actions):
        if action.wire:
            standing = 1 if protocol.kinds[i][k] == "E" else action.standing + 1
            landed = action._replace(standing=standing, wire=action.wire - 1)
            yield f"LAND {i}.{k}", put_action(world, i, k, landed), None
            yield f"drop {i}.{k}", put_action(world, i, k, action._replace(wire=action.wire - 1)), None


def wait_out(protocol: Protocol, world: World, i: int) -> Iterator[Edge]:
    """A1: no call of this step that did not report can land any more. In an unbounded world only time has passed."""
    step = world.steps[i]
    if step.waited or not (step.process or step.state in (UNDOING, STOPPED, PARTLY_UNDONE)):
        return
    if protocol.bounded and _may_land(step):
        return
    yield f"waited out {i}", with_step(world, i, step._replace(waited=True)), None


def _may_land(step: Step) -> bool:
    zombie, process = step.zombie, step.process
    return (
        any(action.wire for action in step.actions)
        or (zombie is not None and zombie.phase == INTENT and zombie.generation == step.generation)
        or (process is not None and process.phase in (INTENT, CALL))
    )


# -- the fenced attempt -------------------------------------------------------------------------------------------


def zombie(protocol: Protocol, world: World, i: int) -> Iterator[Edge]:
    step = world.steps[i]
    ghost = step.zombie
    if ghost is None:
        return
    yield f"zombie {i} dies", with_step(world, i, step._replace(zombie=None)), None
    if ghost.generation != step.generation or ghost.at >= len(step.actions):
        return
    k, action = ghost.at, step.actions[ghost.at]
    if ghost.phase == NEXT and action.state in (None, FAILED) and not protocol.guards.begin_fence:
        begun = put_action(
            world, i, k, protocol.move_action(action, "retry" if action.state else "begin", PENDING)
        )
        yield f"zombie begins {i}.{k}", begun, "a fenced process begins a call"
    elif ghost.phase == INTENT:
        called = with_action(step, k, action._replace(wire=action.wire + 1))
        yield (
            f"zombie calls {i}.{k}",
            with_step(world, i, called._replace(zombie=ghost._replace(phase=CALL))),
            None,
        )
    elif ghost.phase == CALL and action.standing:
        answered = step._replace(zombie=ghost._replace(phase=ANSWER))
        yield f"zombie has its answer {i}.{k}", with_step(world, i, answered), None
    elif ghost.phase == ANSWER:
        yield _late_yes(protocol, with_step(world, i, step._replace(zombie=None)), i, k)
    if ghost.phase == CALL and left(world, "exception"):
        yield from _late_no(protocol, world, i, ghost)


def _late_no(protocol: Protocol, world: World, i: int, ghost: Process) -> Iterator[Edge]:
    """The fenced attempt proves that its call did nothing. It cannot speak for another attempt."""
    k = ghost.at
    step = world.steps[i]._replace(zombie=None)
    action = step.actions[k]
    if ghost.alone and (action.wire or action.standing):
        return
    if action.state == IN_DOUBT and (ghost.alone or not protocol.guards.reject_alone):
        late = with_action(step, k, protocol.move_action(action, "late no", FAILED))
    elif action.state == PENDING and step.state == STOPPED:  # marked failed: the row is still its own
        late = with_action(step, k, protocol.move_action(action, "reject", FAILED))
    else:
        return
    world = spend(with_step(world, i, late), "exception")
    yield f"LATE NO {i}.{k}", protocol.resolved(world, i) if protocol.guards.late_no else world, None


def _late_yes(protocol: Protocol, world: World, i: int, k: int) -> Edge:
    """The fenced attempt's answer came in. Nothing is refused; what it finds decides what it changes."""
    step = world.steps[i]
    action = step.actions[k]
    broken = None
    if action.state == PENDING and step.state == STOPPED:  # marked failed: the row is still its own
        world = put_action(world, i, k, protocol.move_action(action, "succeed", DONE))
    elif action.state in (IN_DOUBT, FAILED):
        world = put_action(world, i, k, protocol.move_action(action, "late yes", DONE))
        world = protocol.reopen(world, i)
    elif action.state == COMPENSATED:
        if protocol.guards.late_doubt:
            doubted = protocol.move_action(action, "late yes", IN_DOUBT)
            world = with_step(world, i, with_action(step, k, doubted)._replace(waited=True))
        else:  # only mutants: no table has this move
            world = put_action(world, i, k, action._replace(state=DONE))
            if not action.standing:
                broken = "a late answer turns an undone action into DONE though nothing stands"
        world = protocol.reopen(world, i)
    if world.saga == CANCELLED and any(
        late.state in (DONE, IN_DOUBT) and not protocol.is_read_only(i, at)
        for at, late in enumerate(world.steps[i].actions)
    ):
        broken = "a late answer is lost: CANCELLED with an open action"
    return f"LATE YES {i}.{k}", world, broken
