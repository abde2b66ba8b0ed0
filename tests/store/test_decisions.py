"""Cancel, keep, undo: what each answers in each state, and that a saga has one open request (PROTOCOL 3, 6; P10)."""

from __future__ import annotations

import pytest

from airflow_saga.core.errors import VerbRefusedError
from airflow_saga.store.decision import Verdict
from tests.store.scene import Scene


def keep(scene: Scene, **more: object) -> Verdict:
    return scene.requests.cancel(*scene.run, **{"actor": "ann", "keep": True, **more}).verdict  # type: ignore[arg-type]


def partly_cancelled(scene: Scene) -> None:
    """One action's compensation was given up."""
    scene.stopped("flight", 1)
    scene.freeze(scene.cancel())
    scene.compensate(scene.undo_of(), scene.action(), "COMPENSATION_FAILED", failed=True, error="503")
    assert scene.settle() is not None
    assert scene.saga.state == "PARTIALLY_CANCELLED"


# -- before a step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("how", ["cancel", "keep", "undo", "marked failed"])
def test_c89_a_run_that_no_step_began_is_cancelled_at_once(each_scene: Scene, known: bool, how: str) -> None:
    if known:
        each_scene.runs.open_if_new(*each_scene.run)
    ask = {"actor": "ann", "reason": "wrong date", "clear_number": 2}
    if how == "undo":
        decision = each_scene.requests.undo(*each_scene.run, **ask)  # type: ignore[arg-type]
    elif how == "marked failed":
        decision = each_scene.requests.undo(*each_scene.run, cause="marked_failed", **ask)  # type: ignore[arg-type]
    else:
        decision = each_scene.requests.cancel(*each_scene.run, keep=how == "keep", **ask)  # type: ignore[arg-type]
    assert decision.verdict is Verdict.NOTHING
    assert "no step had begun" in decision.message
    assert not decision.undoes
    saga = each_scene.saga
    assert (saga.state, saga.actor, saga.reason, saga.stop_clear_number) == (
        "CANCELLED",
        "ann",
        "wrong date",
        2,
    )
    assert each_scene.view.requests == ()
    refused = each_scene.try_attach(clear_number=2)
    assert refused.decision.go == "refuse"
    assert "stopped by ann (wrong date)" in refused.decision.message
    assert each_scene.try_attach(clear_number=3).decision.go == "start"


# -- a saga that runs -----------------------------------------------------------------------------------------------


def test_cancel_moves_the_saga_and_asks_for_the_undo_in_one_transaction(each_scene: Scene) -> None:
    each_scene.attach(cancel_deadline_seconds=600.0)
    decision = each_scene.requests.cancel(*each_scene.run, actor="ann", reason="wrong date", clear_number=1)
    assert (decision.verdict, decision.undoes) == (Verdict.CANCELLING, True)
    assert "asked for by ann" in decision.message
    saga, request = each_scene.saga, each_scene.request
    assert (saga.state, saga.mode, saga.cause, saga.actor, saga.reason) == (
        *("CANCELLING", "undo", "user", "ann", "wrong date"),
    )
    assert (saga.stop_clear_number, saga.stop_now) == (1, False)
    assert saga.deadline_at is not None
    assert 595 < (saga.deadline_at - saga.changed_at).total_seconds() <= 600
    assert (request.number, request.state, request.whole_run, request.cause) == (1, "REQUESTED", True, "user")
    assert (request.actor, request.reason, request.clear_number) == ("ann", "wrong date", 1)
    assert request.plan is None
    stamps = each_scene.sql(
        "SELECT g.xmin::text AS saga, r.xmin::text AS request FROM airflow_saga.saga g "
        "JOIN airflow_saga.undo_request r USING (saga_id)"
    )
    assert stamps[0]["saga"] == stamps[0]["request"]


def test_the_deadline_of_a_stop_is_never_sooner_than_what_may_still_land(scene: Scene) -> None:
    step = scene.attach(cancel_deadline_seconds=5.0)
    assert scene.begin(step, 1, timeout_seconds=100, settle_after_seconds=20)
    scene.cancel()
    saga = scene.saga
    assert saga.deadline_at is not None
    assert (saga.deadline_at - saga.changed_at).total_seconds() > 121


def test_the_deadline_waits_also_for_a_call_that_timed_out_unreported(scene: Scene) -> None:
    step = scene.attach(cancel_deadline_seconds=5.0)
    assert scene.begin(step, 1, timeout_seconds=10, settle_after_seconds=100)
    assert scene.end(step, 1, "IN_DOUBT", own=False)
    scene.cancel()
    saga = scene.saga
    assert saga.deadline_at is not None
    assert (saga.deadline_at - saga.changed_at).total_seconds() > 100


def test_c90_where_the_run_is_over_and_no_step_lives_cancel_says_so_and_offers_undo(
    each_scene: Scene,
) -> None:
    step = each_scene.attach()
    live = each_scene.requests.cancel(*each_scene.another_run("run_2").run, actor="ann", run_is_success=True)
    assert live.verdict is Verdict.NOTHING
    each_scene.act(step, 1)
    each_scene.finish(step)
    before = each_scene.tables()
    decision = each_scene.requests.cancel(*each_scene.run, actor="ann", run_is_success=True)
    assert decision.verdict is Verdict.FINISHED
    assert "airflow saga undo" in decision.message
    assert each_scene.tables() == before


def test_c90_a_run_that_reads_success_is_still_cancelled_while_a_step_lives(scene: Scene) -> None:
    scene.act(scene.attach(), 1)
    decision = scene.requests.cancel(*scene.run, actor="ann", run_is_success=True)
    assert decision.verdict is Verdict.CANCELLING
    assert scene.saga.state == "CANCELLING"


@pytest.mark.parametrize("keep_effects", [False, True])
@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "SUSPENDED", "PARTIALLY_CANCELLED"])
def test_c90_cancel_of_a_saga_that_has_ended_changes_nothing_and_offers_undo(
    scene: Scene, state: str, keep_effects: bool
) -> None:
    if state == "PARTIALLY_CANCELLED":
        partly_cancelled(scene)
    else:
        scene.ran("flight", 1)
        if state == "COMPLETED":
            scene.runs.complete_if_over(*scene.run)
        elif state == "FAILED":
            scene.hint()
        else:
            keep(scene)
            scene.sweeps.suspend_if_quiet(scene.saga.saga_id)
    assert scene.saga.state == state
    before = scene.tables()
    decision = scene.requests.cancel(*scene.run, actor="bob", keep=keep_effects)
    assert decision.verdict is Verdict.FINISHED
    assert f"already ended ({state})" in decision.message
    assert "airflow saga undo" in decision.message
    assert scene.tables() == before


@pytest.mark.parametrize("how", ["cancel", "keep", "undo"])
def test_a_cancelled_saga_is_cancelled_whatever_is_asked(scene: Scene, how: str) -> None:
    scene.stopped("flight", 1)
    scene.cancel()
    scene.undone("flight")
    before = scene.tables()
    if how == "undo":
        decision = scene.requests.undo(*scene.run, actor="bob")
    else:
        decision = scene.requests.cancel(*scene.run, actor="bob", keep=how == "keep")
    assert decision.verdict is Verdict.CANCELLED
    assert "already cancelled, by ann" in decision.message
    assert scene.tables() == before


# -- keep -----------------------------------------------------------------------------------------------------------


def test_keep_stops_the_saga_without_a_request(each_scene: Scene) -> None:
    each_scene.act(each_scene.attach(), 1)
    assert keep(each_scene, reason="enough", clear_number=1) is Verdict.KEEPING
    saga = each_scene.saga
    assert (saga.state, saga.mode, saga.actor, saga.reason) == ("CANCELLING", "keep", "ann", "enough")
    assert saga.stop_clear_number == 1
    assert each_scene.view.requests == ()


def test_keep_again_adds_now_and_is_answered_with_who_asked_first(scene: Scene) -> None:
    scene.attach()
    keep(scene)
    deadline = scene.saga.deadline_at
    decision = scene.requests.cancel(*scene.run, actor="bob", keep=True, stop_now=True, clear_number=1)
    assert decision.verdict is Verdict.ALREADY
    assert "ann" in decision.message
    assert (scene.saga.stop_now, scene.saga.actor, scene.saga.stop_clear_number) == (True, "ann", 1)
    assert scene.saga.deadline_at == deadline


def test_keep_after_an_undo_was_asked_for_comes_too_late(scene: Scene) -> None:
    scene.attach()
    scene.cancel()
    before = scene.tables()
    decision = scene.requests.cancel(*scene.run, actor="bob", keep=True)
    assert decision.verdict is Verdict.ALREADY
    assert "undone already, asked for by ann" in decision.message
    assert scene.tables() == before


def test_keep_is_refused_while_an_undo_of_some_steps_is_open(scene: Scene) -> None:
    scene.ran("flight", 1)
    scene.redo(scene.step("flight"))
    before = scene.tables()
    decision = scene.requests.cancel(*scene.run, actor="ann", keep=True)
    assert decision.verdict is Verdict.ALREADY
    assert "asked for an undo first" in decision.message
    assert scene.tables() == before


@pytest.mark.parametrize("how", ["cancel", "undo"])
def test_what_was_kept_is_undone_once_a_person_says_so(each_scene: Scene, how: str) -> None:
    each_scene.act(each_scene.attach(), 1)
    keep(each_scene, stop_now=True)
    decision = getattr(each_scene.requests, how)(*each_scene.run, actor="bob")
    assert decision.verdict is Verdict.CANCELLING
    saga = each_scene.saga
    assert (saga.state, saga.mode, saga.actor) == ("CANCELLING", "undo", "bob")
    assert saga.stop_now, "now is never taken back"
    assert each_scene.request.state == "REQUESTED"


@pytest.mark.parametrize("suspended", [False, True])
def test_marking_the_run_failed_does_not_undo_what_was_kept(scene: Scene, suspended: bool) -> None:
    scene.stopped("flight", 1)
    keep(scene)
    if suspended:
        assert scene.sweeps.suspend_if_quiet(scene.saga.saga_id)
    before = scene.tables()
    decision = scene.requests.undo(*scene.run, actor="airflow", cause="marked_failed")
    assert decision.verdict is Verdict.IGNORED
    hint = scene.runs.fail_and_hint(*scene.run, cause="failure")
    assert (hint.verdict, hint.request) == (Verdict.IGNORED, None)
    assert scene.tables() == before


# -- undo -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", ["user", "marked_failed"])
@pytest.mark.parametrize("state", ["RUNNING", "COMPLETED"])
def test_undo_of_a_saga_that_runs_or_has_completed(each_scene: Scene, state: str, cause: str) -> None:
    each_scene.ran("flight", 1)
    if state == "COMPLETED":
        each_scene.runs.complete_if_over(*each_scene.run)
    decision = each_scene.requests.undo(*each_scene.run, actor="ann", cause=cause, clear_number=1)
    assert (decision.verdict, each_scene.saga.state) == (Verdict.CANCELLING, "CANCELLING")
    assert (each_scene.saga.cause, each_scene.saga.stop_clear_number) == (cause, 1)
    assert each_scene.request.cause == cause


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED", "PARTIALLY_CANCELLED"])
def test_a_person_may_undo_what_ended_otherwise_and_a_hook_may_not(scene: Scene, state: str) -> None:
    if state == "PARTIALLY_CANCELLED":
        partly_cancelled(scene)
    else:
        scene.stopped("flight", 1, on_failure="keep")
        if state == "FAILED":
            assert scene.runs.fail_and_hint(*scene.run, cause="failure").verdict is Verdict.IGNORED
        else:
            keep(scene)
            scene.sweeps.suspend_if_quiet(scene.saga.saga_id)
    assert scene.saga.state == state
    before = scene.tables()
    hooked = scene.requests.undo(*scene.run, actor="airflow", cause="marked_failed")
    assert (hooked.verdict, scene.tables()) == (Verdict.IGNORED, before)
    assert scene.ask().state == "REQUESTED"
    assert (scene.saga.state, scene.saga.mode) == ("CANCELLING", "undo")


def test_the_undo_of_a_failed_run_takes_the_place_of_the_automatic_one(each_scene: Scene) -> None:
    each_scene.stopped("flight", 1)
    hint = each_scene.hint()
    asked = each_scene.ask(reason="now please")
    assert asked.request_uuid == hint.request_uuid
    assert (asked.state, asked.cause, asked.actor, asked.reason) == ("REQUESTED", "user", "ann", "now please")
    assert (each_scene.saga.state, each_scene.saga.actor) == ("CANCELLING", "ann")


def test_a_held_undo_goes_on_when_a_person_asks_for_it(scene: Scene) -> None:
    scene.stopped("flight", 1)
    hint = scene.hint()
    scene.sweeps.hold_if_mass_outage(causes=["failure"], threshold=0, window_seconds=60)
    asked = scene.ask()
    assert (asked.request_uuid, asked.state) == (hint.request_uuid, "REQUESTED")
    scene.undone("flight")
    assert scene.saga.state == "CANCELLED"


# -- P10: one request -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_asking_twice_joins_the_first_and_says_who_that_was(each_scene: Scene, frozen: bool) -> None:
    each_scene.stopped("flight", 1)
    first = each_scene.cancel(reason="wrong date")
    if frozen:
        each_scene.freeze(first)
    deadline = each_scene.saga.deadline_at
    for verb in (each_scene.requests.cancel, each_scene.requests.undo):
        decision = verb(*each_scene.run, actor="bob", reason="me too")
        assert (decision.verdict, decision.undoes) == (Verdict.ALREADY, True)
        assert "asked for by ann" in decision.message
        assert decision.request is not None
        assert decision.request.request_uuid == first.request_uuid
    assert (each_scene.saga.actor, each_scene.saga.reason) == ("ann", "wrong date")
    assert each_scene.saga.deadline_at == deadline
    assert len(each_scene.view.requests) == 1
    assert each_scene.request.actor == "ann"


def test_a_higher_cause_takes_the_place_of_a_lower_one_before_the_freeze(scene: Scene) -> None:
    scene.stopped("flight", 1)
    scene.ask(cause="marked_failed", actor="airflow")
    asked = scene.cancel(reason="mine")
    assert (asked.cause, asked.actor, asked.reason, asked.number) == ("user", "ann", "mine", 1)
    lower = scene.ask(cause="due", actor="reconciler", reason="later")
    assert (lower.cause, lower.actor, lower.reason) == ("user", "ann", "mine")


def test_stop_now_is_added_to_a_stop_under_way(each_scene: Scene) -> None:
    each_scene.attach()
    each_scene.cancel()
    decision = each_scene.requests.cancel(*each_scene.run, actor="bob", stop_now=True)
    assert decision.verdict is Verdict.ALREADY
    assert (each_scene.saga.stop_now, each_scene.request.stop_now) == (True, True)
    assert "stop now" in each_scene.history
    each_scene.freeze()


def test_a_redo_that_is_not_frozen_is_widened_to_the_whole_run(each_scene: Scene) -> None:
    each_scene.ran("flight", 1)
    each_scene.ran("car", 1)
    redo = each_scene.redo(each_scene.step("flight"))
    decision = each_scene.requests.cancel(*each_scene.run, actor="ann")
    assert decision.verdict is Verdict.CANCELLING
    assert decision.request is not None
    assert decision.request.request_uuid == redo.request_uuid
    assert (decision.request.whole_run, decision.request.cause) == (True, "user")
    each_scene.undone("car", "flight")
    assert each_scene.saga.state == "CANCELLED"


def frozen_redo_and_a_cancel(scene: Scene) -> None:
    scene.ran("flight", 1)
    scene.stopped("car", 1)
    scene.freeze(scene.redo(scene.step("flight")))
    decision = scene.requests.cancel(*scene.run, actor="ann")
    assert (decision.verdict, decision.undoes) == (Verdict.QUEUED, True)


def test_a_wider_wish_waits_behind_a_frozen_one_and_stops_the_saga_at_once(each_scene: Scene) -> None:
    frozen_redo_and_a_cancel(each_scene)
    redo, wider = each_scene.view.requests
    assert (redo.state, wider.state, wider.whole_run, wider.number) == ("FROZEN", "QUEUED", True, 2)
    assert (each_scene.saga.state, each_scene.saga.mode) == ("CANCELLING", "undo")
    assert each_scene.freezes.freeze_if_quiet(wider.request_uuid, "undo__2").outcome == "not quiet"
    each_scene.undo_step("flight", redo)
    settled = each_scene.settle(redo)
    assert settled is not None
    assert (settled.saga.state, settled.request.state) == ("CANCELLING", "SETTLED")
    cleared = {"max_tries": 1, "try_number": 2}
    for number, answer in ((1, "refuse"), (2, "wait")):
        assert each_scene.try_attach("flight", clear_number=number, **cleared).decision.go == answer
    assert each_scene.reader.request(wider.request_uuid).state == "REQUESTED"  # type: ignore[union-attr]
    each_scene.undone("car", "flight", request=each_scene.request)
    assert each_scene.saga.state == "CANCELLED"
    assert each_scene.step("flight").state == "UNDONE"


def test_a_queued_wish_is_joined_too_and_now_reaches_the_steps(scene: Scene) -> None:
    frozen_redo_and_a_cancel(scene)
    decision = scene.requests.cancel(*scene.run, actor="bob", stop_now=True, clear_number=4)
    assert decision.verdict is Verdict.ALREADY
    assert "queued already, asked for by ann" in decision.message
    assert len(scene.view.requests) == 2
    assert (scene.request.state, scene.request.stop_now, scene.request.actor) == ("QUEUED", True, "ann")
    assert (scene.saga.stop_now, scene.saga.stop_clear_number) == (True, 4)


def test_a_queued_wish_takes_the_higher_cause(scene: Scene) -> None:
    scene.ran("flight", 1)
    scene.freeze(scene.redo(scene.step("flight")))
    scene.ask(cause="marked_failed", actor="airflow", clear_number=1)
    scene.cancel(reason="mine")
    assert (scene.request.state, scene.request.cause, scene.request.actor) == ("QUEUED", "user", "ann")


# -- stale wishes ---------------------------------------------------------------------------------------------------


def test_a_hook_that_is_older_than_the_newest_attach_is_dropped_and_noted(each_scene: Scene) -> None:
    """It tells of the run as it was before somebody cleared it; a person's word counts whenever it comes."""
    each_scene.stopped("flight", 1)
    each_scene.attach("flight", max_tries=1, try_number=2, clear_number=1)
    late = each_scene.requests.undo(*each_scene.run, actor="airflow", cause="marked_failed", clear_number=0)
    assert late.verdict is Verdict.IGNORED
    assert "before it was cleared" in late.message
    failed = each_scene.runs.fail_and_hint(*each_scene.run, cause="failure", clear_number=0)
    assert failed.verdict is Verdict.IGNORED
    assert (each_scene.saga.state, each_scene.view.requests) == ("RUNNING", ())
    assert each_scene.history[-2:] == ["stale wish dropped", "stale wish dropped"]
    assert each_scene.ask(clear_number=0).state == "REQUESTED"


# -- signed plans ---------------------------------------------------------------------------------------------------


def test_a_signed_plan_is_carried_out_only_if_nothing_moved(each_scene: Scene) -> None:
    each_scene.stopped("flight", 1, 2)
    each_scene.runs.complete_if_over(*each_scene.run)
    plan, digest, _ = each_scene.reader.plan(*each_scene.run)
    assert [row["seq"] for row in plan["steps"][0]["actions"]] == [2, 1]
    with pytest.raises(VerbRefusedError, match="something moved since"):
        each_scene.requests.undo(*each_scene.run, actor="ann", plan_hash="0" * 64)
    assert each_scene.view.requests == ()
    request = each_scene.ask(plan_hash=digest)
    frozen = each_scene.freeze(request)
    assert (frozen.plan, frozen.plan_hash) == (plan, digest)


def test_a_plan_cannot_be_signed_while_a_step_runs(scene: Scene) -> None:
    scene.act(scene.attach(), 1)
    digest = scene.reader.plan(*scene.run).digest
    with pytest.raises(VerbRefusedError, match="flight is still running"):
        scene.requests.undo(*scene.run, actor="ann", plan_hash=digest)
    scene.time_passes(20)
    assert scene.ask(plan_hash=digest)
