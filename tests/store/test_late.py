"""The answer that comes too late: what it changes in each state of action, step and saga (PROTOCOL 5)."""

from __future__ import annotations

import pytest

from airflow_saga.core.records import Outcome, StepRow
from tests.store.scene import Scene

YES = Outcome(1, "DONE", '"late"')
NO = Outcome(1, "FAILED", error="NotApplied")


def orphan(scene: Scene, **more: object) -> StepRow:
    """An attempt in the middle of a call; another one, or an undo, will take its step."""
    step = scene.attach()
    assert scene.begin(step, 1, **more)
    return step


def late(scene: Scene, step: StepRow, outcome: Outcome = YES, *, idempotent: bool = False) -> str:
    return scene.lates.record_late(step, outcome, idempotent=idempotent)


def undone_by_probe(scene: Scene, answer: str) -> StepRow:
    """Cancelled now: the call in doubt was probed in the undo, and settled by that."""
    step = orphan(scene)
    scene.freeze(scene.cancel(stop_now=True))
    scene.time_passes(12)
    attached = scene.undo_of()
    action = scene.action()
    if answer == "unknown":
        assert scene.undos.settle_action_if_held(
            attached, action, "IN_DOUBT", probed=True, error="cannot tell"
        )
    else:
        state = "DONE" if answer == "yes" else "FAILED"
        assert scene.steps.verified_if_held(attached.step, action.action_id, state, '"probed"', "the probe")
        if answer == "yes":
            scene.compensate(attached, scene.action())
    assert scene.settle() is not None
    return step


# -- in a step that goes on forward ---------------------------------------------------------------------------------


def test_c81_the_answer_of_a_fenced_attempt_is_kept_and_its_call_is_not_made_again(each_scene: Scene) -> None:
    step = orphan(each_scene)
    each_scene.attach(try_number=2)
    change = late(each_scene, step)
    assert change == "it took effect after all"
    row = each_scene.action()
    assert (row.state, row.in_doubt, row.result, row.lands_by) == ("DONE", False, '"late"', None)
    assert (each_scene.saga.state, each_scene.view.requests) == ("RUNNING", ())
    event = each_scene.view.events[-1]
    assert (event["what"], event["action_id"]) == ("late answer", row.action_id)
    assert event["detail"] == "book: DONE; it took effect after all"


def test_a_late_no_is_proof_and_the_call_may_be_tried_again(each_scene: Scene) -> None:
    step = orphan(each_scene)
    newer = each_scene.attach(try_number=2)
    assert late(each_scene, step, NO) == "it proved that it did not take effect"
    row = each_scene.action()
    assert (row.state, row.in_doubt, row.error, row.lands_by) == ("FAILED", False, "NotApplied", None)
    assert each_scene.steps.retry_if_allowed(newer, each_scene.intent(newer, 1, max_tries=2))[0] == 2


def test_the_answer_of_a_step_that_was_marked_failed_completes_its_open_call(scene: Scene) -> None:
    step = orphan(scene)
    scene.runs.mark_step_if_running(*scene.run, "flight", -1)
    assert late(scene, step) == "completed after its step was taken over"
    assert (scene.action().state, scene.action().result) == ("DONE", '"late"')
    assert scene.step().state == "STOPPED"


def test_a_fenced_call_that_timed_out_may_still_land(scene: Scene) -> None:
    """It reports that it does not know: that is no answer, so A1 goes on."""
    step = orphan(scene)
    scene.runs.mark_step_if_running(*scene.run, "flight", -1)
    lands_by = scene.action().lands_by
    late(scene, step, Outcome(1, "IN_DOUBT", error="timed out", own=False))
    row = scene.action()
    assert (row.state, row.in_doubt, row.lands_by) == ("IN_DOUBT", True, lands_by)
    late(scene, step, Outcome(1, "IN_DOUBT", error="connection reset"))
    assert scene.action().lands_by == lands_by


def test_an_answer_that_says_nothing_new_leaves_only_its_event(scene: Scene) -> None:
    step = orphan(scene)
    scene.attach(try_number=2)
    row = scene.action()
    assert late(scene, step, Outcome(1, "IN_DOUBT", error="reset")) == "nothing new"
    assert scene.action() == row
    late(scene, step)
    row = scene.action()
    assert late(scene, step) == "it was known to be DONE"
    assert late(scene, step, NO) == "it stays DONE"
    assert scene.action() == row


# -- beside a newer try ---------------------------------------------------------------------------------------------


def tried_again(scene: Scene, *, idempotent: bool = False) -> tuple[StepRow, StepRow]:
    """The first try was proved not applied, wrongly, and the call was made again."""
    first = orphan(scene)
    second = scene.attach(try_number=2)
    scene.time_passes(12)
    scene.steps.heartbeat_if_held(second, 15)
    assert scene.steps.verified_if_held(second, scene.action().action_id, "FAILED", None, "the probe said no")
    intent = scene.intent(second, 1, max_tries=3, idempotent=idempotent)
    assert scene.steps.retry_if_allowed(second, intent)[0] == 2
    return first, second


@pytest.mark.parametrize("newer", ["PENDING", "DONE"])
def test_two_effects_need_two_rows(each_scene: Scene, newer: str) -> None:
    first, second = tried_again(each_scene)
    if newer == "DONE":
        assert each_scene.end(second, 1, tries=2)
    change = late(each_scene, first)
    assert change.startswith("a second effect beside the newer attempt's, kept as action ")
    original = each_scene.action()
    assert original.state == newer
    twin = next(row for row in each_scene.view.actions if row.twin_of == original.action_id)
    assert (twin.state, twin.tries, twin.result, twin.key) == ("DONE", 1, '"late"', original.key)
    assert (twin.name, twin.params, twin.effect) == (original.name, original.params, original.effect)
    assert each_scene.begin(second, 2), "the running attempt's next seq is still its own"
    assert each_scene.begin(second, 3)


def test_the_same_key_twice_is_one_effect(scene: Scene) -> None:
    first, _ = tried_again(scene, idempotent=True)
    row = scene.action()
    assert late(scene, first, idempotent=True) == "the same effect as the newer attempt's, by its key"
    assert scene.action() == row
    assert len(scene.view.actions) == 1


def test_the_answer_of_an_older_try_says_nothing_about_when_the_newer_one_lands(scene: Scene) -> None:
    first, second = tried_again(scene, idempotent=True)
    assert scene.end(second, 1, "IN_DOUBT", own=False, tries=2)
    lands_by = scene.action().lands_by
    assert lands_by is not None
    late(scene, first, idempotent=True)
    row = scene.action()
    assert (row.state, row.lands_by) == ("DONE", lands_by), "the second call is still under way"


def test_an_older_no_does_not_deny_a_newer_try(scene: Scene) -> None:
    first, second = tried_again(scene)
    assert scene.end(second, 1, "IN_DOUBT", tries=2)
    assert late(scene, first, NO) == "it stays IN_DOUBT"
    assert scene.action().state == "IN_DOUBT"


def test_a_no_of_a_later_try_speaks_for_that_try_only(scene: Scene) -> None:
    """The first try of an idempotent call was lost and may have landed; the second one proved not applied, too late."""
    step = orphan(scene)
    second = scene.attach(try_number=2)
    scene.time_passes(12)
    scene.steps.heartbeat_if_held(second, 15)
    intent = scene.intent(second, 1, max_tries=3, idempotent=True)
    assert scene.steps.retry_if_allowed(second, intent)[0] == 2
    assert step.fence < second.fence
    scene.runs.mark_step_if_running(*scene.run, "flight", -1)
    scene.lates.record_late(second, Outcome(1, "FAILED", tries=2), idempotent=True)
    row = scene.action()
    assert (row.state, row.in_doubt) == ("IN_DOUBT", True)


def test_an_older_yes_outweighs_a_newer_try_that_was_denied(scene: Scene) -> None:
    first, second = tried_again(scene)
    assert scene.end(second, 1, "FAILED", tries=2)
    late(scene, first)
    assert (scene.action().state, scene.action().result) == ("DONE", '"late"')


# -- after the undo -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settled_as", ["FAILED", "IN_DOUBT"])
def test_c35_a_late_yes_reopens_a_saga_that_had_ended_with_its_undo(
    each_scene: Scene, settled_as: str
) -> None:
    step = undone_by_probe(each_scene, {"FAILED": "no", "IN_DOUBT": "unknown"}[settled_as])
    ended = each_scene.saga
    assert ended.state == {"FAILED": "CANCELLED", "IN_DOUBT": "PARTIALLY_CANCELLED"}[settled_as]
    assert late(each_scene, step).endswith("its undo is asked for")
    saga, row, request = each_scene.saga, each_scene.action(), each_scene.request
    assert (saga.state, saga.mode, saga.actor, saga.cause) == ("CANCELLING", "undo", ended.actor, ended.cause)
    assert saga.stop_clear_number == ended.stop_clear_number
    assert (row.state, row.in_doubt, row.probed, row.result) == ("DONE", False, False, '"late"')
    assert each_scene.step().state == "PARTLY_UNDONE"
    assert (request.number, request.state, request.cause, request.whole_run) == (2, "REQUESTED", "late", True)
    stamps = each_scene.sql(
        "SELECT count(DISTINCT x) AS n FROM (SELECT xmin::text AS x FROM airflow_saga.saga UNION ALL "
        "SELECT xmin::text FROM airflow_saga.action UNION ALL "
        "SELECT xmin::text FROM airflow_saga.undo_request WHERE number = 2) AS stamps"
    )
    assert stamps[0]["n"] == 1, "all in one transaction"
    each_scene.undone("flight")
    assert each_scene.saga.state == "CANCELLED"


def test_a_late_yes_for_what_was_undone_puts_it_in_doubt_and_the_next_undo_has_a_new_key(
    each_scene: Scene,
) -> None:
    step = undone_by_probe(each_scene, "yes")
    first = each_scene.action()
    assert (first.state, each_scene.saga.state) == ("COMPENSATED", "CANCELLED")
    late(each_scene, step)
    row = each_scene.action()
    assert (row.state, row.in_doubt, row.reopened, row.probed) == ("IN_DOUBT", True, 1, False)
    assert each_scene.saga.state == "CANCELLING"
    each_scene.freeze()
    attached = each_scene.undo_of()
    assert [action.state for action in attached.open_actions] == ["IN_DOUBT"]
    again = each_scene.next_try(row)
    assert again.undo_key != first.undo_key


@pytest.mark.parametrize("state", ["COMPENSATING", "COMPENSATION_FAILED", "NON_COMPENSABLE"])
def test_a_late_yes_changes_nothing_where_the_undo_already_takes_it_for_done(
    scene: Scene, state: str
) -> None:
    effect = {"effect": "NON_COMPENSABLE"} if state == "NON_COMPENSABLE" else {}
    step = orphan(scene, **effect)
    scene.freeze(scene.cancel(stop_now=True))
    scene.time_passes(12)
    attached = scene.undo_of()
    assert scene.steps.verified_if_held(attached.step, scene.action().action_id, "DONE", None, "yes")
    if state == "NON_COMPENSABLE":
        assert scene.undos.settle_action_if_held(attached, scene.action(), state)
    elif state == "COMPENSATING":
        assert scene.undos.write_undo(attached, None, scene.next_try(scene.action()))[1] == 1
    else:
        scene.compensate(attached, scene.action(), state)
    row, requests = scene.action(), scene.view.requests
    assert late(scene, step) == f"it stays {state}"
    assert (scene.action(), scene.view.requests) == (row, requests)


def test_a_late_yes_changes_nothing_that_a_person_accepted(scene: Scene) -> None:
    step = undone_by_probe(scene, "unknown")
    scene.resolves.resolve(
        *scene.run, scene.action().action_id, to="ACCEPTED", actor="ann", note_text="never mind"
    )
    assert scene.saga.state == "CANCELLED"
    assert late(scene, step) == "it stays ACCEPTED"
    assert scene.saga.state == "CANCELLED"


def test_a_late_no_settles_what_nobody_could_tell(each_scene: Scene) -> None:
    """Nothing stands any more, and a saga that says PARTIALLY_CANCELLED must name what does."""
    step = undone_by_probe(each_scene, "unknown")
    assert each_scene.saga.state == "PARTIALLY_CANCELLED"
    assert late(each_scene, step, NO).startswith("it proved that it did not take effect")
    assert (each_scene.action().state, each_scene.step().state) == ("FAILED", "UNDONE")
    saga = each_scene.saga
    assert (saga.state, saga.actor, saga.cause) == ("CANCELLED", "ann", "user")


def test_a_late_no_settles_no_more_than_its_own_action(scene: Scene) -> None:
    step = scene.attach()
    assert scene.begin(step, 1)
    assert scene.begin(step, 2)
    scene.freeze(scene.cancel(stop_now=True))
    scene.time_passes(12)
    attached = scene.undo_of()
    for action in attached.open_actions:
        scene.undos.settle_action_if_held(attached, action, "IN_DOUBT", probed=True)
    scene.settle()
    late(scene, step, NO)
    assert scene.states() == {1: "FAILED", 2: "IN_DOUBT"}
    assert (scene.step().state, scene.saga.state) == ("PARTLY_UNDONE", "PARTIALLY_CANCELLED")


# -- while the saga does something else -----------------------------------------------------------------------------


def redone(scene: Scene) -> StepRow:
    """A saga that runs, in which the step `flight` was undone; its first attempt still knows an answer."""
    orphaned = orphan(scene)
    second = scene.attach(try_number=2)
    scene.time_passes(12)
    scene.steps.heartbeat_if_held(second, 15)
    assert scene.steps.verified_if_held(second, scene.action().action_id, "FAILED", None, "no")
    scene.finish(second)
    scene.undone("flight", request=scene.redo(scene.step()))
    assert (scene.step().state, scene.saga.state) == ("UNDONE", "RUNNING")
    return orphaned


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETED", "FAILED", "CANCELLING", "SUSPENDED"])
def test_in_any_other_state_of_the_saga_the_undo_covers_that_step_only(scene: Scene, state: str) -> None:
    step = redone(scene)
    if state != "RUNNING":
        scene.ran("car", 1)
    if state in ("CANCELLING", "SUSPENDED"):
        scene.requests.cancel(*scene.run, actor="ann", keep=True)
    if state == "SUSPENDED":
        assert scene.sweeps.suspend_if_quiet(scene.saga.saga_id)
    if state == "FAILED":
        scene.runs.fail_and_hint(*scene.run, cause="refused", clear_number=1)
    if state == "COMPLETED":
        scene.sql(
            "UPDATE airflow_saga.saga SET state = 'COMPLETED'"
        )  # no verb completes it with an undone step
    assert scene.saga.state == state
    late(scene, step)
    request = scene.request
    meanwhile = "CANCELLING" if state == "SUSPENDED" else state  # else nobody would hear that its undo failed
    assert (scene.saga.state, scene.step().state) == (meanwhile, "PARTLY_UNDONE")
    assert (request.state, request.cause, request.whole_run) == ("REQUESTED", "late", False)
    scene.undone("flight")
    assert (scene.saga.state, scene.step().state, scene.action().state) == (state, "UNDONE", "COMPENSATED")
    if state != "RUNNING":
        assert scene.step("car").state == "SUCCEEDED"


def test_a_late_yes_waits_behind_the_frozen_undo_of_other_steps(each_scene: Scene) -> None:
    step = redone(each_scene)
    each_scene.ran("car", 1)
    frozen = each_scene.freeze(each_scene.redo(each_scene.step("car")))
    assert "its undo is queued" in late(each_scene, step)
    queued = each_scene.request
    assert (queued.state, queued.cause, queued.whole_run) == ("QUEUED", "late", False)
    assert each_scene.saga.state == "RUNNING"
    cleared = {"max_tries": 1, "try_number": 3, "clear_number": 1}
    assert each_scene.try_attach("flight", **cleared).decision.go == "refuse"
    each_scene.undo_step("car", frozen)
    each_scene.settle(frozen)
    assert each_scene.request.state == "REQUESTED"
    each_scene.undone("flight", request=each_scene.request)
    assert each_scene.action().state == "COMPENSATED"


def test_a_cancel_widens_the_undo_that_a_late_yes_has_queued(scene: Scene) -> None:
    step = redone(scene)
    scene.ran("car", 1)
    frozen = scene.freeze(scene.redo(scene.step("car")))
    late(scene, step)
    decision = scene.requests.cancel(*scene.run, actor="ann")
    assert (decision.verdict.value, scene.saga.state) == ("queued behind the undo under way", "CANCELLING")
    assert (scene.request.state, scene.request.whole_run, scene.request.actor) == ("QUEUED", True, "ann")
    scene.undo_step("car", frozen)
    scene.settle(frozen)
    scene.undone("flight")
    assert scene.saga.state == "CANCELLED"


def test_two_late_answers_share_one_queued_undo(scene: Scene) -> None:
    step = scene.attach()
    assert scene.begin(step, 1)
    other = scene.attach("hotel")
    assert scene.begin(other, 1)
    for task, first in (("flight", step), ("hotel", other)):
        second = scene.attach(task, try_number=2)
        scene.time_passes(12)
        scene.steps.heartbeat_if_held(second, 15)
        action = scene.action(1, task)
        assert scene.steps.verified_if_held(second, action.action_id, "FAILED", None, "no")
        scene.finish(second)
        scene.undone(task, request=scene.redo(scene.step(task)))
        assert first.fence == 1
    scene.ran("car", 1)
    frozen = scene.freeze(scene.redo(scene.step("car")))
    late(scene, step)
    late(scene, other)
    assert [request.state for request in scene.view.requests[-2:]] == ["FROZEN", "QUEUED"]
    assert scene.request.actor == "airflow"
    scene.undo_step("car", frozen)
    scene.settle(frozen)
    scene.undone("flight", "hotel")
    assert scene.reader.residual(scene.saga.saga_id) == []


def test_a_late_yes_widens_an_undo_that_is_not_frozen(scene: Scene) -> None:
    step = redone(scene)
    scene.ran("car", 1)
    redo = scene.redo(scene.step("car"))
    assert "the undo that was asked for takes it along" in late(scene, step)
    assert [request.state for request in scene.view.requests[-1:]] == ["REQUESTED"]
    assert scene.request.request_uuid == redo.request_uuid
    scene.undone("car", "flight")
    assert scene.reader.residual(scene.saga.saga_id) == []


def test_a_late_yes_is_undone_by_the_automatic_undo_and_also_when_that_is_withdrawn(
    each_scene: Scene,
) -> None:
    step = redone(each_scene)
    each_scene.stopped("car", 1)
    hint = each_scene.hint(clear_number=1)
    assert "the undo that is due covers it" in late(each_scene, step)
    assert each_scene.request.request_uuid == hint.request_uuid
    each_scene.attach("car", try_number=2)
    request = each_scene.request
    assert (request.state, request.cause, request.whole_run) == ("REQUESTED", "late", False)
    each_scene.undone("flight")
    assert each_scene.action().state == "COMPENSATED"


def test_a_late_yes_in_a_step_that_is_being_undone_is_settled_by_that_undo(scene: Scene) -> None:
    step = scene.attach()
    assert scene.begin(step, 1)
    scene.freeze(scene.cancel(stop_now=True))
    scene.time_passes(12)
    attached = scene.undo_of()
    assert scene.steps.verified_if_held(attached.step, scene.action().action_id, "FAILED", None, "no")
    late(scene, step)
    assert (scene.action().state, scene.step().state) == ("DONE", "UNDOING")
    assert len(scene.view.requests) == 1
    assert scene.settle() is None, "it stands again, and the undo is not over"
    scene.undo_step()
    assert scene.settle() is not None
    assert scene.saga.state == "CANCELLED"


def test_a_late_yes_of_an_older_generation_is_kept(scene: Scene) -> None:
    step = redone(scene)
    scene.attach("flight", max_tries=1, try_number=3, clear_number=1)
    late(scene, step)
    assert scene.action(1, generation=1).state == "DONE"
    assert scene.action(1, generation=1).residual
    scene.freeze(scene.cancel(stop_now=True))
    attached = scene.undo_of()
    assert [(row.generation, row.seq) for row in attached.open_actions] == [(1, 1)]
