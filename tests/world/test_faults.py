"""Each thing the travel service can be told to do wrong: what lands, what the caller hears, what is written down."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from dags.support import travel
from tests.support.world import View

TRIP = {"id": "trip-1"}

# told -> (lands, what a caller without patience hears)
OUTCOMES: list[tuple[dict[str, Any], int, type[Exception] | None]] = [
    ({"do": "pass"}, 1, None),
    ({"do": "delay", "seconds": 0.1}, 1, None),
    ({"do": "delay", "seconds": 5}, 1, TimeoutError),
    ({"do": "late", "seconds": 0.1}, 1, None),
    ({"do": "hold"}, 1, TimeoutError),
    ({"do": "hold", "lands": "never"}, 0, TimeoutError),
    ({"do": "hold", "lands": "release"}, 0, TimeoutError),
    ({"do": "hold", "seconds": 0.1}, 1, travel.TravelError),
    ({"do": "apply_and_drop"}, 1, travel.TravelError),
    ({"do": "drop"}, 0, travel.TravelError),
    ({"do": "reset"}, 0, ConnectionResetError),
    ({"do": "reset", "lands": "now"}, 1, ConnectionResetError),
    ({"do": "refuse"}, 0, travel.Refused),
    ({"do": "refuse", "status": 400}, 0, travel.Refused),
    ({"do": "fail"}, 0, travel.TravelError),
    ({"do": "fail", "lands": "now"}, 1, travel.TravelError),
    ({"do": "fail", "status": 503}, 0, travel.Busy),
    ({"do": "fail", "status": 429, "lands": "now"}, 1, travel.Busy),
    ({"do": "lie"}, 0, None),
    ({"do": "stall"}, 1, TimeoutError),
    ({"do": "stall", "lands": "never"}, 0, TimeoutError),
    ({"do": "garble"}, 1, travel.TravelError),
    ({"do": "garble", "lands": "never"}, 0, travel.TravelError),
]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(travel, "TIMEOUT_SECONDS", 0.4)


@pytest.mark.parametrize(("told", "landed", "hears"), OUTCOMES, ids=str)
def test_a_fault_lands_and_is_heard_as_the_table_says(
    world: View,
    told: dict[str, Any],
    landed: int,
    hears: type[Exception] | None,
    request: pytest.FixtureRequest,
) -> None:
    if hears is TimeoutError:
        request.getfixturevalue("impatient")
    world.tell(kind="flights", **told)
    if hears is None:
        assert travel.book_flight(TRIP, idempotency_key="k")["id"]
    else:
        with pytest.raises(hears) as caught:
            travel.book_flight(TRIP, idempotency_key="k")
        assert hears is travel.Refused or not isinstance(caught.value, travel.Refused)
    world.await_landed("flights", landed)
    assert world.net().of("flights", "k") == landed
    row = world.calls("flights")[0]
    assert (row["landed"], row["fault"]) == (landed, told["do"])


@pytest.mark.parametrize(("told", "landed", "hears"), OUTCOMES, ids=str)
def test_the_same_faults_befall_an_undo(
    world: View,
    told: dict[str, Any],
    landed: int,
    hears: type[Exception] | None,
    request: pytest.FixtureRequest,
) -> None:
    flight = travel.book_flight(TRIP, idempotency_key="k")
    if hears is TimeoutError:
        request.getfixturevalue("impatient")
    world.tell(kind="flights", verb="undo", **told)
    if hears is None:
        assert travel.cancel_flight(flight["id"], idempotency_key="u")["status"] == "undone"
    else:
        with pytest.raises(hears):
            travel.cancel_flight(flight["id"], idempotency_key="u")
    world.await_landed("flights", landed, verb="undo")
    assert world.net().of("flights", "k") == 1 - landed


@pytest.mark.usefixtures("impatient")
def test_an_effect_lands_late_although_its_client_has_gone(world: View) -> None:
    world.tell("late", "flights", seconds=2.0)
    with pytest.raises(TimeoutError):
        travel.book_flight(TRIP, idempotency_key="k")
    world.await_gone("flights")
    assert world.net().of("flights", "k") == 0
    assert travel.find_flight("k") is None
    assert travel.cancel_flight(None, booked_under="k", idempotency_key="u")["status"] == "absent"

    row = world.await_landed("flights", verb="forward")[0]

    assert world.net().of("flights", "k") == 1
    assert row["client"] == "gone"
    assert row["gone_at"] < row["landed_at"]
    assert world.await_answered("flights", verb="forward")[0]["client"] == "gone"


def test_a_late_effect_may_be_answered_before_it_lands(world: View) -> None:
    world.tell("late", "flights", seconds=0.5, answer_after=0)
    assert world.call("POST", "/flights", TRIP, key="k") == (202, {"status": "accepted"})
    row = world.await_landed("flights")[0]
    assert row["answered_seq"] < row["landed_seq"]


def test_a_gateway_timeout_may_be_followed_by_the_effect(world: View) -> None:
    world.tell("fail", "flights", status=504, lands=0.4)
    assert world.call("POST", "/flights", TRIP, key="k")[0] == 504
    row = world.await_landed("flights")[0]
    assert row["answered_seq"] < row["landed_seq"]
    assert world.net().total == 1


def test_two_late_calls_with_one_key_are_one_effect(world: View) -> None:
    world.tell("late", "flights", seconds=0.3)
    with ThreadPoolExecutor(2) as pool:
        booked = list(pool.map(lambda _: travel.book_flight(TRIP, idempotency_key="k"), range(2)))
    assert booked[0] == booked[1]
    assert world.net().of("flights", "k") == 1


@pytest.mark.parametrize(
    ("lands", "land", "answered"),
    [("now", True, True), ("release", True, True), ("release", False, False), ("never", True, False)],
)
def test_a_held_call_is_answered_on_release_if_it_landed(
    world: View, lands: str, land: bool, answered: bool
) -> None:
    world.tell("hold", "flights", lands=lands)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(travel.book_flight, TRIP, idempotency_key="k")
        world.await_received("flights")
        assert not call.done()
        assert world.release("hotels") == 0
        assert world.release("flights", key="other") == 0
        assert world.release("flights", key="k", land=land) == 1
        assert world.release("flights") == 0
        problem = call.exception(timeout=10)
    assert (problem is None) == answered
    assert world.net().of("flights", "k") == int(answered)
    assert world.calls("flights")[0]["heard"] == ("answered" if answered else "closed")


def test_release_lets_all_go_at_once(world: View) -> None:
    world.tell("hold", verb="*")
    with ThreadPoolExecutor(60) as pool:
        calls = [pool.submit(travel.book_flight, TRIP, idempotency_key=f"k{n}") for n in range(60)]
        assert len(world.await_received("flights", 60)) == 60
        assert world.release() == 60
        assert len({call.result(timeout=20)["id"] for call in calls}) == 60


@pytest.mark.usefixtures("impatient")
def test_a_client_that_leaves_while_it_is_held_is_noticed(world: View) -> None:
    world.tell("hold", "flights")
    with pytest.raises(TimeoutError):
        travel.book_flight(TRIP, idempotency_key="k")
    row = world.await_gone("flights")[0]
    assert (row["client"], row["answered_seq"]) == ("gone", None)
    world.release()
    assert world.await_answered("flights")[0]["client"] == "gone"


def test_a_client_that_stays_is_written_down_as_there(world: View) -> None:
    world.tell("delay", "flights", seconds=0.3)
    travel.book_flight(TRIP, idempotency_key="k")
    row = world.calls("flights")[0]
    assert (row["client"], row["gone_at"]) == ("there", None)


@pytest.mark.usefixtures("impatient")
def test_dribble_outlives_a_timeout_between_bytes_and_ends_with_the_client(world: View) -> None:
    world.tell("dribble", "flights", seconds=0.002)  # 600 bytes: longer in all than one receive may take
    assert travel.book_flight(TRIP, idempotency_key="k1")["key"] == "k1"
    world.tell("dribble", "hotels", seconds=5)
    with pytest.raises(TimeoutError):
        travel.book_hotel(TRIP, idempotency_key="k2")
    world.await_gone("hotels")


def test_stall_gives_the_rest_when_released(world: View) -> None:
    world.tell("stall", "flights")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(travel.book_flight, TRIP, idempotency_key="k")
        world.await_landed("flights")
        world.release("flights")
        assert call.result(timeout=10)["key"] == "k"


def test_busy_says_when_to_come_back(world: View) -> None:
    world.tell("fail", "flights", status=503, retry_after=7, message="closed for lunch")
    with pytest.raises(travel.Busy, match="closed for lunch") as caught:
        travel.book_flight(TRIP)
    assert caught.value.after == timedelta(seconds=7)


def test_an_agency_that_cannot_be_reached_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAVEL_URL", "http://127.0.0.1:1")
    with pytest.raises(travel.Busy, match="nothing was sent"):
        travel.book_flight(TRIP)


def test_big_answers_are_big_again_and_not_in_the_ledger(world: View) -> None:
    rule = world.tell("big", "flights", bytes=5_000_000)
    first = travel.book_flight(TRIP, idempotency_key="k")
    assert len(first["blob"]) == 5_000_000
    world.forget(rule)
    assert travel.book_flight(TRIP, idempotency_key="k") == first
    assert len(str(world.ledger())) < 5_000


def test_a_lookup_may_lag(world: View) -> None:
    world.tell("lag", "flights", seconds=3600)
    travel.book_flight(TRIP, idempotency_key="k")
    assert travel.find_flight("k") is None
    world.forget()
    world.tell("lag", "flights", seconds=0.2)
    deadline = time.monotonic() + 10
    while travel.find_flight("k") is None:
        assert time.monotonic() < deadline


def test_a_lookup_may_lie_either_way(world: View) -> None:
    travel.book_flight(TRIP, idempotency_key="k")
    world.tell("lie", "flights", verb="lookup")
    assert travel.find_flight("k") is None
    assert travel.find_flight("never") is not None
    assert world.net().total == 1


def test_a_lookup_may_not_know_or_not_answer(world: View) -> None:
    travel.book_flight(TRIP, idempotency_key="k")
    world.tell("unknown", "flights", times=1)
    with pytest.raises(travel.CannotTell):
        travel.find_flight("k")
    world.tell("fail", "flights", verb="lookup", status=503, times=1)
    with pytest.raises(travel.Busy):
        travel.find_flight("k")
    assert travel.find_flight("k") is not None


def test_limited_faults_are_used_up_in_the_order_told_before_the_lasting_one(world: View) -> None:
    world.tell("fail", "flights", status=500)
    world.tell("fail", "flights", status=501, times=1)
    world.tell("fail", "flights", status=502, times=2)
    statuses = [world.call("POST", "/flights", {}, key="k")[0] for _ in range(5)]
    assert statuses == [501, 502, 502, 500, 500]
    assert [rule["used"] for rule in world.told()] == [2, 1, 2]
    assert world.forget() == 3
    assert world.call("POST", "/flights", {}, key="k")[0] == 201


def test_a_fault_may_wait_for_the_third_call(world: View) -> None:
    world.tell("refuse", "flights", skip=2, times=1)
    assert [world.call("POST", "/flights", {})[0] for _ in range(4)] == [201, 201, 409, 201]


def test_a_fault_may_be_meant_for_one_key_its_undo_or_one_trip(world: View) -> None:
    flight = travel.book_flight(TRIP, idempotency_key="k1")
    world.tell("refuse", "flights", verb="*", key="k1")
    world.tell("refuse", "hotels", trip="trip-2")
    with pytest.raises(travel.Refused):
        travel.cancel_flight(flight["id"], idempotency_key="u1")
    assert travel.book_flight(TRIP, idempotency_key="k2")
    assert travel.book_hotel(TRIP)
    with pytest.raises(travel.Refused):
        travel.book_hotel({"id": "trip-2"})


def test_the_newest_lasting_fault_counts_and_pass_is_an_exception_to_it(world: View) -> None:
    world.tell("refuse")
    world.tell("pass", "flights", key="k")
    assert world.call("POST", "/flights", {}, key="k")[0] == 201
    assert world.call("POST", "/flights", {}, key="other")[0] == 409


def test_a_fault_may_be_over_after_a_while(world: View) -> None:
    rule = world.tell("fail", "flights", status=503, for_seconds=3600)
    assert world.call("POST", "/flights", {})[0] == 503
    world.forget(rule)
    world.tell("fail", "flights", status=503, for_seconds=0.2)
    deadline = time.monotonic() + 10
    while world.call("POST", "/flights", {})[0] != 201:
        assert time.monotonic() < deadline


def test_manners_go_with_any_fault(world: View) -> None:
    payment = travel.charge(TRIP, "10.00", idempotency_key="k")
    world.tell("later", "payments", seconds=0.2)
    world.tell("apply_and_drop", "payments", verb="undo", times=1)
    with pytest.raises(travel.TravelError):
        travel.refund(payment["id"], idempotency_key="u")
    assert travel.refund(payment["id"], idempotency_key="u")["token"]
    world.await_landed("payments", verb="undo")
    assert world.net().of("payments", "k") == 0
