"""Who may what with FAB's auth manager, whose roles and rights are rows, and finer than those of the simple one."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator

import pytest
from httpx import Client

from tests.airflow.fab import PASSWORD, USERS, FabAirflow
from tests.airflow.web import api, of
from tests.conftest import TEMPLATE
from tests.store.scene import Scene
from tests.support.postgres import PostgresServer

SEES = ("page", "show", "list", "plan")
DECIDES = ("cancel", "undo", "resolve", "release")
OF_ALL = ("doctor", "reconcile", "prune")
MAY = {
    "viewer": {*SEES},
    "user": {*SEES, *DECIDES, "reconcile", "prune"},
    "op": {*SEES, *DECIDES, *OF_ALL},
    "admin": {*SEES, *DECIDES, *OF_ALL},
    "one_dag": {*SEES, *DECIDES},
    "its_runs": {*SEES, *DECIDES},
    "half": {*SEES},
    "no_runs": {"list"},
}
"""What gets 200. Each may ask for the list: in it is what one may see."""


@pytest.fixture(scope="module")
def fab(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FabAirflow]:
    name = f"fab_{uuid.uuid4().hex}"
    server = FabAirflow(
        tmp_path_factory.mktemp("fab") / "home", postgres_server.create_database(name, template=TEMPLATE)
    )
    server.start()
    yield server
    server.stop()
    postgres_server.drop_database(name)


class Scenes:
    """Sagas, each in the state in which one verb has something to do."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._played: list[Scene] = []

    def close(self) -> None:
        for scene in self._played:
            scene.close()

    def new(self, dag_id: str = "book_trip") -> Scene:
        self._played.append(Scene(self._url, f"manual__{uuid.uuid4().hex[:8]}", dag_id))
        return self._played[-1]

    def running(self, dag_id: str = "book_trip") -> Scene:
        scene = self.new(dag_id)
        scene.act(scene.attach(), 1)
        return scene

    def completed(self) -> Scene:
        scene = self.new()
        scene.ran("flight", 1)
        scene.runs.complete_if_over(*scene.run)
        return scene

    def in_doubt(self) -> Scene:
        scene = self.new()
        step = scene.attach()
        scene.begin(step)
        scene.end(step, 1, "IN_DOUBT", own=True, error="no answer")
        assert scene.steps.stop_if_held(step)
        return scene

    def held(self) -> Scene:
        scene = self.new()
        scene.stopped("flight", 1)
        scene.hint(cause="lost_worker")
        assert scene.sweeps.hold_if_mass_outage(causes=["lost_worker"], threshold=0, window_seconds=60) == 1
        return scene


@pytest.fixture
def scenes(fab: FabAirflow) -> Iterator[Scenes]:
    made = Scenes(fab.store_url)
    yield made
    made.close()


@pytest.mark.parametrize("user", USERS)
def test_each_role_may_what_its_rights_say_and_no_more(fab: FabAirflow, scenes: Scenes, user: str) -> None:
    statuses = _statuses(fab, scenes, user)
    assert statuses == {name: 200 if name in MAY[user] else 403 for name in statuses}
    assert set(statuses) == {*SEES, *DECIDES, *OF_ALL}


def _statuses(fab: FabAirflow, scenes: Scenes, user: str) -> dict[str, int]:
    """What each request was answered with; the one that deletes comes last."""
    seen, doubt = scenes.running(), scenes.in_doubt()
    resolve = api(doubt.run, "actions", str(doubt.action().action_id), "resolve")
    answers = {
        "page": fab.get(of(seen.run), user),
        "show": fab.get(api(seen.run), user),
        "list": fab.get("/api/v1/sagas", user),
        "plan": fab.get(api(seen.run, "plan"), user),
        "cancel": fab.post(api(scenes.running().run, "cancel"), {}, user),
        "undo": fab.post(api(scenes.completed().run, "undo"), {}, user),
        "resolve": fab.post(resolve, {"answer": "happened", "note": "saw it"}, user),
        "release": fab.post(api(scenes.held().run, "release"), {}, user),
        "doctor": fab.get("/api/v1/doctor", user),
        "reconcile": fab.post("/api/v1/reconcile", {}, user),
        "prune": fab.post("/api/v1/prune", {"yes": True}, user),
    }
    return {name: answer.status_code for name, answer in answers.items()}


@pytest.mark.parametrize("user", ["user", "one_dag"])
def test_the_history_names_the_user_as_fab_does(fab: FabAirflow, scenes: Scenes, user: str) -> None:
    scene = scenes.running()
    assert fab.post(api(scene.run, "cancel"), {"reason": "wrong dates"}, user).status_code == 200
    assert (scene.request.actor, scene.request.reason) == (f"user:{user}", "wrong dates")


@pytest.mark.parametrize("user", ["one_dag", "its_runs"])
def test_a_right_to_one_dag_is_none_to_another(fab: FabAirflow, scenes: Scenes, user: str) -> None:
    other = scenes.running("no_saga")
    for path in (of(other.run), api(other.run), api(other.run, "plan"), "/dags/no_saga"):
        assert fab.get(path, user).status_code == 403
    assert fab.post(api(other.run, "cancel"), {}, user).status_code == 403
    assert other.saga.state == "RUNNING"


@pytest.mark.parametrize(
    ("user", "dags"),
    [
        ("viewer", {"book_trip", "no_saga"}),
        ("one_dag", {"book_trip"}),
        ("its_runs", {"book_trip"}),
        ("half", {"book_trip"}),
        ("no_runs", set()),
    ],
)
def test_a_list_has_the_dags_whose_runs_one_may_see(
    fab: FabAirflow, scenes: Scenes, user: str, dags: set[str]
) -> None:
    ours, theirs = scenes.running(), scenes.running("no_saga")
    rows = fab.get("/api/v1/sagas?limit=1000", user).json()["sagas"]
    assert {row["dag_id"] for row in rows} == dags
    page = fab.get("/", user)
    assert page.status_code == 200
    for scene in (ours, theirs):
        assert (scene.run_id in page.text) == (scene.dag_id in dags)


def test_fabs_cookie_counts_on_airflows_own_pages_only(fab: FabAirflow, scenes: Scenes) -> None:
    scene = scenes.running()
    cookie = {"cookie": f"_token={fab.token('user')}"}
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        path = f"/saga{api(scene.run, 'cancel')}"
        answer = fab.client.post(path, json={}, headers={**cookie, "sec-fetch-site": site})
        assert answer.status_code == status
    assert scene.request.actor == "user:user"


def test_who_logs_in_by_fabs_form_sees_and_decides(fab: FabAirflow, scenes: Scenes) -> None:
    """As a browser does it, to which FAB gives Airflow's cookie."""
    scene = scenes.running()
    with Client(base_url=fab.client.base_url, follow_redirects=True) as browser:
        token = re.search(r'name="csrf_token"[^>]*value="([^"]+)"', browser.get("/auth/login/").text)
        assert token is not None
        form = {"username": "user", "password": PASSWORD, "csrf_token": token.group(1)}
        browser.post("/auth/login/", data=form)
        assert "Stop and undo" in browser.get(f"/saga{of(scene.run)}").text
        own = {"sec-fetch-site": "same-origin"}
        assert browser.post(f"/saga{api(scene.run, 'cancel')}", json={}, headers=own).status_code == 200
    assert scene.request.actor == "user:user"


def test_a_stranger_is_not_let_in(fab: FabAirflow) -> None:
    for path in ("/", "/api/v1/sagas", "/api/v1/doctor"):
        assert fab.client.get(f"/saga{path}").status_code == 401
    wrong = fab.client.post("/auth/token", json={"username": "admin", "password": "wrong"})
    assert wrong.status_code == 401
