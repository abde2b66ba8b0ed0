"""The capsules of the contract, each with a real service and with what that service itself says of its effects."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import httpx
import pytest

from airflow_saga.capsules import rows
from airflow_saga.capsules.calendar import calendar_event
from airflow_saga.capsules.http import http_resource
from airflow_saga.capsules.mail import send_mail
from airflow_saga.capsules.payment import card_charge
from airflow_saga.capsules.s3 import delete_object, put_object
from airflow_saga.core.actions import Action
from airflow_saga.core.policies import Retry
from airflow_saga.core.records import Unknown
from tests.support import services

SOON = Retry(first=timedelta(seconds=0.02), ceiling=timedelta(seconds=0.1), tries=3)
QUICK: dict[str, Any] = {"timeout": timedelta(seconds=4), "retry": SOON, "undo_retry": SOON}
BUCKET = "reports"
STRIPE_KEY = "sk_test_planted_4711"
DESK = "desk@example.org"
START = datetime(2030, 5, 4, 9, 30, tzinfo=UTC)


def of_agency(answer: dict[str, Any]) -> Any:
    """The lookups of the travel agency, by a key and by an id."""
    if "landed" not in answer:
        return answer if answer["status"] == "standing" else None
    if answer["landed"] is None:
        return Unknown()
    return answer["effect"] if answer["standing"] else None


add_thing = rows.insert_row("add_thing", conn_id="shop", table="public.things", **QUICK)
set_price = rows.update_row("set_price", conn_id="shop", table="things", **QUICK)
drop_thing = rows.delete_row("drop_thing", conn_id="shop", table="things", key="name", **QUICK)
book_hotel = http_resource(
    "book_hotel", conn_id="agency", path="/hotels", find="/hotels?key={key}", found=of_agency, **QUICK
)
block_room = calendar_event("block_room", conn_id="calendars", calendar="/ann/room/", **QUICK)
publish = put_object("publish", conn_id="objects", bucket=BUCKET, **QUICK)
withdraw = delete_object("withdraw", conn_id="objects", bucket=BUCKET, **QUICK)
charge = card_charge("charge_card", conn_id="stripe", **QUICK)
tell_desk = send_mail(
    "tell_desk",
    conn_id="smtp",
    imap_conn_id="mailbox",
    delivered_within=timedelta(seconds=0.2),
    **QUICK,
)
tell_customer = send_mail("tell_customer", conn_id="smtp", **QUICK)


@dataclass
class Trial:
    """One capsule and one call of it.

    :ivar standing: what its service shows of the effect; equal before the call and after its undo.
    :ivar count: how many effects the service has ever counted.
    """

    action: Action[Any, Any]
    args: dict[str, Any]
    standing: Callable[[], Any]
    count: Callable[[], int]
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self._counted = self.count()

    def effects(self) -> int:
        """Since the trial began: a service goes on from one to the next."""
        return self.count() - self._counted


# -- rows -------------------------------------------------------------------------------------------------------------


def _shop(request: pytest.FixtureRequest) -> Any:
    shop = request.getfixturevalue("shop")
    shop.ask(
        "INSERT INTO things (name, price, tags, made_at) VALUES "
        """('chair', 5, '["a", {"b": 1.50}]', '2030-01-02 03:04:05.678901+02')"""
    )
    return shop


def _rows_trial(action: Action[Any, Any], args: dict[str, Any]) -> Callable[[pytest.FixtureRequest], Trial]:
    def make(request: pytest.FixtureRequest) -> Trial:
        shop = _shop(request)
        return Trial(
            action,
            args,
            lambda: shop.ask("SELECT things::text FROM things ORDER BY id"),
            lambda: int(
                shop.ask("SELECT count(*) FROM airflow_saga_receipts WHERE result IS NOT NULL")[0][0]
            ),
        )

    return make


# -- services ---------------------------------------------------------------------------------------------------------


def _connect(request: pytest.FixtureRequest, conn_id: str, conn_type: str, **parts: Any) -> None:
    request.getfixturevalue("set_connection")(conn_id, conn_type, **parts)


def hotel(request: pytest.FixtureRequest) -> Trial:
    world = request.getfixturevalue("world")
    _connect(request, "agency", "http", host=world.url)
    return Trial(
        book_hotel,
        {"body": {"city": "Lisbon"}},
        lambda: world.net().of("hotels"),
        lambda: sum(row["landed"] > 0 for row in world.calls("hotels")),
    )


def room(request: pytest.FixtureRequest) -> Trial:
    server: services.Server = request.getfixturevalue("calendars")
    _connect(request, "calendars", "http", host="127.0.0.1", port=server.port, login="ann", password="ann")
    httpx.request("MKCALENDAR", f"{server.url}/ann/room/", auth=("ann", "ann"))

    def events() -> list[str]:
        answer = httpx.request(
            "PROPFIND", f"{server.url}/ann/room/", headers={"Depth": "1"}, auth=("ann", "ann")
        )
        return sorted(part for part in answer.text.replace("<", ">").split(">") if part.endswith(".ics"))

    end = START + timedelta(hours=1)
    args = {"summary": "Interview; with Ann, Bob", "start": START, "end": end, "location": "Blue " * 30}
    return Trial(block_room, args, events, lambda: len(events()))


def s3_client(request: pytest.FixtureRequest) -> Any:
    server: services.Server = request.getfixturevalue("object_store")
    extra = {"region_name": "eu-west-1", "endpoint_url": server.url}
    _connect(request, "objects", "aws", login="planted-id", password="planted-secret", extra=extra)
    client = boto3.client(
        "s3",
        region_name="eu-west-1",
        endpoint_url=server.url,
        aws_access_key_id="x",
        aws_secret_access_key="y",
    )
    if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
        client.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    return client


def versions_of(client: Any, name: str) -> list[tuple[str, bool]]:
    page = client.list_object_versions(Bucket=BUCKET, Prefix=name)
    both = [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]
    return sorted((each["VersionId"], each["IsLatest"]) for each in both)


def _object_trial(
    action: Action[Any, Any], *, exists: bool, **args: Any
) -> Callable[[pytest.FixtureRequest], Trial]:
    def make(request: pytest.FixtureRequest) -> Trial:
        client = s3_client(request)
        name = f"2030/{uuid.uuid4().hex}"
        if exists:
            client.put_object(Bucket=BUCKET, Key=name, Body=b"what was there")
        return Trial(
            action,
            {"object_key": name, **args},
            lambda: versions_of(client, name),
            lambda: len(versions_of(client, name)) - exists,
        )

    return make


def card(request: pytest.FixtureRequest) -> Trial:
    server: services.Server = request.getfixturevalue("payments")
    secret = f"{STRIPE_KEY}_{uuid.uuid4().hex}"  # an account of its own
    _connect(request, "stripe", "http", host="127.0.0.1", port=server.port, password=secret)

    def charges() -> list[dict[str, Any]]:
        answer = httpx.get(f"{server.url}/v1/charges", params={"limit": 100}, auth=(secret, ""))
        return [each for each in answer.json()["data"] if each["status"] == "succeeded"]

    return Trial(
        charge,
        {"amount": 4207, "currency": "eur", "source": "tok_visa"},
        lambda: sum(each["amount"] - each["amount_refunded"] for each in charges()),
        lambda: len(charges()),
    )


def mail(request: pytest.FixtureRequest) -> Trial:
    system: services.MailSystem = request.getfixturevalue("mail_system")
    user = f"{uuid.uuid4().hex[:8]}-{DESK}"
    plain = {"disable_ssl": True, "disable_tls": True, "from_email": "saga@example.org"}
    _connect(request, "smtp", "smtp", host="127.0.0.1", port=system.smtp_port, extra=plain)
    _connect(
        request,
        "mailbox",
        "imap",
        host="127.0.0.1",
        port=system.imap_port,
        login=user,
        password=services.MAIL_PASSWORD,
        extra={"use_ssl": False},
    )
    args = {"to": user, "subject": "Booking 4711", "text": "Please print the papers."}
    return Trial(
        tell_desk,
        args,
        lambda: system.count(user),
        lambda: sum(to == user for to, _ in system.taken),
    )


TRIALS: dict[str, Callable[[pytest.FixtureRequest], Trial]] = {
    "row inserted": _rows_trial(add_thing, {"values": {"name": "table", "price": 7, "tags": '{"c": [1]}'}}),
    "row changed": _rows_trial(set_price, {"where": {"id": 1}, "values": {"price": 9, "tags": None}}),
    "row deleted": _rows_trial(drop_thing, {"where": {"name": "chair"}}),
    "http resource": hotel,
    "calendar event": room,
    "object put": _object_trial(publish, exists=False, body=b"new"),
    "object put over another": _object_trial(publish, exists=True, body="newer"),
    "object deleted": _object_trial(withdraw, exists=True),
    "card charged": card,
    "mail sent": mail,
}
