"""A real browser before the API server's own app: the whole UI of Airflow, with the tab in its frame."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvicorn
from playwright.sync_api import Browser, BrowserContext, FrameLocator, Page, sync_playwright

from tests.airflow.web import Web

PICTURES = Path(__file__).resolve().parents[2] / ".run" / "screenshots"
START_SECONDS = 30.0


class Served:
    """The app behind a port of this machine; it can be taken away and brought back, as a restarted API server."""

    def __init__(self, app: Any) -> None:
        self._app = app
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}"

    def start(self) -> None:
        config = uvicorn.Config(
            self._app, host="127.0.0.1", port=self.port, log_level="warning", lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not self._server.started and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self._server.started

    def stop(self) -> None:
        self._server.force_exit = True
        self._server.should_exit = True
        self._thread.join(START_SECONDS)


def launch_options() -> dict[str, Any]:
    """For Debian's chromium: the one that playwright would bring is not needed."""
    path = shutil.which("chromium")
    assert path is not None, "there is no chromium; run: python -m tests.support.install_services"
    return {"executable_path": path, "args": ["--no-sandbox"]}


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**launch_options())
        yield browser
        browser.close()


class Visitor:
    """Somebody who is logged in, with a window of their own."""

    def __init__(self, browser: Browser, served: Served, web: Web, role: str, **more: Any) -> None:
        size = {"width": more.pop("width", 1280), "height": 1000}
        self.context: BrowserContext = browser.new_context(viewport=size, locale="en-GB", **more)
        self.context.add_cookies([{"name": "_token", "value": web.token(role), "url": served.url}])
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self._url = served.url

    def open_tab(self, run: tuple[str, str]) -> FrameLocator:
        """The Saga tab of a run, in Airflow's own page."""
        self.page.goto(
            f"{self._url}/dags/{quote(run[0])}/runs/{quote(run[1])}/plugin/saga-run", wait_until="load"
        )
        return self.tab

    def open_page(self, path: str) -> Page:
        """A page of ours without Airflow's around it."""
        self.page.goto(f"{self._url}/saga{path}", wait_until="load")
        return self.page

    @property
    def tab(self) -> FrameLocator:
        return self.page.frame_locator("iframe")

    def picture(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=PICTURES / f"{name}.png", full_page=True)

    def darken(self) -> None:
        """By the key under which Airflow's UI keeps the theme, as its own button does it."""
        self.page.evaluate("localStorage.setItem('theme', 'dark')")
        self.page.reload(wait_until="load")
