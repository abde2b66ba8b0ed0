"""What an agent does, as the log sees it: every request, every tool, whatever toolset it came from."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelRetry, ToolFailed
from pydantic_ai.toolsets import FunctionToolset

from airflow_saga.ai import SagaCapability, ToolAction, action_key
from airflow_saga.core.actions import NON_COMPENSABLE, READ_ONLY
from airflow_saga.core.errors import (
    ActionDeclarationError,
    InDoubtError,
    NotInSagaError,
    NotRegisteredError,
    SagaCancelledError,
    UndeclaredToolError,
    in_doubt_by,
)
from dags.support import travel
from tests.ai.cast import TIMEOUT, concierge, open_model, saga, unbook, until
from tests.runtime.lab import Lab
from tests.support.model import ModelView, calls, says
from tests.support.world import View

BATCH = calls(
    ("book_flight", {"flight": "LIS-1"}), ("reserve_hotel", {"hotel": "Ritz"}), ("rent_car", {"car": "T"})
)


def step(lab: Lab, model: ModelView, capability: SagaCapability = saga, **more: Any) -> Any:
    agent = concierge(model.url, model.model, capability, **more)
    return lab.step(lambda _: agent.run_sync("to Lisbon").output)


def names(lab: Lab) -> list[str]:
    return [name for name, _ in lab.states()]


# -- what is recorded ------------------------------------------------------------------------------------------------


def test_every_request_and_every_tool_is_an_action_and_is_undone_in_reverse(
    lab: Lab, model: ModelView, world: View
) -> None:
    model.script(calls(("find_flights", {"city": "LIS"})), BATCH, says("bye"))
    assert step(lab, model).output == "bye"
    assert names(lab) == [
        "model_request",
        "find_flights",
        "model_request",
        "book_flight",
        "reserve_hotel",
        "rent_car",
        "model_request",
    ]
    row = lab.actions()[3]
    assert row.params == '{"flight":"LIS-1"}'
    assert (row.result or "").startswith('{"what":"LIS-1","id":"flights-')
    assert world.net().total == 3
    lab.undo()
    assert world.net().total == 0
    assert lab.undone_kinds() == ["cars", "hotels", "flights"]


def test_what_cannot_be_undone_is_named_and_the_rest_is_undone(
    lab: Lab, model: ModelView, world: View
) -> None:
    model.script(BATCH, calls(("notify_customer", {"text": "booked"})), says("bye"))
    step(lab, model)
    settled = lab.undo()
    assert [row.name for row in settled.residual] == ["notify_customer"]
    assert world.net().kinds == {"flights": 0, "hotels": 0, "cars": 0, "messages": 1}


def test_tools_of_one_answer_run_side_by_side(lab: Lab, model: ModelView, world: View) -> None:
    model.script(BATCH, says("bye"))
    world.tell("delay", "*", seconds=0.4)
    began = time.monotonic()
    step(lab, model)
    assert time.monotonic() - began < 1.1
    assert [row.parallel for row in lab.actions()] == [False, True, True, True, False]


async def _book_by_class(self: Any, flight: str) -> dict[str, Any]:
    return travel.book("flights", {"what": flight}, idempotency_key=action_key())


def test_tools_of_a_wrapped_and_prefixed_toolset_are_seen_by_the_name_the_model_uses(
    lab: Lab, model: ModelView, world: View
) -> None:
    toolset: FunctionToolset[Any] = FunctionToolset()

    def book(flight: str) -> dict[str, Any]:
        return travel.book("flights", {"what": flight}, idempotency_key=action_key())

    toolset.add_function(book)
    capability = SagaCapability({"air_book": ToolAction(_unbook_flight)})
    model.script(calls(("air_book", {"flight": "x"})), says("bye"))
    step(lab, model, capability, tools=[], toolsets=[toolset.prefixed("air").filtered(lambda *_: True)])
    assert names(lab) == ["model_request", "air_book", "model_request"]
    lab.undo()
    assert world.net().total == 0


def _unbook_flight(record: Any) -> None:
    travel.cancel("flights", record.result["id"], idempotency_key=record.undo_key)


class Trip(BaseModel):
    city: str


def book_trip_output(trip: Trip) -> str:
    """Book what the model decided on."""
    return str(travel.book("flights", {"what": trip.city}, idempotency_key=action_key())["id"])


def test_a_function_that_makes_the_output_is_an_action(lab: Lab, model: ModelView, world: View) -> None:
    capability = SagaCapability({"book_trip_output": ToolAction(_unbook_output)})
    model.script(calls(("final_result", {"city": "LIS"})))
    assert step(lab, model, capability, tools=[], output_type=book_trip_output).output.startswith("flights-")
    assert names(lab) == ["model_request", "book_trip_output"]
    lab.undo()
    assert world.net().total == 0


def _unbook_output(record: Any) -> None:
    travel.cancel("flights", record.result, idempotency_key=record.undo_key)


def test_an_undeclared_output_function_is_refused_before_it_runs(
    lab: Lab, model: ModelView, world: View
) -> None:
    model.script(calls(("final_result", {"city": "LIS"})))
    with pytest.raises(UndeclaredToolError, match="book_trip_output"):
        step(lab, model, SagaCapability({}), tools=[], output_type=book_trip_output)
    assert world.net().total == 0


# -- what is refused -------------------------------------------------------------------------------------------------


def test_an_undeclared_tool_is_refused_before_it_runs(lab: Lab, model: ModelView, world: View) -> None:
    def wire_money(amount: int) -> str:
        travel.book("payments", {"amount": amount})
        return "wired"

    model.script(calls(("wire_money", {"amount": 5})), says("bye"))
    with pytest.raises(UndeclaredToolError, match="wire_money, and nobody said how to undo it"):
        step(lab, model, tools=[wire_money])
    assert world.net().total == 0
    assert names(lab) == ["model_request"]


def test_an_agent_outside_a_saga_step_calls_neither_model_nor_tool(model: ModelView, world: View) -> None:
    model.script(BATCH)
    with pytest.raises(NotInSagaError):
        concierge(model.url, model.model).run_sync("to Lisbon")
    assert model.asked == 0
    assert world.net().total == 0


def test_a_capability_made_in_the_body_is_refused_since_no_undo_would_find_it(
    lab: Lab, model: ModelView, world: View
) -> None:
    model.script(BATCH)

    def body(_: Any) -> None:
        late = SagaCapability({"late_tool": READ_ONLY})
        concierge(model.url, model.model, late).run_sync("to Lisbon")

    lab.fails(body, NotRegisteredError)
    assert model.asked == 0


def test_a_durable_agent_with_the_capability_is_refused_with_the_reason(model: ModelView) -> None:
    from airflow.providers.common.ai.durable import AirflowDurability

    with pytest.raises(ActionDeclarationError, match=r"Leave out durable=True"):
        Agent(open_model(model.url, model.model), name="a", capabilities=[saga, AirflowDurability(name="a")])


def test_its_repr_is_the_same_in_every_process() -> None:
    assert repr(saga) == (
        "SagaCapability(book_flight v1 COMPENSABLE, find_flights v1 READ_ONLY, notify_customer v1 "
        "NON_COMPENSABLE, rent_car v1 COMPENSABLE, reserve_hotel v1 COMPENSABLE; undeclared=refuse)"
    )


@pytest.mark.parametrize("wrong", [None, 3, "cancel_booking"])
def test_a_tool_with_no_undo_is_an_error_at_import(wrong: Any) -> None:
    with pytest.raises(ActionDeclarationError, match="'wire'"):
        SagaCapability({"wire": wrong})


def test_two_agents_may_declare_a_tool_alike_and_not_otherwise() -> None:
    SagaCapability({"book_flight": ToolAction(unbook)})
    with pytest.raises(ActionDeclarationError, match="declared twice"):
        SagaCapability({"book_flight": NON_COMPENSABLE})


# -- what a tool says ------------------------------------------------------------------------------------------------


def test_the_model_is_told_what_did_not_take_effect_and_goes_on(
    lab: Lab, model: ModelView, world: View
) -> None:
    world.tell("refuse", "flights")
    model.script(calls(("book_flight", {"flight": "full"})), says("no seat"))
    assert step(lab, model).output == "no seat"
    told = model.requests[1]["messages"][-1]["content"]
    assert "nothing has changed" in told
    assert lab.states()[1] == ("book_flight", "FAILED")


def asks_again(city: str) -> list[str]:
    """Find flights."""
    raise ModelRetry(f"no city is called {city}")


def test_a_reading_tool_may_ask_the_model_to_try_again(lab: Lab, model: ModelView) -> None:
    capability = SagaCapability({"asks_again": READ_ONLY})
    model.script(calls(("asks_again", {"city": "?"})), says("sorry"))
    assert step(lab, model, capability, tools=[asks_again]).output == "sorry"
    assert "no city is called ?" in model.requests[1]["messages"][-1]["content"]
    assert lab.states()[1] == ("asks_again", "DONE")


def charges_then_asks(amount: int) -> str:
    """Charge an amount."""
    travel.book("payments", {"amount": amount}, idempotency_key=action_key())
    raise ModelRetry("the receipt could not be read")


def test_a_tool_that_may_have_acted_before_it_spoke_to_the_model_stops_the_agent(
    lab: Lab, model: ModelView, world: View
) -> None:
    capability = SagaCapability({"charges_then_asks": ToolAction(_refund, compensate_in_doubt=True)})
    model.script(calls(("charges_then_asks", {"amount": 5})), says("never"))
    with pytest.raises(InDoubtError, match="nobody knows whether charges_then_asks"):
        step(lab, model, capability, tools=[charges_then_asks])
    assert model.asked == 1
    assert lab.states()[1] == ("charges_then_asks", "IN_DOUBT")
    lab.undo()
    assert world.net().total == 0


def _refund(record: Any) -> None:
    travel.cancel("payments", None, idempotency_key=record.undo_key, booked_under=record.key)


def refuses_first(amount: int) -> str:
    """Charge an amount."""
    if amount > 10:
        raise ToolFailed("more than ten is not allowed")
    return str(travel.book("payments", {"amount": amount}, idempotency_key=action_key())["id"])


def test_a_tool_may_declare_by_what_it_refuses_before_it_acts(lab: Lab, model: ModelView) -> None:
    capability = SagaCapability({"refuses_first": ToolAction(_refund, refuses_with=[ToolFailed])})
    model.script(
        calls(("refuses_first", {"amount": 50})), calls(("refuses_first", {"amount": 5})), says("ok")
    )
    assert step(lab, model, capability, tools=[refuses_first]).output == "ok"
    assert [state for name, state in lab.states() if name == "refuses_first"] == ["FAILED", "DONE"]


def breaks(amount: int) -> str:
    """Charge an amount."""
    raise ConnectionError("the line broke")


def test_a_tool_that_breaks_is_in_doubt_and_ends_the_step(lab: Lab, model: ModelView) -> None:
    capability = SagaCapability({"breaks": ToolAction(_refund)})
    model.script(calls(("breaks", {"amount": 5})), says("never"))
    with pytest.raises(ConnectionError) as caught:
        step(lab, model, capability, tools=[breaks])
    assert in_doubt_by(caught.value) is not None
    assert lab.states()[1] == ("breaks", "IN_DOUBT")


# -- stops in a batch ------------------------------------------------------------------------------------------------


def test_a_cancel_in_a_batch_lets_what_has_begun_end_and_leaves_none_running(
    lab: Lab, model: ModelView, world: View
) -> None:
    model.script(BATCH, says("never"))
    world.tell("hold", "flights")
    world.tell("hold", "hotels")
    world.tell("hold", "cars")
    agent = concierge(model.url, model.model)
    running = lab.start(lambda _: agent.run_sync("to Lisbon").output)
    world.await_received("flights", 1)
    world.await_received("hotels", 1)
    lab.cancel()
    time.sleep(0.3)
    assert not running.over
    world.release()
    assert isinstance(running.wait(), SagaCancelledError)
    assert model.asked == 1
    begun = {name: state for name, state in lab.states() if name != "model_request"}
    assert set(begun.values()) == {"DONE"}
    lab.undo()
    assert world.net().total == 0


def test_one_of_a_batch_that_breaks_does_not_cut_the_others_short(
    lab: Lab, model: ModelView, world: View
) -> None:
    capability = SagaCapability(
        {"breaks": ToolAction(_refund), "reserve_hotel": ToolAction(unbook, timeout=TIMEOUT)}
    )
    world.tell("delay", "hotels", seconds=0.5)
    model.script(calls(("reserve_hotel", {"hotel": "Ritz"}), ("breaks", {"amount": 1})), says("never"))
    from tests.ai.cast import reserve_hotel

    with pytest.raises(ConnectionError):
        step(lab, model, capability, tools=[breaks, reserve_hotel])
    assert dict(lab.states()) == {"model_request": "DONE", "reserve_hotel": "DONE", "breaks": "IN_DOUBT"}


def sleeps_then_books(flight: str) -> dict[str, Any]:
    """Book, slowly, in a thread that nothing can cut short."""
    time.sleep(1.3)
    return travel.book("flights", {"what": flight}, idempotency_key=action_key())


def test_the_late_answer_of_a_thread_that_cannot_be_interrupted_is_caught_and_undone(
    lab: Lab, model: ModelView, world: View
) -> None:
    capability = SagaCapability({"sleeps_then_books": ToolAction(_unbook_flight, timeout=TIMEOUT / 3)})
    model.script(calls(("sleeps_then_books", {"flight": "x"})), says("it went well"))
    assert step(lab, model, capability, tools=[sleeps_then_books]).output == "it went well"
    assert lab.states()[1] == ("sleeps_then_books", "DONE")
    assert "late" in str(lab.view().events) or "DOUBT" in str(lab.view().events)
    lab.undo()
    assert world.net().total == 0
    assert lab.states()[1] == ("sleeps_then_books", "COMPENSATED")


def test_tools_that_block_run_in_threads_and_do_not_hold_each_other_up(lab: Lab, model: ModelView) -> None:
    barrier = threading.Barrier(3, timeout=5)

    def meets(name: str) -> str:
        """Meet the others."""
        barrier.wait()
        return name

    capability = SagaCapability({"meets": READ_ONLY})
    model.script(calls(*[("meets", {"name": n}) for n in "abc"]), says("met"))
    assert step(lab, model, capability, tools=[meets]).output == "met"


def test_an_agent_in_an_async_body_is_recorded_the_same(lab: Lab, model: ModelView, world: View) -> None:
    model.script(BATCH, says("bye"))
    agent = concierge(model.url, model.model)
    lab.step(lambda _: asyncio.run(_output(agent)))
    assert world.net().total == 3
    until(lambda: lab.step_state() == "SUCCEEDED")


async def _output(agent: Agent[None, str]) -> str:
    return (await agent.run("to Lisbon")).output
