"""What must hold in every world, and which worlds are an end."""

from __future__ import annotations

from tests.model.protocol import RESIDUAL, Protocol
from tests.model.world import (
    ACCEPTED,
    AWAITED,
    CANCELLED,
    COMPENSATED,
    COMPLETED,
    FAILED,
    HELD,
    IN_DOUBT,
    INCOMPLETE,
    PARTIALLY_CANCELLED,
    PARTLY_UNDONE,
    RUNNING,
    SUSPENDED,
    Action,
    Step,
    World,
)

SAYS_NOTHING_STANDS = frozenset({None, FAILED, COMPENSATED})


def broken_promise(protocol: Protocol, world: World) -> str | None:
    """P4 and P6: what the log says against what is true outside."""
    for i, step in enumerate(world.steps):
        for actions in (step.actions, step.old):
            for k, action in enumerate(actions):
                broken = _of_action(protocol, world.saga, protocol.is_read_only(i, k), action)
                if broken:
                    return broken
    if world.saga == SUSPENDED and not (protocol.keeps or protocol.places):
        return "SUSPENDED though nobody kept anything"
    left = any(step.state == PARTLY_UNDONE for step in world.steps)
    if left and world.saga == SUSPENDED and protocol.places and world.request is None:
        return "SUSPENDED over what an undo has left"
    if world.saga == PARTIALLY_CANCELLED and not _names_something(protocol, world.steps):
        return "PARTIALLY_CANCELLED with nothing named"
    return None


def _of_action(protocol: Protocol, saga: str | None, read_only: bool, action: Action) -> str | None:
    state, standing = action.state, action.standing
    if read_only:
        return "READ_ONLY action in doubt" if state == IN_DOUBT else None
    if standing > 1:
        return "two live effects of one action in one generation"
    if standing and protocol.bounded and state in SAYS_NOTHING_STANDS:
        return f"forgotten effect: it stands, the log says {state}"
    if saga == CANCELLED:
        if state in RESIDUAL:
            return "CANCELLED with a residual in the log"
        if protocol.bounded and state != ACCEPTED and (standing or action.wire):
            return "CANCELLED with a standing or possible effect"
    return None


def _names_something(protocol: Protocol, steps: tuple[Step, ...]) -> bool:
    return any(
        action.state in RESIDUAL and not protocol.is_read_only(i, k)
        for i, step in enumerate(steps)
        for k, action in enumerate(step.actions)
    )


def is_end(protocol: Protocol, world: World) -> bool:
    """Nothing is left to do, unless a person wants something."""
    if (
        world.run == RUNNING
        or world.undo is not None
        or any(step.process is not None for step in world.steps)
    ):
        return False
    if world.saga == FAILED:
        if world.request is not None:
            return world.request.state == HELD  # a person's to release
        return protocol.policy == "keep" or world.mode == INCOMPLETE
    if any(action.note == AWAITED for step in world.steps for action in step.actions):
        return False
    return world.request is None and world.saga in (
        None,
        COMPLETED,
        CANCELLED,
        PARTIALLY_CANCELLED,
        SUSPENDED,
    )
