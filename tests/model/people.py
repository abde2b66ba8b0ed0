"""What a person asks of the saga itself: cancel, keep, undo, resolve, answer, release. PROTOCOL 3, 5 and 8."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.protocol import Protocol
from tests.model.world import (
    ACCEPTED,
    CANCELLED,
    CANCELLING,
    COMPENSATED,
    COMPENSATING,
    COMPENSATION_FAILED,
    COMPLETED,
    DONE,
    FAILED,
    HELD,
    HINTED,
    IN_DOUBT,
    KEEP,
    NON_COMPENSABLE,
    PARTIALLY_CANCELLED,
    PARTLY_UNDONE,
    PENDING,
    RUNNING,
    STOPPED,
    SUSPENDED,
    UNDO,
    WITHDRAWN,
    Action,
    Edge,
    World,
    left,
    put_action,
    spend,
)


def cancel(protocol: Protocol, world: World) -> Iterator[Edge]:
    """CANCEL while it runs, UNDO afterwards: to the protocol one wish."""
    if not left(world, "cancel"):
        return
    if world.saga in (None, PENDING):
        yield "CANCEL", spend(protocol.stop_saga(world, "cancel", CANCELLED), "cancel"), None
        return
    kept = world.saga == CANCELLING and world.mode == KEEP
    if kept or world.saga in (RUNNING, FAILED, COMPLETED, SUSPENDED, PARTIALLY_CANCELLED):
        event = "cancel" if world.saga in (RUNNING, CANCELLING) and world.run == RUNNING else "undo"
        stopping = protocol.stop_saga(world, event, CANCELLING, UNDO)
        yield event.upper(), spend(protocol.ask(stopping, protocol.steps, whole_run=True), "cancel"), None


def keep(protocol: Protocol, world: World) -> Iterator[Edge]:
    if left(world, "keep") and world.saga == RUNNING and world.request is None:
        yield "CANCEL KEEP", spend(protocol.stop_saga(world, "cancel keep", CANCELLING, KEEP), "keep"), None


def undo_from(protocol: Protocol, world: World) -> Iterator[Edge]:
    """UNDO FROM a step: it and those after it, of a saga at rest. The saga ends with it; what came before stays."""
    if not left(world, "place") or world.saga not in (FAILED, COMPLETED, SUSPENDED):
        return
    if any(step.state == RUNNING for step in world.steps):
        return
    request = world.request
    if request is not None and request.state not in (HINTED, HELD):
        return
    if request is not None:
        world = protocol.close_request(world, "withdraw", WITHDRAWN)
    for i in protocol.steps:
        scope = [each for each in (i, *protocol.downstream[i]) if world.steps[each].state is not None]
        if i in scope and any(protocol.has_residual(each, world.steps[each]) for each in scope):
            stopping = protocol.stop_saga(world, "undo", CANCELLING, UNDO)
            yield f"UNDO FROM {i}", spend(protocol.ask(stopping, scope, whole_run=True), "place"), None


def release(protocol: Protocol, world: World) -> Iterator[Edge]:
    request = world.request
    if request is not None and request.state == HELD:
        yield "RELEASE", world._replace(request=protocol.move_request(request, "release", HINTED)), None


def answer(protocol: Protocol, world: World, i: int) -> Iterator[Edge]:
    """Where no probe can tell, a person says what became of an action in doubt; and it is so."""
    step = world.steps[i]
    if step.state != STOPPED or not protocol.bounded or not (step.waited or not protocol.guards.answer_wait):
        return
    for k, action in enumerate(step.actions):
        if action.state == IN_DOUBT:
            known = protocol.move_action(action, "answer", DONE if action.standing else FAILED)
            yield f"ANSWER {i}.{k}", put_action(world, i, k, known), None


def resolve(protocol: Protocol, world: World, i: int) -> Iterator[Edge]:
    """A person undoes what stands, or accepts it."""
    step = world.steps[i]
    if step.state != PARTLY_UNDONE or world.request is not None:
        return
    if not step.waited and protocol.guards.resolve_wait:
        return
    for k, action in enumerate(step.actions):
        if _can_resolve(protocol, i, k, action):
            for target, standing in ((COMPENSATED, 0), (ACCEPTED, action.standing)):
                resolved = protocol.move_action(action, "resolve", target, standing=standing)
                yield (
                    f"RESOLVE {i}.{k}: {target}",
                    protocol.resolved(put_action(world, i, k, resolved), i),
                    None,
                )


def _can_resolve(protocol: Protocol, i: int, k: int, action: Action) -> bool:
    if protocol.is_read_only(i, k):
        return False
    if action.state in (DONE, COMPENSATING):
        return protocol.guards.resolve_done
    return action.state in (COMPENSATION_FAILED, NON_COMPENSABLE, IN_DOUBT)
