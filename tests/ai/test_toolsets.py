"""Toolsets of every origin: the provider's own, which mask what they return, and an MCP server over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from airflow.providers.common.ai.toolsets.hook import HookToolset
from airflow.providers.common.ai.toolsets.sql import SQLToolset
from airflow.providers.common.ai.utils.toolset_base import MaskingCapability, ensure_masked
from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret
from mcp.server import MCPServer
from psycopg.conninfo import conninfo_to_dict
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelRetry
from pydantic_ai.mcp import MCPToolset
from pydantic_ai.toolsets import FunctionToolset

from airflow_saga.ai import SagaCapability, ToolAction, action_key
from airflow_saga.core.actions import READ_ONLY
from dags.support import travel
from tests.ai.cast import open_model
from tests.runtime.lab import Lab
from tests.support.model import ModelView, calls, says
from tests.support.ports import free_port
from tests.support.world import View

ORDER_NUMBER = "order-7731-blue"
"""Looks like a registered secret to whoever masks what a tool returns, and is what the undo needs."""


class AgencyHook(BaseHook):
    """A hook of a provider, as far as an agent sees it."""

    conn_name_attr = "agency_conn_id"

    def __init__(self, agency_conn_id: str = "agency") -> None:
        super().__init__()
        self.agency_conn_id = agency_conn_id

    def order(self, what: str) -> dict[str, Any]:
        """Order something.

        :param what: what is wanted.
        """
        return order(what)


def order(what: str) -> dict[str, Any]:
    """Order something."""
    booked = travel.book("flights", {"what": what}, idempotency_key=action_key())
    return {"number": booked["id"], "for": ORDER_NUMBER}


def cancel_numbered(record: Any) -> None:
    number = (
        record.result["number"] if isinstance(record.result, dict) else json.loads(record.result)["number"]
    )
    travel.cancel("flights", number, idempotency_key=record.undo_key)


def agent_of(model: ModelView, capability: SagaCapability, toolset: Any) -> Agent[None, str]:
    """As the provider builds one: masked at the toolset, and by the innermost capability."""
    return Agent(
        open_model(model.url, model.model),
        toolsets=[ensure_masked(toolset)],
        capabilities=[capability, MaskingCapability()],
    )


def test_a_tool_of_a_hook_is_recorded_and_undone(lab: Lab, model: ModelView, world: View) -> None:
    capability = SagaCapability({"order": ToolAction(cancel_numbered)})
    agent = agent_of(model, capability, HookToolset(AgencyHook(), allowed_methods=["order"]))
    model.script(calls(("order", {"what": "x"})), says("bye"))
    assert lab.step(lambda _: agent.run_sync("go").output).output == "bye"
    assert [name for name, _ in lab.states()] == ["model_request", "order", "model_request"]
    lab.undo()
    assert world.net().total == 0


def test_the_log_has_the_true_result_and_the_model_sees_the_masked_one(
    lab: Lab, model: ModelView, world: View
) -> None:
    mask_secret(ORDER_NUMBER)
    capability = SagaCapability({"order": ToolAction(cancel_numbered)})
    agent = agent_of(model, capability, FunctionToolset([order]))
    model.script(calls(("order", {"what": "x"})), says("bye"))
    lab.step(lambda _: agent.run_sync("go").output)
    assert ORDER_NUMBER not in json.dumps(model.requests[1]["messages"])
    assert ORDER_NUMBER in (lab.actions()[1].result or "")


def test_what_is_a_secret_to_the_saga_too_is_masked_in_the_log(
    lab: Lab, model: ModelView, world: View
) -> None:
    lab.known_secrets.append(ORDER_NUMBER)
    capability = SagaCapability({"order": ToolAction(cancel_numbered)})
    agent = agent_of(model, capability, FunctionToolset([order]))
    model.script(calls(("order", {"what": "x"})), says("bye"))
    lab.step(lambda _: agent.run_sync("go").output)
    row = lab.actions()[1]
    assert ORDER_NUMBER not in (row.result or "")
    assert "masked" in (row.error or "")


def test_the_tools_of_a_sql_toolset_are_recorded(
    lab: Lab, model: ModelView, shared_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = conninfo_to_dict(shared_database_url)
    connection = {
        "conn_type": "postgres",
        "host": where["host"],
        "login": where.get("user"),
        "password": where.get("password"),
        "schema": where["dbname"],
        "port": int(where.get("port") or 5432),
    }
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", json.dumps(connection))
    capability = SagaCapability(
        dict.fromkeys(("list_tables", "get_schema", "query", "check_query"), READ_ONLY)
    )
    agent = agent_of(model, capability, SQLToolset(db_conn_id="shop"))
    model.script(calls(("query", {"sql": "SELECT 40 + 2 AS answer"})), says("bye"))
    assert lab.step(lambda _: agent.run_sync("go").output).output == "bye"
    assert lab.states()[1] == ("query", "DONE")
    assert "42" in (lab.actions()[1].result or "")


# -- MCP -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mcp_url() -> Iterator[str]:
    """An MCP server with a tool that books and one that refuses, over HTTP on loopback."""
    server: Any = MCPServer("agency")

    @server.tool()
    def fly(what: str) -> dict[str, Any]:
        """Book a flight."""
        return {"number": travel.book("flights", {"what": what})["id"]}

    @server.tool()
    def refuse(what: str) -> str:
        """Always says no."""
        raise ValueError(f"there is no {what}")

    port = free_port()
    running = uvicorn.Server(
        uvicorn.Config(server.streamable_http_app(), host="127.0.0.1", port=port, log_level="error")
    )
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}/mcp"
    running.should_exit = True
    thread.join(10)


def test_the_tools_of_an_mcp_server_are_recorded_and_undone(
    lab: Lab, model: ModelView, world: View, mcp_url: str
) -> None:
    capability = SagaCapability(
        {
            "fly": ToolAction(cancel_numbered),
            "refuse": ToolAction(cancel_numbered, refuses_with=[ModelRetry]),
        }
    )
    agent = agent_of(model, capability, MCPToolset(mcp_url))
    model.script(calls(("fly", {"what": "x"})), calls(("refuse", {"what": "y"})), says("bye"))
    assert lab.step(lambda _: agent.run_sync("go").output).output == "bye"
    states = dict(lab.states())
    assert states["fly"] == "DONE"
    assert states["refuse"] == "FAILED"
    lab.undo()
    assert world.net().total == 0
