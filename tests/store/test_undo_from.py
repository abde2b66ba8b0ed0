"""Undo from an action on: it and all that came after it, in its step and in later ones; what came before stays."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_saga.core.decide import Go
from airflow_saga.core.errors import UnknownSagaError, VerbRefusedError
from airflow_saga.core.records import Outcome
from airflow_saga.store.decision import Decision, Verdict
from airflow_saga.store.overview import Overview
from airflow_saga.store.rewind import RewindVerbs
from airflow_saga.store.undo import EndedTry
from tests.store.scene import Scene

CLEARED = {"max_tries": 1, "try_number": 2, "clear_number": 1}


def undo_from(scene: Scene, seq: int, task_id: str = "flight", **more: Any) -> Decision:
    action = scene.action(seq, task_id)
    return RewindVerbs(scene.connection).undo_from(*scene.run, action.action_id, **{"actor": "ann", **more})


def completed(scene: Scene) -> Scene:
    """Three actions of one step, one of a step after it, one of a step beside it."""
    scene.ran("flight", 1, 2, 3)
    scene.ran("hotel", 1, after=["flight"])
    scene.ran("car", 1)
    assert scene.runs.complete_if_over(*scene.run) == "COMPLETED"
    return scene


def planned(plan: dict[str, Any]) -> list[tuple[str, list[int]]]:
    return [(step["task_id"], [action["seq"] for action in step["actions"]]) for step in plan["steps"]]


def fails(scene: Scene, task_id: str = "flight", *good: str) -> None:
    """The undo of the newest action of this step fails for good, the others are undone, and all is settled."""
    scene.freeze()
    for other in good:
        scene.undo_step(other)
    attached = scene.undo_of(task_id)
    first, *rest = attached.open_actions
    scene.compensate(attached, first, "COMPENSATION_FAILED", failed=True, error="HTTP 502")
    for action in rest:
        scene.compensate(attached, action)
    assert scene.settle() is not None


# -- what is undone, and what stays -----------------------------------------------------------------------------------


def test_c101_it_and_all_after_it_is_undone_and_what_came_before_stays_undoable(each_scene: Scene) -> None:
    each_scene.ran("flight", 1, 2, 3, 4, 5)
    each_scene.runs.complete_if_over(*each_scene.run)
    decision = undo_from(each_scene, 2)
    assert (decision.verdict, each_scene.saga.state) == (Verdict.CANCELLING, "CANCELLING")
    frozen = each_scene.freeze()
    assert frozen.plan is not None
    assert planned(frozen.plan) == [("flight", [5, 4, 3, 2])]
    each_scene.undo_step()
    assert each_scene.settle() is not None
    assert each_scene.saga.state == "SUSPENDED"
    assert each_scene.states() == {1: "DONE"}
    settled = each_scene.undone("flight", request=each_scene.ask())
    assert (settled.saga.state, settled.residual) == ("CANCELLED", ())
    assert [each_scene.action(seq, generation=1).undo_tries for seq in (2, 3, 4, 5)] == [1, 1, 1, 1]


def test_later_steps_go_as_a_whole_and_those_beside_it_stay(each_scene: Scene) -> None:
    completed(each_scene)
    undo_from(each_scene, 3)
    each_scene.undone("hotel", "flight")
    assert {task: each_scene.states(task) for task in ("flight", "hotel", "car")} == {
        "flight": {1: "DONE", 2: "DONE"},
        "hotel": {1: "COMPENSATED"},
        "car": {1: "DONE"},
    }
    assert (each_scene.saga.state, each_scene.saga.actor) == ("SUSPENDED", "ann")
    assert each_scene.saga.reason == "from book of flight on"


def test_from_the_first_action_of_all_nothing_is_left_and_it_is_cancelled(scene: Scene) -> None:
    scene.ran("flight", 1, 2)
    scene.runs.complete_if_over(*scene.run)
    undo_from(scene, 1)
    assert scene.undone("flight").saga.state == "CANCELLED"


def test_a_cleared_run_goes_on_from_there(scene: Scene) -> None:
    completed(scene)
    undo_from(scene, 3)
    waits = scene.try_attach("flight", **CLEARED)
    assert waits.decision.go is Go.WAIT
    scene.undone("hotel", "flight")
    resumed = scene.try_attach("flight", **CLEARED)
    assert resumed.decision.go is Go.ANEW
    assert [row.seq for row in resumed.recorded] == [1, 2]
    assert scene.saga.state == "RUNNING"


def test_a_step_that_is_not_touched_waits_too_while_it_is_undone(scene: Scene) -> None:
    completed(scene)
    undo_from(scene, 3)
    assert scene.try_attach("car", **CLEARED).decision.go is Go.WAIT
    assert scene.try_attach("car").decision.go is Go.REFUSE


def test_the_policys_hint_gives_way_to_a_person_who_undoes_a_part(scene: Scene) -> None:
    scene.stopped("flight", 1, 2)
    scene.hint()
    undo_from(scene, 2)
    scene.undone("flight")
    assert [request.state for request in scene.view.requests] == ["WITHDRAWN", "SETTLED"]
    assert scene.saga.state == "SUSPENDED"
    assert scene.runs.fail_and_hint(*scene.run, cause="failure").request is None


# -- when something is left -------------------------------------------------------------------------------------------


def test_what_could_not_be_undone_is_left_to_a_person_and_what_came_before_is_not(each_scene: Scene) -> None:
    completed(each_scene)
    undo_from(each_scene, 2)
    fails(each_scene, "flight", "hotel")
    assert each_scene.saga.state == "PARTIALLY_CANCELLED"
    assert [row.seq for row in each_scene.reader.left_by_undo(each_scene.saga.saga_id)] == [3]
    [waiting] = Overview(each_scene.connection).needs_person(start_alert_seconds=300)
    assert waiting["standing"] == 1, "only what was to be undone"
    failed = each_scene.action(3, generation=1)
    each_scene.resolves.resolve(
        *each_scene.run, failed.action_id, to="ACCEPTED", actor="bob", note_text="it may stand"
    )
    assert (each_scene.saga.state, each_scene.step().state) == ("SUSPENDED", "UNDONE")


def test_a_date_that_falls_due_undoes_nothing_that_came_before(each_scene: Scene) -> None:
    completed(each_scene)
    undo_from(each_scene, 3)
    each_scene.freeze()
    each_scene.undo_step("hotel")
    attached = each_scene.undo_of("flight")
    [refund] = attached.open_actions
    assert each_scene.undos.write_undo(attached, None, each_scene.next_try(refund))[1] == 1
    later = EndedTry(refund.action_id, "COMPENSATING", reconcile_seconds=60, waiting_for="the bank")
    assert each_scene.undos.write_undo(attached, later, None)[0]
    assert each_scene.settle() is not None
    assert each_scene.saga.state == "PARTIALLY_CANCELLED"
    each_scene.time_passes(61)
    request = each_scene.settles.ask_again_if_due(each_scene.saga.saga_id)
    assert request is not None
    frozen = each_scene.freeze(request)
    assert frozen.plan is not None
    assert planned(frozen.plan) == [("flight", [3])]
    each_scene.undo_step("flight", request)
    assert each_scene.settle(request) is not None
    assert (each_scene.saga.state, each_scene.states()) == ("SUSPENDED", {1: "DONE", 2: "DONE"})


def test_a_late_yes_undoes_nothing_that_came_before(each_scene: Scene) -> None:
    step = each_scene.act(each_scene.attach("flight"), 1)
    assert each_scene.begin(step, 2)
    each_scene.time_passes(60)
    each_scene.sweeps.stop_if_lost(step.saga_id, step.step_id)
    each_scene.ran("car", 1)
    each_scene.runs.fail_and_hint(*each_scene.run, cause="failure")
    undo_from(each_scene, 2)
    each_scene.undone("flight")
    assert each_scene.saga.state == "SUSPENDED"
    each_scene.lates.record_late(step, Outcome(2, "DONE", '"late"'), idempotent=False)
    request = each_scene.request
    assert (request.cause, request.state) == ("late", "REQUESTED")
    frozen = each_scene.freeze(request)
    assert frozen.plan is not None
    assert planned(frozen.plan) == [("flight", [2])]


def test_the_deadline_names_what_is_open(scene: Scene) -> None:
    completed(scene)
    undo_from(scene, 3)
    scene.time_passes(4000)
    assert scene.settles.expire_if_past_deadline(scene.saga.saga_id) is not None
    assert (scene.saga.state, scene.request.state) == ("PARTIALLY_CANCELLED", "EXPIRED")
    assert [row.name for row in scene.reader.left_by_undo(scene.saga.saga_id)] == ["book", "book"]
    assert (scene.step("car").state, scene.states()) == ("SUCCEEDED", {1: "DONE", 2: "DONE"})
    for seq, task_id, generation in ((1, "hotel", None), (3, "flight", 1)):
        action = scene.action(seq, task_id, generation)
        scene.resolves.resolve(
            *scene.run, action.action_id, to="COMPENSATED", actor="bob", note_text="by hand"
        )
    assert scene.saga.state == "SUSPENDED"
    resumed = scene.try_attach("flight", **CLEARED)
    assert [row.seq for row in resumed.recorded] == [1, 2], "what was kept is not done again"


def test_the_deadline_of_a_whole_undo_names_what_an_earlier_one_had_kept(scene: Scene) -> None:
    completed(scene)
    undo_from(scene, 3)
    scene.undone("hotel", "flight")
    scene.ask(actor="bob")
    scene.time_passes(4000)
    assert scene.settles.expire_if_past_deadline(scene.saga.saga_id) is not None
    assert (scene.saga.state, scene.step().state) == ("PARTIALLY_CANCELLED", "PARTLY_UNDONE")
    assert len(scene.reader.left_by_undo(scene.saga.saga_id)) == 3


def test_an_undo_that_is_killed_is_taken_over_and_ends_where_it_should(each_scene: Scene) -> None:
    completed(each_scene)
    request = undo_from(each_scene, 2).request
    each_scene.freeze(request)
    each_scene.undo_step("hotel", request)
    each_scene.time_passes(120)
    each_scene.freeze(request, owner="undo__2")
    each_scene.undo_step("flight", request, owner="undo__2")
    assert each_scene.settle(request, owner="undo__2") is not None
    assert (each_scene.saga.state, each_scene.states()) == ("SUSPENDED", {1: "DONE"})
    assert each_scene.action(1, "hotel").undo_tries == 1


# -- who asks, and when -----------------------------------------------------------------------------------------------


def test_asking_twice_tells_who_was_first(scene: Scene) -> None:
    completed(scene)
    undo_from(scene, 2)
    again = undo_from(scene, 3, actor="bob")
    assert (again.verdict, len(scene.view.requests)) == (Verdict.ALREADY, 1)
    assert "asked for by ann" in again.message
    second = scene.action(2).action_id
    scene.freeze()
    during = RewindVerbs(scene.connection).undo_from(*scene.run, second, actor="bob")
    assert (during.verdict, len(scene.view.requests)) == (Verdict.ALREADY, 1), (
        "it is in a new generation by now"
    )
    for task_id in ("hotel", "flight"):
        scene.undo_step(task_id)
    assert scene.settle() is not None
    done = RewindVerbs(scene.connection).undo_from(
        *scene.run, scene.action(3, generation=1).action_id, actor="bob"
    )
    assert (done.verdict, done.request, scene.saga.state) == (Verdict.ALREADY, None, "SUSPENDED")
    assert "nothing stands from book of flight on" in done.message


def test_a_wider_place_asked_for_while_another_is_undone_is_refused(scene: Scene) -> None:
    completed(scene)
    undo_from(scene, 3)
    before = scene.tables()
    with pytest.raises(VerbRefusedError, match="is CANCELLING, so it cannot be undone from a place on"):
        undo_from(scene, 1)
    assert scene.tables() == before


def test_a_whole_undo_asked_for_meanwhile_takes_all(scene: Scene) -> None:
    completed(scene)
    undo_from(scene, 3)
    scene.freeze()
    assert scene.requests.undo(*scene.run, actor="bob").verdict is Verdict.QUEUED
    scene.undo_step("hotel", scene.view.requests[0])
    scene.undo_step("flight", scene.view.requests[0])
    assert scene.settle(scene.view.requests[0]) is not None
    assert scene.saga.state == "CANCELLING"
    assert scene.undone("flight", "car").saga.state == "CANCELLED"


def test_a_running_saga_is_stopped_first(scene: Scene) -> None:
    scene.act(scene.attach("flight"), 1, 2)
    before = scene.tables()
    with pytest.raises(VerbRefusedError, match=r"RUNNING.*stop it first \(airflow saga cancel --keep\)"):
        undo_from(scene, 2)
    assert scene.tables() == before


def test_what_an_undo_has_left_is_tried_again_or_undone_as_a_whole(scene: Scene) -> None:
    scene.stopped("flight", 1, 2)
    scene.cancel()
    fails(scene)
    with pytest.raises(VerbRefusedError, match=r"PARTIALLY_CANCELLED.*try that again"):
        undo_from(scene, 1)


def test_what_stays_has_to_be_known(scene: Scene) -> None:
    step = scene.act(scene.attach("flight"), 1)
    scene.begin(step, 2)
    scene.end(step, 2, "IN_DOUBT")
    scene.act(step, 3)
    scene.steps.stop_if_held(step)
    scene.runs.fail_and_hint(*scene.run, cause="failure")
    with pytest.raises(
        VerbRefusedError, match=r"before book of flight, book \(action \d+, IN_DOUBT\) is not settled"
    ):
        undo_from(scene, 3)
    assert undo_from(scene, 2).verdict is Verdict.CANCELLING


def test_an_action_of_another_saga_is_none_of_this_one(scene: Scene) -> None:
    completed(scene)
    other = scene.another_run("run_2")
    other.ran("flight", 1)
    with pytest.raises(UnknownSagaError, match="has no action"):
        RewindVerbs(scene.connection).undo_from(*scene.run, other.action(1).action_id, actor="ann")
    other.close()


# -- the plan ---------------------------------------------------------------------------------------------------------


def test_exactly_the_plan_that_was_signed_is_done_or_nothing(each_scene: Scene) -> None:
    completed(each_scene)
    action_id = each_scene.action(2).action_id
    plan = each_scene.reader.plan(*each_scene.run, action_id)
    assert planned(plan.steps) == [("hotel", [1]), ("flight", [3, 2])]
    assert plan.digest != each_scene.reader.plan(*each_scene.run).digest
    with pytest.raises(VerbRefusedError, match="something moved"):
        undo_from(each_scene, 3, plan_hash=plan.digest)
    undo_from(each_scene, 2, plan_hash=plan.digest)
    frozen = each_scene.freeze()
    assert frozen.plan_hash == plan.digest
