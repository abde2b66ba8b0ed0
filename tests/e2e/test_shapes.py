"""Steps in every shape that a DAG can give them, undone in the mirror image of it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.e2e.scene import Scene, Trip

pytestmark = pytest.mark.together


def _start(scene: Scene, dag_id: str, **conf: object) -> Trip:
    trip = scene.trip(dag_id)
    scene.airflow.trigger(dag_id, {"trip": {"id": trip.run_id, "to": "LIS"}, **conf}, trip.run_id)
    return trip


def test_mapped_step_is_undone_index_by_index(scene: Scene) -> None:
    trip = _start(scene, "mapped", count=6, fail=True)

    trip.must_be_undone(calls=6)

    states = trip.undo_states()
    assert sorted(name for name in states if name.startswith("undo.flight[")) == [
        f"undo.flight[{index}]" for index in range(6)
    ]
    assert {state for name, state in states.items() if name.startswith("undo.flight[")} == {"success"}
    assert [trip.step("flight", index).checkpoint for index in range(6)] == [None] * 6


def test_mapped_step_without_items_did_nothing(scene: Scene) -> None:
    trip = _start(scene, "mapped", count=0)

    view = trip.must_be_completed(calls=0)

    assert view.steps == ()


def test_c13_mark_on_one_index_leaves_its_siblings_alone(scene: Scene) -> None:
    trip = scene.trip("mapped")
    trip.tell("hold", "flights")
    scene.airflow.trigger("mapped", {"trip": {"id": trip.run_id, "to": "LIS"}, "count": 3}, trip.run_id)
    trip.await_calls("flights", 3)

    scene.airflow.patch_task("mapped", trip.run_id, "flight", "failed", map_index=1)
    trip.wait(lambda: trip.step("flight", 1).state == "STOPPED", 60, "index 1 is fenced")

    assert {trip.step("flight", index).state for index in (0, 2)} == {"RUNNING"}
    trip.release("flights")
    trip.must_be_undone(calls=3)
    assert [trip.task_state("flight", index) for index in range(3)] == ["success", "failed", "success"]


def test_steps_in_a_mapped_task_group_are_undone_in_reverse(scene: Scene) -> None:
    trip = _start(scene, "grouped", count=3, fail=True)

    trip.must_be_undone(calls=6)

    order = trip.undo_order
    assert (sorted(order[:3]), sorted(order[3:])) == (["hotels"] * 3, ["flights"] * 3)
    states = trip.undo_states()
    assert {name for name in states if name.startswith("undo.") and "[" in name} == {
        f"undo.each.{step}[{index}]" for step in ("flight", "hotel") for index in range(3)
    }


def test_plain_tasks_between_steps_do_not_change_the_order(scene: Scene) -> None:
    trip = scene.trip("between").start(a=["flights", "hotels"], b=["cars", "notes", "raise"])

    trip.must_be_undone(calls=4)

    assert trip.undo_order == ["notes", "cars", "hotels", "flights"]
    assert set(trip.undo_states()) >= {"plan", "undo.b", "undo.a", "settle", "apply"}


def test_c40_actions_of_several_steps_are_undone_in_reverse(scene: Scene) -> None:
    trip = scene.trip("stubborn").start(a=["flights", "hotels"], b=["cars", "notes"], c=["payments", "raise"])

    trip.must_be_undone(calls=5)

    assert trip.undo_order == ["payments", "notes", "cars", "hotels", "flights"]
    undos = trip.undo_calls()
    assert all(first["answered_seq"] < then["seq"] for first, then in pairwise(undos))


def test_plain_dag_with_a_compensation_dag_and_an_action_as_its_callable(scene: Scene) -> None:
    trip = scene.trip("plain_dag").start(b=["hotels", "raise"])

    trip.must_be_undone(calls=2)

    assert trip.undo_order == ["hotels", "flights"]
    assert trip.action("flights").name == "flights"


def test_saga_is_injected_wherever_it_stands(scene: Scene) -> None:
    trip = _start(scene, "asking")

    trip.must_be_completed(calls=6 + 4)

    def said(task_id: str, map_index: int = -1) -> list:
        return scene.airflow.xcom("asking", trip.run_id, task_id, map_index=map_index)

    assert said("first") == [trip.run_id, 7, "standing"]
    assert [said("first_mapped", index)[1] for index in (0, 1)] == [1, 2]
    assert said("last") == [trip.run_id, 8, "standing"]
    assert [said("last_mapped", index)[1] for index in (0, 1)] == [3, 4]
    assert said("keyword") == [trip.run_id, 9, 9, 10]
    assert said("keyword_mapped", 0) == [trip.run_id, 5, 5, 6]


def test_longest_names_run_and_are_undone(scene: Scene) -> None:
    trip = scene.trip("long_".ljust(255 - len("dag_id=" + "__compensation"), "d")).start(
        a=["flights", "raise"]
    )

    trip.must_be_undone(calls=1)
