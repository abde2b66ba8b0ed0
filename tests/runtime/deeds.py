"""Actions of a travel agency's saga, one for each way an action can be declared. The world they change is real HTTP.

Tests and the child processes they kill import the same module, as forward and undo processes load the same DAG file.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from datetime import timedelta
from typing import Any

from airflow_saga.core.actions import NON_COMPENSABLE, READ_ONLY
from airflow_saga.core.declare import action
from airflow_saga.core.errors import CompensationRejected, NotApplied, Unavailable
from airflow_saga.core.policies import Retry
from airflow_saga.core.records import ActionRecord, Applied, Later, ProbeAnswer, Unknown
from dags.support import travel

TIMEOUT = timedelta(seconds=5)
QUICK = timedelta(seconds=0.5)
SOON = Retry(first=timedelta(seconds=0.05), factor=2.0, ceiling=timedelta(seconds=0.2), tries=3)
ONCE = Retry(tries=1)

libc = ctypes.CDLL(None)


# -- forward --------------------------------------------------------------------------------------------------------


def _book(kind: str, what: str, key: str) -> dict[str, Any]:
    try:
        return travel.book(kind, {"what": what}, idempotency_key=key)
    except travel.Refused as no:
        raise NotApplied(str(no)) from no


# -- undo and probes ------------------------------------------------------------------------------------------------


def unbook(record: ActionRecord) -> None:
    """Take a booking back by its id, or by the key it was made under where its result is not known."""
    booking = record.result["id"] if record.result is not None else None
    try:
        travel.cancel(
            record.params["kind"], booking, idempotency_key=record.undo_key, booked_under=record.key
        )
    except travel.Busy as busy:
        raise Unavailable("the agency", busy.after.total_seconds()) from busy
    except travel.Refused as no:
        raise CompensationRejected(str(no)) from no


def look_up(record: ActionRecord) -> ProbeAnswer:
    try:
        found = travel.find(record.params["kind"], record.key)
    except travel.CannotTell:
        return Unknown()
    return NotApplied() if found is None else Applied(found)


def refund(record: ActionRecord) -> Later | None:
    """Ask for the money back, and from then on how it stands."""
    if record.later_token is not None:
        status = travel.refund_status(record.later_token)
    else:
        told = travel.refund(record.result["id"], idempotency_key=record.undo_key)
        status, token = told["status"], told.get("token")
        if status == "pending":
            return Later(token, after=timedelta(seconds=0.2))
    if status == "pending":
        return Later(record.later_token, after=timedelta(seconds=0.2))
    if status == "failed":
        raise CompensationRejected("the bank refused the refund")
    return None


# -- the actions ----------------------------------------------------------------------------------------------------


@action(compensate=unbook, verify=look_up, timeout=TIMEOUT, retry=SOON, undo_retry=SOON)
def book(kind: str, what: str = "", *, key: str) -> dict[str, Any]:
    return _book(kind, what, key)


@action(compensate=unbook, verify=look_up, timeout=TIMEOUT, retry=SOON, undo_retry=SOON)
async def book_async(kind: str, what: str = "", *, key: str) -> dict[str, Any]:
    return await asyncio.to_thread(_book, kind, what, key)


@action(compensate=unbook, timeout=TIMEOUT, retry=SOON, undo_retry=SOON)
def book_blind(kind: str, what: str = "", *, key: str) -> dict[str, Any]:
    """Nobody can be asked what became of it."""
    return _book(kind, what, key)


@action(compensate=unbook, compensate_in_doubt=True, timeout=TIMEOUT, retry=SOON, undo_retry=SOON)
def book_coping(kind: str, what: str = "", *, key: str) -> dict[str, Any]:
    """Its compensation copes with a booking that may never have been made."""
    return _book(kind, what, key)


@action(compensate=unbook, idempotent=True, timeout=QUICK, retry=SOON, undo_retry=SOON)
def book_again(kind: str, what: str = "", *, key: str) -> dict[str, Any]:
    """May be called again with the same key."""
    return _book(kind, what, key)


@action(compensate=unbook, verify=look_up, timeout=QUICK, retry=SOON, undo_retry=SOON)
def book_quickly(kind: str, what: str = "", *, key: str) -> dict[str, Any]:
    return _book(kind, what, key)


@action(
    compensate=unbook,
    verify=look_up,
    timeout=QUICK,
    settle_after=timedelta(seconds=0.8),
    retry=ONCE,
    undo_retry=SOON,
)
def book_slow_world(kind: str, what: str = "", *, key: str) -> dict[str, Any]:
    """The world may let its effect land for another 0.8 s after the call was given up."""
    return _book(kind, what, key)


@action(compensate=unbook, timeout=QUICK, retry=SOON, undo_retry=SOON)
def book_quickly_blind(kind: str, what: str = "", *, key: str) -> dict[str, Any]:
    return _book(kind, what, key)


@action(compensate=unbook, verify=look_up, timeout=timedelta(seconds=30), retry=SOON, undo_retry=SOON)
def book_patiently(kind: str, what: str = "", *, key: str) -> dict[str, Any]:
    return _book(kind, what, key)


@action(compensate=refund, verify=look_up, timeout=TIMEOUT, retry=SOON, undo_retry=SOON)
def charge(amount: str, kind: str = "payments", *, key: str) -> dict[str, Any]:
    return travel.book(kind, {"amount": amount}, idempotency_key=key)


@action(compensate=READ_ONLY, timeout=TIMEOUT, retry=ONCE)
def search(kind: str, what: str = "") -> str:
    return f"{kind}: {travel.find(kind, what)}"


@action(compensate=NON_COMPENSABLE, timeout=TIMEOUT, retry=ONCE)
def tell(to: str, text: str, *, key: str) -> dict[str, Any]:
    return travel.send_message({}, to, text, idempotency_key=key)


@action(compensate=unbook, timeout=QUICK, retry=ONCE)
def block_in_c(seconds: int, kind: str = "blocks") -> None:
    """A driver that sits in C: nothing of Python runs until it returns."""
    libc.sleep(seconds)


@action(compensate=unbook, timeout=TIMEOUT)
def nothing(number: int, kind: str = "nothing") -> int:
    """Changes nothing that anybody sees, and takes no time."""
    return number


@action(compensate=unbook, timeout=QUICK, retry=ONCE)
def spin(seconds: float, kind: str = "spins") -> str:
    """Python code that runs and runs; it notices an exception that is raised in its thread."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.01)
    return "done"


@action(
    compensate=unbook,
    timeout=TIMEOUT,
    retry=Retry(first=timedelta(seconds=60), ceiling=timedelta(seconds=60), tries=5),
)
def slow_to_retry(kind: str, what: str = "", *, key: str) -> dict[str, Any]:
    """Waits a minute between its tries."""
    return _book(kind, what, key)


# -- for processes that are killed: short enough to wait for, long enough for a busy machine ------------------------

MOMENT = timedelta(seconds=1)


@action(compensate=unbook, verify=look_up, timeout=MOMENT, retry=SOON, undo_retry=SOON)
def reserve(kind: str, *, key: str) -> dict[str, Any]:
    return _book(kind, "", key)


@action(compensate=unbook, timeout=MOMENT, retry=SOON, undo_retry=SOON)
def reserve_blind(kind: str, *, key: str) -> dict[str, Any]:
    return _book(kind, "", key)


@action(compensate=unbook, idempotent=True, timeout=MOMENT, retry=SOON, undo_retry=SOON)
def reserve_again(kind: str, *, key: str) -> dict[str, Any]:
    return _book(kind, "", key)


@action(
    compensate=unbook,
    verify=look_up,
    timeout=MOMENT,
    settle_after=timedelta(seconds=0.5),
    retry=SOON,
    undo_retry=SOON,
)
def reserve_in_slow_world(kind: str, *, key: str) -> dict[str, Any]:
    return _book(kind, "", key)


# -- a body ---------------------------------------------------------------------------------------------------------


def five_bookings(saga: Any) -> None:
    for kind in ("flights", "hotels", "cars", "notes", "payments"):
        book(kind)
