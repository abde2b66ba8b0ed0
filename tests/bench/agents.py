"""An agent in a loop: what recording its model requests and tool calls costs, and whether that grows.

The model is pydantic-ai's own for tests, so that nothing of a network is measured. A turn is one request and one tool
call; the same agent runs without the capability, and with the official provider's durable mode (its journal in a file,
as it works outside of Airflow).
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from airflow.providers.common.ai.durable import AirflowDurability
from airflow.providers.common.ai.durable.journal import DurableJournal, journal_scope
from airflow.providers.common.ai.durable.storage import DurableStorage
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.toolsets import FunctionToolset
from pydantic_ai.usage import UsageLimits

from airflow_saga.ai import SagaCapability
from airflow_saga.core.errors import SagaCancelledError
from airflow_saga.core.records import ActionRecord
from airflow_saga.store.connect import Address
from airflow_saga.store.requests import RequestVerbs
from tests.bench.ground import run_step
from tests.bench.report import Report, p50_ms, p99_ms
from tests.support.model import ModelView, running_model

ROUNDS = 6
TURNS = 50
LONG = 1000
CANCELS = 100
UNLIMITED = UsageLimits(request_limit=None)


def give_back(record: ActionRecord) -> None:
    return None


saga = SagaCapability({"take": give_back})


class Loop:
    """An agent that calls one tool a number of times, and the seconds from each call to the next.

    :param at_once: how many calls one answer of the model asks for; they are made one after the other.
    """

    def __init__(self, turns: int, *capabilities: Any, at_once: int = 1) -> None:
        self.turns = turns
        self.at_once = at_once
        self.began: list[float] = []
        model = FunctionModel(self._answer, stream_function=self._stream)
        toolset: FunctionToolset[Any] = FunctionToolset(id="things")
        toolset.add_function(self.take, sequential=True)
        self.agent: Agent[None, str] = Agent(
            model, name="loop", capabilities=list(capabilities), toolsets=[toolset]
        )

    async def take(self, number: int) -> str:
        self.began.append(time.perf_counter())
        return f"took {number}"

    def _answer(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        if len(self.began) == self.turns:
            return ModelResponse(parts=[TextPart("done")])
        return ModelResponse(parts=[ToolCallPart("take", {"number": number}) for number in self._next()])

    async def _stream(self, messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        if len(self.began) == self.turns:
            yield "done"
            return
        for place, number in enumerate(self._next()):
            call = DeltaToolCall("take", json.dumps({"number": number}), tool_call_id=f"call_{number}")
            yield {place: call}

    def _next(self) -> range:
        return range(len(self.began), len(self.began) + self.at_once)

    def run(self) -> list[float]:
        self.agent.run_sync("go", usage_limits=UNLIMITED)
        return [after - before for before, after in zip(self.began, self.began[1:], strict=False)]


def agent_tool_call(address: Address, report: Report) -> None:
    """One tool call after the other, asked for by one answer of the model: what recording one adds."""
    bare, recorded = [], []
    for number in range(ROUNDS):
        bare += Loop(TURNS, at_once=TURNS).run()
        recorded += _recorded(address, f"calls {number}", TURNS, at_once=TURNS)
    report.line(
        "agent_tool_call",
        p50_ms=p50_ms(recorded),
        added_ms=p50_ms(recorded) - p50_ms(bare),
        bare_p50_ms=p50_ms(bare),
        count=len(recorded),
        limits={"added_ms": ("<=", 1.0)},
    )


def agent_turn(address: Address, report: Report) -> None:
    """A request to the model and a tool call, of the same agent bare, recorded and durable, in alternating rounds."""
    bare, recorded, durable = [], [], []
    for number in range(ROUNDS):
        bare += Loop(TURNS).run()
        recorded += _recorded(address, f"turns {number}", TURNS)
        with _journal(number):
            durable += Loop(TURNS, AirflowDurability(name="loop")).run()
    added, peer = p50_ms(recorded) - p50_ms(bare), p50_ms(durable) - p50_ms(bare)
    report.line(
        "agent_turn",
        p50_ms=p50_ms(recorded),
        added_ms=added,
        bare_p50_ms=p50_ms(bare),
        durable_added_ms=peer,
        durable_ratio=peer / added,
        count=len(recorded),
        limits={"durable_ratio": (">=", 1.0)},
    )


def agent_1000(address: Address, report: Report) -> None:
    """Whether the 1,000th turn of a conversation adds what the 100th does."""
    bare = Loop(LONG).run()
    recorded = _recorded(address, "agent long", LONG)
    early = p50_ms(recorded[50:150]) - p50_ms(bare[50:150])
    late = p50_ms(recorded[-100:]) - p50_ms(bare[-100:])
    report.line(
        "agent_1000",
        early_added_ms=early,
        late_added_ms=late,
        ratio=late / early,
        late_bare_ms=p50_ms(bare[-100:]),
        count=len(recorded),
        limits={"ratio": ("<=", 1.2)},
    )


def _recorded(address: Address, run_id: str, turns: int, at_once: int = 1) -> list[float]:
    taken: list[float] = []
    run_step(address, run_id, lambda _: taken.extend(Loop(turns, saga, at_once=at_once).run()))
    return taken


@contextmanager
def _journal(number: int) -> Iterator[None]:
    """The provider's journal, in a file of its own."""
    with tempfile.TemporaryDirectory(prefix="saga-bench-") as directory:
        os.environ["AIRFLOW__COMMON_AI__DURABLE_CACHE_PATH"] = f"file://{directory}"
        storage = DurableStorage(dag_id="bench", task_id="agent", run_id=str(number))
        with journal_scope(DurableJournal(storage)):
            yield


def agent_cancel(address: Address, report: Report) -> None:
    """A cancel in the middle of a model's sentence, until the model's server sees that its client has left."""
    taken = []
    with running_model() as url:
        model = ModelView(url, "talker")
        model.script({"text": "And so on. " * 200}, chunk_seconds=0.002)
        provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
        agent = Agent(OpenAIChatModel("talker", provider=provider), name="talker", capabilities=[saga])
        connection = address.open()
        for number in range(CANCELS):
            talk = threading.Thread(target=_talk, args=(address, f"talk {number}", agent), daemon=True)
            talk.start()
            model.await_chunks(5, after=number)
            asked = time.time()
            RequestVerbs(connection).cancel("bench", f"talk {number}", actor="bench")
            talk.join(20)
            taken.append(model.left_at(number) - asked)
        connection.close()
    report.line(
        "agent_cancel",
        p50_ms=p50_ms(taken),
        p99_ms=p99_ms(taken),
        count=len(taken),
        limits={"p99_ms": ("<=", 300)},
    )


def _talk(address: Address, run_id: str, agent: Agent[None, str]) -> None:
    with suppress(SagaCancelledError):
        run_step(address, run_id, lambda _: agent.run_sync("talk").output)
