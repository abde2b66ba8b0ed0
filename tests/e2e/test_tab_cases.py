"""What goes wrong with a stop elsewhere, played in a real Airflow as a person at the tab sees it.

Each test is named after its case, and has the ledger of the outside world as its witness: what the page says is held
against what was really called.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime

import pytest
from playwright.sync_api import Browser, FrameLocator, Locator, Page, expect

from tests.airflow.browser import PICTURES, chromium
from tests.e2e.scene import SOON, Scene, Trip
from tests.support.airflow_api import PATIENCE

MILLISECONDS = 1000.0
LOOK_EVERY_SECONDS = 0.5
CANCEL_LATENCY_SECONDS = 2.0 * PATIENCE
"""From the click until the call under way is the last one: the way to the API server and to the step."""
ENDED = ("Cancelled", "Partly cancelled", "Stopped, effects kept")


@dataclass
class Tab:
    """The Saga tab of a trip, in Airflow's own page."""

    page: Page
    trip: Trip

    def open(self) -> Tab:
        run = f"{self.trip.airflow.api_url}/dags/{self.trip.dag_id}/runs/{self.trip.run_id}"
        self.page.goto(f"{run}/plugin/saga-run")
        return self

    @property
    def frame(self) -> FrameLocator:
        return self.page.frame_locator("iframe")

    @property
    def heading(self) -> str:
        """As it stands there now, without the sign before it."""
        return self.frame.locator("h1").inner_text().splitlines()[-1].strip()

    def button(self, label: str) -> Locator:
        return self.frame.get_by_role("button", name=f"{label}…", exact=True)

    @property
    def dialog(self) -> Locator:
        return self.frame.get_by_role("dialog")

    def ask(self, label: str) -> Locator:
        """Press a button; the question that it asks before anything is done."""
        self.button(label).click()
        return self.dialog

    def press(self, label: str) -> float:
        """Press a button and confirm; the moment of that, by the wall clock."""
        self.ask(label)
        return self.confirm(label)

    def confirm(self, label: str) -> float:
        button = self.dialog.get_by_role("button", name=label, exact=True)
        expect(button).to_be_enabled()
        at = time.time()
        button.click()
        return at

    def sees(self, heading: str, seconds: float = SOON) -> None:
        shown = self.frame.get_by_role("heading", name=heading, exact=True)
        expect(shown).to_be_visible(timeout=seconds * PATIENCE * MILLISECONDS)

    def says(self, text: str) -> None:
        expect(self.frame.locator("main")).to_contain_text(text)

    def states(self) -> list[tuple[str, str]]:
        """The table of actions: name and state in words, in the order in which they began."""
        rows = self.frame.locator("#actions tbody tr").all()
        return [
            (row.locator("summary b").inner_text(), row.locator(".st").inner_text().splitlines()[-1].strip())
            for row in rows
        ]

    def standing(self, name: str) -> Locator:
        """What is said of one effect that stands, or may."""
        return self.frame.locator("#stands .row").filter(has=self.page.locator("b", has_text=name))

    def settle(self, name: str, answer: str, note: str) -> None:
        """Say what became of an effect, as somebody who has looked."""
        self.standing(name).get_by_role("button", name=f"{answer}…").click()
        self.dialog.get_by_role("textbox").fill(note)
        self.confirm(answer)
        expect(self.standing(name)).to_have_count(0)

    def picture(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=PICTURES / f"case-{name}.png", full_page=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    shown = browser.new_page(viewport={"width": 1280, "height": 1000})
    shown.set_default_timeout(30 * PATIENCE * MILLISECONDS)
    expect.set_options(timeout=30 * PATIENCE * MILLISECONDS)
    yield shown
    shown.close()


def seconds_of(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


# -- C87 --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """What page and API said at one moment, and which calls the world had under way right after that."""

    heading: str
    state: str
    waits: list[str]
    under_way: list[str]


def look(tab: Tab) -> Look:
    """The world is asked last: what it still has under way then was under way when the others spoke."""
    heading, waits = tab.heading, tab.frame.locator(".waits li").all_inner_texts()
    _, told = tab.trip.airflow.saga("GET", tab.trip.dag_id, tab.trip.run_id)
    calls = [*tab.trip.calls(), *tab.trip.undo_calls()]
    return Look(
        heading, told["saga"]["state"], waits, [row["key"] for row in calls if not row["answered_seq"]]
    )


def test_c87_stop_never_shows_stopped_while_calls_keep_running(scene: Scene, page: Page) -> None:
    """C87 "Stop shows stopped while tools keep running": twenty calls of 1 s, stopped in the tenth, a slower one."""
    trip = scene.trip("single")
    trip.tell("delay", "hotels", seconds=1)
    trip.tell("delay", "hotels", seconds=6, times=1, skip=9)
    trip.start(a=["hotels"] * 20)
    trip.await_calls("hotels", 2)
    tab = Tab(page, trip).open()
    trip.await_calls("hotels", 10)

    clicked = tab.press("Stop and undo")

    looks = [look(tab)]
    deadline = time.monotonic() + SOON * PATIENCE
    while looks[-1].heading not in ENDED and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_SECONDS)
        looks.append(look(tab))
    assert [each for each in looks if each.under_way and each.heading in ENDED] == []
    assert [each for each in looks if each.under_way and each.state not in ("RUNNING", "CANCELLING")] == []
    heard = [each.heading for each in looks].index("Stopping")
    assert {each.heading for each in looks[:heard]} <= {"Running"}, "until the click is answered"
    assert {each.heading for each in looks[heard:-1]} == {"Stopping"}
    assert any(
        "Waiting for hotels of a" in wait and "so far" in wait for each in looks for wait in each.waits
    )
    trip.must_be_undone(calls=10)
    last = max(seconds_of(call["at"]) for call in trip.calls())
    print(f"the last call began {last - clicked:+.2f} s after the click; {len(looks)} looks")
    assert last - clicked < CANCEL_LATENCY_SECONDS


# -- C88 --------------------------------------------------------------------------------------------------------------


def test_c88_stop_now_takes_effect_in_the_middle_of_one_long_call(scene: Scene, page: Page) -> None:
    """C88 "Cancel takes effect only at the next heartbeat": one call that blocks, and never asks whether to stop."""
    trip = scene.trip("single")
    trip.tell("hold", "hotels")
    trip.start(a=["flights", "hotels"])
    trip.await_calls("hotels")
    attempt = trip.process("a")
    tab = Tab(page, trip).open()
    tab.press("Stop and undo")
    tab.sees("Stopping")
    tab.says("Waiting for hotels of a")

    clicked = tab.press("Stop now")

    attempt.wait_gone(5 * PATIENCE)
    print(f"the attempt had ended {time.time() - clicked:.1f} s after the click")
    tab.sees("Stopping")
    expect(tab.frame.locator("#actions tbody tr").nth(1)).to_contain_text("in doubt")
    tab.says("Waiting for hotels of a, which did not report and may take effect for")
    tab.picture("c88-in-doubt")
    tab.sees("Cancelled")
    tab.says("nothing stands")
    trip.must_be_undone(calls=2)
    (undo,) = trip.undo_calls("hotels")
    lands_by = trip.action("hotels").lands_by
    assert lands_by is not None
    assert seconds_of(undo["at"]) > lands_by.timestamp()


# -- C89 --------------------------------------------------------------------------------------------------------------


def test_c89_a_run_that_waits_for_a_slot_is_cancelled_and_never_starts(scene: Scene, page: Page) -> None:
    """C89 "Cancelling a queued run that then starts anyway": a pool without slots, opened after the cancel."""
    scene.close_pool("shut")
    trip = scene.trip("shut").start(a=["flights"])
    trip.wait_run("running")
    trip.wait_saga("PENDING")
    tab = Tab(page, trip).open()
    tab.sees("Not begun")

    tab.press("Stop and undo")

    tab.sees("Cancelled")
    expect(tab.frame.locator("#said")).to_contain_text("there is nothing to undo")
    tab.picture("c89-cancelled")
    scene.open_pool("shut")
    assert trip.wait_run() == "failed"
    assert "nothing was called" in trip.log("a")
    assert (trip.calls(), trip.undo_run_ids, trip.state) == ([], [], "CANCELLED")
    tab.open().sees("Cancelled")


# -- C90 --------------------------------------------------------------------------------------------------------------


def test_c90_a_stop_pressed_on_a_stale_page_says_that_it_has_finished_and_offers_undo(
    scene: Scene, page: Page
) -> None:
    """C90 "Cancel races completion": the question was open before the run ended, and is answered after that."""
    trip = scene.trip("single")
    trip.tell("hold", "hotels")
    trip.start(a=["flights", "hotels"])
    trip.await_calls("hotels")
    tab = Tab(page, trip).open()
    tab.ask("Stop and undo")
    trip.release("hotels")
    trip.must_be_completed(calls=2)

    tab.confirm("Stop and undo")

    expect(tab.frame.locator("#said")).to_contain_text("has already ended (COMPLETED)")
    tab.sees("Completed")
    expect(tab.button("Undo")).to_be_visible()
    tab.picture("c90-too-late")
    trip.must_be_completed(calls=2)
    tab.press("Undo")
    tab.sees("Cancelled")
    trip.must_be_undone(calls=2, run="success")


TRIALS = 20
AROUND_THE_END_SECONDS = 1.6


def cancel_around_the_end(trip: Trip, after: float) -> str:
    """Let the last call of a run end, and cancel so many seconds later; what was answered, and what came of it."""
    trip.tell("hold", "flights")
    trip.start(a=["flights"])
    trip.await_calls("flights")
    trip.release("flights")
    time.sleep(after)
    status, said = trip.airflow.saga("POST", trip.dag_id, trip.run_id, "cancel", {})
    if status == 200:
        trip.must_be_undone(calls=1, run=trip.wait_run())
        return "stopped"
    assert status == 409, said
    assert "already" in said["message"], said
    assert "undo it with" in said["message"], said
    trip.must_be_completed(calls=1)
    return "finished"


@pytest.mark.timeout(400 * PATIENCE)
def test_c90_whatever_is_answered_around_the_end_of_a_run_is_how_it_ends(scene: Scene) -> None:
    """C90 "Cancel races completion", by REST: twenty runs, each cancelled at another moment around its end."""
    trips = [scene.trip("single") for _ in range(TRIALS)]
    moments = [AROUND_THE_END_SECONDS * (number / TRIALS) ** 2 for number in range(TRIALS)]  # most soon
    random.Random(90).shuffle(moments)
    with ThreadPoolExecutor(5) as pool:
        came = list(pool.map(cancel_around_the_end, trips, moments))
    print(f"{came.count('stopped')} were stopped and undone, {came.count('finished')} had finished")
    assert len(set(came)) == 2, "all trials were on the same side of the end"


# -- C92 --------------------------------------------------------------------------------------------------------------


def test_c92_an_undo_that_fails_half_way_names_what_is_undone_and_the_rest_is_tried_by_a_click(
    scene: Scene, page: Page
) -> None:
    """C92 "Undo fails half-way": of five, the undo of the third fails all its tries, and the DAG halts there."""
    trip = scene.trip("halt")
    rule = trip.tell("fail", "cars", verb="undo")
    trip.start(a=["flights", "hotels"], b=["cars", "payments", "notes", "raise"])
    trip.wait_saga("PARTIALLY_CANCELLED")
    tab = Tab(page, trip).open()
    tab.sees("Partly cancelled")
    assert tab.states() == [
        ("flights", "done"),
        ("hotels", "done"),
        ("cars", "undo failed"),
        ("payments", "undone"),
        ("notes", "undone"),
    ]
    expect(tab.standing("cars")).to_contain_text("its compensation gave up after 3 tries")
    for waiting in ("hotels", "flights"):
        expect(tab.standing(waiting)).to_contain_text("the undo ended before its turn came")
    tab.picture("c92-half-way")
    scene.world.forget(rule)

    asked = tab.ask("Try the rest again")

    expect(asked.locator("li")).to_have_count(3)
    assert [item.inner_text().split()[0] for item in asked.locator("li").all()] == [
        "cars",
        "hotels",
        "flights",
    ]
    tab.confirm("Try the rest again")
    tab.sees("Cancelled")
    tab.says("5 undone, nothing stands")
    trip.must_be_net_zero()
    assert trip.undo_order == ["notes", "payments", "cars", "hotels", "flights"]
    kinds = ("notes", "payments", "cars", "hotels", "flights")
    assert [len(trip.undo_calls(kind)) for kind in kinds] == [1, 1, 4, 1, 1]


# -- C97 --------------------------------------------------------------------------------------------------------------


def test_c97_a_stop_is_over_by_its_deadline_and_says_what_may_have_happened(scene: Scene, page: Page) -> None:
    """C97 "'Cancelling' for ever": a call that nobody can ask about timed out, and then the body hangs, for good."""
    trip = scene.trip("deadline")
    trip.tell("hold", "tours", lands="never")
    trip.start(a=["flights", "cling", "tours", "hang"])
    trip.wait_action("tours", "IN_DOUBT")
    attempt = trip.process("a")
    tab = Tab(page, trip).open()

    clicked = tab.press("Stop and undo")

    tab.sees("Stopping")
    tab.says("Waiting for the end of a, which has no call under way.")
    tab.sees("Partly cancelled", 60)
    print(
        f"no more 'Stopping' {time.time() - clicked:.1f} s after the click; the deadline was 8 s, or A1 and 15 s"
    )
    tab.says("the deadline of the cancel passed before the undo had ended")
    tab.says("1 still stands, 1 may still stand")
    expect(tab.standing("tours")).to_contain_text("nobody knows whether it took effect")
    expect(tab.standing("flights")).to_contain_text("the undo ended before its turn came")
    tab.picture("c97-deadline")
    attempt.kill(signal.SIGKILL)
    tab.settle("tours", "Undone by hand", "the tour guide knows of nobody")
    tab.press("Try the rest again")
    tab.sees("Cancelled")
    trip.must_be_net_zero()
    assert [undo["kind"] for undo in trip.undo_calls()] == ["flights"]


# -- C99 --------------------------------------------------------------------------------------------------------------


def test_c99_what_cannot_be_undone_is_said_before_the_button_is_pressed(scene: Scene, page: Page) -> None:
    """C99 "Irreversible actions presented as undoable": a mail between two bookings."""
    trip = scene.trip("line").start(a=["flights"], b=["messages", "hotels"])
    trip.must_be_completed(calls=3)
    tab = Tab(page, trip).open()

    asked = tab.ask("Undo")

    expect(asked.locator("li")).to_have_count(3)
    assert [item.inner_text() for item in asked.locator("li").all()] == [
        "hotels of b: undo",
        "messages of b: cannot be undone",
        "flights of a: undo",
    ]
    tab.picture("c99-plan")
    tab.confirm("Undo")
    tab.sees("Partly cancelled")
    tab.says("2 undone, 1 still stands")
    expect(tab.standing("messages")).to_contain_text("nothing of ours can undo it")
    assert (trip.net.of("messages"), trip.net.total, trip.undo_calls("messages")) == (1, 1, [])
