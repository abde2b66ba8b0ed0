"""The protocol, explored exhaustively: every promise holds in every world, and each guard is needed for it.

The model makes its moves through the tables of ``airflow_saga.core.states``, which the database enforces too.
"""

from __future__ import annotations

import pytest

from tests.model.configurations import (
    A1_IS_NEEDED,
    CONFIGURATIONS,
    COVERING,
    Configuration,
    configuration,
)
from tests.model.explore import explore, worlds_of
from tests.model.guards import GUARDS, Guards
from tests.model.mutants import KILLED
from tests.model.protocol import LEGAL, IllegalMove, Protocol, Taken
from tests.model.world import CANCELLED, QUEUED, World

NOT_IN_THE_MODEL: dict[Taken, str] = {
    ("step", "expire", "UNDONE", "PARTLY_UNDONE"): (
        "a step of the model is undone as a whole, so nothing of an undone one was kept. The store's tests make it."
    ),
    ("action", "twin", None, "DONE"): (
        "an action that is not idempotent is called again only after A1, so two effects of it need a world that breaks "
        "A1; and the model's steps have a fixed number of actions. The store's tests make it."
    ),
}
ONLY_IN_A_LARGE_CONFIGURATION: dict[Taken, str] = {
    ("request", "widen", QUEUED, QUEUED): "chain: two clears, no probe",
}


def _parameter(found: Configuration) -> object:
    marks = [pytest.mark.slow, pytest.mark.timeout(600)] if found.slow else []
    return pytest.param(found, id=found.name, marks=marks)


@pytest.mark.parametrize("found", [_parameter(found) for found in CONFIGURATIONS])
def test_every_promise_holds_and_every_world_reaches_an_end(found: Configuration) -> None:
    exploration = explore(Protocol(found))
    assert exploration.violation is None, exploration.story


def test_without_a1_a_probe_proves_nothing_and_there_are_two_effects() -> None:
    exploration = explore(Protocol(A1_IS_NEEDED))
    assert exploration.violation == "two live effects of one action in one generation", exploration.story


@pytest.mark.parametrize("guard", GUARDS)
def test_a_protocol_without_this_guard_breaks_a_promise(guard: str) -> None:
    where, broken = KILLED[guard]
    exploration = explore(Protocol(configuration(where), Guards().without(guard)))
    assert exploration.violation is not None, (
        f"without {guard} every promise holds in {where!r}: the mutant survives"
    )
    assert exploration.violation == broken, exploration.story


def test_every_move_of_the_tables_is_made() -> None:
    missing = LEGAL - {*NOT_IN_THE_MODEL} - {*ONLY_IN_A_LARGE_CONFIGURATION}
    for name in COVERING:
        protocol = Protocol(configuration(name))
        explore(protocol)
        assert not protocol.taken & {*NOT_IN_THE_MODEL}, "it is in the model: take it off the list"
        missing -= protocol.taken
    assert not missing, "moves that no configuration makes"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("move", ONLY_IN_A_LARGE_CONFIGURATION)
def test_the_move_that_needs_a_large_configuration_is_made(move: Taken) -> None:
    protocol = Protocol(configuration(ONLY_IN_A_LARGE_CONFIGURATION[move]))
    explore(protocol)
    assert move in protocol.taken


@pytest.mark.parametrize("name", COVERING)
def test_no_state_changes_but_by_a_move_of_the_tables(name: str) -> None:
    """Checked on the worlds themselves, whatever the rules say that they did."""
    pairs = {(machine, source, target) for machine, _, source, target in LEGAL}
    illegal = {
        change
        for before, label, after in worlds_of(Protocol(configuration(name)))
        for change in _changes(before, after)
        if change not in pairs and not label.startswith("plan:")  # three moves in one transaction
    }
    assert not illegal


def _changes(before: World, after: World) -> set[tuple[str, str | None, str | None]]:
    changes = {("saga", before.saga, after.saga)} if before.saga != after.saga else set()
    for old, new in zip(before.steps, after.steps, strict=True):
        if old is new:
            continue
        if old.state != new.state:
            changes.add(("step", old.state, new.state))
        if old.generation == new.generation:
            for was, is_now in zip(old.actions, new.actions, strict=True):
                if was.state != is_now.state:
                    changes.add(("action", was.state, is_now.state))
    if (
        before.request
        and after.request
        and before.request.state != after.request.state
        and after.queued == before.queued
    ):
        changes.add(("request", before.request.state, after.request.state))
    return changes


def test_a_move_that_no_table_lists_is_refused() -> None:
    protocol = Protocol(configuration("crash"))
    with pytest.raises(IllegalMove, match="saga: settle from None to CANCELLED"):
        protocol.move_saga(protocol.first_world(), "settle", CANCELLED)


def test_an_exploration_that_is_cut_off_says_so() -> None:
    assert explore(Protocol(configuration("crash")), at_most=100).violation == "cut off at 100 worlds"


def test_the_lists_of_guards_and_mutants_agree() -> None:
    assert {*KILLED} == {*GUARDS}
