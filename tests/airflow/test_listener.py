"""The hooks, called as Airflow calls them, and what the saga store is told in the end.

Runs are real rows in Airflow's metadata, the store is a real Postgres, and the listener is the one that Airflow has
found by the entry point of the package.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from uuid import UUID, uuid4

import pytest

from airflow_saga.core.states import Cause, RequestState, SagaState, StepState
from airflow_saga.plugin import dispatch
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.reconcile import Reconciler
from tests.airflow.hooks import HookedRun, be_api_server, until
from tests.store.scene import Scene

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def _own_thread(store_url: str) -> Iterator[None]:
    """Each test has a dispatcher of its own, which leads to the store of the test."""
    dispatch.stop()
    yield
    dispatch.stop()


@pytest.fixture
def run(scene: Scene, airflow_run: Callable[..., None]) -> HookedRun:
    """The run of the scene, known to Airflow and running."""
    airflow_run(*scene.run)
    return HookedRun(*scene.run)


def _told(scene: Scene) -> None:
    """Everything that was handed over has been told to the store."""
    assert dispatch.current().drain(20)


def _states(scene: Scene) -> tuple[str, list[str]]:
    view = scene.view
    return view.saga.state, [request.state for request in view.requests]


# -- the plugin -------------------------------------------------------------------------------------------------------


def test_airflow_finds_the_plugin_and_its_hooks_fit_the_specification(airflow_home: object) -> None:
    from airflow._shared.listeners.listener import ListenerManager
    from airflow._shared.listeners.spec import lifecycle, taskinstance
    from airflow.listeners.spec import dagrun
    from airflow.plugins_manager import get_plugin_info

    plugin = next(each for each in get_plugin_info() if each["name"] == "saga")
    assert plugin["listeners"], plugin
    from airflow_saga.plugin.plugin import SagaPlugin

    manager = ListenerManager()
    for spec in (lifecycle, taskinstance, dagrun):
        manager.add_hookspecs(spec)
    for listener in SagaPlugin.listeners:
        manager.add_listener(listener)  # raises if an argument is not in the specification
    manager.pm.check_pending()  # raises if a hook is not
    hooks = {caller.name for caller in manager.pm.get_hookcallers(SagaPlugin.listeners[0]) or []}
    assert hooks == {
        "on_starting",
        "on_dag_run_running",
        "on_dag_run_success",
        "on_dag_run_failed",
        "on_task_instance_failed",
        "on_task_instance_success",
    }


def test_loading_the_plugin_loads_nothing_heavy() -> None:
    program = (
        "import sys, airflow.plugins_manager, airflow.listeners\n"
        "before = set(sys.modules)\n"
        "import airflow_saga.plugin.plugin\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    loaded = done.stdout.split()
    assert "airflow_saga.plugin.listener" in loaded
    foreign = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert foreign == {"airflow_saga"}
    ours = {name.split(".")[1] for name in loaded if "." in name}
    assert ours <= {"core", "get_provider_info", "plugin", "settings"}


def test_the_tag_that_the_hooks_look_for_is_the_one_that_saga_dags_get() -> None:
    from airflow_saga import dags
    from airflow_saga.plugin.events import SAGA_TAG

    assert SAGA_TAG == dags.SAGA_TAG


# -- a run starts -----------------------------------------------------------------------------------------------------


def test_a_run_of_a_saga_dag_that_starts_gets_a_row(scene: Scene, run: HookedRun) -> None:
    run.starts()
    _told(scene)
    assert scene.saga.state == SagaState.PENDING


def test_a_run_of_another_dag_gets_none(scene: Scene, run: HookedRun) -> None:
    run.starts(tags={"booking"})
    run.fails(tags={"booking"})
    run.is_marked_failed(tags={"booking"})
    _told(scene)
    assert scene.reader.find(*scene.run) is None


def test_where_the_hook_cannot_see_the_dag_its_tags_are_looked_up(
    scene: Scene, run: HookedRun, airflow_run: Callable[..., None]
) -> None:
    from airflow.listeners.listener import get_listener_manager
    from airflow.models.dag import DagTag
    from airflow.utils.session import create_session

    airflow_run("no_saga", scene.run_id)
    other = HookedRun("no_saga", scene.run_id)
    with create_session(scoped=False) as session:
        session.add(DagTag(dag_id=run.dag_id, name="saga"))
    try:
        for each in (run, other):
            with each.loaded() as dag_run:
                assert dag_run.dag is None
                get_listener_manager().hook.on_dag_run_running(dag_run=dag_run, msg="started")
        _told(scene)
    finally:
        with create_session(scoped=False) as session:
            session.delete(session.get(DagTag, ("saga", run.dag_id)))
    assert scene.saga.state == SagaState.PENDING
    assert scene.reader.find("no_saga", scene.run_id) is None


# -- a person marks the run -------------------------------------------------------------------------------------------


def test_a_run_marked_failed_is_undone_before_airflow_has_committed_it(scene: Scene, run: HookedRun) -> None:
    scene.attach()
    run.is_marked_failed()
    _told(scene)
    assert scene.saga.state == SagaState.CANCELLING
    request = scene.request
    assert (request.state, request.cause, request.whole_run) == (
        RequestState.REQUESTED,
        Cause.MARKED_FAILED,
        True,
    )
    assert request.reason == "the run was marked failed in Airflow"
    assert request.triggered_at is not None
    undo_runs = run.undo_runs()
    assert [each.run_id for each in undo_runs] == [f"undo__{request.request_uuid}"]
    assert undo_runs[0].conf == {"run_id": run.run_id, "request": str(request.request_uuid)}


def test_the_person_who_marked_the_run_is_named(scene: Scene, run: HookedRun) -> None:
    from airflow.models.log import Log
    from airflow.utils.session import create_session

    scene.attach()
    with create_session(scoped=False) as session:
        for owner, run_id in (("ana", run.run_id), ("bob", "another_run")):
            entry = Log("patch_dag_run", owner=owner)
            entry.dag_id, entry.run_id = run.dag_id, run_id
            session.add(entry)
    run.is_marked_failed()
    _told(scene)
    assert (scene.request.actor, scene.saga.actor) == ("ana", "ana")


def test_c46_a_run_marked_failed_before_its_first_step_is_over_at_once(scene: Scene, run: HookedRun) -> None:
    run.is_marked_failed()
    _told(scene)
    assert _states(scene) == (SagaState.CANCELLED, [])
    assert run.undo_runs() == []
    run.is_marked_failed()
    _told(scene)
    assert _states(scene) == (SagaState.CANCELLED, [])


def test_c38_marking_an_undo_run_failed_undoes_nothing(
    scene: Scene, run: HookedRun, airflow_run: Callable[..., None]
) -> None:
    scene.attach()
    run.is_marked_failed()
    _told(scene)
    undo = HookedRun(f"{run.dag_id}__compensation", run.undo_runs()[0].run_id)
    before = scene.tables()
    undo.is_marked_failed(tags={"saga", "saga-compensation"})
    undo.fails(tags={"saga", "saga-compensation"})
    undo.starts(tags={"saga", "saga-compensation"})
    _told(scene)
    assert scene.tables() == before
    assert scene.reader.find(undo.dag_id, undo.run_id) is None


def test_a_mark_from_before_a_clear_is_dropped(scene: Scene, run: HookedRun) -> None:
    scene.attach(clear_number=1)
    run.is_marked_failed()
    _told(scene)
    assert _states(scene) == (SagaState.RUNNING, [])


# -- a run ends by itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "cause"), [("task_failure", Cause.FAILURE), ("timed_out", Cause.DAGRUN_TIMEOUT)]
)
def test_a_run_that_fails_is_undone_once_airflow_has_committed_it(
    scene: Scene, run: HookedRun, message: str, cause: str
) -> None:
    scene.attach()
    run.fails(message)
    dispatch.current().drain(0.5)
    assert _states(scene) == (SagaState.RUNNING, [])
    run.commit("failed")
    _told(scene)
    assert _states(scene) == (SagaState.FAILED, [RequestState.HINTED])
    assert (scene.request.cause, scene.saga.cause) == (cause, cause)
    assert [each.run_id for each in run.undo_runs()] == [f"undo__{scene.request.request_uuid}"]


def test_a_failure_that_airflow_never_commits_is_left_alone(
    scene: Scene, run: HookedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "LOOK_AGAIN_SECONDS", (0.05, 0.05))
    scene.attach()
    run.fails()
    _told(scene)
    assert _states(scene) == (SagaState.RUNNING, [])


def test_a_failed_run_that_was_cleared_meanwhile_is_left_alone(scene: Scene, run: HookedRun) -> None:
    scene.attach()
    run.commit("queued", clear_number=1)
    run.fails()
    _told(scene)
    assert _states(scene) == (SagaState.RUNNING, [])


def test_a_run_that_lost_a_worker_is_left_for_the_reconciler_to_start(scene: Scene, run: HookedRun) -> None:
    step = scene.attach()
    scene.time_passes(3600)
    assert scene.sweeps.stop_if_lost(step.saga_id, step.step_id)
    run.commit("failed")
    run.fails()
    _told(scene)
    assert (scene.request.cause, scene.request.state) == (Cause.LOST_WORKER, RequestState.HINTED)
    assert run.undo_runs() == []


def test_a_run_that_succeeds_is_completed_once_airflow_has_committed_it(scene: Scene, run: HookedRun) -> None:
    scene.finish(scene.attach())
    run.succeeds()
    dispatch.current().drain(0.5)
    assert scene.saga.state == SagaState.RUNNING
    run.commit("success")
    _told(scene)
    assert _states(scene) == (SagaState.COMPLETED, [])


def test_c28_a_run_that_failed_without_any_hook_is_found_by_the_reconciler(
    scene: Scene, run: HookedRun
) -> None:
    from airflow_saga.metadata import MetadataPlatform

    scene.attach()
    run.commit("failed")
    scene.time_passes(3600)
    report = Reconciler(scene.connection, MetadataPlatform("cli"), Limits()).run_once()
    assert (report.errors, report.triggered) == (0, 1)
    assert [each.run_id for each in run.undo_runs()] == [f"undo__{scene.request.request_uuid}"]


# -- tasks ------------------------------------------------------------------------------------------------------------


def _attempt_id(run: HookedRun) -> UUID:
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session(scoped=False) as session:
        found = session.scalars(select(TaskInstance.id).where(TaskInstance.run_id == run.run_id)).one()
        return UUID(str(found))


def test_a_task_marked_failed_fences_its_step(
    scene: Scene, run: HookedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_api_server(monkeypatch)
    step = scene.attach(ti_id=_attempt_id(run))
    run.task_fails()
    _told(scene)
    assert scene.step().state == StepState.STOPPED
    assert scene.step().fence == step.fence + 1
    assert _states(scene) == (SagaState.RUNNING, [])


def test_a_mark_of_an_earlier_attempt_does_not_fence_the_newer_one(
    scene: Scene, run: HookedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_api_server(monkeypatch)
    scene.attach(ti_id=_attempt_id(run))
    run.task_fails(ti_id=uuid4())
    _told(scene)
    assert scene.step().state == StepState.RUNNING


def test_when_the_whole_run_is_marked_its_step_may_end_its_call(
    scene: Scene, run: HookedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_api_server(monkeypatch)
    scene.attach(ti_id=_attempt_id(run))
    run.task_fails()  # Airflow calls the tasks' hooks first
    run.is_marked_failed()
    _told(scene)
    assert scene.saga.state == SagaState.CANCELLING
    assert scene.step().state == StepState.RUNNING


@pytest.mark.parametrize("state", ["up_for_retry", "failed"])
def test_c31_an_attempt_that_fails_tells_the_listener_nothing(
    scene: Scene, run: HookedRun, state: str
) -> None:
    """In the scheduler and in a task's own process: only the end of the run, or a person, leads to an undo."""
    scene.attach(ti_id=_attempt_id(run))
    run.task_fails(error="ValueError: no", state=state, previous="running")
    _told(scene)
    assert scene.step().state == StepState.RUNNING
    assert _states(scene) == (SagaState.RUNNING, [])


def test_c31_in_a_task_process_no_hook_does_anything(
    scene: Scene, run: HookedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.execution_time import task_runner

    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", object(), raising=False)
    be_api_server(monkeypatch)
    dispatch.stop()
    run.starts()
    run.fails()
    run.is_marked_failed()
    run.task_fails()
    assert dispatch.current()._thread is None  # nothing was handed over
    monkeypatch.undo()
    assert scene.reader.find(*scene.run) is None


# -- what hooks must never do -----------------------------------------------------------------------------------------


def test_c30_hooks_use_no_session_of_airflow_and_leave_a_scheduler_pass_alone(
    scene: Scene, run: HookedRun
) -> None:
    """As the scheduler does it: under the guard that forbids commits, with what is not loaded not to be loaded."""
    import threading

    from airflow import settings
    from airflow.utils.sqlalchemy import prohibit_commit
    from airflow.utils.state import DagRunState
    from sqlalchemy import event, inspect

    scene.finish(scene.attach())
    statements: list[str] = []
    me = threading.get_ident()

    def note(connection: object, cursor: object, statement: str, *rest: object) -> None:
        if threading.get_ident() == me:
            statements.append(statement)

    event.listen(settings.engine, "before_cursor_execute", note)
    try:
        with run.loaded({"saga"}) as dag_run:
            session = inspect(dag_run).session
            with prohibit_commit(session) as guard:
                session.expire(dag_run, ["conf", "updated_at"])
                unloaded = set(inspect(dag_run).unloaded)
                statements.clear()
                dag_run._state = DagRunState.SUCCESS
                dag_run.notify_dagrun_state_changed(msg="success")
                dag_run._state = DagRunState.FAILED
                dag_run.notify_dagrun_state_changed(msg="task_failure")
                dag_run._state = DagRunState.RUNNING
                dag_run.notify_dagrun_state_changed(msg="started")
                assert statements == []
                assert set(inspect(dag_run).unloaded) == unloaded
                guard.commit()
            assert inspect(dag_run).session is session
    finally:
        event.remove(settings.engine, "before_cursor_execute", note)
    run.commit("success")
    _told(scene)
    assert scene.saga.state == SagaState.COMPLETED


def test_a_hook_never_raises_and_the_next_one_works(
    scene: Scene, run: HookedRun, caplog: pytest.LogCaptureFixture
) -> None:
    from airflow.listeners.listener import get_listener_manager

    get_listener_manager().hook.on_dag_run_failed(dag_run=object.__new__(HookedRun), msg="task_failure")
    assert "on_dag_run_failed failed" in caplog.text
    run.starts()
    _told(scene)
    assert scene.saga.state == SagaState.PENDING


# -- who is alive -----------------------------------------------------------------------------------------------------


def test_c33_a_process_says_that_it_has_the_plugin_and_when_a_hook_was_last_called(
    scene: Scene, run: HookedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.jobs.job import Job
    from airflow.utils.net import get_hostname

    monkeypatch.setattr(dispatch, "FIRST_SEEN_SECONDS", 0.0)
    monkeypatch.setattr(dispatch, "SEEN_EVERY_SECONDS", 0.2)
    job = Job()  # calls the hook, before it has a type
    job.job_type = "SchedulerJob"
    first = until(scene.reader.components)[0]
    assert (first["kind"], first["host"], first["last_hook"]) == ("scheduler", get_hostname(), None)
    run.starts()
    seen = until(lambda: [row for row in scene.reader.components() if row["last_hook"]])[0]
    assert seen["last_hook"] == "on_dag_run_running"
    later = until(lambda: [row for row in scene.reader.components() if row["seen_at"] > seen["seen_at"]])[0]
    assert later["last_hook_at"] == seen["last_hook_at"]


def test_c33_the_api_server_says_so_when_it_has_loaded_the_plugin(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_saga.plugin.plugin import SagaPlugin

    SagaPlugin.on_load()
    monkeypatch.setattr(dispatch, "FIRST_SEEN_SECONDS", 0.0)
    assert dispatch.current()._thread is None
    be_api_server(monkeypatch)
    SagaPlugin.on_load()
    assert until(scene.reader.components)[0]["kind"] == "api-server"


def test_hooks_are_quick(scene: Scene, run: HookedRun) -> None:
    from airflow.listeners.listener import get_listener_manager

    scene.attach()
    hook = get_listener_manager().hook.on_dag_run_failed
    wall, work = [], []
    with run.loaded({"saga"}) as dag_run:
        for _ in range(200):
            began, worked = time.perf_counter(), time.thread_time()
            hook(dag_run=dag_run, msg="task_failure")
            work.append(time.thread_time() - worked)
            wall.append(time.perf_counter() - began)
    assert sorted(wall)[100] < 0.001
    assert max(work) < 0.001
    run.commit("failed")
    _told(scene)
    assert len(scene.view.requests) == 1
