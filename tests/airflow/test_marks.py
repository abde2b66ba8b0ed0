"""A run that was marked failed while nobody listened, as Airflow itself leaves it in its tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from airflow_saga import metadata
from airflow_saga.core.states import SagaState
from airflow_saga.plugin import dispatch, follow
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.reconcile import Reconciler
from airflow_saga.store.connect import Address
from tests.airflow.hooks import HookedRun, until
from tests.store.scene import Scene

pytestmark = pytest.mark.timeout(240)
LONG_AGO = timedelta(minutes=1)


@pytest.fixture
def run(scene: Scene, airflow_run: Callable[..., None]) -> HookedRun:
    airflow_run(*scene.run)
    return HookedRun(*scene.run)


def audit(
    event: str, run: HookedRun | None, extra: dict[str, Any], *, dag_id: str | None = None, ago: timedelta
) -> None:
    """An entry as the API server writes one before it does what was asked."""
    from airflow.models.log import Log
    from airflow.utils.session import create_session

    with create_session(scoped=False) as session:
        entry = Log(event, owner="ann", extra=json.dumps(extra))
        entry.dag_id = dag_id or (run.dag_id if run else None)
        entry.run_id = run.run_id if run else None
        entry.dttm = datetime.now(UTC) - ago
        session.add(entry)


def queued(run: HookedRun, ago: timedelta) -> None:
    with run.loaded() as row:
        row.queued_at = datetime.now(UTC) - ago


def mark_as_airflow_does(run: HookedRun) -> None:
    from airflow.api.common.mark_tasks import set_dag_run_state_to_failed
    from airflow.models.serialized_dag import SerializedDagModel
    from airflow.utils.session import create_session

    with create_session(scoped=False) as session:
        found = SerializedDagModel.get(run.dag_id, session=session)
        assert found is not None
        set_dag_run_state_to_failed(dag=found.dag, run_id=run.run_id, commit=True, session=session)


def time_out_as_airflow_does(run: HookedRun) -> None:
    """As `_schedule_dag_run` of the scheduler does: by the attribute, not by `set_state`."""
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session(scoped=False) as session:
        wanted = (TaskInstance.dag_id == run.dag_id, TaskInstance.run_id == run.run_id)
        for instance in session.scalars(select(TaskInstance).where(*wanted)):
            instance.state = "skipped"
            session.merge(instance)
    run.commit("failed")


def test_a_run_marked_between_its_tasks_shows_it_by_them(run: HookedRun) -> None:
    mark_as_airflow_does(run)
    seen = metadata.failed_run(run.dag_id, run.run_id)
    assert (seen.marked, seen.actor) == (True, None)


def test_a_run_that_timed_out_was_not_marked(run: HookedRun) -> None:
    time_out_as_airflow_does(run)
    assert metadata.failed_run(run.dag_id, run.run_id).marked is False


def test_the_audit_log_tells_of_a_mark_and_by_whom(run: HookedRun) -> None:
    queued(run, timedelta(minutes=5))
    audit("patch_dag_run", run, {"state": "failed", "method": "PATCH"}, ago=LONG_AGO)
    run.commit("failed")
    seen = metadata.failed_run(run.dag_id, run.run_id)
    assert (seen.marked, seen.actor) == (True, "ann")


def test_one_of_many_runs_marked_at_once_is_found_too(run: HookedRun) -> None:
    queued(run, timedelta(minutes=5))
    entity = {"dag_id": run.dag_id, "dag_run_id": run.run_id, "state": "failed"}
    audit("bulk_dag_runs", None, {"actions": [{"entities": [entity]}]}, dag_id="~", ago=LONG_AGO)
    run.commit("failed")
    assert metadata.failed_run(run.dag_id, run.run_id).marked is True
    marks = [(mark.run_id, mark.actor) for mark in metadata.marks_since(datetime.now(UTC) - 2 * LONG_AGO)]
    assert (run.run_id, "ann") in marks


@pytest.mark.parametrize(
    ("extra", "queued_ago"),
    [
        ({"note": "looks bad"}, timedelta(minutes=5)),
        ({"state": "success"}, timedelta(minutes=5)),
        ({"state": "failed"}, timedelta(seconds=5)),
    ],
    ids=["a note", "another state", "before it was cleared"],
)
def test_other_entries_of_the_audit_log_are_no_mark(
    run: HookedRun, extra: dict[str, str], queued_ago: timedelta
) -> None:
    queued(run, queued_ago)
    audit("patch_dag_run", run, extra, ago=LONG_AGO)
    run.commit("failed")
    assert metadata.failed_run(run.dag_id, run.run_id).marked is False
    assert run.run_id not in [mark.run_id for mark in metadata.marks_since(datetime.now(UTC) - 2 * LONG_AGO)]


def test_the_reconciler_of_the_command_line_undoes_it_whatever_the_policy(
    scene: Scene, run: HookedRun
) -> None:
    scene.stopped("flight", 1, on_failure="keep")
    queued(run, timedelta(minutes=5))
    audit("patch_dag_run", run, {"state": "failed"}, ago=LONG_AGO)
    run.commit("failed")
    with Address(scene.url).open() as connection:
        platform = metadata.MetadataPlatform("cli")
        assert Reconciler(connection, platform, Limits()).run_once().failed == 1
    assert (scene.request.cause, scene.request.actor) == ("marked_failed", "ann")


def test_a_mark_that_no_hook_told_of_is_found_by_the_thread_of_the_listener(
    scene: Scene, run: HookedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.stopped("flight", 1, on_failure="keep")
    queued(run, timedelta(minutes=5))
    audit("patch_dag_run", run, {"state": "failed"}, ago=LONG_AGO)
    run.commit("failed")
    monkeypatch.setattr(dispatch, "FIRST_SEEN_SECONDS", 0.0)
    thread = dispatch.Dispatcher()
    thread.be_seen_as(lambda: "scheduler")
    until(lambda: scene.view.requests)
    assert thread.stop(20)
    assert (scene.saga.state, scene.saga.actor) == (SagaState.CANCELLING, "ann")
    assert [each.run_id for each in run.undo_runs()] == [f"undo__{scene.request.request_uuid}"]


def test_a_mark_of_just_now_is_left_to_its_hook(scene: Scene, run: HookedRun) -> None:
    scene.stopped("flight", 1)
    queued(run, timedelta(minutes=5))
    audit("patch_dag_run", run, {"state": "failed"}, ago=timedelta(seconds=1))
    run.commit("failed")
    with Address(scene.url).open() as connection:
        follow.undo_missed_marks(connection, datetime.now(UTC) - LONG_AGO)
    assert scene.view.requests == ()
