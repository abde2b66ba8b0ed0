"""An agent in a loop: what recording its model requests and tool calls costs, and whether that grows.

The model is pydantic-ai's own for tests, so that nothing of a network is measured. A turn is one request and one tool
call; the same agent runs without the capability, and with the official provider's durable mode (its journal in a file,
as it works outside of Airflow).
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from airflow.providers.common.ai.durable import AirflowDurability
from airflow.providers.common.ai.durable.journal import DurableJournal, journal_scope
from airflow.providers.common.ai.durable.storage import DurableStorage
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.toolsets import FunctionToolset
from pydantic_ai.usage import UsageLimits

from airflow_saga.ai import SagaCapability
from airflow_saga.core.records import ActionRecord
from airflow_saga.store.connect import Address
from tests.bench.ground import run_step
from tests.bench.report import Report, p50_ms

ROUNDS = 6
TURNS = 50
LONG = 1000
UNLIMITED = UsageLimits(request_limit=None)


def give_back(record: ActionRecord) -> None:
    return None


saga = SagaCapability({"take": give_back})


class Loop:
    """An agent that calls one tool a number of times, and the seconds from each call to the next."""

    def __init__(self, turns: int, *capabilities: Any) -> None:
        self.turns = turns
        self.began: list[float] = []
        model = FunctionModel(self._answer, stream_function=self._stream)
        toolset: FunctionToolset[Any] = FunctionToolset(id="things")
        toolset.add_function(self.take)
        self.agent: Agent[None, str] = Agent(
            model, name="loop", capabilities=list(capabilities), toolsets=[toolset]
        )

    async def take(self, number: int) -> str:
        self.began.append(time.perf_counter())
        return f"took {number}"

    def _answer(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        done = len(self.began)
        if done == self.turns:
            return ModelResponse(parts=[TextPart("done")])
        return ModelResponse(parts=[ToolCallPart("take", {"number": done})])

    async def _stream(self, messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        done = len(self.began)
        if done == self.turns:
            yield "done"
        else:
            yield {0: DeltaToolCall("take", json.dumps({"number": done}), tool_call_id=f"pyd_ai_call_{done}")}

    def run(self) -> list[float]:
        self.agent.run_sync("go", usage_limits=UNLIMITED)
        return [after - before for before, after in zip(self.began, self.began[1:], strict=False)]


def agent_tool_call(address: Address, report: Report) -> None:
    """A turn of the same agent, bare, recorded and durable, in rounds that alternate."""
    bare, recorded, durable = [], [], []
    for number in range(ROUNDS):
        bare += Loop(TURNS).run()
        recorded += _recorded(address, f"agent {number}", TURNS)
        with _journal(number):
            durable += Loop(TURNS, AirflowDurability(name="loop")).run()
    added = p50_ms(recorded) - p50_ms(bare)
    peer = p50_ms(durable) - p50_ms(bare)
    report.line(
        "agent_tool_call",
        p50_ms=p50_ms(recorded),
        added_ms=added,
        bare_p50_ms=p50_ms(bare),
        durable_added_ms=peer,
        durable_ratio=peer / added,
        count=len(recorded),
        limits={"added_ms": ("<=", 1.0)},
    )


def agent_1000(address: Address, report: Report) -> None:
    """Whether what the 1,000th tool call of a conversation adds is what the 100th does."""
    bare = Loop(LONG).run()
    recorded = _recorded(address, "agent long", LONG)
    early = p50_ms(recorded[50:150]) - p50_ms(bare[50:150])
    late = p50_ms(recorded[-100:]) - p50_ms(bare[-100:])
    report.line(
        "agent_1000",
        early_added_ms=early,
        late_added_ms=late,
        late_bare_ms=p50_ms(bare[-100:]),
        count=len(recorded),
        limits={"late_added_ms": ("<=", 1.0)},
    )


def _recorded(address: Address, run_id: str, turns: int) -> list[float]:
    taken: list[float] = []
    run_step(address, run_id, lambda _: taken.extend(Loop(turns, saga).run()))
    return taken


@contextmanager
def _journal(number: int) -> Iterator[None]:
    """The provider's journal, in a file of its own."""
    with tempfile.TemporaryDirectory(prefix="saga-bench-") as directory:
        os.environ["AIRFLOW__COMMON_AI__DURABLE_CACHE_PATH"] = f"file://{directory}"
        storage = DurableStorage(dag_id="bench", task_id="agent", run_id=str(number))
        with journal_scope(DurableJournal(storage)):
            yield
