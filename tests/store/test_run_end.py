"""The end of the Airflow run and of its tasks, as the store is told of it: complete, fail, mark, hold, release."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from airflow_saga.core.errors import UnknownSagaError, VerbRefusedError
from airflow_saga.store.connect import Address
from airflow_saga.store.decision import Verdict
from airflow_saga.store.runs import RunVerbs
from tests.store.scene import Scene

# -- success --------------------------------------------------------------------------------------------------------


def test_a_run_that_ended_well_completes_its_saga(each_scene: Scene) -> None:
    each_scene.ran("flight", 1)
    each_scene.ran("hotel", 1, after=["flight"])
    assert each_scene.runs.complete_if_over(*each_scene.run) == "COMPLETED"
    assert each_scene.saga.state == "COMPLETED"
    assert each_scene.history[-1] == "saga RUNNING → COMPLETED"
    before = each_scene.tables()
    assert each_scene.runs.complete_if_over(*each_scene.run) == "COMPLETED"
    assert each_scene.tables() == before


def test_a_run_of_which_nothing_is_known_is_left_alone(scene: Scene) -> None:
    assert scene.runs.complete_if_over(*scene.run) is None
    assert scene.runs.fail_and_hint(*scene.run, cause="failure").verdict is Verdict.IGNORED
    assert scene.reader.find(*scene.run) is None


def test_a_run_without_a_saga_step_completes_too(scene: Scene) -> None:
    scene.runs.open_if_new(*scene.run)
    assert scene.runs.complete_if_over(*scene.run) == "COMPLETED"
    assert scene.saga.state == "COMPLETED"


def test_a_saga_with_a_living_step_does_not_complete(scene: Scene) -> None:
    scene.attach()
    assert scene.runs.complete_if_over(*scene.run) == "RUNNING"
    assert scene.saga.state == "RUNNING"


def test_a_saga_with_an_open_undo_does_not_complete(scene: Scene) -> None:
    scene.ran("flight", 1)
    scene.redo(scene.step())
    assert scene.runs.complete_if_over(*scene.run) == "RUNNING"
    scene.freeze()
    assert scene.runs.complete_if_over(*scene.run) == "RUNNING"
    assert scene.saga.state == "RUNNING"


@pytest.mark.parametrize("how", ["stopped", "lost", "undone", "partly undone"])
def test_success_with_a_step_that_did_not_succeed_is_incomplete_and_no_policy_applies(
    each_scene: Scene, how: str
) -> None:
    if how in ("stopped", "lost"):
        each_scene.act(each_scene.attach(), 1)
        each_scene.time_passes(20)
        if how == "stopped":
            assert each_scene.runs.mark_step_if_running(*each_scene.run, "flight", -1)
    else:
        each_scene.ran("flight", 1)
        each_scene.freeze(each_scene.redo(each_scene.step()))
        state = "COMPENSATED" if how == "undone" else "COMPENSATION_FAILED"
        each_scene.compensate(each_scene.undo_of(), each_scene.action(), state)
        each_scene.settle()
    assert each_scene.runs.complete_if_over(*each_scene.run) == "FAILED"
    saga = each_scene.saga
    assert (saga.state, saga.cause) == ("FAILED", "incomplete")
    assert saga.reason is not None
    assert "flight" in saga.reason
    before = each_scene.tables()
    failed = each_scene.runs.fail_and_hint(*each_scene.run, cause="failure", clear_number=1)
    assert (failed.verdict, failed.request) == (Verdict.IGNORED, None)
    assert each_scene.tables() == before
    assert each_scene.reader.sagas_to_read() == []


# -- failure --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", ["failure", "timeout", "dagrun_timeout", "lost_worker"])
def test_a_failed_run_leaves_a_hint_that_an_undo_is_due(each_scene: Scene, cause: str) -> None:
    each_scene.stopped("flight", 1, clear_number=1)
    decision = each_scene.runs.fail_and_hint(*each_scene.run, cause=cause, reason="boom", clear_number=1)
    assert decision.verdict is Verdict.CANCELLING
    saga, hint = each_scene.saga, each_scene.request
    assert (saga.state, saga.mode, saga.cause, saga.reason) == ("FAILED", None, cause, "boom")
    assert (hint.state, hint.whole_run, hint.cause, hint.actor, hint.clear_number) == (
        *("HINTED", True, cause, "airflow"),
        1,
    )
    assert saga.stop_clear_number == -1, "nothing is decided before the freeze"


@pytest.mark.parametrize("policy", [{"on_failure": "keep"}, {}], ids=["keep", "refused"])
def test_a_failed_run_whose_effects_are_kept_leaves_none(scene: Scene, policy: dict[str, str]) -> None:
    scene.stopped("flight", 1, **policy)
    cause = "failure" if policy else "refused"
    decision = scene.runs.fail_and_hint(*scene.run, cause=cause)
    assert (decision.verdict, decision.request, decision.undoes) == (Verdict.IGNORED, None, False)
    assert (scene.saga.state, scene.view.requests) == ("FAILED", ())
    assert scene.reader.sagas_to_read() == []


def test_c29_twenty_failed_hooks_at_once_leave_one_hint(each_scene: Scene) -> None:
    each_scene.stopped("flight", 1)

    def hook(_: int) -> Verdict:
        with Address(each_scene.url).open() as connection:
            return RunVerbs(connection).fail_and_hint(*each_scene.run, cause="failure").verdict

    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(hook, range(20)))
    assert sorted(verdicts) == [Verdict.CANCELLING] + [Verdict.IGNORED] * 19
    assert len(each_scene.view.requests) == 1
    hook(21)
    each_scene.undone("flight")
    hook(22)
    assert each_scene.requests.undo(*each_scene.run, actor="airflow", cause="marked_failed").request is None
    assert (each_scene.saga.state, len(each_scene.view.requests)) == ("CANCELLED", 1)


def test_c46_two_hundred_runs_that_failed_before_a_step_close_in_one_pass(scene: Scene) -> None:
    for number in range(200):
        scene.runs.open_if_new(scene.dag_id, f"early_{number}")

    def one_pass() -> int:
        after, read = 0, 0
        while rows := scene.reader.sagas_to_read(after_id=after, limit=50):
            for saga in rows:
                scene.runs.fail_and_hint(saga.dag_id, saga.run_id, cause="failure", clear_number=0)
            after, read = rows[-1].saga_id, read + len(rows)
        return read

    assert one_pass() == 200
    assert {row["state"] for row in scene.reader.sagas(limit=500)} == {"CANCELLED"}
    assert [one_pass() for _ in range(4)] == [0, 0, 0, 0]
    assert scene.reader.requests_to_trigger(silent_seconds=0) == []
    assert scene.sql("SELECT count(*) AS n FROM airflow_saga.undo_request")[0]["n"] == 0


# -- one task marked failed -----------------------------------------------------------------------------------------


def test_marking_one_task_failed_fences_its_step_and_leaves_the_saga_to_the_end_of_the_run(
    each_scene: Scene,
) -> None:
    step = each_scene.act(each_scene.attach(), 1)
    assert each_scene.begin(step, 2)
    other = each_scene.attach("car")
    assert each_scene.runs.mark_step_if_running(*each_scene.run, "flight", -1)
    row = each_scene.step()
    assert (row.state, row.fence, row.lease_until) == ("STOPPED", 2, None)
    assert each_scene.states() == {1: "DONE", 2: "PENDING"}, "it may land until A1 is over; then it is swept"
    assert (each_scene.saga.state, each_scene.view.requests) == ("RUNNING", ())
    assert each_scene.begin(other, 1), "the other branch goes on"
    before = each_scene.tables()
    assert not each_scene.runs.mark_step_if_running(*each_scene.run, "flight", -1)
    assert not each_scene.runs.mark_step_if_running(*each_scene.run, "unknown", -1)
    assert not each_scene.runs.mark_step_if_running(each_scene.dag_id, "unknown", "flight", -1)
    assert each_scene.tables() == before
    resumed = each_scene.attach(try_number=2)
    assert (resumed.fence, each_scene.states()) == (3, {1: "DONE", 2: "IN_DOUBT"})


def test_marking_the_run_failed_lets_its_steps_end_their_call(scene: Scene) -> None:
    step = scene.attach()
    assert scene.begin(step, 1)
    scene.ask(cause="marked_failed")
    assert not scene.runs.mark_step_if_running(*scene.run, "flight", -1)
    assert scene.end(step, 1)


# -- a mass outage --------------------------------------------------------------------------------------------------


def outage(scene: Scene, count: int, cause: str = "lost_worker") -> list[Scene]:
    runs = [scene.another_run(f"lost_{cause}_{number}") for number in range(count)]
    for run in runs:
        run.stopped("flight", 1)
        run.hint(cause=cause)
    return runs


def test_many_automatic_undos_at_once_are_held_and_a_person_releases_each(each_scene: Scene) -> None:
    runs = outage(each_scene, 4)
    old = outage(each_scene, 1, "timeout")[0]
    rules = {"causes": ["lost_worker"], "window_seconds": 60}
    assert each_scene.sweeps.hold_if_mass_outage(threshold=4, **rules) == 0
    assert each_scene.sweeps.hold_if_mass_outage(threshold=3, **rules) == 4
    assert {run.request.state for run in runs} == {"HELD"}
    assert old.request.state == "HINTED"
    assert each_scene.sweeps.hold_if_mass_outage(threshold=3, **rules) == 0
    held = runs[0].freezes.freeze_if_quiet(runs[0].request.request_uuid, "undo__1")
    assert (held.outcome, "airflow saga release" in held.message) == ("held", True)
    assert [row["run_id"] for row in each_scene.reader.requests_to_trigger(silent_seconds=0)] == [old.run_id]
    decision = runs[0].requests.release(*runs[0].run, actor="ann")
    assert decision.verdict is Verdict.CANCELLING
    assert runs[0].request.state == "HINTED"
    assert each_scene.sweeps.hold_if_mass_outage(threshold=3, **rules) == 0, "what a person released stays so"
    assert runs[0].request.state == "HINTED"
    runs[0].undone("flight")
    assert runs[0].saga.state == "CANCELLED"
    for run in [*runs, old]:
        run.close()


def test_hints_that_come_one_by_one_are_not_held(scene: Scene) -> None:
    for run in outage(scene, 3):
        run.close()
    scene.time_passes(61)
    assert scene.sweeps.hold_if_mass_outage(causes=["lost_worker"], threshold=2, window_seconds=60) == 0


def test_release_of_what_is_not_held_is_refused(scene: Scene) -> None:
    with pytest.raises(UnknownSagaError, match="there is no saga"):
        scene.requests.release(*scene.run, actor="ann")
    scene.stopped("flight", 1)
    for _ in range(2):
        with pytest.raises(VerbRefusedError, match="no undo is held"):
            scene.requests.release(*scene.run, actor="ann")
        scene.hint()
        scene.requests.note_triggered(scene.request.request_uuid)


# -- told once ------------------------------------------------------------------------------------------------------


def test_a_notice_is_claimed_by_the_first_who_asks(scene: Scene) -> None:
    scene.stopped("flight", 1)
    request = scene.hint()
    assert scene.requests.claim_notice(request.request_id, "standing")
    assert not scene.requests.claim_notice(request.request_id, "standing")
    assert scene.requests.claim_notice(request.request_id, "stuck")


def test_c33_a_component_is_remembered_with_its_newest_hook(scene: Scene) -> None:
    scene.runs.note_component("scheduler", "host-1", "0.1.0", None)
    first = scene.reader.components()[0]
    assert (first["kind"], first["host"], first["last_hook"], first["last_hook_at"]) == (
        *("scheduler", "host-1", None, None),
    )
    scene.runs.note_component("scheduler", "host-1", "0.2.0", "on_dag_run_failed")
    scene.runs.note_component("scheduler", "host-1", "0.2.0", None)
    scene.runs.note_component("worker", "host-1", "0.2.0", None)
    rows = scene.reader.components()
    assert [(row["kind"], row["version"], row["last_hook"]) for row in rows] == [
        ("scheduler", "0.2.0", "on_dag_run_failed"),
        ("worker", "0.2.0", None),
    ]
    assert rows[0]["last_hook_at"] is not None
    assert rows[0]["seen_at"] > first["seen_at"]
