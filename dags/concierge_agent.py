"""A concierge: an agent that searches, books, pays and tells the customer, as one step of a saga.

Every answer of the model and every call of a tool is an action. Stop it in the middle of a sentence, and the stream is
closed and what its tools did is undone, newest first; kill it, and it goes on where it was, without asking the model
again for what it has said. `make demo-agent` plays that with a scripted model, without key or network; any other model
is a connection away: `concierge_llm`, of the type `pydanticai`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from support import travel

from airflow_saga import (
    NON_COMPENSABLE,
    READ_ONLY,
    ActionRecord,
    Applied,
    NotApplied,
    SagaAgentOperator,
    SagaDAG,
    action,
)

PATIENCE = timedelta(seconds=10)


@contextmanager
def refusals_told() -> Iterator[None]:
    """The agency said no, so nothing happened: the model is told, and goes on from there."""
    try:
        yield
    except travel.Refused as no:
        raise NotApplied(str(no)) from no


@action(compensate=READ_ONLY)
def search(to: str) -> list[str]:
    """Find flights to a city, by its code."""
    return [f"{to}-0710", f"{to}-1345"]


def cancel_flight(record: ActionRecord) -> None:
    travel.cancel_flight(record.result["id"], idempotency_key=record.undo_key)


def find_flight(record: ActionRecord) -> Applied | NotApplied:
    """Ask the service what became of a booking whose answer was lost."""
    found = travel.find_flight(record.key)
    return Applied(found) if found else NotApplied()


@action(compensate=cancel_flight, verify=find_flight, timeout=PATIENCE)
def book(flight: str, trip: str, *, key: str) -> dict:
    """Book a flight for a trip."""
    with refusals_told():
        return travel.book_flight({"id": trip, "flight": flight}, idempotency_key=key)


def refund(record: ActionRecord) -> None:
    travel.refund(record.result["id"], idempotency_key=record.undo_key)


@action(compensate=refund, idempotent=True, timeout=PATIENCE)
def pay(amount: str, trip: str, *, key: str) -> dict:
    """Pay an amount (a decimal as text) for a trip."""
    with refusals_told():
        return travel.charge({"id": trip}, amount, idempotency_key=key)


@action(compensate=NON_COMPENSABLE, timeout=PATIENCE)
def notify(text: str, trip: str, *, key: str) -> dict:
    """Tell the customer of a trip something; it cannot be unsent."""
    with refusals_told():
        return travel.send_message({"id": trip}, "customer", text, idempotency_key=key)


with SagaDAG(
    "concierge_agent",
    schedule=None,
    params={"trip": "demo", "wish": "a morning flight to Lisbon", "model": "openai-chat:concierge"},
    tags=["demo"],
) as dag:
    SagaAgentOperator(
        task_id="concierge",
        llm_conn_id="concierge_llm",
        model_id="{{ params.model }}",
        system_prompt="You are a concierge. Search, book, pay, then tell the customer. Use the trip's id as given.",
        prompt="Trip {{ params.trip }}: {{ params.wish }}.",
        actions=[search, book, pay, notify],
        retries=2,
        retry_delay=timedelta(seconds=2),
    )
