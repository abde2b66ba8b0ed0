"""A call that is left to Airflow's triggerer: who may end it, and that nobody takes it for lost."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from airflow_saga.core.actions import READ_ONLY
from airflow_saga.core.declare import action
from airflow_saga.core.errors import NotApplied, SagaCancelledError, StepRefusedError, StepWaitError
from airflow_saga.core.policies import NO_RETRY
from airflow_saga.core.records import ActionRecord, Applied
from airflow_saga.runtime import codec
from airflow_saga.runtime.deferral import CallDeferred, OperatorAction, OperatorRecorder
from airflow_saga.store.deferral import DeferralVerbs
from dags.support import travel
from tests.runtime.lab import Lab, RunPlace, TaskPlace

HOUR = timedelta(hours=1)
records: list[ActionRecord] = []
"""What compensations and probes of the test were given."""


class Deferred(BaseException):
    """What the platform is to be told."""


def cancel(record: ActionRecord) -> None:
    records.append(record)
    travel.cancel("jobs", record.deferred["kwargs"]["job"], idempotency_key=record.undo_key)


def job(call: Callable[[], Any], *, resumes: bool = False, **options: Any) -> OperatorAction:
    """An operator's action of that name, which makes this call."""

    def execute(trip: str) -> Any:
        return call()

    execute.__qualname__ = "execute"
    given: dict[str, Any] = {"compensate": cancel, "timeout": HOUR, **options}
    made: OperatorAction = action(name="job", kind=OperatorAction, **given)(execute)
    made.resumes = resumes
    return made


def run(lab: Lab, made: OperatorAction, **attempt: Any) -> Any:
    """One try of the operator's task."""
    step = lab.step_run(**attempt)
    step.recorder = OperatorRecorder
    return step.run(lambda saga: made(trip=lab.dag_id))


def start_and_defer(secret: str = "") -> Any:
    started = travel.book("jobs", {"trip": "t"}, idempotency_key=uuid.uuid4().hex)
    told = {"trigger": "jobs.Trigger", "kwargs": {"job": started["id"], "token": secret}}
    raise CallDeferred(told, Deferred())


@pytest.fixture(autouse=True)
def _forget_records() -> None:
    records.clear()


@pytest.fixture
def deferred(lab: Lab) -> Lab:
    _defer(lab)
    return lab


def _defer(lab: Lab) -> None:
    with pytest.raises(CallDeferred):
        run(lab, job(start_and_defer))


# -- while it waits ---------------------------------------------------------------------------------------------------


def test_deferred_call_waits_without_a_lease_and_names_its_remote_work(deferred: Lab) -> None:
    (row,) = deferred.actions()

    assert (row.state, row.deferred, row.in_doubt) == ("PENDING", True, False)
    assert codec.decode(str(row.deferral))["kwargs"]["job"] == deferred.world.calls("jobs")[0]["id"]
    assert str(row.note).startswith("waits in the triggerer: jobs.Trigger")
    (step,) = deferred.view().steps
    assert (step.state, step.lease_until) == ("STOPPED", None)


@pytest.mark.parametrize("task", ["deferred", "scheduled", "queued", None])
def test_reconciler_leaves_a_deferred_call_alone_whatever_its_task_is_called(
    own_lab: Lab, task: str | None
) -> None:
    with pytest.raises(CallDeferred):
        run(own_lab, job(start_and_defer, timeout=timedelta(milliseconds=50)))
    own_lab.connection.execute("SELECT pg_sleep(1.2)")  # until it could land no more, if it were lost

    report = own_lab.reconcile(RunPlace(task=task))

    assert str(report) == "nothing to do"
    assert own_lab.states() == [("job", "PENDING")]


def test_secret_in_what_the_trigger_is_told_is_masked(lab: Lab) -> None:
    lab.known_secrets.append("s3cr3t-t0ken")

    with pytest.raises(CallDeferred):
        run(lab, job(lambda: start_and_defer("s3cr3t-t0ken")))

    (row,) = lab.actions()
    assert "s3cr3t-t0ken" not in f"{row.deferral} {row.note}"
    assert codec.decode(str(row.deferral))["kwargs"]["token"] == "***"


# -- the attempt that the trigger wakes -------------------------------------------------------------------------------


def test_resumed_attempt_ends_the_action_that_was_begun(deferred: Lab) -> None:
    (begun,) = deferred.actions()

    result = run(deferred, job(lambda: "report", resumes=True))

    (row,) = deferred.actions()
    assert result.output == "report"
    assert (row.state, row.seq, row.key, row.tries) == ("DONE", begun.seq, begun.key, 1)
    assert (row.deferred, row.deferral, codec.decode(str(row.result))) == (False, None, "report")
    assert len(deferred.world.calls("jobs")) == 1


def test_c84_second_event_of_the_same_trigger_gets_the_recorded_result(deferred: Lab) -> None:
    run(deferred, job(lambda: "first", resumes=True))

    result = run(deferred, job(lambda: pytest.fail("called a second time"), resumes=True))

    assert (result.output, result.replayed) == ("first", True)


def test_call_that_defers_again_waits_again(deferred: Lab) -> None:
    with pytest.raises(CallDeferred):
        run(deferred, job(start_and_defer, resumes=True))

    (row,) = deferred.actions()
    assert (row.state, row.deferred) == ("PENDING", True)
    assert codec.decode(str(row.deferral))["kwargs"]["job"] == deferred.world.calls("jobs")[1]["id"]
    assert run(deferred, job(lambda: "report", resumes=True)).output == "report"


def test_resumed_attempt_whose_process_is_lost_leaves_a_doubt_that_names_the_remote_work(lab: Lab) -> None:
    def lose() -> Any:
        raise SystemExit

    with pytest.raises(CallDeferred):
        run(lab, job(start_and_defer, compensate_in_doubt=True))
    with pytest.raises(SystemExit):
        run(lab, job(lose, resumes=True, timeout=timedelta(milliseconds=50)))

    (row,) = lab.actions()
    assert (row.state, row.in_doubt, row.deferred) == ("IN_DOUBT", True, False)
    job(start_and_defer, compensate_in_doubt=True)
    assert lab.undo().saga.state == "CANCELLED"
    (record,) = records
    assert (record.in_doubt, record.deferred["kwargs"]["job"]) == (True, lab.world.calls("jobs")[0]["id"])


def test_probe_of_a_resumed_call_is_told_of_the_remote_work(deferred: Lab) -> None:
    def look(record: ActionRecord) -> Applied:
        records.append(record)
        return Applied(record.deferred["kwargs"]["job"])

    def fail() -> Any:
        raise RuntimeError("the report could not be read")

    made = job(fail, resumes=True, verify=look, settle_after=timedelta(milliseconds=100))

    assert run(deferred, made).output == deferred.world.calls("jobs")[0]["id"]
    assert records[0].in_doubt


# -- a decision to stop -----------------------------------------------------------------------------------------------


def test_cancel_of_a_deferred_call_is_undone_at_once_and_its_attempt_calls_nothing(deferred: Lab) -> None:
    decision = deferred.cancel()
    assert decision.request is not None

    assert deferred.carry_out(decision.request.request_uuid).saga.state == "CANCELLED"

    (row,) = deferred.actions()
    (record,) = records
    assert (row.state, row.deferred) == ("COMPENSATED", False)
    assert (record.in_doubt, record.result) == (False, None)
    assert record.deferred["kwargs"]["job"] == deferred.world.calls("jobs")[0]["id"]
    assert deferred.world.net().total == 0
    with pytest.raises(StepRefusedError):
        run(deferred, job(lambda: pytest.fail("called after the cancel"), resumes=True))


def test_cancel_between_the_attach_and_the_call_of_a_resumed_attempt_lets_it_call_nothing(
    deferred: Lab,
) -> None:
    made = job(lambda: pytest.fail("called after the cancel"), resumes=True)
    step = deferred.step_run()
    step.recorder = OperatorRecorder

    def body(saga: Any) -> Any:
        deferred.cancel()
        return made(trip=deferred.dag_id)

    with pytest.raises(SagaCancelledError):
        step.run(body)

    assert deferred.states() == [("job", "PENDING")]
    request = deferred.view().requests[-1]
    assert deferred.carry_out(request.request_uuid).saga.state == "CANCELLED"


def test_step_taken_away_while_its_call_defers_keeps_what_the_trigger_was_told(lab: Lab) -> None:
    def marked_meanwhile() -> Any:
        assert lab.runs.mark_step_if_running(lab.dag_id, "r", "t", -1)
        start_and_defer()

    place = TaskPlace(task="failed")
    with pytest.raises(BaseException, match="owns this step"):
        run(lab, job(marked_meanwhile, timeout=timedelta(seconds=1)), place=place)

    (row,) = lab.actions()
    assert codec.decode(str(row.deferral))["kwargs"]["job"] == lab.world.calls("jobs")[0]["id"]
    assert not row.deferred


# -- any other attempt ------------------------------------------------------------------------------------------------


def test_attempt_that_did_not_come_from_the_trigger_has_the_deferred_call_undone_first(deferred: Lab) -> None:
    place = TaskPlace()
    made = job(lambda: "anew")

    with pytest.raises(StepWaitError):
        run(deferred, made, place=place, try_number=2)

    (request_uuid,) = place.triggered
    deferred.carry_out(request_uuid)
    assert len(deferred.world.undo_calls("jobs")) == 1
    assert run(deferred, made, try_number=2).output == "anew"
    old, new = deferred.actions()
    assert (old.state, new.state) == ("COMPENSATED", "DONE")
    assert old.key != new.key


def test_attempt_woken_after_its_call_was_undone_goes_on_with_nothing(deferred: Lab) -> None:
    place = TaskPlace()
    with pytest.raises(StepWaitError):
        run(deferred, job(lambda: "anew"), place=place, try_number=2)
    deferred.carry_out(place.triggered[0])

    with pytest.raises(StepRefusedError, match="was undone meanwhile"):
        run(deferred, job(lambda: pytest.fail("called"), resumes=True), try_number=2)


def test_read_only_call_that_defers_is_made_by_the_attempt_that_wakes(lab: Lab) -> None:
    with pytest.raises(CallDeferred):
        run(lab, job(start_and_defer, compensate=READ_ONLY))
    assert lab.actions() == []

    assert run(lab, job(lambda: 7, compensate=READ_ONLY, resumes=True)).output == 7
    assert lab.states() == [("job", "DONE")]


# -- an operator that fails -------------------------------------------------------------------------------------------


def test_operator_that_failed_is_asked_about_after_what_it_sent_has_settled_not_after_its_timeout(
    lab: Lab,
) -> None:
    def fail() -> Any:
        raise RuntimeError("503")

    made = job(fail, verify=not_applied, settle_after=timedelta(milliseconds=200), retry=NO_RETRY)

    with pytest.raises(RuntimeError, match="503"):
        run(lab, made)

    (row,) = lab.actions()
    assert row.state == "FAILED"


def not_applied(record: ActionRecord) -> NotApplied:
    return NotApplied()


# -- its task ended by hand -------------------------------------------------------------------------------------------


def test_parked_call_of_a_task_that_was_marked_success_is_undone_and_asked_for_once(deferred: Lab) -> None:
    (step,) = deferred.view().steps
    verbs = DeferralVerbs(deferred.connection)

    decision = verbs.undo_parked_if_any(step, "the task was marked success")
    again = verbs.undo_parked_if_any(step, "the task was marked success")

    assert decision is not None
    assert decision.request is not None
    assert again is not None
    assert again.request == decision.request
    assert deferred.saga_state() == "RUNNING"
    deferred.freeze(decision.request.request_uuid)
    deferred.undo_step(decision.request.request_uuid)
    assert deferred.states() == [("job", "COMPENSATED")]
    assert len(deferred.world.undo_calls("jobs")) == 1


def test_nothing_is_undone_where_no_call_is_parked(lab: Lab) -> None:
    run(lab, job(lambda: "done at once"))
    (step,) = lab.view().steps

    assert DeferralVerbs(lab.connection).undo_parked_if_any(step, "the task was marked success") is None
    assert lab.states() == [("job", "DONE")]
