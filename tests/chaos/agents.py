"""An agent to be killed: as a DAG file would declare it, loaded by the processes that act and by those that undo."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from airflow_saga.ai import SagaCapability, ToolAction, action_key
from airflow_saga.core.actions import READ_ONLY
from airflow_saga.core.declare import action
from airflow_saga.core.records import ActionRecord, Applied, NotApplied
from airflow_saga.runtime.saga import Saga
from dags.support import travel

TIMEOUT = timedelta(seconds=2)
KIND = {"agent_flies": "flights", "agent_sleeps": "hotels", "agent_drives": "cars"}


def give_back(record: ActionRecord) -> None:
    result = record.result or {}
    travel.cancel(
        KIND[record.name], result.get("id"), idempotency_key=record.undo_key, booked_under=record.key
    )


def look_up(record: ActionRecord) -> Applied | NotApplied:
    found = travel.find(KIND[record.name], record.key)
    return NotApplied() if found is None else Applied(found)


def _book(kind: str, what: str, key: str) -> dict[str, Any]:
    """With a short-lived token, another one in each process: the key must not depend on it."""
    return travel.book(kind, {"what": what}, idempotency_key=key, token=f"worker {os.getpid()}")


def agent_looks(city: str) -> str:
    """Look around."""
    return f"{city} is nice"


def agent_flies(to: str) -> dict[str, Any]:
    """Book a flight."""
    return _book("flights", to, action_key())


async def agent_sleeps(at: str) -> dict[str, Any]:
    """Book a hotel."""
    return _book("hotels", at, action_key())


@action(compensate=give_back, verify=look_up, timeout=TIMEOUT)
def agent_drives(car: str, *, key: str) -> dict[str, Any]:
    """Book a car."""
    return _book("cars", car, key)


capability = SagaCapability(
    {
        "agent_looks": READ_ONLY,
        "agent_flies": ToolAction(give_back, verify=look_up, timeout=TIMEOUT),
        "agent_sleeps": ToolAction(give_back, verify=look_up, timeout=TIMEOUT),
    },
    actions=[agent_drives],
    model_timeout=timedelta(seconds=10),
)


def converse(saga: Saga, url: str, model: str) -> str:
    """The body of a step: one conversation with the scripted model."""
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    agent = Agent(
        OpenAIChatModel(model, provider=provider),
        tools=[agent_looks, agent_flies, agent_sleeps],
        capabilities=[capability],
    )
    return agent.run_sync("to Lisbon").output
