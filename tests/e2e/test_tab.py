"""The tab in a real Airflow: a saga under way is stopped and undone by clicks alone, and the tab tells how it ends."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.airflow.browser import PICTURES, chromium
from tests.e2e.scene import SOON, Scene

MILLISECONDS = 1000.0


def test_a_saga_under_way_is_stopped_and_undone_by_clicks_alone(scene: Scene) -> None:
    trip = scene.trip("line")
    trip.tell("hold", "yachts")
    trip.start(a=["flights"], b=["yachts", "cars"])
    trip.await_calls("yachts")
    clicks = 0
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(60 * MILLISECONDS)
        page.goto(f"{trip.airflow.api_url}/dags/{trip.dag_id}/runs/{trip.run_id}")
        tab = page.frame_locator("iframe")
        for button in (
            page.get_by_role("link", name="Saga", exact=True),
            tab.get_by_role("button", name="Stop and undo"),
            tab.get_by_role("dialog").get_by_role("button", name="Stop and undo"),
        ):
            button.click()
            clicks += 1
        expect(tab.get_by_text("Waiting for yachts of b")).to_be_visible(timeout=60 * MILLISECONDS)
        expect(tab.get_by_role("heading", name="Stopping")).to_be_visible()
        trip.release("yachts")
        expect(tab.get_by_role("heading", name="Cancelled")).to_be_visible(timeout=SOON * MILLISECONDS)
        expect(tab.get_by_text("nothing stands")).to_be_visible()
        PICTURES.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=PICTURES / "undone.png", full_page=True)
    view = trip.must_be_undone(calls=2)
    assert str(view.saga.actor).startswith("user:")
    print(f"from the page of the run to undone: {clicks} clicks")
