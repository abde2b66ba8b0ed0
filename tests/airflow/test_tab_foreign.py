"""Foreign pages in a real browser, whose visitor is logged in to Airflow: none of them decides, or shows the tab.

Airflow is at ``localhost``. A page of another port there is of the same site, one of ``127.0.0.1`` is not. Cookie and
browser are such that the cookie goes along from either: what refuses is never the browser's own care for cookies. That
a request arrived, with the cookie, is told by Airflow's end of the wire; that the same one is heard from Airflow's own
pages is tried each time.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect, sync_playwright

from tests.airflow.browser import Served, launch_options
from tests.airflow.web import Web, api, of
from tests.store.scene import Scene

AirflowRun = Callable[..., None]
SECONDS = 1000.0
RECONCILE = "/api/v1/reconcile"
OWN = "/api/v2/version"
"""A page of Airflow's own origin that has no policy of its own, so that it may do what a foreign one does."""

# Each is run in a page with the address to post to, and needs no leave of Airflow's: no preflight comes before it.
BY_FETCH = (
    "url => fetch(url, {method: 'POST', mode: 'no-cors', credentials: 'include', body: '{}'}).catch(() => 0)"
)
UNTYPED = BY_FETCH.replace("'{}'", "new Blob(['{}'])")
BY_BEACON = "url => navigator.sendBeacon(url, '{}')"
BY_FORM = """url => {
  document.body.innerHTML = '<form method="post" enctype="text/plain"><input name="{&quot;a" value="1}"></form>'
  document.forms[0].action = url
  document.forms[0].submit()
}"""
WAYS = {"fetch": BY_FETCH, "untyped": UNTYPED, "beacon": BY_BEACON, "form": BY_FORM}
AS_JSON = """url => fetch(url, {method: 'POST', credentials: 'include', body: '{}',
  headers: {'content-type': 'application/json'}}).then(answer => answer.status, () => 'kept by the browser')"""
FRAME = """url => {
  document.body.innerHTML = '<iframe width="800" height="600"></iframe>'
  document.querySelector('iframe').src = url
}"""


@dataclass(frozen=True)
class Arrived:
    method: str
    path: str
    site: str | None
    has_cookie: bool
    status: int


class Watched:
    """An app, and what arrived at it."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.arrived: list[Arrived] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def watch(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = dict(scope["headers"])
                site, cookie = headers.get(b"sec-fetch-site"), headers.get(b"cookie", b"")
                self.arrived.append(
                    Arrived(
                        scope["method"],
                        scope["path"],
                        site.decode() if site else None,
                        b"_token=" in cookie,
                        message["status"],
                    )
                )
            await send(message)

        await self._app(scope, receive, watch)

    def of(self, method: str, path: str) -> list[Arrived]:
        return [each for each in self.arrived if (each.method, each.path) == (method, f"/saga{path}")]


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    """Of a visitor whose browser sends cookies to other sites too, which chromium has to be told in a profile."""
    profile = tmp_path_factory.mktemp("profile")
    (profile / "Default").mkdir()
    preferences = {"profile": {"block_third_party_cookies": False, "cookie_controls_mode": 0}}
    (profile / "Default" / "Preferences").write_text(json.dumps(preferences))
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch_persistent_context(profile, **launch_options())
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def watched(airflow_app: Any) -> Watched:
    return Watched(airflow_app)


@pytest.fixture(scope="module")
def served(watched: Watched) -> Iterator[Served]:
    server = Served(watched)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def foreign_port() -> Iterator[int]:
    """A server of somebody else on this machine, with an empty page."""

    class Empty(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>nice pictures</title><body></body>")

        def log_message(self, *args: object) -> None:
            """Nothing: the tests' own output is enough."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def page(window: BrowserContext, served: Served, web: Web, watched: Watched) -> Iterator[Page]:
    """A page of an admin, whose cookie the browser sends to Airflow from any page whatever."""
    token = {"name": "_token", "value": web.token("admin"), "domain": "localhost", "path": "/"}
    window.add_cookies([{**token, "sameSite": "None", "secure": True}])  # localhost counts as secure
    opened = window.new_page()
    opened.set_default_timeout(20 * SECONDS)
    watched.arrived.clear()
    yield opened
    opened.close()


@pytest.fixture(params=["same-site", "cross-site"])
def foreign(request: pytest.FixtureRequest, page: Page, foreign_port: int) -> str:
    """The window is at a foreign page, of this relation to Airflow."""
    host = "localhost" if request.param == "same-site" else "127.0.0.1"
    page.goto(f"http://{host}:{foreign_port}/")
    return str(request.param)


@pytest.fixture
def missed(scene: Scene, airflow_run: AirflowRun) -> Scene:
    """A saga that still runs as far as the store knows; a pass of the reconciler would have it undone."""
    airflow_run(*scene.run, state="failed")
    scene.stopped("flight", 1)
    return scene


def posted(page: Page, watched: Watched, way: str, url: str, path: str) -> Arrived:
    """Post by this way, and tell how it arrived."""
    page.evaluate(WAYS[way], f"{url}/saga{path}")
    comes_true(page, lambda: bool(watched.of("POST", path)))
    if way == "form":
        page.wait_for_url(f"{url}/saga{path}")  # where it leads; to go elsewhere meanwhile would break it off
    return watched.of("POST", path)[-1]


def comes_true(page: Page, is_so: Callable[[], bool]) -> None:
    """Playwright's events come while it waits, so this waits by its clock."""
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        page.wait_for_timeout(20)


@pytest.mark.parametrize("way", WAYS)
def test_a_foreign_page_decides_nothing_where_a_page_of_airflows_does(
    page: Page, foreign: str, served: Served, watched: Watched, missed: Scene, way: str
) -> None:
    """By a route that reads no body, so that nothing but the rule stands between the page and what it wants."""
    assert posted(page, watched, way, served.url, RECONCILE) == Arrived(
        "POST", f"/saga{RECONCILE}", foreign, True, 403
    )
    assert (missed.saga.state, missed.view.requests) == ("RUNNING", ())
    watched.arrived.clear()
    page.goto(f"{served.url}{OWN}")
    assert posted(page, watched, way, served.url, RECONCILE) == Arrived(
        "POST", f"/saga{RECONCILE}", "same-origin", True, 200
    )
    assert (missed.saga.state, len(missed.view.requests)) == ("FAILED", 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_foreign_page_cannot_cancel(
    page: Page, foreign: str, served: Served, watched: Watched, missed: Scene, way: str
) -> None:
    path = api(missed.run, "cancel")
    assert posted(page, watched, way, served.url, path) == Arrived("POST", f"/saga{path}", foreign, True, 403)
    assert (missed.saga.state, missed.view.requests) == ("RUNNING", ())


def test_json_that_a_foreign_page_wants_to_send_is_asked_about_first_and_kept_back(
    page: Page, foreign: str, served: Served, watched: Watched, missed: Scene
) -> None:
    path = api(missed.run, "cancel")
    assert page.evaluate(AS_JSON, f"{served.url}/saga{path}") == "kept by the browser"
    assert len(watched.of("OPTIONS", path)) == 1
    assert watched.of("POST", path) == []
    assert missed.saga.state == "RUNNING"
    page.goto(f"{served.url}{OWN}")
    assert page.evaluate(AS_JSON, f"{served.url}/saga{path}") == 200
    assert missed.saga.state == "CANCELLING"


def test_a_foreign_page_cannot_show_the_tab_in_a_frame_where_a_page_of_airflows_can(
    page: Page, foreign: str, served: Served, watched: Watched, missed: Scene
) -> None:
    """Framed, its buttons could be laid under something that a visitor wants to click."""
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text))
    page.evaluate(FRAME, f"{served.url}/saga{of(missed.run)}")
    comes_true(page, lambda: any("frame-ancestors" in each for each in complaints))
    comes_true(page, lambda: page.main_frame.child_frames[0].url.startswith("chrome-error:"))
    (arrived,) = watched.of("GET", of(missed.run))
    assert (arrived.site, arrived.has_cookie, arrived.status) == (foreign, True, 200)
    assert page.frame_locator("iframe").get_by_role("button", name="Stop and undo").count() == 0
    page.goto(f"{served.url}{OWN}")
    page.evaluate(FRAME, f"{served.url}/saga{of(missed.run)}")
    expect(page.frame_locator("iframe").get_by_role("button", name="Stop and undo")).to_be_visible()
