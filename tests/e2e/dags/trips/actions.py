"""Actions against the travel service, named after the kinds of the effects they make there.

`flights`, `hotels`, `cars`, `notes` can be asked about (`verify`); so can `yachts`, which may take a minute, `rooms`,
which take effect late, and `cruises`, which stay in C once they are booked, where no exception reaches them. `tours`
cannot. `payments` may be called again with the same key; `messages` cannot be undone; `weather` changes nothing.
"""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from typing import Any

from support import travel

from airflow_saga import (
    NON_COMPENSABLE,
    READ_ONLY,
    Action,
    ActionRecord,
    Applied,
    NotApplied,
    Retry,
    action,
)

# A call must not time out where a busy machine is slow with the rest.
BUSY = float(os.environ.get("SAGA_TEST_PATIENCE", "1"))
LONG = timedelta(seconds=20)
SHORT = timedelta(seconds=3)
TRIES = Retry(first=timedelta(milliseconds=200), tries=3)


def cancel(record: ActionRecord) -> None:
    travel.cancel(record.name, record.result["id"], idempotency_key=record.undo_key)


def find(record: ActionRecord) -> Applied | NotApplied:
    found = travel.find(record.name, record.key)
    return Applied(found) if found else NotApplied()


def book(kind: str, trip: dict, key: str) -> dict:
    try:
        return travel.book(kind, {**trip, "trip": trip["id"]}, idempotency_key=key)
    except travel.Refused as no:
        raise NotApplied(str(no)) from no


# How long an answer is waited for is said by the actions alone.
travel.TIMEOUT_SECONDS = 600.0
ASKED: dict[str, Any] = {"compensate": cancel, "verify": find, "timeout": LONG, "undo_retry": TRIES}


@action(**ASKED)
def flights(trip: dict, *, key: str) -> dict:
    return book("flights", trip, key)


@action(**ASKED)
def hotels(trip: dict, *, key: str) -> dict:
    return book("hotels", trip, key)


@action(**ASKED)
def cars(trip: dict, *, key: str) -> dict:
    return book("cars", trip, key)


@action(**ASKED)
def notes(trip: dict, *, key: str) -> dict:
    return book("notes", trip, key)


@action(**{**ASKED, "timeout": timedelta(seconds=45 * BUSY)})
def yachts(trip: dict, *, key: str) -> dict:
    return book("yachts", trip, key)


@action(compensate=cancel, timeout=SHORT)
def tours(trip: dict, *, key: str) -> dict:
    return book("tours", trip, key)


@action(compensate=cancel, verify=find, timeout=SHORT, settle_after=timedelta(seconds=6))
def rooms(trip: dict, *, key: str) -> dict:
    return book("rooms", trip, key)


@action(compensate=cancel, verify=find, timeout=SHORT)
def cruises(trip: dict, *, key: str) -> dict:
    booked = book("cruises", trip, key)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):  # the second never returns, and unlike a sleep it goes on after a signal
        libc.pthread_mutex_lock(mutex)
    return booked


@action(compensate=cancel, idempotent=True, timeout=LONG, retry=TRIES)
def payments(trip: dict, *, key: str) -> dict:
    return book("payments", trip, key)


@action(compensate=NON_COMPENSABLE)
def messages(trip: dict, *, key: str) -> dict:
    return book("messages", trip, key)


@action(compensate=READ_ONLY)
def weather(trip: dict) -> str:
    return f"sunny in {trip['to']}"


ACTIONS: dict[str, Action[..., Any]] = {
    each.name: each
    for each in (flights, hotels, cars, notes, yachts, tours, rooms, cruises, payments, messages, weather)
}
