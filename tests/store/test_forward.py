"""What a step writes while it runs: intents, outcomes, readings, retries, heartbeats, its end (PROTOCOL 4, 5)."""

from __future__ import annotations

import psycopg
import pytest

from airflow_saga.core.records import Intent, Outcome, StepRow
from airflow_saga.store.queries import Q
from airflow_saga.store.steps import Checkpoint
from tests.store.scene import Scene


def seconds_until_it_lands(scene: Scene, seq: int = 1) -> float:
    row = scene.sql(
        "SELECT extract(epoch FROM lands_by - clock_timestamp())::float8 AS s FROM airflow_saga.action "
        "WHERE seq = %(seq)s",
        {"seq": seq},
    )[0]
    return float(row["s"])


# -- begin ----------------------------------------------------------------------------------------------------------


def test_begin_writes_the_intent_and_until_when_the_call_may_land(each_scene: Scene) -> None:
    step = each_scene.attach()
    intent = each_scene.intent(
        step, 1, timeout_seconds=30, settle_after_seconds=7, params='{"to": "Rome"}', parallel=True, version=3
    )
    written = each_scene.write(step, begin=[intent])
    assert (written.begun, written.ended) == ({1}, frozenset())
    assert (written.saga_state, written.step_state, written.fence) == ("RUNNING", "RUNNING", 1)
    row = each_scene.action()
    assert (row.state, row.tries, row.in_doubt, row.finished_at) == ("PENDING", 1, False, None)
    assert (row.name, row.version, row.key, row.params) == ("book", 3, intent.key, '{"to": "Rome"}')
    assert (row.fingerprint, row.parallel, row.effect) == ("fp1", True, "COMPENSABLE")
    assert 37 < seconds_until_it_lands(each_scene) <= 38, "1 s to start it, its timeout, its settle_after"


@pytest.mark.parametrize(
    "stop",
    [
        lambda scene: scene.cancel(),
        lambda scene: scene.cancel(stop_now=True),
        lambda scene: scene.requests.cancel(*scene.run, actor="ann", keep=True),
        lambda scene: scene.ask(cause="marked_failed"),
        lambda scene: scene.hint(),
        lambda scene: scene.freeze(scene.cancel(stop_now=True)),
        lambda scene: scene.runs.mark_step_if_running(*scene.run, "flight", -1),
        lambda scene: scene.attach(try_number=2),
        lambda scene: scene.steps.stop_if_held(scene.step()),
        lambda scene: scene.steps.finish_if_held(scene.step(), None, False),
        lambda scene: (scene.finish(scene.step()), scene.freeze(scene.redo(scene.step()))),
    ],
    ids=[
        *(
            "cancel",
            "cancel now",
            "keep",
            "marked failed",
            "run failed",
            "frozen",
            "task marked",
            "taken over",
        ),
        *("stopped", "finished", "redo"),
    ],
)
def test_begin_is_refused_once_anything_stopped_the_step(each_scene: Scene, stop) -> None:  # type: ignore[no-untyped-def]
    step = each_scene.attach()
    each_scene.act(step, 1)
    stop(each_scene)
    written = each_scene.write(step, begin=[each_scene.intent(step, 2)])
    assert written.begun == frozenset()
    assert 2 not in each_scene.states()
    assert each_scene.steps.retry_if_allowed(step, each_scene.intent(step, 1, max_tries=9))[0] is None
    assert each_scene.steps.reassert_if_allowed(step, each_scene.intent(step, 1)).begun == frozenset()


def test_an_outcome_is_taken_even_where_the_next_intent_is_refused(each_scene: Scene) -> None:
    step = each_scene.attach()
    assert each_scene.begin(step, 1)
    each_scene.cancel()
    written = each_scene.write(step, ended=[Outcome(1, "DONE", '"r"')], begin=[each_scene.intent(step, 2)])
    assert (written.ended, written.begun, written.saga_state) == ({1}, frozenset(), "CANCELLING")
    assert each_scene.states() == {1: "DONE"}


def test_a_seq_that_is_used_is_refused_and_the_outcome_beside_it_is_taken(each_scene: Scene) -> None:
    step = each_scene.attach()
    each_scene.act(step, 1)
    assert each_scene.begin(step, 2)
    written = each_scene.write(step, ended=[Outcome(2, "DONE", '"r"')], begin=[each_scene.intent(step, 1)])
    assert (written.ended, written.begun) == ({2}, frozenset())
    assert each_scene.states() == {1: "DONE", 2: "DONE"}
    assert each_scene.action(1).result == '"r1"', "what stood there is untouched"


def test_an_intent_sent_twice_begins_once(scene: Scene) -> None:
    """The answer to a commit can be lost; whoever sends it again is told that nothing began now."""
    step = scene.attach()
    assert scene.begin(step, 1)
    assert not scene.begin(step, 1)
    assert not scene.read(step, 1)
    assert (scene.states(), scene.action().tries) == ({1: "PENDING"}, 1)


def test_gaps_in_the_seqs_are_legal(scene: Scene) -> None:
    step = scene.act(scene.attach(), 3, 7, 5)
    assert scene.states() == {3: "DONE", 5: "DONE", 7: "DONE"}
    assert scene.finish(step)


def test_a_read_only_call_appears_with_its_outcome_also_while_the_saga_is_stopped(each_scene: Scene) -> None:
    step = each_scene.attach()
    assert each_scene.read(step, 1)
    each_scene.cancel()
    assert each_scene.read(step, 2, "FAILED")
    rows = [each_scene.action(1), each_scene.action(2)]
    assert [(row.state, row.lands_by, row.residual, row.settled) for row in rows] == [
        ("DONE", None, False, True),
        ("FAILED", None, False, True),
    ]
    assert rows[0].finished_at is not None
    each_scene.freeze(each_scene.cancel(stop_now=True))
    assert not each_scene.read(step, 3), "the newest fence, as for all"


def test_a_read_only_call_has_no_intent(scene: Scene) -> None:
    step = scene.attach()
    with pytest.raises(psycopg.errors.CheckViolation, match="READ_ONLY"):
        scene.begin(step, 1, effect="READ_ONLY")
    assert scene.states() == {}
    with pytest.raises(psycopg.errors.CheckViolation):
        scene.begin(step, 1, effect="MAGIC")


def test_parallel_calls_go_out_in_one_commit(each_scene: Scene) -> None:
    step = each_scene.attach()
    each_scene.write(step, begin=[each_scene.intent(step, seq, parallel=True) for seq in (1, 2, 3)])
    written = each_scene.write(
        step,
        ended=[Outcome(1, "DONE"), Outcome(3, "IN_DOUBT", error="reset", own=False)],
        begin=[each_scene.intent(step, 4), each_scene.intent(step, 5)],
        read=[(each_scene.intent(step, 6, effect="READ_ONLY"), Outcome(6, "DONE", '"hit"'))],
    )
    assert (written.ended, written.begun) == ({1, 3}, {4, 5, 6})
    assert each_scene.states() == {
        1: "DONE",
        2: "PENDING",
        3: "IN_DOUBT",
        4: "PENDING",
        5: "PENDING",
        6: "DONE",
    }
    stamps = each_scene.sql("SELECT DISTINCT xmin::text FROM airflow_saga.action WHERE seq <> 2")
    assert len(stamps) == 1


def _heard(scene: Scene, step: StepRow, *seqs: int) -> list[tuple[Intent, Outcome]]:
    """READ_ONLY calls with everything in them that JSON, SQL and Python write differently."""
    said = '{"text": "\\u0000 \\"quoted\\" ü 日本 %(x)s {}", "n": null}'
    return [
        (
            scene.intent(step, seq, name="model", effect="READ_ONLY", params='{"n": 1}'),
            Outcome(seq, "DONE", said),
        )
        for seq in seqs
    ]


def test_what_was_read_rides_with_the_next_intent_in_one_commit(each_scene: Scene) -> None:
    step = each_scene.attach()
    each_scene.begin(step, 1)
    heard = _heard(each_scene, step, 2, 3)
    written = each_scene.write(
        step, ended=[Outcome(1, "DONE", '"r1"')], begin=[each_scene.intent(step, 4)], read=heard
    )
    assert (written.ended, written.begun) == ({1}, {2, 3, 4})
    rows = each_scene.view.actions
    assert [(row.seq, row.state, row.name) for row in rows] == [
        (1, "DONE", "book"),
        (2, "DONE", "model"),
        (3, "DONE", "model"),
        (4, "PENDING", "book"),
    ]
    assert [row.action_id for row in rows] == sorted(row.action_id for row in rows), "born in their order"
    assert (rows[1].result, rows[1].params, rows[1].lands_by) == (heard[0][1].result, '{"n": 1}', None)
    assert rows[3].lands_by is not None
    assert len(each_scene.sql("SELECT DISTINCT xmin::text FROM airflow_saga.action")) == 1


def test_what_was_read_is_kept_where_the_intent_beside_it_is_refused(each_scene: Scene) -> None:
    step = each_scene.attach()
    each_scene.begin(step, 1)
    each_scene.cancel()
    written = each_scene.write(
        step,
        ended=[Outcome(1, "DONE", '"r1"')],
        begin=[each_scene.intent(step, 3)],
        read=_heard(each_scene, step, 2),
    )
    assert (written.ended, written.begun, written.saga_state) == ({1}, {2}, "CANCELLING")
    assert each_scene.states() == {1: "DONE", 2: "DONE"}


def test_what_was_read_by_a_process_that_lost_its_step_is_not_written(each_scene: Scene) -> None:
    old = each_scene.attach()
    new = each_scene.attach(try_number=2)
    written = each_scene.write(old, begin=[each_scene.intent(old, 2)], read=_heard(each_scene, old, 1))
    assert (written.begun, written.fence) == (frozenset(), new.fence)
    assert each_scene.states() == {}


def test_an_empty_write_only_reads_what_the_saga_wants(scene: Scene) -> None:
    step = scene.attach()
    scene.cancel()
    before = scene.tables()
    written = scene.write(step)
    assert (written.saga_state, written.ended, written.begun) == ("CANCELLING", frozenset(), frozenset())
    assert scene.tables() == before


# -- how a call ended -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["DONE", "FAILED", "IN_DOUBT"])
@pytest.mark.parametrize("own", [True, False])
def test_an_outcome_is_written_once_and_keeps_until_when_an_unreported_call_may_land(
    scene: Scene, state: str, own: bool
) -> None:
    step = scene.attach()
    assert scene.begin(step, 1)
    outcome = Outcome(
        1, state, result='"r"' if state == "DONE" else None, error="why", own=own, result_lost=False
    )
    assert scene.write(step, ended=[outcome]).ended == {1}
    row = scene.action()
    assert (row.state, row.error, row.in_doubt) == (state, "why", state == "IN_DOUBT")
    assert row.finished_at is not None
    assert (row.lands_by is None) == own
    assert scene.write(step, ended=[Outcome(1, "FAILED")]).ended == frozenset(), "the first word counts"
    assert scene.action() == row


@pytest.mark.parametrize(
    "meanwhile",
    [
        lambda scene: scene.cancel(),
        lambda scene: scene.requests.cancel(*scene.run, actor="ann", keep=True),
        lambda scene: scene.hint(),
    ],
)
def test_an_outcome_is_taken_in_any_state_of_the_saga(scene: Scene, meanwhile) -> None:  # type: ignore[no-untyped-def]
    step = scene.attach()
    assert scene.begin(step, 1)
    meanwhile(scene)
    assert scene.end(step, 1)
    assert scene.action().state == "DONE"


def test_a_result_that_could_not_be_kept_is_said_to_be_lost(scene: Scene) -> None:
    step = scene.attach()
    assert scene.begin(step, 1)
    assert scene.end(step, 1, result=None, result_lost=True)
    assert (scene.action().state, scene.action().result_lost) == ("DONE", True)


def test_an_outcome_of_a_fenced_attempt_is_not_taken_here(scene: Scene) -> None:
    step = scene.attach()
    assert scene.begin(step, 1)
    scene.runs.mark_step_if_running(*scene.run, "flight", -1)
    written = scene.write(step, ended=[Outcome(1, "DONE")])
    assert (written.ended, written.fence, written.step_state) == (frozenset(), 2, "STOPPED")
    assert scene.action().state == "PENDING", "it stays until A1 is over; a late answer or the sweep ends it"


# -- another try ----------------------------------------------------------------------------------------------------


def failed(scene: Scene, step: StepRow, state: str = "FAILED", **more: bool) -> None:
    assert scene.begin(step, 1)
    assert scene.end(step, 1, state, **more)


def test_a_call_that_proved_not_applied_is_tried_again_while_tries_are_left(each_scene: Scene) -> None:
    step = each_scene.attach()
    failed(each_scene, step)
    intent = each_scene.intent(step, 1, max_tries=3, timeout_seconds=60)
    for tries in (2, 3):
        assert each_scene.steps.retry_if_allowed(step, intent)[0] == tries
        row = each_scene.action()
        assert (row.state, row.tries, row.error, row.finished_at) == ("PENDING", tries, None, None)
        assert seconds_until_it_lands(each_scene) > 60
        assert each_scene.end(step, 1, "FAILED")
    refused, written = each_scene.steps.retry_if_allowed(step, intent)
    assert (refused, written.begun, written.saga_state) == (None, frozenset(), "RUNNING")


def test_an_airflow_retry_adds_no_tries(scene: Scene) -> None:
    failed(scene, scene.attach())
    again = scene.attach(try_number=2)
    assert scene.steps.retry_if_allowed(again, scene.intent(again, 1, max_tries=2))[0] == 2
    assert scene.end(again, 1, "FAILED")
    third = scene.attach(try_number=3)
    assert scene.steps.retry_if_allowed(third, scene.intent(third, 1, max_tries=2))[0] is None


@pytest.mark.parametrize("changed", [{"name": "other"}, {"fingerprint": "other"}])
def test_another_try_is_the_same_call(scene: Scene, changed: dict[str, str]) -> None:
    step = scene.attach()
    failed(scene, step)
    assert scene.steps.retry_if_allowed(step, scene.intent(step, 1, max_tries=3, **changed))[0] is None
    assert scene.action().state == "FAILED"


def test_a_call_in_doubt_is_tried_again_only_if_idempotent_and_after_it_can_land_no_more(
    scene: Scene,
) -> None:
    step = scene.attach()
    failed(scene, step, "IN_DOUBT", own=False)
    plain = scene.intent(step, 1, max_tries=3)
    safe = plain._replace(idempotent=True)
    assert scene.steps.retry_if_allowed(step, safe)[0] is None, "A1 is not over"
    scene.time_passes(12)
    scene.steps.heartbeat_if_held(step, 15)
    assert scene.steps.retry_if_allowed(step, plain)[0] is None
    assert scene.steps.retry_if_allowed(step, safe)[0] == 2
    assert scene.action().in_doubt, "nobody knows what became of the first try"


@pytest.mark.parametrize(("ended", "known"), [("FAILED", "IN_DOUBT"), ("DONE", "DONE")])
def test_p4_a_try_that_proved_not_applied_speaks_for_itself_only(
    scene: Scene, ended: str, known: str
) -> None:
    """The first try is lost and may have taken effect; the second, with the same key, says how it ended."""
    step = scene.attach()
    failed(scene, step, "IN_DOUBT", own=False)
    scene.time_passes(12)
    scene.steps.heartbeat_if_held(step, 15)
    again = scene.intent(step, 1, max_tries=3, idempotent=True)
    assert scene.steps.retry_if_allowed(step, again)[0] == 2
    assert scene.end(step, 1, ended)
    assert (scene.action().state, scene.action().in_doubt) == (known, known == "IN_DOUBT")


def test_a_key_that_outlived_its_lifetime_is_not_used_again(scene: Scene) -> None:
    step = scene.attach()
    failed(scene, step, "IN_DOUBT")
    scene.time_passes(100)
    intent = scene.intent(step, 1, max_tries=3, idempotent=True, key_lifetime_seconds=60)
    assert scene.steps.retry_if_allowed(step, intent)[0] is None
    assert scene.steps.retry_if_allowed(step, intent._replace(key_lifetime_seconds=600))[0] == 2


@pytest.mark.parametrize("state", ["PENDING", "DONE"])
def test_a_call_that_is_open_or_done_is_not_called_again(scene: Scene, state: str) -> None:
    step = scene.attach()
    assert scene.begin(step, 1)
    if state == "DONE":
        assert scene.end(step, 1)
    scene.time_passes(60)
    assert scene.steps.retry_if_allowed(step, scene.intent(step, 1, max_tries=9, idempotent=True))[0] is None
    assert scene.action().tries == 1


def test_an_intent_grown_old_is_asserted_again_before_its_call(scene: Scene) -> None:
    step = scene.attach()
    intent = scene.intent(step, 1)
    assert scene.steps.reassert_if_allowed(step, intent).begun == frozenset(), "it was never committed"
    assert scene.begin(step, 1)
    scene.time_passes(5)
    assert scene.steps.reassert_if_allowed(step, intent).begun == {1}
    assert 10 < seconds_until_it_lands(scene) <= 11
    assert scene.end(step, 1)
    assert scene.steps.reassert_if_allowed(step, intent).begun == frozenset()


# -- a probe's answer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["DONE", "FAILED"])
def test_a_probe_answers_for_a_call_in_doubt(each_scene: Scene, state: str) -> None:
    step = each_scene.attach()
    failed(each_scene, step, "IN_DOUBT", own=False)
    say = (each_scene.action().action_id, state, '"found"', "the probe said so")
    assert not each_scene.steps.verified_if_held(step, *say), "A1 is not over: a no would not count yet"
    each_scene.time_passes(12)
    assert each_scene.steps.verified_if_held(step, *say)
    row = each_scene.action()
    assert (row.state, row.in_doubt, row.note) == (state, False, "the probe said so")
    assert row.result == ('"found"' if state == "DONE" else None)
    assert not each_scene.steps.verified_if_held(step, *say)


def test_a_probe_of_a_fenced_attempt_or_of_another_step_changes_nothing(scene: Scene) -> None:
    step = scene.attach()
    failed(scene, step, "IN_DOUBT")
    other = scene.attach("hotel")
    say = (scene.action().action_id, "FAILED", None, "no")
    assert not scene.steps.verified_if_held(other, *say)
    scene.attach(try_number=2)
    assert not scene.steps.verified_if_held(step, *say)
    assert scene.action().state == "IN_DOUBT"


# -- heartbeat ------------------------------------------------------------------------------------------------------


def test_a_heartbeat_renews_the_lease_and_tells_what_the_saga_wants(each_scene: Scene) -> None:
    step = each_scene.attach()
    each_scene.time_passes(14)
    beat = each_scene.steps.heartbeat_if_held(step, 15, Checkpoint('{"page": 1}', 1))
    assert (beat.held, beat.state, beat.mode, beat.stop_now) == (True, "RUNNING", None, False)
    left = "SELECT extract(epoch FROM lease_until - clock_timestamp())::float8 AS s FROM airflow_saga.step"
    assert each_scene.sql(left)[0]["s"] > 14
    each_scene.steps.heartbeat_if_held(step, 15)
    assert each_scene.step().checkpoint == '{"page": 1}'
    each_scene.cancel(reason="wrong date", stop_now=True)
    beat = each_scene.steps.heartbeat_if_held(step, 15)
    assert (beat.held, beat.state, beat.mode, beat.stop_now) == (True, "CANCELLING", "undo", True)
    assert (beat.actor, beat.reason) == ("ann", "wrong date")
    assert each_scene.step().checkpoint == '{"page": 1}'


@pytest.mark.parametrize("end", ["taken over", "stopped", "finished", "marked"])
def test_a_heartbeat_after_the_step_is_lost_holds_nothing(scene: Scene, end: str) -> None:
    step = scene.attach()
    if end == "taken over":
        scene.attach(try_number=2)
    elif end == "stopped":
        scene.steps.stop_if_held(step)
    elif end == "finished":
        scene.finish(step)
    else:
        scene.runs.mark_step_if_running(*scene.run, "flight", -1)
    before = scene.tables()
    assert not scene.steps.heartbeat_if_held(step, 15, Checkpoint('"x"', 1)).held
    assert scene.tables() == before


def test_a_heartbeat_keeps_an_undo_attempt_alive_too(scene: Scene) -> None:
    scene.stopped("flight", 1)
    scene.freeze(scene.cancel())
    attached = scene.undo_of()
    assert scene.steps.heartbeat_if_held(attached.step, 15).held
    newer = scene.undo_of()
    assert not scene.steps.heartbeat_if_held(attached.step, 15).held
    assert scene.steps.heartbeat_if_held(newer.step, 15).held


# -- the end of the step --------------------------------------------------------------------------------------------


def test_finish_keeps_the_output_and_gives_the_lease_back(each_scene: Scene) -> None:
    step = each_scene.act(each_scene.attach(), 1)
    assert each_scene.steps.finish_if_held(step, '{"id": 7}', False)
    row = each_scene.step()
    assert (row.state, row.output, row.lease_until, row.fence) == ("SUCCEEDED", '{"id": 7}', None, 1)
    assert not each_scene.steps.finish_if_held(step, None, False)
    assert not each_scene.steps.stop_if_held(step)
    assert each_scene.step() == row


def test_finish_is_refused_while_a_call_is_open(scene: Scene) -> None:
    step = scene.attach()
    assert scene.begin(step, 1)
    assert not scene.steps.finish_if_held(step, None, False)
    assert scene.step().state == "RUNNING"
    assert scene.end(step, 1, "IN_DOUBT"), "an action in doubt that the body coped with does not hold it"
    assert scene.steps.finish_if_held(step, None, True)
    assert scene.step().output_lost


@pytest.mark.parametrize("keep", [False, True])
def test_a_step_may_finish_while_the_saga_is_being_stopped(scene: Scene, keep: bool) -> None:
    step = scene.act(scene.attach(), 1)
    scene.requests.cancel(*scene.run, actor="ann", keep=keep)
    assert scene.steps.finish_if_held(step, None, False)
    assert scene.step().state == "SUCCEEDED"


def test_stop_leaves_what_was_done_to_be_resumed_or_undone(each_scene: Scene) -> None:
    step = each_scene.act(each_scene.attach(), 1)
    assert each_scene.begin(step, 2)
    assert each_scene.steps.stop_if_held(step)
    assert (each_scene.step().state, each_scene.step().lease_until) == ("STOPPED", None)
    assert each_scene.states() == {1: "DONE", 2: "PENDING"}
    assert not each_scene.steps.stop_if_held(step)


def test_the_end_of_a_fenced_attempt_is_not_taken(scene: Scene) -> None:
    step = scene.attach()
    scene.attach(try_number=2)
    before = scene.tables()
    assert not scene.steps.finish_if_held(step, '"x"', False)
    assert not scene.steps.stop_if_held(step)
    assert scene.tables() == before


def test_a_recorded_action_is_read_by_its_seq(scene: Scene) -> None:
    step = scene.act(scene.attach(), 1)
    row = scene.steps.recorded_action(step, 1)
    assert row == scene.action()
    assert scene.steps.recorded_action(step, 2) is None


def test_what_an_outcome_does_is_written_alike_in_both_statements_of_the_hot_path() -> None:
    def ended(statement: bytes) -> bytes:
        return statement.partition(b"), ended AS (")[2].partition(b"RETURNING a.seq")[0]

    assert ended(Q.write_forward)
    assert ended(Q.write_forward) == ended(Q.write_forward_with_readings)
