"""Each verb by clicking, in a real browser; what it decided is read from the store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from airflow_saga.core.records import Outcome
from airflow_saga.core.states import Cause
from tests.airflow.browser import Visitor
from tests.airflow.web import of
from tests.store.scene import Scene

AirflowRun = Callable[..., None]
Visit = Callable[..., Visitor]


def press(page: Page, name: str, why: str | None = None) -> None:
    """The button of that name, and in the question that it opens the same again."""
    page.get_by_role("button", name=f"{name}…", exact=True).first.click()
    dialog = page.get_by_role("dialog", name=name)
    if why is not None:
        dialog.get_by_role("textbox").fill(why)
    dialog.get_by_role("button", name=name, exact=True).click()
    expect(dialog).to_have_count(0)


def said(page: Page, text: str) -> None:
    expect(page.locator("#said")).to_contain_text(text)


# -- stopping ---------------------------------------------------------------------------------------------------------


def test_stop_and_keep_then_undo_after_all(visit: Visit, running: Scene) -> None:
    page = visit().open_page(of(running.run))
    press(page, "Stop, keep effects", "look at it first")
    said(page, "its effects are kept")
    assert (running.saga.state, running.saga.mode, running.saga.reason) == (
        "CANCELLING",
        "keep",
        "look at it first",
    )
    press(page, "Undo after all")
    said(page, "is being stopped and undone")
    assert (running.saga.mode, running.request.actor) == ("undo", "user:user_1")


def test_stop_now_abandons_the_call_and_is_offered_once(visit: Visit, running: Scene) -> None:
    running.begin(running.step(), 2, name="charge_card")
    page = visit().open_page(of(running.run))
    press(page, "Stop and undo")
    expect(page.get_by_text("Waiting for charge_card of flight")).to_be_visible()
    press(page, "Stop now")
    expect(page.get_by_role("button", name="Stop now")).to_have_count(0)
    assert running.saga.stop_now
    assert len(running.view.requests) == 1


def test_a_held_undo_is_let_go_on(visit: Visit, scene: Scene, airflow_run: AirflowRun) -> None:
    airflow_run(*scene.run, state="failed")
    scene.stopped("flight", 1)
    scene.hint(cause=Cause.LOST_WORKER)
    held = {"causes": [Cause.LOST_WORKER], "threshold": 0, "window_seconds": 600}
    assert scene.sweeps.hold_if_mass_outage(**held) == 1
    page = visit().open_page(of(scene.run))
    expect(page.get_by_text("held since many sagas failed at once")).to_be_visible()
    page.get_by_role("button", name="Let the undo go on").click()
    expect(page.get_by_role("dialog").get_by_role("textbox")).to_have_count(0)
    page.get_by_role("dialog").locator("button.primary").click()
    said(page, "will be undone")
    assert scene.request.state == "HINTED"


# -- undoing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(scene: Scene, airflow_run: AirflowRun) -> Scene:
    """A flight, a charge, a mail that cannot be undone, and a hotel in a step after them."""
    airflow_run(*scene.run, state="success")
    step = scene.act(scene.attach(), 1, name="book_flight")
    scene.act(step, 2, name="charge_card")
    scene.finish(scene.act(step, 3, name="send_mail", effect="NON_COMPENSABLE"))
    scene.finish(scene.act(scene.attach("hotel", after=["flight"]), 1, name="book_hotel"))
    scene.runs.complete_if_over(*scene.run)
    return scene


def test_c101_undo_from_here_lists_all_that_goes_before_it_is_pressed(visit: Visit, finished: Scene) -> None:
    visitor = visit()
    page = visitor.open_page(of(finished.run))
    charge = finished.action(2).action_id
    page.locator(f"#more-{charge} summary").click()
    page.locator(f"#from-{charge}").click()
    dialog = page.get_by_role("dialog", name="Undo from here")
    expect(dialog.get_by_role("listitem")).to_have_text(
        [
            "book_hotel of hotel: undo",
            "send_mail of flight: cannot be undone",
            "charge_card of flight: undo",
        ]
    )
    visitor.picture("undo-from")
    dialog.get_by_role("button", name="Undo from here").click()
    said(page, "from charge_card of flight on it is being undone")
    finished.freeze()
    finished.undo_step("hotel")
    undo = finished.undo_of("flight")
    mail, charge_row = undo.open_actions
    assert finished.undos.settle_action_if_held(undo, mail, "NON_COMPENSABLE")
    finished.compensate(undo, charge_row)
    assert finished.settle() is not None
    expect(page.get_by_role("heading", name="Partly cancelled")).to_be_visible()
    expect(page.get_by_text("1 kept, from before that")).to_be_visible()
    assert finished.states() == {1: "DONE"}


def test_c99_what_cannot_be_undone_is_named_before_and_after(visit: Visit, finished: Scene) -> None:
    page = visit().open_page(of(finished.run))
    page.get_by_role("button", name="Undo…", exact=True).click()
    dialog = page.get_by_role("dialog", name="Undo")
    expect(dialog.get_by_text("send_mail of flight: cannot be undone")).to_be_visible()


def test_something_that_moved_since_the_plan_was_shown_is_refused(visit: Visit, finished: Scene) -> None:
    page = visit().open_page(of(finished.run))
    page.get_by_role("button", name="Undo…", exact=True).click()
    expect(page.get_by_role("dialog")).to_contain_text(
        "3 to take back, 1 that cannot be undone, in this order"
    )
    finished.finish(finished.act(finished.attach("car"), 1, name="book_car"))
    page.get_by_role("dialog").get_by_role("button", name="Undo", exact=True).click()
    said(page, "something moved since that plan was made")
    assert finished.view.requests == ()


def test_one_compensation_is_tried_again_by_clicking(
    visit: Visit, partly: Scene, airflow_run: AirflowRun
) -> None:
    airflow_run(*partly.run, state="failed")
    page = visit().open_page(of(partly.run))
    charge = partly.action(1, "pay").action_id
    page.locator(f"#answer-{charge}-retry").click()
    page.get_by_role("dialog").get_by_role("textbox").fill("the bank is back")
    page.get_by_role("dialog").locator("button.primary").click()
    said(page, "the undo of charge_card is tried again")
    assert (partly.request.cause, partly.request.reason) == ("retry", "the bank is back")
    partly.undone("pay")
    expect(page.locator(f"#stands-{charge}")).to_have_count(0)
    expect(page.get_by_role("heading", name="Partly cancelled")).to_be_visible()


# -- settling ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def doubtful(scene: Scene, airflow_run: AirflowRun) -> Scene:
    """A step that stopped with a charge in doubt; its run failed, and its effects are kept."""
    airflow_run(*scene.run, state="failed")
    step = scene.act(scene.attach(on_failure="keep"), 1, name="book_flight")
    scene.begin(step, 2, name="charge_card")
    scene.end(step, 2, state="IN_DOUBT")
    assert scene.steps.stop_if_held(step)
    scene.runs.fail_and_hint(*scene.run, cause="failure")
    assert scene.saga.state == "FAILED"
    return scene


@pytest.mark.parametrize(("answer", "state"), [("It happened", "DONE"), ("It did not happen", "FAILED")])
def test_what_became_of_an_action_in_doubt_is_said(
    visit: Visit, doubtful: Scene, answer: str, state: str
) -> None:
    page = visit().open_page(of(doubtful.run))
    press(page, answer, "the bank's statement of today")
    said(page, f"charge_card is {state} now")
    assert doubtful.action(2).state == state
    assert doubtful.action(2).note == "user:user_1: the bank's statement of today"
    expect(page.get_by_text("nobody knows")).to_have_count(0)


def test_a_note_is_asked_for_before_anything_is_settled(visit: Visit, doubtful: Scene) -> None:
    page = visit().open_page(of(doubtful.run))
    page.get_by_role("button", name="It happened").click()
    page.get_by_role("dialog").get_by_role("button", name="It happened").click()
    expect(page.get_by_role("dialog").get_by_role("textbox")).to_be_focused()
    assert doubtful.action(2).state == "IN_DOUBT"


@pytest.mark.parametrize(
    ("answer", "state"), [("Undone by hand", "COMPENSATED"), ("Let it stand", "ACCEPTED")]
)
def test_what_stands_is_settled_and_the_last_one_closes_the_saga(
    visit: Visit, partly: Scene, answer: str, state: str
) -> None:
    page = visit().open_page(of(partly.run))
    for _ in range(3):
        press(page, answer, "spoke with them")
    expect(page.get_by_role("heading", name="Cancelled")).to_be_visible()
    assert partly.saga.state == "CANCELLED"
    assert [partly.action(seq, task).state for task, seq in (("pay", 1), ("hotel", 2), ("hotel", 1))] == [
        state
    ] * 3


def test_probes_are_asked_in_the_question_and_what_they_say_appears(visit: Visit, doubtful: Scene) -> None:
    visitor = visit()
    page = visitor.open_page(of(doubtful.run))
    page.get_by_role("button", name="Undo…", exact=True).click()
    dialog = page.get_by_role("dialog", name="Undo")
    expect(dialog.get_by_text("charge_card of flight: find out, then undo")).to_be_visible()
    with page.expect_response(lambda answer: answer.url.endswith("/probe")) as asked:
        dialog.get_by_role("button", name="Ask what became").click()
    assert asked.value.json()["undo_run"]["run_id"].startswith("probe__")
    expect(dialog.get_by_role("button", name="Asking the verify probes")).to_be_disabled()
    doubtful.resolves.note_probe(doubtful.action(2), "it did not take effect", "user_1")  # as that run does
    expect(dialog.get_by_text("its probe: it did not take effect")).to_be_visible()
    visitor.picture("probed")
    dialog.get_by_role("button", name="Undo", exact=True).click()
    said(page, "is being stopped and undone")


# -- much of it -------------------------------------------------------------------------------------------------------


def test_ten_thousand_actions_are_painted_within_a_second_and_paged(visit: Visit, scene: Scene) -> None:
    step = scene.attach()
    for start in range(0, 10_000, 500):
        seqs = range(start + 1, start + 501)
        scene.write(step, begin=[scene.intent(step, seq, params='{"to": "LIS"}') for seq in seqs])
        scene.write(step, ended=[Outcome(seq, "DONE", '{"id": "b-1"}') for seq in seqs])
    scene.finish(step)
    scene.runs.complete_if_over(*scene.run)
    page = visit().open_page(of(scene.run))
    painted = min(_first_paint_seconds(page) for _ in range(3))
    print(f"10,000 actions: first paint after {painted:.2f} s")
    assert painted < 1.0
    page.get_by_role("link", name="later").click()
    expect(page.get_by_text("101 to 200 of 10000")).to_be_visible()
    began = time.monotonic()
    page.get_by_role("button", name="Undo…", exact=True).click()
    expect(page.get_by_text("10000 to take back, in this order")).to_be_visible()
    print(f"its plan is shown after {time.monotonic() - began:.2f} s")
    assert page.get_by_role("dialog").get_by_role("button", name="Undo", exact=True).is_enabled()


def _first_paint_seconds(page: Page) -> float:
    page.reload(wait_until="load")
    script = """() => new Promise((tell) => {
      const look = () => {
        const paint = performance.getEntriesByName("first-contentful-paint")[0];
        if (paint) tell(paint.startTime); else requestAnimationFrame(look);
      };
      look();
    })"""
    milliseconds: Any = page.evaluate(script)
    return float(milliseconds) / 1000


def test_what_was_said_goes_when_it_has_come_about(visit: Visit, running: Scene) -> None:
    page = visit().open_page(of(running.run))
    press(page, "Stop and undo")
    said(page, "is being stopped and undone")
    page.wait_for_timeout(3500)
    assert running.steps.stop_if_held(running.step())
    running.undone("flight")
    expect(page.get_by_role("heading", name="Cancelled")).to_be_visible()
    expect(page.locator("#said")).to_be_hidden()


def test_a_tab_that_was_opened_before_the_first_step_shows_it_soon(
    visit: Visit, scene: Scene, airflow_run: AirflowRun
) -> None:
    airflow_run(*scene.run)
    page = visit().open_page(of(scene.run))
    expect(page.get_by_role("heading", name="No saga in this run")).to_be_visible()
    scene.act(scene.attach(), 1)
    expect(page.get_by_role("heading", name="Running")).to_be_visible()
