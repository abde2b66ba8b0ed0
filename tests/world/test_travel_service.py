"""What the travel service promises while it behaves: keys, undo, refunds, lookups, and an honest sum of it all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dags.support import travel
from tests.support.world import View, overlaps

TRIP = {"id": "trip-1", "to": "Oslo"}


def test_same_key_twice_is_one_effect_and_the_recorded_answer(world: View) -> None:
    first = travel.book_flight(TRIP, idempotency_key="k")
    second = travel.book_flight(TRIP, idempotency_key="k")

    assert second == first
    assert world.net().key("flights", "k") == {
        "net": 1, "calls": 2, "undo_calls": 0, "landed": 1, "undone": 0, "undo_keys": [], "most_in_flight": 1
    }  # fmt: skip
    assert [row["replay"] for row in world.calls("flights")] == [False, True]
    assert [row["status"] for row in world.calls("flights")] == [201, 200]


def test_calls_without_a_key_are_each_an_effect(world: View) -> None:
    travel.book_flight(TRIP)
    travel.book_flight(TRIP)
    assert world.net().of("flights") == 2


def test_a_service_that_ignores_keys_makes_two_effects(world: View) -> None:
    world.tell("ignore_keys", "flights")
    ids = {travel.book_flight(TRIP, idempotency_key="k")["id"] for _ in range(2)}
    assert len(ids) == 2
    assert world.net().of("flights", "k") == 2


def test_a_key_used_for_another_request_is_no_proof_that_nothing_happened(world: View) -> None:
    travel.charge(TRIP, "10.00", idempotency_key="k")
    with pytest.raises(travel.TravelError, match="422") as caught:
        travel.charge(TRIP, "11.00", idempotency_key="k")
    assert not isinstance(caught.value, travel.Refused)
    assert world.net().of("payments", "k") == 1


def test_many_callers_with_one_key_at_the_same_time_make_one_effect(world: View) -> None:
    world.tell("hold", "cars", lands="release")
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(travel.book_car, TRIP, idempotency_key="k") for _ in range(8)]
        world.await_received("cars", 8)
        world.release("cars")
        assert len({call.result(timeout=20)["id"] for call in calls}) == 1
    entry = world.net().key("cars", "k")
    assert (entry["landed"], entry["calls"], entry["most_in_flight"]) == (1, 8, 8)
    assert len(overlaps(world.calls("cars"))) == 8 * 7 / 2


def test_undo_takes_back_once_under_its_key(world: View) -> None:
    flight = travel.book_flight(TRIP, idempotency_key="k")
    for _ in range(2):
        assert travel.cancel_flight(flight["id"], idempotency_key="u")["status"] == "undone"
    entry = world.net().key("flights", "k")
    assert (entry["net"], entry["undone"], entry["undo_calls"], entry["undo_keys"]) == (0, 1, 2, ["u"])
    assert [row["of"] for row in world.undo_calls("flights")] == ["k", "k"]
    assert not overlaps(world.undo_calls("flights"))


def test_undo_by_the_forward_key_needs_no_id(world: View) -> None:
    travel.book_hotel(TRIP, idempotency_key="k")
    assert travel.cancel_hotel(None, idempotency_key="u", booked_under="k")["status"] == "undone"
    assert world.net().of("hotels", "k") == 0


def test_undo_of_twins_takes_back_one_each_call(world: View) -> None:
    world.tell("ignore_keys", "hotels", verb="forward")
    for _ in range(2):
        travel.book_hotel(TRIP, idempotency_key="k")
    travel.cancel_hotel(None, idempotency_key="u1", booked_under="k")
    assert world.net().of("hotels", "k") == 1
    travel.cancel_hotel(None, idempotency_key="u2", booked_under="k")
    assert world.net().of("hotels", "k") == 0


def test_undo_of_what_is_not_there_is_404_or_as_told_200(world: View) -> None:
    assert world.call("DELETE", "/flights/flights-99", key="u")[0] == 404
    assert world.call("DELETE", "/flights?key=never", key="u")[0] == 404
    assert travel.cancel_flight("flights-99", idempotency_key="u")["status"] == "absent"
    world.tell("missing_ok", "flights")
    assert world.call("DELETE", "/flights/flights-99", key="u")[0] == 200
    assert world.net().total == 0


def test_undo_again_under_a_new_key_finds_nothing(world: View) -> None:
    flight = travel.book_flight(TRIP, idempotency_key="k")
    travel.cancel_flight(flight["id"], idempotency_key="u1")
    assert world.call("DELETE", f"/flights/{flight['id']}", key="u2")[0] == 404
    assert world.net().of("flights", "k") == 0


def test_an_undo_key_used_for_another_effect_takes_back_nothing(world: View) -> None:
    first, second = (travel.book_flight(TRIP, idempotency_key=key) for key in ("k1", "k2"))
    travel.cancel_flight(first["id"], idempotency_key="u")
    with pytest.raises(travel.TravelError, match="422"):
        travel.cancel_flight(second["id"], idempotency_key="u")
    assert world.net().of("flights", "k2") == 1


def test_an_undo_that_ignores_keys_takes_back_twice(world: View) -> None:
    payment = travel.charge(TRIP, "10.00", idempotency_key="k")
    world.tell("ignore_keys", "payments", verb="undo")
    for _ in range(2):
        travel.refund(payment["id"], idempotency_key="u")
    assert world.net().of("payments", "k") == -1


def test_a_message_cannot_be_unsent(world: View) -> None:
    message = travel.send_message(TRIP, "ann", "your trip is booked", idempotency_key="k")
    with pytest.raises(travel.Refused, match="405"):
        travel.cancel("messages", message["id"], idempotency_key="u")
    assert world.net().of("messages", "k") == 1


def test_a_note_can_be_removed(world: View) -> None:
    written = travel.note(TRIP, "likes windows", idempotency_key="k")
    travel.remove_note(written["id"], idempotency_key="u")
    assert world.net().of("notes") == 0


def test_a_refund_that_comes_later_counts_when_it_has_settled(world: View) -> None:
    payment = travel.charge(TRIP, "10.00", idempotency_key="k")
    world.tell("later", "payments")
    asked = travel.refund(payment["id"], idempotency_key="u")
    assert asked["status"] == "pending"
    assert travel.refund_status(asked["token"]) == "pending"
    assert world.net().of("payments", "k") == 1
    assert travel.find_payment("k") is not None

    assert world.release("payments", key="other") == 0
    assert world.release("payments", key="u") == 1

    assert travel.refund_status(asked["token"]) == "settled"
    assert travel.refund(payment["id"], idempotency_key="u")["status"] == "settled"
    assert travel.find_payment("k") is None
    entry = world.net().key("payments", "k")
    assert (entry["net"], entry["undone"], entry["undo_calls"]) == (0, 1, 2)


def test_asking_again_for_a_pending_refund_joins_it_whatever_the_key(world: View) -> None:
    travel.charge(TRIP, "10.00", idempotency_key="k")
    world.tell("later", "payments")
    tokens = {
        travel.refund(None, charged_under="k", idempotency_key=key)["token"] for key in ("u", "u", "u2")
    }
    assert len(tokens) == 1
    assert world.release("payments", key="k") == 1
    assert world.net().of("payments", "k") == 0


def test_a_refund_that_failed_may_be_asked_for_again(world: View) -> None:
    payment = travel.charge(TRIP, "10.00", idempotency_key="k")
    world.tell("later", "payments", outcome="failed")
    token = travel.refund(payment["id"], idempotency_key="u")["token"]
    world.release("payments")
    assert travel.refund_status(token) == "failed"
    assert world.net().of("payments", "k") == 1
    world.forget()
    assert travel.refund(payment["id"], idempotency_key="u")["status"] == "undone"
    assert world.net().of("payments", "k") == 0


def test_a_lookup_tells_what_stands_under_a_key(world: View) -> None:
    assert travel.find_car("k") is None
    car = travel.book_car(TRIP, idempotency_key="k")
    assert travel.find_car("k") == car
    assert world.call("GET", f"/cars/{car['id']}")[1]["effect"] == car
    travel.cancel_car(car["id"], idempotency_key="u")
    assert travel.find_car("k") is None
    status, answer = world.call("GET", "/cars?key=k")
    assert (status, answer["landed"], answer["standing"]) == (200, True, 0)
    assert [row["key"] for row in world.lookups("cars", key="k")] == ["k"] * 4


def test_net_names_what_stands_and_the_order_of_the_undo(world: View) -> None:
    flight = travel.book_flight(TRIP, idempotency_key="f")
    hotel = travel.book_hotel(TRIP, idempotency_key="h")
    travel.book_car({"id": "trip-2"}, idempotency_key="c")
    travel.cancel_hotel(hotel["id"], idempotency_key="uh")
    travel.cancel_flight(flight["id"], idempotency_key="uf")
    net = world.net()
    assert net.kinds == {"flights": 0, "hotels": 0, "cars": 1}
    assert net.total == 1
    assert [undo["key"] for undo in net.undo_order] == ["h", "f"]
    assert [effect["key"] for effect in net.standing] == ["c"]
    assert world.net(trip="trip-1").total == 0
    assert world.net(trip="trip-2").total == 1
    assert world.net(kind="cars").kinds == {"cars": 1}
    assert [row["verb"] for row in world.ledger(trip="trip-1")] == ["forward", "forward", "undo", "undo"]


@pytest.mark.parametrize("kind", ["refund later", "a/b", "größe", "x?key=y", "wait", "[0]"])
def test_any_name_is_a_kind(world: View, kind: str) -> None:
    made = travel.book(kind, {"n": 1}, idempotency_key="k/ä?&")
    assert travel.find(kind, "k/ä?&") == made
    travel.cancel(kind, made["id"], idempotency_key="u")
    assert world.net().kinds == {kind: 0}
    assert len(world.undo_calls(kind)) == 1


def test_what_was_received_is_kept_as_it_came(world: View) -> None:
    body = {"text": "a\x00b", "half": "\ud800", "big": 2**70, "deep": [{"x": [None, True, 1.5]}]}
    travel.book("things", body, idempotency_key="k")
    assert world.calls("things")[0]["body"] == body


def test_worlds_do_not_mix(world: View) -> None:
    other = world.namespace("an/other")
    world.tell("refuse", "flights")
    assert other.call("POST", "/flights", {}, key="k")[0] == 201
    assert world.call("POST", "/flights", {}, key="k")[0] == 409
    assert (world.net().total, other.net().total) == (0, 1)
    other.reset()
    assert (other.net().total, other.ledger()) == (0, [])
    assert len(world.ledger()) == 1
    assert world.told()


def test_a_held_call_ends_with_its_world(world: View) -> None:
    world.tell("hold", "flights", lands="release")
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(travel.book_flight, TRIP, idempotency_key="k")
        world.await_received("flights")
        world.reset()
        assert isinstance(held.exception(timeout=10), travel.TravelError)
    assert world.net().total == 0
    assert world.ledger() == []


def test_a_call_without_the_token_is_refused(world: View) -> None:
    world.tell("token", "payments", token="s3")
    with pytest.raises(travel.Refused, match="401"):
        travel.charge(TRIP, "10.00", idempotency_key="k")
    payment = travel.charge(TRIP, "10.00", idempotency_key="k", token="s3")
    with pytest.raises(travel.Refused, match="401"):
        travel.refund(payment["id"], idempotency_key="u", token="rotated")
    travel.refund(payment["id"], idempotency_key="u", token="s3")
    assert world.net().of("payments", "k") == 0
    assert "s3" not in str(world.ledger()) + str(world.told())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/trains", 404),
        ("GET", "/", 404),
        ("POST", "/flights/flights-1", 405),
        ("DELETE", "/flights", 400),
        ("GET", "/flights", 400),
        ("GET", "/flights/flights-1", 404),
        ("GET", "/refunds/undo-1", 404),
        ("POST", "/refunds", 400),
        ("GET", "/wait?received=flights", 400),
        ("GET", "/ledger?colour=red", 400),
    ],
)
def test_a_request_that_makes_no_sense_changes_nothing(
    world: View, method: str, path: str, status: int
) -> None:
    answered, body = world.call(method, path, {} if method == "POST" else None, key="k")
    assert (answered, bool(body["error"])) == (status, True)
    assert world.net().total == 0


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"do": "explode"}, "explode"),
        ({"do": "delay"}, "seconds"),
        ({"do": "drop", "sceonds": 1}, "sceonds"),
        ({"do": "refuse", "lands": "now"}, "lands"),
        ({"do": "hold", "lands": 3}, "lands"),
        ({"do": "pass", "verb": "backward"}, "backward"),
        ({"do": "big"}, "bytes"),
        ({}, "do"),
    ],
)
def test_words_that_are_not_in_the_vocabulary_are_refused_by_name(
    world: View, told: dict[str, object], named: str
) -> None:
    status, answer = world.call("POST", "/tell", told)
    assert status == 400
    assert named in answer["error"]
    assert world.told() == []
