"""What `airflow saga doctor` finds, what it says to do, and when it fails."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from airflow_saga import __version__
from airflow_saga.settings import forget_addresses
from airflow_saga.store.runs import RunVerbs
from tests.airflow.conftest import Command
from tests.airflow.wire import Change, no_notifications, relay, shared_backend
from tests.store.scene import Scene
from tests.support.postgres import PostgresServer

KINDS = ("scheduler", "api-server", "dag-processor", "triggerer", "reconciler")
Findings = dict[str, dict[str, str]]


class Doctor:
    def __init__(self, command: Command) -> None:
        self._command = command
        self.code = 0

    def findings(self) -> Findings:
        """By the name of the check; where a check has several, the worst counts."""
        said = self._command("doctor", "--output", "json")
        self.code = said.code
        rows = json.loads(said.out)
        order = ["ok", "warn", "fail"]
        return {row["check"]: row for row in sorted(rows, key=lambda row: order.index(row["level"]))}


@pytest.fixture
def doctor(airflow_saga_cli: Command) -> Doctor:
    return Doctor(airflow_saga_cli)


@pytest.fixture
def all_seen(scene: Scene) -> Scene:
    """Every component has shown the plugin a moment ago, and a step has run."""
    for kind in KINDS:
        RunVerbs(scene.connection).note_component(kind, "host-1", __version__, "on_starting")
    scene.ran("flight", 1)
    return scene


def levels(findings: Findings) -> dict[str, str]:
    return {name: finding["level"] for name, finding in findings.items()}


def test_all_is_well(all_seen: Scene, doctor: Doctor, airflow_saga_cli: Command) -> None:
    found = doctor.findings()
    assert set(levels(found).values()) == {"ok"}, found
    assert doctor.code == 0
    assert "PostgreSQL" in found["server"]["message"]
    assert "arrive after" in found["notifications"]["message"]
    text = airflow_saga_cli("doctor").out
    assert text.count("\nok ") == len(found) - 1  # the first line has none before it
    assert "→" not in text


def test_without_a_listener_and_a_reconciler_it_fails(scene: Scene, doctor: Doctor) -> None:
    found = doctor.findings()
    assert doctor.code == 1
    seen = levels(found)
    assert [seen[kind] for kind in KINDS] == ["fail", "fail", "warn", "warn", "fail"]
    assert seen["worker"] == "warn"
    assert found["scheduler"]["next"] == f"install airflow-saga {__version__} there and restart it"
    assert "reconciler_dag()" in found["reconciler"]["next"]


def test_c33_each_component_is_named_with_its_last_hook_and_so_is_the_one_without_the_plugin(
    scene: Scene, doctor: Doctor
) -> None:
    """C33 "Plugin loaded but the hook is never called": three cases, told apart."""
    for kind, hook in (("scheduler", "on_dag_run_failed"), ("api-server", None)):
        RunVerbs(scene.connection).note_component(kind, "host-1", __version__, hook)
    found = doctor.findings()
    assert re.search(
        r"^host-1: seen .* ago with .*, last hook on_dag_run_failed .* ago$", found["scheduler"]["message"]
    )
    assert re.search(
        r"^host-1: seen .* ago with .*, no hook called in it yet$", found["api-server"]["message"]
    )
    assert found["triggerer"]["message"].startswith("the plugin was never seen in it")


def test_a_component_with_another_version_is_warned_of(all_seen: Scene, doctor: Doctor) -> None:
    RunVerbs(all_seen.connection).note_component("triggerer", "host-2", "0.0.9", None)
    found = doctor.findings()
    assert found["triggerer"]["level"] == "warn"
    assert "with 0.0.9" in found["triggerer"]["message"]
    assert found["triggerer"]["message"].endswith(f"; this is {__version__}")
    assert doctor.code == 0


@pytest.mark.parametrize(("minutes", "level"), [(3, "ok"), (10, "warn"), (90, "fail")])
def test_a_silent_reconciler_is_told_of(all_seen: Scene, doctor: Doctor, minutes: int, level: str) -> None:
    all_seen.sql(
        "UPDATE airflow_saga.component SET seen_at = now() - %(age)s WHERE kind = 'reconciler'",
        {"age": timedelta(minutes=minutes)},
    )
    assert doctor.findings()["reconciler"]["level"] == level
    assert doctor.code == (1 if level == "fail" else 0)


@pytest.fixture
def live_scheduler(airflow_home: object) -> Iterator[datetime]:
    """A scheduler that Airflow believes to be alive on host-1, since ten minutes ago."""
    from airflow.jobs.job import Job
    from airflow.utils.session import create_session
    from sqlalchemy import delete, insert

    started = datetime.now(UTC) - timedelta(minutes=10)
    with create_session(scoped=False) as session:
        # A row and not an object of it, whose making would start this process as a component.
        row = {"job_type": "SchedulerJob", "state": "running", "hostname": "host-1"}
        session.execute(insert(Job).values(start_date=started, latest_heartbeat=datetime.now(UTC), **row))
    yield started
    with create_session(scoped=False) as session:
        session.execute(delete(Job).where(Job.hostname == "host-1"))


def _age_components(scene: Scene, age: timedelta) -> None:
    scene.sql("UPDATE airflow_saga.component SET seen_at = seen_at - %(age)s", {"age": age})


def test_a_component_that_is_at_work_but_silent_has_lost_the_plugin(
    all_seen: Scene, doctor: Doctor, live_scheduler: datetime
) -> None:
    assert doctor.findings()["scheduler"]["level"] == "ok"
    _age_components(all_seen, timedelta(days=1))
    found = doctor.findings()["scheduler"]
    assert found["level"] == "fail"
    assert "though it is at work since" in found["message"]


def test_a_component_that_airflow_does_not_see_either_is_stopped(all_seen: Scene, doctor: Doctor) -> None:
    _age_components(all_seen, timedelta(minutes=10))
    found = doctor.findings()
    assert found["api-server"]["level"] == "warn"
    assert "it is stopped, or cannot reach the store" in found["api-server"]["message"]
    assert doctor.code == 0


def test_a_host_of_the_past_is_not_mentioned(all_seen: Scene, doctor: Doctor) -> None:
    _age_components(all_seen, timedelta(days=1))
    for kind in KINDS:
        RunVerbs(all_seen.connection).note_component(kind, "host-2", __version__, None)
    found = doctor.findings()
    assert set(levels(found).values()) == {"ok"}
    assert found["scheduler"]["message"].startswith("host-2: ")


def test_a_component_on_a_host_without_the_plugin_is_named(
    all_seen: Scene, doctor: Doctor, live_scheduler: datetime
) -> None:
    all_seen.sql("UPDATE airflow_saga.component SET host = 'elsewhere' WHERE kind = 'scheduler'")
    found = doctor.findings()["scheduler"]
    assert (found["level"], found["message"]) == (
        "warn",
        "host-1: at work, but the plugin was not seen in it",
    )


def test_a_saga_dag_without_its_compensation_dag_fails(all_seen: Scene, doctor: Doctor) -> None:
    orphan = Scene(all_seen.url, dag_id="no_saga")
    orphan.ran("flight", 1)
    found = doctor.findings()["compensation-dags"]
    assert (found["level"], doctor.code) == ("fail", 1)
    assert "no_saga__compensation is not there: runs of no_saga cannot be undone" in found["message"]
    orphan.close()


def test_a_dag_of_the_past_whose_sagas_are_settled_is_no_failure(all_seen: Scene, doctor: Doctor) -> None:
    past = Scene(all_seen.url, dag_id="dag_of_last_year")
    past.ran("flight", 1)
    assert doctor.findings()["compensation-dags"]["level"] == "fail"
    past.runs.complete_if_over(*past.run)
    assert doctor.findings()["compensation-dags"]["level"] == "ok"
    past.close()


def test_a_saga_that_needs_a_person_is_named(all_seen: Scene, doctor: Doctor) -> None:
    all_seen.stopped("hotel", 1)
    all_seen.ask()
    all_seen.freeze()
    all_seen.undo_step("flight")
    undo = all_seen.undo_of("hotel")
    all_seen.compensate(undo, undo.open_actions[0], "COMPENSATION_FAILED", failed=True)
    all_seen.settle()
    found = doctor.findings()["people"]
    assert found["level"] == "warn"
    assert f"1 saga needs a person: book_trip / {all_seen.run_id} (PARTIALLY_CANCELLED)" in found["message"]


def test_an_undo_that_does_not_begin_fails(all_seen: Scene, doctor: Doctor) -> None:
    all_seen.stopped("hotel", 1)
    all_seen.ask()
    assert doctor.findings()["oldest-request"]["level"] == "ok"
    all_seen.time_passes(400)
    found = doctor.findings()["oldest-request"]
    assert found["level"] == "fail"
    assert re.search(r"waits 6 min 4\d s for its undo \(REQUESTED\), which has not begun", found["message"])
    assert found["next"] == f"airflow saga show book_trip {all_seen.run_id}"


def test_an_unmigrated_store_is_the_last_that_it_looks_at(
    store_url: str, doctor: Doctor, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres_server.create_database("unmigrated_for_doctor")
    monkeypatch.setenv("AIRFLOW_CONN_SAGA_DEFAULT", url)
    found = doctor.findings()
    assert levels(found) == {"connection": "ok", "server": "ok", "migration": "fail"}
    assert "airflow saga db migrate" in found["migration"]["message"]
    postgres_server.drop_database("unmigrated_for_doctor")


def test_a_store_that_does_not_answer_is_the_only_finding(
    store_url: str, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SAGA_DEFAULT", "postgres://ann:hush-hush@127.0.0.1:1/sagas")
    found = doctor.findings()
    assert levels(found) == {"connection": "fail"}
    assert "does not answer" in found["connection"]["message"]
    assert "hush-hush" not in json.dumps(found)
    assert doctor.code == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shared_backend, "a transaction pooler stands before"),
        (no_notifications, "notifications do not arrive"),
    ],
)
def test_what_keeps_notifications_away_is_a_warning(
    all_seen: Scene, doctor: Doctor, monkeypatch: pytest.MonkeyPatch, change: Change, message: str
) -> None:
    with relay(all_seen.url, change) as url:
        monkeypatch.setenv("AIRFLOW_CONN_SAGA_DEFAULT", url)
        forget_addresses()
        found = doctor.findings()
    assert found["notifications"]["level"] == "warn"
    assert message in found["notifications"]["message"]
    assert "by polling, within 1 s" in found["notifications"]["message"]
    assert doctor.code == 0
