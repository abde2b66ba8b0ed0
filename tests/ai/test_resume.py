"""An agent that is run again: its conversation comes from the log, and the model is asked for what is not there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic_ai import DeferredToolRequests, DeferredToolResults
from pydantic_ai.messages import ModelMessagesTypeAdapter, ModelRequest, ModelResponse, UserPromptPart
from pydantic_ai.usage import UsageLimits

from airflow_saga.ai import SagaCapability, ToolAction, action_key
from airflow_saga.core.actions import READ_ONLY
from airflow_saga.core.errors import SagaDivergedError, StepWaitError
from dags.support import travel
from tests.ai.cast import concierge, find_flights, notify_customer, reserve_hotel, unbook
from tests.runtime.lab import Lab
from tests.support.model import ModelView, calls, says
from tests.support.world import View

THEN = "2026-01-01T00:00:00Z"
LOOKS = calls(("find_flights", {"city": "LIS"}))
BOOKS = calls(("book_flight", {"flight": "LIS-1"}), ("rent_car", {"car": "T"}))
RESERVES = calls(("reserve_hotel", {"hotel": "Ritz"}))


def killed_at_the_next_request(lab: Lab, model: ModelView, turn: int, **agent: Any) -> None:
    """One attempt, stopped by the platform while the model answers that turn."""
    model.tell("hold", after=2, turn=turn)
    asked = model.asked
    made = concierge(model.url, model.model, **agent)
    running = lab.start(lambda _: made.run_sync("to Lisbon").output)
    model.await_chunks(2, after=asked + turn)
    assert lab.last_run is not None
    lab.last_run.request_kill()
    assert running.wait() is not None


def again(lab: Lab, model: ModelView, prompt: str = "to Lisbon", **agent: Any) -> Any:
    made = concierge(model.url, model.model, **agent)
    return lab.step(lambda _: made.run_sync(prompt))


def test_a_resumed_agent_asks_the_model_only_for_what_is_not_in_the_log(
    lab: Lab, model: ModelView, world: View
) -> None:
    model.script(LOOKS, BOOKS, RESERVES, says("bye"))
    killed_at_the_next_request(lab, model, turn=2)
    assert [row["turn"] for row in model.requests] == [0, 1, 2]
    result = again(lab, model).output
    assert result.output == "bye"
    assert [row["turn"] for row in model.requests] == [0, 1, 2, 2, 3]
    assert world.net().kinds == {"flights": 1, "cars": 1, "hotels": 1}
    assert all(key["calls"] == 1 for kind in world.net().keys.values() for key in kind.values())


def test_a_replayed_turn_costs_no_request_and_no_token_of_this_attempt(lab: Lab, model: ModelView) -> None:
    model.script(LOOKS, BOOKS, RESERVES, says("bye"))
    killed_at_the_next_request(lab, model, turn=3)
    made = concierge(model.url, model.model)
    seen: list[Any] = []

    def body(_: Any) -> str:
        result = made.run_sync("to Lisbon", usage_limits=UsageLimits(request_limit=1))
        seen.append(result.usage)
        return result.output

    assert lab.step(body).output == "bye"
    assert seen[0].requests == 1
    assert seen[0].tool_calls == 0
    live = model.requests[-1]["messages"]
    assert seen[0].input_tokens == sum(len(str(m.get("content") or "")) for m in live) // 4 + 1


def test_the_conversation_a_resumed_agent_sends_is_the_one_it_had(lab: Lab, model: ModelView) -> None:
    model.script(LOOKS, BOOKS, says("bye"))
    killed_at_the_next_request(lab, model, turn=2)
    again(lab, model)
    first, second = (row["messages"] for row in model.requests if row["turn"] == 2)
    assert first == second


# -- c65: what has changed since -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"instructions": "Be verbose."}, "the instructions changed"),
        ({"model_settings": {"temperature": 0.9}}, "the model's settings changed"),
        ({"tools": [find_flights, notify_customer, reserve_hotel]}, "the tools changed"),
    ],
)
def test_c65_what_changed_is_named_and_effects_of_the_old_conversation_are_not_built_upon(
    changed: dict[str, Any], word: str, lab: Lab, model: ModelView, world: View
) -> None:
    model.script(LOOKS, BOOKS, RESERVES, says("bye"))
    killed_at_the_next_request(lab, model, turn=2)
    with pytest.raises(SagaDivergedError, match=word):
        again(lab, model, **changed)
    assert model.asked == 3
    assert world.net().kinds == {"flights": 1, "cars": 1}


def test_c65_another_prompt_is_named(lab: Lab, model: ModelView) -> None:
    model.script(LOOKS, BOOKS, says("bye"))
    killed_at_the_next_request(lab, model, turn=2)
    with pytest.raises(SagaDivergedError, match="the prompt changed"):
        again(lab, model, prompt="to Porto")


def test_c65_another_model_is_named(lab: Lab, model: ModelView) -> None:
    model.script(LOOKS, BOOKS, says("bye"))
    killed_at_the_next_request(lab, model, turn=2)
    made = concierge(model.url, "x")
    changed = r"the model has changed: openai:m-\w+ was asked, now it is openai:x"
    with pytest.raises(SagaDivergedError, match=changed):
        lab.step(lambda _: made.run_sync("to Lisbon"))


def test_c65_undo_and_go_on_live_where_the_task_wants_that(lab: Lab, model: ModelView, world: View) -> None:
    model.script(LOOKS, BOOKS, says("bye"))
    killed_at_the_next_request(lab, model, turn=2)
    made = concierge(model.url, model.model, instructions="Be verbose.")
    with pytest.raises(StepWaitError, match="undone first"):
        lab.step(lambda _: made.run_sync("to Lisbon").output, on_divergence="undo")
    request = lab.view().requests[-1]
    lab.carry_out(request.request_uuid)
    assert world.net().total == 0
    assert lab.step(lambda _: made.run_sync("to Lisbon").output, on_divergence="undo").output == "bye"
    assert world.net().total == 2


def test_a_change_before_anything_was_done_is_no_divergence(lab: Lab, model: ModelView) -> None:
    model.script(LOOKS, says("bye"))
    killed_at_the_next_request(lab, model, turn=1)
    assert again(lab, model, prompt="to Porto").output.output == "bye"
    assert [row["turn"] for row in model.requests] == [0, 1, 0, 1]


# -- c57, c67 --------------------------------------------------------------------------------------------------------


def asks_first(amount: int) -> str:
    """Charge an amount; a person has to approve."""
    return str(travel.book("payments", {"amount": amount}, idempotency_key=action_key())["id"])


def _refund(record: Any) -> None:
    travel.cancel("payments", record.result, idempotency_key=record.undo_key)


def test_c57_siblings_of_a_call_that_waits_for_a_person_are_not_made_again(
    lab: Lab, model: ModelView, world: View
) -> None:
    from pydantic_ai import Tool

    capability = SagaCapability({"asks_first": ToolAction(_refund), "reserve_hotel": ToolAction(unbook)})
    agent = concierge(
        model.url,
        model.model,
        capability,
        tools=[reserve_hotel, Tool(asks_first, requires_approval=True)],
        output_type=[str, DeferredToolRequests],
    )
    model.script(
        calls(
            ("reserve_hotel", {"hotel": "a"}),
            ("asks_first", {"amount": 5}),
            ("reserve_hotel", {"hotel": "b"}),
        ),
        says("bye"),
    )

    class Paused(Exception):
        pass

    kept: list[bytes] = []

    def pauses(handle: Any) -> None:
        result = agent.run_sync("to Lisbon")
        assert isinstance(result.output, DeferredToolRequests)
        kept.append(result.all_messages_json())
        handle.checkpoint("paused")
        raise Paused

    lab.fails(pauses, Paused)
    assert world.net().kinds == {"hotels": 2}

    def goes_on(handle: Any) -> Any:
        handle.resume_from()
        history = ModelMessagesTypeAdapter.validate_json(kept[0])
        waiting = next(
            part
            for message in history
            if isinstance(message, ModelResponse)
            for part in message.tool_calls
            if part.tool_name == "asks_first"
        )
        approved = DeferredToolResults(approvals={waiting.tool_call_id: True})
        return agent.run_sync(message_history=history, deferred_tool_results=approved).output

    assert lab.step(goes_on, try_number=2).output == "bye"
    assert world.net().kinds == {"hotels": 2, "payments": 1}
    assert all(key["calls"] == 1 for kind in world.net().keys.values() for key in kind.values())
    lab.undo()
    assert world.net().total == 0


def pay_in(amount: int) -> str:
    """Charge an amount."""
    return str(travel.book("payments", {"amount": amount}, idempotency_key=action_key())["id"])


def _find_payment(record: Any) -> Any:
    from airflow_saga.core.records import Applied, NotApplied

    found = travel.find_payment(record.key)
    return NotApplied() if found is None else Applied(found["id"])


def test_c67_a_lost_answer_is_found_under_its_key_and_a_call_made_on_purpose_has_another(
    lab: Lab, model: ModelView, world: View
) -> None:
    capability = SagaCapability({"pay_in": ToolAction(_refund, verify=_find_payment)})
    world.tell("apply_and_drop", "payments", times=1)
    model.script(
        calls(("pay_in", {"amount": 10})),
        says("and now?"),
        then=[[calls(("pay_in", {"amount": 10})), says("bye")]],
    )
    agent = concierge(model.url, model.model, capability, tools=[pay_in])

    def body(_: Any) -> str:
        first = agent.run_sync("pay")
        return agent.run_sync("again", message_history=first.all_messages()).output

    assert lab.step(body).output == "bye"
    assert world.net().of("payments") == 2
    assert len({row.key for row in lab.actions() if row.name == "pay_in"}) == 2


def test_an_id_that_the_provider_gives_a_call_anew_changes_nothing(
    lab: Lab, model: ModelView, world: View
) -> None:
    """The answer of the turn was not flushed, so the model is asked again and gives its calls other ids."""
    model.script(BOOKS, says("bye"))
    killed_at_the_next_request(lab, model, turn=0)
    assert again(lab, model).output.output == "bye"
    ids = [m["tool_call_id"] for m in model.requests[-1]["messages"] if m["role"] == "tool"]
    assert ids == ["call_1_0", "call_1_1"] or len(set(ids)) == 2
    assert world.net().total == 2


# -- c55: histories that were torn apart -----------------------------------------------------------------------------


def told(*messages: dict[str, Any]) -> list[Any]:
    """A history as it was kept somewhere."""
    return ModelMessagesTypeAdapter.validate_json(json.dumps(messages))


def user(text: str) -> dict[str, Any]:
    return {"kind": "request", "parts": [{"part_kind": "user-prompt", "content": text, "timestamp": THEN}]}


def answer(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "response", "parts": list(parts), "timestamp": THEN}


def call(name: str, args: dict[str, Any], id: str) -> dict[str, Any]:
    return {"part_kind": "tool-call", "tool_name": name, "args": args, "tool_call_id": id}


def result(name: str, content: Any, id: str) -> dict[str, Any]:
    part = {"part_kind": "tool-return", "tool_name": name, "content": content, "tool_call_id": id}
    return {"kind": "request", "parts": [{**part, "timestamp": THEN}]}


ASKED = call("find_flights", {"city": "LIS"}, "a")
ORPHANS = {
    "at the end": [user("hi"), answer(ASKED)],
    "in the middle": [user("hi"), answer(ASKED), user("so?"), answer({"part_kind": "text", "content": "well"})],
    "one of three": [
        user("hi"),
        answer(ASKED, call("find_flights", {"city": "OPO"}, "b"), call("find_flights", {"city": "FAO"}, "c")),
        {
            "kind": "request",
            "parts": [*result("find_flights", ["x"], "a")["parts"], *result("find_flights", ["z"], "c")["parts"]],
        },
    ],
    "a result without its call": [user("hi"), result("find_flights", ["x"], "gone"), user("still there?")],
}  # fmt: skip


@pytest.mark.parametrize("torn", ORPHANS)
def test_c55_a_torn_history_is_sent_whole(torn: str, lab: Lab, model: ModelView) -> None:
    model.script(says("fine"), then=[[says("fine")]] * 5)
    agent = concierge(model.url, model.model, SagaCapability({"find_flights": READ_ONLY}))
    history = told(*ORPHANS[torn])
    before = len(history)
    assert lab.step(lambda _: agent.run_sync("go on", message_history=history).output).output == "fine"
    assert [row["status"] for row in model.requests] == [200]
    assert len(history) == before
    sent = model.requests[0]["messages"]
    interrupted = [m for m in sent if m["role"] == "tool" and "nobody knows" in m["content"]]
    assert len(interrupted) == (0 if torn == "a result without its call" else 1)


def test_c55_a_result_that_the_log_has_takes_the_place_of_the_lost_one(
    lab: Lab, model: ModelView, world: View
) -> None:
    model.script(BOOKS, says("bye"), then=[[says("fine")]] * 3)
    killed_at_the_next_request(lab, model, turn=1)
    agent = concierge(model.url, model.model)
    torn = told(user("to Lisbon"), answer(call("book_flight", {"flight": "LIS-1"}, "q")))

    def body(handle: Any) -> str:
        agent.run_sync("to Lisbon")
        return agent.run_sync("go on", message_history=torn).output

    assert lab.step(body, try_number=2).output == "fine"
    tool = next(m for m in model.requests[-1]["messages"] if m["role"] == "tool")
    assert "flights-" in tool["content"]
    assert world.net().of("flights") == 1


def test_only_the_last_rounds_of_a_long_conversation_are_sent(lab: Lab, model: ModelView) -> None:
    capability = SagaCapability({"find_flights": READ_ONLY}, keep_rounds=2)
    model.script(says("fine"), then=[[LOOKS, says("fine")]] * 9)
    agent = concierge(model.url, model.model, capability, system_prompt="You are a concierge.")

    def body(_: Any) -> int:
        history: list[Any] = []
        for number in range(6):
            history = agent.run_sync(f"round {number}", message_history=history).all_messages()
        return sum(isinstance(m, ModelRequest) and isinstance(m.parts[0], UserPromptPart) for m in history)

    lab.step(body)
    sent = model.requests[-1]["messages"]
    assert [m["content"] for m in sent if m["role"] == "user"] == ["round 4", "round 5"]
    assert sum(m["content"] == "You are a concierge." for m in sent) == 1
    assert all(row["status"] == 200 for row in model.requests)
