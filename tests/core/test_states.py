"""The tables of states and moves: well formed, complete, and what the README draws."""

from __future__ import annotations

import re
from collections import Counter
from typing import get_args

import pytest

from airflow_saga.core.states import (
    CAUSE_RANK,
    HINT_CAUSES,
    MOVES,
    OPEN_REQUEST_STATES,
    RESIDUAL_ACTION_STATES,
    SETTLED_ACTION_STATES,
    STATES,
    Cause,
    Machine,
    figure,
    legal_moves,
)
from tests.core.figures import README, figures_in, with_figures

MACHINES: tuple[Machine, ...] = get_args(Machine)
FINAL: dict[Machine, set[str]] = {
    "saga": set(),  # each can be cleared, undone or resolved once more
    "step": set(),
    "action": {"ACCEPTED"},  # COMPENSATED too can be reopened, by a late answer
    "request": {"SETTLED", "WITHDRAWN", "EXPIRED"},
}
ARROW = re.compile(r"    (\[\*\]|[A-Z_]+) --> ([A-Z_]+): ([a-z]+(?: [a-z]+)*(?:, [a-z]+(?: [a-z]+)*)*)")


@pytest.mark.parametrize("machine", MACHINES)
def test_every_row_is_of_its_machine_and_between_states_that_exist(machine: Machine) -> None:
    for move in MOVES[machine]:
        assert move.machine == machine
        assert move.source is None or move.source in STATES[machine], move
        assert move.target in STATES[machine], move
        assert move.event.strip(), move
        assert move.guard.strip(), move
        assert move.who.strip(), move


@pytest.mark.parametrize("machine", MACHINES)
def test_no_row_stands_twice(machine: Machine) -> None:
    rows = Counter((move.event, move.source, move.target) for move in MOVES[machine])
    assert [row for row, count in rows.items() if count > 1] == []


@pytest.mark.parametrize("machine", MACHINES)
def test_every_state_is_reachable(machine: Machine) -> None:
    reached: set[str | None] = {None}
    for _ in STATES[machine]:
        reached |= {target for source, target in legal_moves(machine) if source in reached}
    assert reached == {None, *STATES[machine]}


@pytest.mark.parametrize("machine", MACHINES)
def test_only_the_final_states_have_no_way_out(machine: Machine) -> None:
    left = {source for source, target in legal_moves(machine) if source != target}
    assert {*STATES[machine]} - left == FINAL[machine]


def test_what_is_settled_and_what_stands_covers_every_action_state() -> None:
    begun_or_known = {"PENDING", "DONE", "IN_DOUBT", "COMPENSATING"}
    assert begun_or_known.isdisjoint(SETTLED_ACTION_STATES)
    assert begun_or_known | SETTLED_ACTION_STATES == {*STATES["action"]}
    assert {*STATES["action"]} - RESIDUAL_ACTION_STATES == {"FAILED", "COMPENSATED", "ACCEPTED"}


def test_a_request_that_is_open_can_still_end() -> None:
    for state in OPEN_REQUEST_STATES:
        assert {target for source, target in legal_moves("request") if source == state} & FINAL["request"]


def test_no_state_outlives_a_cancel_without_a_way_to_its_end() -> None:
    ends = {target for source, target in legal_moves("saga") if source == "CANCELLING"} - {"CANCELLING"}
    assert ends == {"SUSPENDED", "CANCELLED", "PARTIALLY_CANCELLED"}


def test_what_is_over_for_an_action_is_never_begun_again() -> None:
    begins = {source for source, target in legal_moves("action") if target == "PENDING"}
    assert begins == {None, "FAILED", "IN_DOUBT"}
    compensations = {source for source, target in legal_moves("action") if target == "COMPENSATING"}
    assert compensations == {"DONE", "IN_DOUBT", "COMPENSATING", "COMPENSATION_FAILED"}


def test_causes_rank_from_a_lost_worker_up_to_a_person() -> None:
    ranked = ["lost_worker", "timeout", "dagrun_timeout", "failure", "marked_failed", "user"]
    assert sorted(ranked, key=CAUSE_RANK.__getitem__) == ranked
    assert {*CAUSE_RANK} == {cause.value for cause in Cause}
    assert {*ranked[:4]} == HINT_CAUSES


@pytest.mark.parametrize("machine", MACHINES)
def test_a_figure_is_mermaid_and_shows_every_move(machine: Machine) -> None:
    head, *arrows = figure(machine).splitlines()
    assert head == "stateDiagram-v2"
    drawn = set()
    for arrow in arrows:
        match = ARROW.fullmatch(arrow)
        assert match, f"not an arrow of a state diagram: {arrow!r}"
        source = None if match[1] == "[*]" else match[1]
        drawn |= {(event, source, match[2]) for event in match[3].split(", ")}
    assert len(arrows) == len(legal_moves(machine))
    assert drawn == {(move.event, move.source, move.target) for move in MOVES[machine]}


def test_the_readme_draws_the_tables_as_they_are() -> None:
    text = README.read_text(encoding="utf-8")
    assert figures_in(text) == ["saga", "action"], (
        "README.md lacks a marker: <!-- figure:saga -->, <!-- figure:action -->"
    )
    assert text == with_figures(text), "README.md is behind the tables: run python -m tests.core.figures"


def test_a_figure_of_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="no machine 'sagas'"):
        with_figures("<!-- figure:sagas -->\n<!-- /figure -->")
