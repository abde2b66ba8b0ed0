"""The API for those who run the deployment: the commands' own data, and rights to all DAGs asked for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.airflow.test_web_access import OTHER_PORT, OTHER_SITE
from tests.airflow.web import Web
from tests.store.scene import Scene

AirflowRun = Callable[..., None]
DOCTOR, RECONCILE, PRUNE = "/api/v1/doctor", "/api/v1/reconcile", "/api/v1/prune"
DAY = 86_400


@pytest.fixture
def old(scene: Scene) -> Scene:
    """A saga that was completed 100 days ago, with two actions."""
    scene.ran("flight", 1, 2)
    scene.runs.complete_if_over(*scene.run)
    scene.time_passes(100 * DAY)
    return scene


@pytest.fixture
def failed(scene: Scene, airflow_run: AirflowRun) -> Scene:
    """A saga whose run has failed, which no hook has told."""
    airflow_run(*scene.run, state="failed")
    scene.stopped("flight", 1)
    return scene


# -- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_gives_the_findings_of_the_command_also_where_something_fails(
    web: Web, scene: Scene, airflow_saga_cli: Callable[..., Any]
) -> None:
    answer = web.get(DOCTOR, "op")
    said = airflow_saga_cli("doctor", "--output", "json")
    assert (answer.status_code, answer.json()["ok"], said.code) == (200, False, 1)
    told, printed = answer.json()["findings"], json.loads(said.out)
    for each in (told, printed):
        assert next(row for row in each if row["check"] == "notifications").pop("message")  # a measured time
    assert told == printed


def test_doctor_answers_in_time_when_a_check_hangs(
    web: Web, scene: Scene, monkeypatch: pytest.MonkeyPatch, hanging: threading.Event
) -> None:
    from airflow_saga import doctor
    from airflow_saga.plugin.web import upkeep

    monkeypatch.setattr(upkeep, "DOCTOR_SECONDS", 0.3)
    began = time.monotonic()
    for _ in range(doctor.MOST_AT_ONCE):
        answer = web.get(DOCTOR, "op").json()
        assert answer["ok"] is False
        assert [row["check"] for row in answer["findings"]] == ["connection", "time"]
        assert "after connection: the rest was not looked at" in answer["findings"][-1]["message"]
    (refused,) = web.get(DOCTOR, "op").json()["findings"]
    assert "have not ended yet" in refused["message"]
    assert time.monotonic() - began < 10
    hanging.set()
    monkeypatch.setattr(upkeep, "DOCTOR_SECONDS", 5.0)
    assert [row["check"] for row in web.get(DOCTOR, "op").json()["findings"]] == ["connection"]


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A doctor that hangs after its first finding, until this is set."""
    from airflow_saga import doctor

    go_on = threading.Event()

    def examine() -> Iterator[doctor.Finding]:
        yield doctor.Finding(doctor.Level.OK, "connection", "seen")
        go_on.wait()

    monkeypatch.setattr(doctor, "examine", examine)
    yield go_on
    go_on.set()


def test_a_doctor_that_breaks_off_says_so(web: Web, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_saga import doctor

    def examine() -> Iterator[doctor.Finding]:
        yield doctor.Finding(doctor.Level.OK, "connection", "seen")
        raise ZeroDivisionError

    monkeypatch.setattr(doctor, "examine", examine)
    answer = web.get(DOCTOR, "op").json()
    assert (answer["ok"], answer["findings"][-1]["message"]) == (False, "broke off (ZeroDivisionError)")


# -- reconcile --------------------------------------------------------------------------------------------------------


def test_reconcile_makes_one_pass_and_starts_what_was_missed(web: Web, failed: Scene) -> None:
    answer = web.post(RECONCILE)
    assert answer.status_code == 200
    assert (answer.json()["moved"]["triggered"], answer.json()["errors"]) == (1, 0)
    assert failed.saga.state == "FAILED"
    assert _triggered_by(failed) == "rest_api"
    assert web.post(RECONCILE).json()["message"] == "looked at everything that is open: nothing to do"


def test_one_pass_at_a_time_in_a_server(web: Web, failed: Scene) -> None:
    from airflow_saga.plugin.web import upkeep

    with upkeep._pass_under_way:
        assert web.post(RECONCILE).status_code == 409
    assert failed.saga.state == "RUNNING"
    assert web.post(RECONCILE).status_code == 200


def test_a_saga_that_reconcile_cannot_move_is_counted(
    web: Web, failed: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_saga import metadata

    def broken(dag_id: str, run_id: str) -> None:
        raise RuntimeError("the metadata is away")

    monkeypatch.setattr(metadata, "run_of", broken)
    answer = web.post(RECONCILE)
    assert (answer.status_code, answer.json()["errors"]) == (200, 1)
    assert "1 saga could not be moved" in answer.json()["message"]


def _triggered_by(scene: Scene) -> str:
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from sqlalchemy import select

    undo = f"undo__{scene.request.request_uuid}"
    with create_session(scoped=False) as session:
        run = session.scalars(select(DagRun).where(DagRun.run_id == undo)).one()
        return str(getattr(run.triggered_by, "value", run.triggered_by))


# -- prune ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [{}, {"yes": False}])
def test_prune_without_a_yes_deletes_nothing_and_says_what_would_go(
    web: Web, old: Scene, body: dict[str, Any]
) -> None:
    answer = web.post(PRUNE, body)
    assert answer.status_code == 409
    assert "2 actions of 1 settled saga older than 90 days would go" in answer.json()["message"]
    assert '{"yes": true}' in answer.json()["message"]
    assert len(old.view.actions) == 2


def test_prune_with_a_yes_deletes_and_finds_nothing_when_asked_again(web: Web, old: Scene) -> None:
    answer = web.post(PRUNE, {"yes": True})
    assert answer.status_code == 200
    assert answer.json() == {
        "message": "deleted 2 actions; each saga itself is kept, with its end",
        "retention_days": 90,
        "sagas": 1,
        "deleted_actions": 2,
    }
    assert (old.view.actions, old.saga.state) == ((), "COMPLETED")
    again = web.post(PRUNE, {})
    assert (again.status_code, again.json()["deleted_actions"]) == (200, 0)


def test_prune_keeps_for_as_long_as_it_is_told(web: Web, old: Scene) -> None:
    assert web.post(PRUNE, {"yes": True, "retention_days": 101}).json()["deleted_actions"] == 0
    for wrong in (0, -1, "x"):
        assert web.post(PRUNE, {"yes": True, "retention_days": wrong}).status_code == 422
    assert web.post(PRUNE, {"yes": True, "days": 1}).status_code == 422
    assert len(old.view.actions) == 2
    assert web.post(PRUNE, {"yes": True, "retention_days": 99}).json()["deleted_actions"] == 2


# -- who, and from where ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "statuses"),
    [
        ("viewer", (403, 403, 403)),
        ("user", (403, 200, 200)),
        ("op", (200, 200, 200)),
        ("admin", (200, 200, 200)),
    ],
)
def test_each_role_may_what_concerns_all_dags_or_not(
    web: Web, old: Scene, role: str, statuses: tuple[int, int, int]
) -> None:
    """``user`` may change every run, but may not see where the store and the components are."""
    answers = (web.get(DOCTOR, role), web.post(RECONCILE, role=role), web.post(PRUNE, {"yes": True}, role))
    assert tuple(answer.status_code for answer in answers) == statuses
    assert len(old.view.actions) == (2 if role == "viewer" else 0)


def test_who_may_change_runs_but_not_delete_them_may_not_prune(
    web: Web, old: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    _allow(monkeypatch, lambda method, entity, details: method != "DELETE")
    assert web.post(RECONCILE).status_code == 200
    assert web.post(PRUNE, {"yes": True}).status_code == 403
    assert len(old.view.actions) == 2


def test_who_may_change_runs_of_some_dags_only_may_not_do_what_concerns_all(
    web: Web, old: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FAB answers who may edit runs, and one DAG."""
    _allow(monkeypatch, lambda method, entity, details: entity is not None)
    assert web.get(DOCTOR, "op").status_code == 403
    assert web.post(RECONCILE).status_code == 403
    assert web.post(PRUNE, {"yes": True}).status_code == 403
    assert len(old.view.actions) == 2


def test_who_may_change_the_runs_of_one_team_may_not_do_what_concerns_all(
    web: Web, old: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.models.team import Team

    from airflow_saga.plugin.web import access

    monkeypatch.setattr(Team, "get_all_team_names", lambda: {"ours", "theirs"})
    _allow(monkeypatch, lambda method, entity, details: details is None or details.team_name == "ours")
    assert web.post(RECONCILE).status_code == 200
    monkeypatch.setattr(access.conf, "getboolean", lambda *args, **more: True)
    assert web.post(RECONCILE).status_code == 403


def _allow(monkeypatch: pytest.MonkeyPatch, allowed: Callable[[str, Any, Any], bool]) -> None:
    from airflow.api_fastapi.app import get_auth_manager

    def is_authorized_dag(*, method: str, user: Any, access_entity: Any = None, details: Any = None) -> bool:
        return allowed(method, access_entity, details)

    monkeypatch.setattr(get_auth_manager(), "is_authorized_dag", is_authorized_dag)


@pytest.mark.parametrize("headers", [OTHER_SITE, OTHER_PORT, {}])
def test_a_foreign_page_can_neither_prune_nor_reconcile(
    web: Web, old: Scene, headers: dict[str, str]
) -> None:
    for path in (RECONCILE, PRUNE):
        answer = web.browse("POST", path, role="admin", headers=headers, json={"yes": True})
        assert (answer.status_code, "another page" in answer.json()["message"]) == (403, True)
    assert len(old.view.actions) == 2


def test_airflows_audit_log_keeps_who_pruned(web: Web, old: Scene) -> None:
    from airflow.models.log import Log
    from airflow.utils.session import create_session
    from sqlalchemy import select

    web.post(PRUNE, {"yes": True, "retention_days": 77}, "op")
    web.post(RECONCILE, role="op")
    with create_session(scoped=False) as session:
        for event in ("saga_prune", "saga_reconcile"):
            newest = select(Log).where(Log.event == event).order_by(Log.id.desc()).limit(1)
            row = session.scalars(newest).one()
            assert row.owner == "op_1"
            assert event == "saga_reconcile" or json.loads(row.extra)["retention_days"] == 77
