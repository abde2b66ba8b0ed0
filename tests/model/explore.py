"""Visits every world that a configuration can reach: is a promise broken in it, is there a way from it to an end?"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.model import attach, calls, movers, people, scheduler, undo
from tests.model.invariants import broken_promise, is_end
from tests.model.protocol import IllegalMove, Protocol, Taken
from tests.model.world import CANCELLED, PARTIALLY_CANCELLED, SUSPENDED, Edge, World, left

Rule = Callable[[Protocol, World], Iterator[Edge]]
StepRule = Callable[[Protocol, World, int], Iterator[Edge]]

# What happens by itself.
STEP_RULES: tuple[StepRule, ...] = (
    attach.attach,
    calls.work,
    calls.wire,
    calls.wait_out,
    calls.zombie,
    scheduler.process_ends,
    movers.sweep_lost,
    movers.due,
)
RULES: tuple[Rule, ...] = (
    scheduler.run_ends,
    movers.listener_opens,
    movers.end_of_run,
    movers.hints,
    movers.plan_reads_failed_run,
    movers.suspend,
    movers.expire,
    undo.plan,
    undo.undo_ends,
    undo.undo,
    undo.zombie_undo,
)
# What a person does to settle what stands: always open to them, but nothing may hang on it.
SETTLING_RULES: tuple[Rule, ...] = (people.release,)
SETTLING_STEP_RULES: tuple[StepRule, ...] = (people.resolve, people.answer)
# What a person wants.
WISHES: tuple[Rule, ...] = (
    scheduler.mark_run,
    scheduler.mark_task,
    scheduler.clear,
    people.cancel,
    people.keep,
    people.undo_from,
)

BY_ITSELF, SETTLING, WISH = 1, 2, 4


@dataclass
class Exploration:
    """What came of it. ``trace``: the shortest way to the violation."""

    worlds: int = 0
    edges: int = 0
    violation: str | None = None
    trace: list[str] = field(default_factory=list)
    taken: set[Taken] = field(default_factory=set)

    @property
    def story(self) -> str:
        return f"{self.violation} after {len(self.trace)} steps: {' | '.join(self.trace)}"


class _Graph:
    """The worlds in the order of their discovery, and the edges between them by number."""

    def __init__(self, first: World) -> None:
        self.worlds = [first]
        self.number = {first: 0}
        self.found_from: list[tuple[int, str]] = [(-1, "")]
        self.sources = array("i")
        self.targets = array("i")
        self.kinds = array("b")

    def add(self, source: int, label: str, target: World, kind: int) -> bool:
        """Whether the target is new."""
        number = self.number.setdefault(target, len(self.worlds))
        new = number == len(self.worlds)
        if new:
            self.worlds.append(target)
            self.found_from.append((source, label))
        self.sources.append(source)
        self.targets.append(number)
        self.kinds.append(kind)
        return new

    def trace(self, number: int) -> list[str]:
        labels = []
        while number > 0:
            number, label = self.found_from[number]
            labels.append(label)
        return labels[::-1]

    def cannot_reach(self, ends: Iterable[int], kinds: int) -> Iterator[int]:
        """Worlds from which no way over edges of these kinds leads to an end."""
        before: list[list[int]] = [[] for _ in self.worlds]
        for source, target, kind in zip(self.sources, self.targets, self.kinds, strict=True):
            if kind & kinds:
                before[target].append(source)
        reached = bytearray(len(self.worlds))
        todo = list(ends)
        for number in todo:
            reached[number] = 1
        while todo:
            for source in before[todo.pop()]:
                if not reached[source]:
                    reached[source] = 1
                    todo.append(source)
        return (number for number, seen in enumerate(reached) if not seen)


def edges_of(protocol: Protocol, world: World) -> Iterator[tuple[int, Edge]]:
    for i in protocol.steps:
        for step_rule in STEP_RULES:
            for edge in step_rule(protocol, world, i):
                yield BY_ITSELF, edge
        for step_rule in SETTLING_STEP_RULES:
            for edge in step_rule(protocol, world, i):
                yield SETTLING, edge
    for rule in RULES:
        for edge in rule(protocol, world):
            yield BY_ITSELF, edge
    for rule in SETTLING_RULES:
        for edge in rule(protocol, world):
            yield SETTLING, edge
    for rule in WISHES:
        for edge in rule(protocol, world):
            yield WISH, edge


def worlds_of(protocol: Protocol) -> Iterator[tuple[World, str, World]]:
    """Every edge there is, as what was before, what happened, and what is after."""
    graph = _Graph(protocol.first_world())
    for number, world in enumerate(graph.worlds):  # grows while it is read
        for kind, (label, target, _) in edges_of(protocol, world):
            graph.add(number, label, target, kind)
            yield world, label, target


def explore(protocol: Protocol, at_most: int = 3_000_000) -> Exploration:
    """Breadth first, so that the first violation found is one of the shortest.

    :param at_most: worlds; an exploration that is cut off there has checked no ends and says so as a violation.
    """
    graph = _Graph(protocol.first_world())
    found = Exploration(taken=protocol.taken)
    with _without_garbage_collection():
        _visit_all(protocol, graph, found, at_most)
        found.worlds, found.edges = len(graph.worlds), len(graph.sources)
        if found.violation is None:
            _check_ends(protocol, graph, found)
    return found


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Worlds hold no cycles; looking for some among hundreds of thousands costs a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _visit_all(protocol: Protocol, graph: _Graph, found: Exploration, at_most: int) -> None:
    for number, world in enumerate(graph.worlds):  # grows while it is read
        try:
            for kind, (label, target, broken) in edges_of(protocol, world):
                new = graph.add(number, label, target, kind)
                if broken is None and new:
                    broken = broken_promise(protocol, target)
                if broken is not None:
                    found.violation, found.trace = broken, [*graph.trace(number), label]
                    return
        except IllegalMove as illegal:
            found.violation, found.trace = f"illegal move: {illegal}", graph.trace(number)
            return
        if len(graph.worlds) > at_most:
            found.violation = f"cut off at {at_most} worlds"
            return


def _check_ends(protocol: Protocol, graph: _Graph, found: Exploration) -> None:
    """Each world reaches an end by itself; each PARTIALLY_CANCELLED one can be closed by persons."""
    ends = (number for number, world in enumerate(graph.worlds) if is_end(protocol, world))
    dead = next(graph.cannot_reach(ends, BY_ITSELF), None)
    if dead is not None:
        found.violation, found.trace = "no way to an end without a person", graph.trace(dead)
        return
    closed = (number for number, world in enumerate(graph.worlds) if world.saga in (CANCELLED, SUSPENDED))
    for number in graph.cannot_reach(closed, BY_ITSELF | SETTLING):
        if graph.worlds[number].saga == PARTIALLY_CANCELLED:
            found.violation, found.trace = "PARTIALLY_CANCELLED that no person can close", graph.trace(number)
            return
    if not all(kind in "UEO" for kinds in protocol.kinds for kind in kinds):
        return
    closed = (number for number, world in enumerate(graph.worlds) if world.saga == CANCELLED)
    for number in graph.cannot_reach(closed, BY_ITSELF | WISH):
        world = graph.worlds[number]
        if world.saga == PARTIALLY_CANCELLED and left(world, "cancel"):
            found.violation, found.trace = (
                "a new undo cannot undo what an earlier one left",
                graph.trace(number),
            )
            return
