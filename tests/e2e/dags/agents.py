"""Agents in every form: the saga's operator, the provider's with the capability, a bare one, mapped ones, approvals.

What an agent does is in the script of its model, and each run has a model of its own: its name is the run's id.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from airflow.providers.common.ai.operators.agent import AgentOperator
from airflow.providers.common.ai.toolsets.hook import HookToolset
from airflow.providers.common.ai.toolsets.sql import SQLToolset
from airflow.providers.postgres.hooks.postgres import PostgresHook
from airflow.sdk import task
from pydantic_ai import Agent
from support import travel

from airflow_saga import (
    NON_COMPENSABLE,
    READ_ONLY,
    ActionRecord,
    Applied,
    NotApplied,
    SagaAgentOperator,
    SagaCapability,
    SagaDAG,
    SagaLLMOperator,
    ToolAction,
    action,
)
from airflow_saga.ai import action_key

MODEL = "openai-chat:{{ run_id }}"
LLM = "agents_llm"


def cancel(record: ActionRecord) -> None:
    travel.cancel(record.name, record.result["id"], idempotency_key=record.undo_key)


def find(record: ActionRecord) -> Applied | NotApplied:
    found = travel.find(record.name, record.key)
    return Applied(found) if found else NotApplied()


@action(compensate=READ_ONLY)
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


@action(compensate=cancel, verify=find, timeout=timedelta(seconds=20))
def flights(trip: str, *, key: str) -> dict:
    """Book a flight for a trip."""
    return travel.book("flights", {"trip": trip}, idempotency_key=key)


def hotels(trip: str) -> dict:
    """Book a hotel for a trip."""
    return travel.book("hotels", {"trip": trip}, idempotency_key=action_key())


def payments(trip: str) -> dict:
    """Pay for a trip."""
    return travel.book("payments", {"trip": trip}, idempotency_key=action_key())


def messages(trip: str) -> dict:
    """Tell the customer of a trip."""
    return travel.book("messages", {"trip": trip}, idempotency_key=action_key())


def cars(trip: str) -> dict:
    """Rent a car for a trip. Nobody says how to undo it."""
    return travel.book("cars", {"trip": trip}, idempotency_key=action_key())


UNDO = {
    "hotels": ToolAction(cancel, verify=find, timeout=timedelta(seconds=20)),
    "payments": cancel,
    "messages": NON_COMPENSABLE,
    "query": READ_ONLY,
    "list_tables": READ_ONLY,
    "get_schema": READ_ONLY,
    "check_query": READ_ONLY,
    "get_first": READ_ONLY,
}
TOOLS: dict[str, Any] = {"tools": [hotels, payments, messages]}
capability = SagaCapability(UNDO, actions=[weather, flights])
asking = SagaCapability(UNDO, undeclared="ask")


def shop() -> list[Any]:
    return [
        SQLToolset(db_conn_id="saga_default", schema="airflow_saga", allowed_tables=["saga"]),
        HookToolset(PostgresHook("saga_default"), allowed_methods=["get_first"]),
    ]


with SagaDAG("agent_operator", schedule=None):
    SagaAgentOperator(
        task_id="agent",
        llm_conn_id=LLM,
        model_id=MODEL,
        prompt="{{ run_id }}: to Lisbon",
        toolsets=shop(),
        agent_params=TOOLS,
        compensations=UNDO,
        actions=[weather, flights],
        retries=1,
        retry_delay=timedelta(seconds=1),
    )

with SagaDAG("agent_task", schedule=None):

    @task.agent(llm_conn_id=LLM, model_id=MODEL, agent_params=TOOLS, capabilities=[capability])
    def agent(**context: Any) -> str:
        return f"{context['run_id']}: to Lisbon"

    agent()

with SagaDAG("agent_provider", schedule=None):
    AgentOperator(
        task_id="agent",
        llm_conn_id=LLM,
        model_id=MODEL,
        prompt="to Lisbon",
        agent_params={**TOOLS, "capabilities": [capability]},
    )

with SagaDAG("agent_bare", schedule=None):

    @task.saga(task_id="agent")
    def bare(**context: Any) -> str:
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        provider = OpenAIProvider(base_url=f"{os.environ['MODEL_URL']}/v1", api_key="none")
        made = Agent(
            OpenAIChatModel(context["run_id"], provider=provider), capabilities=[capability], **TOOLS
        )
        return made.run_sync("to Lisbon").output

    bare()

with SagaDAG("agent_mapped", schedule=None):
    SagaAgentOperator.partial(
        task_id="agent",
        llm_conn_id=LLM,
        model_id=MODEL,
        agent_params=TOOLS,
        compensations=UNDO,
        actions=[weather, flights],
    ).expand(prompt=["to Lisbon", "to Porto"])

with SagaDAG("agent_asks", schedule=None):
    AgentOperator(
        task_id="agent",
        llm_conn_id=LLM,
        model_id=MODEL,
        prompt="to Lisbon",
        agent_params={"tools": [hotels, payments, cars]},
        capabilities=[asking],
    )

with SagaDAG("agent_llm", schedule=None):
    SagaLLMOperator(
        task_id="agent", llm_conn_id=LLM, model_id=MODEL, prompt="to Lisbon?", system_prompt="Be brief."
    )

with SagaDAG("agent_llm_asks", schedule=None):
    SagaLLMOperator(task_id="agent", llm_conn_id=LLM, model_id=MODEL, prompt="Well?", require_approval=True)
