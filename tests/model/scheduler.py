"""Airflow and the machines: tasks, runs, crashes and kills; and what people press in Airflow's own UI."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.protocol import Protocol
from tests.model.world import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    FAILED,
    KEEP,
    NEXT,
    PENDING,
    RUNNING,
    STOPPED,
    SUCCESS,
    UNDO,
    WAITING,
    Edge,
    Process,
    Reading,
    Step,
    World,
    left,
    spend,
    with_step,
)

MARKED = "marked failed"


def process_ends(protocol: Protocol, world: World, i: int) -> Iterator[Edge]:
    """A process is lost, or Airflow kills it because its task is not to run any more."""
    step = world.steps[i]
    process = step.process
    if process is None:
        if step.task == RUNNING:  # Airflow finds out
            if left(world, "retry"):
                yield (
                    f"lost {i}, retry",
                    spend(with_step(world, i, step._replace(task=WAITING)), "retry"),
                    None,
                )
            yield f"lost {i}", with_step(world, i, step._replace(task=FAILED)), None
        return
    gone = with_step(world, i, step._replace(process=None))
    if left(world, "crash"):
        yield f"SIGKILL {i} at {process.phase}", spend(gone, "crash"), None
    elif step.task != RUNNING:
        yield f"kill {i} at {process.phase}", gone, None
    if step.task == FAILED and step.state == RUNNING and process.phase == NEXT:
        yield f"killed {i} says why", _says_why(protocol, world, i), None


def _says_why(protocol: Protocol, world: World, i: int) -> World:
    """on_kill: the step reads that somebody marked it failed, stops, and asks itself if it was the run."""
    stopped = protocol.move_step(world.steps[i], "mark", STOPPED, process=None)
    world = with_step(world, i, stopped)
    return undo_marked_run(protocol, world) if world.run == FAILED else world


def undo_marked_run(protocol: Protocol, world: World) -> World:
    """The run was marked failed: from PENDING it never began, from RUNNING and COMPLETED it is undone."""
    if world.saga in (None, PENDING):
        return protocol.stop_saga(world, "cancel", CANCELLED)
    if world.saga == COMPLETED and not protocol.guards.mark_completed:
        return world
    kept = world.saga == CANCELLING and world.mode == KEEP and not protocol.guards.keep_rank
    if world.saga in (RUNNING, COMPLETED) or kept:
        return protocol.ask(
            protocol.stop_saga(world, "undo", CANCELLING, UNDO), protocol.steps, whole_run=True
        )
    return world


def run_ends(protocol: Protocol, world: World) -> Iterator[Edge]:
    if world.run != RUNNING:
        return
    tasks = [step.task for step in world.steps]
    for i in protocol.steps:
        if tasks[i] == WAITING and world.steps[i].state is None and left(world, "skip"):
            skipped = with_step(world, i, world.steps[i]._replace(task=SUCCESS))
            yield f"{i} is skipped", spend(skipped, "skip"), None
        if tasks[i] == WAITING and any(tasks[u] == FAILED for u in protocol.upstream[i]):
            yield f"upstream of {i} failed", with_step(world, i, world.steps[i]._replace(task=FAILED)), None
    if all(task == SUCCESS for task in tasks):
        yield "run success", world._replace(run=SUCCESS), None
    elif all(task in (SUCCESS, FAILED) for task in tasks):
        yield "run failed", world._replace(run=FAILED), None


# -- people, in Airflow's UI --------------------------------------------------------------------------------------


def mark_run(protocol: Protocol, world: World) -> Iterator[Edge]:
    """MARK FAILED on the run, also on one that has succeeded: with the listener, without it, or with it late."""
    if not left(world, "mark") or world.run == FAILED:
        return
    steps = tuple(
        step._replace(task=FAILED, cleared=False) if step.task in (RUNNING, WAITING) else step
        for step in world.steps
    )
    marked = spend(world._replace(run=FAILED, steps=steps), "mark")
    yield "MARK FAILED, listener lost", marked, None
    if not protocol.listener:
        return
    told = undo_marked_run(protocol, marked)
    unheard = told.saga in (RUNNING, COMPLETED)
    yield (
        "MARK FAILED",
        told,
        "a run was marked failed, the listener heard it, and nothing follows" if unheard else None,
    )
    if left(world, "slow") and world.reading is None:
        yield (
            "MARK FAILED, listener late",
            spend(marked._replace(reading=Reading(MARKED, world.clears)), "slow"),
            None,
        )


def mark_task(protocol: Protocol, world: World) -> Iterator[Edge]:
    """MARK TASK FAILED. The listener's thread fences the step; what is PENDING stays so until A1."""
    if not left(world, "mark_task") or world.run != RUNNING:
        return
    for i, step in enumerate(world.steps):
        if step.task not in (RUNNING, WAITING):
            continue
        marked = spend(with_step(world, i, step._replace(task=FAILED, cleared=False)), "mark_task")
        yield f"MARK TASK {i} FAILED, listener lost", marked, None
        if protocol.listener and step.state == RUNNING and not (step.process and step.zombie):
            yield f"MARK TASK {i} FAILED", with_step(marked, i, _fenced(protocol, marked.steps[i])), None


def _fenced(protocol: Protocol, step: Step) -> Step:
    step = protocol.move_step(step, "mark", STOPPED)
    open_call = any(action.state == PENDING for action in step.actions)
    step = step._replace(waited=step.waited and not open_call)
    if step.process is None or not protocol.guards.mark_fence:
        return step
    ghost: Process = step.process
    return step._replace(process=None, zombie=ghost)


def clear(protocol: Protocol, world: World) -> Iterator[Edge]:
    """CLEAR one task, one with all later ones, or all; or a task that is no step."""
    if left(world, "clear_plain"):
        yield (
            "CLEAR a plain task",
            spend(world._replace(run=RUNNING, clears=world.clears + 1), "clear_plain"),
            None,
        )
    if not left(world, "clear"):
        return
    wishes = {protocol.steps}
    for i in protocol.steps:
        wishes |= {(i,), (i, *protocol.downstream[i])}
    for wish in sorted(wishes):
        if any(world.steps[i].task != WAITING for i in wish):
            yield f"CLEAR {wish}", spend(_cleared(world, wish), "clear"), None


def _cleared(world: World, wish: tuple[int, ...]) -> World:
    steps = tuple(
        step._replace(task=WAITING, cleared=True) if i in wish and step.task != WAITING else step
        for i, step in enumerate(world.steps)
    )
    return world._replace(run=RUNNING, clears=world.clears + 1, steps=steps)
