"""The travel agency's client, as small as an agency's client is: read it as an example, not as a library.

What a caller must know about any remote call is in the exception. ``Refused``: proved that nothing happened. ``Busy``:
come back later (``after``). Everything else, a timeout above all: nobody knows whether it happened.

``TRAVEL_URL`` says where the agency is. Each function takes the idempotency key it sends; the same key twice is one
booking. Cancelling what is not there counts as cancelled. Socket timeouts are in seconds.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

TIMEOUT_SECONDS = 10.0
"""How long one send or receive may take."""

Booking = dict[str, Any]


class TravelError(Exception):
    """The agency did not do what it was asked, or nobody knows whether it did."""


class Refused(TravelError):
    """The agency said no (4xx, but for 422, a key used for something else): nothing happened."""


class Busy(TravelError):
    """The agency is overloaded (429, 503) or cannot be reached; ``after`` is when to come back."""

    def __init__(self, message: str, after: timedelta) -> None:
        super().__init__(message)
        self.after = after


class CannotTell(TravelError):
    """The agency does not know whether something was booked under a key."""


# -- flights, hotels, cars ---------------------------------------------------------------------------------------


def book_flight(trip: Booking, *, idempotency_key: str | None = None) -> Booking:
    """Book a flight for the trip; the booking has an ``id``."""
    return book("flights", _of_trip(trip), idempotency_key=idempotency_key)


def cancel_flight(
    booking_id: str | None, *, idempotency_key: str | None = None, booked_under: str | None = None
) -> Booking:
    """Cancel a flight by its id, or by the key it was booked under."""
    return cancel("flights", booking_id, idempotency_key=idempotency_key, booked_under=booked_under)


def find_flight(key: str) -> Booking | None:
    """Find the flight that stands under the key it was booked with."""
    return find("flights", key)


def book_hotel(trip: Booking, *, idempotency_key: str | None = None) -> Booking:
    """Book a hotel for the trip; the booking has an ``id``."""
    return book("hotels", _of_trip(trip), idempotency_key=idempotency_key)


def cancel_hotel(
    booking_id: str | None, *, idempotency_key: str | None = None, booked_under: str | None = None
) -> Booking:
    """Cancel a hotel by its id, or by the key it was booked under."""
    return cancel("hotels", booking_id, idempotency_key=idempotency_key, booked_under=booked_under)


def find_hotel(key: str) -> Booking | None:
    """Find the hotel that stands under the key it was booked with."""
    return find("hotels", key)


def book_car(trip: Booking, *, idempotency_key: str | None = None) -> Booking:
    """Rent a car for the trip; the booking has an ``id``."""
    return book("cars", _of_trip(trip), idempotency_key=idempotency_key)


def cancel_car(
    booking_id: str | None, *, idempotency_key: str | None = None, booked_under: str | None = None
) -> Booking:
    """Give a car back by its id, or by the key it was booked under."""
    return cancel("cars", booking_id, idempotency_key=idempotency_key, booked_under=booked_under)


def find_car(key: str) -> Booking | None:
    """Find the car that stands under the key it was booked with."""
    return find("cars", key)


# -- money -------------------------------------------------------------------------------------------------------


def charge(
    trip: Booking, amount: str, *, idempotency_key: str | None = None, token: str | None = None
) -> Booking:
    """Charge an amount (a decimal as text); the payment has an ``id``."""
    return book(
        "payments", {**_of_trip(trip), "amount": amount}, idempotency_key=idempotency_key, token=token
    )


def refund(
    payment_id: str | None,
    *,
    idempotency_key: str | None = None,
    charged_under: str | None = None,
    token: str | None = None,
) -> Booking:
    """Give the money back; ``status``: ``undone``, ``absent``, or ``pending`` with a ``token`` to ask with later."""
    asked = {"payment": payment_id, "payment_key": charged_under}
    return _call("POST", "/refunds", asked, idempotency_key=idempotency_key, token=token, absent_ok=True)


def refund_status(refund_token: str) -> str:
    """Say what became of a pending refund: ``pending``, ``settled`` or ``failed``."""
    return str(_call("GET", f"/refunds/{quote(refund_token, safe='')}")["status"])


def find_payment(key: str) -> Booking | None:
    """Find the payment that stands under the key it was charged with."""
    return find("payments", key)


# -- words -------------------------------------------------------------------------------------------------------


def send_message(trip: Booking, to: str, text: str, *, idempotency_key: str | None = None) -> Booking:
    """Send a message; it cannot be unsent."""
    return book("messages", {**_of_trip(trip), "to": to, "text": text}, idempotency_key=idempotency_key)


def note(trip: Booking, text: str, *, idempotency_key: str | None = None) -> Booking:
    """Write a note into the customer's file."""
    return book("notes", {**_of_trip(trip), "text": text}, idempotency_key=idempotency_key)


def remove_note(
    note_id: str | None, *, idempotency_key: str | None = None, noted_under: str | None = None
) -> Booking:
    """Remove a note by its id, or by the key it was written under."""
    return cancel("notes", note_id, idempotency_key=idempotency_key, booked_under=noted_under)


# -- any kind ----------------------------------------------------------------------------------------------------


def book(
    kind: str, wanted: dict[str, Any], *, idempotency_key: str | None = None, token: str | None = None
) -> Booking:
    """Make one effect of any kind."""
    return _call("POST", _place(kind), wanted, idempotency_key=idempotency_key, token=token)


def cancel(
    kind: str,
    booking_id: str | None,
    *,
    idempotency_key: str | None = None,
    booked_under: str | None = None,
    token: str | None = None,
) -> Booking:
    """Undo one effect of any kind, by its id or by the key it was made under."""
    where = _place(kind)
    if booking_id is not None:
        where += f"/{quote(booking_id, safe='')}"
    elif booked_under is not None:
        where += f"?{urlencode({'key': booked_under})}"
    else:
        raise ValueError(f"cancelling {kind} needs an id or the key it was booked under")
    return _call("DELETE", where, idempotency_key=idempotency_key, token=token, absent_ok=True)


def find(kind: str, key: str) -> Booking | None:
    """Find what stands under a key; ``None``: nothing does.

    :raises CannotTell: when the agency itself does not know.
    """
    found = _call("GET", f"{_place(kind)}?{urlencode({'key': key})}")
    if found["landed"] is None:
        raise CannotTell(f"the agency cannot tell whether {kind} were booked under {key}")
    return found["effect"] if found["standing"] else None


# -- the wire ----------------------------------------------------------------------------------------------------


def _of_trip(trip: Booking) -> dict[str, Any]:
    return {**trip, "trip": trip["id"]} if "id" in trip else dict(trip)


def _place(kind: str) -> str:
    return f"/effects/{quote(kind, safe='')}"


def _call(
    method: str,
    path: str,
    body: Any = None,
    *,
    idempotency_key: str | None = None,
    token: str | None = None,
    absent_ok: bool = False,
) -> dict[str, Any]:
    base = urlsplit(os.environ["TRAVEL_URL"])
    headers = {"Content-Type": "application/json"}
    if idempotency_key is not None:
        headers["Idempotency-Key"] = idempotency_key
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    connection = HTTPConnection(base.hostname or "127.0.0.1", base.port, timeout=TIMEOUT_SECONDS)
    try:
        connection.connect()
    except OSError as problem:
        raise Busy(
            f"{method} {path}: not reached, nothing was sent: {problem}", timedelta(seconds=1)
        ) from problem
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, base.path.rstrip("/") + path, content, headers)
        answer = connection.getresponse()
        raw = answer.read()
    except HTTPException as problem:
        raise TravelError(f"{method} {path}: the connection broke: {problem!r}") from problem
    finally:
        connection.close()
    what = f"{method} {path}: {answer.status} {raw[:200].decode(errors='replace')}"
    if answer.status in (429, 503):
        raise Busy(what, timedelta(seconds=float(answer.headers.get("Retry-After", 1))))
    if 400 <= answer.status < 500 and answer.status != 422 and not (absent_ok and answer.status == 404):
        raise Refused(what)
    if answer.status >= 500 or answer.status == 422:
        raise TravelError(what)
    try:
        return dict(json.loads(raw))
    except ValueError as problem:
        raise TravelError(f"{method} {path}: no sense in the answer: {raw[:200]!r}") from problem
