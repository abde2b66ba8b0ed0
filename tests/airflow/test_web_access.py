"""Who gets in, who may decide, and from which page a decision may come."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.airflow.web import HOST, Web, api, of
from tests.store.scene import Scene

AirflowRun = Callable[..., None]
VERBS = ("cancel", "undo", "rewind", "release", "probe", "actions/1/resolve", "actions/1/retry")
OTHER_SITE = {"sec-fetch-site": "cross-site", "origin": "https://evil.example"}
OTHER_PORT = {"sec-fetch-site": "same-site", "origin": "http://testserver:9000"}


def routes(web: Web) -> Iterator[tuple[str, str]]:
    for route in web.plugin_app.routes:
        for method in sorted(route.methods):
            path = route.path.replace("{action}", "1").replace("{name}", "saga.css")
            yield method, path.replace("{dag_id}", "book_trip").replace("{run_id}", "run_1")


def test_every_route_asks_who_is_there(web: Web) -> None:
    walked = list(routes(web))
    assert len(walked) >= 16
    assert {path for _, path in walked} >= {
        "/",
        "/static/saga.css",
        *(f"/api/v1/{name}" for name in ("sagas", "openapi.json", "doctor", "reconcile", "prune")),
    }
    for method, path in walked:
        answer = web.call(method, path, None, headers={"sec-fetch-site": "same-origin"})
        assert answer.status_code == 401, f"{method} {path} answered {answer.status_code} to a stranger"


def test_every_decision_is_kept_in_airflows_audit_log(web: Web) -> None:
    deciding = [route for route in web.plugin_app.routes if "POST" in route.methods]
    assert len(deciding) >= len(VERBS)
    for route in deciding:
        logged = [each.call.__qualname__ for each in route.dependant.dependencies if each.call]
        assert any(name.startswith("action_logging") for name in logged), route.path


def test_nothing_is_mounted_past_the_check(web: Web) -> None:
    """A mount, such as one of static files, would not run the app's dependencies."""
    assert all(hasattr(route, "dependant") for route in web.plugin_app.routes)


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json"])
def test_no_page_of_documentation_is_open(web: Web, path: str) -> None:
    assert web.get(path, None).status_code in (401, 404)


def test_a_viewer_sees_but_does_not_decide(web: Web, scene: Scene, airflow_run: AirflowRun) -> None:
    airflow_run(*scene.run)
    scene.act(scene.attach(), 1)
    assert web.get(api(scene.run)).status_code == 200
    assert web.get(of(scene.run)).status_code == 200
    for verb in VERBS:
        body = (
            {"note": "n", "answer": "undone"}
            if "resolve" in verb
            else {"to": "x"}
            if verb == "rewind"
            else {}
        )
        answer = web.post(api(scene.run, verb), body, role="viewer")
        assert answer.status_code == 403, verb
    assert scene.saga.state == "RUNNING"


@pytest.mark.parametrize("role", ["user", "op", "admin"])
def test_who_may_edit_runs_may_decide(web: Web, scene: Scene, airflow_run: AirflowRun, role: str) -> None:
    airflow_run(*scene.run)
    scene.act(scene.attach(), 1)
    answer = web.post(api(scene.run, "cancel"), {"reason": "wrong dates"}, role=role)
    assert (answer.status_code, answer.json()["verdict"]) == (200, "cancelling")
    assert (scene.request.actor, scene.request.reason) == (f"user:{role}_1", "wrong dates")


@pytest.mark.parametrize("headers", [OTHER_SITE, OTHER_PORT, {"origin": "http://evil.example"}, {}])
def test_a_foreign_page_cannot_decide_with_the_viewers_cookie(
    web: Web, scene: Scene, airflow_run: AirflowRun, headers: dict[str, str]
) -> None:
    airflow_run(*scene.run)
    scene.act(scene.attach(), 1)
    answer = web.browse("POST", api(scene.run, "cancel"), headers=headers, json={})
    assert answer.status_code == 403
    assert "another page" in answer.json()["message"]
    assert scene.saga.state == "RUNNING"


def test_basic_credentials_that_a_browser_adds_by_itself_do_not_count_as_a_token(
    web: Web, scene: Scene, airflow_run: AirflowRun
) -> None:
    airflow_run(*scene.run)
    scene.act(scene.attach(), 1)
    headers = {**OTHER_SITE, "authorization": "Basic dXNlcjpwYXNz"}
    assert web.browse("POST", api(scene.run, "cancel"), headers=headers, json={}).status_code == 403
    assert scene.saga.state == "RUNNING"


@pytest.mark.parametrize("headers", [{"sec-fetch-site": "same-origin"}, {"origin": HOST}])
def test_our_own_page_can_decide(
    web: Web, scene: Scene, airflow_run: AirflowRun, headers: dict[str, str]
) -> None:
    airflow_run(*scene.run)
    scene.act(scene.attach(), 1)
    assert web.browse("POST", api(scene.run, "cancel"), headers=headers, json={}).status_code == 200
    assert scene.saga.state == "CANCELLING"


def test_a_long_body_is_not_read(web: Web, scene: Scene) -> None:
    answer = web.post(api(scene.run, "cancel"), {"reason": "x" * 2_000_000})
    assert answer.status_code == 413
    assert web.post(api(scene.run, "cancel"), {"reason": "x" * 5000}).status_code == 422
    chunks = web.call("POST", api(scene.run, "cancel"), "user", content=iter([b"{}"]))
    assert chunks.status_code == 411


def test_every_answer_forbids_scripts_of_others(web: Web, scene: Scene) -> None:
    for answer in (web.get("/"), web.get("/", None), web.get(api(scene.run)), web.get("/static/saga.js")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_list_has_only_what_the_viewer_may_see(
    web: Web, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_saga.plugin.web import access

    scene.act(scene.attach(), 1)
    listed = web.get("/api/v1/sagas").json()["sagas"]
    assert [row["run_id"] for row in listed] == [scene.run_id]
    monkeypatch.setattr(access, "visible_dags", lambda user: ["no_saga"])
    assert web.get("/api/v1/sagas").json() == {"sagas": []}
    assert web.get("/api/v1/sagas?dag_id=book_trip").json() == {"sagas": []}
    assert scene.run_id not in web.get("/").text
