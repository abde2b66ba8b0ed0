"""A concierge agent, as a DAG file would declare it: its tools at the top level, and what undoes each."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from airflow_saga.ai import SagaCapability, ToolAction, action_key
from airflow_saga.core.actions import NON_COMPENSABLE, READ_ONLY
from airflow_saga.core.declare import action
from airflow_saga.core.errors import NotApplied
from airflow_saga.core.policies import Retry
from airflow_saga.core.records import ActionRecord, Applied
from dags.support import travel

TIMEOUT = timedelta(seconds=3)
SOON = Retry(first=timedelta(seconds=0.05), tries=3)


def unbook(record: ActionRecord) -> None:
    kind = {"book_flight": "flights", "reserve_hotel": "hotels", "rent_car": "cars"}[record.name]
    result = record.result or {}
    travel.cancel(kind, result.get("id"), idempotency_key=record.undo_key, booked_under=record.key)


def look_up_flight(record: ActionRecord) -> Any:
    found = travel.find("flights", record.key)
    return NotApplied() if found is None else Applied(found)


def find_flights(city: str) -> list[str]:
    """Find flights to a city."""
    return [f"{city}-1", f"{city}-2"]


def book_flight(flight: str) -> dict[str, Any]:
    """Book a flight; blocks its thread."""
    try:
        return travel.book("flights", {"what": flight}, idempotency_key=action_key())
    except travel.Refused as no:
        raise NotApplied(str(no)) from no


async def reserve_hotel(hotel: str) -> dict[str, Any]:
    """Reserve a hotel, without blocking the loop."""
    return await asyncio.to_thread(travel.book, "hotels", {"what": hotel}, idempotency_key=action_key())


def notify_customer(text: str) -> str:
    """Tell the customer."""
    travel.book("messages", {"text": text}, idempotency_key=action_key())
    return "sent"


@action(compensate=unbook, timeout=TIMEOUT)
def rent_car(car: str, *, key: str) -> dict[str, Any]:
    """Rent a car."""
    try:
        return travel.book("cars", {"what": car}, idempotency_key=key)
    except travel.Refused as no:
        raise NotApplied(str(no)) from no


saga = SagaCapability(
    {
        "find_flights": READ_ONLY,
        "book_flight": ToolAction(unbook, verify=look_up_flight, timeout=TIMEOUT, retry=Retry(tries=1)),
        "reserve_hotel": ToolAction(unbook, timeout=TIMEOUT),
        "notify_customer": NON_COMPENSABLE,
    },
    actions=[rent_car],
    model_timeout=TIMEOUT,
)


def open_model(url: str, name: str) -> OpenAIChatModel:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    return OpenAIChatModel(name, provider=OpenAIProvider(openai_client=client))


def concierge(url: str, name: str, capability: SagaCapability = saga, **more: Any) -> Agent[None, str]:
    wanted = {
        "tools": [find_flights, book_flight, reserve_hotel, notify_customer],
        "instructions": "Be brief.",
        **more,
    }
    return Agent(open_model(url, name), capabilities=[capability], **wanted)


def until(condition: Any, seconds: float = 10.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)
    return value
