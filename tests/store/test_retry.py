"""A person has the undo of one action tried again; what else an undo has left is not touched."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_saga.core.errors import UnknownSagaError, VerbRefusedError
from airflow_saga.store.decision import Decision, Verdict
from tests.store.scene import Scene


def retry(scene: Scene, seq: int, **more: Any) -> Decision:
    return scene.settles.retry(*scene.run, scene.action(seq).action_id, **{"actor": "ann", **more})


def partly(scene: Scene, **states: str) -> Scene:
    """PARTIALLY_CANCELLED: actions 1 to 3 as given (s1=…), undone where nothing is said."""
    step = scene.attach()
    for seq in (1, 2, 3):
        effect = "NON_COMPENSABLE" if states.get(f"s{seq}") == "NON_COMPENSABLE" else "COMPENSABLE"
        scene.act(step, seq, effect=effect)
    assert scene.steps.stop_if_held(step)
    scene.cancel()
    scene.freeze()
    attached = scene.undo_of()
    for action in attached.open_actions:
        state = states.get(f"s{action.seq}", "COMPENSATED")
        if state == "NON_COMPENSABLE":
            assert scene.undos.settle_action_if_held(attached, action, state)
        else:
            scene.compensate(attached, action, state, failed=state == "COMPENSATION_FAILED")
    assert scene.settle() is not None
    assert scene.saga.state == "PARTIALLY_CANCELLED"
    return scene


def test_only_this_one_is_tried_again_and_the_last_one_closes_the_saga(each_scene: Scene) -> None:
    partly(each_scene, s1="COMPENSATION_FAILED", s3="COMPENSATION_FAILED")
    decision = retry(each_scene, 1)
    assert (decision.verdict, each_scene.saga.state) == (Verdict.CANCELLING, "CANCELLING")
    each_scene.freeze()
    attached = each_scene.undo_of()
    assert [action.seq for action in attached.open_actions] == [1]
    each_scene.compensate(attached, attached.open_actions[0])
    assert each_scene.settle() is not None
    assert each_scene.states() == {1: "COMPENSATED", 2: "COMPENSATED", 3: "COMPENSATION_FAILED"}
    assert each_scene.saga.state == "PARTIALLY_CANCELLED"
    retry(each_scene, 3)
    assert each_scene.undone("flight").saga.state == "CANCELLED"
    assert [each_scene.action(seq).undo_tries for seq in (1, 2, 3)] == [2, 1, 2]


def test_it_has_all_its_tries_again(scene: Scene) -> None:
    partly(scene, s2="COMPENSATION_FAILED")
    assert scene.action(2).undo_failures == 1
    retry(scene, 2)
    assert (scene.action(2).undo_failures, scene.action(2).undo_deadline_at) == (0, None)


def test_two_that_are_tried_again_at_once_are_one_undo(scene: Scene) -> None:
    partly(scene, s1="COMPENSATION_FAILED", s3="COMPENSATION_FAILED")
    first, second = retry(scene, 1), retry(scene, 3, actor="bob")
    assert second.verdict is Verdict.ALREADY
    assert second.request is not None
    assert first.request is not None
    assert second.request.request_id == first.request.request_id
    assert scene.undone("flight").saga.state == "CANCELLED"


def test_while_an_undo_is_under_way_it_is_refused(scene: Scene) -> None:
    partly(scene, s1="COMPENSATION_FAILED", s3="COMPENSATION_FAILED")
    retry(scene, 1)
    scene.freeze()
    with pytest.raises(VerbRefusedError, match=r"asked for by ann is under way \(FROZEN\)"):
        retry(scene, 3)


def test_a_whole_undo_that_is_asked_for_takes_it_along(scene: Scene) -> None:
    partly(scene, s1="COMPENSATION_FAILED")
    scene.ask(actor="bob")
    decision = retry(scene, 1)
    assert decision.verdict is Verdict.ALREADY
    assert "bob has asked for already" in decision.message


@pytest.mark.parametrize(("seq", "why"), [(1, "NON_COMPENSABLE"), (2, "nothing to try again")])
def test_what_cannot_be_tried_again_is_refused_and_says_why(scene: Scene, seq: int, why: str) -> None:
    partly(scene, s1="NON_COMPENSABLE", s3="COMPENSATION_FAILED")
    before = scene.tables()
    with pytest.raises(VerbRefusedError, match=why):
        retry(scene, seq)
    assert scene.tables() == before


def halted(scene: Scene) -> Scene:
    """Three actions; the undo of the second failed, and the first has waited for it."""
    step = scene.act(scene.attach(on_compensation_failure="halt"), 1, 2, 3)
    assert scene.steps.stop_if_held(step)
    scene.cancel()
    scene.freeze()
    attached = scene.undo_of()
    third, second, _ = attached.open_actions
    scene.compensate(attached, third)
    scene.compensate(attached, second, "COMPENSATION_FAILED", failed=True)
    assert scene.settle() is not None
    assert scene.saga.state == "PARTIALLY_CANCELLED"
    return scene


def test_c101_an_action_whose_turn_has_not_come_is_not_undone_alone(scene: Scene) -> None:
    halted(scene)
    before = scene.tables()
    with pytest.raises(VerbRefusedError, match="undone after what came after it"):
        retry(scene, 1)
    assert scene.tables() == before


def test_where_an_undo_has_halted_it_goes_on_from_there(each_scene: Scene) -> None:
    halted(each_scene)
    retry(each_scene, 2)
    each_scene.freeze()
    assert [action.seq for action in each_scene.undo_of().open_actions] == [2, 1]
    each_scene.undo_step()
    assert each_scene.settle() is not None
    assert each_scene.saga.state == "CANCELLED"


def test_an_action_that_no_undo_has_tried_is_refused(scene: Scene) -> None:
    step = scene.attach()
    scene.begin(step)
    scene.end(step, state="IN_DOUBT")
    assert scene.steps.stop_if_held(step)
    with pytest.raises(VerbRefusedError, match="STOPPED, no undo has tried it"):
        retry(scene, 1)
    with pytest.raises(UnknownSagaError):
        scene.settles.retry(*scene.run, 10**9, actor="ann")
