"""Resources of a web service: what an answer proves, and what leaves this machine."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import httpx
import pytest

from airflow_saga.capsules.http import http_resource
from airflow_saga.core.errors import (
    ActionTimedOut,
    CompensationRejected,
    NotApplied,
    Unavailable,
)
from airflow_saga.core.records import Applied, Later, Unknown
from tests.capsules import trials
from tests.capsules.conftest import SetConnection, record_of
from tests.capsules.scripted import Said, Scripted
from tests.capsules.trials import QUICK, SOON, Trial, book_hotel
from tests.runtime.lab import Lab
from tests.support.ports import free_port
from tests.support.world import View

make = http_resource(
    "make_order", conn_id="orders", path="/orders", find="/orders?key={key}", proofs={400, 429}, **QUICK
)
make_blind = http_resource("make_blind", conn_id="orders", path="/orders", **QUICK)
book_slowly = http_resource(
    "book_slowly",
    conn_id="agency",
    path="/hotels",
    find="/hotels?key={key}",
    found=trials.of_agency,
    timeout=timedelta(seconds=1),
    retry=SOON,
    undo_retry=SOON,
)


@pytest.fixture
def orders(web: Scripted, set_connection: SetConnection) -> Scripted:
    set_connection("orders", "http", host="127.0.0.1", port=web.port, password="tok-9x")
    return web


@pytest.fixture
def hotel(request: pytest.FixtureRequest) -> Trial:
    return trials.hotel(request)


def undo(result: Any, action: Any = make, **more: Any) -> Any:
    return action.compensation(record_of(action.name, {"body": {}}, "k", result=result, **more))


def find(action: Any = make, **more: Any) -> Any:
    return action.verify(record_of(action.name, {"body": {}}, "k", **more))


RESULT = {"id": 7, "path": "/orders/7", "body": {"id": 7}}


def test_a_request_carries_the_key_and_the_login_of_the_connection(orders: Scripted) -> None:
    orders.script = [Said(201, {"id": 7})]
    assert make.fn({"a": 1}, key="k") == RESULT
    (asked,) = orders.asked
    assert (asked.headers["Idempotency-Key"], asked.headers["Authorization"]) == ("k", "Bearer tok-9x")
    orders.script = [Said(200)]
    undo(RESULT)
    assert orders.asked[-1].headers["Idempotency-Key"] == "undo-k"


def test_headers_and_login_come_from_the_connection(web: Scripted, set_connection: SetConnection) -> None:
    extra = {"X-Tenant": "blue", "timeout": 3, "headers": {"X-More": "1"}}
    set_connection("orders", "http", host=f"{web.url}/base/", login="ann", password="pw", extra=extra)
    web.script = [Said(201, {"id": 7})]
    make.fn({}, key="k")
    (asked,) = web.asked
    assert asked.path == "/base/orders"
    assert (asked.headers["X-Tenant"], asked.headers["X-More"]) == ("blue", "1")
    assert asked.headers["Authorization"].startswith("Basic ")
    assert "timeout" not in {name.lower() for name in asked.headers}


def test_a_location_of_this_service_is_where_it_is_undone(orders: Scripted) -> None:
    orders.script = [Said(201, {"id": 7}, {"Location": f"{orders.url}/elsewhere/7?v=1"}), Said(204)]
    result = make.fn({}, key="k")
    undo(result)
    assert orders.lines()[-1] == "DELETE /elsewhere/7?v=1"


def test_a_location_of_another_host_gets_no_login_of_ours(orders: Scripted) -> None:
    orders.script = [Said(201, {"id": 7}, {"Location": "http://other.invalid/7"}), Said(204)]
    assert make.fn({}, key="k")["path"] == "/orders/7"


@pytest.mark.parametrize("status", [400, 429])
def test_an_answer_that_proves_that_nothing_was_done(orders: Scripted, status: int) -> None:
    orders.script = [Said(status, {"why": "no"})]
    with pytest.raises(NotApplied, match=f"refused with {status}"):
        make.fn({}, key="k")


@pytest.mark.parametrize("status", [302, 409, 500, 503])
def test_an_answer_that_leaves_it_open_is_asked_once_and_is_no_proof(orders: Scripted, status: int) -> None:
    orders.script = [Said(status, {}, {"Location": "/trap"})]
    with pytest.raises(Exception, match=f"answered with {status}") as raised:
        make.fn({}, key="k")
    assert not isinstance(raised.value, NotApplied)
    assert orders.lines() == ["POST /orders"]


def test_a_service_that_cannot_be_reached_has_done_nothing(set_connection: SetConnection) -> None:
    set_connection("orders", "http", host="127.0.0.1", port=free_port(), password="tok-9x")
    with pytest.raises(NotApplied, match="nothing was sent") as raised:
        make.fn({}, key="k")
    assert "tok-9x" not in str(raised.value)
    with pytest.raises(Unavailable, match="orders"):
        undo(RESULT)


def test_an_answer_that_dribbles_ends_with_the_time_of_the_call(orders: Scripted) -> None:
    orders.script = [Said(201, {"id": 7, "blob": "x" * 500}, pause_seconds=0.1)]
    started = time.monotonic()
    with pytest.raises(httpx.ReadTimeout):
        make.fn({}, key="k")
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (Said(200, {"id": 7}), Applied(RESULT)),
        (Said(200, [{"id": 7}]), Applied(RESULT)),
        (Said(200, []), NotApplied),
        (Said(404), NotApplied),
        (Said(500), Unknown),
        (Said(401), Unknown),
    ],
)
def test_what_a_lookup_by_the_key_says(orders: Scripted, said: Said, expected: Any) -> None:
    orders.script = [said]
    seen = find()
    assert seen == expected if isinstance(expected, Applied) else isinstance(seen, expected)
    assert orders.lines() == ["GET /orders?key=k"]


def test_a_resource_that_is_gone_is_undone(orders: Scripted) -> None:
    orders.script = [Said(404)]
    assert undo(RESULT) is None


def test_an_undo_that_was_accepted_is_asked_after(orders: Scripted) -> None:
    orders.script = [Said(202)]
    later = undo(RESULT)
    assert isinstance(later, Later)
    orders.script = [Said(200, {"id": 7})]
    assert isinstance(undo(RESULT, later_token=later.token), Later)
    orders.script = [Said(404)]
    assert undo(RESULT, later_token=later.token) is None
    assert orders.lines() == ["DELETE /orders/7", "GET /orders/7", "GET /orders/7"]


@pytest.mark.parametrize(
    ("status", "problem"), [(503, Unavailable), (429, Unavailable), (405, CompensationRejected)]
)
def test_an_undo_that_is_refused(orders: Scripted, status: int, problem: type[Exception]) -> None:
    orders.script = [Said(status, {}, {"Retry-After": "3"})]
    with pytest.raises(problem) as raised:
        undo(RESULT)
    if isinstance(raised.value, Unavailable):
        assert raised.value.after == 3


def test_a_resource_that_nobody_can_find_is_for_a_person(orders: Scripted) -> None:
    orders.script = [Said(201, {"number": "A-1"})]
    result = make_blind.fn({}, key="k")
    assert result["path"] is None
    with pytest.raises(CompensationRejected, match="nobody knows where"):
        undo(result, make_blind)


def test_a_resource_without_a_place_is_found_by_its_key(orders: Scripted) -> None:
    orders.script = [Said(200, [{"id": 7}]), Said(204)]
    undo({"id": None, "path": None, "body": None})
    assert orders.lines() == ["GET /orders?key=k", "DELETE /orders/7"]


# -- with the travel agency, through the recorder ---------------------------------------------------------------------


def test_an_answer_that_was_lost_is_found_by_the_key(lab: Lab, hotel: Trial, world: View) -> None:
    world.tell("apply_and_drop", "hotels", times=1)
    output = lab.step(lambda saga: book_hotel({"city": "Porto"})).output
    assert output["id"]
    assert (hotel.effects(), lab.states()) == (1, [("book_hotel", "DONE")])
    lab.undo()
    assert hotel.standing() == 0


def test_a_call_that_never_arrived_is_made_again(lab: Lab, hotel: Trial, world: View) -> None:
    world.tell("drop", "hotels", times=1)
    lab.step(lambda saga: book_hotel({"city": "Porto"}))
    assert (hotel.effects(), len(world.calls("hotels"))) == (1, 2)


def test_no_more_is_sent_than_the_tries_of_the_action(lab: Lab, hotel: Trial, world: View) -> None:
    world.tell("refuse", "hotels", status=404)
    lab.fails(lambda saga: book_hotel({"city": "Porto"}), NotApplied)
    assert len(world.calls("hotels")) == book_hotel.retry.tries
    assert hotel.standing() == 0


def test_a_call_that_is_abandoned_is_found_and_not_made_again(lab: Lab, hotel: Trial, world: View) -> None:
    world.tell("hold", "hotels", lands="now", times=1)

    def body(saga: Any) -> Any:
        return book_slowly({"city": "Porto"})

    started = time.monotonic()
    try:
        lab.step(body)
    except (ActionTimedOut, httpx.TransportError):
        pytest.fail("the probe finds what the lost answer would have said")
    assert time.monotonic() - started < 10
    assert (hotel.effects(), lab.states()) == (1, [("book_slowly", "DONE")])
