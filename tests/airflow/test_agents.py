"""Agents of the official provider as steps of a saga DAG: what is made of them while the file is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from airflow.providers.common.ai.operators.agent import AgentOperator
from airflow.sdk import DAG, task
from airflow.serialization.serialized_objects import DagSerialization
from pydantic_ai.capabilities import AbstractCapability

from airflow_saga import (
    NON_COMPENSABLE,
    READ_ONLY,
    ActionRecord,
    SagaAgentOperator,
    SagaCapability,
    SagaDAG,
    SagaLLMOperator,
    ToolAction,
    compensation_dag,
)
from airflow_saga.core.actions import registry
from airflow_saga.core.errors import ActionDeclarationError
from airflow_saga.graph import is_step
from airflow_saga.operators.agent import AgentStep


def give_back(record: ActionRecord) -> None:
    return None


def give_back_otherwise(record: ActionRecord) -> None:
    return None


UNDO = {"peek": READ_ONLY, "borrow": ToolAction(give_back, idempotent=True), "announce": NON_COMPENSABLE}
capability = SagaCapability(UNDO)
ASKS: dict[str, Any] = {"llm_conn_id": "llm"}


@pytest.fixture
def known(request: pytest.FixtureRequest) -> str:
    """A name for a tool that nobody else has."""
    return f"tool_{request.node.name.removeprefix('test_')[:60]}"


def test_every_form_of_an_agent_is_a_step_and_has_its_undo() -> None:
    with SagaDAG("forms", schedule=None) as dag:
        SagaAgentOperator(task_id="own", prompt="hi", compensations=UNDO, **ASKS)
        SagaLLMOperator(task_id="llm", prompt="hi", **ASKS)
        AgentOperator(task_id="listed", prompt="hi", capabilities=[capability], **ASKS)
        AgentOperator(task_id="passed", prompt="hi", agent_params={"capabilities": [capability]}, **ASKS)
        AgentOperator.partial(task_id="mapped", capabilities=[capability], **ASKS).expand(prompt=["a", "b"])

        @task.agent(capabilities=[capability], **ASKS)
        def decorated() -> str:
            return "hi"

        decorated()
        AgentOperator(task_id="plain", prompt="hi", **ASKS)

    steps = {each.task_id for each in dag.tasks if is_step(each)}
    assert steps == {"own", "llm", "listed", "passed", "mapped", "decorated"}
    assert isinstance(dag.get_task("listed"), AgentStep)
    assert dag.get_task("decorated").custom_operator_name == "@task.agent"


def test_capabilities_of_the_agent_params_stand_beside_the_saga_s() -> None:
    other = AbstractCapability()
    operator = SagaAgentOperator(
        task_id="agent", prompt="hi", agent_params={"capabilities": [other], "retries": 2}, **ASKS
    )
    saga, kept = operator.capabilities
    assert isinstance(saga, SagaCapability)
    assert kept is other
    assert operator.agent_params == {"retries": 2}


def test_a_plain_dag_gets_its_steps_with_its_compensation_dag() -> None:
    with DAG("plain_agents", schedule=None) as dag:
        AgentOperator(task_id="agent", prompt="hi", capabilities=[capability], **ASKS)
    undo = compensation_dag(dag)
    assert is_step(dag.get_task("agent"))
    assert "undo.agent" in undo.task_ids


def test_tools_of_a_mapped_agent_are_known_although_airflow_never_makes_it(known: str) -> None:
    with SagaDAG("mapped_tools", schedule=None):
        SagaAgentOperator.partial(task_id="agent", compensations={known: give_back}, **ASKS).expand(
            prompt=["a", "b"]
        )
    found = registry.find(known, 1)
    assert found is not None
    assert found.compensation is give_back


def test_tools_that_would_differ_by_instance_are_refused() -> None:
    def load() -> None:
        with SagaDAG("expanded_tools", schedule=None):
            SagaAgentOperator.partial(task_id="agent", prompt="hi", **ASKS).expand(compensations=[{}, {}])

    with pytest.raises(ActionDeclarationError, match=r"compensations is the same for all of its instances"):
        load()


DURABLE: dict[str, Any] = {"task_id": "agent", "durable": True, **ASKS}


@pytest.mark.parametrize(
    "make",
    [
        lambda: SagaAgentOperator(prompt="hi", **DURABLE),
        lambda: AgentOperator(prompt="hi", capabilities=[capability], **DURABLE),
        lambda: AgentOperator.partial(capabilities=[capability], **DURABLE).expand(prompt=["a"]),
    ],
    ids=["own", "listed", "mapped"],
)
def test_durable_together_with_a_saga_is_refused_with_the_reason(make: Callable[[], Any]) -> None:
    def load() -> None:
        with SagaDAG("durable", schedule=None):
            make()

    with pytest.raises(ActionDeclarationError, match=r"both replay the agent's steps"):
        load()


def test_a_tool_undone_in_two_ways_is_an_import_error(known: str) -> None:
    with SagaDAG("first_way", schedule=None):
        SagaAgentOperator(task_id="agent", prompt="hi", compensations={known: give_back}, **ASKS)
    with pytest.raises(ActionDeclarationError, match="declared twice"):
        SagaAgentOperator(task_id="b", prompt="hi", compensations={known: give_back_otherwise}, **ASKS)


def test_nothing_in_the_serialised_dag_changes_from_parse_to_parse() -> None:
    """Else Airflow makes a new version of the DAG each time (an address in a repr did that)."""
    with SagaDAG("stable", schedule=None) as dag:
        SagaAgentOperator.partial(task_id="own", compensations=UNDO, **ASKS).expand(prompt=["a"])
        AgentOperator.partial(task_id="theirs", capabilities=[capability], **ASKS).expand(prompt=["a"])
    text = json.dumps(DagSerialization.to_dict(dag), default=str)
    assert "ToolAction(give_back, idempotent)" in text
    assert "SagaCapability(announce v1 NON_COMPENSABLE, borrow v1 COMPENSABLE, peek v1 READ_ONLY" in text
    assert not re.findall(r"0x[0-9a-f]{6,}", text)
