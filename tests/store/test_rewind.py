"""Going back to a place in a saga: what came after it is undone, what came before stays and is gone on from."""

from __future__ import annotations

import pytest

from airflow_saga.core.decide import Go
from airflow_saga.core.errors import UnknownSagaError, VerbRefusedError
from airflow_saga.core.identity import action_key
from airflow_saga.core.records import Outcome, StepRow
from airflow_saga.store.rewind import Rewind, RewindVerbs
from airflow_saga.store.steps import Checkpoint
from tests.store.scene import Scene

CLEARED = {"max_tries": 1, "try_number": 2, "clear_number": 1}


def savepoint(
    scene: Scene, step: StepRow, seq: int, name: str = "half", checkpoint: str | None = None
) -> None:
    assert RewindVerbs(scene.connection).savepoint_if_held(step, seq, name, checkpoint)


def rewind(scene: Scene, to: str = "half") -> Rewind:
    return RewindVerbs(scene.connection).rewind(*scene.run, to, actor="ann")


def finished_with_savepoint(scene: Scene) -> StepRow:
    """Actions 1 and 2, the place, action 3; then a step after it."""
    step = scene.act(scene.attach("flight"), 1, 2)
    savepoint(scene, step, 3)
    scene.finish(scene.act(step, 3))
    return step


# -- save-points ----------------------------------------------------------------------------------------------------


def test_what_came_after_the_place_is_undone_and_what_came_before_stays(each_scene: Scene) -> None:
    finished_with_savepoint(each_scene)
    each_scene.ran("hotel", 1, after=["flight"])
    each_scene.ran("car", 1)
    asked = rewind(each_scene)
    assert asked.undone == ("hotel", "flight from its action 3 on")
    frozen = each_scene.freeze(asked.request)
    assert frozen.plan is not None
    planned = [(s["task_id"], [a["seq"] for a in s["actions"]]) for s in frozen.plan["steps"]]
    assert planned == [("hotel", [1]), ("flight", [3])]
    each_scene.undo_step("hotel")
    each_scene.undo_step("flight")
    assert each_scene.settle() is not None
    assert each_scene.saga.state == "RUNNING"
    assert (each_scene.step().state, each_scene.step("hotel").state) == ("UNDONE", "UNDONE")
    assert each_scene.step("car").state == "SUCCEEDED"
    assert each_scene.step().generation == 2
    assert each_scene.states() == {1: "DONE", 2: "DONE"}
    assert each_scene.action(3, generation=1).state == "COMPENSATED"


def test_the_step_goes_on_from_the_place_with_its_checkpoint_and_the_old_keys(scene: Scene) -> None:
    step = scene.act(scene.attach("flight"), 1, 2)
    scene.steps.heartbeat_if_held(step, 15, Checkpoint('"two"', 3))
    savepoint(scene, step, 3, checkpoint='"two"')
    scene.act(step, 3)
    scene.steps.heartbeat_if_held(step, 15, Checkpoint('"three"', 4))
    scene.finish(step)
    keys = [scene.action(seq).key for seq in (1, 2)]
    scene.undone("flight", request=rewind(scene).request)
    attached = scene.try_attach("flight", **CLEARED)
    assert attached.decision.go is Go.ANEW
    assert attached.step is not None
    assert (attached.step.generation, attached.step.checkpoint, attached.step.checkpoint_seq) == (
        2,
        '"two"',
        3,
    )
    assert [(row.seq, row.key) for row in attached.recorded] == list(zip((1, 2), keys, strict=True))
    assert not any(row.kept for row in scene.view.actions)
    again = scene.act(attached.step, 3)
    assert scene.action(3).key != scene.action(3, generation=1).key
    scene.finish(again)
    assert scene.states() == {1: "DONE", 2: "DONE", 3: "DONE"}


def test_a_whole_undo_after_it_takes_what_had_been_kept_too(each_scene: Scene) -> None:
    finished_with_savepoint(each_scene)
    each_scene.undone("flight", request=rewind(each_scene).request)
    settled = each_scene.undone("flight", request=each_scene.ask())
    assert not settled.residual
    assert each_scene.saga.state == "CANCELLED"
    assert each_scene.states() == {1: "COMPENSATED", 2: "COMPENSATED"}


def test_a_place_before_any_action_keeps_its_checkpoint(scene: Scene) -> None:
    step = scene.attach("flight")
    savepoint(scene, step, 1, checkpoint='"read"')
    scene.finish(scene.act(step, 1))
    scene.undone("flight", request=rewind(scene).request)
    resumed = scene.attach("flight", **CLEARED)
    assert (resumed.generation, resumed.checkpoint) == (2, '"read"')


def test_a_whole_undo_forgets_the_checkpoint(scene: Scene) -> None:
    step = scene.act(scene.attach("flight"), 1)
    scene.steps.heartbeat_if_held(step, 15, Checkpoint('"one"', 2))
    scene.steps.stop_if_held(step)
    scene.undone("flight", request=scene.cancel())
    again = scene.attach("flight", **CLEARED)
    assert (again.generation, again.checkpoint) == (2, None)


def test_the_same_place_can_be_gone_back_to_again(scene: Scene) -> None:
    finished_with_savepoint(scene)
    scene.undone("flight", request=rewind(scene).request)
    scene.finish(scene.act(scene.attach("flight", **CLEARED), 3))
    scene.undone("flight", request=rewind(scene).request)
    assert scene.step().generation == 3
    assert scene.states() == {1: "DONE", 2: "DONE"}
    assert [scene.action(3, generation=g).state for g in (1, 2)] == ["COMPENSATED", "COMPENSATED"]


def test_a_place_in_a_part_that_was_undone_is_gone(scene: Scene) -> None:
    step = scene.act(scene.attach("flight"), 1)
    savepoint(scene, step, 2, "early")
    scene.act(step, 2)
    savepoint(scene, step, 3, "late")
    scene.finish(scene.act(step, 3))
    scene.undone("flight", request=rewind(scene, "early").request)
    scene.finish(scene.act(scene.attach("flight", **CLEARED), 2))
    with pytest.raises(VerbRefusedError, match=r"no save-point 'late' \(there was one.*it has flight:early"):
        rewind(scene, "late")


def test_asking_twice_joins_the_first_request(scene: Scene) -> None:
    finished_with_savepoint(scene)
    first, second = rewind(scene), rewind(scene)
    assert second.request.request_id == first.request.request_id


def test_a_cleared_step_waits_for_the_request_that_covers_it_instead_of_asking_for_a_whole_redo(
    scene: Scene,
) -> None:
    finished_with_savepoint(scene)
    asked = rewind(scene)
    attached = scene.try_attach("flight", **CLEARED)
    assert attached.decision.go is Go.WAIT
    assert attached.request is not None
    assert attached.request.request_id == asked.request.request_id
    assert scene.sql("SELECT from_seq FROM airflow_saga.undo_scope") == [{"from_seq": 3}]


def test_a_hint_gives_way_to_a_person_who_goes_back(scene: Scene) -> None:
    finished_with_savepoint(scene)
    scene.stopped("hotel", 1, after=["flight"])
    hint = scene.hint()
    asked = rewind(scene)
    assert asked.request.request_id != hint.request_id
    assert [request.state for request in scene.view.requests] == ["WITHDRAWN", "REQUESTED"]


@pytest.mark.parametrize("state", ["CANCELLING", "CANCELLED"])
def test_a_saga_that_is_being_undone_cannot_go_back(scene: Scene, state: str) -> None:
    finished_with_savepoint(scene)
    scene.cancel()
    if state == "CANCELLED":
        scene.undone("flight")
    before = scene.tables()
    with pytest.raises(VerbRefusedError, match=f"is {state}: it cannot go back"):
        rewind(scene)
    assert scene.tables() == before


def test_a_name_of_several_places_asks_which(scene: Scene) -> None:
    for task_id in ("flight", "hotel"):
        step = scene.act(scene.attach(task_id), 1)
        savepoint(scene, step, 2)
        scene.finish(step)
    with pytest.raises(
        VerbRefusedError, match=r"several save-points 'half'; name one of: flight:half, hotel:half"
    ):
        rewind(scene)
    assert rewind(scene, "hotel:half").step.task_id == "hotel"
    with pytest.raises(UnknownSagaError):
        RewindVerbs(scene.connection).rewind("book_trip", "other", "half", actor="ann")


def test_a_fenced_attempt_makes_no_savepoint(scene: Scene) -> None:
    step = scene.attach("flight")
    scene.attach("flight", try_number=2)
    assert not RewindVerbs(scene.connection).savepoint_if_held(step, 1, "late", None)


# -- a late answer -------------------------------------------------------------------------------------------------


def test_a_late_answer_of_an_action_that_went_over_into_the_new_generation_finds_it(scene: Scene) -> None:
    step = scene.attach("flight")
    intent = scene.intent(step, 1)._replace(
        key=action_key(scene.saga.saga_uuid, "flight", -1, step.generation, 1)
    )
    scene.write(step, begin=[intent])
    savepoint(scene, step, 2)
    scene.act(step, 2)
    scene.time_passes(60)
    scene.undone("flight", request=rewind(scene).request)
    assert scene.states() == {1: "IN_DOUBT"}
    change = scene.lates.record_late(step, Outcome(1, "DONE", '"late"'), idempotent=False)
    assert change == "it took effect after all"
    assert scene.states() == {1: "DONE"}
    assert scene.step().state == "UNDONE"
    assert len(scene.view.requests) == 1


# -- divergence ----------------------------------------------------------------------------------------------------


def test_a_step_that_diverged_is_undone_from_there_and_goes_on(each_scene: Scene) -> None:
    step = each_scene.stopped("flight", 1, 2, 3)
    request = RewindVerbs(each_scene.connection).undo_from_if_stopped(step, 2, "asked for another")
    waits = each_scene.try_attach("flight", try_number=2)
    assert waits.decision.go is Go.WAIT
    each_scene.undone("flight", request=request)
    assert [each_scene.action(seq, generation=1).state for seq in (2, 3)] == ["COMPENSATED", "COMPENSATED"]
    resumed = each_scene.attach("flight", try_number=2)
    assert resumed.generation == 2
    assert each_scene.states() == {1: "DONE"}


def test_it_is_not_undone_below_later_steps_that_acted(scene: Scene) -> None:
    step = scene.stopped("flight", 1, 2)
    scene.ran("hotel", 1, after=["flight"])
    before = scene.tables()
    with pytest.raises(VerbRefusedError, match=r"later steps used what it did: hotel"):
        RewindVerbs(scene.connection).undo_from_if_stopped(step, 2, "asked for another")
    assert scene.tables() == before
