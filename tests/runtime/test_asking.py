"""Verify probes asked for a person who looks before deciding: they say what they know, and nothing else happens."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from airflow_saga.core.actions import Registry, registry
from airflow_saga.core.errors import NotApplied
from airflow_saga.core.records import ActionRecord, Applied
from airflow_saga.runtime import asking
from airflow_saga.runtime.asking import ask_probes
from airflow_saga.store.overview import Overview
from dags.support import travel
from tests.runtime import deeds
from tests.runtime.lab import Lab


def ask(lab: Lab, actions: Registry | None = None) -> list[tuple[str, str]]:
    now = Overview(lab.connection).now()
    asked = ask_probes(lab.view(), now, lab.secrets, **({"actions": actions} if actions else {}))
    return [(each.action.name, each.said) for each in asked]


def in_doubt(lab: Lab, applied: bool = True) -> None:
    """One action in doubt, of which the world says it cannot tell while the step asks."""
    lab.world.tell("apply_and_drop" if applied else "drop", "flights")
    lab.world.tell("unknown", "flights", times=1)
    lab.fails(lambda saga: deeds.book_quickly("flights"), travel.TravelError)
    assert lab.states() == [("book_quickly", "IN_DOUBT")]


@pytest.mark.parametrize(("applied", "said"), [(True, "it took effect"), (False, "it did not take effect")])
def test_what_the_probe_knows_is_said_and_the_log_stays_as_it_is(lab: Lab, applied: bool, said: str) -> None:
    in_doubt(lab, applied)
    before, effects = lab.actions(), lab.world.net().total
    assert ask(lab) == [("book_quickly", said)]
    assert (lab.actions(), lab.world.net().total, lab.world.undo_calls()) == (before, effects, [])


def test_one_that_cannot_tell_says_so(lab: Lab) -> None:
    in_doubt(lab)
    lab.world.tell("unknown", "flights", times=1)
    assert ask(lab) == [("book_quickly", "it cannot tell")]


def test_a_call_that_may_still_land_is_not_asked_about(lab: Lab) -> None:
    in_doubt(lab)
    lab.connection.execute(
        "UPDATE airflow_saga.action SET lands_by = clock_timestamp() + interval '1 minute'"
    )
    [(_, said)] = ask(lab)
    assert said.startswith("not asked: its call may still take effect until ")


def test_an_action_that_is_gone_or_has_no_probe_is_not_asked(lab: Lab) -> None:
    in_doubt(lab)
    gone = "not asked: no action of that name is declared in the DAG file any more"
    assert ask(lab, Registry()) == [("book_quickly", gone)]
    assert ask(lab, _with(None)) == [("book_quickly", "not asked: it has no verify probe")]


def _with(probe: Any) -> Registry:
    """A registry that knows the action with another probe."""
    known = registry.find("book_quickly", 1)
    assert known is not None
    actions = Registry()
    actions.add(replace(known, verify=probe))
    return actions


@pytest.mark.parametrize("answer", [Applied, Applied(), Applied({"id": "b-1"})])
def test_an_answer_or_its_class_will_do(lab: Lab, answer: Any) -> None:
    in_doubt(lab)
    assert ask(lab, _with(lambda record: answer)) == [("book_quickly", "it took effect")]


def test_a_probe_that_breaks_hangs_or_calls_an_action_cannot_tell(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "LONGEST_SECONDS", 0.3)
    lab.known_secrets.append("s3cret-value")
    in_doubt(lab)

    def breaks(record: ActionRecord) -> NotApplied:
        raise RuntimeError("no route with s3cret-value")

    def hangs(record: ActionRecord) -> NotApplied:
        time.sleep(5)
        return NotApplied("too late")

    def acts(record: ActionRecord) -> NotApplied:
        deeds.book("cars")
        return NotApplied("it booked a car meanwhile")

    for probe, said in (
        (breaks, "it cannot tell: RuntimeError: no route with ***"),
        (hangs, "it cannot tell: TimeoutError: no answer within 0.3 s"),
        (acts, "it cannot tell: NestedActionError"),
    ):
        assert ask(lab, _with(probe))[0][1].startswith(said)
    assert lab.world.net().total == 1
