"""The tab in a real browser, in Airflow's own page: looked at, clicked, by keyboard, by two at once, and cut off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.airflow.browser import Served, Visitor
from tests.airflow.web import of
from tests.store.scene import Scene
from tests.support.install_services import AXE, NODE_HOME

AirflowRun = Callable[..., None]
SECONDS = 1000.0


def test_the_tab_is_there_in_airflows_own_page_and_takes_on_its_theme(
    visit: Callable[..., Visitor], partly: Scene, airflow_run: AirflowRun
) -> None:
    airflow_run(*partly.run, state="failed")
    visitor = visit()
    tab = visitor.open_tab(partly.run)
    expect(tab.get_by_role("heading", name="Partly cancelled")).to_be_visible(timeout=30 * SECONDS)
    visitor.picture("tab-light")
    visitor.darken()
    expect(tab.locator("html.dark")).to_have_count(1, timeout=30 * SECONDS)
    expect(tab.get_by_text("charge_card").first).to_be_visible()
    visitor.picture("tab-dark")


def test_a_running_saga_is_stopped_by_two_clicks_and_the_tab_follows(
    visit: Callable[..., Visitor], running: Scene
) -> None:
    visitor = visit()
    tab = visitor.open_tab(running.run)
    tab.get_by_role("button", name="Stop and undo").click(timeout=30 * SECONDS)
    dialog = tab.get_by_role("dialog", name="Stop and undo")
    expect(dialog).to_contain_text("No new action begins")
    visitor.picture("confirm")
    dialog.get_by_label("Why?").fill("wrong dates")
    dialog.get_by_role("button", name="Stop and undo").click()
    expect(tab.locator("#said")).to_contain_text("book_trip__compensation")
    expect(tab.get_by_role("heading", name="Stopping")).to_be_visible()
    expect(tab.get_by_role("button", name="Stop now")).to_be_visible()
    visitor.picture("stopping")
    assert (running.request.actor, running.request.reason) == ("user:user_1", "wrong dates")


def test_saying_not_now_decides_nothing_and_gives_the_focus_back(
    visit: Callable[..., Visitor], running: Scene
) -> None:
    page = visit().open_page(of(running.run))
    page.get_by_role("button", name="Stop and undo").click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Stop and undo")).to_be_focused()
    assert running.saga.state == "RUNNING"


def test_a_saga_is_stopped_by_keyboard_alone(visit: Callable[..., Visitor], running: Scene) -> None:
    page = visit().open_page(of(running.run))
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Stop and undo")).to_be_focused()
    for key in ("Enter", "Tab", "Tab", "Enter"):  # opens it; from the text over "Not now" to the button
        page.keyboard.press(key)
    expect(page.get_by_role("heading", name="Stopping")).to_be_visible()
    assert running.request.actor == "user:user_1"


def test_a_finished_saga_is_undone_by_the_plan_that_was_shown(
    visit: Callable[..., Visitor], scene: Scene, airflow_run: AirflowRun
) -> None:
    airflow_run(*scene.run, state="success")
    scene.finish(scene.act(scene.attach(), 1, name="book_flight"))
    scene.runs.complete_if_over(*scene.run)
    page = visit().open_page(of(scene.run))
    page.get_by_role("button", name="Undo").click()
    dialog = page.get_by_role("dialog", name="Undo")
    expect(dialog).to_contain_text("1 to take back, in this order")
    dialog.get_by_role("button", name="Undo").click()
    expect(page.get_by_role("heading", name="Stopping")).to_be_visible()
    assert scene.request.cause == "user"


def test_the_second_of_two_who_settle_is_told_who_was_first(
    visit: Callable[..., Visitor], partly: Scene
) -> None:
    first, second = visit("user").open_page(of(partly.run)), visit("admin").open_page(of(partly.run))
    charge = partly.action(1, "pay").action_id
    for page, answer, note in (
        (first, "accepted", "the bank said so"),
        (second, "undone", "refunded by hand"),
    ):
        page.locator(f"#answer-{charge}-{answer}").click()
        page.get_by_role("dialog").get_by_role("textbox").fill(note)
    first.get_by_role("dialog").locator("button.primary").click()
    expect(first.locator("#said")).to_contain_text("ACCEPTED")
    second.get_by_role("dialog").locator("button.primary").click()
    expect(second.locator("#said")).to_contain_text("user:user_1: the bank said so")
    assert partly.action(1, "pay").state == "ACCEPTED"


def test_a_viewer_sees_it_all_and_can_press_nothing(visit: Callable[..., Visitor], partly: Scene) -> None:
    page = visit("viewer").open_page(of(partly.run))
    expect(page.get_by_role("heading", name="Partly cancelled")).to_be_visible()
    expect(page.locator("button")).to_have_count(0)


def test_the_tab_says_when_airflow_is_away_and_recovers(
    visit: Callable[..., Visitor], running: Scene, served: Served
) -> None:
    page = visit().open_page(of(running.run))
    served.stop()
    try:
        expect(page.locator("#offline")).to_be_visible(timeout=30 * SECONDS)
        page.get_by_role("button", name="Stop and undo").click()
        page.get_by_role("dialog").locator("button.primary").click()
        expect(page.locator("#said")).to_contain_text("it is not known whether this was heard")
    finally:
        served.start()
    expect(page.locator("#offline")).to_be_hidden(timeout=30 * SECONDS)
    assert running.saga.state == "RUNNING"


def test_an_update_leaves_open_what_was_open_and_the_focus_where_it_was(
    visit: Callable[..., Visitor], running: Scene
) -> None:
    page = visit().open_page(of(running.run))
    more = page.locator(f"#more-{running.action().action_id}")
    more.locator("summary").click()
    running.act(running.step(), 2, name="book_hotel")
    expect(page.get_by_text("Actions (2)")).to_be_visible()
    assert more.get_attribute("open") is not None
    expect(more.locator("summary")).to_be_visible()


def test_times_are_shown_in_the_viewers_zone(visit: Callable[..., Visitor], running: Scene) -> None:
    page = visit(timezone_id="Asia/Tokyo").open_page(of(running.run))
    page.locator("details summary").first.click()
    shown = page.locator("time").first
    hour = int((shown.get_attribute("datetime") or "")[11:13])
    expect(shown).to_contain_text(f"{(hour + 9) % 24:02}:")


def test_it_is_readable_at_900_pixels(visit: Callable[..., Visitor], partly: Scene) -> None:
    visitor = visit(width=900)
    page = visitor.open_page(of(partly.run))
    visitor.picture("narrow")
    assert page.evaluate("document.documentElement.scrollWidth") <= 900


def test_the_page_of_a_task_leads_to_the_tab_of_its_step(
    visit: Callable[..., Visitor], served: Served, running: Scene
) -> None:
    visitor = visit()
    dag_id, run_id = running.run
    visitor.page.goto(f"{served.url}/dags/{dag_id}/runs/{run_id}/tasks/flight/details", wait_until="load")
    visitor.page.get_by_role("link", name="Saga", exact=True).first.click(timeout=30 * SECONDS)
    expect(visitor.tab.get_by_role("heading", name="step flight")).to_be_visible(timeout=30 * SECONDS)
    visitor.picture("step")


def test_the_home_page_says_how_many_need_a_person_and_leads_there(
    visit: Callable[..., Visitor], served: Served, partly: Scene
) -> None:
    visitor = visit()
    visitor.page.goto(f"{served.url}/", wait_until="load")
    link = visitor.page.get_by_role("link", name="1 saga needs a person")
    expect(link).to_be_visible(timeout=30 * SECONDS)
    visitor.picture("home")
    link.click()
    expect(visitor.tab.get_by_role("heading", name="1 needs a person")).to_be_visible(timeout=30 * SECONDS)
    visitor.picture("list")


def test_the_home_page_shows_nothing_where_nobody_is_needed(
    visit: Callable[..., Visitor], served: Served, running: Scene
) -> None:
    page = visit().page
    with page.expect_response(lambda answer: "waiting=true" in answer.url, timeout=30 * SECONDS):
        page.goto(f"{served.url}/", wait_until="load")
    page.wait_for_timeout(500)
    expect(page.get_by_text("a person")).to_have_count(0)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_serious_keeps_anybody_out(visit: Callable[..., Visitor], partly: Scene, theme: Any) -> None:
    """By axe-core, on each page and with the question open."""
    running = partly.another_run(f"{partly.run_id}_running")
    running.begin(running.attach(), 1, name="book_flight")
    running.cancel()
    page = visit(color_scheme=theme).open_page("/")
    for path in ("/", of(partly.run), of(running.run), of(("book_trip", "nobody"))):
        page.goto(page.url.split("/saga/")[0] + f"/saga{path}")
        assert serious(page) == [], path
    page.goto(page.url.split("/saga/")[0] + f"/saga{of(partly.run)}")
    page.get_by_role("button", name="Try the rest again").click()
    expect(page.get_by_role("dialog")).to_contain_text("to take back")
    assert serious(page) == []


def serious(page: Page) -> list[str]:
    """What axe-core finds that is serious or worse, with the elements concerned."""
    page.evaluate((NODE_HOME / "node_modules" / AXE / "axe.min.js").read_text())
    answer = page.evaluate("axe.run()")
    assert len(answer["passes"]) > 5, "axe-core has not looked"
    found = answer["violations"]
    return [
        f"{each['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def test_a_planted_script_does_not_run(visit: Callable[..., Visitor], running: Scene) -> None:
    evil = "<script>window.stolen=1</script><img src=x onerror=window.stolen=1>"
    step = running.step()
    running.begin(step, 2, name="ask_model")
    running.end(step, 2, state="IN_DOUBT", error=evil)
    running.cancel(actor=evil, reason=evil)
    page = visit().open_page(of(running.run))
    expect(page.get_by_text(evil).first).to_be_visible()
    page.wait_for_timeout(1500)
    assert page.evaluate("window.stolen === undefined")
