"""What you clear x what state it was in -> what happens, each cell on a real Airflow (the table is in the README too).

A trip is `p` (a plain task) -> `a` -> `b`, and keeps what it did when it fails. A state brings it somewhere, a route
clears it as people do, and then the world's ledger, the calls of each key and the end of the saga are looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.scene import SOON, Scene, Trip

pytestmark = pytest.mark.together

# -- the states -------------------------------------------------------------------------------------------------------


def nothing_done(scene: Scene, dag_id: str) -> Trip:
    """Step a failed before it called anything."""
    trip = scene.trip(dag_id).start(a=["raise<2", "flights"], b=["hotels"])
    assert trip.wait_run() == "failed"
    return trip


def in_the_middle(scene: Scene, dag_id: str) -> Trip:
    """Step b failed between its two calls."""
    trip = scene.trip(dag_id).start(a=["flights"], b=["hotels", "raise<2", "cars"])
    assert trip.wait_run() == "failed"
    return trip


def in_doubt(scene: Scene, dag_id: str) -> Trip:
    """The call of step b took effect, no answer came, and nothing can be asked."""
    trip = scene.trip(dag_id)
    trip.tell("hold", "tours")
    trip.start(a=["flights"], b=["tours"])
    assert trip.wait_run() == "failed"
    assert trip.action("tours").state == "IN_DOUBT"
    return trip


def finished(scene: Scene, dag_id: str) -> Trip:
    trip = scene.trip(dag_id).start(a=["flights"], b=["hotels"])
    assert trip.wait_run() == "success"
    trip.wait_saga("COMPLETED")
    return trip


def cancelled(scene: Scene, dag_id: str) -> Trip:
    trip = finished(scene, dag_id)
    trip.mark_failed()
    trip.wait_saga("CANCELLED")
    trip.wait_undo("success")
    return trip


def partially_cancelled(scene: Scene, dag_id: str) -> Trip:
    """The message of step a cannot be unsent."""
    trip = scene.trip(dag_id).start(a=["messages"], b=["hotels"])
    assert trip.wait_run() == "success"
    trip.wait_saga("COMPLETED")
    trip.mark_failed()
    trip.wait_saga("PARTIALLY_CANCELLED")
    return trip


def being_undone(scene: Scene, dag_id: str) -> Trip:
    """The undo of step b is under way, and its service takes its time."""
    trip = finished(scene, dag_id)
    trip.tell("hold", "hotels", verb="undo")
    trip.mark_failed()
    trip.await_calls("hotels", verb="undo")
    return trip


# -- the routes -------------------------------------------------------------------------------------------------------


def clear_task(trip: Trip) -> None:
    trip.airflow.clear(trip.dag_id, trip.run_id, ["b"])


def clear_earlier_task(trip: Trip) -> None:
    trip.airflow.clear(trip.dag_id, trip.run_id, ["a"])


def clear_with_downstream(trip: Trip) -> None:
    trip.airflow.clear(trip.dag_id, trip.run_id, ["a"], downstream=True)


def clear_run(trip: Trip) -> None:
    trip.airflow.clear(trip.dag_id, trip.run_id)


def clear_failed(trip: Trip) -> None:
    trip.airflow.clear(trip.dag_id, trip.run_id, only_failed=True)


def clear_plain_task(trip: Trip) -> None:
    trip.airflow.clear(trip.dag_id, trip.run_id, ["p"])


def mark_failed_and_clear(trip: Trip) -> None:
    trip.mark_failed()
    clear_run(trip)


# -- what has to come of it -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """:ivar net: what stands in the world, by kind. :ivar calls: forward calls the world saw, by kind.

    :ivar says: a word of the log of this task, where the task refuses.
    """

    saga: str
    run: str
    net: dict[str, int]
    calls: dict[str, int]
    says: tuple[str, str] | None = None


BOTH = {"flights": 1, "hotels": 1}
THREE = {"flights": 1, "hotels": 1, "cars": 1}
DONE_ONCE = End("COMPLETED", "success", BOTH, BOTH)
ALL_THREE = End("COMPLETED", "success", THREE, THREE)
REDONE_LAST = End("COMPLETED", "success", BOTH, {"flights": 1, "hotels": 2})
REDONE = End("COMPLETED", "success", BOTH, {"flights": 2, "hotels": 2})
REDONE_FROM_MIDDLE = End("COMPLETED", "success", THREE, {"flights": 2, "hotels": 2, "cars": 1})
DOUBT = {"flights": 1, "tours": 1}
STAYS_IN_DOUBT = End("FAILED", "failed", DOUBT, DOUBT, ("b", "resolve"))
UNDOES_AROUND_DOUBT = End("FAILED", "failed", DOUBT, {"flights": 2, "tours": 1}, ("b", "standing"))
# The last task is done, so Airflow calls the run a success.
LEFT_STANDING = End("COMPLETED", "success", BOTH, BOTH, ("a", "Clear them too"))
STAYS_FAILED = End("FAILED", "failed", BOTH, BOTH)
STAYS_UNDONE = End("CANCELLED", "success", {}, BOTH)
STANDS = End(
    "PARTIALLY_CANCELLED",
    "failed",
    {"messages": 1},
    {"messages": 1, "hotels": 1},
    ("*", "nobody has settled"),
)
STALE = End("CANCELLED", "failed", {}, BOTH, ("b", "Clear them too"))

Cell = tuple[Callable[[Trip], None], Callable[[Scene, str], Trip]]
CELLS: dict[Cell, End] = {
    (clear_task, in_the_middle): ALL_THREE,
    (clear_task, in_doubt): STAYS_IN_DOUBT,
    (clear_task, finished): REDONE_LAST,
    (clear_task, cancelled): STALE,
    (clear_task, partially_cancelled): STANDS,
    (clear_task, being_undone): STALE,
    (clear_earlier_task, finished): LEFT_STANDING,
    (clear_with_downstream, nothing_done): DONE_ONCE,
    (clear_with_downstream, in_the_middle): REDONE_FROM_MIDDLE,
    (clear_with_downstream, in_doubt): UNDOES_AROUND_DOUBT,
    (clear_with_downstream, finished): REDONE,
    (clear_with_downstream, cancelled): REDONE,
    (clear_with_downstream, partially_cancelled): STANDS,
    (clear_with_downstream, being_undone): REDONE,
    (clear_run, nothing_done): DONE_ONCE,
    (clear_run, in_the_middle): REDONE_FROM_MIDDLE,
    (clear_run, in_doubt): UNDOES_AROUND_DOUBT,
    (clear_run, finished): REDONE,
    (clear_run, cancelled): REDONE,
    (clear_run, partially_cancelled): STANDS,
    (clear_run, being_undone): REDONE,
    (clear_failed, nothing_done): DONE_ONCE,
    (clear_failed, in_the_middle): ALL_THREE,
    (clear_failed, in_doubt): STAYS_IN_DOUBT,
    (clear_plain_task, in_the_middle): STAYS_FAILED,
    (clear_plain_task, finished): DONE_ONCE,
    (clear_plain_task, cancelled): STAYS_UNDONE,
    (mark_failed_and_clear, nothing_done): DONE_ONCE,
    (mark_failed_and_clear, in_the_middle): REDONE_FROM_MIDDLE,
    (mark_failed_and_clear, finished): REDONE,
    (mark_failed_and_clear, cancelled): REDONE,
    (mark_failed_and_clear, partially_cancelled): STANDS,
}
"""Cells that cannot occur, or that others show:

clear task x nothing done           `b` has not begun, so clearing it alone is clearing what waits
clear only failed x finished, ...   nothing has failed; a run that was marked failed has no failed task
clear a plain task x the others     it runs again and nothing else does; `finished` is the case where steps could notice
"""


@pytest.mark.parametrize(
    ("route", "state"), list(CELLS), ids=[f"{r.__name__}-{s.__name__}" for r, s in CELLS]
)
def test_what_is_cleared_ends_as_the_table_says(
    scene: Scene, route: Callable[[Trip], None], state: Callable[[Scene, str], Trip]
) -> None:
    end = CELLS[route, state]
    trip = state(scene, "cleared")
    tries = _tries(trip)
    if route is clear_plain_task:
        before = trip.view
    route(trip)
    if state is being_undone:
        trip.wait(lambda: _waits_or_refused(trip), SOON, "what was cleared waits for the undo")
        trip.release("hotels")
    must_end(trip, end, tries)
    if route is clear_plain_task:
        assert trip.view.actions == before.actions


def test_it_runs_anew_once_a_person_has_accepted_what_stands(scene: Scene) -> None:
    trip = partially_cancelled(scene, "cleared")
    message = trip.action("messages")
    saga = ("saga", "resolve", trip.dag_id, trip.run_id, str(message.action_id))
    scene.airflow.cli(*saga, "--accepted", "--note", "it may stand")
    trip.wait_saga("CANCELLED")
    tries = _tries(trip)
    clear_run(trip)
    must_end(
        trip,
        End("COMPLETED", "success", {"messages": 2, "hotels": 1}, {"messages": 2, "hotels": 2}),
        tries,
    )


def test_running_step_that_is_cleared_resumes(scene: Scene) -> None:
    trip = scene.trip("cleared")
    trip.tell("hold", "cars")
    trip.start(a=["flights"], b=["hotels", "cars"])
    trip.await_calls("cars")
    attempt = trip.process("b")
    clear_task(trip)
    attempt.wait_gone(SOON)
    must_end(trip, ALL_THREE, {})


def test_running_step_that_is_cleared_before_it_called_anything_runs_once(scene: Scene) -> None:
    trip = scene.trip("cleared").start(a=["nap", "flights"], b=["hotels"])
    trip.wait(lambda: trip.view.steps, SOON, "step a has begun")
    trip.airflow.clear(trip.dag_id, trip.run_id, ["a"])
    must_end(trip, DONE_ONCE, {})


def test_finished_step_is_redone_with_a_running_one_after_it(scene: Scene) -> None:
    trip = scene.trip("cleared")
    trip.tell("hold", "cars", times=1)
    trip.start(a=["flights"], b=["hotels", "cars"])
    trip.await_calls("cars")
    clear_with_downstream(trip)
    must_end(trip, End("COMPLETED", "success", THREE, {"flights": 2, "hotels": 2, "cars": 2}), {})
    assert trip.undo_order == ["cars", "hotels", "flights"]


@pytest.mark.parametrize(
    ("calls", "end"),
    [
        (["raise<2", "hotels"], DONE_ONCE),
        (["hotels", "raise<2", "cars"], ALL_THREE),
        (["tours"], STAYS_IN_DOUBT),
    ],
    ids=["nothing_done", "in_the_middle", "in_doubt"],
)
def test_retry_resumes(scene: Scene, calls: list[str], end: End) -> None:
    trip = scene.trip("cleared_retried")
    trip.tell("hold", "tours")
    must_end(trip.start(a=["flights"], b=calls), end, {})


def test_finished_step_whose_report_is_lost_gives_back_what_it_had(scene: Scene) -> None:
    trip = scene.trip("report_lost").start(a=["flights"])
    trip.wait(
        lambda: [step.state for step in trip.view.steps] == ["SUCCEEDED"] * 2, SOON, "step b has finished"
    )

    trip.process("b").kill()

    must_end(trip, DONE_ONCE, {"b": 1})
    assert trip.airflow.xcom(trip.dag_id, trip.run_id, "b") == trip.calls("hotels")[0]["id"]
    assert trip.step("b").generation == 1


def test_mapping_that_changed_is_undone_where_it_changed(scene: Scene) -> None:
    """An index whose item is another one now, and one that is no more: both are undone, the others are redone."""
    trip = _mapped(scene, ["x", "y", "z"])
    trip.wait_saga("COMPLETED")
    scene.airflow.request("PATCH", f"/variables/{trip.run_id}", _items(trip, ["x", "q"]))

    trip.airflow.clear(trip.dag_id, trip.run_id, ["items"], downstream=True)

    trip.wait(lambda: len(trip.calls()) == 5 and trip.run_state == "success", 3 * SOON, "it ran anew")
    trip.wait_saga("COMPLETED")
    assert (trip.net.of("flights"), len(trip.undo_calls())) == (2, 3), trip.story()
    assert [trip.step("flight", index).state for index in range(3)] == ["SUCCEEDED", "SUCCEEDED", "UNDONE"]


def test_mapping_that_became_empty_is_undone(scene: Scene) -> None:
    trip = _mapped(scene, ["x", "y"])
    trip.wait_saga("COMPLETED")
    scene.airflow.request("PATCH", f"/variables/{trip.run_id}", _items(trip, []))

    trip.airflow.clear(trip.dag_id, trip.run_id, ["items"], downstream=True)

    trip.wait(lambda: len(trip.undo_calls()) == 2, 3 * SOON, "both indexes are undone")
    trip.wait(lambda: {step.state for step in trip.view.steps} == {"UNDONE"}, SOON, "the undo has ended")
    assert (trip.net.total, trip.wait_run()) == (0, "success")
    trip.wait_saga("COMPLETED")


def test_mapped_step_resumes_only_for_the_same_item(scene: Scene) -> None:
    trip = _mapped(scene, ["x", "fail y"])
    assert trip.wait_run() == "failed"
    scene.airflow.request("PATCH", f"/variables/{trip.run_id}", _items(trip, ["x", "q"]))

    trip.airflow.clear(trip.dag_id, trip.run_id, ["items"])
    trip.airflow.clear(trip.dag_id, trip.run_id, [("flight", 1)])

    trip.wait(lambda: trip.run_state == "success", 3 * SOON, "it ran anew")
    trip.wait_saga("COMPLETED")
    assert (trip.net.of("flights"), len(trip.calls()), len(trip.undo_calls())) == (2, 3, 1), trip.story()
    assert [trip.step("flight", index).generation for index in range(2)] == [1, 2]


def _mapped(scene: Scene, items: list[str]) -> Trip:
    trip = scene.trip("remapped")
    scene.airflow.request("POST", "/variables", _items(trip, items))
    return trip.start()


def _items(trip: Trip, items: list[str]) -> dict[str, str]:
    return {"key": trip.run_id, "value": json.dumps(items)}


def test_mark_failed_and_clear_at_once_in_the_middle_of_a_call(scene: Scene) -> None:
    """The mark undoes, the clear makes it run anew: whatever comes first, the end is one clean run."""
    trip = scene.trip("cleared")
    trip.tell("hold", "hotels", seconds=5)
    trip.start(a=["flights"], b=["hotels"])
    trip.await_calls("hotels")
    mark_failed_and_clear(trip)
    trip.wait(lambda: trip.run_state == "success", 3 * SOON, "the run ends well")
    view = trip.wait_saga("COMPLETED")
    assert _counts(trip.net.kinds) == BOTH, trip.story()
    assert all(request.state in ("SETTLED", "WITHDRAWN") for request in view.requests), trip.story()


def test_saga_goes_back_to_a_savepoint_across_tasks_and_on_from_there(scene: Scene) -> None:
    trip = scene.trip("savepoints").start(b=["cars"])
    trip.wait_saga("COMPLETED")
    assert trip.wait_run() == "success"
    tries = _tries(trip)

    scene.airflow.cli("saga", "rewind", trip.dag_id, trip.run_id, "--to", "flown")

    must_end(
        trip,
        End("COMPLETED", "success", THREE, {"flights": 1, "hotels": 2, "cars": 2}),
        tries,
    )
    assert trip.undo_order == ["cars", "hotels"]
    assert trip.step("a").output == '"flown"'
    assert {request.cause for request in trip.view.requests} == {"rewind"}
    assert "save-point" in trip.history


# -- looking ----------------------------------------------------------------------------------------------------------


def _tries(trip: Trip) -> dict[str, Any]:
    return {
        task["task_id"]: task["try_number"] for task in trip.airflow.task_instances(trip.dag_id, trip.run_id)
    }


def _waits_or_refused(trip: Trip) -> bool:
    """What was cleared has come to its place and found the undo under way."""
    states = trip.airflow.task_states(trip.dag_id, trip.run_id)
    texts = [trip.log(task_id) for task_id, state in states.items() if task_id != "p" and state is not None]
    return any("waiting for its end" in text for text in texts)


def must_end(trip: Trip, end: End, tries: dict[str, Any]) -> None:
    """Wait until the run that was cleared is over again, and look at what it came to."""

    def over() -> bool:
        if trip.run_state != end.run or trip.state != end.saga:
            return False
        now = _tries(trip)
        return not tries or any(now[task_id] != number for task_id, number in tries.items())

    trip.wait(over, 3 * SOON, f"the run is {end.run} and the saga {end.saga}")
    assert _counts(trip.net.kinds) == end.net, trip.story()
    called = {kind: len(trip.calls(kind)) for kind in {call["kind"] for call in trip.calls()}}
    assert called == end.calls, trip.story()
    for kind, keys in trip.net.keys.items():
        for key, count in keys.items():
            assert count["calls"] == 1, f"{kind} {key} was called twice\n{trip.story()}"
            assert count["most_in_flight"] <= 1, trip.story()
    if end.says is not None:
        task_id, word = end.says
        texts = [trip.log(each) for each in ("a", "b") if task_id in ("*", each)]
        assert any(word in text for text in texts), trip.story()


def _counts(kinds: dict[str, int]) -> dict[str, int]:
    return {kind: number for kind, number in kinds.items() if number}
