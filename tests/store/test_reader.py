"""What people and the reconciler read: one consistent snapshot, plain filters, clear errors."""

from __future__ import annotations

import pytest

from airflow_saga.core.errors import UnknownSagaError
from airflow_saga.core.plan import action_ids, hash_of
from tests.store.scene import Scene, connect


def test_a_saga_is_found_by_its_run_or_by_its_number(each_scene: Scene) -> None:
    assert each_scene.reader.find(*each_scene.run) is None
    with pytest.raises(UnknownSagaError, match=r"no saga book_trip / run_1 .*See: airflow saga list"):
        each_scene.reader.saga(*each_scene.run)
    with pytest.raises(UnknownSagaError, match="number 12345"):
        each_scene.reader.by_id(12345)
    each_scene.attach()
    saga = each_scene.reader.saga(*each_scene.run)
    assert each_scene.reader.by_id(saga.saga_id) == saga == each_scene.reader.find(*each_scene.run)


def test_a_view_shows_the_whole_saga_as_of_one_moment(each_scene: Scene) -> None:
    each_scene.stopped("flight", 1, 2)
    each_scene.stopped("car", 1)
    request = each_scene.cancel()
    view = each_scene.view
    assert [step.task_id for step in view.steps] == ["flight", "car"]
    assert [action.seq for action in view.actions] == [1, 2, 1]
    assert [row.request_uuid for row in view.requests] == [request.request_uuid]
    assert [event["what"] for event in view.events] == [
        *("step start", "step start", "undo asked for", "saga RUNNING → CANCELLING"),
    ]
    assert [view.step_of(action).task_id for action in view.residual] == ["flight", "flight", "car"]
    with connect(each_scene.url) as other, other.transaction():
        other.execute("SELECT * FROM airflow_saga.saga FOR UPDATE")
        assert each_scene.view == view, "reading waits for nobody"
    assert each_scene.connection.info.transaction_status.name == "IDLE"
    with pytest.raises(UnknownSagaError):
        each_scene.reader.view("book_trip", "unknown")
    assert each_scene.connection.info.transaction_status.name == "IDLE"


def test_steps_and_residual_of_a_saga(scene: Scene) -> None:
    scene.stopped("rooms", 1, map_index=1)
    scene.stopped("rooms", map_index=0)
    saga_id = scene.saga.saga_id
    assert [step.map_index for step in scene.reader.steps(saga_id)] == [1, 0]
    assert scene.reader.step(saga_id, "rooms", 2) is None
    assert [row.seq for row in scene.reader.residual(saga_id)] == [1]


def test_sagas_are_listed_newest_first_and_with_what_stands(each_scene: Scene) -> None:
    runs = [each_scene.another_run(f"run_{number}") for number in range(3)]
    for run in runs:
        run.stopped("flight", 1, 2)
    runs[1].cancel()
    other = Scene(each_scene.url, "run_1", dag_id="other")
    other.attach()
    listed = each_scene.reader.sagas(dag_ids=["book_trip"])
    assert [(row["run_id"], row["state"], row["standing"]) for row in listed] == [
        ("run_2", "RUNNING", 0),
        ("run_1", "CANCELLING", 2),
        ("run_0", "RUNNING", 0),
    ]
    assert len(each_scene.reader.sagas()) == 4
    assert [row["run_id"] for row in each_scene.reader.sagas(states=["CANCELLING", "FAILED"])] == ["run_1"]
    assert [row["dag_id"] for row in each_scene.reader.sagas(limit=1)] == ["other"]
    for run in [*runs, other]:
        run.close()


def test_a_plan_calls_and_changes_nothing(each_scene: Scene) -> None:
    each_scene.ran("flight", 1, 2)
    each_scene.ran("hotel", 1, after=["flight"])
    before = each_scene.tables()
    plan, digest, _ = each_scene.reader.plan(*each_scene.run)
    assert [step["task_id"] for step in plan["steps"]] == ["hotel", "flight"]
    assert digest == hash_of(plan)
    assert len(action_ids(plan)) == 3
    assert each_scene.tables() == before
    assert each_scene.reader.plan(*each_scene.run)[:2] == (plan, digest)
    each_scene.act(each_scene.attach("car"), 1)
    assert each_scene.reader.plan(*each_scene.run)[1] != digest


def test_a_request_is_found_by_its_uuid(scene: Scene) -> None:
    scene.stopped("flight", 1)
    request = scene.cancel()
    assert scene.reader.request(request.request_uuid) == request
    assert scene.reader.request(scene.saga.saga_uuid) is None
