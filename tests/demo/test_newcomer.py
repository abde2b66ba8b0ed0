"""Somebody who has never seen this: from the words of `make demo-up` to "undone" by clicks alone, and each is counted.

Only the address of the UI is typed; everything else is a link or a button that stands on the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, FrameLocator, Locator, Page, expect

from tests.airflow.browser import PICTURES, chromium
from tests.demo.program import SOON_SECONDS, Demo, copy_of_demo
from tests.support.airflow_api import PATIENCE

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(500 * PATIENCE)]

MILLISECONDS = 1000.0
SECONDS_TO_BE_UNDONE = 90 * PATIENCE
LOOKS_FOR_SECONDS = 4 * PATIENCE


class Newcomer:
    """A browser before what `make demo-up` has left running."""

    def __init__(self, browser: Browser, url: str, route: str) -> None:
        self._route = route
        self.page: Page = browser.new_page(viewport={"width": 1280, "height": 900})
        self.page.set_default_timeout(30 * PATIENCE * MILLISECONDS)
        self.clicks = 0
        self._pictures = 0
        self.page.goto(url)

    @property
    def tab(self) -> FrameLocator:
        return self.page.frame_locator("iframe")

    def click(self, what: Locator) -> None:
        what.click()
        self.clicks += 1

    def looks(self, text: str) -> None:
        """Look before pressing: Airflow's page closes its own dialog again while it is still loading."""
        expect(self.page.get_by_text(text).first).to_be_visible()
        self.page.wait_for_timeout(LOOKS_FOR_SECONDS * MILLISECONDS)

    def answer(self, question: str, button: str, note: str | None = None) -> None:
        """Press a button of the tab, and then the one of the question that it asks."""
        self.click(self.tab.get_by_role("button", name=question, exact=True))
        asked = self.tab.get_by_role("dialog")
        if note is not None:
            asked.get_by_role("textbox").fill(note)
        self.picture(f"asked-{button.lower().replace(' ', '-')}")
        self.click(asked.get_by_role("button", name=button, exact=True))

    def sees(self, heading: str, seconds: float = 30 * PATIENCE) -> None:
        shown = self.tab.get_by_role("heading", name=heading, exact=True)
        expect(shown).to_be_visible(timeout=seconds * MILLISECONDS)
        self.picture(heading.lower().replace(" ", "-"))

    def picture(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self._pictures += 1
        self.page.screenshot(path=PICTURES / f"newcomer-{self._route}-{self._pictures}-{name}.png")


@pytest.fixture(scope="module")
def demo_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """What it has left running is stopped, whatever becomes of the tests."""
    checkout = copy_of_demo(tmp_path_factory.mktemp("checkout"))
    up = Demo(checkout, "--up")
    try:
        assert up.finish() == 0, up.text
        yield up
    finally:
        assert Demo(checkout, "--down").finish(SOON_SECONDS) == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def newcomer(request: pytest.FixtureRequest, demo_up: Demo, browser: Browser) -> Iterator[Newcomer]:
    """Opens the address that the demo calls the UI; it says that there is no login."""
    said = re.search(r"UI +(http\S+) \(no login", demo_up.text)
    assert said, demo_up.text
    came = Newcomer(browser, said[1], request.node.name.removeprefix("test_a_newcomer_").partition("_")[0])
    yield came
    came.page.close()


def test_a_newcomer_triggers_a_run_stops_it_in_the_tab_and_reads_that_nothing_stands(
    newcomer: Newcomer,
) -> None:
    page = newcomer.page
    newcomer.click(page.get_by_role("link", name="Dags", exact=True).first)
    newcomer.click(page.get_by_role("link", name="book_trip", exact=True))
    newcomer.looks("Latest Run")
    newcomer.click(page.get_by_role("button", name="Trigger").first)
    newcomer.click(page.get_by_role("dialog").get_by_role("button", name="Trigger", exact=True))
    # Airflow shows the new run by itself; for a moment the tabs are still those of the DAG, which has a Saga tab too.
    newcomer.click(page.locator("a[href*='/runs/'][href$='/plugin/saga-run']"))
    newcomer.sees("Running")
    newcomer.answer("Stop and undo…", "Stop and undo")
    newcomer.sees("Stopping")
    newcomer.sees("Cancelled", SECONDS_TO_BE_UNDONE)
    expect(newcomer.tab.get_by_text("nothing stands")).to_be_visible()
    print(f"from make demo-up to undone: {newcomer.clicks} clicks")
    assert newcomer.clicks <= 7


def test_a_newcomer_finds_what_is_booked_and_undoes_it_by_the_plan_that_is_shown(newcomer: Newcomer) -> None:
    newcomer.click(newcomer.page.get_by_role("link", name="1 saga needs a person"))
    newcomer.click(newcomer.tab.get_by_role("link", name="demo-1-completes"))
    newcomer.sees("Completed")
    newcomer.answer("Undo…", "Undo")
    newcomer.sees("Cancelled", SECONDS_TO_BE_UNDONE)
    expect(newcomer.tab.get_by_text("nothing stands")).to_be_visible()
    print(f"from make demo-up to the undo of what was booked: {newcomer.clicks} clicks")
    assert newcomer.clicks <= 4


def test_a_newcomer_is_led_to_what_needs_a_person_and_settles_it(newcomer: Newcomer) -> None:
    newcomer.click(newcomer.page.get_by_role("link", name="1 saga needs a person"))
    newcomer.sees("1 needs a person")
    newcomer.click(newcomer.tab.get_by_role("link", name="demo-3-refund-later"))
    newcomer.sees("Partly cancelled")
    newcomer.answer("Let it stand…", "Let it stand", note="told the traveller by phone")
    newcomer.sees("Cancelled")
    expect(newcomer.tab.get_by_text("nothing else stands")).to_be_visible()
    print(f"from make demo-up to what a person settles: {newcomer.clicks} clicks")
    assert newcomer.clicks <= 4


def test_a_newcomer_follows_the_addresses_that_the_demo_prints(demo_up: Demo, newcomer: Newcomer) -> None:
    """After the others, which have done by now what each line invites to."""
    printed = dict(re.findall(r"^  (\w[\w ]*?) {2,}(http\S+)", demo_up.text, re.MULTILINE))
    assert list(printed) == ["UI", "stop one", "undo one", "settle", "all"]
    for name, heading in (("undo one", "Cancelled"), ("settle", "Cancelled"), ("all", "Sagas")):
        newcomer.page.goto(printed[name])
        newcomer.sees(heading)
    newcomer.page.goto(printed["stop one"])
    expect(newcomer.page.get_by_role("button", name="Trigger").first).to_be_visible()
