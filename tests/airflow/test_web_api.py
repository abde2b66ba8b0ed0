"""The API: the same verbs and the same data as the commands, and a status that says what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.airflow.web import Web, api
from tests.store.scene import Scene

AirflowRun = Callable[..., None]


@pytest.fixture
def known(scene: Scene, airflow_run: AirflowRun) -> Scene:
    airflow_run(*scene.run)
    return scene


def test_show_gives_the_data_of_the_command(
    web: Web, partly: Scene, airflow_saga_cli: Callable[..., Any]
) -> None:
    told = web.get(api(partly.run)).json()
    said = json.loads(airflow_saga_cli("show", *partly.run, "--output", "json").out)
    for each in (*told["timeline"], *said["timeline"]):
        del each["seconds"]  # of an undo under way: how long so far
    assert told == said


def test_the_list_gives_the_data_of_the_command(
    web: Web, partly: Scene, airflow_saga_cli: Callable[..., Any]
) -> None:
    listed = web.get("/api/v1/sagas").json()["sagas"]
    assert listed == json.loads(airflow_saga_cli("list", "--output", "json").out)
    assert [row["needs"] for row in listed] == ["2 effects to settle, or to undo again"]
    assert web.get("/api/v1/sagas?state=RUNNING").json() == {"sagas": []}
    assert web.get("/api/v1/sagas?state=NONSENSE").status_code == 422


def test_what_is_not_there_is_not_found(web: Web, scene: Scene) -> None:
    for path in ("", "/plan"):
        answer = web.get(api(("book_trip", "nobody"), *([path[1:]] if path else [])))
        assert (answer.status_code, "airflow saga list" in answer.json()["message"]) == (404, True)
    assert web.post(api(("book_trip", "nobody"), "cancel")).status_code == 404
    assert scene.reader.find("book_trip", "nobody") is None


def test_cancel_asked_twice_is_answered_twice_with_one_request(web: Web, known: Scene) -> None:
    known.stopped("flight", 1)
    first = web.post(api(known.run, "cancel"), {"reason": "wrong dates"}).json()
    again = web.post(api(known.run, "cancel"), role="admin")
    assert first["undo_run"]["triggered"] is True
    assert (again.status_code, again.json()["verdict"]) == (200, "already")
    assert "asked for by user:user_1" in again.json()["message"]
    assert len(known.view.requests) == 1


def test_cancel_keep_and_then_undo(web: Web, known: Scene) -> None:
    known.attach()
    assert web.post(api(known.run, "cancel"), {"keep": True}).json()["verdict"] == "keeping"
    assert (known.saga.state, known.saga.mode) == ("CANCELLING", "keep")
    assert web.post(api(known.run, "undo")).json()["verdict"] == "cancelling"


def test_a_refusal_is_a_conflict_that_says_why(web: Web, scene: Scene, airflow_run: AirflowRun) -> None:
    airflow_run(*scene.run, state="success")
    scene.ran("flight", 1)
    answer = web.post(api(scene.run, "cancel"))
    assert answer.status_code == 409
    assert "airflow saga undo" in answer.json()["message"]
    assert scene.view.requests == ()


def test_a_misspelt_field_is_refused_before_anything_is_decided(web: Web, known: Scene) -> None:
    known.attach()
    answer = web.post(api(known.run, "cancel"), {"kepe": True, "reason": "s3cret-value"})
    assert answer.status_code == 422
    assert "kepe" in answer.json()["message"]
    assert "s3cret-value" not in answer.text
    assert web.post(api(known.run, "cancel"), {"keep": True, "now": True}).status_code == 400
    assert known.saga.state == "RUNNING"


def test_a_signed_plan_is_carried_out_or_refused(web: Web, known: Scene) -> None:
    known.ran("flight", 1, 2)
    plan = web.get(api(known.run, "plan")).json()
    assert [(row["order"], row["name"]) for row in plan["actions"]] == [(1, "book"), (2, "book")]
    known.ran("hotel", 1, after=["flight"])
    stale = web.post(api(known.run, "undo"), {"plan": plan["hash"]})
    assert stale.status_code == 409
    assert known.view.requests == ()
    fresh = web.get(api(known.run, "plan")).json()["hash"]
    assert web.post(api(known.run, "undo"), {"plan": fresh}).status_code == 200
    assert known.request.actor == "user:user_1"


def test_a_part_is_undone_by_its_signed_plan(web: Web, scene: Scene, airflow_run: AirflowRun) -> None:
    airflow_run(*scene.run, state="success")
    scene.ran("flight", 1, 2)
    scene.ran("hotel", 1, after=["flight"])
    second = scene.action(2).action_id
    plan = web.get(f"{api(scene.run, 'plan')}?from_action={second}").json()
    assert [row["action"] for row in plan["actions"]] == [scene.action(1, "hotel").action_id, second]
    body = {"from_action": second, "plan": plan["hash"]}
    assert web.post(api(scene.run, "undo"), {**body, "now": True}).status_code == 400
    answer = web.post(api(scene.run, "undo"), body).json()
    assert (answer["verdict"], answer["request"]["whole_run"]) == ("cancelling", False)
    assert answer["undo_run"]["triggered"] is True
    assert web.post(api(scene.run, "undo"), body, role="op").json()["verdict"] == "already"
    assert scene.saga.actor == "user:user_1"


def test_one_compensation_is_tried_again(web: Web, partly: Scene, airflow_run: AirflowRun) -> None:
    airflow_run(*partly.run, state="failed")
    charge, mail = partly.action(1, "pay").action_id, partly.action(2, "hotel").action_id
    refused = web.post(api(partly.run, "actions", str(mail), "retry"))
    assert (refused.status_code, "NON_COMPENSABLE" in refused.json()["message"]) == (409, True)
    asked = web.post(api(partly.run, "actions", str(charge), "retry"), {"reason": "the bank is back"}).json()
    assert (asked["verdict"], asked["request"]["cause"], asked["undo_run"]["triggered"]) == (
        "cancelling",
        "retry",
        True,
    )
    assert partly.request.reason == "the bank is back"


def test_the_probes_are_asked_by_a_run_of_the_compensation_dag(web: Web, known: Scene) -> None:
    refused = web.post(api(known.run, "probe"))
    assert refused.status_code == 404
    step = known.attach()
    assert web.post(api(known.run, "probe")).status_code == 409
    known.begin(step)
    known.end(step, state="IN_DOUBT")
    answer = web.post(api(known.run, "probe")).json()
    assert answer["verdict"] == "asking"
    run = web.airflow(f"/dags/book_trip__compensation/dagRuns/{answer['undo_run']['run_id']}").json()
    assert run["conf"] == {"run_id": known.run_id, "probe": "1"}
    assert (run["triggering_user_name"], known.view.requests) == ("user_1", ())


def test_the_plan_tells_what_a_probe_said_last(web: Web, known: Scene) -> None:
    step = known.attach()
    known.begin(step)
    known.end(step, state="IN_DOUBT")
    assert known.steps.stop_if_held(step)
    plan = api(known.run, "plan")
    assert web.get(plan).json()["actions"][0]["probe"] is None
    for said in ("it cannot tell", "it took effect"):
        known.resolves.note_probe(known.action(), said, "ann")
    assert web.get(plan).json()["actions"][0]["probe"].startswith("it took effect (asked at 20")
    assert "its probe: it took effect" in web.get(api(known.run)).json()["standing"][0]["why"]


def test_one_of_two_who_resolve_hears_who_was_first(web: Web, partly: Scene) -> None:
    charge = partly.action(1, "pay").action_id
    path = api(partly.run, "actions", str(charge), "resolve")
    told = {"answer": "accepted", "note": "the bank said so"}
    assert web.post(path, told).status_code == 200
    late = web.post(path, {"answer": "undone", "note": "refunded by hand"}, role="op")
    assert late.status_code == 409
    assert "user:user_1: the bank said so" in late.json()["message"]
    assert partly.action(1, "pay").state == "ACCEPTED"


def test_an_action_in_doubt_that_happened_keeps_its_result(web: Web, known: Scene) -> None:
    step = known.attach()
    known.begin(step)
    known.end(step, state="IN_DOUBT")
    assert known.steps.stop_if_held(step)
    path = api(known.run, "actions", str(known.action().action_id), "resolve")
    body = {"answer": "happened", "note": "it is on the statement", "result": {"id": "b-1"}}
    assert web.post(path, body).status_code == 200
    assert (known.action().state, web.get(api(known.run)).json()["actions"][0]["result"]) == (
        "DONE",
        {"id": "b-1"},
    )


def test_airflows_audit_log_keeps_who_decided_what(web: Web, known: Scene) -> None:
    from airflow.models.log import Log
    from airflow.utils.session import create_session
    from sqlalchemy import select

    known.attach()
    web.post(api(known.run, "cancel"), {"reason": "wrong dates"})
    with create_session(scoped=False) as session:
        row = session.scalars(select(Log).where(Log.run_id == known.run_id, Log.event == "saga_cancel")).one()
        assert (row.owner, row.dag_id) == ("user_1", "book_trip")
        assert json.loads(row.extra)["reason"] == "wrong dates"


def test_a_store_that_is_away_is_said_to_be(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_saga.settings import forget_addresses

    monkeypatch.setenv("AIRFLOW_CONN_SAGA_DEFAULT", "postgresql://u:pw-4711@127.0.0.1:9/saga")
    forget_addresses()
    for path in ("/api/v1/sagas", "/", "/dags/book_trip/runs/run_1"):
        answer = web.get(path)
        assert answer.status_code == 503
        assert "does not answer" in answer.text
        assert "pw-4711" not in answer.text


def test_the_description_of_the_api_names_every_verb(web: Web) -> None:
    described = web.get("/api/v1/openapi.json").json()
    run = "/api/v1/dags/{dag_id}/runs/{run_id}"
    assert set(described["paths"]) == {
        "/api/v1/sagas",
        "/api/v1/doctor",
        "/api/v1/reconcile",
        "/api/v1/prune",
        run,
        *(
            f"{run}/{verb}"
            for verb in (
                "plan",
                "cancel",
                "undo",
                "rewind",
                "release",
                "probe",
                "actions/{action}/resolve",
                "actions/{action}/retry",
            )
        ),
    }
