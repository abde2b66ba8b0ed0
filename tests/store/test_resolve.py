"""A person settles: what became of an action in doubt, and what to do about one that stands (PROTOCOL 5, 9)."""

from __future__ import annotations

import pytest

from airflow_saga.core.errors import UnknownSagaError, VerbRefusedError
from airflow_saga.core.states import ActionState
from airflow_saga.store.decision import Decision, Verdict
from airflow_saga.store.undo import EndedTry
from tests.store.scene import Scene


def resolve(
    scene: Scene, seq: int = 1, to: str = "COMPENSATED", note: str = "by hand", **more: str
) -> Decision:
    return scene.resolves.resolve(
        *scene.run, scene.action(seq).action_id, to=to, actor="ann", note_text=note, **more
    )


def standing(scene: Scene, *states: str) -> None:
    """PARTIALLY_CANCELLED, with one action in each of these states, seqs from 1."""
    step = scene.attach()
    for seq, state in enumerate(states, 1):
        assert scene.begin(
            step, seq, effect="NON_COMPENSABLE" if state == "NON_COMPENSABLE" else "COMPENSABLE"
        )
        assert scene.end(step, seq, "IN_DOUBT" if state == "IN_DOUBT" else "DONE")
    assert scene.steps.stop_if_held(step)
    scene.requests.cancel(*scene.run, actor="ann")
    scene.freeze()
    attached = scene.undo_of()
    for action in attached.open_actions:
        state = states[action.seq - 1]
        if state in ("IN_DOUBT", "NON_COMPENSABLE"):
            assert scene.undos.settle_action_if_held(attached, action, state, probed=True)
        elif state == "COMPENSATING":
            assert scene.undos.write_undo(attached, None, scene.next_try(action))[1] == 1
            later = EndedTry(action.action_id, state, reconcile_seconds=3600, waiting_for="the bank")
            assert scene.undos.write_undo(attached, later, None)[0]
        elif state != "DONE":
            scene.compensate(attached, action, state, failed=True)
    if "DONE" in states:
        scene.time_passes(4000)
        assert scene.settles.expire_if_past_deadline(scene.saga.saga_id) is not None
    else:
        assert scene.settle() is not None
    assert (scene.saga.state, scene.step().state) == ("PARTIALLY_CANCELLED", "PARTLY_UNDONE")


@pytest.mark.parametrize("to", ["COMPENSATED", "ACCEPTED"])
@pytest.mark.parametrize(
    "state", ["COMPENSATION_FAILED", "NON_COMPENSABLE", "IN_DOUBT", "DONE", "COMPENSATING"]
)
def test_c42_a_person_settles_what_stands_and_the_last_one_closes_the_saga(
    each_scene: Scene, state: str, to: str
) -> None:
    standing(each_scene, state)
    decision = resolve(each_scene, to=to, note="called the hotel")
    assert decision.verdict is Verdict.CANCELLED
    row = each_scene.action()
    assert (row.state, row.note, row.in_doubt, row.reconcile_at) == (to, "ann: called the hotel", False, None)
    assert (each_scene.step().state, each_scene.saga.state) == ("UNDONE", "CANCELLED")
    assert each_scene.saga.cause == "user"
    event = next(event for event in each_scene.view.events if event["what"] == f"action {state} → {to}")
    assert (event["actor"], event["detail"]) == ("ann", "book: called the hotel")


def test_what_is_left_keeps_the_saga_partly_cancelled(each_scene: Scene) -> None:
    standing(each_scene, "COMPENSATION_FAILED", "NON_COMPENSABLE")
    decision = resolve(each_scene, 1)
    assert decision.verdict is Verdict.ALREADY
    assert "book is COMPENSATED now" in decision.message
    assert (each_scene.step().state, each_scene.saga.state) == ("PARTLY_UNDONE", "PARTIALLY_CANCELLED")
    before = each_scene.tables()
    with pytest.raises(
        VerbRefusedError, match=r"is COMPENSATED: there is nothing to settle \(ann: by hand\)"
    ):
        resolve(each_scene, 1)
    assert each_scene.tables() == before
    assert resolve(each_scene, 2, "ACCEPTED").verdict is Verdict.CANCELLED
    assert [row.state for row in each_scene.view.actions] == ["COMPENSATED", "ACCEPTED"]


def test_a_saga_that_runs_goes_on_after_its_step_is_settled(scene: Scene) -> None:
    scene.ran("flight", 1)
    scene.freeze(scene.redo(scene.step()))
    scene.compensate(scene.undo_of(), scene.action(), "COMPENSATION_FAILED", failed=True)
    scene.settle()
    assert scene.step().state == "PARTLY_UNDONE"
    resolve(scene)
    assert (scene.step().state, scene.saga.state) == ("UNDONE", "RUNNING")
    assert scene.attach("flight", max_tries=1, try_number=2, clear_number=1).generation == 2


# -- refusals -------------------------------------------------------------------------------------------------------


def refused(scene: Scene, match: str, **more: str) -> VerbRefusedError:
    before = scene.tables()
    with pytest.raises(VerbRefusedError, match=match) as problem:
        resolve(scene, **more)  # type: ignore[arg-type]
    assert scene.tables() == before
    return problem.value


@pytest.mark.parametrize("state", ["RUNNING", "STOPPED", "SUCCEEDED"])
def test_an_effect_is_settled_by_hand_only_after_an_undo(scene: Scene, state: str) -> None:
    step = scene.act(scene.attach(), 1)
    if state == "STOPPED":
        scene.steps.stop_if_held(step)
    if state == "SUCCEEDED":
        scene.finish(step)
    refused(scene, f"its step is {state}, not PARTLY_UNDONE; undo the saga first")


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_is_settled_by_hand_while_an_undo_is_under_way(each_scene: Scene, frozen: bool) -> None:
    standing(each_scene, "COMPENSATION_FAILED")
    each_scene.ask()
    if frozen:
        each_scene.freeze()
    refused(each_scene, "an undo asked for by ann is under way; wait for its end")


def test_nothing_is_settled_by_hand_while_the_call_may_still_land(each_scene: Scene) -> None:
    step = each_scene.attach(cancel_deadline_seconds=1.0)
    assert each_scene.begin(step, 1, timeout_seconds=100)
    each_scene.cancel(stop_now=True)
    each_scene.sql("UPDATE airflow_saga.saga SET deadline_at = clock_timestamp()")
    assert each_scene.settles.expire_if_past_deadline(each_scene.saga.saga_id) is not None
    problem = refused(each_scene, "may still take effect until .* UTC; settle it then", to="ACCEPTED")
    assert problem.until == each_scene.action().lands_by
    each_scene.time_passes(102)
    assert resolve(each_scene, to="ACCEPTED").verdict is Verdict.CANCELLED


def test_reads_have_nothing_to_settle(scene: Scene) -> None:
    step = scene.attach()
    scene.read(step, 1)
    refused(scene, "there is nothing to settle")


def test_a_person_says_only_what_a_person_may_say(scene: Scene) -> None:
    standing(scene, "IN_DOUBT")
    for state in set(ActionState) - {"COMPENSATED", "ACCEPTED", "DONE", "FAILED"}:
        refused(scene, "COMPENSATED, ACCEPTED, DONE or FAILED", to=state)


@pytest.mark.parametrize("note", ["", "  \n"])
def test_a_person_leaves_a_note(scene: Scene, note: str) -> None:
    standing(scene, "COMPENSATION_FAILED")
    refused(scene, "with a note", note=note)


def test_an_action_of_another_saga_is_not_found(scene: Scene) -> None:
    standing(scene, "COMPENSATION_FAILED")
    other = scene.another_run("run_2")
    ask = {"to": "ACCEPTED", "actor": "ann", "note_text": "x"}
    with pytest.raises(UnknownSagaError, match="there is no saga book_trip / run_2"):
        other.resolves.resolve(*other.run, scene.action().action_id, **ask)
    other.attach()
    for action_id in (scene.action().action_id, 10**9):
        with pytest.raises(UnknownSagaError, match=f"has no action {action_id}"):
            other.resolves.resolve(*other.run, action_id, **ask)
    other.close()


# -- a person answers for the probe ---------------------------------------------------------------------------------


def in_doubt(scene: Scene, **more: bool) -> None:
    step = scene.attach()
    assert scene.begin(step, 1)
    assert scene.end(step, 1, "IN_DOUBT", **more)
    assert scene.steps.stop_if_held(step)


def test_a_person_says_that_it_happened_and_the_step_resumes_after_it(each_scene: Scene) -> None:
    in_doubt(each_scene)
    resolve(each_scene, to="DONE", note="it is in the portal", result='{"id": 7}')
    row = each_scene.action()
    assert (row.state, row.in_doubt, row.result, row.note) == (
        *("DONE", False, '{"id": 7}'),
        "ann: it is in the portal",
    )
    assert (each_scene.step().state, each_scene.saga.state) == ("STOPPED", "RUNNING")
    resumed = each_scene.try_attach(try_number=2)
    assert [action.state for action in resumed.recorded] == ["DONE"]


def test_a_person_says_that_it_did_not_happen_and_it_may_be_tried_again(each_scene: Scene) -> None:
    in_doubt(each_scene)
    resolve(each_scene, to="FAILED", note="not in the portal")
    row = each_scene.action()
    assert (row.state, row.in_doubt, row.result) == ("FAILED", False, None)
    step = each_scene.attach(try_number=2)
    assert each_scene.steps.retry_if_allowed(step, each_scene.intent(step, 1, max_tries=2))[0] == 2


def test_an_answer_is_possible_while_the_undo_is_only_hinted(scene: Scene) -> None:
    in_doubt(scene)
    scene.hint()
    resolve(scene, to="FAILED", note="not in the portal")
    assert scene.action().state == "FAILED"


def test_an_answer_waits_until_the_call_can_land_no_more(scene: Scene) -> None:
    in_doubt(scene, own=False)
    refused(scene, "may still take effect", to="FAILED")
    scene.time_passes(12)
    resolve(scene, to="FAILED")


@pytest.mark.parametrize("how", ["running", "undone", "known"])
def test_only_an_action_in_doubt_of_a_stopped_step_can_be_answered(scene: Scene, how: str) -> None:
    if how == "running":
        step = scene.attach()
        assert scene.begin(step, 1)
        assert scene.end(step, 1, "IN_DOUBT")
    elif how == "undone":
        standing(scene, "IN_DOUBT")
    else:
        scene.stopped("flight", 1)
    refused(scene, "can be answered; after an undo use --undone or --accepted", to="DONE")
