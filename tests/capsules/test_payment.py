"""Charges: exactly what was charged goes back, and a stored 500 is not asked for for ever."""

from __future__ import annotations

import json
import os
import uuid
from datetime import timedelta
from typing import Any

import httpx
import pytest

from airflow_saga.capsules import payment
from airflow_saga.core.errors import CompensationRejected, NotApplied
from airflow_saga.core.records import Applied, Later
from tests.capsules import trials
from tests.capsules.conftest import SetConnection, record_of
from tests.capsules.scripted import Said, Scripted
from tests.capsules.trials import Trial, charge
from tests.runtime.lab import Lab

REPLAYED = {"Idempotent-Replayed": "true"}
CHARGE = {"id": "ch_1", "amount": 900, "amount_refunded": 0, "currency": "eur", "status": "succeeded"}


@pytest.fixture
def card(request: pytest.FixtureRequest) -> Trial:
    return trials.card(request)


def find(key: str) -> Any:
    assert charge.verify is not None
    return charge.verify(record_of("charge_card", {}, key, in_doubt=True))


def refund(key: str, made: dict[str, Any], **more: Any) -> Any:
    assert charge.compensation is not None
    return charge.compensation(record_of("charge_card", {}, key, result=made, **more))


def test_a_stored_500_is_left_behind_with_another_key(card: Trial, lab: Lab) -> None:
    before = card.standing()
    # A card that fails once; the last word makes it this test's own.
    source = f"tok_500|tok_visa|{uuid.uuid4().hex}"
    result = lab.step(lambda saga: charge(4207, "eur", source)).output
    assert (result["amount"], card.effects()) == (4207, 1)
    (row,) = lab.actions()
    assert (row.state, row.tries) == ("DONE", 2)
    assert lab.undo().saga.state == "CANCELLED"
    assert card.standing() == before


def test_a_stored_500_of_a_charge_that_was_made_all_the_same_is_that_charge(
    web: Scripted, set_connection: SetConnection
) -> None:
    set_connection("stripe", "http", host="127.0.0.1", port=web.port, password="sk")
    made = {**CHARGE, "metadata": {"saga_key": "k"}}
    web.script = [Said(500, {}, REPLAYED), Said(200, {"data": [made], "has_more": False})]
    assert charge.fn(900, "eur", "tok_visa", key="k")["id"] == "ch_1"
    assert web.lines() == ["POST /v1/charges", "GET /v1/charges?limit=100"]


def test_a_first_500_is_in_doubt_and_not_tried_with_another_key(
    web: Scripted, set_connection: SetConnection
) -> None:
    set_connection("stripe", "http", host="127.0.0.1", port=web.port, password="sk")
    web.script = [Said(500, {"error": {}})]
    with pytest.raises(Exception, match="answered with 500") as raised:
        charge.fn(900, "eur", "tok_visa", key="k")
    assert not isinstance(raised.value, NotApplied)
    assert web.lines() == ["POST /v1/charges"]


def test_where_the_listing_cannot_be_asked_a_stored_500_stays_in_doubt(
    web: Scripted, set_connection: SetConnection
) -> None:
    set_connection("stripe", "http", host="127.0.0.1", port=web.port, password="sk")
    web.script = [Said(500, {}, REPLAYED), Said(503, {})]
    with pytest.raises(Exception, match="answered with 503") as raised:
        charge.fn(900, "eur", "tok_visa", key="k")
    assert not isinstance(raised.value, NotApplied)


def test_a_stored_500_of_a_refund_is_left_behind_with_another_key(
    web: Scripted, set_connection: SetConnection
) -> None:
    set_connection("stripe", "http", host="127.0.0.1", port=web.port, password="sk")
    done = {"id": "re_1", "status": "succeeded"}
    web.script = [Said(200, CHARGE), Said(500, {}, REPLAYED), Said(200, done)]
    assert refund("k", CHARGE) is None
    keys = [each.headers.get("Idempotency-Key") for each in web.asked]
    assert keys == [None, "undo-k", "undo-k-2"]
    assert [each.body.count("amount=900") for each in web.asked] == [0, 1, 1]


def test_a_refund_that_is_pending_is_asked_after(web: Scripted, set_connection: SetConnection) -> None:
    set_connection("stripe", "http", host="127.0.0.1", port=web.port, password="sk")
    web.script = [Said(200, CHARGE), Said(200, {"id": "re_1", "status": "pending"})]
    assert refund("k", CHARGE) == Later("re_1", after=timedelta(hours=1))
    web.script = [Said(200, {"id": "re_1", "status": "succeeded"})]
    assert refund("k", CHARGE, later_token="re_1") is None
    web.script = [Said(200, {"id": "re_1", "status": "failed"})]
    with pytest.raises(CompensationRejected, match="re_1"):
        refund("k", CHARGE, later_token="re_1")


def test_a_card_that_is_declined_was_not_charged(card: Trial) -> None:
    before = card.standing()
    with pytest.raises(NotApplied, match="402"):
        charge.fn(4207, "eur", "tok_chargeDeclinedInsufficientFunds", key=card.key)
    assert card.standing() == before
    assert isinstance(find(card.key), NotApplied)


def test_what_was_refunded_by_hand_is_not_refunded_again(card: Trial) -> None:
    before = card.standing()
    made = charge.fn(**card.args, key=card.key)
    _refund_by_hand(made["id"], 1000)
    refund(card.key, made)
    assert card.standing() == before
    assert isinstance(find(card.key), NotApplied)


def test_a_disputed_charge_is_for_a_person(card: Trial) -> None:
    made = charge.fn(4207, "eur", "tok_createDispute", key=card.key)
    with pytest.raises(CompensationRejected, match="disputed"):
        refund(card.key, made)


def test_a_charge_is_found_behind_many_pages(card: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payment, "PAGE", 2)
    made = charge.fn(**card.args, key=card.key)
    for number in range(5):
        charge.fn(**card.args, key=f"{card.key}-of-another-{number}")
    assert find(card.key) == Applied(made)
    monkeypatch.setattr(payment, "MOST_PAGES", 1)
    with pytest.raises(Exception, match="more than 2 charges"):
        find("nobody's")


def _refund_by_hand(charge_id: str, amount: int) -> None:
    connection = json.loads(os.environ["AIRFLOW_CONN_STRIPE"])
    url = f"http://127.0.0.1:{connection['port']}/v1/refunds"
    form = {"charge": charge_id, "amount": str(amount)}
    httpx.post(url, data=form, auth=(connection["password"], "")).raise_for_status()
