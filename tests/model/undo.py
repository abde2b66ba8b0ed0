"""The undo run: freeze, verify, compensate, settle; killed, revived, and its own zombie. PROTOCOL 5 and 6."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.protocol import Protocol
from tests.model.world import (
    ANSWER,
    ASKED,
    AWAITED,
    CALL,
    CANCELLING,
    COMPENSATED,
    COMPENSATING,
    COMPENSATION_FAILED,
    DONE,
    FAILED,
    FROZEN,
    HELD,
    HINTED,
    IN_DOUBT,
    NEXT,
    NON_COMPENSABLE,
    PARTLY_UNDONE,
    PENDING,
    REQUESTED,
    RUNNING,
    SETTLED,
    TRY_FAILED,
    UNAVAILABLE,
    UNDO,
    UNDOING,
    UNDONE,
    WITHDRAWN,
    Action,
    Edge,
    Undo,
    World,
    left,
    put_action,
    spend,
)


def plan(protocol: Protocol, world: World) -> Iterator[Edge]:
    """An undo run begins: it freezes the request, finds the hint void, or takes a frozen request over."""
    request = world.request
    if request is None or world.undo is not None:
        return
    if request.state == FROZEN:
        taken = protocol.move_request(request, "take over", FROZEN)
        yield "undo resumes", world._replace(request=taken, undo=Undo()), None
        return
    broken = None
    if request.state == HELD and protocol.guards.held:
        return
    if request.state in (HINTED, HELD):
        if world.saga != FAILED and protocol.guards.hint_recheck:
            yield "hint withdrawn", protocol.close_request(world, "withdraw", WITHDRAWN), None
            return
        world, broken = _policy(protocol, world)
    elif world.run == RUNNING and request.whole_run and not protocol.guards.plan_from_row:
        return
    if protocol.can_freeze(world):
        frozen = protocol.freeze(world)
        if not request.whole_run and not protocol.guards.redo_scope:
            frozen = frozen._replace(saga=CANCELLING)
        yield "undo freezes", frozen._replace(undo=Undo()), broken


def _policy(protocol: Protocol, world: World) -> tuple[World, str | None]:
    """FAILED → CANCELLING with the freeze of the hint."""
    request = world.request
    assert request is not None
    broken = None
    if request.state == HELD:
        world = world._replace(request=request._replace(state=HINTED))  # only mutants
        broken = "a held hint is carried out, and nobody released it"
    elif world.saga != FAILED:
        broken = "automatic undo of a saga that was resumed"
    elif world.run == RUNNING and protocol.slow and world.attached_at == world.clears:
        broken = "automatic undo of a saga that was resumed, by an old reading of its run"
    if world.saga == FAILED:
        return protocol.stop_saga(world, "policy", CANCELLING, UNDO), broken
    return world._replace(saga=CANCELLING, mode=UNDO, stopped_at=world.clears), broken  # only mutants


def undo_ends(protocol: Protocol, world: World) -> Iterator[Edge]:
    """The undo run is killed; or a second try of it begins while the first lives on."""
    if world.undo is None or world.request is None:
        return
    if left(world, "crash"):
        yield "undo SIGKILL", spend(world._replace(undo=None), "crash"), None
    if left(world, "undo_zombie") and world.undo_zombie is None:
        taken = protocol.move_request(world.request, "take over", FROZEN)
        second = world._replace(request=taken, undo_zombie=world.undo, undo=Undo())
        yield "undo: a second try, the first lives", spend(second, "undo_zombie"), None


def undo(protocol: Protocol, world: World) -> Iterator[Edge]:
    if world.undo is None or world.request is None:
        return
    if world.undo.phase != NEXT:
        yield from _compensate(protocol, world, world.undo)
        return
    seized = [i for i in world.request.steps if world.steps[i].state == UNDOING]
    unsettled = [i for i in seized if not _step_is_settled(protocol, world, i)]
    halted = protocol.halt and any(
        action.state == COMPENSATION_FAILED and protocol.is_settled(i, k, action)
        for i, step in enumerate(world.steps)
        for k, action in enumerate(step.actions)
    )
    if halted or not unsettled:
        yield "settle", _settle(protocol, world, seized), None
        return
    for i in unsettled:
        later = [d for d in protocol.downstream[i] if d in unsettled]
        if later and protocol.guards.order_log:
            continue
        yield from _next(protocol, world, i, "a is undone before a later b" if later else None)


def _step_is_settled(protocol: Protocol, world: World, i: int) -> bool:
    return all(protocol.is_settled(i, k, action) for k, action in enumerate(world.steps[i].actions))


def _next(protocol: Protocol, world: World, i: int, broken: str | None) -> Iterator[Edge]:
    """The last action of the step that is not settled."""
    guards = protocol.guards
    step = world.steps[i]
    k = max(k for k, action in enumerate(step.actions) if not protocol.is_settled(i, k, action))
    action, kind = step.actions[k], protocol.kinds[i][k]
    if action.state == PENDING:  # only without the sweep
        action = action._replace(state=DONE)
    if not step.waited and guards.wait and (action.state != DONE or guards.wait_done):
        return
    if action.state == IN_DOUBT:
        yield from _in_doubt(protocol, world, i, k, broken)
    elif kind == "N":
        yield (
            f"stand {i}.{k}",
            put_action(world, i, k, protocol.move_action(action, "stand", NON_COMPENSABLE)),
            None,
        )
    elif kind == "M" and action.state != COMPENSATION_FAILED:
        gone = protocol.move_action(action, "give up", COMPENSATION_FAILED)
        yield f"the compensation of {i}.{k} is gone", put_action(world, i, k, gone), broken
    elif kind == "M":
        yield (
            f"the compensation of {i}.{k} is still gone",
            put_action(world, i, k, action._replace(note="")),
            broken,
        )
    else:
        yield f"compensate {i}.{k}", _call(protocol, world, i, k, action), broken


def _in_doubt(protocol: Protocol, world: World, i: int, k: int, broken: str | None) -> Iterator[Edge]:
    action, kind = world.steps[i].actions[k], protocol.kinds[i][k]
    if kind == "E":
        yield f"compensate in doubt {i}.{k}", _call(protocol, world, i, k, action), broken
        return
    if kind == "N":
        stands = protocol.move_action(action, "stand", NON_COMPENSABLE)
        yield f"stand {i}.{k}", put_action(world, i, k, stands), None
        return
    if kind == "U":
        answer = DONE if action.standing else FAILED
        verified = protocol.move_action(action, "verify", answer)
        yield f"undo verifies {i}.{k}: {answer}", put_action(world, i, k, verified), None
    yield f"{i}.{k} is a person's", put_action(world, i, k, action._replace(note=ASKED)), None


def _call(protocol: Protocol, world: World, i: int, k: int, action: Action) -> World:
    compensating = protocol.move_action(action, "compensate", COMPENSATING)
    return put_action(world, i, k, compensating)._replace(undo=Undo(i, k, CALL))


def _compensate(protocol: Protocol, world: World, undo: Undo) -> Iterator[Edge]:
    i, k = undo.step, undo.action
    action = world.steps[i].actions[k]
    if undo.phase == CALL:
        yield from _calls(protocol, world, undo, action)
    elif undo.phase == ANSWER:
        yield f"confirm {i}.{k}", _verdict(protocol, world, undo, "confirm", COMPENSATED), None
        if left(world, "later") and action.state == COMPENSATING:
            yield f"later {i}.{k}", spend(_put_off(protocol, world, undo, 1), "later"), None
    else:
        yield f"undo tries again {i}.{k}", world._replace(undo=undo._replace(phase=CALL)), None
        broken = "an outage of a service uses up the tries" if undo.phase == UNAVAILABLE else None
        yield f"give up {i}.{k}", _verdict(protocol, world, undo, "give up", COMPENSATION_FAILED), broken


def _calls(protocol: Protocol, world: World, undo: Undo, action: Action) -> Iterator[Edge]:
    i, k = undo.step, undo.action
    broken = None
    if action.state == COMPENSATED and protocol.guards.undo_fence:
        broken = "a compensation that was confirmed runs again"
    landed = put_action(world, i, k, action._replace(standing=0))
    yield f"undo calls {i}.{k}", landed._replace(undo=undo._replace(phase=ANSWER)), broken
    failed = undo._replace(phase=TRY_FAILED)
    if left(world, "undo_fails"):
        yield f"undo calls {i}.{k}, answer lost", spend(landed._replace(undo=failed), "undo_fails"), None
        yield f"undo calls {i}.{k}, fails", spend(world._replace(undo=failed), "undo_fails"), None
    if left(world, "unavailable"):
        if protocol.guards.unavailable_is_free:
            away = _put_off(protocol, world, undo, action.standing)
        else:
            away = world._replace(undo=undo._replace(phase=UNAVAILABLE))
        yield f"undo calls {i}.{k}, unavailable", spend(away, "unavailable"), None


def _verdict(protocol: Protocol, world: World, undo: Undo, event: str, target: str) -> World:
    action = world.steps[undo.step].actions[undo.action]
    if action.state == COMPENSATING:
        action = protocol.move_action(action, event, target)
    return put_action(world, undo.step, undo.action, action)._replace(undo=Undo())


def _put_off(protocol: Protocol, world: World, undo: Undo, standing: int) -> World:
    action = world.steps[undo.step].actions[undo.action]
    later = protocol.move_action(action, "later", COMPENSATING, note=AWAITED, standing=standing)
    return put_action(world, undo.step, undo.action, later)._replace(undo=Undo())


def _settle(protocol: Protocol, world: World, seized: list[int]) -> World:
    """Residual, steps, saga and the next request, in one transaction."""
    request = world.request
    assert request is not None
    steps = list(world.steps)
    for i in seized:
        target = PARTLY_UNDONE if protocol.has_residual(i, steps[i]) else UNDONE
        steps[i] = protocol.move_step(steps[i], "undone", target)
    world = protocol.close_request(world._replace(steps=tuple(steps), undo=None), "settle", SETTLED)
    queued = world.queued
    if queued is not None:
        world = world._replace(request=protocol.move_request(queued, "next", REQUESTED), queued=None)
        if protocol.guards.queue_keeps_cancelling:
            return world
    if (request.whole_run or queued is not None) and world.saga == CANCELLING:
        return protocol.move_saga(world, "settle", protocol.after_undo(world))
    return world


def zombie_undo(protocol: Protocol, world: World) -> Iterator[Edge]:
    """The older try of the undo: its call in flight lands, and then it may write nothing."""
    ghost = world.undo_zombie
    if ghost is None:
        return
    yield "zombie undo ends", world._replace(undo_zombie=None), None
    if ghost.phase == NEXT:
        return
    i, k = ghost.step, ghost.action
    action = world.steps[i].actions[k]
    if ghost.phase == CALL:
        if world.steps[i].generation == 1:
            landed = put_action(world, i, k, action._replace(standing=0))
            yield (
                f"zombie undo calls {i}.{k}",
                landed._replace(undo_zombie=ghost._replace(phase=ANSWER)),
                None,
            )
            yield (
                f"zombie undo calls {i}.{k}, fails",
                world._replace(undo_zombie=ghost._replace(phase=TRY_FAILED)),
                None,
            )
    elif not protocol.guards.undo_fence:
        verdict = COMPENSATED if ghost.phase == ANSWER else COMPENSATION_FAILED
        written = put_action(world, i, k, action._replace(state=verdict, note=""))._replace(undo_zombie=None)
        yield f"zombie undo writes {i}.{k}", written, _overwritten(action, verdict)


def _overwritten(action: Action, verdict: str) -> str | None:
    if action.state == COMPENSATED and verdict == COMPENSATION_FAILED:
        return "what was confirmed becomes COMPENSATION_FAILED"
    return "a zombie undo overwrites a newer verdict" if action.state != COMPENSATING else None
